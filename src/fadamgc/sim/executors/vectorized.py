"""A block of clients at once: one batched gradient for all of them in each step (torch.func).

The clients of a block may belong to different runs (other seeds, other step sizes) and may have different
amounts of data and different K. If loss and model treat the samples of a batch one by one, short batches are
padded, and the padding has weight zero. If not (BatchNorm, a loss that is not a plain mean), only clients
whose batches have the same sizes share a block.

A whole local step (gradient, the algorithm's rules, update) is one graph, compiled if that pays. The result
of a client depends neither on the other clients of its block nor on the size of the block. A block is cut
into equal *parts*, one per thread; compiled code is for the clients of one part.

Convolutions gain nothing from a batch over clients, so with them a part is one client. Compiled code still
saves Python's work between the operations, and threads do not wait for Python's lock.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from fadamgc.errors import FadamgcError, InputError, whole
from fadamgc.federation.jobs import Job, Result
from fadamgc.federation.traits import check_batchable, has_slow_blocks, is_samplewise
from fadamgc.runtime import one_thread
from fadamgc.sim.executors.base import Workload
from fadamgc.sim.executors.block import (
    Batch,
    BlockMath,
    End,
    Inputs,
    Progress,
    block_batches,
    check_rules,
    padded_width,
)
from fadamgc.sim.executors.fused import can_fuse, fused
from fadamgc.sim.executors.loop import run_job
from fadamgc.sim.executors.machine_code import NativeCode, compiled, compiler
from fadamgc.sim.executors.trace import Kind, Kinds, flat_function, record
from fadamgc.tree import leaves, map_leaves, rebuild, skeleton

log = logging.getLogger("fadamgc")

VECTOR_BYTES = 1 << 20  # bytes per vector over a whole block, so that the vectors of a step stay in the cache
PARTS = 2  # parts of a compiled block, also on one thread: a block costs Python's work once, a part does not
SMALLEST_BLOCK = 8  # clients, even if their vectors exceed VECTOR_BYTES
CACHED_GRAPHS = 24  # recorded graphs that are kept
LONG_RUN = 1000  # local steps that a run must plan for a compilation to pay


Compile: TypeAlias = bool | Literal["kept"] | None


class VectorizedExecutor:
    """Runs one client's rules on a whole block of clients through vmap.

    Args:
        workload: the work of a run. Jobs may belong to other tasks with the same model and loss.
        block: number of clients in a block; None: as many as keep the vectors in the cache.
        compile: whether steps become machine code; None compiles if the run is long enough. "kept" uses
            only code that was compiled before and is kept on disk.
    """

    name = "vectorized"

    def __init__(self, workload: Workload, block: int | None = None, compile: Compile = None) -> None:
        if block is not None:
            whole("block", block, 1)
        functions = workload.functions
        self.workload, self.functions = workload, functions
        vector_bytes = functions.flat.d * functions.x0.element_size()
        self.block = block or max(SMALLEST_BLOCK, VECTOR_BYTES // vector_bytes)
        if workload.clients.is_read_per_batch:
            raise InputError(
                "executor='vectorized' needs data in memory, and this task reads its items per batch; use "
                "executor='auto', 'threads' or 'loop'"
            )
        check_batchable(functions)
        check_rules(workload.algorithm)
        self.samplewise = is_samplewise(functions, workload.clients)
        self._fuses = can_fuse(functions.device)  # instead of code that runs all steps without Python
        if compile is None:
            compile = workload.rounds * workload.steps >= LONG_RUN and self.compiling_may_pay
        elif compile == "kept":
            compile = "kept" if self.compiling_may_pay and not self._fuses else False
        self._kinds, self._kept_only = Kinds(), compile == "kept"
        varies = bool(compile) and self._kinds.changes(workload.algorithm, workload.varying)
        on_cpu = functions.device.type == "cpu"
        can_compile = self._fuses or (on_cpu and compiler() is not None)
        self.compiled = bool(compile) and not varies and can_compile  # whether steps are machine code
        self._has_slow_blocks = has_slow_blocks(functions.module)
        self._graphs: dict[Any, Any] = {}
        self._part_sizes: set[int] = set()  # sizes of parts for which there is compiled code

    @property
    def threads(self) -> int:
        """The number of threads, which only compiled code of the CPU uses."""
        return torch.get_num_threads() if self.compiled and not self._fuses else 1

    @property
    def _single(self) -> bool:
        """Whether a part is one client."""
        return self.compiled and not self._fuses and self._has_slow_blocks

    @property
    def compiling_may_pay(self) -> bool:
        """Whether blocks come in few shapes, each of which has to be compiled."""
        return self.samplewise and not (self.workload.whole and self.workload.ragged)

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Run the jobs, block by block."""
        threads = self.threads  # now, because in a block torch itself has one thread
        for group in self._groups(jobs):
            part = self._part_size(len(group))
            size = part * (max(threads, PARTS) if self.compiled else threads)
            if self._single:
                size = -(-len(group) // -(-len(group) // (self.block * threads)))
            for first in range(0, len(group), size):
                block = group[first : first + size]
                filled = block + block[-1:] * (-len(block) % part)  # equal parts, so no new graph
                filled += block * (len(filled) == 1)  # rules for one client would be other code
                try:
                    with one_thread():
                        results = self._run_block(filled, part, threads)[: len(block)]
                except FadamgcError:
                    raise
                except Exception:
                    for job in block:  # the reference names the client and step that failed
                        run_job(job)
                    raise
                yield from results

    def _groups(self, jobs: Sequence[Job]) -> Iterator[list[Job]]:
        """Yield jobs that may share a block."""
        groups: dict[Any, list[Job]] = {}
        for job in jobs:
            shape = padded_width(job, self.workload) if self.samplewise else job.batches.sizes
            kind = self._kinds.of(job.round.algorithm)
            groups.setdefault((kind.description, shape), []).append(job)
        yield from groups.values()

    def _part_size(self, clients: int) -> int:
        """Return the number of clients in a part, such that a group needs few blocks of equal parts.

        It is at least two, since a step for one client would be other code, or always one. Compiled code for
        another number is used if that wastes little.
        """
        if self._single:
            return 1
        blocks = -(-clients // (self.block * self.threads))
        size = max(2, -(-clients // (blocks * self.threads)))
        if self.compiled:
            most = 1.25 * max(clients, 2)
            near = [s for s in self._part_sizes if s >= 0.7 * size and -(-clients // s) * s <= most]
            size = max(near, default=size)
            self._part_sizes.add(size)
        return size

    def _run_block(self, jobs: list[Job], part: int, threads: int) -> list[Result]:
        functions, round = self.functions, jobs[0].round
        C, device = len(jobs), functions.device
        kind = self._kinds.of(round.algorithm)
        math = BlockMath(round._replace(functions=functions), kind.lifted_names)
        inputs = Inputs.of(jobs, functions, kind.lifted_names)
        local = self._once(math.begin, kind, inputs)
        progress = Progress(
            x=inputs.down.x.clone(),
            local=map_leaves(torch.clone, local),
            buffers={n: torch.stack([job.round.buffers[n] for job in jobs]) for n in functions.buffers0},
            loss=torch.zeros(C, dtype=functions.x0.dtype, device=device),
        )
        for batches in block_batches(jobs, self.workload, self.samplewise):
            progress = self._steps(math, kind, inputs, progress, batches, part, threads)
        end = End(
            K=torch.tensor([job.batches.steps for job in jobs], dtype=torch.float64, device=device),
            tracked=torch.tensor([job.tracked for job in jobs], device=device),
        )
        state, up = self._once(math.finish, kind, inputs, progress, end)
        loss = progress.loss / end.K.to(functions.x0.dtype)
        # A sum is finite only if all its numbers are; the engine checks again, since a sum may overflow.
        sums = [t.reshape(C, -1).sum(dim=1) for t in (*leaves(state), *leaves(up))]
        finite = torch.stack(sums).isfinite().all(dim=0).tolist()
        states = _unstack(state, C, torch.clone)  # a row itself would keep the whole block in memory
        columns = (jobs, states, _unstack(up, C), _unstack(progress.buffers, C), loss.unbind(), finite)
        return [Result(*row) for row in zip(*columns, strict=True)]

    def _steps(
        self,
        math: BlockMath,
        kind: Kind,
        inputs: Inputs,
        progress: Progress,
        batches: Batch,
        part: int,
        threads: int,
    ) -> Progress:
        """Take a step for each batch. Compiled steps write into ``progress``; others return a new one."""
        series = leaves(batches)
        shapes = [None if t is None else t.shape[2:] for t in batches]
        if self.compiled and not self._fuses:
            code = self._cached(
                ("compiled", kind.description, part, *shapes),
                lambda: self._compiled(math, inputs, progress, batches, slice(0, part)),
            )
            if code is not None:
                fixed, *others = inputs
                parts = len(progress.x) // part
                code.repeat(leaves(fixed), [*leaves(others), *leaves(progress)], series, parts, threads)
                return progress
        graph = self._cached(
            ("step", kind.description, len(progress.x), *shapes),
            lambda: self._recorded_step(math, (inputs, progress, batches.at(0))),
        )
        front, tensors = leaves(inputs), leaves(progress)
        for batch in zip(*(t.unbind() for t in series), strict=True):
            tensors = graph(*front, *tensors, *batch)
        return rebuild(progress, tensors)

    def _recorded_step(self, math: BlockMath, arguments: tuple[Any, ...]) -> Callable[..., Any]:
        """Record a step that returns its results; on a GPU, compile it."""
        graph = _recorded(math.step, arguments)
        if not self.compiled:
            return graph
        code = fused(graph, leaves(arguments))
        self.compiled = code is not None
        return code or graph

    def _compiled(
        self, math: BlockMath, inputs: Inputs, progress: Progress, batches: Batch, rows: slice
    ) -> NativeCode | None:
        """Compile a step that writes its results into the tensors of its progress; None if that fails."""
        arguments = inputs.rows(rows), progress.rows(rows), batches.rows(rows).at(0)
        step, like = flat_function(math.step, arguments), skeleton(arguments)

        def in_place(*tensors: Tensor) -> list[Tensor]:
            _, progress, _ = rebuild(like, tensors)
            for old, new in zip(leaves(progress), step(*tensors), strict=True):
                old.copy_(new)
            return []

        tensors = leaves(arguments)
        code = compiled(record(in_place, tensors), tensors, self._kept_only)
        self.compiled = code is not None
        self._kept_only = self._kept_only and code is None  # code for other shapes of this run may be new
        return code

    def _once(self, stage: Callable[..., Any], kind: Kind, *arguments: Any) -> Any:
        """Run a stage that happens once per round; it becomes a graph in long runs only.

        With parts of one client, blocks may have any size, and a graph for each size would not pay.
        """
        if not self.compiled or self._single:
            return stage(*arguments)
        key = (stage.__name__, kind.description, len(arguments[0].down.x))
        graph, like = self._cached(key, lambda: (_recorded(stage, arguments), skeleton(stage(*arguments))))
        return rebuild(like, graph(*leaves(arguments)))

    def _cached(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        """Return the entry of a key, made once; the entries that were used last are kept."""
        entry = self._graphs.pop(key, None) or make()
        self._graphs[key] = entry  # now the most recently used
        if len(self._graphs) > CACHED_GRAPHS:
            del self._graphs[next(iter(self._graphs))]
        return entry


def _unstack(state: Any, clients: int, convert: Callable[[Tensor], Tensor] = lambda row: row) -> list[Any]:
    """Return one state per client, the inverse of stacking."""
    columns = [[convert(row) for row in t.unbind()] for t in leaves(state)]
    return [rebuild(state, [column[c] for column in columns]) for c in range(clients)]


def _recorded(function: Callable[..., Any], arguments: tuple[Any, ...]) -> Callable[..., Any]:
    return record(flat_function(function, arguments), leaves(arguments))
