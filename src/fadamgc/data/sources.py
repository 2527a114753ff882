"""The data sets that are known by name, and the folders in which their files are searched for."""

from __future__ import annotations

import os
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Literal, TypeAlias

from fadamgc.cache import cache_folder, make_private
from fadamgc.errors import InputError, first_line, nearest, shown
from fadamgc.files import make_folder, user_folder

VARIABLE = "FADAMGC_DATA"
Kind: TypeAlias = Literal["images", "texts", "signals"]


@dataclass(frozen=True)
class Source:
    """A data set as files.

    Attributes:
        name: its name in specs and commands; also its folder in the data root.
        kind: images and texts are parquet files as on the Hugging Face hub, signals are one npz file.
        hub: its name on the hub; None if the hub does not have it.
        splits: the first words of the file names of the train and the test part.
        inputs: names of the columns of inputs.
        label: name of the column of labels.
        classes: number of labels, 0 .. classes - 1.
        rows: numbers of rows of the complete train and test part.
        side: height and width of an image.
        config: name of the data set's configuration on the hub.
    """

    name: str
    kind: Kind
    hub: str | None
    splits: tuple[str, str]
    inputs: tuple[str, ...]
    label: str
    classes: int
    rows: tuple[int, int]
    side: int = 0
    config: str | None = None

    def where(self) -> str:
        """Return the address to download it from."""
        if self.hub is None:
            return "https://archive.ics.uci.edu/dataset/240"
        return f"https://huggingface.co/datasets/{self.hub}"


_GLUE = "nyu-mll/glue"
SOURCES = {
    source.name: source
    for source in (
        Source(
            *("cifar10", "images", "uoft-cs/cifar10", ("train", "test"), ("img",), "label"),
            *(10, (50_000, 10_000), 32),
        ),
        Source(
            *("cifar100", "images", "uoft-cs/cifar100", ("train", "test"), ("img",), "fine_label"),
            *(100, (50_000, 10_000), 32),
        ),
        Source(
            *("tiny-imagenet", "images", "zh-plus/tiny-imagenet", ("train", "valid"), ("image",), "label"),
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

# The digits come with scikit-learn and have no files in the data root.
DIGITS = Source("digits", "images", None, ("train", "test"), ("x",), "y", 10, (1_437, 360), 8)


def source(name: str) -> Source:
    """Return a data set that has files, by name."""
    if name == DIGITS.name:
        raise InputError(f"data={name!r} has no folder and needs no download: it comes with scikit-learn")
    if name not in SOURCES:
        raise InputError(
            f"data={shown(name)} is not known{nearest(name, SOURCES)}; known are {', '.join(SOURCES)}"
        )
    return SOURCES[name]


def data_root() -> Path:
    """Return the folder of the data sets.

    It is $FADAMGC_DATA, else ``data_root`` of the user's config file, else a folder in the user's cache.
    """
    return _root()[0]


def data_root_from() -> str:
    """Return the name of the setting that the data root comes from."""
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
                raise InputError(f"{config}: data_root={shown(value)} is not accepted; it must be a folder")
            return Path(value).expanduser(), str(config)
    return cache_folder() / "data", "the default"


def files_of_kind(name: str, kind: Kind, split: str, root: Path | None) -> tuple[Source, list[Path]]:
    """Return a data set of a kind, and the files of its part "train" or "test"."""
    data = source(name)
    if data.kind != kind:
        raise InputError(f"data={name!r} is a set of {data.kind}, not of {kind}")
    return data, files_of(data, data.splits[0 if split == "train" else 1], root)


def files_of(source: Source, split: str, root: Path | None = None) -> list[Path]:
    """Return the files of one part of a data set, or raise an error that says where to put them."""
    folder = (root or data_root()) / source.name
    if source.kind == "signals":
        files = [path for path in [folder / "har.npz"] if path.is_file()]
    else:
        # Directly in the folder as ``get`` writes them, or in the subfolders that the hub uses.
        places = [folder / name for name in ("", "data", source.config or "", "plain_text")]
        found = (sorted(place.glob(f"{split}-*-of-*.parquet")) for place in places)
        files = next(filter(None, found), [])
    if not files:
        raise InputError(_how_to_get(source, split, folder))
    _check_complete(files, split)
    return files


def _how_to_get(source: Source, split: str, folder: Path) -> str:
    """Return the message for a data set whose files are missing."""
    command = f"`fadamgc data get {source.name}`, or " if source.hub else ""
    layout = (
        "its signals as har.npz (x, y, subject, is_test)"
        if source.kind == "signals"
        else f"its parquet files ({split}-00000-of-00001.parquet, ...)"
    )
    return (
        f"data={source.name!r}: there is no {split} part in {folder}; {command}"
        f"download {source.where()} and put {layout} there, "
        f"or say where they are: --data-root FOLDER or {VARIABLE}=FOLDER"
    )


def _check_complete(files: list[Path], split: str) -> None:
    """Refuse a split of which some files are missing."""
    present = {file.name for file in files}
    count = files[0].stem.rpartition("-of-")[2]
    if count.isdigit():
        expected = (f"{split}-{i:05d}-of-{count}.parquet" for i in range(int(count)))
        missing = list(islice((name for name in expected if name not in present), 10))
        if missing:
            raise InputError(f"{files[0].parent}: {', '.join(missing)} is missing; download the files again")


def get(source: Source, say: Callable[[str], object] = print, root: Path | None = None) -> Path:
    """Download a data set from the hub into the data root, in the layout that ``files_of`` expects."""
    folder = (root or data_root()) / source.name
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
        except Exception as error:  # the hub's client raises many kinds
            raise InputError(
                f"{source.hub} cannot be downloaded: {first_line(error)}; "
                + _how_to_get(source, split, folder)
            ) from error
        os.replace(scratch, folder / f"{split}-00000-of-00001.parquet")
    return folder
