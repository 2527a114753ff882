"""One thread per client, and one thread inside each operation: for models whose operations are large.

Two threads that train two clients leave no core idle, whereas two threads inside every operation keep waiting
for each other. The results do not depend on the number of threads.
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Sequence
from concurrent.futures import wait
from queue import SimpleQueue
from typing import Any

import torch

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.errors import InputError, whole
from fadamgc.federation.jobs import Job, Result
from fadamgc.runtime import single_threads
from fadamgc.sim.executors.base import Workload
from fadamgc.sim.executors.inplace import Code, Rules
from fadamgc.sim.executors.machine_code import compiler
from fadamgc.sim.executors.trace import Kinds
from fadamgc.sim.executors.trainer import Trainer

LARGE_MODEL = 100_000  # parameters from which compiled rules may be faster,
LONG_RUN = 200  # in runs of at least this many client-steps


class ThreadsExecutor:
    """Clients in one queue for all threads, those with the most work first.

    Args:
        workload: the work of a run. Jobs may belong to other tasks with the same model and loss.
        workers: threads; None is torch's number of threads, by default one per core.
        compile: whether the rules become machine code, which may change the last bits (its square roots
            are exact, torch's are not); None compiles if that pays.
    """

    name = "threads"

    def __init__(self, workload: Workload, workers: int | None = None, compile: bool | None = None) -> None:
        functions = workload.functions
        if workers is not None:
            whole("workers", workers, 1)
        if functions.device.type != "cpu":
            raise InputError(f"executor='threads' runs on the CPU, not on device={str(functions.device)!r}")
        self.workers = workers or torch.get_num_threads()
        if compile is None:
            client_steps = workload.rounds * workload.sampled * workload.steps
            compile = functions.flat.d >= LARGE_MODEL and client_steps >= LONG_RUN
        self._kinds, self._codes = Kinds(), dict[Hashable, Code]()
        compile = compile and not self._kinds.changes(workload.algorithm, workload.varying)
        self._compile = compile and compiler() is not None
        self._rules: dict[AnyAlgorithm, Rules] = {}  # of the algorithms of this round
        self._lock = threading.Lock()
        self._trainers: SimpleQueue[Trainer] = SimpleQueue()
        for _ in range(self.workers):
            self._trainers.put(Trainer(functions))
        self._pool = single_threads(self.workers)

    @property
    def compiled(self) -> bool:
        """Whether rules are machine code."""
        return self._compile and not any(code.failed for code in self._codes.values())

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Run the jobs; yield results as they are ready."""
        self._rules = {algo: self._rules.get(algo) or self._new(algo) for algo in map(_algorithm, jobs)}
        for job in jobs:
            _ = job.round.functions.random  # computed here, because it uses the shared module
        done: SimpleQueue[Any] = SimpleQueue()
        stop = threading.Event()
        futures = [self._pool.submit(self._train, job, done, stop) for job in largest_first(jobs)]
        try:
            for _ in jobs:
                result = done.get()
                if isinstance(result, BaseException):
                    raise result
                yield result
        finally:
            stop.set()
            for future in futures:
                future.cancel()
            wait(futures)

    def _new(self, algorithm: AnyAlgorithm) -> Rules:
        kind = self._kinds.of(algorithm)
        code = self._codes.setdefault(kind.description, Code(kind.lifted_names, self._compile))
        return Rules(algorithm, code)

    def _train(self, job: Job, done: SimpleQueue[Any], stop: threading.Event) -> None:
        """Train one client; put the result or the error into ``done``."""
        trainer = self._trainers.get()
        try:
            done.put(trainer.train(job, self._rules[job.round.algorithm], self._lock, stop))
        except BaseException as error:  # raised in the thread that waits
            done.put(error)
        finally:
            self._trainers.put(trainer)


def _algorithm(job: Job) -> AnyAlgorithm:
    return job.round.algorithm


def largest_first(jobs: Sequence[Job]) -> list[Job]:
    """Sort jobs by their work, so that no thread starts a long one when the others are done."""
    return sorted(jobs, key=lambda job: -job.batches.total)
