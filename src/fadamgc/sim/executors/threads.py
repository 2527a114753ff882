"""One client a thread, with one thread inside each operation: for models whose operations are large.

Two threads that train two clients leave no core idle, whereas two threads inside every operation wait for
each other all the time. Pictures lie with their channels last, which convolutions like; the rules of the
algorithm run in place over the flat vectors. What comes out does not depend on how many threads there are.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from queue import SimpleQueue
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.errors import InputError, whole
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.jobs import Job, Result
from fadamgc.federation.sampling import FORWARD, torch_seed
from fadamgc.federation.traits import fits_channels_last
from fadamgc.runtime import single_threads
from fadamgc.sim.executors.base import Workload
from fadamgc.sim.executors.inplace import Rules, Vectors
from fadamgc.sim.executors.loop import failure
from fadamgc.sim.executors.machine_code import compiler

LARGE = 100_000  # numbers in a model, from which on
MANY = 200  # client-steps are worth the compilation of the rules


class ThreadsExecutor:
    """Clients dealt out to threads beforehand; a thread that is done takes over another's last client.

    Args:
        workload: what will be run. Jobs may belong to other tasks with the same model and loss.
        workers: threads; None is torch's number of threads, by default one per core.
        compile: whether the rules become machine code, which may change last bits (its square roots are
            exact, torch's are not); None is where it pays.
    """

    name = "threads"

    def __init__(
        self,
        workload: Workload,
        workers: int | None = None,
        compile: bool | None = None,
    ) -> None:
        functions = workload.functions
        if workers is not None:
            whole("workers", workers, 1)
        if functions.device.type != "cpu":
            raise InputError(f"executor='threads' runs on the CPU, not on device={str(functions.device)!r}")
        self.workers = workers or torch.get_num_threads()
        if compile is None:
            client_steps = workload.rounds * workload.sampled * workload.steps
            compile = functions.flat.d >= LARGE and client_steps >= MANY
        self._compile = compile and compiler() is not None
        self._rules: dict[AnyAlgorithm, Rules] = {}
        self._vectors = Vectors()
        self._lock = threading.Lock()
        self._trainers: SimpleQueue[Trainer] = SimpleQueue()
        for _ in range(self.workers):
            self._trainers.put(Trainer(functions))
        self._pool = single_threads(self.workers)

    @property
    def compiled(self) -> bool:
        """Whether rules are machine code."""
        return self._compile and not any(rules.failed for rules in self._rules.values())

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Carry out the jobs; results come as they are ready."""
        for job in jobs:
            self._rules_of(job.round.algorithm)
            _ = job.round.functions.random  # tried out with the shared module, so not in a thread
        hands = deal(jobs, self.workers)
        done: SimpleQueue[Result | BaseException] = SimpleQueue()
        stop = threading.Event()
        futures = [self._pool.submit(self._work, hands, i, done, stop) for i in range(len(hands))]
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
        hands: list[deque[Job]],
        own: int,
        done: SimpleQueue[Result | BaseException],
        stop: threading.Event,
    ) -> None:
        trainer = self._trainers.get()
        try:
            while not stop.is_set() and (job := take(hands, own)) is not None:
                result = trainer.train(job, self._rules[job.round.algorithm], self._lock, stop)
                if result is not None:
                    done.put(result)
        except BaseException as error:  # for the thread that waits
            done.put(error)
        finally:
            self._trainers.put(trainer)

    def _rules_of(self, algorithm: AnyAlgorithm) -> Rules:
        if algorithm not in self._rules:
            self._rules[algorithm] = Rules(algorithm, self._compile, self._vectors)
        return self._rules[algorithm]


def deal(jobs: Sequence[Job], workers: int) -> list[deque[Job]]:
    """Jobs for each worker, so that all have about the same to do."""
    hands: list[deque[Job]] = [deque() for _ in range(min(workers, len(jobs)))]
    load = [0] * len(hands)
    for job in sorted(jobs, key=lambda job: -job.batches.total):
        least = load.index(min(load))
        hands[least].append(job)
        load[least] += job.batches.total
    return hands


def take(hands: list[deque[Job]], own: int) -> Job | None:
    """The next job of one's own, else the last of whoever has most left, else None."""
    try:
        return hands[own].popleft()
    except IndexError:
        pass
    for hand in sorted(hands, key=len, reverse=True):
        try:
            return hand.pop()
        except IndexError:
            continue
    return None


class Trainer:
    """Trains one client at a time, with a copy of the module whose parameters are views of a flat vector."""

    def __init__(self, functions: TaskFunctions) -> None:
        self.functions = functions
        self.module = functions.flat.copy(functions.module).train()
        self.x, self.g = torch.empty_like(functions.x0), torch.empty_like(functions.x0)
        named = dict(self.module.named_parameters())
        self.parameters = [named[name] for name in functions.flat.names]
        self.channels_last = (
            functions.sample[0].ndim == 4
            and functions.dtype == torch.float32
            and fits_channels_last(self.module)
        )
        self.apart: list[tuple[Tensor, Tensor]] = []  # parameters that lie otherwise than in x, and where
        for parameter, view in zip(self.parameters, functions.flat.unflatten(self.x).values(), strict=True):
            parameter.data = view
            if functions.mixed:
                parameter.data = torch.empty_like(view, dtype=functions.dtype)
                self.apart.append((parameter.data, view))
            elif self.channels_last and view.ndim == 4:
                parameter.data = torch.empty_like(view, memory_format=torch.channels_last)
                self.apart.append((parameter.data, view))
            parameter.requires_grad_()
        self.g_views = list(functions.flat.unflatten(self.g).values())

    def train(self, job: Job, rules: Rules, lock: threading.Lock, stop: threading.Event) -> Result | None:
        """One client's round; None if it is to stop."""
        round, client = job.round, job.state
        down, functions = round.down, round.functions
        self._switch_to(functions)
        with lock:  # the whole gradient uses the module that all threads share
            g_x = job.whole_gradient()
        local = rules.begin(down, client, g_x, self.x)
        self.x.copy_(down.x)
        self._set_buffers(round.buffers)
        loss_sum = torch.zeros((), dtype=functions.x0.dtype)
        generator = torch.Generator().manual_seed(torch_seed(round.seed, FORWARD, round.t, job.client))
        with DrawFrom(generator) if functions.random else nullcontext():
            for k, positions in enumerate(job.batches):
                if stop.is_set():
                    return None
                try:
                    loss_sum += self._gradient(*job.data.batch(positions))
                except Exception as error:
                    raise failure(job, k, len(positions), error) from error
                with torch.no_grad():
                    rules.step(down, client, self.x, local, self.g)
        with torch.no_grad():
            K = job.batches.steps
            state, up = rules.finish(down, client, local, self.x, K, job.tracked)
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
            loss = self.functions.task.loss(self.module(inputs), targets)
            gradients: tuple[Tensor | None, ...] = torch.autograd.grad(
                loss, self.parameters, allow_unused=True
            )
        for view, g in zip(self.g_views, gradients, strict=True):
            if g is None:
                view.zero_()
            else:
                view.copy_(g)
        return loss.detach()

    def _switch_to(self, functions: TaskFunctions) -> None:
        """Take over the constants of another task with the same model."""
        if functions is self.functions:
            return
        self.functions = functions
        own = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        for name, value in functions.fixed.items():
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


def train(job: Job) -> Result:
    """Run one job by itself in the calling thread: the fast path for a process with a single client."""
    rules = Rules(job.round.algorithm, False, Vectors())
    result = Trainer(job.round.functions).train(job, rules, threading.Lock(), threading.Event())
    assert result is not None
    return result
