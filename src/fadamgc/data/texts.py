"""Texts and their labels, of known data sets."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fadamgc.data.sources import data_root, files_of_kind, source
from fadamgc.data.tables import TableRows, read_parquet

log = logging.getLogger("fadamgc")

NAMES = {
    "glue/sst2": ("negative", "positive"),
    "glue/qnli": ("entailment", "not entailment"),
    "glue/qqp": ("not duplicate", "duplicate"),
}
HEADER = re.compile(r"[A-Za-z][\w-]*: ")  # how a post with headers begins


class Texts(NamedTuple):
    """Texts, or pairs of texts, and their labels."""

    first: list[str]
    second: list[str] | None
    y: npt.NDArray[np.int64]
    owner: npt.NDArray[Any] | None = None  # the client of each text, if the data have clients

    def rows(self, numbers: npt.NDArray[np.int64]) -> Texts:
        """Return the texts and labels of some rows."""
        second = None if self.second is None else [self.second[i] for i in numbers]
        owner = None if self.owner is None else self.owner[numbers]
        return Texts([self.first[i] for i in numbers], second, self.y[numbers], owner)


def load(name: str, split: str) -> Texts:
    """Read the "train" or "test" part of a known data set.

    From newsgroup posts, headers, footers and quoted text are removed because they reveal the label; posts
    that are empty afterwards are dropped.
    """
    known, files = files_of_kind(name, "texts", split)
    rows = list(read_parquet(files, (*known.inputs, known.label)))
    newsgroups = name == "20_newsgroups"  # on the hub, some posts are empty
    parts = collect(rows, known.inputs, allow_empty=newsgroups)
    y = np.concatenate([part.labels(known.label, known.classes) for part in rows])
    texts = Texts(parts[0], parts[1] if len(parts) > 1 else None, y)
    return without_headers(texts) if newsgroups else texts


def label_names(name: str) -> tuple[str, ...]:
    """Return the names of a known data set's labels; their numbers where names are not known."""
    classes = source(name).classes
    if name in NAMES:
        return NAMES[name]
    try:
        names = json.loads((data_root() / name / "labels.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        names = []
    return tuple(map(str, names)) if len(names) == classes else tuple(map(str, range(classes)))


def collect(
    batches: Iterable[TableRows], columns: Sequence[str], allow_empty: bool = False
) -> list[list[str]]:
    """Return the texts of all rows, one list per column."""
    parts: list[list[str]] = [[] for _ in columns]
    for rows in batches:
        for column, part in zip(columns, parts, strict=True):
            part += rows.texts(column, allow_empty)
    return parts


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
