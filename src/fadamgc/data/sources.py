"""The data sets that are known by name, and where their files are."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

from fadamgc.cache import cache_folder, make_private
from fadamgc.errors import InputError, first_line, nearest, not_accepted, shown
from fadamgc.files import make_folder, user_folder

VARIABLE = "FADAMGC_DATA"
Kind: TypeAlias = Literal["images", "texts", "signals"]


@dataclass(frozen=True)
class Source:
    """A data set as files. (The repr is part of the names of cached images.)"""

    name: str  # in specs and commands; also the folder in the data root
    kind: Kind  # images and texts are parquet files as on the Hugging Face hub, signals are one npz file
    hub: str | None  # name on the hub; None if the hub does not have the data set
    splits: tuple[str, str]  # first words of the file names of the train and the test part
    inputs: tuple[str, ...]  # names of the columns of inputs
    label: str  # name of the column of labels
    classes: int  # labels are 0, ..., classes - 1
    rows: tuple[int, int]  # rows of the complete train and test part
    side: int = 0  # height and width of an image
    config: str | None = None  # name of the data set's configuration on the hub

    def where(self) -> str:
        """Return the address to download the data set from."""
        if self.hub is None:
            return "https://archive.ics.uci.edu/dataset/240"
        return f"https://huggingface.co/datasets/{self.hub}"


def _images(hub: str, test: str, column: str, label: str, classes: int, train_rows: int, side: int) -> Source:
    name, splits, rows = hub.split("/")[1], ("train", test), (train_rows, 10_000)
    return Source(name, "images", hub, splits, (column,), label, classes, rows, side)


def _glue(task: str, inputs: tuple[str, ...], rows: tuple[int, int]) -> Source:
    splits = "train", "validation"
    return Source(f"glue/{task}", "texts", "nyu-mll/glue", splits, inputs, "label", 2, rows, config=task)


_TEST = "train", "test"
_ALL = (
    _images("uoft-cs/cifar10", "test", "img", "label", 10, 50_000, 32),
    _images("uoft-cs/cifar100", "test", "img", "fine_label", 100, 50_000, 32),
    _images("zh-plus/tiny-imagenet", "valid", "image", "label", 200, 100_000, 64),
    Source("20_newsgroups", "texts", "SetFit/20_newsgroups", _TEST, ("text",), "label", 20, (11_314, 7_532)),
    _glue("sst2", ("sentence",), (67_349, 872)),
    _glue("qnli", ("question", "sentence"), (104_743, 5_463)),
    _glue("qqp", ("question1", "question2"), (363_846, 40_430)),
    Source("uci_har", "signals", None, _TEST, ("x",), "y", 6, (7_715, 2_584)),
)
SOURCES = {source.name: source for source in _ALL}

# The digits come with scikit-learn and have no files in the data root.
DIGITS = Source("digits", "images", None, _TEST, ("x",), "y", 10, (1_437, 360), 8)


def source(name: str) -> Source:
    """Return the data set of a name; refuse the digits, which have no files."""
    if name == DIGITS.name:
        raise InputError(f"data={name!r} has no folder and needs no download: it comes with scikit-learn")
    if name not in SOURCES:
        raise InputError(
            f"data={shown(name)} is not known{nearest(name, SOURCES)}; known are {', '.join(SOURCES)}"
        )
    return SOURCES[name]


def data_root() -> Path:
    """Return $FADAMGC_DATA, else ``data_root`` of the user's config file, else a folder in the cache."""
    return _root()[0]


def data_root_from() -> str:
    """Return where the data root is set: the name of the variable or of the file, or "the default"."""
    return _root()[1]


def _root() -> tuple[Path, str]:
    if folder := os.environ.get(VARIABLE):
        return Path(folder).expanduser(), f"environment variable {VARIABLE}"
    config = user_folder("config") / "config.toml"
    if config.is_file():
        try:
            value = tomllib.loads(config.read_text(encoding="utf-8")).get("data_root")
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{config} cannot be read: {error}") from None
        if value is not None:
            if not isinstance(value, str) or not value:
                raise not_accepted(f"{config}: data_root", value, "a folder")
            return Path(value).expanduser(), str(config)
    return cache_folder() / "data", "the default"


def files_of_kind(name: str, kind: Kind, split: str) -> tuple[Source, list[Path]]:
    """Return the data set of a name, which must be of a kind, and the files of its "train" or "test" part."""
    data = source(name)
    if data.kind != kind:
        raise InputError(f"data={name!r} has {data.kind}, not {kind}")
    return data, files_of(data, data.splits[0 if split == "train" else 1])


def files_of(source: Source, split: str) -> list[Path]:
    """Return the files of a split; if there are none, the error says how to get them."""
    folder = data_root() / source.name
    if source.kind == "signals":
        files = [path for path in [folder / "har.npz"] if path.is_file()]
    else:
        # In the folder itself, where ``get`` writes them, or in subfolders as on the hub.
        places = [folder / name for name in ("", "data", source.config or "", "plain_text")]
        found = (sorted(place.glob(f"{split}-*-of-*.parquet")) for place in places)
        files = next(filter(None, found), [])
    if not files:
        raise InputError(_how_to_get(source, split, folder))
    present = {file.name for file in files}
    count = files[0].stem.rpartition("-of-")[2]
    if count.isdigit():
        expected = (f"{split}-{i:05d}-of-{count}.parquet" for i in range(int(count)))
        missing = list(islice((name for name in expected if name not in present), 10))
        if missing:
            raise InputError(f"{files[0].parent}: {', '.join(missing)} is missing; download the files again")
    return files


def _how_to_get(source: Source, split: str, folder: Path) -> str:
    """Return the error message for missing files."""
    command = f"`fadamgc data get {source.name}`, or " if source.hub else ""
    layout = (
        "its signals as har.npz (x, y, subject, is_test)"
        if source.kind == "signals"
        else f"its parquet files ({split}-00000-of-00001.parquet, ...)"
    )
    return (
        f"data={source.name!r}: there is no {split} part in {folder}; {command}"
        f"download {source.where()} and put {layout} there, "
        f"or name their folder: --data-root FOLDER or {VARIABLE}=FOLDER"
    )


def get(source: Source, say: Callable[[str], object] = print) -> Path:
    """Download a data set from the hub into the data root, in the layout that ``files_of`` expects."""
    folder = data_root() / source.name
    if source.hub is None:
        raise InputError(
            f"data={source.name!r} is not on the hub; download {source.where()} "
            f"and put it into {folder} as har.npz (x, y, subject, is_test)"
        )
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError("downloading needs the package datasets; pip install 'fadamgc[data]'") from None
    if folder.is_relative_to(cache_folder()):
        make_private(cache_folder())
    make_folder(folder)
    for split in source.splits:
        say(f"{source.hub}: {split}")
        scratch = folder / f".{split}.parquet"
        try:
            load_dataset(source.hub, source.config, split=split).to_parquet(str(scratch))
        except Exception as error:  # datasets raises many kinds of errors
            raise InputError(
                f"{source.hub} cannot be downloaded: {first_line(error)}; "
                + _how_to_get(source, split, folder)
            ) from error
        os.replace(scratch, folder / f"{split}-00000-of-00001.parquet")
    return folder
