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


def load(name: str, split: str) -> Texts:
    """Read the "train" or "test" part of a known data set.

    From newsgroup posts, headers, footers and quoted text are removed because they reveal the label; posts
    that are empty afterwards are dropped.
    """
    source, files = files_of_kind(name, "texts", split)
    rows = read_parquet(files, (*source.inputs, source.label))
    newsgroups = name == "20_newsgroups"  # on the hub, some posts are empty
    texts = _collect(rows, source.inputs, source.label, source.classes, allow_empty=newsgroups)
    return without_headers(texts) if newsgroups else texts


def read(path: str | Path, columns: Sequence[str], label: str, field: str = "data") -> Texts:
    """Read texts from your own .parquet or .csv file; ``field`` is the name of the path in messages.

    ``columns`` are the names of the column of texts, or of two columns for pairs of texts. The labels are
    whole numbers from 0.
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
    return _collect(rows, columns, label, classes=None, allow_empty=False)


def _collect(
    batches: Iterator[Rows], columns: Sequence[str], label: str, classes: int | None, allow_empty: bool
) -> Texts:
    """Return the texts of all rows."""
    parts: list[list[str]] = [[] for _ in columns]
    labels: list[npt.NDArray[np.int64]] = []
    for rows in batches:
        labels.append(rows.labels(label, classes))
        for column, part in zip(columns, parts, strict=True):
            part += rows.texts(column, allow_empty)
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
    if dropped := len(posts) - len(kept):
        log.info("%d of %d posts are empty without headers, footers and quotes", dropped, len(posts))
    return Texts([posts[i] for i in kept], None, texts.y[kept])
