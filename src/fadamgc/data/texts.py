"""Texts and their labels: from known data sets, and from your own parquet or CSV files."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fadamgc.data.sources import files_of_kind
from fadamgc.data.tables import Rows, read_csv, read_parquet
from fadamgc.errors import InputError, not_accepted

log = logging.getLogger("fadamgc")

HEADER = re.compile(r"[A-Za-z][\w-]*: ")  # how a post with headers begins


class Texts(NamedTuple):
    """Texts, or pairs of texts, and their labels."""

    first: list[str]
    second: list[str] | None
    y: npt.NDArray[np.int64]

    def rows(self, numbers: npt.NDArray[np.int64]) -> Texts:
        """Return the texts and labels of some rows."""
        second = None if self.second is None else [self.second[i] for i in numbers]
        return Texts([self.first[i] for i in numbers], second, self.y[numbers])


def load(name: str, split: str, root: Path | None = None) -> Texts:
    """Read the "train" or "test" part of a known data set; without ``root``, from ``data_root()``.

    From newsgroup posts, headers, footers and quoted text are removed because they reveal the label; posts
    that become empty are dropped.
    """
    source, files = files_of_kind(name, "texts", split, root)
    rows = read_parquet(files, (*source.inputs, source.label))
    newsgroups = name == "20_newsgroups"  # on the hub, some posts are empty
    texts = _collect(rows, source.inputs, source.label, files[0].parent, source.classes, newsgroups)
    return without_headers(texts) if newsgroups else texts


def read(path: str | Path, columns: Sequence[str], label: str, field: str = "data") -> Texts:
    """Read texts from your own file.

    Args:
        path: a .parquet or .csv file.
        columns: name of the column of texts, or two names for pairs of texts.
        label: name of the column of labels, which are whole numbers from 0.
        field: the name of the path in messages.
    """
    file = Path(os.path.expanduser(path))
    if len(columns) not in (1, 2):
        raise not_accepted("columns", list(columns), "one column of texts, or two")
    if not file.is_file():
        raise InputError(f"{field}={str(path)!r} {'is not a file' if file.exists() else 'does not exist'}")
    match file.suffix.lower():
        case ".parquet":
            rows = read_parquet([file], (*columns, label))
        case ".csv":
            rows = read_csv(file, columns, label)
        case _:
            raise InputError(f"{field}={str(path)!r} is neither a .parquet nor a .csv file")
    return _collect(rows, columns, label, file)


def _collect(
    batches: Iterator[Rows],
    columns: Sequence[str],
    label: str,
    place: Path,
    classes: int | None = None,
    skip_empty: bool = False,
) -> Texts:
    """Return the texts of all rows; refuse or skip rows with an empty text."""
    parts: list[list[str]] = [[] for _ in columns]
    labels: list[npt.NDArray[np.int64]] = []
    for rows in batches:
        y = rows.labels(label, classes)
        texts = [rows.texts(column) for column in columns]
        if skip_empty:
            full = [i for i in range(len(y)) if all(values[i].strip() for values in texts)]
            y, texts = y[full], [[values[i] for i in full] for values in texts]
        for column, values, part in zip(columns, texts, parts, strict=True):
            for row, text in enumerate(values, rows.first):
                if not text.strip():
                    raise InputError(f"{rows.file}: row {row} has an empty text in {column!r}")
            part += values
        labels.append(y)
    if not parts[0]:
        raise InputError(f"{place}: there are no rows of texts; give another file or folder")
    return Texts(parts[0], parts[1] if len(parts) > 1 else None, np.concatenate(labels))


def without_headers(texts: Texts) -> Texts:
    """Remove headers, footers and quoted text from newsgroup posts; drop posts that become empty.

    If most posts do not begin with a header, all were cleaned before and stay as they are.
    """
    from sklearn.datasets._twenty_newsgroups import (
        strip_newsgroup_footer,
        strip_newsgroup_header,
        strip_newsgroup_quoting,
    )

    def clean(post: str) -> str:
        return str(strip_newsgroup_footer(strip_newsgroup_quoting(strip_newsgroup_header(post))))

    with_header = sum(HEADER.match(post) is not None for post in texts.first)
    originals = 2 * with_header > len(texts.first)
    posts = [(clean(post) if originals else post).strip() for post in texts.first]
    kept = [i for i, post in enumerate(posts) if post]
    if len(kept) < len(posts):
        dropped = len(posts) - len(kept)
        log.info("%d of %d posts are nothing but headers, footers and quotes", dropped, len(posts))
    return Texts([posts[i] for i in kept], None, texts.y[kept])
