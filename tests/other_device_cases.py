"""Runs on the device "pretend" and on the CPU, as a script: prints what it found as JSON."""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn

import fadamgc
from fadamgc import runtime
from fadamgc.federation import jobs
from fadamgc.federation.functions import TaskFunctions
from fadamgc.sim.executors import vectorized
from pretend_device import BACKEND, install
from problems import REPRESENTATIVES, class_task

HOW: dict[str, Any] = {"rounds": 3, "local_steps": 3, "batch_size": 8, "progress": False}
EXECUTORS = ("loop", "vectorized", "auto")


def model(*more: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 8), *more, nn.Linear(8, 3))


def task_of(module: nn.Module, loss: Any = None, **options: Any) -> fadamgc.Task:
    plain = class_task((16, 24, 8, 20, 12, 10))
    return fadamgc.Task(module, loss or plain.loss, plain.pairs, plain.test_pair, **options)


def jitter(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + torch.randn_like(x), y


def convolution() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 4, 3), nn.Flatten(), nn.Linear(12, 3))


def images() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 5, 1)), nn.Conv2d(1, 4, (3, 1)), nn.Flatten(), nn.Linear(12, 3))


def cases() -> dict[str, tuple[Any, fadamgc.Task, dict[str, Any]]]:
    """Algorithm, task and settings by name."""
    algo, plain, norm = fadamgc.FAdamGC(), class_task(), model(nn.BatchNorm1d(8), nn.ReLU())
    sgd = fadamgc.FedAvg()  # Adam would enlarge the rounding of gradients that are zero, as before BatchNorm
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0]))
    found: dict[str, Any] = {
        f"{name}, {executor}": (fadamgc.make_algorithm(name), plain, {"executor": executor})
        for name in REPRESENTATIVES
        for executor in EXECUTORS
    }
    for executor in ("loop", "vectorized"):
        how = {"executor": executor}
        found |= {
            f"BatchNorm, {executor}": (sgd, task_of(norm), how),
            f"convolution, {executor}": (algo, task_of(convolution()), how),
            f"a loss with weights, {executor}": (algo, task_of(model(nn.ReLU()), weighted), how),
            f"transform, {executor}": (algo, task_of(model(nn.ReLU()), transform=jitter), how),
            f"local parameters, {executor}": (sgd, task_of(norm), how | {"local_parameters": "BatchNorm1d"}),
        }
    return found | {
        "dropout": (algo, task_of(model(nn.Dropout(0.5))), {}),
        "convolution, auto": (algo, task_of(convolution()), {"executor": "auto"}),
        "gradients to start from": (fadamgc.Scaffold(init="gradient"), plain, {}),
        "epochs and weights": (algo, plain, {"weights": "size", "local_epochs": 2, "local_steps": None}),
        "16 bits": (algo, plain, {"dtype": torch.bfloat16, "executor": "loop"}),
        "autocast, loop": (algo, plain, {"autocast": "bf16", "executor": "loop"}),
        "autocast, vectorized": (sgd, plain, {"autocast": "bf16", "executor": "vectorized"}),
        "channels last": (algo, task_of(images()), {"channels_last": True, "executor": "loop"}),
        "groups": (fadamgc.MTGC(), plain, {"groups": 2}),
        "clients": (algo, plain, {"eval_clients": "epoch"}),
        "clipping": (algo, plain, {"clip_norm": 0.1, "weight_decay": 0.1, "dropout": 0.3}),
        "schedule": (fadamgc.FAdamGC(eta_l=fadamgc.schedules.cosine(0.1, rounds=3)), plain, {}),
        "lazy": (algo, fadamgc.Task(plain.model, plain.loss, lazily(plain), plain.test_pair), {}),
        "files": (algo, plain, {"states": "files"}),
        "codecs": (algo, plain, {"codec": {"x": "bfloat16", "y": "int8", "dy": "int4", "dx": "topk:0.1"}}),
        "means": (fadamgc.FedAdamW(), plain, {"codec": {"v": "means:7"}}),
        "median": (algo, plain, {"aggregation": "median"}),
        "MiMe": (fadamgc.MimeLite(), plain, {}),
    }


def lazily(plain: fadamgc.Task) -> fadamgc.LazyClients:
    return fadamgc.LazyClients(plain.n, lambda i: plain.pairs[i], plain.sizes.tolist())


def compared(algorithm: Any, task: fadamgc.Task, settings: dict[str, Any]) -> dict[str, Any]:
    """Run on both devices; in addition with a checkpoint after two rounds, resumed on the CPU."""
    there = fadamgc.simulate(algorithm, task, device="pretend", **HOW | settings)
    here = fadamgc.simulate(algorithm, task, **HOW | settings)
    with tempfile.TemporaryDirectory() as folder:
        options = HOW | settings | {"checkpoint": folder, "executor": there.settings["executor"]}
        fadamgc.simulate(algorithm, task, device="pretend", **options | {"rounds": 2})
        resumed = fadamgc.simulate(algorithm, task, resume=True, device="cpu", **options)
    return {
        "device": there.x.device.type,
        "executor": there.settings["executor"],
        "difference": float((there.x.cpu() - here.x).abs().max()),
        "resumed": float((resumed.x - here.x).abs().max()),
        "losses": max(
            abs(a.test_loss - b.test_loss) for a, b in zip(there.history, here.history, strict=True)
        ),
    }


def random_numbers(device: str) -> dict[str, Any]:
    """Whether dropout on a device is noticed, its run is that on the CPU, and global numbers are kept.

    torch's autograd serves only the first device that is made in Python, so the "gradient" needs none.
    """
    task = task_of(model(nn.BatchNorm1d(8), nn.Dropout(0.5)))
    before = global_numbers()
    with patch.object(TaskFunctions, "gradient", without_autograd), torch.no_grad():
        runs = [fadamgc.simulate(fadamgc.FedAvg(), task, device=name, **HOW) for name in (device, "cpu")]
    functions = TaskFunctions(task, device=device)
    return {
        "device": str(functions.x0.device),
        "noticed": functions.random,
        "kept": all(map(torch.equal, before, global_numbers())),
        "difference": float((runs[0].x.cpu() - runs[1].x).abs().max()),
    }


def without_autograd(f: TaskFunctions, x: Tensor, buffers: Any, inputs: Any, targets: Any) -> Any:
    loss = f.loss(x, buffers, inputs, targets)
    return x * loss, loss


def global_numbers() -> list[Tensor]:
    return [torch.get_rng_state(), *(generator.get_state() for generator in BACKEND.generators)]


def main() -> None:
    device = install()
    # A device made in Python cannot have generators; its numbers come from one of the CPU.
    for module in (jobs, runtime):
        module.generator_on = lambda _, seed: torch.Generator().manual_seed(seed)
    # Nor can torch record operations on tensors made in Python, if constants are among them.
    vectorized.record = lambda function, _: function
    found: dict[str, Any] = {}
    for name, case in cases().items():
        try:
            found[name] = compared(*case)
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {str(error)[:400]}"}
    found["random numbers"] = {name: random_numbers(name) for name in ("cpu", "pretend:0", "pretend:1")}
    x = torch.ones(3, device=device)
    try:
        _ = x + torch.ones(3)
    except RuntimeError as error:
        found["two devices"] = {"refused": str(error)}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
