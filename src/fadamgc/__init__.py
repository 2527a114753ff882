"""Federated optimisation with adaptive optimizers that do not drift.

import fadamgc
run = fadamgc.simulate(fadamgc.FAdamGC(eta_l=1e-3), task, rounds=100, sampled=10, local_steps=20)
"""

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

# Every step allocates and frees vectors of millions of numbers, which is faster in huge pages. torch reads
# this variable when it first allocates memory; THP_MEM_ALLOC_ENABLE=0 in the environment turns it off.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

from fadamgc import methods, schedules
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
from fadamgc.federation.cost import CostModel
from fadamgc.federation.run import Record, Run
from fadamgc.federation.settings import Settings
from fadamgc.hook import Correction
from fadamgc.methods import *  # noqa: F403  # all algorithms; algorithms(), make_algorithm, register
from fadamgc.optim import ClientOptimizer
from fadamgc.task import Task

if TYPE_CHECKING:
    from fadamgc.experiments.api import experiment, report
    from fadamgc.sim.checkpoint import load_run
    from fadamgc.sim.engine import RoundEnd
    from fadamgc.sim.many import simulate_many
    from fadamgc.sim.simulate import simulate

__version__ = "0.1.0"

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
    "NonFiniteError",
    "OtherRunError",
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
if not TYPE_CHECKING:
    __all__ += methods.__all__

# Imported when they are first used: a Flower server or a report needs neither the simulator nor data sets.
_LAZY = {
    "RoundEnd": "fadamgc.sim.engine",
    "experiment": "fadamgc.experiments.api",
    "load_run": "fadamgc.sim.checkpoint",
    "report": "fadamgc.experiments.api",
    "simulate": "fadamgc.sim.simulate",
    "simulate_many": "fadamgc.sim.many",
}
_LAZY_MODULES = ("data", "metrics", "models", "tasks", "trackers")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        value = getattr(import_module(_LAZY[name]), name)
    elif name in _LAZY_MODULES:
        value = import_module(f"fadamgc.{name}")
    else:
        raise AttributeError(f"module 'fadamgc' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY, *_LAZY_MODULES})
