"""Sums over the clients of a round."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fadamgc.federation.functions import Buffers
from fadamgc.tree import leaves, map_leaves


class Sums:
    """Running sums over a round's clients: the algorithm's messages, local steps, losses and buffers.

    Floating-point sums depend on the order, so clients are added in ascending order. ``weights`` are those of
    all clients, with mean 1; None if all are equal.
    """

    def __init__(self, weights: Sequence[float] | None = None) -> None:
        self.weights = weights
        self.S: float = 0
        self.steps: float = 0
        self.up: Any = None
        self.losses: list[Tensor] = []
        self.buffers: dict[str, Tensor] = {}

    def add(self, client: int, steps: int, up: Any, buffers: Buffers, loss: Tensor) -> None:
        """Add one client; without weights, S is the plain number of clients."""
        weight = 1.0 if self.weights is None else self.weights[client]
        if self.weights is not None:
            up = map_leaves(lambda leaf: weight * leaf, up)
        if self.up is None:
            self.up = map_leaves(torch.clone, up)
        else:
            for total, leaf in zip(leaves(self.up), leaves(up), strict=True):
                total.add_(leaf)
        self.S += int(weight) if weight == 1 else weight
        self.steps += weight * steps
        self.losses.append(loss)
        for name, value in buffers.items():
            exact = value.double() if value.is_floating_point() else value.long()
            weighted = exact if weight == 1 else exact * weight
            self.buffers[name] = weighted + self.buffers[name] if name in self.buffers else weighted

    def total(self) -> Any:
        """Return the sums of the messages; None without any client."""
        return self.up

    def mean_loss(self) -> float | None:
        """Return the mean over clients of the mean loss over local steps."""
        return float(torch.stack(self.losses).double().mean()) if self.losses else None

    def mean_buffers(self, before: Buffers) -> Buffers:
        """Return the mean buffers over clients, integers rounded; buffers that are not sent do not change."""
        mean = {name: value / self.S for name, value in self.buffers.items()}
        return before | {
            name: (value if before[name].is_floating_point() else value.round()).to(before[name].dtype)
            for name, value in mean.items()
        }


def all_finite(tensor: Tensor) -> bool:
    """Whether all numbers of a tensor are finite."""
    # A sum is not finite if one of its numbers is not; a sum that is not finite may also have overflowed.
    return math.isfinite(tensor.sum()) or bool(torch.isfinite(tensor).all())
