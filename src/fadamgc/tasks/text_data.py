"""The texts of a task: of a known data set, or your own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from fadamgc.data import own_texts as own
from fadamgc.data import texts
from fadamgc.data.own_texts import Key
from fadamgc.data.sources import source
from fadamgc.data.split import hold_out
from fadamgc.data.texts import Texts
from fadamgc.errors import InputError, not_accepted, real
from fadamgc.loading import find_file
from fadamgc.tasks.sections import TextFileTask, TextTask

TEST_SEED = 0  # the same rows are held out in every run


class TextData(NamedTuple):
    """Texts to train on and to test on, and what their labels stand for."""

    train: Texts
    test: Texts | None
    labels: tuple[Key, ...]
    columns: tuple[str, ...]  # one, or two for pairs


def known_texts(name: str, with_test: bool) -> TextData:
    """Read a known data set."""
    test = texts.load(name, "test") if with_test else None
    return TextData(texts.load(name, "train"), test, texts.label_names(name), source(name).inputs)


def own_texts(
    data: Any,
    test: Any,
    columns: str | Sequence[str] | None,
    label: str | None,
    client: str | None,
    classes: int | Sequence[str] | None,
) -> TextData:
    """Read your own data; ``fadamgc.tasks.text`` explains the arguments."""
    columns, label = _column_names(columns, own.has_pairs(data)), "label" if label is None else label
    for field, name in {"label": label, "client": client}.items():
        if not isinstance(name, str) and not (field == "client" and name is None):
            raise not_accepted(field, name, "the name of a column")
    share = None if isinstance(test, bool) else real(test)
    if share is not None and not 0 < share < 1:
        raise not_accepted("test", test, "a share > 0 and < 1, test data, or None")
    parts = [own.read(data, columns, label, client)]
    if test is not None and share is None:
        parts.append(own.read(test, columns, label, field="test"))
    sets, labels = own.number_labels(parts, label, classes)
    train, held_out = sets[0], sets[1] if len(sets) > 1 else None
    if share is not None:
        try:
            rows, test_rows = hold_out(torch.from_numpy(train.y), train.owner, share, TEST_SEED)
        except InputError as error:
            raise InputError(f"{error}; test=None trains without an evaluation") from None
        train, held_out = train.rows(rows), train.rows(test_rows)
    return TextData(train, held_out, labels, columns)


def section_texts(spec: TextTask, with_test: bool = True) -> TextData:
    """Read the data of a [task] section."""
    if not isinstance(spec, TextFileTask):
        return known_texts(spec.data, with_test)
    test = spec.test if isinstance(spec.test, float) else find_file(spec.test)
    return own_texts(find_file(spec.data), test, spec.columns, spec.label, spec.client, spec.classes)


def _column_names(columns: Any, pairs: bool) -> tuple[str, ...]:
    if columns is None:
        return ("first", "second") if pairs else ("text",)
    names = (columns,) if isinstance(columns, str) else columns
    if not isinstance(names, (list, tuple)) or not all(isinstance(name, str) for name in names):
        raise not_accepted("columns", columns, "the name of a column, or a list of two")
    return tuple(names)
