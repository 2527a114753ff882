"""One client a thread, with one thread inside each operation: for models whose operations are large.

Two threads that train two clients leave no core idle, whereas two threads inside every operation wait for
each other all the time. Pictures lie with their channels last, which convolutions like; the rules of the
algorithm run in place over the flat vectors. What comes out does not depend on how many threads there are.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.errors import InputError, whole
from fadamgc.federation.problem import Problem
from fadamgc.federation.sampling import FORWARD, torch_seed
from fadamgc.runtime import single_threads
from fadamgc.sim.executors.base import Job, Plan, Result
from fadamgc.sim.executors.inplace import Rules, Workspace
from fadamgc.sim.executors.loop import failure
from fadamgc.sim.executors.machine_code import compiler

LARGE = 100_000  # numbers in a model, from which on
MANY = 200  # client-steps are worth the compilation of the rules


class ThreadsExecutor:
    """Clients in one queue for all threads, those with the most work first.

    Args:
        problem: the task as functions. Jobs may belong to other problems of the same model and loss.
        plan: how large the run is.
        workers: threads; None is as many as torch has, one for each core unless told otherwise.
        compile: whether the rules become machine code, which may change last bits (its square roots are
            exact, torch's are not); None is where it pays.
    """

    name = "threads"

    def __init__(
        self,
        problem: Problem,
        plan: Plan | None = None,
        workers: int | None = None,
        compile: bool | None = None,
    ) -> None:
        if workers is not None:
            whole("workers", workers, 1)
        if problem.device.type != "cpu":
            raise InputError(f"executor='threads' runs on the CPU, not on device={str(problem.device)!r}")
        self.problem = problem
        self.workers = workers or torch.get_num_threads()
        if compile is None:
            compile = (
                plan is not None
                and problem.flat.d >= LARGE
                and plan.rounds * plan.sampled * plan.steps >= MANY
            )
        self._compile = compile and compiler() is not None
        self._rules: dict[AnyAlgorithm, Rules] = {}
        self._lock = threading.Lock()
        self._places: SimpleQueue[Place] = SimpleQueue()
        for _ in range(self.workers):
            self._places.put(Place(problem))
        self._pool = single_threads(self.workers)

    @property
    def compiled(self) -> bool:
        """Whether rules are machine code."""
        return self._compile and not any(rules.failed for rules in self._rules.values())

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Carry out the jobs; results come as they are ready."""
        for job in jobs:
            self._rules_of(job.round.algorithm)
            _ = job.round.problem.random  # found out with the problem's own module, so not in a thread
        threads = min(self.workers, len(jobs))
        queue: SimpleQueue[Job | None] = SimpleQueue()
        for entry in (*largest_first(jobs), *[None] * threads):  # None: nothing is left for a thread
            queue.put(entry)
        done: SimpleQueue[Result | BaseException] = SimpleQueue()
        stop = threading.Event()
        futures = [self._pool.submit(self._work, queue, done, stop) for _ in range(threads)]
        try:
            for _ in jobs:
                result = done.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            stop.set()
            for future in futures:
                future.result()

    def _work(
        self,
        queue: SimpleQueue[Job | None],
        done: SimpleQueue[Result | BaseException],
        stop: threading.Event,
    ) -> None:
        place = self._places.get()
        try:
            while not stop.is_set() and (job := queue.get()) is not None:
                result = place.one(job, self._rules[job.round.algorithm], self._lock, stop)
                if result is not None:
                    done.put(result)
        except BaseException as error:  # for the thread that waits
            done.put(error)
        finally:
            self._places.put(place)

    def _rules_of(self, algorithm: AnyAlgorithm) -> Rules:
        if algorithm not in self._rules:
            self._rules[algorithm] = Rules(algorithm, self._compile)
        return self._rules[algorithm]


def largest_first(jobs: Sequence[Job]) -> list[Job]:
    """Sort jobs by their work, so that no thread starts a long one when the others are done."""
    return sorted(jobs, key=lambda job: -job.batches.total)


class Place:
    """Where a thread works: a module of its own, whose parameters are those in one flat vector."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.module = problem.flat.copy(problem.module).train()
        self.x, self.g = torch.empty_like(problem.x0), torch.empty_like(problem.x0)
        self.workspace = Workspace()
        named = dict(self.module.named_parameters())
        self.parameters = [named[name] for name in problem.flat.names]
        self.channels_last = (
            problem.inputs.ndim == 4 and problem.dtype == torch.float32 and _may_lie_last(self.module)
        )
        self.apart: list[tuple[Tensor, Tensor]] = []  # parameters that lie otherwise than in x, and where
        for parameter, view in zip(self.parameters, problem.flat.unflatten(self.x).values(), strict=True):
            parameter.data = view
            if problem.mixed:
                parameter.data = torch.empty_like(view, dtype=problem.dtype)
                self.apart.append((parameter.data, view))
            elif self.channels_last and view.ndim == 4:
                parameter.data = torch.empty_like(view, memory_format=torch.channels_last)
                self.apart.append((parameter.data, view))
            parameter.requires_grad_()
        self.g_views = list(problem.flat.unflatten(self.g).values())

    def one(self, job: Job, rules: Rules, lock: threading.Lock, stop: threading.Event) -> Result | None:
        """One client's round; None if it is to stop."""
        round, client = job.round, job.state
        algo, down, problem = round.algorithm, round.down, round.problem
        self._take_up(problem)
        g_x = None
        if algo.round_gradient:
            with lock:  # it uses the problem's own module
                g_x = problem.whole_gradient(down.x, round.buffers, job.client, round.seed, round.t)
        local = rules.begin(down, client, g_x, self.x, self.workspace)
        self.x.copy_(down.x)
        self._set_buffers(round.buffers)
        loss_sum = torch.zeros((), dtype=problem.x0.dtype)
        K, start = job.batches.steps, int(problem.start[job.client])
        generator = torch.Generator().manual_seed(torch_seed(round.seed, FORWARD, round.t, job.client))
        with DrawFrom(generator) if problem.random else nullcontext():
            for k, batch in enumerate(job.batches):
                if stop.is_set():
                    return None
                rows = torch.from_numpy(batch + start)
                try:
                    loss_sum += self._gradient(problem.inputs[rows], problem.targets[rows])
                except Exception as error:
                    raise failure(job, k, len(rows), error) from error
                with torch.no_grad():
                    rules.step(down, client, self.x, local, self.g)
        with torch.no_grad():
            state, up = rules.finish(down, client, local, self.x, K, job.tracked, self.workspace)
            named = dict(self.module.named_buffers())
            buffers = {name: named[name].detach().clone() for name in round.buffers}
        return Result(job, state, up, buffers, loss_sum / K)

    def _gradient(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """The loss on a batch; its gradient is in g."""
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        for parameter, view in self.apart:
            parameter.copy_(view)
        with torch.enable_grad():
            loss = self.problem.task.loss(self.module(inputs), targets)
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                loss, self.parameters, allow_unused=True
            )
        for view, g in zip(self.g_views, gradients, strict=True):
            if g is None:
                view.zero_()
            else:
                view.copy_(g)
        return loss.detach()

    def _take_up(self, problem: Problem) -> None:
        """Another problem of the same model may have other constants."""
        if problem is self.problem:
            return
        self.problem = problem
        own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for name, value in problem.fixed.items():
            if own[name].data_ptr() != value.data_ptr():
                own[name].data = value.clone()

    @torch.no_grad()
    def _set_buffers(self, values: dict[str, Tensor]) -> None:
        own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for name, value in values.items():
            if own[name].shape == value.shape:
                own[name].copy_(value)
            else:
                parent, _, last = name.rpartition(".")
                setattr(self.module.get_submodule(parent), last, value.clone())


def _may_lie_last(module: nn.Module) -> bool:
    """Whether a module has convolutions, all of which can have their channels last.

    Not all can: the gradient of a 1x1 convolution with a stride and very few input channels (seen with 3
    and 4, torch 2.13 on a CPU) writes beyond its memory, and the process dies. 16 is on the safe side.
    """
    convolutions = [m for m in module.modules() if isinstance(m, nn.Conv2d)]
    narrow = [
        m for m in convolutions if m.kernel_size == (1, 1) and m.stride != (1, 1) and m.in_channels < 16
    ]
    return bool(convolutions) and not narrow


class DrawFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Random numbers of this thread come from a generator of its own, not from the one of all threads."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operation, with the generator if it takes one."""
        kwargs = dict(kwargs or {})
        if _draws(func, args, kwargs) and not _takes_generator(func):
            name = func._overloadname
            other = "generator" if name == "default" else f"{name}_generator"
            func = getattr(func.overloadpacket, other, func)
            if not _takes_generator(func):
                raise InputError(
                    f"executor='threads' cannot give {func} random numbers of its own; use executor='loop'"
                )
        if _takes_generator(func):
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation needs random numbers; attention without dropout, which might, does not."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            given = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(given != 0.0)
    return True


def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)
