"""BERT and GPT-2 over the tokens that are there, and no others.

The texts of a batch differ in length, and transformers computes as much for each as for the longest. Here
the tokens of all texts lie one after the other, so that everything but the attention, a few percent of the
work, is done for tokens that are there. A classifier looks at one token of what the last layer gives, so
that layer is computed for this one alone (its keys and values for all). What comes out is what transformers
computes, to rounding: the parts are its own modules, with their adapters.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention


class Layout(NamedTuple):
    """Where the tokens of a batch lie."""

    there: Tensor  # (texts, length): whether there is a token
    at: Tensor  # for each token, its place in (texts x length)
    first: Tensor  # for each text, the number of its first token
    last: Tensor  # and of its last

    @classmethod
    def of(cls, there: Tensor) -> Layout:
        """Of texts that begin at the left and have no holes."""
        end = there.sum(dim=1).cumsum(0)
        first = torch.cat([end.new_zeros(1), end[:-1]])
        return cls(there, there.flatten().nonzero()[:, 0], first, end - 1)

    def pack(self, x: Tensor) -> Tensor:
        """(texts, length, ...) as (tokens, ...)."""
        x = x.flatten(0, 1)
        return x if len(self.at) == len(x) else x[self.at]

    def spread(self, x: Tensor) -> Tensor:
        """(tokens, width) as (texts, length, width), 0 where there is no token."""
        texts, length = self.there.shape
        if len(x) != texts * length:
            x = x.new_zeros(texts * length, x.shape[1]).index_copy(0, self.at, x)
        return x.view(texts, length, -1)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, heads: int, causal: bool, **options: Any) -> Tensor:
        """Attention among the tokens of each text; of all tokens, or of one a text where q is as long."""
        alone = len(q) == len(self.there)

        def split(x: Tensor) -> Tensor:
            return x.view(*x.shape[:2], heads, -1).transpose(1, 2)

        query = split(q[:, None] if alone else self.spread(q))
        if causal and not alone:  # what is not there comes after all that is
            options["is_causal"] = True
        else:
            options["attn_mask"] = self.there[:, None, None]
        out = scaled_dot_product_attention(query, split(self.spread(k)), split(self.spread(v)), **options)
        out = out.transpose(1, 2).flatten(2)
        return out[:, 0] if alone else self.pack(out)


class Packed(ABC):
    """A transformer for the classification of texts, in parts.

    Args:
        classifier: transformers' model.
    """

    body: Any
    layers: nn.ModuleList
    embeddings: tuple[str, ...]  # names in the body of what comes before the layers

    def __init__(self, classifier: Any) -> None:
        self.classifier = classifier

    def run(self, x: Tensor, layout: Layout, first: int = 0) -> Tensor:
        """Logits from what goes into a layer, (tokens, width)."""
        for i in range(first, len(self.layers)):
            chosen = self.chosen(layout) if i == len(self.layers) - 1 else None
            x = self.layer(i, x, layout, chosen)
        return self.head(x)

    @abstractmethod
    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """What goes into the first layer; everything has one number a token."""

    @abstractmethod
    def layer(self, i: int, x: Tensor, layout: Layout, chosen: Tensor | None = None) -> Tensor:
        """What comes out of a layer, for all tokens or for those that are chosen."""

    @abstractmethod
    def chosen(self, layout: Layout) -> Tensor:
        """The token of each text that the head looks at."""

    @abstractmethod
    def head(self, x: Tensor) -> Tensor:
        """Logits from what comes out of the last layer for the chosen tokens."""


class Bert(Packed):
    """An encoder; its first token stands for the text."""

    embeddings = ("embeddings",)

    def __init__(self, classifier: Any) -> None:
        super().__init__(classifier)
        self.body, self.layers = classifier.bert, classifier.bert.encoder.layer

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """See ``Packed``."""
        types = torch.zeros_like(tokens) if types is None else types
        x: Tensor = self.body.embeddings(tokens[None], types[None], positions[None])
        return x[0]

    def layer(self, i: int, x: Tensor, layout: Layout, chosen: Tensor | None = None) -> Tensor:
        """See ``Packed``."""
        layer: Any = self.layers[i]
        own = layer.attention.self
        at = x if chosen is None else x[chosen]
        found = layout.attend(
            own.query(at),
            own.key(x),
            own.value(x),
            own.num_attention_heads,
            causal=False,
            dropout_p=own.dropout.p if own.training else 0.0,
            scale=own.scaling,
        )
        found = layer.attention.output(found, at)
        out: Tensor = layer.output(layer.intermediate(found), found)
        return out

    def chosen(self, layout: Layout) -> Tensor:
        """See ``Packed``."""
        return layout.first

    def head(self, x: Tensor) -> Tensor:
        """See ``Packed``."""
        logits: Tensor = self.classifier.classifier(self.classifier.dropout(self.body.pooler(x[:, None])))
        return logits


class Gpt2(Packed):
    """A decoder, which has seen the text when it has seen its last token."""

    embeddings = ("wte", "wpe", "drop")

    def __init__(self, classifier: Any) -> None:
        super().__init__(classifier)
        self.body, self.layers = classifier.transformer, classifier.transformer.h

    def embed(self, tokens: Tensor, positions: Tensor, types: Tensor | None) -> Tensor:
        """See ``Packed``."""
        x = self.body.wte(tokens) + self.body.wpe(positions)
        dropped: Tensor = self.body.drop(x if types is None else x + self.body.wte(types))
        return dropped

    def layer(self, i: int, x: Tensor, layout: Layout, chosen: Tensor | None = None) -> Tensor:
        """See ``Packed``."""
        layer: Any = self.layers[i]
        own = layer.attn
        q, k, v = own.c_attn(layer.ln_1(x)).chunk(3, dim=1)
        if chosen is not None:
            q, x = q[chosen], x[chosen]
        found = layout.attend(
            *(q, k, v, own.num_heads),
            causal=True,
            dropout_p=own.attn_dropout.p if own.training else 0.0,
            scale=own.scaling,
        )
        x = x + own.resid_dropout(own.c_proj(found))
        out: Tensor = x + layer.mlp(layer.ln_2(x))
        return out

    def chosen(self, layout: Layout) -> Tensor:
        """See ``Packed``."""
        return layout.last

    def head(self, x: Tensor) -> Tensor:
        """See ``Packed``."""
        logits: Tensor = self.classifier.score(self.body.ln_f(x))
        return logits


KINDS: dict[str, type[Bert | Gpt2]] = {
    "BertForSequenceClassification": Bert,
    "GPT2ForSequenceClassification": Gpt2,
}


def packed(classifier: nn.Module) -> Packed | None:
    """The parts of a classifier of transformers', or None where they are not known."""
    kind = KINDS.get(type(classifier).__name__)
    config: Any = getattr(classifier, "config", None)
    decoder = kind is Bert and config.is_decoder
    if kind is None or decoder or config.add_cross_attention:
        return None
    if getattr(config, "position_embedding_type", "absolute") != "absolute":
        return None
    parts = kind(classifier)
    if parts.body.is_gradient_checkpointing:
        return None
    if any(hasattr(getattr(layer, "attn", None), "modules_to_save") for layer in parts.layers):
        return None  # a copy of the attention, in which peft's adapters are not those that it uses
    return parts
