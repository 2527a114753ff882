"""Texts and their labels of your own: from files, lists, dicts, data frames and Hugging Face Datasets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from fadamgc.data.tables import (
    TableRows,
    check_columns,
    no_rows,
    read_csv,
    read_json,
    read_parquet,
    rows_of_objects,
)
from fadamgc.data.texts import Texts, collect
from fadamgc.errors import InputError, cut, listed, not_accepted, shown, whole

Key: TypeAlias = str | int

SUFFIXES = (".csv", ".parquet", ".jsonl", ".json")
FORMS = (
    "a .csv, .parquet, .jsonl or .json file, a pair (texts, labels), a list of dicts, a pandas DataFrame, or "
    "a Hugging Face Dataset"
)
WHOLE_NUMBER = re.compile(r"-?\d{1,18}")
ALL_DIFFERENT = 10  # if more rows than this all have different labels, the column has no labels


class OwnTexts(NamedTuple):
    """Texts with their labels and clients, as they are in the data."""

    place: str  # name of the data in messages
    first: list[str]
    second: list[str] | None
    labels: list[Key]  # all texts, or all whole numbers
    owner: list[Key] | None
    names: tuple[str, ...] | None = None  # names of the labels 0, 1, ..., if the data have them


def read(
    data: Any, columns: Sequence[str], label: str, client: str | None = None, field: str = "data"
) -> OwnTexts:
    """Read texts from one of ``FORMS``; ``field`` is the name of the argument in messages.

    ``columns`` are the names of the column of texts, or of two columns for pairs of texts; ``client`` is the
    column with the client of each text.
    """
    if len(columns) not in (1, 2):
        raise not_accepted("columns", list(columns), "one column of texts, or two")
    columns = tuple(columns)
    if label in columns:
        raise InputError(f"label={label!r} is a column of texts, too; give the name of the column of labels")
    wanted = tuple(dict.fromkeys((*columns, label, *(() if client is None else (client,)))))
    place, names, as_text = field, None, False
    if isinstance(data, (str, Path)):
        place = f"{field}={str(data)!r}"
        rows = list(_read_file(data, wanted, field))
        as_text = Path(data).suffix.lower() == ".csv"
    elif hasattr(data, "column_names") and hasattr(data, "features"):
        rows = [_from_columns(field, data.column_names, data.with_format(None), wanted)]
        names = getattr(data.features[label], "names", None)
    else:
        rows = [_in_memory(data, columns, label, wanted, field)]
    parts = collect(rows, columns)
    return OwnTexts(
        place,
        parts[0],
        parts[1] if len(parts) > 1 else None,
        _keys(rows, label, as_text),
        None if client is None else _keys(rows, client, as_text),
        None if names is None else tuple(names),
    )


def _read_file(path: str | Path, columns: Sequence[str], field: str) -> Iterator[TableRows]:
    file = Path(os.path.expanduser(path))
    if not file.is_file():
        raise InputError(f"{field}={str(path)!r} {'is not a file' if file.exists() else 'does not exist'}")
    match file.suffix.lower():
        case ".parquet":
            return read_parquet([file], columns)
        case ".csv":
            return read_csv(file, columns)
        case ".jsonl" | ".json":
            return read_json(file, columns)
        case _:
            raise InputError(f"{field}={str(path)!r} is not one of {', '.join(SUFFIXES)}")


def _in_memory(data: Any, columns: Sequence[str], label: str, wanted: Sequence[str], field: str) -> TableRows:
    """Return the rows of a data frame, of a dict of columns, of a list of dicts, or of (texts, labels)."""
    if hasattr(data, "iloc"):
        frame = data.set_axis([str(name) for name in data.columns], axis=1)
        return _from_columns(field, list(frame.columns), frame, wanted)
    if isinstance(data, Mapping):
        for name, part in data.items():
            if hasattr(part, "column_names"):
                raise InputError(
                    f"{field} has the parts {', '.join(map(str, data))}; give one of them, such as "
                    f"{field}=dataset[{name!r}]"
                )
        return _from_columns(field, [str(name) for name in data], data, wanted)
    if not isinstance(data, (list, tuple)):
        raise InputError(f"{field} of type {type(data).__name__} is not accepted; give {FORMS}")
    if not data:
        raise no_rows(field)
    if len(data) != 2 or isinstance(data[0], Mapping):
        return rows_of_objects(field, data, wanted)
    return _from_pair(data[0], data[1], columns, label, wanted, field)


def _from_pair(
    texts: Any, labels: Any, columns: Sequence[str], label: str, wanted: Sequence[str], field: str
) -> TableRows:
    """Return the rows of (texts, labels), in which a text may be a pair of texts."""
    if len(wanted) > len(columns) + 1:
        raise InputError(
            f"{field}=(texts, labels) has no column {wanted[-1]!r}; give a list of dicts or a data frame "
            "with that column"
        )
    parts = {"texts": _list(texts), "labels": _list(labels)}
    for name, part in parts.items():
        if part is None:
            raise InputError(f"{field}=(texts, labels): {name} is not a list")
    texts, labels = parts["texts"] or [], parts["labels"] or []
    if len(texts) != len(labels):
        raise InputError(f"{field} has {len(texts)} texts and {len(labels)} labels; give one label per text")
    if len(columns) == 1:
        return _from_columns(field, wanted, {columns[0]: texts, label: labels}, wanted)
    for row, pair in enumerate(texts):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InputError(f"{field}: row {row} has {shown(pair)}; it must be a pair of texts")
    entries = {columns[0]: [pair[0] for pair in texts], columns[1]: [pair[1] for pair in texts]}
    return _from_columns(field, wanted, entries | {label: labels}, wanted)


def has_pairs(data: Any) -> bool:
    """Whether data are (texts, labels) in which the first text is a pair of texts."""
    if not isinstance(data, (tuple, list)) or len(data) != 2 or not hasattr(data[0], "__len__"):
        return False
    texts = _list(data[0]) or [None]
    return isinstance(texts[0], (tuple, list))


def _from_columns(place: str, names: Sequence[str], table: Any, columns: Sequence[str]) -> TableRows:
    """Return rows of a table whose columns are found by name."""
    check_columns(place, names, columns)
    entries = {name: _list(table[name]) for name in columns}
    sizes = {}
    for name, values in entries.items():
        if values is None:
            raise InputError(f"{place}: {name!r} is not a list")
        sizes[name] = len(values)
    if len(set(sizes.values())) > 1:
        lengths = ", ".join(f"{name}: {size}" for name, size in sizes.items())
        raise InputError(f"{place}: the columns have different numbers of rows ({lengths})")
    if not all(sizes.values()):
        raise no_rows(place)
    return TableRows(place, 0, entries)


def _list(values: Any) -> list[Any] | None:
    """Return values, an array or a tensor as a list; None for a text, a dict or a single value."""
    if isinstance(values, (str, bytes, Mapping)):
        return None
    return listed(values.tolist() if hasattr(values, "tolist") else values)


def _keys(batches: Sequence[TableRows], column: str, as_text: bool) -> list[Key]:
    """Return a column of labels or clients; in a CSV file, texts that are all whole numbers are numbers."""
    keys = [key for rows in batches for key in rows.keys(column)]
    if as_text and all(WHOLE_NUMBER.fullmatch(str(key)) for key in keys):
        return [int(key) for key in keys]
    for row, key in enumerate(keys):
        if isinstance(key, str) != isinstance(keys[0], str):
            raise InputError(
                f"{batches[0].file}: row {row} has {column}={shown(key)} and row 0 has "
                f"{column}={shown(keys[0])}; write all of them as texts, or all as whole numbers"
            )
    return keys


# Labels as numbers.


def number_labels(
    sets: Sequence[OwnTexts], label: str, classes: int | Sequence[str] | None
) -> tuple[list[Texts], tuple[Key, ...]]:
    """Return texts whose labels are 0, 1, ..., and the label that each number stands for.

    ``classes`` is a number of labels, or their names; None: the labels of the first set, in sorted order.
    """
    known = _known_labels(sets[0], label, classes)
    return [_numbered(part, label, known) for part in sets], known


def _numbered(part: OwnTexts, label: str, known: Sequence[Key]) -> Texts:
    have_names = isinstance(known[0], str) and isinstance(part.labels[0], int)
    keys: Sequence[Key] = range(len(known)) if have_names else known
    numbers = {key: i for i, key in enumerate(keys)}
    for row, key in enumerate(part.labels):
        if key not in numbers:
            raise InputError(
                f"{part.place}: row {row} has {label}={shown(key)}; there are {len(known)} classes, "
                f"{cut(', '.join(map(str, numbers)))}: give classes= if there are more"
            )
    y = np.array([numbers[key] for key in part.labels], dtype=np.int64)
    owner = None if part.owner is None else np.array(part.owner, dtype=object)
    return Texts(part.first, part.second, y, owner)


def _known_labels(train: OwnTexts, label: str, classes: int | Sequence[str] | None) -> tuple[Key, ...]:
    if classes is None and train.names is not None:
        classes = train.names
    present = sorted(set(train.labels), key=lambda key: (isinstance(key, str), key))
    if classes is None:
        if len(present) < 2:
            raise InputError(
                f"{train.place}: all rows have {label}={shown(present[0])}; there must be at least two "
                "labels: give classes= if some are not in the data"
            )
        if len(present) == len(train.labels) > ALL_DIFFERENT:
            raise InputError(
                f"{train.place}: all {len(present)} rows have different values of {label!r}; give the name "
                "of the column of labels, label="
            )
        return tuple(present)
    if not isinstance(classes, (list, tuple)):
        count = whole("classes", classes, 2)
        if isinstance(present[0], int):
            return tuple(range(count))
        if len(present) != count:
            raise InputError(
                f"classes={count}, but {train.place} has the labels {cut(', '.join(map(str, present)))}; "
                "give the names of all labels, classes=[...]"
            )
        return tuple(present)
    if not all(isinstance(name, str) for name in classes) or len(set(classes)) != len(classes):
        raise not_accepted("classes", classes, "a number, or a list of different names")
    whole("the number of classes", len(classes), 2)
    return tuple(classes)
