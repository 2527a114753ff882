"""Pretrained transformers that classify texts, of which only LoRA adapters and the head are trained."""

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
from fadamgc.data.texts import Texts
from fadamgc.errors import InputError, whole
from fadamgc.models.packed import Layout, Packed, packed
from fadamgc.models.pretrained import Base, quiet
from fadamgc.runtime import memory

FORMAT = 2  # of cached outputs of lower layers
NO_MATTER = ("drop", "label", "name_or_path", "version", "dtype")  # in a config, to what layers compute
PADDING = -1  # a token that is none
EVALUATED = 64  # texts in one forward pass of an evaluation, about equally long


class TextClassifier(nn.Module):
    """Texts as tokens, (texts, 1 or 2, length): what each token is, and to which text of a pair it belongs.

    Where the lower layers have been computed beforehand, texts are what came out of these, (texts, length,
    width + 1), the last number being 1 for a token and 0 for none.

    Args:
        net: a classifier of transformers', with its adapters.
        pad: the token that stands for none.
        first: so many layers have been computed beforehand, embeddings included; 0: nothing has.
    """

    def __init__(self, net: nn.Module, pad: int, first: int = 0) -> None:
        super().__init__()
        self.net, self.pad, self.first = net, pad, first

    @property
    def classifier(self) -> Any:
        """The classifier of transformers' inside peft's model."""
        return self.net.get_submodule("base_model.model")

    @property
    def in_parts(self) -> bool:
        """Whether its parts are known, so that the lower layers can be computed beforehand."""
        return packed(self.classifier) is not None

    def save_adapter(self, folder: str | Path) -> None:
        """Write adapters and head in peft's own format; ``peft.PeftModel.from_pretrained`` reads them."""
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
        """Logits. In evaluation mode, texts go through the net in the order of their lengths."""
        there = inputs[..., -1] > 0 if self.first else inputs[:, 0] != PADDING
        length = there.sum(dim=1)
        if self.training or len(inputs) <= EVALUATED:
            return self._logits(inputs, there[:, : int(length.max())])
        order = length.argsort(stable=True)
        pieces = [
            self._logits(inputs[rows], there[rows, : int(length[rows].max())])
            for rows in torch.split(order, EVALUATED)
        ]
        return torch.cat(pieces)[order.argsort()]

    def _logits(self, inputs: Tensor, there: Tensor) -> Tensor:
        """Of texts that are cut to the longest of them."""
        parts = packed(self.classifier)
        if parts is None:
            return self._padded(inputs[..., : there.shape[1]], there)
        layout = Layout.of(there)
        if self.first:
            return parts.run(layout.pack(inputs[:, : there.shape[1], :-1]), layout, self.first)
        return parts.run(embedded(parts, inputs, layout), layout)

    def _padded(self, tokens: Tensor, there: Tensor) -> Tensor:
        """As transformers does it, for models whose parts are not known."""
        ids = torch.where(there, tokens[:, 0], self.pad).long()
        more = {} if tokens.shape[1] == 1 else {"token_type_ids": tokens[:, 1].clamp(min=0).long()}
        logits: Tensor = self.classifier(input_ids=ids, attention_mask=there.long(), **more).logits
        return logits


def embedded(parts: Packed, tokens: Tensor, layout: Layout) -> Tensor:
    """What goes into the first layer, for the tokens that are there."""
    length = layout.there.shape[1]
    planes = [layout.pack(tokens[:, i, :length]).long() for i in range(tokens.shape[1])]
    positions = layout.pack(torch.arange(length, device=tokens.device).expand(len(tokens), -1))
    return parts.embed(planes[0], positions, planes[1] if len(planes) > 1 else None)


def encode(tokenizer: Any, texts: Texts, length: int) -> Tensor:
    """Texts as tokens for a ``TextClassifier``; what is longer is cut.

    Where a tokenizer puts nothing between the texts of a pair, as GPT-2's, a new line is there.
    """
    pair = texts.second is not None
    marks = tokenizer.num_special_tokens_to_add(pair=pair)
    whole("length", length, marks + (2 if pair else 1))  # a token of each text
    first, second = texts.first, texts.second
    if second is not None and not marks:
        second = [f"\n{text}" for text in second]
    made = tokenizer(first, *(() if second is None else (second,)), truncation=True, max_length=length)
    ids, types = made["input_ids"], made.get("token_type_ids")
    for i, one in enumerate(ids):
        while one and one[-1] == tokenizer.pad_token_id:  # to transformers, the text ends before these
            one.pop()
        if len(one) <= marks:
            raise InputError(f"text {i} ({texts.first[i][:40]!r}) has no tokens")
    planes = [ids] if texts.second is None or types is None else [ids, types]
    width = max(map(len, ids))
    tokens = torch.full((len(ids), len(planes), width), PADDING, dtype=torch.int32)
    for p, plane in enumerate(planes):
        for i, row in enumerate(plane):
            tokens[i, p, : len(ids[i])] = torch.tensor(row[: len(ids[i])], dtype=torch.int32)
    return tokens


def without_lower_layers(model: TextClassifier, base: Base, upper_layers: int) -> TextClassifier:
    """The classifier for texts that have gone through the lower layers (``lower``)."""
    first = base.layers - upper_layers
    frozen = {id(p): p for p in model.net.parameters()}
    upper = TextClassifier(copy.deepcopy(model.net, frozen), model.pad, first)  # other modules, same weights
    parts = packed(upper.classifier)
    assert parts is not None
    gone = [getattr(parts.body, name) for name in parts.embeddings] + list(parts.layers[:first])
    if any(p.requires_grad for part in gone for p in part.parameters()):
        raise InputError(
            f"upper_layers={upper_layers} leaves the layers below as they are, but the adapters' config "
            "trains something there; leave upper_layers out, or bias and modules_to_save below it"
        )
    for name in parts.embeddings:
        setattr(parts.body, name, nn.Identity())
    for i in range(first):
        parts.layers[i] = nn.Identity()
    return upper


@torch.no_grad()
def lower(model: TextClassifier, base: Base, upper_layers: int, tokens: Tensor) -> Tensor:
    """What comes out of the layers without adapters, for each token; with a 1 beside it, 0 where none is."""
    width = int(model.classifier.config.hidden_size)
    found = torch.zeros(len(tokens), tokens.shape[2], width + 1)
    there = tokens[:, 0] != PADDING
    length = there.sum(dim=1)
    parts = packed(model.classifier)
    assert parts is not None
    was = model.training
    model.eval()
    try:
        for rows in torch.split(length.argsort(stable=True), EVALUATED):
            longest = int(length[rows].max())
            layout = Layout.of(there[rows, :longest])
            x = embedded(parts, tokens[rows], layout)
            for i in range(base.layers - upper_layers):
                x = parts.layer(i, x, layout)
            found[rows, :longest, :-1] = layout.spread(x)
    finally:
        model.train(was)
    found[..., -1] = there.float()
    return found


def kept_lower(model: TextClassifier, base: Base, upper_layers: int, tokens: Tensor) -> Tensor:
    """As ``lower``, from the cache where the same was computed before."""
    _check_memory(model, upper_layers, tokens)
    first = base.layers - upper_layers
    parts = packed(model.classifier)
    assert parts is not None
    weights = [*(getattr(parts.body, name) for name in parts.embeddings), *parts.layers[:first]]
    config = model.classifier.config.to_dict()
    facts = {key: config[key] for key in sorted(config) if not any(word in key for word in NO_MATTER)}
    digest = hashlib.sha256(repr((FORMAT, facts, first, tuple(tokens.shape))).encode())
    digest.update(tokens.numpy().tobytes())
    for part in weights:
        for value in part.state_dict().values():
            digest.update(value.contiguous().numpy().tobytes())
    name = f"texts/{digest.hexdigest()[:32]}"
    return torch.from_numpy(cached(name, lambda: lower(model, base, upper_layers, tokens).numpy()))


def _check_memory(model: TextClassifier, upper_layers: int, tokens: Tensor) -> None:
    count, _, length = tokens.shape
    need = 4 * count * length * (int(model.classifier.config.hidden_size) + 1)
    there = memory()
    if there is not None and need > there / 2:
        raise InputError(
            f"upper_layers={upper_layers}: what comes out of the layers below, for {count:,} texts of up to "
            f"{length} tokens, takes {need / 1e9:.0f} GB, more than half of the memory; take fewer texts or "
            "a smaller length, or leave upper_layers out"
        )
