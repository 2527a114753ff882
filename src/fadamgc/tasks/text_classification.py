"""Text classification with pretrained transformers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.data import TensorDataset

from fadamgc.data import dirichlet, iid, natural
from fadamgc.data.own_texts import SUFFIXES
from fadamgc.data.sources import SOURCES
from fadamgc.data.split import client_tests_of
from fadamgc.data.texts import Texts
from fadamgc.errors import INT64_MAX, InputError, nearest, not_accepted, shown, whole
from fadamgc.models import text as models
from fadamgc.models.pretrained import MINILM, load_base, saved_base
from fadamgc.models.reading import Reading
from fadamgc.task import Task
from fadamgc.tasks.build import classification
from fadamgc.tasks.text_data import TextData, known_texts, own_texts

AUTO = "auto"
SHARE = 0.2  # of your own texts that is held out as test data


def text(
    base: str | Path = MINILM,
    data: Any = "glue/sst2",
    *,
    test: Any = AUTO,
    columns: str | Sequence[str] | None = None,
    label: str | None = None,
    client: str | None = None,
    classes: int | Sequence[str] | None = None,
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
        data: "20_newsgroups", "glue/sst2", "glue/qnli", "glue/qqp", or your own data: a .csv, .parquet,
            .jsonl or .json file, a pair (texts, labels), a list of dicts, a pandas DataFrame, or a Hugging
            Face Dataset.
        test: share of your own texts to hold out as test data (of each label; with ``client``, of each
            client), or test data in one of the forms of ``data``; None: no evaluation. "auto" is 0.2 for your
            own data, and the test part of a known data set.
        columns: the column of texts in your own data, or two columns for pairs; None is "text".
        label: the column of labels in your own data, texts or whole numbers; None is "label". The labels are
            numbered in sorted order, and predictions have their names.
        client: the column with the client of each text. Each value is a client, and ``clients`` and
            ``alpha`` are not used.
        classes: number of labels, or their names in order, if not all of them occur in your own data, or if
            they are the numbers 0, 1, ... in your data and have names.
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
        >>> task = fadamgc.tasks.text(data="reviews.csv", columns="review", client="user")  # doctest: +SKIP
    """
    whole("clients", clients, 1)
    whole("seed", seed, 0, INT64_MAX)
    whole("length", length, 1, 2**31 - 1)
    if not isinstance(base, (str, Path)):
        raise not_accepted("base", base, "a name or a path")
    options = {"columns": columns, "label": label, "client": client, "classes": classes}
    found = _text_data(data, test, options)
    train, y = found.train, torch.from_numpy(found.train.y)
    if train.owner is not None:
        parts = natural(train.owner)
    else:
        parts = iid(y, clients, seed) if alpha is None else dirichlet(y, clients, alpha, seed)
    model, inputs = encode_for_model(
        *(found, [train] if found.test is None else [train, found.test], seed),
        base=base,
        adapters=adapters,
        tokenizer=tokenizer,
        upper_layers=upper_layers,
        dropout=dropout,
        length=length,
    )
    test_pair = None if found.test is None else (inputs[1], torch.from_numpy(found.test.y))
    name = "texts"
    if isinstance(data, (str, Path)):
        name = str(data) if str(data) in SOURCES else Path(data).stem
    tests = None
    if found.test is not None and test_pair is not None:
        tests = client_tests_of(train.owner, found.test.owner, TensorDataset(*test_pair))
    return classification(model, inputs[0], y, parts.indices, test_pair, name, tests)


def _text_data(data: Any, test: Any, options: dict[str, Any]) -> TextData:
    """Return the texts to train on and to test on."""
    is_auto = isinstance(test, str) and test == AUTO
    if isinstance(data, (str, Path)) and str(data) in SOURCES:
        for field, option in {"test": None if is_auto else test, **options}.items():
            if option is not None:
                raise InputError(f"{field}={shown(option)} is for your own data, not for {data}")
        return known_texts(str(data), with_test=test is not None)
    if isinstance(data, (str, Path)) and Path(data).suffix.lower() not in SUFFIXES:
        names = [name for name, source in SOURCES.items() if source.kind == "texts"]
        raise InputError(
            f"data={str(data)!r} is not known{nearest(str(data), names)}; "
            f"give a {', '.join(SUFFIXES)} file or one of {', '.join(names)}"
        )
    return own_texts(data, SHARE if is_auto else test, **options)


def encode_for_model(
    data: TextData,
    sets: Sequence[Texts],
    seed: int,
    *,
    base: str | Path,
    length: int,
    upper_layers: int | None,
    tokenizer: Any = None,
    **options: Any,
) -> tuple[models.TextClassifier, list[Tensor]]:
    """Load a model and encode sets of texts as its inputs; the other arguments are those of ``text``.

    With ``upper_layers``, the model has only these layers; its inputs are the outputs of the lower layers.
    """
    classes = len(data.labels)
    loaded = load_base(base, classes, seed, tokenizer=tokenizer, upper_layers=upper_layers, **options)
    longest = length if loaded.positions is None else min(length, loaded.positions)
    reading = Reading(
        saved_base(base), longest, data.columns, data.labels, loaded.tokenizer, tokenizer is not None
    )
    model = models.TextClassifier(loaded.net, loaded.tokenizer.pad_token_id, reading=reading)
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
