"""A block of clients at once: one batched gradient for all of them in each step (torch.func).

The clients of a block may belong to different runs (other seeds, other step sizes) and may have different
amounts of data and different K. Two ways keep that exact: where loss and model treat the samples of a
batch one by one, short batches are padded and the padding gets weight zero; where they do not (BatchNorm,
a loss that is not a plain mean), only clients whose batches have the same sizes share a block.

A whole local step (gradient, the algorithm's rules, update) is one graph, compiled where that pays. What
comes out for a client does not depend on who else is in its block, nor on how large the block is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.errors import FadamgcError, InputError
from fadamgc.federation.problem import Buffers, Problem
from fadamgc.runtime import one_thread
from fadamgc.sim.executors.base import Job, Plan, Result
from fadamgc.sim.executors.loop import one
from fadamgc.sim.executors.machine_code import Code, compiled, compiler
from fadamgc.sim.executors.trace import liftable, lifted, record
from fadamgc.sim.executors.traits import check_batchable, is_samplewise

log = logging.getLogger("fadamgc")

VECTOR = 1 << 20  # bytes of one vector over a whole block: then a step's vectors stay in the cache
LEAST = 8  # clients in a block even so
BATCHES = 64 << 20  # bytes of mini-batches that are gathered at once
GRAPHS = 24  # recorded graphs that are kept
LONG = 1000  # local steps a run must plan for a compilation to pay


class Given(NamedTuple):
    """What a block of clients starts from; the first dimension is the client's, but for ``fixed``."""

    fixed: Buffers
    hyper: list[Tensor]  # the algorithm's numbers that may differ within the block
    down: Any
    client: Any
    g_x: Tensor | None

    def flat(self) -> list[Tensor]:
        """All tensors, in the order of their fields."""
        last = () if self.g_x is None else (self.g_x,)
        return [*self.fixed.values(), *self.hyper, *self.down, *self.client, *last]

    def lanes(self, some: slice) -> Given:
        """What some of the clients start from."""
        return Given(
            self.fixed,
            [t[some] for t in self.hyper],
            type(self.down)(*(t[some] for t in self.down)),
            type(self.client)(*(t[some] for t in self.client)),
            None if self.g_x is None else self.g_x[some],
        )


class State(NamedTuple):
    """What a local step changes."""

    x: Tensor
    local: Any
    buffers: Buffers
    loss: Tensor  # sum over the steps

    def flat(self) -> list[Tensor]:
        """All tensors, in the order of their fields."""
        return [self.x, *self.local, *self.buffers.values(), self.loss]

    def refilled(self, tensors: Sequence[Tensor]) -> State:
        """The same fields with other tensors."""
        x, *middle, loss = tensors
        local = type(self.local)(*middle[: len(self.local)])
        return State(x, local, dict(zip(self.buffers, middle[len(self.local) :], strict=True)), loss)

    def lanes(self, some: slice) -> State:
        """The state of some of the clients, in the same memory."""
        return self.refilled([t[some] for t in self.flat()])


class Batch(NamedTuple):
    """One mini-batch of each client, or a series of such, one a step, along a first dimension."""

    inputs: Tensor
    targets: Tensor
    weight: Tensor | None = None  # of each sample, where batches are padded
    active: Tensor | None = None  # who has a step to do, where not all have

    def at(self, k: int) -> Batch:
        """One of a series."""
        return Batch(*(None if t is None else t[k] for t in self))  # type: ignore[arg-type]

    def lanes(self, some: slice) -> Batch:
        """A series for some of the clients."""
        return Batch(*(None if t is None else t[:, some] for t in self))  # type: ignore[arg-type]


class Ended(NamedTuple):
    """How a client's steps ended."""

    K: Tensor
    tracked: Tensor


class _Kind(NamedTuple):
    """Which algorithms may share a block: those with the same text."""

    lifted: tuple[str, ...]
    text: str


class VectorizedExecutor:
    """vmap over clients of one client's step; the algorithm's own text runs on the whole block.

    Args:
        problem: the task as functions. Jobs may belong to other problems of the same model and loss.
        plan: how large the run is.
        block: how many clients at once; None is as many as are fast.
        compile: whether steps become machine code; None is where a compiler is there and the run is
            long enough for that to pay.
    """

    name = "vectorized"

    def __init__(
        self,
        problem: Problem,
        plan: Plan | None = None,
        block: int | None = None,
        compile: bool | None = None,
    ) -> None:
        if block is not None and block < 1:
            raise InputError(f"block={block} is not accepted; it must be at least 1")
        self.problem = problem
        self.plan = plan
        bytes_each = problem.flat.d * problem.x0.element_size()
        self.block = block or max(LEAST, VECTOR // bytes_each)
        self._graphs: dict[Any, tuple[Callable[..., Any], Any]] = {}
        self._kinds: dict[AnyAlgorithm, _Kind] = {}
        self._sizes: set[int] = set()  # of steps that there is compiled code for
        check_batchable(problem)
        self.samplewise = is_samplewise(problem)
        if compile is None:
            # Where blocks come in many shapes, each of them would have to be compiled.
            shapes = not self.samplewise or (plan is not None and plan.whole and plan.ragged)
            long = plan is not None and plan.rounds * plan.steps >= LONG
            compile = long and not shapes and problem.device.type == "cpu"
        self._compile = compile and compiler() is not None
        self._failed = False
        self.threads = torch.get_num_threads() if self._compile else 1

    @property
    def compiled(self) -> bool:
        """Whether steps are machine code."""
        return self._compile and not self._failed

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Carry out the jobs, block by block."""
        for group in self._groups(jobs):
            lanes, parts = self._cut(len(group))
            size = lanes * parts
            for first in range(0, len(group), size):
                block = group[first : first + size]
                filled = block + block[-1:] * (-len(block) % lanes)  # equal sizes, so no new graph
                try:
                    with one_thread():
                        results = self._run_block(filled, lanes)[: len(block)]
                except FadamgcError:
                    raise
                except Exception:
                    for job in block:  # whose fault it was: replay one by one, which says so
                        one(job)
                    raise
                yield from results

    def _cut(self, clients: int) -> tuple[int, int]:
        """How many clients a step is for, and how many such steps a block is cut into, one a thread.

        A step is for two at least, since that for one would be other code. Compiled code for steps of
        another size is used if that wastes little.
        """
        blocks = -(-clients // (self.block * self.threads))
        lanes = max(2, -(-clients // (blocks * self.threads)))
        if self._compile:
            near = [
                s for s in self._sizes if 0.7 * lanes <= s and -(-clients // s) * s <= 1.25 * max(clients, 2)
            ]
            lanes = max(near, default=lanes)
            self._sizes.add(lanes)
        return lanes, self.threads

    def _groups(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Jobs that may share a block."""

        groups: dict[Any, list[Job]] = {}
        for job in jobs:
            shape = self._width(job) if self.samplewise else job.batches.sizes
            groups.setdefault((self._kind(job.round.algorithm).text, shape), []).append(job)
        yield from groups.values()

    def _kind(self, algorithm: AnyAlgorithm) -> _Kind:
        if algorithm not in self._kinds:
            names = liftable(algorithm)
            self._kinds[algorithm] = _Kind(
                names, repr(lifted(algorithm, dict.fromkeys(names, torch.empty(0))))
            )
        return self._kinds[algorithm]

    def _run_block(self, jobs: list[Job], lanes: int) -> list[Result]:
        problem, algo = self.problem, jobs[0].round.algorithm
        C, device = len(jobs), problem.device
        each = np.array([job.batches.steps for job in jobs])
        hyper = [
            [float(getattr(job.round.algorithm, name)) for job in jobs] for name in self._kind(algo).lifted
        ]
        given = Given(
            fixed={name: value.contiguous() for name, value in problem.fixed.items()},
            hyper=list(torch.tensor(hyper, dtype=torch.float64, device=device).unbind()),
            down=_stack([job.round.down for job in jobs]),
            client=_stack([job.state for job in jobs]),
            g_x=torch.stack([_whole_gradient(job) for job in jobs]) if algo.round_gradient else None,
        )
        graph, made = self._graph(algo, self._begin, (C,), lambda: (given,))
        local = tree_unflatten(graph(*given.flat()), made)
        state = State(
            x=given.down.x.clone(),
            local=type(local)(*(t.clone() for t in local)),
            buffers={
                name: torch.stack([job.round.buffers[name] for job in jobs]) for name in problem.buffers0
            },
            loss=torch.zeros(C, dtype=problem.x0.dtype, device=device),
        )
        for batches in self._batches(jobs, each):
            state = self._steps(algo, given, state, batches, lanes)
        ended = Ended(
            K=torch.from_numpy(each).to(device, torch.float64),
            tracked=torch.tensor([job.tracked for job in jobs], device=device),
        )
        graph, made = self._graph(algo, self._finish, (C,), lambda: (given, state, ended))
        kept, up = tree_unflatten(graph(*given.flat(), *state.flat(), *ended), made)
        loss = state.loss / ended.K.to(problem.x0.dtype)
        # A sum is finite only if all its numbers are; one that overflowed is looked at again.
        finite = torch.stack([t.sum(dim=1) for t in (*kept, *up)]).isfinite().all(dim=0).tolist()
        rows = zip(
            jobs,
            # Copies: a row would keep the whole block in memory.
            zip(*([row.clone() for row in t.unbind()] for t in kept), strict=True) if kept else [()] * C,
            zip(*(t.unbind() for t in up), strict=True),
            loss.unbind(),
            finite,
            strict=True,
        )
        return [
            Result(
                job,
                state=type(kept)(*its_state),
                up=type(up)(*its_up),
                buffers={name: value[c] for name, value in state.buffers.items()},
                loss=its_loss,
                finite=whether,
            )
            for c, (job, its_state, its_up, its_loss, whether) in enumerate(rows)
        ]

    def _steps(self, algo: AnyAlgorithm, given: Given, state: State, batches: Batch, lanes: int) -> State:
        """A step for each of the batches. Compiled steps write into the state; others make a new one."""
        front, tensors = given.flat(), state.flat()
        series = [t for t in batches if t is not None]
        shapes = [None if t is None else t.shape[2:] for t in batches]
        if not self._compile:
            whole = (len(state.x), *shapes)
            graph, _ = self._graph(algo, self._step, whole, lambda: (given, state, batches.at(0)))
            for batch in zip(*(t.unbind() for t in series), strict=True):
                tensors = graph(*front, *tensors, *batch)
            return state.refilled(tensors)
        some = slice(0, lanes)
        code: Code
        code, _ = self._graph(
            algo,
            self._step,
            (lanes, *shapes),
            lambda: (given.lanes(some), state.lanes(some), batches.lanes(some).at(0)),
        )
        fixed, rows = front[: len(given.fixed)], front[len(given.fixed) :]
        parts = len(state.x) // lanes
        code.repeat(fixed, [*rows, *tensors], series, parts, threads=parts)
        return state

    def _batches(self, jobs: list[Job], each: NDArray[np.int64]) -> Iterator[Batch]:
        """The mini-batches of a block, many steps at a time; jobs of a block have the same ``_width``.

        A batch has weights, its samples' shares of the mean, where clients' batches are padded. Padding
        has weight 0 and repeats a row of the client's own, so that it is data like any other.
        """
        problem = self.problem
        B, padded = self._width(jobs[0]) if self.samplewise else (jobs[0].batches.width, False)
        least = int(each.min())
        sample = problem.inputs[:1].numel() * problem.inputs.element_size()
        chunk = max(1, BATCHES // (len(jobs) * B * max(1, sample)))
        readers = [job.batches.reader() for job in jobs]
        # The batches of a block have the same sizes where they are not padded; those may change.
        period = 1 if self.samplewise else jobs[0].batches.period
        for first, last in _cuts(int(each.max()), chunk, least, period):
            rows = np.zeros((last - first, len(jobs), B), dtype=np.int64)
            size = np.full((last - first, len(jobs)), B, dtype=np.int64)
            for c, (job, read) in enumerate(zip(jobs, readers, strict=True)):
                k = min(last, job.batches.steps) - first
                if k > 0:
                    rows[:k, c, : job.batches.width] = read(k)
                    size[:k, c] = job.batches.size_of(first, first + k)
            width = B if self.samplewise else int(size[0, 0])
            inputs, targets = _gather(jobs, rows[:, :, :width])
            weights = None
            if padded:
                shares = (np.arange(B) < size[:, :, None]) / size[:, :, None]
                weights = torch.from_numpy(shares).to(problem.x0)
            active = None
            if first >= least:  # some clients have no more steps to do
                active = torch.from_numpy(each > np.arange(first, last)[:, None]).to(problem.device)
            yield Batch(inputs, targets, weights, active)

    def _width(self, job: Job) -> tuple[int, bool]:
        """How many samples a client's batches have with padding, and whether they may have padding.

        This depends on the job and on the run's plan, so no bit depends on who else is in a block.
        """
        if self.plan is not None and not self.plan.whole:
            return self.plan.batch, self.plan.ragged
        width = 1 << (job.batches.width - 1).bit_length()  # few shapes, however the sizes vary
        return width, job.batches.width != width or not job.batches.even

    def _graph(
        self,
        algo: AnyAlgorithm,
        function: Callable[..., Any],
        shape: tuple[Any, ...],
        arguments: Callable[[], tuple[Any, ...]],
    ) -> tuple[Any, Any]:
        """A function of a block as a graph of tensors, recorded once for each shape of its arguments."""
        key = (function.__name__, self._kind(algo).text, *shape)
        graph = self._graphs.pop(key, None) or self._make_graph(algo, function, *arguments())
        self._graphs[key] = graph  # now the youngest
        if len(self._graphs) > GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return graph

    def _make_graph(
        self, algo: AnyAlgorithm, function: Callable[..., Any], *arguments: Any
    ) -> tuple[Any, Any]:
        flat, spec = tree_flatten(arguments)
        tensors = [t for t in flat if isinstance(t, Tensor)]
        made: Any = None

        def fill(tensors: Sequence[Tensor]) -> Any:
            values = iter(tensors)
            return tree_unflatten([next(values) if isinstance(t, Tensor) else t for t in flat], spec)

        def pure(*tensors: Tensor) -> list[Tensor]:
            nonlocal made
            out, made = tree_flatten(function(algo, *fill(tensors)))
            return out

        def in_place(*tensors: Tensor) -> list[Tensor]:
            for old, new in zip(fill(tensors)[1].flat(), pure(*tensors), strict=True):
                old.copy_(new)
            return []

        if function == self._step:
            if self._compile:
                code = compiled(record(in_place, tensors), tensors)
                self._failed |= not code.machine
                return code, None
            return record(pure, tensors), None
        # What happens once a round is worth a graph in long runs only.
        pure(*tensors)
        return (record(pure, tensors) if self._compile else pure), made

    # What one client does, for all clients of a block.

    def _begin(self, algo: AnyAlgorithm, given: Given) -> Any:
        def begin(hyper: list[Tensor], down: Any, client: Any, g_x: Tensor | None) -> Any:
            return self._with(algo, hyper).begin(down, client, g_x)

        dims = (0, 0, 0, None if given.g_x is None else 0)
        return vmap(begin, in_dims=dims)(given.hyper, given.down, given.client, given.g_x)

    def _step(self, algo: AnyAlgorithm, given: Given, state: State, batch: Batch) -> State:
        def step(hyper: list[Tensor], down: Any, client: Any, old: State, batch: Batch) -> State:
            here = self._with(algo, hyper)
            gradient = grad_and_value(self._loss, has_aux=True)
            g, (loss, buffers) = gradient(old.x, old.buffers, given.fixed, batch)
            x, local = here.step(down, client, old.local, old.x, g)
            new = State(x, local, buffers, old.loss + loss)
            if batch.active is None:
                return new
            both = zip(new.flat(), old.flat(), strict=True)
            return old.refilled([torch.where(batch.active, n, o) for n, o in both])

        axes: Any = [None if part is None else 0 for part in batch]
        batched = vmap(step, in_dims=(0, 0, 0, 0, Batch(*axes)), randomness="error")
        result: State = batched(given.hyper, given.down, given.client, state, batch)
        return result

    def _finish(self, algo: AnyAlgorithm, given: Given, state: State, ended: Ended) -> Any:
        def finish(hyper: list[Tensor], down: Any, client: Any, local: Any, x: Tensor, ended: Ended) -> Any:
            return self._with(algo, hyper).finish(down, client, local, x, ended.K, ended.tracked)

        return vmap(finish)(given.hyper, given.down, given.client, state.local, state.x, ended)

    def _with(self, algo: AnyAlgorithm, hyper: list[Tensor]) -> AnyAlgorithm:
        return lifted(algo, dict(zip(self._kind(algo).lifted, hyper, strict=True)))

    def _loss(self, x: Tensor, buffers: Buffers, fixed: Buffers, batch: Batch) -> tuple[Tensor, Buffers]:
        """The loss of one client on one batch, as a pure function."""
        buffers = {name: value.clone() for name, value in buffers.items()}
        if batch.weight is None:
            return self.problem.loss(x, buffers, batch.inputs, batch.targets, fixed), buffers
        losses = self.problem.sample_losses(x, buffers, batch.inputs, batch.targets, fixed)
        return (losses * batch.weight).sum(), buffers


def _stack(states: list[Any]) -> Any:
    return type(states[0])(*(torch.stack(column) for column in zip(*states, strict=True)))


def _whole_gradient(job: Job) -> Tensor:
    problem, _, seed, t, down, buffers = job.round
    return problem.whole_gradient(down.x, buffers, job.client, seed, t)


def _cuts(K: int, chunk: int, least: int, period: int) -> Iterator[tuple[int, int]]:
    """Runs of steps first .. last - 1 that are gathered at once.

    No run is longer than a chunk, has steps before and after ``least``, or has an epoch's last batch
    together with another.
    """
    first = 0
    while first < K:
        last = min(K, first - first % chunk + chunk)
        if first < least:
            last = min(last, least)
        if period > 1:
            before_last = first - first % period + period - 1
            last = min(last, before_last if first < before_last else first + 1)
        yield first, last
        first = last


def _gather(jobs: list[Job], rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """The samples at rows (k, C, B) of each client's own data."""
    problems = {id(job.round.problem): job.round.problem for job in jobs}
    if len(problems) == 1:
        (problem,) = problems.values()
        return _at(problem, rows + problem.start[[job.client for job in jobs]][:, None])
    columns = []
    for c, job in enumerate(jobs):
        problem = job.round.problem
        columns.append(_at(problem, rows[:, c] + problem.start[job.client]))
    inputs, targets = zip(*columns, strict=True)
    return torch.stack(inputs, dim=1), torch.stack(targets, dim=1)


def _at(problem: Problem, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    at = torch.from_numpy(rows).to(problem.device)
    inputs, targets = (torch.index_select(t, 0, at.view(-1)) for t in (problem.inputs, problem.targets))
    return inputs.view(*rows.shape, *inputs.shape[1:]), targets.view(*rows.shape, *targets.shape[1:])
