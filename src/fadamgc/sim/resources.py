"""What several runs in one process can share: a task's functions and data, and executors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from fadamgc.federation.client_data import ClientTable
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.traits import same_model
from fadamgc.sim.executors import Executor, ExecutorChoice, Workload, make_executor
from fadamgc.sim.fingerprint import fingerprint
from fadamgc.task import Task


@dataclass(frozen=True)
class TaskParts:
    """A task on one device and in one dtype."""

    functions: TaskFunctions
    clients: ClientTable

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Digests by which a checkpoint recognises the task."""
        return fingerprint(self.functions, self.clients)


class Resources:
    """Makes functions, data tables and executors for runs, and gives equal runs the same ones."""

    def __init__(self) -> None:
        self._tasks: list[tuple[Task, Any, TaskParts]] = []
        self._executors: list[tuple[Any, TaskParts, Executor]] = []

    def task_parts(
        self, task: Task, dtype: torch.dtype | None, device: str | torch.device | None
    ) -> TaskParts:
        """Return the functions and the data of a task, made once."""
        for cached_task, place, parts in self._tasks:
            if cached_task is task and place == (dtype, device):
                return parts
        functions = TaskFunctions(task, dtype, device)
        parts = TaskParts(functions, ClientTable(task, functions.dtype, functions.device))
        self._tasks.append((task, (dtype, device), parts))
        return parts

    def executor(self, choice: ExecutorChoice, workload: Workload, compiled: bool | None) -> Executor:
        """Return the executor of an equal workload on a task with the same model, or a new one."""
        parts = TaskParts(workload.functions, workload.clients)
        kind = (choice, type(workload.algorithm), workload[3:], compiled)
        for cached_kind, cached_parts, executor in self._executors:
            if cached_kind == kind and self._same(cached_parts, parts):
                return executor
        executor = make_executor(choice, workload, compiled)
        self._executors.append((kind, parts, executor))
        return executor

    def _same(self, first: TaskParts, second: TaskParts) -> bool:
        if first.functions is second.functions:
            return True
        table = first.clients
        return same_model(first.functions, second.functions, table.inputs[:8], table.targets[:8])
