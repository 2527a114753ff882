"""The data sets that are known by name, and where they are looked for."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from fadamgc.cache import cache_folder, make_private
from fadamgc.errors import InputError, nearest, shown
from fadamgc.files import make_folder, user_folder

VARIABLE = "FADAMGC_DATA"


@dataclass(frozen=True)
class Source:
    """A data set as files.

    Attributes:
        name: what specs and commands call it; also its folder in the data root.
        kind: pictures and texts are parquet files as the Hugging Face hub has them, signals one npz file.
        hub: its name on the hub, None where it is not there.
        config: which part of it on the hub.
        splits: file names of the train and the test part begin with these.
        inputs: columns that are read.
        label: the column of labels.
        classes: how many labels there are, 0 .. classes - 1.
        side: height and width of a picture.
        rows: of the complete train and test part.
    """

    name: str
    kind: Literal["pictures", "texts", "signals"]
    hub: str | None
    splits: tuple[str, str]
    inputs: tuple[str, ...]
    label: str
    classes: int
    rows: tuple[int, int]
    side: int = 0
    config: str | None = None

    def where(self) -> str:
        """Where it can be had."""
        if self.hub is None:
            return "https://archive.ics.uci.edu/dataset/240"
        return f"https://huggingface.co/datasets/{self.hub}"


_GLUE = "nyu-mll/glue"
SOURCES = {
    source.name: source
    for source in (
        Source(
            *("cifar10", "pictures", "uoft-cs/cifar10", ("train", "test"), ("img",), "label"),
            *(10, (50_000, 10_000), 32),
        ),
        Source(
            *("cifar100", "pictures", "uoft-cs/cifar100", ("train", "test"), ("img",), "fine_label"),
            *(100, (50_000, 10_000), 32),
        ),
        Source(
            *("tiny-imagenet", "pictures", "zh-plus/tiny-imagenet", ("train", "valid"), ("image",), "label"),
            *(200, (100_000, 10_000), 64),
        ),
        Source(
            *("20_newsgroups", "texts", "SetFit/20_newsgroups", ("train", "test"), ("text",), "label"),
            *(20, (11_314, 7_532)),
        ),
        Source(
            *("glue/sst2", "texts", _GLUE, ("train", "validation"), ("sentence",), "label"),
            *(2, (67_349, 872), 0, "sst2"),
        ),
        Source(
            *("glue/qnli", "texts", _GLUE, ("train", "validation"), ("question", "sentence"), "label"),
            *(2, (104_743, 5_463), 0, "qnli"),
        ),
        Source(
            *("glue/qqp", "texts", _GLUE, ("train", "validation"), ("question1", "question2"), "label"),
            *(2, (363_846, 40_430), 0, "qqp"),
        ),
        Source("uci_har", "signals", None, ("train", "test"), ("x",), "y", 6, (7_715, 2_584)),
    )
}


# Comes with scikit-learn, and so has no files in the data root.
DIGITS = Source("digits", "pictures", None, ("train", "test"), ("x",), "y", 10, (1_437, 360), 8)


def source(name: str) -> Source:
    """A data set by name."""
    if name == DIGITS.name:
        raise InputError(f"data={name!r} has no folder and needs no download: it comes with scikit-learn")
    if name not in SOURCES:
        raise InputError(
            f"data={shown(name)} is not known{nearest(name, SOURCES)}; known are {', '.join(SOURCES)}"
        )
    return SOURCES[name]


def data_root() -> Path:
    """The folder of the data sets: $FADAMGC_DATA, else ``data_root`` of the user's config file, else a
    folder in the user's cache."""
    return _root()[0]


def data_root_from() -> str:
    """What said where the data root is."""
    return _root()[1]


def _root() -> tuple[Path, str]:
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given).expanduser(), f"environment variable {VARIABLE}"
    config = user_folder("config") / "config.toml"
    if config.is_file():
        try:
            value = tomllib.loads(config.read_text(encoding="utf-8")).get("data_root")
        except (OSError, ValueError, RecursionError) as error:
            raise InputError(f"{config} cannot be read: {error}") from None
        if value is not None:
            if not isinstance(value, str) or not value:
                raise InputError(f"{config}: data_root={shown(value)} is not accepted; it must be a folder")
            return Path(value).expanduser(), str(config)
    return cache_folder() / "data", "the default"


def files_of(source: Source, split: str, root: Path | None = None) -> list[Path]:
    """The files of one part of a data set, or an error that says where to put them."""
    folder = (root or data_root()) / source.name
    if source.kind == "signals":
        found = [folder / "har.npz"] if (folder / "har.npz").is_file() else []
    else:
        # As in a folder of ours, as downloaded from the hub, and as the hub has several parts of one set.
        places = [folder, folder / "data", *([folder / source.config] if source.config else [])]
        places += [folder / "plain_text"]
        found = next((f for f in (sorted(p.glob(f"{split}-*-of-*.parquet")) for p in places) if f), [])
    if not found:
        raise InputError(missing(source, split, folder))
    _all_shards(found, split)
    return found


def missing(source: Source, split: str, folder: Path) -> str:
    """What to do about a data set that is not there."""
    get = f"`fadamgc data get {source.name}`, or " if source.hub else ""
    layout = (
        "its signals as har.npz (x, y, subject, is_test)"
        if source.kind == "signals"
        else f"its parquet files ({split}-00000-of-00001.parquet, ...)"
    )
    return (
        f"data={source.name!r}: there is no {split} part in {folder}; {get}"
        f"download {source.where()} and put {layout} there, "
        f"or say where they are: --data-root FOLDER or {VARIABLE}=FOLDER"
    )


def _all_shards(files: list[Path], split: str) -> None:
    """Refuse a split of which some files are missing."""
    there = {file.name for file in files}
    count = files[0].stem.rpartition("-of-")[2]
    if count.isdigit():
        wanted = [f"{split}-{i:05d}-of-{count}.parquet" for i in range(int(count))]
        absent = [name for name in wanted if name not in there]
        if absent:
            raise InputError(f"{files[0].parent}: {', '.join(absent)} is missing; download the files again")


def get(source: Source, say: Callable[[str], object] = print, root: Path | None = None) -> Path:
    """Download a data set from the hub into the data root, in the layout that is read from there."""
    if source.hub is None:
        raise InputError(
            f"data={source.name!r} is not on the hub; download {source.where()} "
            f"and put it into {(root or data_root()) / source.name} as har.npz (x, y, subject, is_test)"
        )
    try:
        from datasets import load_dataset
    except ImportError:
        raise InputError("downloading needs the package datasets; pip install 'fadamgc[data]'") from None
    folder = (root or data_root()) / source.name
    if folder.is_relative_to(cache_folder()):
        make_private(cache_folder())
    make_folder(folder)
    for split in source.splits:
        say(f"{source.hub}: {split}")
        try:
            part = load_dataset(source.hub, source.config, split=split)
            scratch = folder / f".{split}.parquet"
            part.to_parquet(str(scratch))
        except Exception as error:  # the hub's client raises many kinds
            raise InputError(
                f"{source.hub} cannot be downloaded: {str(error).strip().splitlines()[0]}; "
                f"{missing(source, split, folder)}"
            ) from error
        os.replace(scratch, folder / f"{split}-00000-of-00001.parquet")
    return folder
