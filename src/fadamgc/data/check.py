"""What is in the files of a data set: counts, classes, means."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fadamgc.data import digits, har, images, parquet
from fadamgc.data.sources import DIGITS, Source, files_of
from fadamgc.errors import InputError, shown


@dataclass(frozen=True)
class Part:
    """One part of a data set."""

    rows: int
    complete: int  # rows of the complete data set
    least: int  # samples of the rarest class
    most: int  # and of the most frequent one
    classes: int  # that occur
    mean: tuple[float, ...] = ()  # of each colour, as a share of white
    std: tuple[float, ...] = ()


def check(source: Source, progress: Callable[[str, int], object] = lambda *_: None) -> dict[str, Part]:
    """Read a whole data set; an error names what is missing or damaged.

    Args:
        source: which one.
        progress: told the part and how many rows of it have been read.
    """
    return {
        split: _part(source, i, lambda n, split=split: progress(split, n))  # type: ignore[misc]
        for i, split in enumerate(("train", "test"))
    }


def _part(source: Source, number: int, progress: Callable[[int], object]) -> Part:
    moments: dict[str, Any] = {}
    match source.kind:
        case "pictures" if source == DIGITS:
            data = digits.load()
            pixels, labels = (part.numpy() for part in (data[2 * number], data[2 * number + 1]))
            moments = {"mean": (float(pixels.mean()),), "std": (float(pixels.std()),)}
        case "pictures":
            pictures = images.load(source.name, ("train", "test")[number], progress=progress)
            labels = pictures.y
            sums, squares = np.zeros(3), np.zeros(3)
            for first in range(0, len(labels), 5000):
                x = pictures.x[first : first + 5000].astype(np.float64) / 255
                sums += x.mean(axis=(2, 3)).sum(axis=0)
                squares += (x * x).mean(axis=(2, 3)).sum(axis=0)
            mean = sums / len(labels)
            std = np.sqrt(squares / len(labels) - mean * mean)
            moments = {"mean": tuple(mean.tolist()), "std": tuple(std.tolist())}
        case "texts":
            labels = _texts(source, number, progress)
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


def _texts(source: Source, number: int, progress: Callable[[int], object]) -> Any:
    labels = []
    count = 0
    for rows in parquet.read(files_of(source, source.splits[number]), (*source.inputs, source.label)):
        for column in source.inputs:
            for i, text in enumerate(parquet.values(rows, column)):
                if not isinstance(text, str):
                    raise InputError(
                        f"{rows.file}: row {rows.first + i} has {column}={shown(text)}, which is not a text"
                    )
        labels.append(parquet.labels(rows, source.label, source.classes))
        count += len(labels[-1])
        progress(count)
    if not labels:
        raise InputError(f"{source.name}: there are no rows in its files; download them again")
    return np.concatenate(labels)
