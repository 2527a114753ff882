"""Text classification with pretrained transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from fadamgc.data import dirichlet, iid, texts
from fadamgc.data.sources import SOURCES
from fadamgc.data.texts import Texts
from fadamgc.errors import INT64_MAX, InputError, nearest, not_accepted, whole
from fadamgc.models import text as models
from fadamgc.models.pretrained import MINILM, load_base
from fadamgc.task import Task
from fadamgc.tasks.build import classification


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
    """Classify texts with a pretrained transformer; only its adapters and its head are trained.

    The flat vector, the clients' states and the messages contain only adapters and head. The base model is in
    memory once, for all clients.

    Args:
        base: a sequence-classification model of Hugging Face: "minilm" (all-MiniLM-L6-v2, included in
            ``fadamgc[text]``), a folder, or a name on the hub.
        data: "20_newsgroups", "glue/sst2", "glue/qnli", "glue/qqp", or your own .parquet or .csv file.
        test: your own file to test on, with the same columns; known data sets have a test part.
        columns: the column of texts in your own files, or two columns for pairs; None is "text".
        label: the column of labels in your own files, whole numbers from 0; None is "label".
        classes: number of labels, if not all of them occur in your own files.
        clients: number of clients.
        alpha: concentration of the Dirichlet partition; None: all clients get the same mixture of labels.
        seed: of the partition and of the initial weights of adapters and head.
        adapters: a ``peft.LoraConfig``; None is rank 8 on queries and values (GPT-2: 16 on all projections).
        tokenizer: a tokenizer of transformers; None is the base model's.
        upper_layers: number of layers, from the top, that have adapters. The outputs of the layers below are
            computed once, before the first round, without dropout. None: all layers have adapters.
        dropout: dropout rate of the base model; None is the base model's default.
        length: largest number of tokens of a text (or pair); longer ones are cut.

    Example:
        >>> task = fadamgc.tasks.text(data="reviews.csv", columns=("review",), clients=20)  # doctest: +SKIP
    """
    whole("clients", clients, 1)
    whole("seed", seed, 0, INT64_MAX)
    whole("length", length, 1, 2**31 - 1)
    for field, value in (("base", base), ("data", data), ("test", test)):
        if not isinstance(value, (str, Path)) and not (field == "test" and value is None):
            raise not_accepted(field, value, "a name or a path")
    by_name = str(data) in SOURCES
    if by_name:
        for field, option in {"test": test, "columns": columns, "label": label, "classes": classes}.items():
            if option is not None:
                raise InputError(f"{field}={option!r} is for your own files; {data} has its own {field}")
        sets = [texts.load(str(data), split) for split in ("train", "test")]
        classes = SOURCES[str(data)].classes
    else:
        sets, classes = _read_files(data, test, columns, label, classes)
    labels = [torch.from_numpy(part.y) for part in sets]
    parts = iid(labels[0], clients, seed) if alpha is None else dirichlet(labels[0], clients, alpha, seed)
    model, inputs = encode_for_model(
        *(sets, classes, seed),
        base=base,
        adapters=adapters,
        tokenizer=tokenizer,
        upper_layers=upper_layers,
        dropout=dropout,
        length=length,
    )
    test_pair = (inputs[1], labels[1]) if len(sets) > 1 else None
    name = str(data) if by_name else Path(data).stem
    return classification(model, inputs[0], labels[0], parts.indices, test_pair, name)


def _read_files(
    data: str | Path,
    test: str | Path | None,
    columns: str | Sequence[str] | None,
    label: str | None,
    classes: int | None,
) -> tuple[list[Texts], int]:
    """Return the texts to train on, those to test on if there is a file, and the number of classes."""
    if Path(data).suffix.lower() not in (".parquet", ".csv"):
        names = [name for name, source in SOURCES.items() if source.kind == "texts"]
        raise InputError(
            f"data={str(data)!r} is not known{nearest(str(data), names)}; "
            f"give a .parquet or .csv file or one of {', '.join(names)}"
        )
    columns = ("text",) if columns is None else (columns,) if isinstance(columns, str) else columns
    if not isinstance(columns, (list, tuple)) or not all(isinstance(column, str) for column in columns):
        raise not_accepted("columns", columns, "the name of a column, or a list of two")
    label = "label" if label is None else label
    if not isinstance(label, str):
        raise not_accepted("label", label, "the name of a column")
    files = {"data": data} if test is None else {"data": data, "test": test}
    sets = [texts.read(path, columns, label, field) for field, path in files.items()]
    if classes is None:
        present = np.unique(sets[0].y)
        classes = len(present)
        missing = np.flatnonzero(present != np.arange(classes))
        if len(missing) or classes < 2:
            raise InputError(
                f"data={str(data)!r}: the labels go up to {present[-1]}, but no row has "
                f"{label}={missing[0] if len(missing) else 1}; number the classes 0, 1, 2, ..., or give "
                "classes= if some are not in the data"
            )
    whole("classes", classes, 2)
    for (field, path), part in zip(files.items(), sets, strict=True):
        beyond = np.flatnonzero(part.y >= classes)
        if len(beyond):
            raise InputError(
                f"{field}={str(path)!r}: row {beyond[0]} has {label}={part.y[beyond[0]]}; there are "
                f"{classes} classes, 0 to {classes - 1}: give classes= if there are more"
            )
    return sets, classes


def encode_for_model(
    sets: Sequence[Texts],
    classes: int,
    seed: int,
    *,
    base: str | Path,
    length: int,
    upper_layers: int | None,
    **options: Any,
) -> tuple[models.TextClassifier, list[Tensor]]:
    """Load a model and encode sets of texts as its inputs; the arguments are those of ``text``.

    With ``upper_layers``, the model has only these layers; its inputs are the outputs of the lower layers.
    """
    loaded = load_base(base, classes, seed, upper_layers=upper_layers, **options)
    model = models.TextClassifier(loaded.net, loaded.tokenizer.pad_token_id)
    inputs = [models.encode(loaded.tokenizer, texts.first, texts.second, length) for texts in sets]
    width = max(tokens.shape[2] for tokens in inputs)
    if loaded.positions is not None and width > loaded.positions:
        raise InputError(
            f"length={length} is not accepted; base={str(base)!r} takes at most {loaded.positions} tokens"
        )
    inputs = [pad(tokens, (0, width - tokens.shape[2]), value=models.PADDING) for tokens in inputs]
    parts = model.parts
    first = 0 if upper_layers is None or parts is None else len(parts.layers) - upper_layers
    if not first:
        return model, inputs
    upper = models.without_lower_layers(model, first)
    return upper, [models.cached_lower_outputs(model, first, tokens) for tokens in inputs]
