"""The multilayer perceptron."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from torch import nn

from fadamgc.data.partition import check_integer
from fadamgc.errors import InputError, listed, shown
from fadamgc.runtime import seeded


def mlp(inputs: int, hidden: Sequence[int], outputs: int, seed: int) -> nn.Module:
    """Linear layers with ReLU between them, in torch's default initialisation.

    Args:
        inputs: numbers in one sample; samples of any shape are flattened.
        hidden: widths of the hidden layers; empty gives a linear model.
        outputs: numbers in one output.
        seed: of the initial weights; the same seed gives the same weights.

    >>> sum(p.numel() for p in mlp(64, [64], 10, seed=0).parameters())
    4810
    """
    if (layers := listed(hidden)) is None:
        raise InputError(f"hidden={shown(hidden)}; accepted is a list of integers, the widths of the layers")
    widths = [inputs, *layers, outputs]
    for name, width in zip(("inputs", *["hidden"] * len(layers), "outputs"), widths, strict=True):
        check_integer(name, width, 1)
    check_integer("seed", seed, 0)
    modules: list[nn.Module] = [nn.Flatten()]
    with seeded(seed):
        for a, b in pairwise(widths):
            modules += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*modules[:-1])
