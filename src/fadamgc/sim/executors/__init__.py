"""The ways to run the jobs of a round on one machine, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from fadamgc.errors import InputError, nearest, shown
from fadamgc.sim.executors.auto import choose_executor
from fadamgc.sim.executors.base import Executor, Workload
from fadamgc.sim.executors.loop import LoopExecutor
from fadamgc.sim.executors.threads import ThreadsExecutor
from fadamgc.sim.executors.vectorized import VectorizedExecutor

__all__ = [
    "EXECUTORS",
    "Executor",
    "ExecutorChoice",
    "LoopExecutor",
    "ThreadsExecutor",
    "VectorizedExecutor",
    "Workload",
    "make_executor",
]

ExecutorChoice: TypeAlias = str | Callable[[Workload], Executor]

EXECUTORS: dict[str, Callable[[Workload], Executor]] = {
    "loop": LoopExecutor,
    "threads": ThreadsExecutor,
    "vectorized": VectorizedExecutor,
}


def make_executor(choice: ExecutorChoice, workload: Workload, compiled: bool | None = None) -> Executor:
    """Make an executor by name ("auto", "loop", "threads", "vectorized"), or by a custom factory.

    Args:
        choice: the name, or a function of the workload.
        workload: what will be run.
        compiled: whether an interrupted run had compiled code, because the last bits depend on it.
    """
    if callable(choice):
        return choice(workload)
    if isinstance(choice, str) and choice == "auto":
        return choose_executor(workload)
    if not isinstance(choice, str) or choice not in EXECUTORS:
        known = ["auto", *EXECUTORS]
        hint = nearest(choice, known) if isinstance(choice, str) else ""
        raise InputError(f"executor={shown(choice)} is not known{hint}; known are {', '.join(known)}")
    if choice == "threads":
        return ThreadsExecutor(workload, compile=compiled)
    if choice == "vectorized":
        return VectorizedExecutor(workload, compile=compiled)
    return EXECUTORS[choice](workload)
