"""The ways to run the jobs of a round on one machine, and the choice between them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeAlias

from fadamgc.errors import InputError, nearest, shown
from fadamgc.sim.executors.auto import choose_executor
from fadamgc.sim.executors.base import Executor, Workload
from fadamgc.sim.executors.loop import LoopExecutor
from fadamgc.sim.executors.threads import ThreadsExecutor
from fadamgc.sim.executors.vectorized import VectorizedExecutor

__all__ = ["Executor", "LoopExecutor", "ThreadsExecutor", "VectorizedExecutor", "Workload"]

ExecutorChoice: TypeAlias = str | Callable[[Workload], Executor]

EXECUTORS = ("loop", "threads", "vectorized")


def make_executor(choice: ExecutorChoice, workload: Workload, compiled: bool | None = None) -> Executor:
    """Make an executor by name ("auto", "loop", "threads", "vectorized"), or by a custom factory.

    ``compiled`` is whether an interrupted run had compiled code, because the last bits depend on it.
    """
    if callable(choice):
        return choice(workload)
    makers: dict[str, Callable[[Workload], Executor]] = {
        "auto": choose_executor,
        "loop": LoopExecutor,
        "threads": partial(ThreadsExecutor, compile=compiled),
        "vectorized": partial(VectorizedExecutor, compile=compiled),
    }
    if not isinstance(choice, str) or choice not in makers:
        hint = nearest(choice, makers) if isinstance(choice, str) else ""
        raise InputError(f"executor={shown(choice)} is not known{hint}; known are {', '.join(makers)}")
    return makers[choice](workload)
