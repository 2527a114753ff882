"""Pretrained transformers that classify texts; only LoRA adapters and head are trained."""

from __future__ import annotations

import copy
import hashlib
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from fadamgc.cache import cached
from fadamgc.errors import InputError, whole
from fadamgc.models.packed import Layout, Packed, packed
from fadamgc.models.pretrained import load_adapter, quiet, tokenizer_in
from fadamgc.models.reading import Reading
from fadamgc.runtime import memory

FORMAT = 2  # of the cached outputs of lower layers
# A config key with one of these words does not affect the outputs of the layers.
IGNORED_CONFIG_KEYS = ("drop", "label", "name_or_path", "version", "dtype")
PADDING = -1  # stands for a missing token
EVALUATED = 64  # texts per forward pass of an evaluation; they have similar lengths


class TextClassifier(nn.Module):
    """A classifier of encoded texts.

    The input has shape (texts, 1 or 2, length): for each token its number and, for pairs, its text (0 or 1).
    If lower layers were computed beforehand, the input is their output, (texts, length, width + 1), in which
    the last number is 1 for a token and 0 for padding.

    Args:
        net: a classifier of transformers, with its adapters.
        pad: the tokenizer's padding token.
        first: number of lower layers that were computed beforehand; 0: not even the embeddings were.
        reading: how texts are read, for ``predict``; the config of transformers gets its labels.
    """

    def __init__(self, net: nn.Module, pad: int, first: int = 0, reading: Reading | None = None) -> None:
        super().__init__()
        self.net, self.pad, self.first, self.reading = net, pad, first, reading
        if reading is not None:
            names = [str(label) for label in reading.labels]
            self.classifier.config.id2label = dict(enumerate(names))
            self.classifier.config.label2id = {name: i for i, name in enumerate(names)}

    @property
    def classifier(self) -> Any:
        """The classifier of transformers inside peft's model."""
        return self.net.get_submodule("base_model.model")

    @property
    def parts(self) -> Packed | None:
        """The parts of the classifier; None if ``packed`` does not support it."""
        return packed(self.classifier)

    def save_adapter(self, folder: str | Path) -> None:
        """Write adapters and head in peft's format; ``peft.PeftModel.from_pretrained`` reads them.

        ``config.json`` has the names of the labels. ``fadamgc predict FOLDER TEXT`` uses the folder.
        """
        net: Any = self.net
        target = Path(os.path.expanduser(folder))
        try:
            target.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".adapter-", dir=target) as scratch, quiet():
                net.save_pretrained(scratch, save_embedding_layers=False)
                if self.reading is not None:
                    self.reading.save(Path(scratch), self.classifier.config)
                for file in sorted(path for path in Path(scratch).iterdir() if path.is_file()):
                    os.replace(file, target / file.name)
        except OSError as error:
            raise InputError(f"folder={str(folder)!r} cannot be written: {error.strerror}") from None

    def predict(self, texts: Sequence[str | tuple[str, str]]) -> list[str | int]:
        """Return the most likely label of each text, or of each pair of texts."""
        reading = self._known_reading()
        return [reading.labels[i] for i in self.probabilities(texts).argmax(dim=1).tolist()]

    @torch.no_grad()
    def probabilities(self, texts: Sequence[str | tuple[str, str]]) -> Tensor:
        """Return the probability of each label, (texts, labels).

        If the lower layers were computed beforehand, the base model is loaded again.
        """
        reading = self._known_reading()
        first, second = reading.parts(texts)
        if not first:
            return torch.empty(0, len(reading.labels))
        if self.first:
            with TemporaryDirectory() as folder:
                self.save_adapter(folder)
                return load_classifier(reading, Path(folder)).probabilities(texts)
        tokens = encode(reading.tokenizer, first, second, reading.length)
        training, device = self.training, next(self.parameters()).device
        self.eval()
        try:
            logits: Tensor = self(tokens.to(device))
        finally:
            self.train(training)
        return torch.softmax(logits.float(), dim=1).cpu()

    def _known_reading(self) -> Reading:
        if self.reading is None:
            raise InputError("this model has no tokenizer and no labels; make it with fadamgc.tasks.text")
        return self.reading

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits. In evaluation mode, texts are processed in the order of their lengths."""
        mask = inputs[..., -1] > 0 if self.first else inputs[:, 0] != PADDING
        length = mask.sum(dim=1)
        if self.training or len(inputs) <= EVALUATED:
            return self._logits(inputs, mask[:, : int(length.max())])
        order = length.argsort(stable=True)
        pieces = [
            self._logits(inputs[rows], mask[rows, : int(length[rows].max())])
            for rows in torch.split(order, EVALUATED)
        ]
        return torch.cat(pieces)[order.argsort()]

    def _logits(self, inputs: Tensor, mask: Tensor) -> Tensor:
        parts, length = self.parts, mask.shape[1]
        if parts is None:
            return self._padded_logits(inputs[..., :length], mask)
        layout = Layout.of(mask)
        if self.first:
            return parts.run(layout.pack(inputs[:, :length, :-1]), layout, self.first)
        return parts.run(embedded(parts, inputs, layout), layout)

    def _padded_logits(self, tokens: Tensor, mask: Tensor) -> Tensor:
        """Return the logits as transformers computes them, for models that ``packed`` does not support."""
        ids = torch.where(mask, tokens[:, 0], self.pad).long()
        types = {} if tokens.shape[1] == 1 else {"token_type_ids": tokens[:, 1].clamp(min=0).long()}
        logits: Tensor = self.classifier(input_ids=ids, attention_mask=mask.long(), **types).logits
        return logits


def embedded(parts: Packed, tokens: Tensor, layout: Layout) -> Tensor:
    """Return the input of the first layer, without padding."""
    length = layout.mask.shape[1]
    planes = [layout.pack(tokens[:, i, :length]).long() for i in range(tokens.shape[1])]
    positions = layout.pack(torch.arange(length, device=tokens.device).expand(len(tokens), -1))
    return parts.embed(planes[0], positions, planes[1] if len(planes) > 1 else None)


def encode(tokenizer: Any, first: list[str], second: list[str] | None, length: int) -> Tensor:
    """Return texts, or pairs of texts, as the input of a ``TextClassifier``, cut to ``length`` tokens.

    If the tokenizer puts nothing between the texts of a pair (GPT-2's does not), a line break separates them.
    """
    pair = second is not None
    special = tokenizer.num_special_tokens_to_add(pair=pair)
    whole("length", length, special + (2 if pair else 1))  # one token per text
    pairs = () if second is None else (second if special else [f"\n{text}" for text in second],)
    encoded = tokenizer(first, *pairs, truncation=True, max_length=length)
    ids, types = encoded["input_ids"], encoded.get("token_type_ids")
    for i, tokens in enumerate(ids):
        while tokens and tokens[-1] == tokenizer.pad_token_id:  # transformers would take it for padding
            tokens.pop()
        if len(tokens) <= special:
            raise InputError(f"text {i} ({first[i][:40]!r}) has no tokens")
    planes = [ids] if not pair or types is None else [ids, types]
    columns = [
        [torch.tensor(row[: len(tokens)], dtype=torch.int32) for row, tokens in zip(plane, ids, strict=True)]
        for plane in planes
    ]
    return torch.stack([pad_sequence(c, batch_first=True, padding_value=PADDING) for c in columns], dim=1)


def load_classifier(reading: Reading, folder: Path, base: str | Path | None = None) -> TextClassifier:
    """Load a base model, its adapters and its head; ``base`` is its folder if it has moved."""
    tokenizer = reading.tokenizer
    if reading.own_tokenizer and tokenizer is None:
        tokenizer = tokenizer_in(folder)
    loaded = load_adapter(base or reading.base, len(reading.labels), folder, tokenizer)
    length = reading.length if loaded.positions is None else min(reading.length, loaded.positions)
    reading = replace(reading, tokenizer=loaded.tokenizer, length=length)
    return TextClassifier(loaded.net, loaded.tokenizer.pad_token_id, reading=reading).eval()


def without_lower_layers(model: TextClassifier, first: int) -> TextClassifier:
    """Return a classifier with the same weights whose inputs are the ``lower_outputs`` of texts."""
    shared = {id(p): p for p in model.net.parameters()}
    upper = TextClassifier(copy.deepcopy(model.net, shared), model.pad, first, model.reading)
    parts = upper.parts
    assert parts is not None
    if any(p.requires_grad for module in _lower_modules(parts, first) for p in module.parameters()):
        raise InputError(
            f"upper_layers={len(parts.layers) - first} does not train the layers below, but the adapters' "
            "config trains something there; omit upper_layers, or bias and modules_to_save for these layers"
        )
    for name in parts.embeddings:
        setattr(parts.body, name, nn.Identity())
    for i in range(first):
        parts.layers[i] = nn.Identity()
    return upper


def _lower_modules(parts: Packed, first: int) -> list[nn.Module]:
    return [*(getattr(parts.body, name) for name in parts.embeddings), *parts.layers[:first]]


@torch.no_grad()
def lower_outputs(model: TextClassifier, first: int, tokens: Tensor) -> Tensor:
    """Return the output of the first ``first`` layers per token, followed by 1 (0 for padding)."""
    parts, training = model.parts, model.training
    assert parts is not None
    outputs = torch.zeros(len(tokens), tokens.shape[2], int(model.classifier.config.hidden_size) + 1)
    mask = tokens[:, 0] != PADDING
    length = mask.sum(dim=1)
    model.eval()
    try:
        for rows in torch.split(length.argsort(stable=True), EVALUATED):
            longest = int(length[rows].max())
            layout = Layout.of(mask[rows, :longest])
            x = embedded(parts, tokens[rows], layout)
            for i in range(first):
                x = parts.layer(i, x, layout)
            outputs[rows, :longest, :-1] = layout.unpack(x)
    finally:
        model.train(training)
    outputs[..., -1] = mask.float()
    return outputs


def cached_lower_outputs(model: TextClassifier, first: int, tokens: Tensor) -> Tensor:
    """Return ``lower_outputs``, from the cache if possible; refuse more than half of the memory."""
    parts, (count, _, length) = model.parts, tokens.shape
    assert parts is not None
    size, available = 4 * count * length * (int(model.classifier.config.hidden_size) + 1), memory()
    if available is not None and size > available / 2:
        raise InputError(
            f"upper_layers={len(parts.layers) - first}: the outputs of the layers below, for {count:,} texts "
            f"of up to {length} tokens, take {size / 1e9:.0f} GB, more than half of the memory; use fewer "
            "texts or a smaller length, or omit upper_layers"
        )
    config = model.classifier.config.to_dict()
    facts = {k: config[k] for k in sorted(config) if not any(word in k for word in IGNORED_CONFIG_KEYS)}
    digest = hashlib.sha256(repr((FORMAT, facts, first, tuple(tokens.shape))).encode())
    digest.update(tokens.numpy().tobytes())
    for module in _lower_modules(parts, first):
        for value in module.state_dict().values():
            digest.update(value.contiguous().numpy().tobytes())
    name = f"texts/{digest.hexdigest()[:32]}"
    return torch.from_numpy(cached(name, lambda: lower_outputs(model, first, tokens).numpy()))
