"""Data sets as files: found, decoded once, and refused with the file and the row where they are damaged."""

from __future__ import annotations

import os
import shutil
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
import torch

import sets
from command import fadamgc
from fadamgc import cache
from fadamgc.data import digits, har, images
from fadamgc.data.check import check
from fadamgc.data.sources import SOURCES, data_root, files_of, get, source
from fadamgc.errors import InputError
from fadamgc.models import ImageInput
from fadamgc.tasks.build import build_task, label_counts
from fadamgc.tasks.sections import task_spec

pytestmark = pytest.mark.usefixtures("folders")


# Folders and files


def test_the_data_root_is_from_the_variable_then_the_config_then_the_cache(tmp_path, monkeypatch):
    assert data_root() == tmp_path / "data"
    monkeypatch.delenv("FADAMGC_DATA")
    assert data_root() == tmp_path / "cache" / "data"
    config = tmp_path / "config" / "fadamgc" / "config.toml"
    config.parent.mkdir(parents=True)
    config.write_text('data_root = "/some/where"')
    assert str(data_root()) == "/some/where"
    for text in ("data_root = 3", "data_root"):
        config.write_text(text)
        with pytest.raises(InputError, match=r"config\.toml"):
            data_root()


def test_the_error_for_a_missing_data_set_says_how_to_get_it(folders):
    with pytest.raises(InputError) as error:
        images.load("cifar10", "train")
    for word in ("cifar10", str(folders / "cifar10"), "huggingface.co/datasets/uoft-cs/cifar10", "parquet"):
        assert word in str(error.value)
    with pytest.raises(InputError, match=r"har\.npz"):
        har.load()
    with pytest.raises(InputError, match="data='cifar11' is not known; did you mean 'cifar10'"):
        source("cifar11")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("y", lambda a: a.astype("U5"), "'y' is of <U5; it must be of integers"),
        ("subject", lambda a: a.astype("S5"), r"'subject' is of \|S5; it must be of integers"),
        ("x", lambda a: a.astype("U5"), "'x' is of <U5; it must be of numbers"),
        ("x", lambda a: a * np.nan, "'x' has numbers that are not finite"),
        ("y", lambda a: a[0], r"'y' has shape \(\); it must be \(n\), n as of 'x'"),
    ],
)
def test_signals_of_another_kind_are_refused(folders, name, change, message):
    path = sets.har(folders, each=2) / "uci_har" / "har.npz"
    with np.load(path) as file:
        arrays = dict(file)
    np.savez(path, **(arrays | {name: change(arrays[name])}))
    with pytest.raises(InputError, match=message):
        har.load()


def test_signals_in_an_unknown_compression_are_refused(folders):
    path = sets.har(folders, each=2) / "uci_har" / "har.npz"
    content = bytearray(path.read_bytes())
    for mark, at in ((b"PK\x03\x04", 8), (b"PK\x01\x02", 10)):
        content[content.find(mark) + at] = 99
    path.write_bytes(content)
    with pytest.raises(InputError, match=r"har\.npz: damaged \(.*compression.*\); download it again"):
        har.load()


@pytest.mark.parametrize("below", ["", "data", "plain_text"])
def test_files_are_found_in_the_folder_and_in_the_subfolders_of_the_hub(folders, below):
    sets.cifar10(folders)
    folder = folders / "cifar10"
    if below:
        (folder / below).mkdir()
        for file in folder.glob("*.parquet"):
            shutil.move(file, folder / below)
    assert len(images.load("cifar10", "train").y) == 60


def test_several_files_are_one_part_and_none_may_be_missing(folders):
    pixels = sets.images(6, 32)
    for i in range(3):
        rows = slice(2 * i, 2 * i + 2)
        name = f"train-{i:05d}-of-00003.parquet"
        sets.write_images(folders / "cifar10" / name, pixels[rows], [0, 1])
    assert np.array_equal(images.load("cifar10", "train").x, pixels.transpose(0, 3, 1, 2))
    (folders / "cifar10" / "train-00001-of-00003.parquet").unlink()
    with pytest.raises(InputError, match="train-00001-of-00003.parquet is missing"):
        files_of(source("cifar10"), "train")


# Images


def test_images_are_decoded_once_and_read_from_disk_afterwards(folders, monkeypatch):
    sets.cifar10(folders)
    first = images.load("cifar10", "train")
    monkeypatch.setattr(images, "_decode", lambda *_: pytest.fail("decoded again"))
    again = images.load("cifar10", "train")
    assert np.array_equal(first.x, again.x)
    assert np.array_equal(again.y, np.arange(60) % 10)
    assert isinstance(again.x, np.memmap)
    monkeypatch.undo()


def test_changed_files_are_decoded_again(folders):
    sets.cifar10(folders)
    images.load("cifar10", "train")
    sets.cifar10(folders, train=30)
    assert len(images.load("cifar10", "train").y) == 30


def test_a_damaged_cache_is_replaced_and_one_that_cannot_be_written_is_not_used(
    folders, tmp_path, monkeypatch
):
    sets.cifar10(folders)
    whole = np.array(images.load("cifar10", "train").x)
    for file in (tmp_path / "cache" / "images").iterdir():
        file.write_bytes(b"nonsense")
    assert np.array_equal(images.load("cifar10", "train").x, whole)
    (tmp_path / "file").touch()
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path / "file"))
    assert np.array_equal(images.load("cifar10", "train").x, whole)


def test_the_cache_removes_the_least_recently_used_files(tmp_path, monkeypatch):
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path))
    monkeypatch.setattr(cache, "ROOM", 3 * 960)  # of three arrays, with their headers and digests
    makes = {name: partial(np.full, 100, value) for value, name in enumerate("abcd", start=1)}
    for age, name in enumerate("abc"):
        cache.cached(f"some/{name}", makes[name])
        os.utime(tmp_path / "some" / f"{name}.npy", (1000 + age, 1000 + age))
    cache.cached("some/a", makes["a"])  # used again, so that b is the oldest
    kept = cache.cached("some/d", makes["d"], mapped=True)
    assert sorted(file.stem for file in (tmp_path / "some").iterdir()) == ["a", "c", "d"]
    assert kept.tolist() == [4] * 100
    monkeypatch.setattr(cache, "ROOM", 1)  # the newest array stays
    assert cache.cached("some/e", makes["a"], mapped=True)[0] == 1
    assert [file.stem for file in (tmp_path / "some").iterdir()] == ["e"]


@pytest.mark.slow
def test_digits_are_read_from_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path / "cache"))
    made = [digits.load(), digits.load(0.25)]
    monkeypatch.setattr(digits, "_rows", None)  # nothing is made again
    for first, second in zip(made, [digits.load(), digits.load(0.25)], strict=True):
        assert all(map(torch.equal, first, second))
    for file in (tmp_path / "cache" / "digits").iterdir():
        file.write_bytes(file.read_bytes()[:300])
    with pytest.raises(TypeError):
        digits.load()


@pytest.mark.parametrize(("kind", "mode"), [("PNG", "L"), ("PNG", "RGB"), ("WEBP", "RGB")])
def test_all_kinds_of_images_become_three_colours(folders, kind, mode):
    pixels = np.repeat(sets.images(2, 64)[..., :1], 3, axis=3)  # grey, so that nothing is lost
    options = {"lossless": True} if kind == "WEBP" else {}
    rows = []
    for p in pixels:
        import io

        from PIL import Image

        buffer = io.BytesIO()
        Image.fromarray(p).convert(mode).save(buffer, kind, **options)
        rows.append({"bytes": buffer.getvalue(), "path": None})
    sets.write_rows(folders / "tiny-imagenet" / "train-00000-of-00001.parquet", image=rows, label=[0, 199])
    loaded = images.load("tiny-imagenet", "train")
    assert np.array_equal(loaded.x, pixels.transpose(0, 3, 1, 2))


def damaged(folders, **changes):
    pixels = sets.images(4, changes.pop("side", 32))
    labels = changes.pop("labels", [0, 1, 2, 9])
    rows = [{"bytes": sets.encoded(p), "path": None} for p in pixels]
    rows[2:3] = changes.pop("row", rows[2:3])
    columns = {"img": rows, "label": labels}
    for name in changes.pop("without", ()):
        del columns[name]
    return sets.write_rows(folders / "cifar10" / "train-00000-of-00001.parquet", **columns)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"labels": [0, 1, 10, 2]}, r"row 2 has label=10; there are 10 classes"),
        ({"labels": [0, -1, 1, 2]}, r"row 1 has label=-1"),
        ({"labels": [0, None, 1, 2]}, r"row 1 has label=None"),
        ({"labels": ["a", "b", "c", "d"]}, r"row 0 has label='a'"),
        ({"without": ["label"]}, r"there is no column 'label'; it has img"),
        ({"without": ["img"]}, r"there is no column 'img'; it has label"),
        ({"row": [{"bytes": b"no image", "path": None}]}, r"image of row 2 cannot be decoded"),
        ({"row": [{"bytes": sets.encoded(sets.images(1, 32)[0])[:80], "path": None}]}, r"row 2 cannot be"),
        ({"row": [{"bytes": None, "path": "x.png"}]}, r"row 2 has no image in 'img'"),
        ({"side": 16}, r"row 0 is 16x16; those of cifar10 are 32x32"),
    ],
)
def test_a_bad_row_is_named_with_its_file(folders, changes, message):
    path = damaged(folders, **changes)
    with pytest.raises(InputError, match=message) as error:
        images.load("cifar10", "train")
    assert str(path) in str(error.value)


def test_files_without_rows_are_refused(folders):
    path = sets.write_rows(folders / "cifar10" / "train-00000-of-00001.parquet", img=[], label=[])
    with pytest.raises(InputError, match="there are no rows in it; download it again") as error:
        images.load("cifar10", "train")
    assert str(path) in str(error.value)


@pytest.mark.parametrize("keep", [0, 3, 500, -20])
def test_a_truncated_file_is_named(folders, keep):
    path = damaged(folders)
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(InputError, match="damaged or not a parquet file") as error:
        images.load("cifar10", "train")
    assert str(path) in str(error.value)


def test_a_changed_byte_is_detected_or_harmless(folders):
    path = damaged(folders)
    whole = path.read_bytes()
    right = np.array(images.load("cifar10", "train").x)
    for at in range(10, len(whole), len(whole) // 20):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        message = None
        try:
            shape = images.load("cifar10", "train").x.shape
        except InputError as error:
            message = str(error)
        assert shape == right.shape if message is None else str(path) in message


# HAR


def test_har_has_a_client_for_each_person(folders):
    sets.har(folders)
    task = build_task(task_spec(data="uci_har"), seed=0)
    assert task.n == 30
    assert [len(x) for x, _ in task.pairs] == [9] * 30
    assert len(task.test_pair[0]) == 90
    validation = build_task(task_spec(data="uci_har"), seed=0, validation=0.25)
    assert sum(len(x) for x, _ in validation.pairs) + len(validation.test_pair[0]) == 270
    assert label_counts(task_spec(data="uci_har"), 0).counts.shape == (30, 6)


def test_damaged_signals_are_named(folders):
    sets.har(folders)
    path = folders / "uci_har" / "har.npz"
    whole = path.read_bytes()
    path.write_bytes(whole[:1000])
    with pytest.raises(InputError, match=r"har\.npz: damaged"):
        har.load()
    np.savez(path, x=np.zeros((3, 9, 128)), y=[0, 1, 6], subject=[0, 0, 1], is_test=[False] * 3)
    with pytest.raises(InputError, match="row 2 has y=6"):
        har.load()
    np.savez(path, x=np.zeros((3, 9, 128)), y=[0, 1, 2], subject=[0, 0, 1])
    with pytest.raises(InputError, match="there is no array 'is_test'"):
        har.load()
    np.savez(path, x=np.zeros((3, 9, 64)), y=[0, 1, 2], subject=[0, 0, 1], is_test=[False] * 3)
    with pytest.raises(InputError, match=r"'x' has shape \(3, 9, 64\)"):
        har.load()


# Tasks


def test_a_task_of_images(folders):
    sets.cifar10(folders)
    spec = task_spec(data="cifar10", clients=5, alpha=1.0, width=4, shrink=2, test_samples=10)
    task = build_task(spec, seed=0)
    assert task.n == 5
    assert sum(len(x) for x, _ in task.pairs) == 60
    assert task.pairs[0][0].dtype == torch.uint8
    assert len(task.test_pair[1]) == 10
    assert sorted(task.test_pair[1].tolist()) == list(range(10))
    other = build_task(spec, seed=1)
    assert [len(x) for x, _ in task.pairs] != [len(x) for x, _ in other.pairs]


@pytest.mark.parametrize("shrink", [2, 4])
def test_images_are_shrunk_to_the_mean_of_squares(folders, shrink):
    sets.cifar10(folders)
    full, small = (
        build_task(task_spec(data="cifar10", clients=5, alpha=1.0, width=4, shrink=s), seed=0)
        for s in (1, shrink)
    )
    pairs = ([*task.pairs, task.test_pair] for task in (full, small))
    for (x, y), (x_small, y_small) in zip(*pairs, strict=True):
        assert x_small.dtype == torch.uint8
        means = torch.nn.functional.avg_pool2d(x.double(), shrink)
        assert torch.equal(x_small, means.round().byte())  # a half becomes the even number
        assert torch.equal(y, y_small)


def test_images_are_shrunk_once(folders, monkeypatch):
    sets.cifar10(folders)
    spec = task_spec(data="cifar10", clients=5, alpha=1.0, width=4, shrink=2)
    first = build_task(spec, seed=0)
    monkeypatch.setattr(images, "_shrunk", lambda *_: pytest.fail("shrunk again"))
    again = build_task(spec, seed=0)
    assert all(torch.equal(a, b) for (a, _), (b, _) in zip(first.pairs, again.pairs, strict=True))


def test_held_out_images_are_from_the_train_part_and_belong_to_no_client(folders):
    sets.cifar10(folders)
    shutil.rmtree(folders / "cifar10" / "nothing", ignore_errors=True)
    (folders / "cifar10" / "test-00000-of-00001.parquet").unlink()  # it is not even looked for
    task = build_task(task_spec(data="cifar10", clients=5, alpha=1.0, width=4), seed=0, validation=0.25)
    train = torch.cat([x for x, _ in task.pairs])
    held_out = task.test_pair[0]
    assert (len(train), len(held_out)) == (45, 15)
    everything = {tuple(p.flatten().tolist()) for p in torch.cat([train, held_out])}
    assert len(everything) == 60


def test_a_subset_is_even_over_the_classes_and_the_same_for_every_seed(folders):
    sets.cifar10(folders)
    spec = task_spec(data="cifar10", clients=3, partition="iid", train_samples=30, width=4)
    one, two = (torch.cat([y for _, y in build_task(spec, seed).pairs]) for seed in (0, 1))
    assert one.bincount().tolist() == two.bincount().tolist() == [3] * 10
    assert label_counts(spec, 0).counts.sum() == 30


@pytest.mark.slow
@pytest.mark.parametrize("model", ["mlp", "cnn", "resnet8", "resnet18"])
@pytest.mark.parametrize("augment", ["none", "crop-flip"])
def test_every_model_can_be_trained_on_images(folders, model, augment):
    import fadamgc

    sets.cifar10(folders, train=40)
    spec = task_spec(
        data="cifar10", clients=2, partition="iid", model=model, width=4, shrink=4, augment=augment
    )
    task = build_task(spec, seed=0)
    options = {"rounds": 2, "local_steps": 3, "batch_size": 8, "progress": False}
    method = fadamgc.FAdamGC(eps=1e-3)  # a smaller eps makes a step of eta_l of a gradient that is rounding
    one, two = (fadamgc.simulate(method, task, executor=e, **options) for e in ("loop", "threads"))
    assert torch.isfinite(one.x).all()
    if augment == "none":
        torch.testing.assert_close(two.x, one.x, rtol=1e-3, atol=1e-4)
    again = fadamgc.simulate(method, task, executor="threads", **options)
    assert torch.equal(two.x, again.x)


def test_images_are_normalised_and_changed_only_while_training():
    x = torch.from_numpy(sets.images(40, 32).transpose(0, 3, 1, 2))
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.3, 0.4)
    layer = ImageInput(mean, std, augment="crop-flip").eval()
    wanted = (x / 255 - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-5)
    assert repr(layer) == "ImageInput()"  # part of the fingerprint in checkpoints of earlier versions
    torch.manual_seed(0)
    changed = layer.train()(x)
    assert changed.shape == wanted.shape
    flipped = ImageInput(mean, std, augment="flip").train()(x)
    for before, after in zip(wanted, flipped, strict=True):
        assert any(torch.allclose(after, b, atol=1e-4) for b in (before, before.flip(-1)))
    for before, after in zip(wanted, changed, strict=True):  # the middle is somewhere in the original
        part = after[:, 8:24, 8:24]
        places = [b.unfold(1, 16, 1).unfold(2, 16, 1) for b in (before, before.flip(-1))]
        assert any(((p - part[:, None, None]).abs().amax(dim=(0, 3, 4)) < 1e-4).any() for p in places)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ({"model": "vgg"}, "model"),
        ({"shrink": 3}, "shrink=3 is not accepted"),
        ({"norm": "batch"}, "norm='batch' is for the resnets"),
        ({"std": (0.0, 0.1, 0.1)}, "std"),
        ({"mean": (1.5, 0.1, 0.1)}, "mean"),
        ({"train_samples": 0}, "train_samples=0 is not accepted"),
        ({"hidden": (3,)}, "has no key 'hidden'"),
    ],
)
def test_a_bad_task_of_images_is_refused(table, message):
    with pytest.raises(InputError, match=message):
        task_spec(data="cifar10", **table)


# The commands


def test_data_list_and_path(folders):
    sets.har(folders)
    shown = fadamgc("data", "list")
    assert shown.exit_code == 0
    for name in (*SOURCES, "digits"):
        assert name in shown.output
    assert fadamgc("data", "path").output.strip() == str(folders)
    assert fadamgc("data", "path", "cifar10").output.strip() == str(folders / "cifar10")
    assert fadamgc("data", "path", "cifar").exit_code == 2


def test_data_check_prints_counts(folders):
    sets.cifar10(folders)
    sets.har(folders)
    sets.write_rows(folders / "glue" / "sst2" / "train-00000-of-00001.parquet", sentence=["a"], label=[1])
    sets.write_rows(
        folders / "glue" / "sst2" / "validation-00000-of-00001.parquet", sentence=["b", "c"], label=[0, 1]
    )
    shown = fadamgc("data", "check")
    assert shown.exit_code == 0, shown.output
    assert "cifar10 train: 60 rows (of 50,000), 10 of 10 classes, 6 to 6 per class, mean 0." in shown.output
    assert "uci_har test: 90 rows" in shown.output
    assert "glue/sst2 train: 1 rows (of 67,349), 1 of 2 classes" in shown.output
    pixels = np.array(images.load("cifar10", "train").x) / 255
    part = check(source("cifar10"))["train"]
    np.testing.assert_allclose(part.mean, pixels.mean(axis=(0, 2, 3)))
    np.testing.assert_allclose(part.std, pixels.std(axis=(0, 2, 3)))


def test_data_check_accepts_the_digits(folders):
    shown = fadamgc("data", "check", "digits")
    assert shown.exit_code == 0, shown.output
    assert (
        "digits train: 1,437 rows (complete), 10 of 10 classes, 139 to 146 per class, mean 0.3"
        in shown.output
    )
    assert "digits test: 360 rows (complete)" in shown.output
    for command in ("path", "get"):
        shown = fadamgc("data", command, "digits")
        assert shown.exit_code == 2
        assert "comes with scikit-learn" in shown.output.replace("\n", " ")


@pytest.mark.slow
@pytest.mark.parametrize("command", ["partition", "compare"])
def test_every_command_that_reads_data_has_the_option_data_root(folders, tmp_path, monkeypatch, command):
    sets.cifar10(tmp_path / "elsewhere")
    words = {
        "partition": ("--data", "cifar10", "--clients", 5, "--out", tmp_path / "labels.png"),
        "compare": (
            "--rounds",
            1,
            "--seeds",
            1,
            "--methods",
            "fedavg_m",
            "--out",
            tmp_path / "o",
            "--workers",
            1,
        ),
    }
    shown = fadamgc(command, *words[command], "--data-root", tmp_path / "elsewhere")
    assert shown.exit_code == 0, shown.output
    assert data_root() == tmp_path / "elsewhere"


def test_data_check_lists_all_problems(folders):
    damaged(folders, labels=[0, 1, 2, 11])
    sets.har(folders)
    rows = {"sentence": pa.array(["a", None]), "label": [0, 1]}
    sets.write_rows(folders / "glue" / "sst2" / "train-00000-of-00001.parquet", **rows)
    shown = fadamgc("data", "check")
    assert shown.exit_code == 2
    assert "row 3 has label=11" in shown.output
    assert "row 1 has sentence=None, which is not a text" in shown.output
    assert "uci_har train" in shown.output
    shown = fadamgc("data", "check", "cifar100")
    assert shown.exit_code == 2
    assert "there is no train part" in shown.output.replace("\n", " ")
    assert "is not a folder" in fadamgc("data", "check", "--data-root", folders / "nowhere").output


# The hub


def test_a_data_set_is_downloaded_into_the_layout_that_is_read(folders, tmp_path, monkeypatch):
    pytest.importorskip("datasets", reason="the hub's client is not installed")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hub"))
    here = sets.cifar10(tmp_path / "there")
    known = source("cifar10")
    local = type(known)(**{**vars(known), "hub": str(here / "cifar10")})
    message = []
    folder = get(local, message.append)
    assert folder == folders / "cifar10"
    assert len(message) == 2
    ours = images.load("cifar10", "train")
    monkeypatch.setenv("FADAMGC_DATA", str(here))
    theirs = images.load("cifar10", "train")
    assert np.array_equal(ours.x, theirs.x)
    assert np.array_equal(ours.y, theirs.y)


def test_a_download_that_fails_says_what_to_do(folders, monkeypatch):
    datasets = pytest.importorskip("datasets", reason="the hub's client is not installed")

    def fails(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", fails)
    with pytest.raises(InputError, match="cannot be downloaded: no network; .*there is no train part"):
        get(source("cifar10"))
    with pytest.raises(InputError, match="is not on the hub"):
        get(source("uci_har"))
