"""Rows of parquet and CSV files; error messages name the file and the row."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fadamgc.errors import InputError, cut, first_line, shown

MAX_CLASSES = 1 << 31
BATCH = 2000  # rows that are read at a time
CSV_BLOCK = 1 << 20, (1 << 31) - 1  # least and largest block; a row must fit into one


class Rows(NamedTuple):
    """Consecutive rows of a file."""

    file: Path
    first: int  # number of the first of these rows in the file
    columns: dict[str, Any]  # pyarrow arrays by name

    def values(self, column: str) -> list[Any]:
        """Return a column as Python values."""
        try:
            values: list[Any] = self.columns[column].to_pylist()
        except UnicodeDecodeError as error:
            raise InputError(
                f"{self.file}: a text in {column!r}, from row {self.first} on, is not UTF-8 ({error.reason})"
            ) from None
        except (ValueError, OverflowError) as error:
            raise InputError(
                f"{self.file}: {column!r} cannot be read, from row {self.first} on ({cut(str(error))})"
            ) from None
        return values

    def texts(self, column: str, allow_empty: bool = False) -> list[str]:
        """Return a column of texts."""
        values = self.values(column)
        for row, value in enumerate(values, self.first):
            if not isinstance(value, str):
                raise InputError(f"{self.file}: row {row} has {column}={shown(value)}, which is not a text")
            if not allow_empty and not value.strip():
                raise InputError(f"{self.file}: row {row} has an empty text in {column!r}")
        return values

    def labels(self, column: str, classes: int | None = None) -> npt.NDArray[np.int64]:
        """Return a column of labels from 0 to classes - 1; None: any number of classes."""
        values = self.values(column)
        for row, value in enumerate(values, self.first):
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if not is_integer or not 0 <= value < (classes or MAX_CLASSES):
                accepted = "labels are whole numbers from 0; number the classes 0, 1, 2, ..."
                if classes is not None:
                    accepted = f"there are {classes} classes, 0 to {classes - 1}"
                raise InputError(f"{self.file}: row {row} has {column}={shown(value)}; {accepted}")
        return np.array(values, dtype=np.int64)


def read_parquet(files: Sequence[Path], columns: Sequence[str]) -> Iterator[Rows]:
    """Read columns of parquet files, ``BATCH`` rows at a time; refuse files without rows."""
    pyarrow = _pyarrow()
    from pyarrow import parquet

    total = 0
    for path in files:
        first = 0
        try:
            with parquet.ParquetFile(path) as file:
                _check_columns(path, file.schema_arrow.names, columns)
                for part in file.iter_batches(BATCH, columns=list(columns)):
                    yield Rows(path, first, {name: part.column(name) for name in columns})
                    first += len(part)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path}: damaged or not a parquet file, after {first} rows ({first_line(error)}); "
                "download it again"
            ) from error
        total += first
    if not total:
        raise _no_rows(files[0])


def read_csv(path: Path, texts: Sequence[str], label: str) -> Iterator[Rows]:
    """Read columns of texts and a column of labels from a CSV file; refuse a file without rows."""
    pyarrow = _pyarrow()
    from pyarrow import csv

    try:
        least, most = CSV_BLOCK
        table: Any = csv.read_csv(
            path,
            read_options=csv.ReadOptions(block_size=min(max(path.stat().st_size, least), most)),
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(  # a text may look like a number or a date
                strings_can_be_null=False, column_types=dict.fromkeys(texts, pyarrow.string())
            ),
        )
        names = table.column_names
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        message = first_line(error)
        remedy = "; save it as UTF-8" if "utf" in message.lower() else ""
        raise InputError(f"{path} cannot be read as CSV: {message}{remedy}") from None
    columns = (*texts, label)
    _check_columns(path, names, columns)
    if not len(table):
        raise _no_rows(path)
    yield Rows(path, 0, {name: table.column(name) for name in columns})


def _no_rows(path: Path) -> InputError:
    return InputError(f"{path}: there are no rows in it; download it again, or give another file")


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError("reading data sets needs pyarrow; pip install 'fadamgc[data]'") from None
    return pyarrow


def _check_columns(path: Path, names: Sequence[str], columns: Sequence[str]) -> None:
    for column in columns:
        if names.count(column) != 1:
            number = "more than one" if column in names else "no"
            raise InputError(f"{path}: there is {number} column {column!r}; it has {cut(', '.join(names))}")
