"""The trained model of a run: as a module, and as a file."""

from __future__ import annotations

import copy
import io
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from fadamgc.errors import InputError, not_accepted
from fadamgc.federation.functions import Buffers
from fadamgc.files import write_atomic
from fadamgc.flat import Flat
from fadamgc.task import Task


@dataclass(frozen=True, eq=False)
class Best:
    """The model of the round with the best metric, of a run with ``keep="best"``.

    x and buffers are None if the run was saved without its states.
    """

    round: int
    metric: float
    x: Tensor | None = field(default=None, repr=False)
    buffers: Buffers | None = field(default=None, repr=False)


def module_at(task: Task, x: Tensor, buffers: Buffers) -> nn.Module:
    """Return a copy of a task's module with these parameters and buffers."""
    module = copy.deepcopy(task.model)
    Flat.of(module).load(module, x, buffers)
    return module


def predicted_labels(module: nn.Module, texts: Sequence[str | tuple[str, str]]) -> list[str | int]:
    """Return the labels of texts; only a module that classifies texts has ``predict``."""
    predict = getattr(module, "predict", None)
    if predict is None:
        raise InputError(
            f"predict is for tasks of texts, such as fadamgc.tasks.text(...); this run's model is a "
            f"{type(module).__name__}: call run.model(inputs)"
        )
    labels: list[str | int] = predict(texts)
    return labels


def export_module(module: nn.Module, path: Path) -> Path:
    """Write the state_dict of a module into a file; its suffix sets the format."""
    if path.suffix not in (".safetensors", ".pt", ".pth"):
        raise not_accepted("path", str(path), "a file name that ends with .safetensors or .pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    data = io.BytesIO()
    if path.suffix == ".safetensors":
        with tempfile.TemporaryDirectory() as folder:  # save_model can write tensors that share memory
            save_model(module, str(Path(folder) / "model"))
            data.write((Path(folder) / "model").read_bytes())
    else:
        torch.save(module.state_dict(), data)
    write_atomic(path, data.getvalue())
    return path
