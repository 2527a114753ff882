"""Pretrained transformers that classify texts; only LoRA adapters and head are trained."""

from __future__ import annotations

import copy
import hashlib
import os
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor, nn

from fadamgc.cache import cached
from fadamgc.errors import InputError, whole
from fadamgc.models.packed import Layout, Packed, packed
from fadamgc.models.pretrained import Base, quiet
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
    """

    def __init__(self, net: nn.Module, pad: int, first: int = 0) -> None:
        super().__init__()
        self.net, self.pad, self.first = net, pad, first

    @property
    def classifier(self) -> Any:
        """The classifier of transformers inside peft's model."""
        return self.net.get_submodule("base_model.model")

    @property
    def in_parts(self) -> bool:
        """Whether the classifier's parts are known, so that lower layers can be computed beforehand."""
        return packed(self.classifier) is not None

    @property
    def parts(self) -> Packed:
        """The parts of a classifier for which ``in_parts`` is True."""
        parts = packed(self.classifier)
        assert parts is not None
        return parts

    def save_adapter(self, folder: str | Path) -> None:
        """Write adapters and head in peft's format; ``peft.PeftModel.from_pretrained`` reads them."""
        net: Any = self.net
        place = Path(os.path.expanduser(folder))
        try:
            place.mkdir(parents=True, exist_ok=True)
            with TemporaryDirectory(prefix=".adapter-", dir=place) as scratch, quiet():
                net.save_pretrained(scratch, save_embedding_layers=False)
                for file in sorted(Path(scratch).iterdir()):
                    os.replace(file, place / file.name)
        except OSError as error:
            raise InputError(f"folder={str(folder)!r} cannot be written: {error.strerror}") from None

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
        parts = packed(self.classifier)
        length = mask.shape[1]
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
    result = torch.full((len(ids), len(planes), max(map(len, ids))), PADDING, dtype=torch.int32)
    for p, plane in enumerate(planes):
        for i, row in enumerate(plane):
            result[i, p, : len(ids[i])] = torch.tensor(row[: len(ids[i])], dtype=torch.int32)
    return result


def without_lower_layers(model: TextClassifier, base: Base, upper_layers: int) -> TextClassifier:
    """Return a classifier with the same weights whose inputs are the ``lower_outputs`` of texts."""
    first = base.layers - upper_layers
    shared = {id(p): p for p in model.net.parameters()}
    upper = TextClassifier(copy.deepcopy(model.net, shared), model.pad, first)
    parts = upper.parts
    if any(p.requires_grad for module in _lower_modules(parts, first) for p in module.parameters()):
        raise InputError(
            f"upper_layers={upper_layers} does not train the layers below, but the adapters' config "
            "trains something there; omit upper_layers, or bias and modules_to_save for these layers"
        )
    for name in parts.embeddings:
        setattr(parts.body, name, nn.Identity())
    for i in range(first):
        parts.layers[i] = nn.Identity()
    return upper


def _lower_modules(parts: Packed, first: int) -> list[nn.Module]:
    return [*(getattr(parts.body, name) for name in parts.embeddings), *parts.layers[:first]]


@torch.no_grad()
def lower_outputs(model: TextClassifier, base: Base, upper_layers: int, tokens: Tensor) -> Tensor:
    """Return the output of the layers without adapters for each token, followed by 1 (0 for padding)."""
    width = int(model.classifier.config.hidden_size)
    outputs = torch.zeros(len(tokens), tokens.shape[2], width + 1)
    mask = tokens[:, 0] != PADDING
    length = mask.sum(dim=1)
    parts, training = model.parts, model.training
    model.eval()
    try:
        for rows in torch.split(length.argsort(stable=True), EVALUATED):
            longest = int(length[rows].max())
            layout = Layout.of(mask[rows, :longest])
            x = embedded(parts, tokens[rows], layout)
            for i in range(base.layers - upper_layers):
                x = parts.layer(i, x, layout)
            outputs[rows, :longest, :-1] = layout.unpack(x)
    finally:
        model.train(training)
    outputs[..., -1] = mask.float()
    return outputs


def cached_lower_outputs(model: TextClassifier, base: Base, upper_layers: int, tokens: Tensor) -> Tensor:
    """Return ``lower_outputs``, from the cache if possible."""
    _check_memory(model, upper_layers, tokens)
    first = base.layers - upper_layers
    config = model.classifier.config.to_dict()
    facts = {k: config[k] for k in sorted(config) if not any(word in k for word in IGNORED_CONFIG_KEYS)}
    digest = hashlib.sha256(repr((FORMAT, facts, first, tuple(tokens.shape))).encode())
    digest.update(tokens.numpy().tobytes())
    for module in _lower_modules(model.parts, first):
        for value in module.state_dict().values():
            digest.update(value.contiguous().numpy().tobytes())
    name = f"texts/{digest.hexdigest()[:32]}"
    return torch.from_numpy(cached(name, lambda: lower_outputs(model, base, upper_layers, tokens).numpy()))


def _check_memory(model: TextClassifier, upper_layers: int, tokens: Tensor) -> None:
    count, _, length = tokens.shape
    size = 4 * count * length * (int(model.classifier.config.hidden_size) + 1)
    available = memory()
    if available is not None and size > available / 2:
        raise InputError(
            f"upper_layers={upper_layers}: the outputs of the layers below, for {count:,} texts of up to "
            f"{length} tokens, take {size / 1e9:.0f} GB, more than half of the memory; use fewer texts or "
            "a smaller length, or omit upper_layers"
        )
