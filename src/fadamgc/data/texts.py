"""Data sets of texts: those that are known by name, and one's own as parquet or CSV."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fadamgc.data import parquet
from fadamgc.data.sources import Source, files_of, source
from fadamgc.errors import InputError, cut, shown

log = logging.getLogger("fadamgc")

HEADER = re.compile(r"[A-Za-z][\w-]*: ")  # how most posts begin that have their headers


class Texts(NamedTuple):
    """Texts, or pairs of texts, and their labels."""

    first: list[str]
    second: list[str] | None
    y: npt.NDArray[np.int64]

    def rows(self, numbers: npt.NDArray[np.int64]) -> Texts:
        """Some of them."""
        first, second = (
            None if part is None else [part[i] for i in numbers] for part in (self.first, self.second)
        )
        assert first is not None
        return Texts(first, second, self.y[numbers])


def load(
    name: str, split: str, root: Path | None = None, progress: Callable[[int], object] | None = None
) -> Texts:
    """One part of a known data set.

    Of newsgroup posts, headers, footers and quotes are taken away, because they give the label away; posts of
    which nothing stays are left out.

    Args:
        name: of the data set.
        split: "train" or "test".
        root: the data root; None is where ``data_root`` says.
        progress: told how many rows have been read.
    """
    known = source(name)
    if known.kind != "texts":
        raise InputError(f"data={name!r} is a set of {known.kind}, not of texts")
    files = files_of(known, known.splits[0 if split == "train" else 1], root)
    rows = _checked(parquet.read(files, (*known.inputs, known.label)), known)
    found = collect(rows, known.inputs, known.label, files[0].parent, progress)
    return without_headers(found) if known.name == "20_newsgroups" else found


def read(path: str | Path, columns: Sequence[str], label: str, field: str = "data") -> Texts:
    """Texts of one's own.

    Args:
        path: a .parquet or .csv file.
        columns: of the texts; one, or two for pairs.
        label: the column of labels, whole numbers from 0.
        field: what the path is called in messages.
    """
    given, path = path, Path(os.path.expanduser(path))
    if len(columns) not in (1, 2):
        raise InputError(f"columns={list(columns)} is not accepted; give one column of texts, or two")
    if not path.is_file():
        raise InputError(f"{field}={str(given)!r} {'is no file' if path.exists() else 'does not exist'}")
    kind = path.suffix.lower()
    if kind == ".parquet":
        rows = parquet.read([path], (*columns, label))
    elif kind == ".csv":
        rows = _csv(path, columns, label)
    else:
        raise InputError(f"{field}={str(given)!r} is neither a .parquet nor a .csv file")
    return collect(rows, columns, label, path)


def collect(
    rows: Iterator[parquet.Rows],
    columns: Sequence[str],
    label: str,
    place: Path,
    progress: Callable[[int], object] | None = None,
) -> Texts:
    """The texts of all rows; one that is empty or none is refused."""
    texts: list[list[str]] = [[] for _ in columns]
    y: list[npt.NDArray[np.int64]] = []
    for some in rows:
        file = some.file
        for column, found in zip(columns, texts, strict=True):
            for i, text in enumerate(parquet.values(some, column)):
                if not isinstance(text, str):
                    raise InputError(
                        f"{file}: row {some.first + i} has {column}={shown(text)}, which is not a text"
                    )
                if not text.strip():
                    raise InputError(f"{file}: row {some.first + i} has an empty text in {column!r}")
                found.append(text)
        y.append(parquet.labels(some, label, None))
        if progress is not None:
            progress(len(texts[0]))
    if not texts[0]:
        raise InputError(f"{place}: there are no rows of texts; is it the right one?")
    return Texts(texts[0], texts[1] if len(texts) > 1 else None, np.concatenate(y))


def without_headers(texts: Texts) -> Texts:
    """Newsgroup posts without headers, footers and quotes; those of which nothing stays are left out.

    Where most posts do not begin with a header, this has been done already, and all stay as they are.
    """
    from sklearn.datasets._twenty_newsgroups import (
        strip_newsgroup_footer,
        strip_newsgroup_header,
        strip_newsgroup_quoting,
    )

    def bare(post: str) -> str:
        return str(strip_newsgroup_footer(strip_newsgroup_quoting(strip_newsgroup_header(post))))

    whole = 2 * sum(HEADER.match(post) is not None for post in texts.first) > len(texts.first)
    posts = [(bare(post) if whole else post).strip() for post in texts.first]
    kept = [i for i, post in enumerate(posts) if post]
    if len(kept) < len(posts):
        log.info(
            "%d of %d posts are nothing but headers, footers and quotes", len(posts) - len(kept), len(posts)
        )
    return Texts([posts[i] for i in kept], None, texts.y[kept])


def _checked(rows: Iterator[parquet.Rows], known: Source) -> Iterator[parquet.Rows]:
    for some in rows:
        parquet.labels(some, known.label, known.classes)
        if known.name == "20_newsgroups":  # some are empty after an earlier removal of headers
            texts = parquet.values(some, known.inputs[0])
            keep = [i for i, text in enumerate(texts) if not isinstance(text, str) or text.strip()]
            some = some._replace(columns={name: column.take(keep) for name, column in some.columns.items()})
        yield some


def _csv(path: Path, columns: Sequence[str], label: str) -> Iterator[parquet.Rows]:
    try:
        import pyarrow as pa
        from pyarrow import csv
    except ImportError:
        raise InputError("reading texts needs pyarrow; pip install 'fadamgc[data]'") from None
    try:
        table: Any = csv.read_csv(
            path,
            read_options=csv.ReadOptions(block_size=min(max(path.stat().st_size, 1 << 20), (1 << 31) - 1)),
            parse_options=csv.ParseOptions(newlines_in_values=True),
            convert_options=csv.ConvertOptions(  # a text may look like a number or a date
                strings_can_be_null=False, column_types=dict.fromkeys(columns, pa.string())
            ),
        )
        names = table.column_names
    except (pa.ArrowException, UnicodeDecodeError, OSError) as error:
        said = str(error).strip().splitlines()[0]
        more = "; save it as UTF-8" if "utf" in said.lower() else ""
        raise InputError(f"{path} cannot be read as CSV: {said}{more}") from None
    for column in (*columns, label):
        if names.count(column) != 1:
            what = "no column" if column not in names else "more than one column"
            raise InputError(f"{path}: there is {what} {column!r}; it has {cut(', '.join(names))}")
    yield parquet.Rows(path, 0, {name: table.column(name) for name in (*columns, label)})
