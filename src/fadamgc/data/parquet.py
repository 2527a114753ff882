"""Columns of parquet files, with errors that name the file and the row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fadamgc.errors import InputError, cut, shown

MOST = 1 << 31  # classes


class Rows(NamedTuple):
    """Some rows of a file."""

    file: Path
    first: int  # number of the first of them
    columns: dict[str, Any]  # pyarrow arrays


def read(files: Sequence[Path], columns: Sequence[str], batch: int = 2000) -> Iterator[Rows]:
    """All rows of some files, a few at a time."""
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise InputError("reading parquet files needs pyarrow; pip install 'fadamgc[data]'") from None
    for path in files:
        first = 0
        try:
            with parquet.ParquetFile(path) as file:
                there = file.schema_arrow.names
                for column in columns:
                    if there.count(column) != 1:
                        what = "no column" if column not in there else "more than one column"
                        names = cut(", ".join(there))
                        raise InputError(f"{path}: there is {what} {column!r}; it has {names}")
                for part in file.iter_batches(batch, columns=list(columns)):
                    yield Rows(path, first, {name: part.column(name) for name in columns})
                    first += len(part)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            said = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise InputError(
                f"{path}: damaged or no parquet file, after {first} rows ({said}); download it again"
            ) from error


def values(rows: Rows, column: str) -> list[Any]:
    """A column as Python's values."""
    try:
        found: list[Any] = rows.columns[column].to_pylist()
    except UnicodeDecodeError as error:
        raise InputError(
            f"{rows.file}: a text in {column!r}, from row {rows.first} on, is not UTF-8 ({error.reason})"
        ) from None
    except (ValueError, OverflowError) as error:
        raise InputError(
            f"{rows.file}: {column!r} cannot be read, from row {rows.first} on ({cut(str(error))})"
        ) from None
    return found


def labels(rows: Rows, column: str, classes: int | None) -> npt.NDArray[np.int64]:
    """A column of labels, each of which is one of the classes; None: as many as there are."""
    found = values(rows, column)
    for i, value in enumerate(found):
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not whole or not 0 <= value < (MOST if classes is None else classes):
            known = "labels are whole numbers from 0; number the classes 0, 1, 2, ..."
            if classes is not None:
                known = f"there are {classes} classes, 0 to {classes - 1}"
            raise InputError(f"{rows.file}: row {rows.first + i} has {column}={shown(value)}; {known}")
    return np.array(found, dtype=np.int64)
