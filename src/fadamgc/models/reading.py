"""How texts become the inputs of a classifier, and its outputs labels; saved in a file next to adapters."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fadamgc.errors import InputError, is_unicode, listed, not_accepted, shown, whole

FILE = "fadamgc.json"
CONFIG = "config.json"  # of transformers; its id2label has the names of the labels


@dataclass(frozen=True)
class Reading:
    """How texts are read."""

    base: str  # the base model: its name, or the path of its folder
    length: int  # largest number of tokens of a text or pair
    columns: tuple[str, ...]  # the column of texts in the train data, or two columns for pairs
    labels: tuple[str | int, ...]  # what the outputs 0, 1, ... stand for
    tokenizer: Any = field(default=None, repr=False)
    own_tokenizer: bool = False  # whether the tokenizer is not the base model's

    def __deepcopy__(self, memo: object) -> Reading:
        """Return the same object: a copy of a model does not need a copy of its tokenizer."""
        return self

    def parts(self, texts: Sequence[str | tuple[str, str]]) -> tuple[list[str], list[str] | None]:
        """Return the first texts, and the second ones of pairs; refuse anything else."""
        rows = None if isinstance(texts, (str, bytes, dict)) else listed(texts)
        if rows is None:
            raise not_accepted("texts", texts, "a list of texts")
        columns: list[list[str]] = [[] for _ in self.columns]
        for number, row in enumerate(rows):
            entries = [row] if isinstance(row, str) else list(row) if isinstance(row, (tuple, list)) else []
            if len(entries) != len(columns):
                wanted = "one text" if len(columns) == 1 else "two texts, a pair"
                raise InputError(
                    f"text {number} is {shown(row)}; the model classifies {' and '.join(self.columns)}: give "
                    f"{wanted}"
                )
            for entry, column in zip(entries, columns, strict=True):
                if not isinstance(entry, str):
                    raise InputError(f"text {number} is {shown(entry)}, which is not a text")
                if not entry.strip():
                    raise InputError(f"text {number}: the text is empty")
                if not is_unicode(entry):
                    raise InputError(f"text {number}: the text {entry!r} is not UTF-8")
                column.append(entry)
        return columns[0], columns[1] if len(columns) > 1 else None

    def save(self, folder: Path, config: Any) -> None:
        """Write what predictions need, except the weights, into a folder; ``config`` is of transformers."""
        config.save_pretrained(folder)
        if self.own_tokenizer:
            self.tokenizer.save_pretrained(folder)
        facts = {k: v for k, v in asdict(self).items() if k not in ("labels", "tokenizer")}
        (folder / FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")


def saved_reading(folder: Path) -> Reading | None:
    """Return what ``Reading.save`` wrote, without the tokenizer; None if it wrote nothing."""
    if not (folder / FILE).is_file():
        return None
    try:
        facts = json.loads((folder / FILE).read_text(encoding="utf-8"))
        names = json.loads((folder / CONFIG).read_text(encoding="utf-8"))["id2label"]
        labels = tuple(str(names[str(i)]) for i in range(len(names)))
        whole("length", facts["length"], 1, 2**31 - 1)
        if not isinstance(facts["base"], str) or len(facts["columns"]) not in (1, 2):
            raise ValueError("base and columns")
        columns = tuple(map(str, facts["columns"]))
        return Reading(facts["base"], facts["length"], columns, labels, None, facts["own_tokenizer"] is True)
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{folder}: {FILE} or {CONFIG} is damaged ({shown(str(error))})") from None
