"""What is added over the clients of a round, in an order that does not depend on who was done first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm, Cohort
from fadamgc.federation.problem import Buffers
from fadamgc.sim.executors import Job, Result


class Sums:
    """What is added over a round's clients: the algorithm's messages, and what goes beside them.

    Args:
        weights: of all clients, with mean 1; None where all count the same.
    """

    def __init__(self, weights: Sequence[float] | None = None) -> None:
        self.weights = weights
        self.S: float = 0
        self.steps: float = 0
        self.up: Any = None
        self.losses: list[Tensor] = []
        self.buffers: dict[str, Tensor] = {}

    def add(self, client: int, steps: int, up: Any, buffers: Buffers, loss: Tensor) -> None:
        """Add one client; without weights, S is their plain count."""
        weight = 1.0 if self.weights is None else self.weights[client]
        up = up if self.weights is None else type(up)(*(weight * f for f in up))
        if self.up is None:
            self.up = type(up)(*(f.clone() for f in up))
        else:
            for f, more in zip(self.up, up, strict=True):
                f.add_(more)
        self.S += int(weight) if weight == 1 else weight
        self.steps += weight * steps
        self.losses.append(loss)
        for name, value in buffers.items():
            exact = value.double() if value.is_floating_point() else value.long()
            weighted = exact if weight == 1 else exact * weight
            self.buffers[name] = weighted + self.buffers[name] if name in self.buffers else weighted

    def aggregate(self, algorithm: AnyAlgorithm, server: Any, n: int, t: int) -> Any:
        """The server after the round; as it was, if nobody was added."""
        if self.up is None:
            return server
        return algorithm.aggregate(server, self.up, Cohort(n=n, S=self.S, K=self.steps / self.S, t=t))

    def mean_loss(self) -> float | None:
        """Mean over clients of the mean over local steps."""
        return float(torch.stack(self.losses).double().mean()) if self.losses else None

    def mean_buffers(self, like: Buffers) -> Buffers:
        """Mean over clients, whole numbers rounded; as they were, if nobody was added."""
        if self.up is None:
            return like
        mean = {name: value / self.S for name, value in self.buffers.items()}
        return {
            name: (mean[name] if value.is_floating_point() else mean[name].round()).to(value.dtype)
            for name, value in like.items()
        }


def in_order(results: Iterable[Result], jobs: Sequence[Job]) -> Iterator[Result]:
    """Results in the order of the jobs, so that sums do not depend on who was done first."""
    early: dict[int, Result] = {}
    position = 0
    for result in results:
        early[id(result.job)] = result
        while position < len(jobs) and id(jobs[position]) in early:
            yield early.pop(id(jobs[position]))
            position += 1


def finite(result: Result) -> bool:
    """Whether all that a client keeps and sends is finite."""
    known = () if result.finite else (*result.up, *result.state)
    return all(map(all_finite, (*known, *result.buffers.values())))


def all_finite(t: Tensor) -> bool:
    """Whether all numbers of a tensor are finite."""
    # A sum is not finite if a number is not; the other way round it may have overflowed.
    return math.isfinite(t.sum()) or bool(torch.isfinite(t).all())
