"""Statistics of the files of a data set: counts, classes, means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from fadamgc.data import digits, har, images
from fadamgc.data.sources import DIGITS, Source, files_of
from fadamgc.data.tables import read_parquet

BATCH = 5000  # images whose moments are computed at a time
PARTS = "train", "test"


@dataclass(frozen=True)
class Part:
    """Statistics of one part of a data set."""

    rows: int
    complete: int  # rows if the data set is complete
    least: int  # samples of the rarest class
    most: int  # samples of the most frequent class
    classes: int  # number of classes that occur
    mean: tuple[float, ...] = ()  # of the pixels, per colour; white is 1
    std: tuple[float, ...] = ()


def check(source: Source, progress: Callable[[str, int], object] = lambda *_: None) -> dict[str, Part]:
    """Read a whole data set; an error names the file that is missing or damaged.

    ``progress`` is called with "train" or "test" and the number of rows of that part read so far.
    """
    return {split: _part(source, i, split, partial(progress, split)) for i, split in enumerate(PARTS)}


def _part(source: Source, number: int, split: str, progress: Callable[[int], object]) -> Part:
    moments: dict[str, tuple[float, ...]] = {}
    match source.kind:
        case "images" if source == DIGITS:
            data = digits.load()
            pixels, labels = (part.numpy() for part in data[2 * number : 2 * number + 2])
            moments = {"mean": (float(pixels.mean()),), "std": (float(pixels.std()),)}
        case "images":
            part = images.load(source.name, split, progress=progress)
            labels, moments = part.y, _moments(part.x)
        case "texts":
            labels = _text_labels(source, source.splits[number], progress)
        case "signals":
            signals = har.load()
            labels = signals.y[signals.is_test == bool(number)].numpy()
    counts = np.bincount(labels, minlength=source.classes)
    return Part(
        rows=len(labels),
        complete=source.rows[number],
        least=int(counts.min()),
        most=int(counts.max()),
        classes=int((counts > 0).sum()),
        **moments,
    )


def _moments(images: npt.NDArray[np.uint8]) -> dict[str, tuple[float, ...]]:
    sums, squares = np.zeros(3), np.zeros(3)
    for first in range(0, len(images), BATCH):
        x = images[first : first + BATCH].astype(np.float64) / 255
        sums += x.mean(axis=(2, 3)).sum(axis=0)
        squares += (x * x).mean(axis=(2, 3)).sum(axis=0)
    mean = sums / len(images)
    std = np.sqrt(squares / len(images) - mean * mean)
    return {"mean": tuple(mean.tolist()), "std": tuple(std.tolist())}


def _text_labels(source: Source, split: str, progress: Callable[[int], object]) -> npt.NDArray[Any]:
    labels: list[npt.NDArray[Any]] = []
    for rows in read_parquet(files_of(source, split), (*source.inputs, source.label)):
        for column in source.inputs:
            rows.texts(column, allow_empty=True)
        labels.append(rows.labels(source.label, source.classes))
        progress(sum(map(len, labels)))
    return np.concatenate(labels)
