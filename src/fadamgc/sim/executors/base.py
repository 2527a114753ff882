"""What an executor is: something that carries out the local work of a round's clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.sim.problem import Buffers
from fadamgc.sim.sampling import Batches


class Round(NamedTuple):
    """What all clients of a round have in common."""

    algorithm: AnyAlgorithm
    seed: int
    t: int  # number of the round, from 1
    down: Any  # what the server sent
    buffers: Buffers


class Job(NamedTuple):
    """One client's part in a round."""

    client: int
    state: Any  # the client's state before the round
    tracked: bool
    batches: Batches


class Result(NamedTuple):
    """What came of a job."""

    client: int
    state: Any  # the client's state after the round
    up: Any  # what it sends
    buffers: Buffers
    loss: Tensor  # mean over the local steps, shape ()


class Executor(Protocol):
    """Does the jobs of a round, in any order; the engine puts the results back in theirs."""

    name: str

    def run(self, round: Round, jobs: Sequence[Job]) -> Iterator[Result]:
        """Carry out the jobs; states and buffers given are not changed."""
        ...
