"""Images and their labels: decoded once, then read from an array on disk."""

from __future__ import annotations

import functools
import hashlib
import io
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fadamgc.cache import cached
from fadamgc.data.sources import Source, files_of_kind
from fadamgc.data.tables import read_parquet
from fadamgc.errors import InputError

FORMAT = 1  # of the cached arrays
BATCH = 1000  # images that are shrunk at a time


class Images(NamedTuple):
    """Images as bytes, (n, 3, side, side), possibly mapped from disk; labels, (n,)."""

    x: npt.NDArray[np.uint8]
    y: npt.NDArray[np.int64]


def load(
    name: str, split: str, shrink: int = 1, progress: Callable[[int], object] = lambda _: None
) -> Images:
    """Read the "train" or "test" part of a data set of images.

    Each square of ``shrink`` x ``shrink`` pixels becomes one pixel, their mean. ``progress`` is called with
    the number of images decoded so far, unless all are in the cache.
    """
    source, files = files_of_kind(name, "images", split)
    key = f"images/{name}-{split}-{_digest(source, files)}"
    decode = functools.cache(lambda: _decode(source, files, progress))

    def pixels(shrink: int) -> npt.NDArray[np.uint8]:
        if shrink == 1:
            return cached(f"{key}.x", lambda: decode().x, mapped=True)
        return cached(f"{key}-{shrink}.x", lambda: _shrunk(pixels(1), shrink), mapped=True)

    return Images(pixels(shrink), cached(f"{key}.y", lambda: decode().y))


def _shrunk(x: npt.NDArray[np.uint8], shrink: int) -> npt.NDArray[np.uint8]:
    """Replace each square of pixels by its mean, rounded to the nearest integer (halves to the even one)."""
    n, colours, height, width = x.shape
    result = np.empty((n, colours, height // shrink, width // shrink), np.uint8)
    for first in range(0, n, BATCH):
        batch = x[first : first + BATCH].astype(np.uint32)
        total = sum(batch[..., i::shrink, j::shrink] for i in range(shrink) for j in range(shrink))
        result[first : first + BATCH] = np.rint(total / shrink**2)
    return result


def _digest(source: Source, files: list[Path]) -> str:
    """Return a digest that changes when a file changes."""
    facts = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(repr((FORMAT, source, facts)).encode()).hexdigest()[:16]


def _decode(source: Source, files: list[Path], progress: Callable[[int], object]) -> Images:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InputError("decoding images needs pillow; pip install 'fadamgc[data]'") from None

    def decode(item: tuple[Path, int, Any]) -> npt.NDArray[np.uint8]:
        file, row, value = item
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise InputError(f"{file}: row {row} has no image in {source.inputs[0]!r}")
        try:
            with Image.open(io.BytesIO(data)) as image:
                pixels = np.asarray(image.convert("RGB"))
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
            raise InputError(f"{file}: the image of row {row} cannot be decoded ({error})") from None
        if pixels.shape != (source.side, source.side, 3):
            height, width = pixels.shape[:2]
            raise InputError(
                f"{file}: the image of row {row} is {width}x{height}; "
                f"those of {source.name} are {source.side}x{source.side}"
            )
        return pixels.transpose(2, 0, 1)

    x: list[npt.NDArray[np.uint8]] = []
    y: list[npt.NDArray[np.int64]] = []
    count = 0
    with ThreadPoolExecutor() as pool:
        for rows in read_parquet(files, (*source.inputs, source.label)):
            values = rows.values(source.inputs[0])
            items = ((rows.file, row, value) for row, value in enumerate(values, rows.first))
            x.append(np.stack(list(pool.map(decode, items))))
            y.append(rows.labels(source.label, source.classes))
            count += len(values)
            progress(count)
    return Images(np.concatenate(x), np.concatenate(y))
