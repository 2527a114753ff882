"""Executors run the jobs of a round, in any order and any number at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.federation.client_data import ClientTable
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.gradients import GradientOptions
from fadamgc.federation.jobs import Job, Result
from fadamgc.federation.settings import Settings
from fadamgc.hyperparameters import schedules


class Workload(NamedTuple):
    """The work of a run, as far as the choice and the set-up of an executor depend on it."""

    functions: TaskFunctions
    clients: ClientTable
    algorithm: AnyAlgorithm
    rounds: int
    sampled: int  # clients per round
    steps: int  # largest number of local steps of a client
    batch: int  # samples in the largest batch
    ragged: bool  # whether some batch is smaller
    whole: bool  # whether a batch is a client's whole data
    varying: tuple[str, ...] = ()  # names of the algorithm's numbers that follow a schedule
    gradients: GradientOptions = GradientOptions()

    @classmethod
    def of(
        cls, functions: TaskFunctions, clients: ClientTable, scheduled: AnyAlgorithm, s: Settings
    ) -> Workload:
        """Return the workload of a run with these settings."""
        algorithm = scheduled.at(1)
        largest = int(clients.size.max())
        batch, whole = min(s.batch_size or largest, largest), s.batch_size is None
        partial_epochs = s.local_epochs is not None and not whole and bool((clients.size % batch).any())
        ragged = partial_epochs or bool((clients.size < batch).any())
        sampled = len(s.who(1, len(clients)).sampled) if s.rounds else 1
        steps = max(s.planned_steps(clients.size, algorithm.coin))
        varying = tuple(schedules(scheduled))
        return cls(
            *(functions, clients, algorithm, s.rounds, sampled, steps, batch, ragged, whole),
            *(varying, s.gradients),
        )


class Executor(Protocol):
    """Runs jobs in any order; the engine puts the results back in the order of the jobs."""

    name: str

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Run the jobs, without changing their states and buffers."""
        ...
