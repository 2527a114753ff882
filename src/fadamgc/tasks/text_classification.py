"""Ready-made tasks."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fadamgc.data import dirichlet, iid, texts
from fadamgc.data.sources import SOURCES
from fadamgc.data.texts import Texts
from fadamgc.errors import InputError, nearest, whole
from fadamgc.models import text as models
from fadamgc.models.pretrained import MINILM, load_base
from fadamgc.task import Pair, Task


def text(
    base: str | Path = MINILM,
    data: str | Path = "glue/sst2",
    *,
    test: str | Path | None = None,
    columns: str | Sequence[str] | None = None,
    label: str | None = None,
    classes: int | None = None,
    clients: int = 100,
    alpha: float | None = 0.1,
    seed: int = 0,
    adapters: Any = None,
    tokenizer: Any = None,
    upper_layers: int | None = None,
    dropout: float | None = None,
    length: int = 128,
) -> Task:
    """Texts to be classified by a pretrained transformer, of which adapters and head are trained.

    Only these are in the flat vector, corrected, kept by clients and sent; the base model is in memory once.

    Args:
        base: a sequence-classification model of Hugging Face's: "minilm" (all-MiniLM-L6-v2, which comes with
            ``fadamgc[text]``), a folder, or a name on the hub.
        data: "20_newsgroups", "glue/sst2", "glue/qnli", "glue/qqp", or a .parquet or .csv file.
        test: a file of the same columns to test on; for a data set that is known, its own test part.
        columns: of texts in one's own files: one, or two for pairs; None is "text".
        label: the column of labels there, whole numbers from 0; None is "label".
        classes: how many labels there are, if not all of them are in the train data.
        clients: among how many the train data are dealt out.
        alpha: of the Dirichlet distribution of labels; None: all clients get the same mixture.
        seed: of the partition, the adapters and the head.
        adapters: a ``peft.LoraConfig``; None is rank 8 on queries and values (GPT-2: 16 on all projections).
        tokenizer: another than the base model's.
        upper_layers: adapters in so many layers from the top; what is below is computed once, for all
            rounds, without dropout. None: adapters in all layers.
        dropout: in the base model; None: as it has it.
        length: tokens of a text (or pair); the rest is cut.

    Example:
        >>> task = fadamgc.tasks.text(data="reviews.csv", columns=("review",), clients=20)  # doctest: +SKIP
    """
    whole("clients", clients, 1)
    whole("seed", seed, 0, 2**63 - 1)
    whole("length", length, 1, 2**31 - 1)
    for field, value in (("base", base), ("data", data), ("test", test)):
        if not isinstance(value, (str, Path)) and not (field == "test" and value is None):
            raise InputError(f"{field}={value!r} is not accepted; give a name or a path")
    known = str(data) in SOURCES
    if known:
        for field, own in {"test": test, "columns": columns, "label": label, "classes": classes}.items():
            if own is not None:
                raise InputError(f"{field}={own!r} is for files of your own; {data} has its own {field}")
        train, held = texts.load(str(data), "train"), texts.load(str(data), "test")
        outputs = SOURCES[str(data)].classes
    else:
        train, held, outputs = _own(data, test, columns, label, classes)
    labels = torch.from_numpy(train.y)
    dealt = iid(labels, clients, seed) if alpha is None else dirichlet(labels, clients, alpha, seed)
    tested = known or test is not None
    model, encoded = prepare(
        [train, held] if tested else [train],
        *(outputs, seed),
        base=base,
        adapters=adapters,
        tokenizer=tokenizer,
        upper_layers=upper_layers,
        dropout=dropout,
        length=length,
    )
    pairs: list[Pair] = [
        (encoded[0][rows], labels[rows]) for rows in (torch.from_numpy(own) for own in dealt.indices)
    ]
    return Task(
        model,
        cross_entropy,
        pairs,
        (encoded[1], torch.from_numpy(held.y)) if tested else None,
        metric="accuracy",
        name=str(data) if known else Path(data).stem,
    )


def _own(
    data: str | Path,
    test: str | Path | None,
    columns: str | Sequence[str] | None,
    label: str | None,
    classes: int | None,
) -> tuple[Texts, Texts, int]:
    """Texts to train and to test on from files, and the number of classes."""
    if Path(data).suffix.lower() not in (".parquet", ".csv"):
        names = [name for name, source in SOURCES.items() if source.kind == "texts"]
        raise InputError(
            f"data={str(data)!r} is not known{nearest(str(data), names)}; "
            f"give a .parquet or .csv file or one of {', '.join(names)}"
        )
    columns = "text" if columns is None else columns
    columns = (columns,) if isinstance(columns, str) else columns
    if not isinstance(columns, (list, tuple)) or not all(isinstance(one, str) for one in columns):
        raise InputError(f"columns={columns!r} is not accepted; give the name of a column, or a list of two")
    label = "label" if label is None else label
    if not isinstance(label, str):
        raise InputError(f"label={label!r} is not accepted; give the name of a column")
    train = texts.read(data, columns, label)
    held = train if test is None else texts.read(test, columns, label, "test")
    if classes is None:
        there = np.unique(train.y)
        classes = len(there)
        missing = np.flatnonzero(there != np.arange(classes))
        if len(missing) or classes < 2:
            raise InputError(
                f"data={str(data)!r}: the labels go up to {there[-1]}, but no row has "
                f"{label}={missing[0] if len(missing) else 1}; number the classes 0, 1, 2, ..., or give "
                "classes= if some are not in the data"
            )
    whole("classes", classes, 2)
    for field, path, y in (("data", data, train.y), ("test", test, held.y)):
        beyond = np.flatnonzero(y >= classes)
        if len(beyond):
            raise InputError(
                f"{field}={str(path)!r}: row {beyond[0]} has {label}={y[beyond[0]]}; there are {classes} "
                f"classes, 0 to {classes - 1}: give classes= if there are more"
            )
    return train, held, classes


def prepare(
    parts: Sequence[Texts],
    classes: int,
    seed: int,
    *,
    base: str | Path = MINILM,
    adapters: Any = None,
    tokenizer: Any = None,
    upper_layers: int | None = None,
    dropout: float | None = None,
    length: int = 128,
) -> tuple[models.TextClassifier, list[Tensor]]:
    """A model, and texts as it takes them; see ``text``. Lower layers that are not trained are in neither."""
    loaded = load_base(
        base,
        classes,
        seed,
        adapters=adapters,
        tokenizer=tokenizer,
        upper_layers=upper_layers,
        dropout=dropout,
    )
    model = models.TextClassifier(loaded.net, loaded.tokenizer.pad_token_id)
    found = [models.encode(loaded.tokenizer, part.first, part.second, length) for part in parts]
    width = max(tokens.shape[2] for tokens in found)
    if loaded.positions is not None and width > loaded.positions:
        raise InputError(
            f"length={length} is not accepted: base={str(base)!r} takes {loaded.positions} tokens at the most"
        )
    found = [_as_wide(tokens, width) for tokens in found]
    if upper_layers is not None and upper_layers < loaded.layers and model.in_parts:
        upper = models.without_lower_layers(model, loaded, upper_layers)
        found = [models.cached_lower_outputs(model, loaded, upper_layers, tokens) for tokens in found]
        model = upper
    return model, found


def _as_wide(tokens: Tensor, width: int) -> Tensor:
    more = width - tokens.shape[2]
    return torch.nn.functional.pad(tokens, (0, more), value=models.PADDING)
