"""Digests by which a checkpoint recognises its task."""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

from fadamgc.federation.client_data import ClientTable
from fadamgc.federation.functions import TaskFunctions
from fadamgc.runtime import seeded


def fingerprint(functions: TaskFunctions, clients: ClientTable) -> dict[str, str]:
    """Return what distinguishes a task from another: digests of data and model, loss and metric."""
    data = [clients.inputs, clients.targets, torch.from_numpy(clients.size), *(functions.test or ())]
    model = [functions.x0, *functions.buffers0.values(), *functions.fixed.values()]
    layout = repr((functions.flat, list(functions.buffers0), list(functions.fixed), functions.module))
    with seeded(0), torch.no_grad():
        rows = torch.linspace(0, len(clients.inputs) - 1, min(64, len(clients.inputs))).long()
        buffers = functions.fresh_buffers()
        loss = functions.loss(functions.x0, buffers, clients.inputs[rows], clients.targets[rows])
    task = functions.task
    return {
        "data": _digest(data),
        "model": _digest(model, layout),
        "loss": f"{_name(task.loss)}, {float(loss):.4g} at the start",
        "metric": f"{task.metric if isinstance(task.metric, str) else _name(task.metric)}, {task.goal}",
    }


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _digest(tensors: list[Tensor], text: str = "") -> str:
    sha = hashlib.sha256(text.encode())
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        sha.update(repr((tuple(flat.shape), flat.dtype)).encode())
        sha.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
