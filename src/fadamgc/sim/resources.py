"""Resources that several runs in one process share: a task's functions and data, and executors."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fadamgc.bundle import tensor_bytes
from fadamgc.federation.client_data import ClientData, ClientTable
from fadamgc.federation.computing import PLAIN, Computing
from fadamgc.federation.functions import CHUNK, TaskFunctions
from fadamgc.federation.traits import same_model
from fadamgc.runtime import seeded
from fadamgc.samples import map_tensors
from fadamgc.sim.executors.auto import ExecutorChoice, make_executor
from fadamgc.sim.executors.base import Executor, Workload
from fadamgc.task import Task
from fadamgc.tree import leaves


@dataclass(frozen=True)
class TaskParts:
    """A task on one device and in one dtype."""

    functions: TaskFunctions
    clients: ClientTable

    @cached_property
    def client_tests(self) -> ClientTable:
        """The test data of the clients in ``task.evaluated``; if there is none, the training data of all."""
        f = self.functions
        tests = f.task.client_test_samples
        return self.clients if tests is None else ClientTable(tests, f.dtype, f.device)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Digests of data and model, loss and metric, by which a checkpoint recognises the task.

        For data that is read per batch or made on demand, the digest covers only the sizes and two samples.
        """
        f, clients, task = self.functions, self.clients, self.functions.task
        model = [f.x0, *f.buffers0.values(), *f.fixed.values()]
        layout = repr((f.flat, list(f.buffers0), list(f.fixed), f.module))
        if clients.is_read_per_batch or clients.on_demand:
            data, batch = _digest([*leaves(f.sample), torch.from_numpy(clients.size)]), f.sample
        else:
            everything = clients.together()
            data = _data_digest(everything, clients.size, f.test)
            rows = torch.linspace(0, everything.size - 1, min(64, everything.size)).long()
            batch = everything.batch(rows.numpy())
        with seeded(0, f.device), torch.no_grad():
            loss = f.loss(f.x0, f.fresh_buffers(), map_tensors(torch.clone, batch[0]), batch[1])
        return {
            "data": data,
            "model": _digest(model, layout),
            **({} if task.transform is None else {"transform": _name(task.transform)}),
            "loss": f"{_name(task.loss)}, {float(loss):.4g} at the start",
            "metric": f"{task.metric if isinstance(task.metric, str) else _name(task.metric)}, {task.goal}",
        }


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _digest(tensors: list[Tensor], text: str = "") -> str:
    sha = hashlib.sha256(text.encode())
    for tensor in tensors:
        sha.update(repr((tuple(tensor.shape), tensor.dtype)).encode())
        sha.update(tensor_bytes(tensor))
    return sha.hexdigest()


def _data_digest(clients: ClientData, size: NDArray[Any], test: ClientData | None) -> str:
    """Return the digest of the data as the model sees it, read in chunks."""
    sha = hashlib.sha256()
    parts: list[tuple[ClientData | Tensor, int]] = [(clients, 0), (clients, 1), (torch.from_numpy(size), 0)]
    parts += [] if test is None or test.is_read_per_batch else [(test, 0), (test, 1)]
    for data, part in parts:
        chunks = [data] if isinstance(data, Tensor) else (chunk[part] for chunk in data.chunks(CHUNK))
        for i, tensor in enumerate(chunks):
            if i == 0:
                total = len(data) if isinstance(data, Tensor) else data.size
                sha.update(repr(((total, *tensor.shape[1:]), tensor.dtype)).encode())
            sha.update(tensor_bytes(tensor))
    return sha.hexdigest()


class Resources:
    """Makes functions, data tables and executors for runs; equal runs share them.

    ``runs`` is how many runs are expected.
    """

    def __init__(self, runs: int = 1) -> None:
        self.runs = runs
        self._tasks: list[tuple[Task, Any, TaskParts]] = []
        self._executors: list[tuple[Any, Workload, Executor]] = []

    def task_parts(
        self,
        task: Task,
        dtype: torch.dtype | None,
        device: str | torch.device | None,
        computing: Computing = PLAIN,
    ) -> TaskParts:
        """Return the functions and the data of a task, made once."""
        for cached_task, place, parts in self._tasks:
            if cached_task is task and place == (dtype, device, computing):
                return parts
        functions = TaskFunctions(task, dtype, device, computing)
        parts = TaskParts(functions, ClientTable(task.samples, functions.dtype, functions.device))
        self._tasks.append((task, (dtype, device, computing), parts))
        return parts

    def executor(self, choice: ExecutorChoice, workload: Workload, compiled: bool | None) -> Executor:
        """Return the executor of an earlier equal workload with the same model, or a new executor."""
        kind = (choice, type(workload.algorithm), workload[3:], compiled)
        for cached_kind, other, executor in self._executors:
            if cached_kind != kind:
                continue
            batch = other.functions.sample
            if not other.clients.is_read_per_batch:
                together = other.clients.together()
                batch = together.batch(np.arange(min(8, together.size)))
            if same_model(other.functions, workload.functions, *batch):
                return executor
        executor = make_executor(choice, workload, compiled, self.runs)
        self._executors.append((kind, workload, executor))
        return executor

    def close(self) -> None:
        """Close executors that use other processes."""
        for _, _, executor in self._executors:
            close = getattr(executor, "close", None)
            if close is not None:
                close()
        self._executors.clear()
