"""A block of clients at once: one batched gradient for all of them in each step (torch.func).

The clients of a block may have different amounts of data and different K. Two ways keep that exact:
where loss and model treat the samples of a batch one by one, short batches are padded and the padding
gets weight zero; where they do not (BatchNorm, a loss that is not a plain mean), only clients whose
batches have the same sizes share a block.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import grad, grad_and_value, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from fadamgc.algorithm import Flag, Steps
from fadamgc.errors import FadamgcError, InputError
from fadamgc.sim.executors.base import Job, Result, Round
from fadamgc.sim.executors.loop import LoopExecutor
from fadamgc.sim.problem import Buffers, Problem
from fadamgc.task import cast

log = logging.getLogger("fadamgc")

MEMORY = 512 * 2**20  # bytes that the state of one block may take
GRAPHS = 16  # traced graphs that are kept
VECTORS = 12  # vectors of the model's size that a client needs while it trains, about


class VectorizedExecutor:
    """vmap over clients of the gradient of one; the algorithm's own text runs on the whole block.

    Args:
        problem: the task as functions.
        block: how many clients at once; None is as many as fit in a memory budget.
    """

    name = "vectorized"

    def __init__(self, problem: Problem, block: int | None = None) -> None:
        if block is not None and block < 1:
            raise InputError(f"block={block} is not accepted; it must be at least 1")
        self.problem = problem
        bytes_each = VECTORS * problem.flat.d * problem.x0.element_size()
        self.block = block or max(1, MEMORY // bytes_each)
        self._traced: dict[Any, Callable[..., Any]] = {}
        self._check()
        self.samplewise = self._is_samplewise()

    def run(self, round: Round, jobs: Sequence[Job]) -> Iterator[Result]:
        """Carry out the jobs, block by block."""
        if self.samplewise:
            groups = [list(jobs)]
        else:
            keyed = sorted(jobs, key=_sizes)
            groups = [list(group) for _, group in groupby(keyed, key=_sizes)]
        for group in groups:
            for first in range(0, len(group), self.block):
                block = group[first : first + self.block]
                try:
                    yield from self._run_block(round, block)
                except FadamgcError:
                    raise
                except Exception:
                    for job in block:  # whose fault it was: replay one by one, which says so
                        LoopExecutor(self.problem).one(round, job)
                    raise

    def _run_block(self, round: Round, jobs: list[Job]) -> Iterator[Result]:
        algo, down, problem = round.algorithm, round.down, self.problem
        C = len(jobs)
        rows, weights = _stack_batches(jobs, problem, pad=self.samplewise)
        if not self.samplewise:
            weights = None  # the block has the same sizes throughout, and its batches are cut to them
        each = np.array([len(job.batches.size) for job in jobs])
        K: Steps = int(each[0])
        if (each != each[0]).any():
            K = torch.from_numpy(each)[:, None].to(problem.x0)
        flags = [job.tracked for job in jobs]
        tracked: Flag = flags[0]
        if len(set(flags)) > 1:
            tracked = torch.tensor(flags, device=problem.device)[:, None]
        client = _stack([job.state for job in jobs])
        g_x = None
        if algo.round_gradient:
            g_x = torch.stack(
                [
                    problem.whole_gradient(down.x, round.buffers, job.client, round.seed, round.t)
                    for job in jobs
                ]
            )
        x = down.x.expand(C, -1)
        buffers = {name: value.expand(C, *value.shape) for name, value in round.buffers.items()}
        local = algo.begin(down, client, g_x)
        loss_sum = torch.zeros(C, dtype=problem.dtype, device=problem.device)
        for k in range(int(each.max())):
            at = rows[:, k] if self.samplewise else rows[:, k, : int(jobs[0].batches.size[k])]
            weight = None if weights is None else weights[:, k]
            g, loss, new_buffers = self._gradient(x, buffers, problem.inputs[at], problem.targets[at], weight)
            direction, new_local = algo.direction(down, client, local, g)
            new_x = x - algo.eta_l * direction
            if (each > k).all():
                x, local, buffers, loss_sum = new_x, new_local, new_buffers, loss_sum + loss
                continue
            active = torch.from_numpy(each > k).to(problem.device)
            x = _where(active, new_x, x)
            local = type(local)(
                *(_where(active, new, old) for new, old in zip(new_local, local, strict=True))
            )
            buffers = {name: _where(active, new, buffers[name]) for name, new in new_buffers.items()}
            loss_sum = torch.where(active, loss_sum + loss, loss_sum)
        state, up = algo.finish(down, client, local, x, K, tracked)
        loss = loss_sum / torch.from_numpy(each).to(loss_sum)
        for c, job in enumerate(jobs):
            yield Result(
                job.client,
                # A copy: a row would keep the whole block in memory.
                state=type(state)(*(t[c].clone() for t in state)),
                up=type(up)(*(t[c] for t in up)),
                buffers={name: value[c] for name, value in buffers.items()},
                loss=loss[c],
            )

    def _gradient(
        self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Tensor, Buffers]:
        """Gradients, losses and buffers of the block; its graph is traced once for each shape."""
        key = (x.shape, inputs.shape, targets.shape, weight is None)
        arguments = (x, buffers, inputs, targets, weight)
        traced = self._traced.pop(key, None) or _trace(self._batched(weight), arguments)
        self._traced[key] = traced  # now the youngest
        if len(self._traced) > GRAPHS:
            del self._traced[next(iter(self._traced))]
        g, (loss, new_buffers) = traced(*arguments)
        return g, loss, new_buffers

    def _batched(self, weight: Tensor | None) -> Callable[..., Any]:
        one = grad_and_value(self._one, has_aux=True)
        return vmap(one, in_dims=(0, 0, 0, 0, None if weight is None else 0), randomness="error")

    def _one(
        self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor, weight: Tensor | None
    ) -> tuple[Tensor, Buffers]:
        """The loss of one client on one batch, as a pure function."""
        buffers = {name: value.clone() for name, value in buffers.items()}
        if weight is None:
            return self.problem.loss(x, buffers, inputs, targets), buffers
        return (self.problem.sample_losses(x, buffers, inputs, targets) * weight).sum(), buffers

    def _check(self) -> None:
        """Say now, and not in the first round, that a model cannot be batched over clients."""
        problem = self.problem
        client = int(problem.size.argmax())
        rows = torch.arange(min(2, int(problem.size[client])), device=problem.device) + int(
            problem.start[client]
        )
        twice = torch.stack([rows, rows])
        x = problem.x0.expand(2, -1)
        buffers = {name: value.expand(2, *value.shape) for name, value in problem.buffers0.items()}
        try:
            self._batched(None)(x, buffers, problem.inputs[twice], problem.targets[twice], None)
        except Exception as error:
            reason = str(error).strip().splitlines()[0]
            raise InputError(
                f"executor='vectorized' cannot run model={type(problem.task.model).__name__}: {reason}; "
                "use executor='loop'"
            ) from error

    def _is_samplewise(self) -> bool:
        """Whether the loss of a batch is the mean of the losses of its samples, whatever the parameters.

        Tried in float64 away from the initial model (where many losses agree by accident), by gradients,
        on samples that have all the labels there are. If in doubt the answer is no, which costs speed.
        """
        problem = self.problem
        if problem.buffers0:  # statistics over a batch
            return False
        rows = _varied_rows(problem.targets)
        inputs, targets = (
            cast(data[rows], torch.float64, problem.device) for data in (problem.inputs, problem.targets)
        )
        fixed = {name: cast(value, torch.float64, problem.device) for name, value in problem.fixed.items()}
        random = torch.Generator().manual_seed(0)

        def gradients(x: Tensor) -> tuple[Tensor, Tensor]:
            whole = grad(lambda x: problem.loss(x, {}, inputs.clone(), targets, fixed))(x)
            alone = grad(lambda x: problem.sample_losses(x, {}, inputs.clone(), targets, fixed).mean())(x)
            return whole, alone

        try:
            for scale in (0.1, 0.5):
                noise = torch.randn(problem.flat.d, generator=random, dtype=torch.float64)
                x = problem.x0.double() + scale * noise.to(problem.device)
                whole, alone = gradients(x)
                if not torch.allclose(whole, alone, rtol=1e-6, atol=1e-9 * float(whole.abs().max())):
                    return False
        except Exception as error:
            log.info("executor vectorized: batches are not padded (%s)", error)
            return False
        return True


def _varied_rows(targets: Tensor) -> Tensor:
    """Rows that have among them every label (the extreme ones, if there are very many), and some more."""
    total = len(targets)
    rows = set(torch.linspace(0, total - 1, min(16, total)).long().tolist())
    if not targets.is_floating_point():
        flat = targets.reshape(total, -1)
        values = flat.unique()  # type: ignore[no-untyped-call]
        some = values if len(values) <= 256 else torch.cat([values[:128], values[-128:]])
        rows |= {int((flat == value).any(dim=1).nonzero()[0]) for value in some}
    return torch.tensor(sorted(rows), device=targets.device)


def _trace(batched: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    """The same operations as a recorded graph, without torch.func's work in Python at every call."""
    try:
        return make_fx(lambda *a: batched(*a))(*arguments)
    except Exception as error:
        # What vmap can do and the recorder cannot still runs, only slower.
        log.info("executor vectorized: not traced (%s)", error)
        return batched


def _sizes(job: Job) -> tuple[int, ...]:
    return tuple(job.batches.size.tolist())


def _stack(states: list[Any]) -> Any:
    return type(states[0])(*(torch.stack(column) for column in zip(*states, strict=True)))


def _where(active: Tensor, new: Tensor, old: Tensor) -> Tensor:
    return torch.where(active.view(-1, *[1] * (new.ndim - 1)), new, old)


def _stack_batches(jobs: list[Job], problem: Problem, pad: bool) -> tuple[Tensor, Tensor | None]:
    """Rows of the problem's data, (C, K, B), and the weight of each sample in its batch's mean.

    The weights are None where every batch of every client is full. Padding has weight 0 and repeats a
    row of the client's own, so that it is data like any other.
    """
    K = max(len(job.batches.size) for job in jobs)
    B = max(job.batches.rows.shape[1] for job in jobs)
    if pad and any((job.batches.size != B).any() for job in jobs):
        B = 1 << (B - 1).bit_length()  # few different shapes, however the sizes vary
    rows = np.empty((len(jobs), K, B), dtype=np.int64)
    size = np.full((len(jobs), K), B, dtype=np.int64)
    for c, job in enumerate(jobs):
        k, b = job.batches.rows.shape
        rows[c] = problem.start[job.client]
        rows[c, :k, :b] += job.batches.rows
        size[c, :k] = job.batches.size
    index = torch.from_numpy(rows).to(problem.device)
    if (size == B).all():
        return index, None
    weights = (np.arange(B) < size[:, :, None]) / size[:, :, None]
    return index, torch.from_numpy(weights).to(problem.x0)
