"""The models of single clients: with their local parameters, and after one local epoch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm, Cohort, Empty, Flag, Steps
from fadamgc.federation.client_data import ClientTable
from fadamgc.federation.functions import Buffers
from fadamgc.federation.jobs import Job, Round
from fadamgc.federation.server import Federation, ServerState
from fadamgc.sim.executors.base import Executor, Workload
from fadamgc.sim.executors.loop import LoopExecutor
from fadamgc.sim.executors.threads import ThreadsExecutor
from fadamgc.sim.executors.vectorized import VectorizedExecutor
from fadamgc.wrapped import Wrapped


class Trained(NamedTuple):
    """The message of a client that has trained for itself."""

    x: Tensor


@dataclasses.dataclass(frozen=True)
class ForItself(Wrapped[Any, Any, Any, Any, Trained]):
    """The local steps of an algorithm, after which the client sends only its model x."""

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Any:
        """Return the inner algorithm's state."""
        return self.inner.init_server(x, g)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Any:
        """Return the inner algorithm's state."""
        return self.inner.init_client(x, g)

    def broadcast(self, server: Any) -> Any:
        """Return the inner algorithm's message."""
        return self.inner.broadcast(server)

    def begin(self, down: Any, client: Any, g: Tensor | None = None) -> Any:
        """Return the inner algorithm's local state."""
        return self.inner.begin(down, client, g)

    def step(self, down: Any, client: Any, local: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Any]:
        """Take a step of the inner algorithm."""
        x, local = self.inner.step(down, client, local, x, g)
        return x, local

    def finish(
        self,
        down: Any,  # noqa: ARG002
        client: Any,  # noqa: ARG002
        local: Any,  # noqa: ARG002
        x: Tensor,
        K: Steps,  # noqa: ARG002
        tracked: Flag,  # noqa: ARG002
    ) -> tuple[Empty, Trained]:
        """Return no state, and the model."""
        return Empty(), Trained(x)

    def aggregate(self, server: Any, total: Trained, cohort: Cohort) -> Any:  # noqa: ARG002
        """Return the server's state as it was."""
        return server


def _same(value: Any) -> Any:
    return value


class PersonalModels:
    """Makes the models of all clients from a server's state, without changing any state."""

    def __init__(self, federation: Federation, clients: ClientTable, executor: Executor) -> None:
        self.federation, self.clients = federation, clients
        self.settings = dataclasses.replace(
            federation.settings, local_steps=None, local_epochs=1, stragglers=None
        )
        self._kind = type(executor)
        self._executor: Executor | None = None  # for local epochs

    def before(self, server: ServerState, state_of: Callable[[int], Any]) -> list[tuple[Tensor, Buffers]]:
        """Return each client's parameters and buffers: the server's, and its own local ones."""
        opened = self.federation.open()
        rounds = [self._round(opened, server, state_of(i)) for i in range(len(self.clients))]
        return [(round.down.x, round.buffers) for round in rounds]

    def after_epoch(
        self, server: ServerState, state_of: Callable[[int], Any]
    ) -> list[tuple[Tensor, Buffers]]:
        """Return each client's parameters and buffers after one local epoch of the algorithm."""
        jobs, opened = [], self.federation.open()
        for i, data in enumerate(self.clients):
            state = state_of(i)
            round = self._round(opened, server, state)
            round = round._replace(algorithm=ForItself(round.algorithm))
            batches = self.settings.batches(round.t, i, data.size)
            jobs.append(Job(round, i, data, partial(_same, state), True, batches))
        results = {result.job.client: result for result in self._epochs().run(jobs)}
        return [(results[i].up.x, results[i].buffers) for i in range(len(jobs))]

    def _round(self, round: Round, server: ServerState, state: Any) -> Round:
        down = round.algorithm.broadcast(server.server)
        return self.federation.at_client(round._replace(down=down, buffers=server.buffers), state)

    def _epochs(self) -> Executor:
        if self._executor is None:
            f = self.federation
            algorithm: AnyAlgorithm = ForItself(f.scheduled.at(1))
            workload = Workload.of(f.functions, self.clients, algorithm, self.settings)
            built_in = self._kind in (VectorizedExecutor, ThreadsExecutor)
            self._executor = self._kind(workload) if built_in else LoopExecutor(workload)  # type: ignore[call-arg]
        return self._executor
