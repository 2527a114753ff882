"""The multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from fadamgc.errors import INT64_MAX, counts, listed, not_accepted, whole
from fadamgc.runtime import seeded


def mlp(inputs: int, hidden: Sequence[int], outputs: int, seed: int) -> nn.Module:
    """Make linear layers with ReLU between them, with torch's default initialisation.

    Args:
        inputs: numbers per sample; samples of any shape are flattened.
        hidden: widths of the hidden layers; an empty list gives a linear model.
        outputs: number of outputs, such as classes.
        seed: the same seed gives the same initial weights.

    >>> sum(p.numel() for p in mlp(64, [64], 10, seed=0).parameters())
    4810
    """
    if (layers := listed(hidden)) is None:
        raise not_accepted("hidden", hidden, "a list of widths")
    counts(inputs=inputs, outputs=outputs)
    for width in layers:
        counts(hidden=width)
    modules: list[nn.Module] = [nn.Flatten()]
    with seeded(whole("seed", seed, 0, INT64_MAX)):
        for a, b in pairwise([inputs, *layers, outputs]):
            modules += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*modules[:-1])
