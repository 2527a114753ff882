"""BERT and GPT-2 without computation for padding.

The texts of a batch differ in length, and transformers computes as much for each text as for the longest.
Here the tokens of all texts are concatenated, so that everything except the attention (a few percent of the
work) is computed for real tokens only. A classifier uses one token of the last layer's output, so that layer
is computed for this token alone (its keys and values for all). The outputs equal those of transformers, to
rounding: the parts are its own modules, with their adapters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Layout(NamedTuple):
    """The positions of a batch's tokens."""

    mask: Tensor  # (texts, length): False is padding
    position: Tensor  # for each token, its index in (texts x length)
    first: Tensor  # for each text, the number of its first token
    last: Tensor  # for each text, the number of its last token

    @classmethod
    def of(cls, mask: Tensor) -> Layout:
        """Return the layout of texts whose padding is on the right."""
        end = mask.sum(dim=1).cumsum(0)
        first = torch.cat([end.new_zeros(1), end[:-1]])
        return cls(mask, mask.flatten().nonzero()[:, 0], first, end - 1)

    def pack(self, x: Tensor) -> Tensor:
        """Return (texts, length, ...) as (tokens, ...)."""
        x = x.flatten(0, 1)
        return x if len(self.position) == len(x) else x[self.position]

    def unpack(self, x: Tensor) -> Tensor:
        """Return (tokens, width) as (texts, length, width), with 0 for padding."""
        texts, length = self.mask.shape
        if len(x) != texts * length:
            x = x.new_zeros(texts * length, x.shape[1]).index_copy(0, self.position, x)
        return x.view(texts, length, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool, **options: Any) -> Tensor:
        """Compute the attention within each text; q has all tokens, or one token per text."""
        single = len(q) == len(self.mask)

        def split(x: Tensor) -> Tensor:
            return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

        query = split(q[:, None] if single else self.unpack(q))
        if causal and not single:  # padding comes after all tokens
            options["is_causal"] = True
        else:
            options["attn_mask"] = self.mask[:, None, None]
        out = scaled_dot_product_attention(query, split(self.unpack(k)), split(self.unpack(v)), **options)
        out = out.transpose(1, 2).flatten(2)
        return out[:, 0] if single else self.pack(out)


class Packed(ABC):
    """The parts of a transformer that classifies texts.

    Args:
        classifier: a model of transformers.
    """

    body: Any
    layers: nn.ModuleList
    embeddings: tuple[str, ...]  # names of the modules in the body that come before the layers

    def __init__(self, classifier: Any) -> None:
        self.classifier = classifier

    def run(self, x: Tensor, layout: Layout, first: int = 0) -> Tensor:
        """Return the logits from the input (tokens, width) of layer ``first``."""
        for i in range(first, len(self.layers)):
            selected = self.selected(layout) if i == len(self.layers) - 1 else None
            x = self.layer(i, x, layout, selected)
        return self.head(x)

    @abstractmethod
    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """Return the input of the first layer; each argument has one number per token."""

    @abstractmethod
    def layer(self, i: int, x: Tensor, layout: Layout, selected: Tensor | None = None) -> Tensor:
        """Return the output of a layer, for all tokens or for the selected ones."""

    @abstractmethod
    def selected(self, layout: Layout) -> Tensor:
        """Return the number of the token of each text that the head uses."""

    @abstractmethod
    def head(self, x: Tensor) -> Tensor:
        """Return the logits from the last layer's output for the selected tokens."""


class _Bert(Packed):
    """An encoder; the head uses the first token."""

    embeddings = ("embeddings",)

    def __init__(self, classifier: Any) -> None:
        super().__init__(classifier)
        self.body, self.layers = classifier.bert, classifier.bert.encoder.layer

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        types = torch.zeros_like(tokens) if types is None else types
        x: Tensor = self.body.embeddings(tokens[None], types[None], positions[None])
        return x[0]

    def layer(self, i: int, x: Tensor, layout: Layout, selected: Tensor | None = None) -> Tensor:
        layer: Any = self.layers[i]
        attention = layer.attention.self
        residual = x if selected is None else x[selected]
        hidden = layout.attend(
            attention.query(residual),
            attention.key(x),
            attention.value(x),
            attention.num_attention_heads,
            causal=False,
            dropout_p=attention.dropout.p if attention.training else 0.0,
            scale=attention.scaling,
        )
        hidden = layer.attention.output(hidden, residual)
        out: Tensor = layer.output(layer.intermediate(hidden), hidden)
        return out

    def selected(self, layout: Layout) -> Tensor:
        return layout.first

    def head(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier.classifier(self.classifier.dropout(self.body.pooler(x[:, None])))
        return logits


class _Gpt2(Packed):
    """A decoder; the head uses the last token, which depends on the whole text."""

    embeddings = ("wte", "wpe", "drop")

    def __init__(self, classifier: Any) -> None:
        super().__init__(classifier)
        self.body, self.layers = classifier.transformer, classifier.transformer.h

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        x = self.body.wte(tokens) + self.body.wpe(positions)
        dropped: Tensor = self.body.drop(x if types is None else x + self.body.wte(types))
        return dropped

    def layer(self, i: int, x: Tensor, layout: Layout, selected: Tensor | None = None) -> Tensor:
        layer: Any = self.layers[i]
        attention = layer.attn
        q, k, v = attention.c_attn(layer.ln_1(x)).chunk(3, dim=1)
        if selected is not None:
            q, x = q[selected], x[selected]
        hidden = layout.attend(
            *(q, k, v, attention.num_heads),
            causal=True,
            dropout_p=attention.attn_dropout.p if attention.training else 0.0,
            scale=attention.scaling,
        )
        x = x + attention.resid_dropout(attention.c_proj(hidden))
        out: Tensor = x + layer.mlp(layer.ln_2(x))
        return out

    def selected(self, layout: Layout) -> Tensor:
        return layout.last

    def head(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier.score(self.body.ln_f(x))
        return logits


KINDS: dict[str, type[_Bert | _Gpt2]] = {
    "BertForSequenceClassification": _Bert,
    "GPT2ForSequenceClassification": _Gpt2,
}


def packed(classifier: nn.Module) -> Packed | None:
    """Return the parts of a classifier of transformers; None if it cannot be computed without padding."""
    kind = KINDS.get(type(classifier).__name__)
    config: Any = getattr(classifier, "config", None)
    if kind is None or (kind is _Bert and config.is_decoder) or config.add_cross_attention:
        return None
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        return None
    parts = kind(classifier)
    if parts.body.is_gradient_checkpointing:
        return None
    if any(hasattr(getattr(layer, "attn", None), "modules_to_save") for layer in parts.layers):
        return None  # peft has copied the attention; adapters would be applied to the wrong copy
    return parts
