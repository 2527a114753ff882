"""The ways to carry out a round on one machine, and the choice between them."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import TypeAlias

from torch import nn

from fadamgc.errors import InputError, nearest
from fadamgc.sim.executors.base import Executor, Job, Plan, Result, Round
from fadamgc.sim.executors.loop import LoopExecutor
from fadamgc.sim.executors.threads import ThreadsExecutor
from fadamgc.sim.executors.vectorized import VectorizedExecutor
from fadamgc.sim.problem import Problem

__all__ = [
    "Executor",
    "ExecutorChoice",
    "Job",
    "LoopExecutor",
    "Plan",
    "Result",
    "Round",
    "ThreadsExecutor",
    "VectorizedExecutor",
    "make_executor",
]

ExecutorChoice: TypeAlias = str | Callable[[Problem], Executor]

EXECUTORS: dict[str, Callable[[Problem, Plan], Executor]] = {
    "loop": LoopExecutor,
    "threads": ThreadsExecutor,
    "vectorized": VectorizedExecutor,
}
SMALL = 1_000_000  # parameters up to which a batch of clients pays on a CPU

log = logging.getLogger("fadamgc")


def make_executor(choice: ExecutorChoice, problem: Problem, plan: Plan) -> Executor:
    """An executor by name ("auto", "loop", "vectorized"), or by a factory of the caller's."""
    if callable(choice):
        return choice(problem)
    if choice == "auto":
        return _auto(problem, plan)
    if choice not in EXECUTORS:
        known = ["auto", *EXECUTORS]
        hint = nearest(str(choice), known)
        raise InputError(f"executor={choice!r} is not known{hint}; known are {', '.join(known)}")
    return EXECUTORS[choice](problem, plan)


def _auto(problem: Problem, plan: Plan) -> Executor:
    """Small models of linear layers as a block, all others one client at a time."""
    slow = (nn.modules.conv._ConvNd, nn.RNNBase)  # a block of these gains nothing on a CPU
    if problem.flat.d <= SMALL and not any(isinstance(m, slow) for m in problem.module.modules()):
        try:
            executor = VectorizedExecutor(problem, plan)
        except InputError as error:
            log.info("executor auto: loop (%s)", error)
        else:
            if executor.samplewise:  # else blocks are small and their shapes many
                return executor
    return LoopExecutor(problem, plan)
