"""Record the trajectories of many kinds of runs, and compare them with those of another version.

    python tests/trajectories.py record before.pt        # in a checkout of the version before
    python tests/trajectories.py compare before.pt       # here

A change that is meant to change no number leaves every case equal to the bit. Bits depend on the machine and
on torch, so recordings are not kept in the repository. ``--only PART`` selects cases by name.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import fadamgc
from problems import EVEN, class_task, mlp, settings_for

OPTIONS = ("carry", "restart", "zero", "gradient", "keep", "reset", "I", "II", "max", "amsgrad", True)
Case = tuple[str, Callable[[], dict[str, Any]]]


def variants() -> Iterator[fadamgc.Algorithm]:
    for name in fadamgc.algorithms():
        default = fadamgc.make_algorithm(name)
        yield default
        for field in dataclasses.fields(default):
            if isinstance(field.default, (str, bool)):
                for value in OPTIONS:
                    try:
                        other = dataclasses.replace(default, **{field.name: value})
                    except fadamgc.InputError:
                        continue
                    if other != default:
                        yield other


def result(run: Any) -> dict[str, Any]:
    """All numbers of a run: model, server, clients, buffers, and history without wall times."""
    history = []
    for record in run.history:
        plain = record.to_json()
        plain.pop("wall_seconds")
        history.append(json.dumps(plain, sort_keys=True))
    return {
        "x": run.x,
        "server": list(run.server),
        "clients": [list(state) for state in run.clients],
        "buffers": dict(run.buffers),
        "history": history,
        "executor": run.settings["executor"],
        "compiled": run.settings["compiled"],
    }


def simulated(algo: Any, task: Any, **options: Any) -> Callable[[], dict[str, Any]]:
    return lambda: result(fadamgc.simulate(algo, task, progress=False, **options))


def wide(channels: int = 0) -> fadamgc.Task:
    """A task whose model has more than 100,000 parameters; with convolutions if there are channels."""
    random = torch.Generator().manual_seed(0)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if channels:
            model: nn.Module = nn.Sequential(
                nn.Conv2d(3, channels, 3, padding=1),
                nn.BatchNorm2d(channels),
                nn.ReLU(),
                nn.Conv2d(channels, channels, 3, padding=1),
                nn.ReLU(),
                nn.AdaptiveAvgPool2d(4),
                nn.Flatten(),
                nn.Linear(16 * channels, 5),
            )
            inputs = [torch.randn(24, 3, 8, 8, generator=random) for _ in range(4)]
        else:
            model = nn.Sequential(
                nn.Linear(20, 800), nn.ReLU(), nn.Linear(800, 200), nn.ReLU(), nn.Linear(200, 5)
            )
            inputs = [torch.randn(24, 20, generator=random) for _ in range(4)]
    clients = [(x, torch.randint(5, (24,), generator=random)) for x in inputs]
    return fadamgc.Task(model, F.cross_entropy, clients, clients[0])


def cases() -> Iterator[Case]:
    task, even = class_task(), class_task(EVEN)
    for algo in variants():
        who = settings_for(algo, task.n)
        common = {"rounds": 4, "local_steps": 5, "batch_size": 8, "seed": 3} | who
        for dtype in (torch.float32, torch.float64):
            for executor in ("loop", "vectorized", "threads"):
                name = f"{algo!r} {executor} {dtype}"
                yield name, simulated(algo, task, dtype=dtype, executor=executor, **common)
        long = {"rounds": 100, "local_steps": 10, "batch_size": 8, "seed": 3} | who
        yield f"{algo!r} compiled", simulated(algo, even, executor="vectorized", **long)
        yield f"{algo!r} many", lambda algo=algo, common=common: many(algo, task, common)
        yield f"{algo!r} resumed", lambda algo=algo, common=common: resumed(algo, task, common)
        yield f"{algo!r} federation", lambda algo=algo: federation(algo)
    for algo in (fadamgc.FAdamGC(), fadamgc.ScaffoldM(), fadamgc.FANTLocal(), fadamgc.Scaffold(option="I")):
        yield from shapes(algo)


def shapes(algo: Any) -> Iterator[Case]:
    """Other models and settings, for algorithms of every kind of state."""
    task = class_task()
    who = settings_for(algo, task.n)
    common = {"rounds": 3, "local_steps": 4, "batch_size": 8, "seed": 1, "eval_every": 2} | who
    tasks = {
        "batchnorm": class_task(EVEN, model=mlp(0, nn.BatchNorm1d(8))),
        "dropout": class_task(model=mlp(0, nn.Dropout(0.5))),
    }
    for kind, other in tasks.items():
        for executor in ("loop", "threads", *(("vectorized",) if kind == "batchnorm" else ())):
            yield f"{algo!r} {kind} {executor}", simulated(algo, other, executor=executor, **common)
    for executor in ("loop", "threads", "vectorized"):
        whole = common | {"batch_size": None}
        yield f"{algo!r} whole data {executor}", simulated(algo, task, executor=executor, **whole)
        half = common | {"dtype": torch.bfloat16}
        yield f"{algo!r} bfloat16 {executor}", simulated(algo, task, executor=executor, **half)
        if not algo.full_participation:
            epochs = common | {"local_epochs": 2, "local_steps": None, "weights": "size"}
            yield f"{algo!r} epochs {executor}", simulated(algo, task, executor=executor, **epochs)
    large = {"rounds": 2, "local_steps": 3, "batch_size": 8, "sampled": 4, "seed": 2}
    for executor in ("loop", "threads"):
        yield f"{algo!r} wide {executor}", simulated(algo, wide(), executor=executor, **large)
        yield f"{algo!r} convolutions {executor}", simulated(algo, wide(48), executor=executor, **large)
    long = large | {"rounds": 20, "local_steps": 5}
    yield f"{algo!r} wide compiled", simulated(algo, wide(), executor="threads", **long)


def many(algo: Any, task: Any, common: dict[str, Any]) -> dict[str, Any]:
    other = dataclasses.replace(algo, eta_l=algo.eta_l / 3)
    runs = [{"algorithm": a, "seed": seed} for a in (algo, other) for seed in (0, 1)]
    done = fadamgc.simulate_many(
        runs,
        task=task,
        executor="vectorized",
        progress=False,
        **{k: v for k, v in common.items() if k != "seed"},
    )
    return {str(i): result(run) for i, run in enumerate(done)}


def resumed(algo: Any, task: Any, common: dict[str, Any]) -> dict[str, Any]:
    found = {}
    for states in ("memory", "files"):
        with tempfile.TemporaryDirectory() as folder:
            how = {"executor": "loop", "states": states, "checkpoint": folder, "progress": False}
            fadamgc.simulate(algo, task, **common | {"rounds": 2}, **how)
            found[states] = result(fadamgc.simulate(algo, task, resume=True, **common, **how))
    return found


def federation(algo: Any) -> dict[str, Any]:
    from world import SIZES, World

    options: dict[str, Any] = {}
    if algo.full_participation:
        options = {"sampled": None, "tracked": None, "min_clients": len(SIZES)}
    with tempfile.TemporaryDirectory() as folder:
        world = World(Path(folder), algo, dtype=torch.float32, **options)
        world.setup()
        while not world.server.over():
            world.round()
        return {"server": list(world.server.server), "clients": [list(state) for state in world.states()]}


def differences(a: Any, b: Any, path: str = "") -> Iterator[str]:
    """Where two results differ, and by how much."""
    if isinstance(a, torch.Tensor):
        same = a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | (a.isnan() & b.isnan())).all())
        if not same:
            yield (
                f"{path}: by {float((a.double() - b.double()).abs().max()):.3g}"
                if a.shape == b.shape
                else path
            )
    elif isinstance(a, dict):
        for key in {**a, **b}:
            if key not in a or key not in b:
                yield f"{path}.{key}: only in one"
            else:
                yield from differences(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, (list, tuple)):
        if len(a) != len(b):
            yield f"{path}: {len(a)} and {len(b)} entries"
        for i, (one, other) in enumerate(zip(a, b, strict=False)):
            yield from differences(one, other, f"{path}[{i}]")
    elif isinstance(a, str) and isinstance(b, str) and a.startswith("{"):  # a record as JSON
        one, other = json.loads(a), json.loads(b)
        for key in one.keys() & other.keys():  # fields that only one version has do not count
            yield from differences(one[key], other[key], f"{path}.{key}")
    elif a != b:
        yield f"{path}: {str(a)[:200]} and {str(b)[:200]}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", choices=["record", "compare"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="cases whose names contain this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    before = torch.load(arguments.file, weights_only=False) if arguments.command == "compare" else {}
    found, different = {}, 0
    for name, run in cases():
        if arguments.only not in name:
            continue
        try:
            found[name] = run()
        except Exception as error:
            found[name] = {"error": f"{type(error).__name__}: {error}"}
        if arguments.command == "compare":
            changes = [found[name]["error"]] if "error" in found[name] else []
            changes += differences(before.get(name, {}), found[name])
            different += bool(changes)
            for change in changes[:3]:
                print(f"DIFFERENT {name}: {change}", flush=True)
    if arguments.command == "record":
        torch.save(found, arguments.file)
        failed = [name for name, value in found.items() if "error" in value]
        print(f"{len(found)} cases recorded, {len(failed)} of them errors", *failed[:5], sep="\n")
        return 0
    print(f"{len(found)} cases compared, {different} differ")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
