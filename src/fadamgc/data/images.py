"""Data sets of pictures: decoded once, then read from an array on disk."""

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
from fadamgc.data import parquet
from fadamgc.data.sources import Source, files_of, source
from fadamgc.errors import InputError

FORMAT = 1  # of the cached arrays
AT_ONCE = 1000  # pictures that are shrunk at the same time


class Pictures(NamedTuple):
    """Pictures as bytes, (n, 3, side, side), which may lie on disk; labels, (n,)."""

    x: npt.NDArray[np.uint8]
    y: npt.NDArray[np.int64]


def load(
    name: str,
    split: str,
    root: Path | None = None,
    progress: Callable[[int], object] | None = None,
    shrink: int = 1,
) -> Pictures:
    """One part of a data set of pictures.

    Args:
        name: of the data set.
        split: "train" or "test".
        root: the data root; None is where ``data_root`` says.
        progress: told how many pictures have been decoded, if they have to be.
        shrink: each square of ``shrink`` x ``shrink`` pixels becomes one pixel, their mean.
    """
    known = source(name)
    if known.kind != "pictures":
        raise InputError(f"data={name!r} is a set of {known.kind}, not of pictures")
    files = files_of(known, known.splits[0 if split == "train" else 1], root)
    place = f"pictures/{name}-{split}-{_digest(known, files)}"
    decode = functools.cache(lambda: _decode(known, files, progress or (lambda _: None)))

    def whole() -> npt.NDArray[np.uint8]:
        return cached(f"{place}.x", lambda: decode().x, mapped=True)

    x = whole() if shrink == 1 else cached(f"{place}-{shrink}.x", lambda: _shrunk(whole(), shrink), True)
    y = cached(f"{place}.y", lambda: decode().y)
    return Pictures(x, y) if len(x) == len(y) else Pictures(_shrunk(decode().x, shrink), decode().y)


def _shrunk(x: npt.NDArray[np.uint8], shrink: int) -> npt.NDArray[np.uint8]:
    """Replace each square of pixels by its mean, rounded to the nearest even number where it is a half."""
    n, colours, height, width = x.shape
    result = np.empty((n, colours, height // shrink, width // shrink), np.uint8)
    for first in range(0, n, AT_ONCE):
        some = x[first : first + AT_ONCE].astype(np.uint32)
        total = sum(some[..., i::shrink, j::shrink] for i in range(shrink) for j in range(shrink))
        result[first : first + AT_ONCE] = np.rint(total / shrink**2)
    return result


def _digest(known: Source, files: list[Path]) -> str:
    """Changes when the files do."""
    facts = [(f.name, f.stat().st_size, f.stat().st_mtime_ns) for f in files]
    return hashlib.sha256(repr((FORMAT, known, facts)).encode()).hexdigest()[:16]


def _decode(known: Source, files: list[Path], progress: Callable[[int], object]) -> Pictures:
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise InputError("decoding pictures needs pillow; pip install 'fadamgc[data]'") from None

    def decode(item: tuple[Path, int, Any]) -> npt.NDArray[np.uint8]:
        file, row, value = item
        data = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(data, bytes):
            raise InputError(f"{file}: row {row} has no picture in {known.inputs[0]!r}")
        try:
            with Image.open(io.BytesIO(data)) as image:
                pixels = np.asarray(image.convert("RGB"))
        except (UnidentifiedImageError, OSError, ValueError, SyntaxError) as error:
            raise InputError(f"{file}: the picture of row {row} cannot be decoded ({error})") from None
        if pixels.shape != (known.side, known.side, 3):
            height, width = pixels.shape[:2]
            raise InputError(
                f"{file}: the picture of row {row} is {width}x{height}; "
                f"those of {known.name} are {known.side}x{known.side}"
            )
        return pixels.transpose(2, 0, 1)

    x: list[npt.NDArray[np.uint8]] = []
    y: list[npt.NDArray[np.int64]] = []
    count = 0
    with ThreadPoolExecutor() as pool:
        for rows in parquet.read(files, (*known.inputs, known.label)):
            values = parquet.values(rows, known.inputs[0])
            items = ((rows.file, rows.first + i, value) for i, value in enumerate(values))
            x.append(np.stack(list(pool.map(decode, items))))
            y.append(parquet.labels(rows, known.label, known.classes))
            count += len(values)
            progress(count)
    if not x:
        raise InputError(f"{files[0]}: there are no rows in it; download it again")
    return Pictures(np.concatenate(x), np.concatenate(y))
