"""What an executor is: something that carries out the local work of clients."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.problem import Buffers, Problem
from fadamgc.federation.sampling import Batches


class Plan(NamedTuple):
    """How large a run is, as far as the choice of an executor depends on it."""

    algorithm: AnyAlgorithm
    rounds: int
    sampled: int  # clients in a round
    steps: int  # local steps of the client that takes most
    batch: int  # samples in the largest batch
    ragged: bool  # whether some batch is smaller
    whole: bool  # whether a batch is a client's whole data


class Round(NamedTuple):
    """What all clients of a round have in common."""

    problem: Problem
    algorithm: AnyAlgorithm
    seed: int
    t: int  # number of the round, from 1
    down: Any  # what the server sent
    buffers: Buffers


class Job(NamedTuple):
    """One client's part in a round."""

    round: Round
    client: int
    states: ClientStates
    tracked: bool
    batches: Batches

    @property
    def state(self) -> Any:
        """The client's state before the round; it may be read from a file, so ask once."""
        return self.states[self.client]


class Result(NamedTuple):
    """What came of a job."""

    job: Job
    state: Any  # the client's state after the round
    up: Any  # what it sends
    buffers: Buffers
    loss: Tensor  # mean over the local steps, shape ()
    finite: bool | None = None  # whether state and up are; None if nobody has looked


class Executor(Protocol):
    """Does jobs in any order; the engine puts the results back in theirs."""

    name: str

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Carry out the jobs; states and buffers given are not changed."""
        ...
