"""The choice of an executor: by what the model is, and by timing where the run is long enough."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

import torch
from torch import nn

from fadamgc.errors import FadamgcError, InputError
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.problem import Problem
from fadamgc.federation.sampling import Batches
from fadamgc.sim.executors.base import Executor, Job, Plan, Round
from fadamgc.sim.executors.loop import LoopExecutor
from fadamgc.sim.executors.threads import ThreadsExecutor
from fadamgc.sim.executors.vectorized import VectorizedExecutor

SMALL = 1_000_000  # parameters up to which a block of clients may pay on a CPU
LONG = 500  # client-steps from which on a few of them are spent on timing
CLEARLY = 1.2  # how much faster another executor must be to be taken instead of the expected one
QUICK = 0.02  # seconds of a step up to which several are timed

log = logging.getLogger("fadamgc")


def choose(problem: Problem, plan: Plan) -> Executor:
    """The executor that is expected to be fastest, or one that timing shows to be clearly faster."""
    made: dict[str, Executor] = {}
    for name, make in _makers(problem, plan).items():
        try:
            executor = make(problem, plan)
        except InputError as error:
            log.info("executor auto: not %s (%s)", name, error)
            continue
        if isinstance(executor, VectorizedExecutor) and not executor.samplewise:
            continue  # blocks would be small and their shapes many
        made[name] = executor
        if plan.rounds * plan.sampled * plan.steps < LONG:
            break
    expected = next(iter(made))
    if len(made) == 1:
        log.info("executor auto: %s (by rule)", expected)
        return made[expected]
    seconds: dict[str, float] = {}
    for name, executor in made.items():
        try:
            seconds[name] = _seconds(executor, problem, plan)
        except FadamgcError as error:
            log.info("executor auto: not %s (%s)", name, error)
            failed = error
    if not seconds:  # so it is the model, or its data
        raise failed
    expected = next(iter(seconds))
    fastest = min(seconds, key=seconds.__getitem__)
    chosen = fastest if seconds[expected] > CLEARLY * seconds[fastest] else expected
    shown = ", ".join(f"{name} {1e3 * s:.3g} ms" for name, s in seconds.items())
    log.info("executor auto: %s (a step of one client: %s)", chosen, shown)
    return made[chosen]


def _makers(problem: Problem, plan: Plan) -> dict[str, Callable[[Problem, Plan], Executor]]:
    """What may run the problem; what is expected to be fastest comes first."""
    makers: dict[str, Callable[[Problem, Plan], Executor]] = {}
    small = problem.flat.d <= SMALL and not _convolves(problem)
    if small and not problem.random:
        makers["vectorized"] = VectorizedExecutor
    threads = problem.device.type == "cpu"
    if small or not threads:  # short operations: threads would wait for each other
        makers["loop"] = LoopExecutor
        threads = threads and torch.get_num_threads() > 1 and plan.sampled > 1
    if threads:  # a single one, too: its rules are in place and its pictures lie as convolutions like them
        makers["threads"] = ThreadsExecutor
    makers["loop"] = LoopExecutor
    return makers


def _convolves(problem: Problem) -> bool:
    slow = (nn.modules.conv._ConvNd, nn.RNNBase)  # a block of these gains nothing on a CPU
    return any(isinstance(module, slow) for module in problem.module.modules())


def _seconds(executor: Executor, problem: Problem, plan: Plan) -> float:
    """Seconds of one step of one client."""
    few = plan.sampled
    if not isinstance(executor, VectorizedExecutor):
        few = min(few, 2 if isinstance(executor, LoopExecutor) else 2 * torch.get_num_threads())
    steps = 1
    first = _time(executor, _jobs(problem, plan, few, steps))
    if first / few < QUICK or isinstance(executor, VectorizedExecutor):
        steps = min(plan.steps, 4)
    jobs = _jobs(problem, plan, few, steps)
    return min(_time(executor, jobs) for _ in range(2)) / (few * steps)


def _time(executor: Executor, jobs: list[Job]) -> float:
    began = time.perf_counter()
    for _ in executor.run(jobs):
        pass
    return time.perf_counter() - began


def _jobs(problem: Problem, plan: Plan, count: int, steps: int) -> list[Job]:
    """Work as in a round of the run; nothing comes of it."""
    algo, x = plan.algorithm, problem.x0
    g = torch.zeros_like(x) if algo.init_gradient else None
    down = algo.broadcast(algo.init_server(x, g))
    round = Round(problem, algo, seed=0, t=0, down=down, buffers=problem.buffers0)
    states = ClientStates(problem.n, algo.init_client(x, g))
    clients = [i % problem.n for i in range(count)]
    return [
        Job(round, i, states, True, Batches(steps, plan.batch, min(plan.batch, int(problem.size[i]))))
        for i in clients
    ]
