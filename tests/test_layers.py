"""Imports point downwards between folders: every edge that is allowed is stated here."""

from __future__ import annotations

import ast
import importlib.util
import os
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import fadamgc

ROOT = Path(fadamgc.__file__).parent

# What every room may import: values, messages, files, threads and trees; they import only each other.
FOUNDATION = {
    *("errors", "escape", "files", "bundle", "cache", "runtime", "tree", "fields", "toml", "section"),
    *("cluster", "codecs", "hyperparameters", "loading", "random_numbers", "schedules", "stages"),
}

# Room by room, from the ground to the roof: the other rooms that its modules may import.
ALLOWED = {
    "algorithm": set(),  # with the mathematics that methods share, rules.py
    "algebra": {"algorithm"},
    "methods": {"algebra", "algorithm"},
    "optim": {"algorithm"},
    "data": set(),
    "task": {"data"},  # with flat.py, samples.py and task_checks.py; Task.split distributes arrays
    "models": set(),
    "tasks": {"data", "models", "task"},
    "federation": {"algorithm", "methods", "task"},
    "sim.executors": {"algorithm", "federation", "task"},
    "sim": {"algorithm", "federation", "sim.executors", "task"},
    "fadamgc": {  # the public names
        *(
            "algebra",
            "algorithm",
            "experiments",
            "federation",
            "methods",
            "optim",
            "sim",
            "sim.executors",
            "task",
        ),
    },
    "trackers": {"sim"},
    "flower": {"algorithm", "federation", "methods", "sim.executors", "task", "tasks"},
    "experiments.spec": {"algorithm", "federation", "methods", "tasks"},
    "experiments.folder": {"algorithm", "experiments.spec", "federation", "tasks"},
    "experiments.report": {"experiments.folder", "experiments.spec", "federation", "tasks"},
    "experiments.run": {
        *("experiments.folder", "experiments.report", "experiments.spec"),
        *(
            "algorithm",
            "federation",
            "methods",
            "models",
            "sim",
            "sim.executors",
            "task",
            "tasks",
            "trackers",
        ),
    },
    "experiments": {  # api.py, export.py, tune.py and predict.py
        *("experiments.folder", "experiments.report", "experiments.run", "experiments.spec"),
        *("algorithm", "data", "federation", "methods", "models", "sim", "task", "tasks"),
    },
    "paper": {
        *("experiments.folder", "experiments.report", "experiments.spec"),
        *("algorithm", "federation", "methods", "tasks"),
    },
    "judge": {
        *("algorithm", "experiments.spec", "federation", "methods", "optim", "sim", "task", "tasks"),
    },
    "cli": {
        *(
            "algebra",
            "algorithm",
            "data",
            "experiments",
            "experiments.folder",
            "experiments.report",
            "experiments.run",
        ),
        *("experiments.spec", "federation", "flower", "judge", "methods", "paper", "tasks", "trackers"),
    },
    "__main__": {"cli"},
}
ROOM_OF = {
    **dict.fromkeys(("rules", "grouped", "wrapped"), "algorithm"),
    **dict.fromkeys(("flat", "metrics", "samples", "lazy_clients", "task_checks"), "task"),
    **dict.fromkeys(("hook", "pieces"), "optim"),
    **dict.fromkeys(("experiments.planned_run", "experiments.points"), "experiments.folder"),
}


def room_of(module: str) -> str:
    """The room of ``fadamgc.some.module``: a file or folder of the package, or a folder in a folder."""
    _, *names = module.split(".")
    if not names:
        return "fadamgc"
    if len(names) > 1:
        inner = ".".join(names[:2])
        if inner in ALLOWED or inner in ROOM_OF:
            return ROOM_OF.get(inner, inner)
    return ROOM_OF.get(names[0], names[0])


def imported(node: ast.AST) -> list[str]:
    """The modules of this package that a statement imports."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names if alias.name.split(".")[0] == "fadamgc"]
    if not isinstance(node, ast.ImportFrom) or (node.module or "").split(".")[0] != "fadamgc":
        return []
    found = []
    for alias in node.names:
        path = ROOT.joinpath(*node.module.split(".")[1:], alias.name)
        is_module = path.is_dir() or path.with_suffix(".py").is_file()
        found.append(f"{node.module}.{alias.name}" if is_module else node.module)
    return found


def edges() -> dict[tuple[str, str], str]:
    """All edges between rooms, imports inside functions included, each with a module that has it."""
    found = {}
    for file in sorted(ROOT.rglob("*.py")):
        module = ".".join(("fadamgc", *file.relative_to(ROOT).with_suffix("").parts)).removesuffix(
            ".__init__"
        )
        for node in ast.walk(ast.parse(file.read_text())):
            for name in imported(node):
                found[room_of(module), room_of(name)] = module
    return {edge: module for edge, module in found.items() if edge[0] != edge[1]}


def test_only_allowed_edges_between_rooms():
    wrong = []
    for (room, other), module in edges().items():
        allowed = FOUNDATION if room in FOUNDATION else FOUNDATION | ALLOWED[room]
        if other not in allowed:
            wrong.append(f"{module} ({room}) imports {other}")
    assert not wrong, "\n".join(wrong)


def test_no_edge_is_allowed_that_is_not_used():
    used = {edge for edge in edges() if edge[1] not in FOUNDATION}
    unused = {(room, other) for room, others in ALLOWED.items() for other in others} - used
    assert not unused


def test_rooms_form_no_circle():
    found = edges()
    graph: dict[str, set[str]] = {}
    for room, other in found:
        graph.setdefault(room, set()).add(other)
    list(TopologicalSorter(graph).static_order())


NOT_LOADED = {
    "fadamgc": ("fadamgc.sim", "fadamgc.data", "fadamgc.models", "fadamgc.experiments", "matplotlib"),
    "fadamgc.sim.simulate": ("rich", "pandas", "sklearn", "torch._dynamo", "torch._inductor"),
    "fadamgc.flower.serverapp": ("fadamgc.sim", "fadamgc.experiments", "matplotlib"),
    "fadamgc.experiments.spec.toml_io": ("fadamgc.sim", "fadamgc.experiments.run", "matplotlib"),
    "fadamgc.experiments.report.numbers": (
        *("fadamgc.sim", "fadamgc.experiments.run", "fadamgc.paper", "fadamgc.models"),
        *("concurrent.futures.process", "matplotlib"),
    ),
    "fadamgc.paper.study": ("matplotlib", "fadamgc.sim", "fadamgc.experiments.run"),
    "fadamgc.cli.main": ("fadamgc.sim", "fadamgc.experiments.run", "matplotlib", "flwr"),
}


PUBLIC = ("data", "models", "tasks", "trackers", "simulate", "load_run")

# Garbage collection pauses while names are imported, and is then as it was before.
COLLECTION = """
import gc, fadamgc
counted = []
gc.callbacks.append(lambda phase, info: counted.append(phase))
fadamgc.simulate
assert counted.count("start") <= 1 and gc.isenabled(), counted  # one afterwards
gc.disable()
fadamgc.schedules
assert not gc.isenabled()
"""

# Each statement runs in a process of its own, which starts with torch, because that takes long to import.
FORKS = """
import os, sys, traceback
import torch

for statement in sys.argv[1:]:
    child = os.fork()
    if not child:
        try:
            exec(statement)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit(f"failed: {statement}")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_module_loads_what_it_needs_and_no_more():
    statements = [f"import fadamgc; fadamgc.{name}" for name in PUBLIC]
    statements.append(COLLECTION)
    for module, others in NOT_LOADED.items():
        if "flower" in module and importlib.util.find_spec("flwr") is None:
            continue
        statements.append(
            f"import {module}\n"
            f"names = {others!r}\n"
            "loaded = [m for m in sys.modules if any(m == n or m.startswith(n + '.') for n in names)]\n"
            "assert not loaded, loaded"
        )
    subprocess.run([sys.executable, "-c", FORKS, *statements], check=True)
    broken = subprocess.run(
        [sys.executable, "-c", FORKS, "import fadamgc; fadamgc.nothing"], capture_output=True
    )
    assert broken.returncode == 1
