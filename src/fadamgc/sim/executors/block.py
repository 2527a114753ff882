"""A block of clients at once: one client's rules and gradient, mapped over the clients with ``torch.func``.

In all tensors of a block the first dimension is the client, except in ``Inputs.fixed``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.func import grad_and_value, vmap

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.federation.functions import Buffers, TaskFunctions
from fadamgc.federation.jobs import Job
from fadamgc.hyperparameters import numbers, with_values
from fadamgc.tree import leaves, map_leaves, rebuild


class Inputs(NamedTuple):
    """What the clients of a block start from; local steps do not change it."""

    fixed: Buffers
    hyper: list[Tensor]  # the algorithm's numbers that may differ within the block
    down: Any
    client: Any
    g_x: Tensor | None

    @classmethod
    def of(cls, jobs: Sequence[Job], functions: TaskFunctions, lifted_names: Sequence[str]) -> Inputs:
        """Stack what the jobs start from."""
        values = [numbers(job.round.algorithm) for job in jobs]
        hyper = [[float(v[name]) for v in values] for name in lifted_names]
        gradients = [g for job in jobs if (g := job.whole_gradient()) is not None]
        return cls(
            fixed={name: value.contiguous() for name, value in functions.fixed.items()},
            hyper=list(torch.tensor(hyper, dtype=torch.float64, device=functions.device).unbind()),
            down=_stack([job.round.down for job in jobs]),
            client=_stack([job.state for job in jobs]),
            g_x=torch.stack(gradients) if gradients else None,
        )

    def rows(self, clients: slice) -> Inputs:
        """Return the inputs of some clients of the block."""
        fixed, *others = self
        return Inputs(fixed, *(map_leaves(lambda t: t[clients], part) for part in others))


class Progress(NamedTuple):
    """What a local step changes."""

    x: Tensor
    local: Any
    buffers: Buffers
    loss: Tensor  # sum over the steps

    def rows(self, clients: slice) -> Progress:
        """Return the progress of some clients of the block, in the same memory."""
        return map_leaves(lambda t: t[clients], self)


class Batch(NamedTuple):
    """One mini-batch per client; or a series of them, one per step, along a first dimension."""

    inputs: Tensor
    targets: Tensor
    weight: Tensor | None = None  # of each sample, where batches are padded
    active: Tensor | None = None  # which clients have a step to do, where not all have

    def at(self, k: int) -> Batch:
        """Return the batches of step k of a series."""
        return map_leaves(lambda t: t[k], self)

    def rows(self, clients: slice) -> Batch:
        """Return the series of some clients of the block."""
        return map_leaves(lambda t: t[:, clients], self)


class End(NamedTuple):
    """How the clients' steps ended."""

    K: Tensor
    tracked: Tensor


class BlockMath:
    """The three stages of a client's round, each for a whole block.

    Args:
        functions: the task's model and loss.
        lifted_names: the algorithm's hyperparameters that are tensors in ``Inputs.hyper``.
    """

    def __init__(self, functions: TaskFunctions, algorithm: AnyAlgorithm, lifted_names: Sequence[str]):
        self.functions, self.algorithm, self.lifted_names = functions, algorithm, lifted_names

    def begin(self, inputs: Inputs) -> Any:
        """Return the local states before the first step."""

        def begin(hyper: list[Tensor], down: Any, client: Any, g_x: Tensor | None) -> Any:
            return self._with(hyper).begin(down, client, g_x)

        dims = (0, 0, 0, None if inputs.g_x is None else 0)
        return vmap(begin, in_dims=dims)(*inputs[1:])

    def step(self, inputs: Inputs, before: Progress, batch: Batch) -> Progress:
        """Return the progress after one local step: gradient and rule."""

        def step(hyper: list[Tensor], down: Any, client: Any, before: Progress, batch: Batch) -> Progress:
            gradient = grad_and_value(self._loss, has_aux=True)
            g, (loss, buffers) = gradient(before.x, before.buffers, inputs.fixed, batch)
            x, local = self._with(hyper).step(down, client, before.local, before.x, g)
            after = Progress(x, local, buffers, before.loss + loss)
            active = batch.active
            if active is None:
                return after
            return map_leaves(lambda new, old: torch.where(active, new, old), after, before)

        axes: Any = [None if part is None else 0 for part in batch]
        mapped = vmap(step, in_dims=(0, 0, 0, 0, Batch(*axes)), randomness="error")
        result: Progress = mapped(inputs.hyper, inputs.down, inputs.client, before, batch)
        return result

    def finish(self, inputs: Inputs, progress: Progress, end: End) -> tuple[Any, Any]:
        """Return the states that the clients keep, and what they send."""

        def finish(hyper: list[Tensor], down: Any, client: Any, local: Any, x: Tensor, end: End) -> Any:
            return self._with(hyper).finish(down, client, local, x, end.K, end.tracked)

        _, hyper, down, client, _ = inputs
        state, up = vmap(finish)(hyper, down, client, progress.local, progress.x, end)
        return state, up

    def _with(self, hyper: list[Tensor]) -> AnyAlgorithm:
        return with_values(self.algorithm, dict(zip(self.lifted_names, hyper, strict=True)))

    def _loss(self, x: Tensor, buffers: Buffers, fixed: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        """Return the loss of one client on one batch and the buffers after it, as a pure function."""
        buffers = {name: value.clone() for name, value in buffers.items()}
        if batch.weight is None:
            return self.functions.loss(x, buffers, batch.inputs, batch.targets, fixed), buffers
        losses = self.functions.sample_losses(x, buffers, batch.inputs, batch.targets, fixed)
        return (losses * batch.weight).sum(), buffers


def _stack(states: list[Any]) -> Any:
    columns = zip(*map(leaves, states), strict=True)
    return rebuild(states[0], [torch.stack(column) for column in columns])
