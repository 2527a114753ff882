"""Export the trained model from the folder of a run, of a checkpoint, or of a federation's server."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fadamgc.bundle import has_bundle, read_bundle
from fadamgc.errors import InputError, not_accepted
from fadamgc.experiments.planned_run import IDENTITY, MODEL
from fadamgc.federation.run import Run
from fadamgc.federation.trained import export_module, module_at
from fadamgc.sim.checkpoint import load_run
from fadamgc.task import Task
from fadamgc.tasks.build import build_task
from fadamgc.tasks.sections import FunctionTask, task_spec

FEDERATION = "federation"  # the bundle of a Flower server


def export(folder: Path, to: Path, which: Literal["last", "best"] = "last", task: str | None = None) -> Path:
    """Write the model of a folder as a state_dict, ``.safetensors`` or ``.pt``.

    ``task`` names a function that returns the task, ``my_module:make_task``; it is needed if the folder does
    not say how its model is made.
    """
    if to.suffix not in (".safetensors", ".pt", ".pth"):
        raise not_accepted("to", str(to), "a file name that ends with .safetensors or .pt")
    if (folder / MODEL).is_file():
        return _converted(load_file(folder / MODEL), to)
    if has_bundle(folder, FEDERATION):
        _, tensors = read_bundle(folder, FEDERATION)
        if "server.x" not in tensors:
            raise InputError(f"{folder} has no model yet: the federation waits for its clients")
        buffers = {k.removeprefix("buffer."): v for k, v in tensors.items() if k.startswith("buffer.")}
        return export_module(module_at(_task(folder, task, None), tensors["server.x"], buffers), to)
    if not folder.is_dir():
        raise InputError(f"there is no folder {str(folder)!r}")
    run = load_run(folder)
    if run.server is None:
        raise InputError(
            f"{folder} has the records of a run, without its model; run it again with --save-models last"
        )
    run.task = _task(folder, task, run)
    return run.export(to, which)


def _task(folder: Path, reference: str | None, run: Run | None) -> Task:
    seed = 0 if run is None else int(run.settings["seed"])
    if reference is not None:
        return build_task(FunctionTask(data=reference), seed)
    identity: Any = None if run is None else run.settings.get(IDENTITY)
    if identity is None:
        raise InputError(
            f"{folder} does not say how its model is made; name a function that returns its task: "
            "--task my_module:make_task"
        )
    return build_task(task_spec(**identity["task"]), seed)


def _converted(tensors: dict[str, Tensor], to: Path) -> Path:
    to.parent.mkdir(parents=True, exist_ok=True)
    if to.suffix == ".safetensors":
        save_file(tensors, to)
    else:
        torch.save(tensors, to)
    return to
