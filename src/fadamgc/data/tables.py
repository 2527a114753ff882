"""Rows of parquet, CSV and JSON files, and of tables in memory; error messages name the place and the row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fadamgc.errors import InputError, cut, first_line, is_unicode, nearest, shown

BATCH = 2000  # rows that are read at a time
CSV_BLOCK = 1 << 20, (1 << 31) - 1  # least and largest block; a row must fit into one


class TableRows(NamedTuple):
    """Consecutive rows of a file, or of a table in memory."""

    file: Path | str  # the file, or the name of the argument
    first: int  # number of the first of these rows in the file
    columns: dict[str, Any]  # pyarrow arrays or lists by name

    def values(self, column: str) -> list[Any]:
        """Return a column as Python values."""
        entries = self.columns[column]
        try:
            values: list[Any] = entries if isinstance(entries, list) else entries.to_pylist()
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
                raise InputError(
                    f"{self.file}: row {row} has {column}={shown(value)}, which is not a text; write a text "
                    "there, or remove the row"
                )
            if not allow_empty and not value.strip():
                raise InputError(
                    f"{self.file}: row {row} has an empty text in {column!r}; fill it in, or remove the row"
                )
            if not is_unicode(value):
                raise InputError(f"{self.file}: row {row} has a text in {column!r} that is not UTF-8")
        return values

    def keys(self, column: str) -> list[str | int]:
        """Return a column of labels or clients, which are texts or whole numbers."""
        values = self.values(column)
        for row, value in enumerate(values, self.first):
            is_integer = isinstance(value, Integral) and not isinstance(value, bool)
            if not is_integer and not (isinstance(value, str) and value.strip() and is_unicode(value)):
                raise InputError(
                    f"{self.file}: row {row} has {column}={shown(value)}; it must be a text or a whole "
                    "number: fill it in, or remove the row"
                )
        return [str(value) if isinstance(value, str) else int(value) for value in values]

    def labels(self, column: str, classes: int) -> npt.NDArray[np.int64]:
        """Return a column of labels from 0 to classes - 1."""
        values = self.values(column)
        for row, value in enumerate(values, self.first):
            is_integer = isinstance(value, int) and not isinstance(value, bool)
            if not is_integer or not 0 <= value < classes:
                raise InputError(
                    f"{self.file}: row {row} has {column}={shown(value)}; there are {classes} classes, 0 to "
                    f"{classes - 1}"
                )
        return np.array(values, dtype=np.int64)


def read_parquet(files: Sequence[Path], columns: Sequence[str]) -> Iterator[TableRows]:
    """Read columns of parquet files, ``BATCH`` rows at a time; refuse files without rows."""
    pyarrow = _pyarrow()
    from pyarrow import parquet

    total = 0
    for path in files:
        first = 0
        try:
            with parquet.ParquetFile(path) as file:
                check_columns(path, file.schema_arrow.names, columns)
                for part in file.iter_batches(BATCH, columns=list(columns)):
                    yield TableRows(path, first, {name: part.column(name) for name in columns})
                    first += len(part)
        except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise InputError(
                f"{path}: damaged or not a parquet file, after {first} rows ({first_line(error)}); "
                "download it again"
            ) from error
        total += first
    if not total:
        raise no_rows(files[0])


def read_csv(path: Path, columns: Sequence[str]) -> Iterator[TableRows]:
    """Read columns of a CSV file as texts; refuse a file without rows."""
    pyarrow = _pyarrow()
    from pyarrow import csv

    try:
        least, most = CSV_BLOCK
        table: Any = csv.read_csv(
            path,
            read_options=csv.ReadOptions(block_size=min(max(path.stat().st_size, least), most)),
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(  # a text may look like a number or a date
                strings_can_be_null=False, column_types=dict.fromkeys(columns, pyarrow.string())
            ),
        )
        names = table.column_names
    except (pyarrow.ArrowException, UnicodeDecodeError, OSError) as error:
        message = first_line(error)
        remedy = "; save it as UTF-8" if "utf" in message.lower() else ""
        raise InputError(f"{path} cannot be read as CSV: {message}{remedy}") from None
    check_columns(path, names, columns)
    if not len(table):
        raise no_rows(path)
    yield TableRows(path, 0, {name: table.column(name) for name in columns})


def read_json(path: Path, columns: Sequence[str]) -> Iterator[TableRows]:
    """Read columns of a file with one JSON object per line, or with one list of objects."""
    try:
        content = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        remedy = "; save it as UTF-8" if isinstance(error, UnicodeDecodeError) else ""
        raise InputError(f"{path} cannot be read as JSON: {first_line(error)}{remedy}") from None
    if content.lstrip().startswith("["):
        objects = _json(path, content, "the file")
    else:
        lines = enumerate(content.split("\n"), start=1)
        objects = [_json(path, line, f"line {number}") for number, line in lines if line.strip()]
    if not objects:
        raise no_rows(path)
    yield rows_of_objects(path, objects, columns)


def _json(path: Path, content: str, where: str) -> Any:
    try:
        return json.loads(content)
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path}: {where} is not JSON ({first_line(error)}); write one object per line, such as "
            '{"text": "...", "label": "..."}'
        ) from None


def rows_of_objects(place: Path | str, objects: Sequence[Any], columns: Sequence[str]) -> TableRows:
    """Return rows that are dicts, one entry per column."""
    for row, entries in enumerate(objects):
        if not isinstance(entries, dict):
            raise InputError(
                f"{place}: row {row} is {shown(entries)}; it must be an object with the columns "
                f"{', '.join(columns)}"
            )
        for column in columns:
            if column not in entries:
                names = cut(", ".join(map(str, entries)))
                raise InputError(f"{place}: row {row} has no {column!r}; it has {names}")
    return TableRows(place, 0, {column: [entries[column] for entries in objects] for column in columns})


def no_rows(path: Path | str) -> InputError:
    """Return the error for a table without rows."""
    return InputError(f"{path}: there are no rows in it; download it again, or give another file")


def _pyarrow() -> Any:
    try:
        import pyarrow
    except ImportError:
        raise InputError("reading data sets needs pyarrow; pip install 'fadamgc[data]'") from None
    return pyarrow


def check_columns(path: Path | str, names: Sequence[str], columns: Sequence[str]) -> None:
    """Refuse a table in which a column is missing, or occurs twice."""
    for column in columns:
        if names.count(column) != 1:
            number = "more than one" if column in names else "no"
            hint = nearest(column, names) if column not in names else ""
            raise InputError(
                f"{path}: there is {number} column {column!r}; it has {cut(', '.join(names))}{hint}"
            )
