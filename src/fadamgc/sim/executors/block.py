"""A block of clients: their mini-batches, and one client's rules and gradient mapped over them (torch.func).

In all tensors of a block the first dimension is the client, except in ``Inputs.fixed`` and in series.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad_and_value, vmap

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.errors import InputError, first_line
from fadamgc.federation.client_data import gather
from fadamgc.federation.functions import Buffers, TaskFunctions
from fadamgc.federation.jobs import Job, Round
from fadamgc.hyperparameters import numbers, with_values
from fadamgc.sim.executors.base import Workload
from fadamgc.tree import leaves, map_leaves, rebuild

GATHERED_BYTES = 64 << 20  # of mini-batches that are gathered at once


class Inputs(NamedTuple):
    """The values from which the clients of a block start; local steps do not change them."""

    fixed: Buffers
    hyper: list[Tensor]  # the algorithm's numbers that may differ within the block
    down: Any
    client: Any
    g_x: Tensor | None

    @classmethod
    def of(cls, jobs: Sequence[Job], functions: TaskFunctions, lifted_names: Sequence[str]) -> Inputs:
        """Stack the values from which the jobs start."""
        values = {id(job.round): numbers(job.round.algorithm) for job in _one_per_round(jobs)}
        hyper = [[float(values[id(job.round)][name]) for job in jobs] for name in lifted_names]
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
    """The values that a local step changes."""

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
    weight: Tensor | None = None  # of each sample, if batches are padded
    active: Tensor | None = None  # which clients have a step to do; None: all

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

    ``lifted_names`` are the algorithm's hyperparameters that are tensors in ``Inputs.hyper``.
    """

    def __init__(self, round: Round, lifted_names: Sequence[str]):
        self.functions, self.algorithm, self.lifted_names = round.functions, round.algorithm, lifted_names
        self.gradients = round.gradients

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
            g = self.gradients.adjust(before.x, g)
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
        """Return the clients' new states and their messages."""

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


class UnmappableError(InputError):
    """The rules of an algorithm cannot be mapped over clients."""


def check_rules(algorithm: AnyAlgorithm) -> None:
    """Refuse an algorithm whose rules cannot be mapped over clients, before the first round."""
    x = torch.zeros(2, 3)
    g = x[0] if algorithm.init_gradient or algorithm.round_gradient else None

    def round_of(x: Tensor, K: Tensor, tracked: Tensor) -> Any:
        down, client = algorithm.broadcast(algorithm.init_server(x, g)), algorithm.init_client(x, g)
        x, local = algorithm.step(down, client, algorithm.begin(down, client, g), x, x)
        return leaves(algorithm.finish(down, client, local, x, K, tracked))

    try:
        vmap(round_of, randomness="error")(x, torch.ones(2), torch.tensor([True, False]))
    except Exception as error:
        raise UnmappableError(
            f"executor='vectorized' cannot map the rules of {type(algorithm).__name__} over clients: "
            f"{first_line(error)}; see 'Rules' in docs/extending.md, or use executor='loop'"
        ) from error


def _one_per_round(jobs: Sequence[Job]) -> Iterable[Job]:
    return {id(job.round): job for job in jobs}.values()


def _stack(states: list[Any]) -> Any:
    columns = zip(*map(leaves, states), strict=True)
    return rebuild(states[0], [torch.stack(column) for column in columns])


# The mini-batches of a block, gathered many steps at a time.


def padded_width(job: Job, workload: Workload) -> tuple[int, bool]:
    """Return how many samples a client's batches have with padding, and whether they may have padding.

    Both depend only on the job and the workload, so that no bit of a result depends on the other clients of a
    block.
    """
    if not workload.whole:
        return workload.batch, workload.ragged
    width = 1 << (job.batches.width - 1).bit_length()  # few different shapes for any sizes
    return width, job.batches.width != width or job.batches.period > 1


def block_batches(jobs: Sequence[Job], workload: Workload, samplewise: bool) -> Iterator[Batch]:
    """Yield series of mini-batches for a block whose jobs have equal widths.

    If the clients' batches are padded (``samplewise``), a batch has weights, each sample's share of the mean.
    Padding has weight 0 and repeats a row of the client's data, so that it is valid data. If batches are not
    padded, those of a block have equal sizes, which may change from step to step.
    """
    functions = workload.functions
    steps = np.array([job.batches.steps for job in jobs])
    B, padded = padded_width(jobs[0], workload) if samplewise else (jobs[0].batches.width, False)
    sample = functions.sample[0][:1]
    chunk = max(1, GATHERED_BYTES // (len(jobs) * B * max(1, sample.numel() * sample.element_size())))
    readers = [job.batches.reader() for job in jobs]
    period = 1 if samplewise else jobs[0].batches.period
    fewest = int(steps.min())
    for first, last in _series(int(steps.max()), chunk, fewest, period):
        positions = np.zeros((last - first, len(jobs), B), dtype=np.int64)
        size = np.full((last - first, len(jobs)), B, dtype=np.int64)
        for c, (job, read) in enumerate(zip(jobs, readers, strict=True)):
            k = min(last, job.batches.steps) - first
            if k > 0:
                positions[:k, c, : job.batches.width] = read(k)
                size[:k, c] = job.batches.size_of(first, first + k)
        width = B if samplewise else int(size[0, 0])
        inputs, targets = gather([job.data for job in jobs], positions[:, :, :width])
        if functions.task.transform is not None:
            inputs, targets = _transformed(jobs, first, size, inputs, targets)
        weights = None
        if padded:
            shares = (np.arange(B) < size[:, :, None]) / size[:, :, None]
            weights = torch.from_numpy(shares).to(functions.x0)
        active = None
        if first >= fewest:  # some clients have no more steps to do
            active = torch.from_numpy(steps > np.arange(first, last)[:, None]).to(functions.device)
        yield Batch(inputs, targets, weights, active)


def _transformed(
    jobs: Sequence[Job], first: int, size: NDArray[np.int64], inputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply the task's transform to each batch of a series without its padding, which repeats a sample."""
    steps: list[tuple[Tensor, Tensor]] = []
    width = inputs.shape[2]
    for k in range(len(inputs)):
        clients = []
        for c, job in enumerate(jobs):
            count = min(int(size[k, c]), width)
            parts = inputs[k, c, :count], targets[k, c, :count]
            if first + k < job.batches.steps:
                parts = job.transformed(first + k, *parts)
            clients.append([torch.cat([t, t[:1].expand(width - count, *t.shape[1:])]) for t in parts])
        steps.append(tuple(torch.stack(column) for column in zip(*clients, strict=True)))  # type: ignore[arg-type]
    return tuple(torch.stack(column) for column in zip(*steps, strict=True))  # type: ignore[return-value]


def _series(K: int, chunk: int, fewest: int, period: int) -> Iterator[tuple[int, int]]:
    """Yield series of steps first .. last - 1 that are gathered at once.

    A series is at most a chunk long, does not cross step ``fewest`` (from which on not all clients are
    active), and does not contain an epoch's last batch together with another batch.
    """
    first = 0
    while first < K:
        last = min(K, first - first % chunk + chunk)
        if first < fewest:
            last = min(last, fewest)
        if period > 1:
            before_last = first - first % period + period - 1
            last = min(last, before_last if first < before_last else first + 1)
        yield first, last
        first = last
