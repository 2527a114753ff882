"""BERT and GPT-2 without computation for padding.

The texts of a batch differ in length, and transformers computes as much for each text as for the longest.
Here the tokens of all texts are concatenated, so that everything except the attention (a few percent of the
work) is computed for real tokens only. A classifier uses one token per text of the last layer's output, so
that layer is computed for these tokens only (its keys and values for all tokens). The modules are those of
transformers, with their adapters, and the outputs are equal up to rounding.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Layout(NamedTuple):
    """The positions of a batch's tokens: in (texts, length), with padding, and in (tokens,), without."""

    mask: Tensor  # (texts, length): False is padding
    position: Tensor  # (tokens,): the token's index in the flattened mask
    first: Tensor  # (texts,): the index of the text's first token
    last: Tensor  # (texts,): the index of the text's last token

    @classmethod
    def of(cls, mask: Tensor) -> Layout:
        """Return the layout of texts with padding on the right."""
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

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, heads: int, scale: float, dropout: nn.Dropout, causal: bool
    ) -> Tensor:
        """Compute the attention within each text; q is for all tokens, or for one token per text."""
        single = len(q) == len(self.mask)
        causal = causal and not single  # no mask is needed then: padding comes after all tokens

        def split(x: Tensor) -> Tensor:
            return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

        query = split(q[:, None] if single else self.unpack(q))
        key, value = split(self.unpack(k)), split(self.unpack(v))
        mask = None if causal else self.mask[:, None, None]
        p = dropout.p if dropout.training else 0.0
        out = scaled_dot_product_attention(query, key, value, mask, p, is_causal=causal, scale=scale)
        out = out.transpose(1, 2).flatten(2)
        return out[:, 0] if single else self.pack(out)


class Packed(ABC):
    """The parts of a classifier of transformers."""

    embeddings: ClassVar[tuple[str, ...]]  # names of the modules in the body that come before the layers
    stack: ClassVar[str]  # name of the list of layers in the body
    selected: ClassVar[Literal["first", "last"]]  # the token of each text that the head uses

    def __init__(self, classifier: Any) -> None:
        self.classifier, self.body = classifier, classifier.base_model
        self.layers: Any = self.body.get_submodule(self.stack)

    def run(self, x: Tensor, layout: Layout, first: int = 0) -> Tensor:
        """Return the logits from the input (tokens, width) of layer ``first``."""
        last = len(self.layers) - 1
        for i in range(first, last):
            x = self.layer(i, x, layout)
        return self.head(self.layer(last, x, layout, getattr(layout, self.selected)))

    @abstractmethod
    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """Return the input of the first layer; each argument has one number per token."""

    @abstractmethod
    def layer(self, i: int, x: Tensor, layout: Layout, selected: Tensor | None = None) -> Tensor:
        """Return the output of a layer, for all tokens or for the tokens with the selected indices."""

    @abstractmethod
    def head(self, x: Tensor) -> Tensor:
        """Return the logits from the last layer's output for the selected tokens."""


class _Bert(Packed):
    embeddings, stack, selected = ("embeddings",), "encoder.layer", "first"

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        types = torch.zeros_like(tokens) if types is None else types
        x: Tensor = self.body.embeddings(tokens[None], types[None], positions[None])
        return x[0]

    def layer(self, i: int, x: Tensor, layout: Layout, selected: Tensor | None = None) -> Tensor:
        layer = self.layers[i]
        attention = layer.attention.self
        residual = x if selected is None else x[selected]
        q, k, v = attention.query(residual), attention.key(x), attention.value(x)
        heads, scale = attention.num_attention_heads, attention.scaling
        hidden = layout.attend(q, k, v, heads, scale, attention.dropout, causal=False)
        hidden = layer.attention.output(hidden, residual)
        out: Tensor = layer.output(layer.intermediate(hidden), hidden)
        return out

    def head(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier.classifier(self.classifier.dropout(self.body.pooler(x[:, None])))
        return logits


class _Gpt2(Packed):
    # The last token is the only one that depends on the whole text.
    embeddings, stack, selected = ("wte", "wpe", "drop"), "h", "last"

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        x = self.body.wte(tokens) + self.body.wpe(positions)
        dropped: Tensor = self.body.drop(x if types is None else x + self.body.wte(types))
        return dropped

    def layer(self, i: int, x: Tensor, layout: Layout, selected: Tensor | None = None) -> Tensor:
        layer = self.layers[i]
        attention = layer.attn
        q, k, v = attention.c_attn(layer.ln_1(x)).chunk(3, dim=1)
        if selected is not None:
            q, x = q[selected], x[selected]
        heads, scale = attention.num_heads, attention.scaling
        hidden = layout.attend(q, k, v, heads, scale, attention.attn_dropout, causal=True)
        x = x + attention.resid_dropout(attention.c_proj(hidden))
        out: Tensor = x + layer.mlp(layer.ln_2(x))
        return out

    def head(self, x: Tensor) -> Tensor:
        logits: Tensor = self.classifier.score(self.body.ln_f(x))
        return logits


def packed(classifier: nn.Module) -> Packed | None:
    """Return the parts of a classifier of transformers; None if this module does not support it."""
    config: Any = getattr(classifier, "config", None)
    parts: Packed
    match type(classifier).__name__:
        case "BertForSequenceClassification" if not config.is_decoder:
            parts = _Bert(classifier)
        case "GPT2ForSequenceClassification":
            parts = _Gpt2(classifier)
        case _:
            return None
    if config.add_cross_attention or getattr(config, "position_embedding_type", "absolute") != "absolute":
        return None
    # If peft has copied the attention, adapters would be applied to the wrong copy.
    copied = any(hasattr(getattr(layer, "attn", None), "modules_to_save") for layer in parts.layers)
    return None if copied or parts.body.is_gradient_checkpointing else parts
