"""Federated optimisation with adaptive optimizers that do not drift.

import fadamgc
run = fadamgc.simulate(fadamgc.FAdamGC(eta_l=1e-3), task, rounds=100, sampled=10, local_steps=20)

Names are imported when they are first used, so that ``import fadamgc`` and the command line need no torch.
"""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Any

# Every step allocates and frees vectors of millions of numbers, which is faster in huge pages. torch reads
# this variable when it first allocates memory; THP_MEM_ALLOC_ENABLE=0 in the environment turns it off.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

if TYPE_CHECKING:
    from fadamgc import schedules
    from fadamgc.algebra import correction, local, server
    from fadamgc.algebra.compose import compose
    from fadamgc.algorithm import Algorithm, Cohort, add
    from fadamgc.errors import (
        CheckpointError,
        CheckpointInUseError,
        FadamgcError,
        InputError,
        NonFiniteError,
        OtherRunError,
    )
    from fadamgc.experiments.api import experiment, report
    from fadamgc.federation.cost import CostModel
    from fadamgc.federation.privacy import Privacy
    from fadamgc.federation.record import Record
    from fadamgc.federation.run import Run
    from fadamgc.federation.settings import Settings
    from fadamgc.hook import Correction
    from fadamgc.lazy_clients import LazyClients
    from fadamgc.methods import *  # noqa: F403  # all algorithms; algorithms(), make_algorithm, register
    from fadamgc.optim import ClientOptimizer
    from fadamgc.sim.checkpoint import load_run
    from fadamgc.sim.engine import RoundEnd
    from fadamgc.sim.executors.ray_actors import Ray
    from fadamgc.sim.many import simulate_many
    from fadamgc.sim.simulate import simulate
    from fadamgc.task import Task

    __all__ = [
        "Algorithm",
        "CheckpointError",
        "CheckpointInUseError",
        "ClientOptimizer",
        "Cohort",
        "Correction",
        "CostModel",
        "FadamgcError",
        "InputError",
        "LazyClients",
        "NonFiniteError",
        "OtherRunError",
        "Privacy",
        "Ray",
        "Record",
        "RoundEnd",
        "Run",
        "Settings",
        "Task",
        "add",
        "compose",
        "correction",
        "experiment",
        "load_run",
        "local",
        "report",
        "schedules",
        "server",
        "simulate",
        "simulate_many",
    ]
    __version__: str  # of pyproject.toml, by the metadata of the installed package

# Public names, by the module that defines them; the algorithms' names come from fadamgc.methods.
_NAMES = {
    "algebra.compose": ("compose",),
    "algorithm": ("Algorithm", "Cohort", "add"),
    "errors": (
        *("CheckpointError", "CheckpointInUseError", "FadamgcError", "InputError", "NonFiniteError"),
        "OtherRunError",
    ),
    "experiments.api": ("experiment", "report"),
    "federation.cost": ("CostModel",),
    "federation.privacy": ("Privacy",),
    "federation.record": ("Record",),
    "federation.run": ("Run",),
    "federation.settings": ("Settings",),
    "hook": ("Correction",),
    "lazy_clients": ("LazyClients",),
    "optim": ("ClientOptimizer",),
    "sim.checkpoint": ("load_run",),
    "sim.engine": ("RoundEnd",),
    "sim.executors.ray_actors": ("Ray",),
    "sim.many": ("simulate_many",),
    "sim.simulate": ("simulate",),
    "task": ("Task",),
}
_HOME = {name: module for module, names in _NAMES.items() for name in names}
_ALIASES = {name: f"algebra.{name}" for name in ("correction", "local", "server")}
_MODULES = {module.name for module in iter_modules([os.path.dirname(__file__)])}


@contextmanager
def _without_collection() -> Iterator[None]:
    """Pause garbage collection: while modules are loaded, it takes 0.1 s for all objects of torch."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def __getattr__(name: str) -> Any:
    if name.startswith("__") and name not in ("__all__", "__version__"):
        raise AttributeError(f"module 'fadamgc' has no attribute {name!r}")
    with _without_collection():
        return _imported(name)


def _imported(name: str) -> Any:
    if name == "__all__":
        return sorted({*_HOME, *_ALIASES, "schedules", *import_module("fadamgc.methods").__all__})
    if name == "__version__":
        value = import_module("importlib.metadata").version("fadamgc")
    elif name in _HOME:
        value = getattr(import_module(f"fadamgc.{_HOME[name]}"), name)
    elif name in _ALIASES or name in _MODULES:
        value = import_module(f"fadamgc.{_ALIASES.get(name, name)}")
    else:
        methods = import_module("fadamgc.methods")
        if name not in methods.__all__:
            raise AttributeError(f"module 'fadamgc' has no attribute {name!r}")
        value = getattr(methods, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__getattr__("__all__"), *_MODULES})
