"""The choice of an executor: by traits of the model, and by timing if the run is long enough."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeAlias

import torch

from fadamgc.errors import FadamgcError, InputError, nearest, shown
from fadamgc.federation.jobs import Job, Round
from fadamgc.federation.sampling import Batches
from fadamgc.federation.traits import has_slow_blocks
from fadamgc.sim.executors.base import Executor, Workload
from fadamgc.sim.executors.block import UnmappableError
from fadamgc.sim.executors.loop import LoopExecutor
from fadamgc.sim.executors.ray_actors import Ray
from fadamgc.sim.executors.threads import ThreadsExecutor
from fadamgc.sim.executors.vectorized import Compile, VectorizedExecutor
from fadamgc.stages import stage, warning

EXECUTORS = ("loop", "threads", "vectorized", "ray")
SMALL_MODEL = 1_000_000  # parameters up to which a block of clients may be faster on a CPU
LONG_RUN = 500  # client-steps of a run from which a few of them are spent on timing
CLEARLY_FASTER = 1.2  # ratio of times above which another executor replaces the expected one
SHORT_STEP = 0.02  # seconds of a step up to which several steps are timed
# A run is compiled if that is expected to save more time than it costs.
COMPILING = 10.0  # seconds that compiling takes
COMPILED_GAIN = 2.0  # ratio of the time of a step before to the time after, expected
SHORT_OPERATIONS = 0.003  # seconds of a client's step up to which its operations are so short that it may pay

ExecutorChoice: TypeAlias = str | Callable[[Workload], Executor]

log = logging.getLogger("fadamgc")

_warned: set[type] = set()  # algorithms with unmappable rules of which the user was warned


def make_executor(
    choice: ExecutorChoice, workload: Workload, compiled: bool | None = None, runs: int = 1
) -> Executor:
    """Make an executor by name ("auto" or one of EXECUTORS), or by a custom factory.

    ``compiled`` is whether an interrupted run had compiled code, because the last bits depend on it;
    ``runs`` is how many runs like this one share the executor.
    """
    if isinstance(choice, Ray):
        return choice(workload, compiled)
    if callable(choice):
        return choice(workload)
    makers: dict[str, Callable[[Workload], Executor]] = {
        "auto": partial(choose_executor, runs=runs),
        "ray": partial(Ray(), compiled=compiled),
        "loop": LoopExecutor,
        "threads": partial(ThreadsExecutor, compile=compiled),
        "vectorized": partial(VectorizedExecutor, compile=compiled),
    }
    if not isinstance(choice, str) or choice not in makers:
        hint = nearest(choice, makers) if isinstance(choice, str) else ""
        raise InputError(f"executor={shown(choice)} is not known{hint}; known are {', '.join(makers)}")
    return makers[choice](workload)


def choose_executor(
    workload: Workload, timed: bool = True, compiled: bool | None = None, runs: int = 1
) -> Executor:
    """Return the executor that is expected to be fastest, or one that timing shows to be clearly faster.

    Without ``timed``, the choice depends on the model and the device alone. ``runs`` is how many runs like
    this one share the executor.
    """
    client_steps = workload.rounds * workload.sampled * workload.steps
    timed = timed and client_steps >= LONG_RUN
    candidates: dict[str, Executor] = {}
    for make in _candidates(workload):
        try:
            candidates[make.name] = _made(make, workload, "kept" if timed and compiled is None else compiled)
        except UnmappableError as error:
            if (kind := type(workload.algorithm)) not in _warned:
                _warned.add(kind)
                warning(
                    f"executor='auto' runs {kind.__name__} one client at a time, which is slower: {error}"
                )
            continue
        except InputError as error:
            log.info("executor auto: not %s (%s)", make.name, error)
            continue
        if not timed:
            break
    if not timed or (len(candidates) == 1 and "vectorized" not in candidates):
        (executor,) = candidates.values()
        log.info("executor auto: %s (by rule)", executor.name)
        return executor
    seconds: dict[str, float] = {}
    errors = [_try(executor, workload, seconds) for executor in candidates.values()]
    if not seconds:  # every executor failed: because of the model or its data
        raise next(error for error in reversed(errors) if error is not None)
    left = client_steps * runs * min(seconds.values())
    if compiled is None and left * (1 - 1 / COMPILED_GAIN) > COMPILING:
        _try_compiled(workload, candidates, seconds)
    expected = next(iter(seconds))
    fastest = min(seconds, key=seconds.__getitem__)
    choice = fastest if seconds[expected] > CLEARLY_FASTER * seconds[fastest] else expected
    times = ", ".join(f"{name} {1e3 * s:.3g} ms" for name, s in seconds.items())
    log.info("executor auto: %s (a step of one client: %s)", choice, times)
    return candidates[choice]


def _candidates(workload: Workload) -> list[Any]:
    """Return the classes of executors that may run the workload; the one expected to be fastest is first."""
    functions, cpu = workload.functions, workload.functions.device.type == "cpu"
    slow = cpu and has_slow_blocks(functions.module)
    if cpu and (slow or functions.flat.d > SMALL_MODEL):
        # Even a single thread: its rules work in place, and images have their channels last.
        return [ThreadsExecutor, LoopExecutor]
    makers: list[Any] = [VectorizedExecutor] if _fits_blocks(workload) else []
    makers.append(LoopExecutor)  # before threads, which wait for each other if operations are short
    if cpu and torch.get_num_threads() > 1 and workload.sampled > 1:
        makers.append(ThreadsExecutor)
    return makers


def _fits_blocks(workload: Workload) -> bool:
    functions = workload.functions
    small = functions.flat.d <= SMALL_MODEL
    return small and not functions.random and not workload.clients.is_read_per_batch


def _made(make: Any, workload: Workload, compile: Compile) -> Executor:
    if make is LoopExecutor:
        return LoopExecutor(workload)
    if make is ThreadsExecutor:
        return ThreadsExecutor(workload, compile=None if compile == "kept" else compile)
    executor = VectorizedExecutor(workload, compile=compile)
    if not executor.samplewise:
        raise InputError("its blocks would be small and have many shapes")
    return executor


def _try(executor: Executor, workload: Workload, seconds: dict[str, float]) -> FadamgcError | None:
    """Measure the seconds of a step; return the error if it fails."""
    try:
        with stage(f"trying the executor {executor.name}"):
            seconds[executor.name] = _step_seconds(executor, workload)
    except FadamgcError as error:
        log.info("executor auto: not %s (%s)", executor.name, error)
        return error
    return None


def _try_compiled(workload: Workload, candidates: dict[str, Executor], seconds: dict[str, float]) -> None:
    """Compile the steps of blocks, and measure them, where that may be faster than what was measured."""
    uncompiled = candidates.get("vectorized")
    short = min(seconds.values()) < SHORT_OPERATIONS
    if getattr(uncompiled, "compiled", False) or not (short and _fits_blocks(workload)):
        return
    try:
        executor = _made(VectorizedExecutor, workload, True)
    except InputError as error:
        log.info("executor auto: not compiled (%s)", error)
        return
    assert isinstance(executor, VectorizedExecutor)
    if not (executor.compiled and executor.compiling_may_pay):
        return
    found: dict[str, float] = {}
    _try(executor, workload, found)
    if found and executor.compiled and found["vectorized"] < seconds.get("vectorized", math.inf):
        seconds |= found
        candidates["vectorized"] = executor


def _step_seconds(executor: Executor, workload: Workload) -> float:
    """Measure the seconds of one step of one client."""
    clients = workload.sampled
    if not isinstance(executor, VectorizedExecutor):
        clients = min(clients, 2 if isinstance(executor, LoopExecutor) else 2 * torch.get_num_threads())
    steps = 1
    first = _time(executor, _trial_jobs(workload, clients, steps))
    if first / clients < SHORT_STEP or isinstance(executor, VectorizedExecutor):
        steps = min(workload.steps, 4)
    jobs = _trial_jobs(workload, clients, steps)
    return min(_time(executor, jobs) for _ in range(2)) / (clients * steps)


def _time(executor: Executor, jobs: list[Job]) -> float:
    began = time.perf_counter()
    for _ in executor.run(jobs):
        pass
    return time.perf_counter() - began


def _trial_jobs(workload: Workload, count: int, steps: int) -> list[Job]:
    """Return jobs as in a round of the run; their results are not used."""
    functions, algo, table, batch = workload.functions, workload.algorithm, workload.clients, workload.batch
    x = functions.x0
    g = torch.zeros_like(x) if algo.init_gradient else None
    down = algo.broadcast(algo.init_server(x, g))
    round = Round(functions, algo, 0, 0, down, functions.buffers0, workload.gradients)
    state = algo.init_client(x, g)
    return [
        Job(round, i, table[i], lambda: state, True, Batches(steps, batch, min(batch, table[i].size)))
        for i in range(count)
    ]
