"""A round as its clients see it: the server's message, one job per client, and the result of a job."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.federation.client_data import ClientData
from fadamgc.federation.functions import Buffers, TaskFunctions
from fadamgc.federation.gradients import GradientOptions
from fadamgc.federation.sampling import READ, TRANSFORM, Batches, torch_seed
from fadamgc.random_numbers import DrawFrom, reading_at
from fadamgc.runtime import generator_on


class Round(NamedTuple):
    """The values that all clients of a round have in common."""

    functions: TaskFunctions
    algorithm: AnyAlgorithm
    seed: int
    t: int  # number of the round, from 1
    down: Any  # the server's message
    buffers: Buffers
    gradients: GradientOptions


class Job(NamedTuple):
    """One client's part in a round."""

    round: Round
    client: int
    data: ClientData
    load_state: Callable[[], Any]
    tracked: bool
    batches: Batches

    @property
    def state(self) -> Any:
        """The client's state before the round; it may be read from a file, so ask only once."""
        return self.load_state()

    def batch(self, k: int, positions: NDArray[np.int64]) -> tuple[Any, Any]:
        """Return the mini-batch of step k, from 0, as the model sees it."""
        r = self.round
        if not self.data.is_read_per_batch:
            return self.transformed(k, *self.data.batch(positions))
        with reading_at(torch_seed(r.seed, READ, r.t, self.client, k)):
            inputs, targets = self.data.batch(positions)
        return self.transformed(k, inputs, targets)

    def transformed(self, k: int, inputs: Any, targets: Any) -> tuple[Any, Any]:
        """Return a mini-batch after the task's transform, which draws at the address of step k."""
        r = self.round
        transform = r.functions.task.transform
        if transform is None:
            return inputs, targets
        seed = torch_seed(r.seed, TRANSFORM, r.t, self.client, k)
        with DrawFrom(generator_on(r.functions.device, seed)):
            return transform(inputs, targets)

    def whole_gradient(self) -> Tensor | None:
        """Return the gradient of the client's whole data at x, if the algorithm needs it in every round."""
        r = self.round
        if not r.algorithm.round_gradient:
            return None
        g = r.functions.whole_gradient(r.down.x, r.buffers, self.client, self.data, r.seed, r.t)
        return r.gradients.adjust(r.down.x, g)


class Result(NamedTuple):
    """The result of a job."""

    job: Job
    state: Any  # the client's state after the round
    up: Any  # the client's message
    buffers: Buffers
    loss: Tensor  # mean over the local steps, shape ()
    finite: bool | None = None  # whether state and up are finite; None if not checked yet
