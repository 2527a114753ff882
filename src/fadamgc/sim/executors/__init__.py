"""The ways to carry out a round on one machine, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fadamgc.errors import InputError, nearest, shown
from fadamgc.federation.problem import Problem
from fadamgc.sim.executors.auto import choose
from fadamgc.sim.executors.base import Executor, Job, Plan, Result, Round
from fadamgc.sim.executors.loop import LoopExecutor
from fadamgc.sim.executors.threads import ThreadsExecutor
from fadamgc.sim.executors.vectorized import VectorizedExecutor

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


def make_executor(
    choice: ExecutorChoice, problem: Problem, plan: Plan, compiled: bool | None = None
) -> Executor:
    """An executor by name ("auto", "loop", "threads", "vectorized"), or by a factory of the caller's.

    ``compiled`` is what an interrupted run did, because the last bits depend on it.
    """
    if callable(choice):
        return choice(problem)
    if isinstance(choice, str) and choice == "auto":
        return choose(problem, plan)
    if not isinstance(choice, str) or choice not in EXECUTORS:
        known = ["auto", *EXECUTORS]
        hint = nearest(choice, known) if isinstance(choice, str) else ""
        raise InputError(f"executor={shown(choice)} is not known{hint}; known are {', '.join(known)}")
    if choice == "threads":
        return ThreadsExecutor(problem, plan, compile=compiled)
    if choice == "vectorized":
        return VectorizedExecutor(problem, plan, compile=compiled)
    return EXECUTORS[choice](problem, plan)
