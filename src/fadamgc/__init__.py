"""Federated optimisation with adaptive optimizers that do not drift.

import fadamgc
run = fadamgc.simulate(fadamgc.FAdamGC(eta_l=1e-3), task, rounds=100, sampled=10, local_steps=20)
"""

import os
from importlib import import_module
from typing import Any

# Vectors of millions of numbers come and go in every step: in huge pages that costs less. torch
# looks at this when it first needs memory; THP_MEM_ALLOC_ENABLE=0 in the environment turns it off.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

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
from fadamgc.methods import (
    FANT,
    FAdamGC,
    FANTLocal,
    FedAdam,
    FedAMS,
    FedAvg,
    FedAvgM,
    LocalAdam,
    Scaffold,
    ScaffoldM,
    algorithms,
    make_algorithm,
    register,
)
from fadamgc.optim import ClientOptimizer
from fadamgc.sim.checkpoint import load_run
from fadamgc.sim.engine import RoundEnd
from fadamgc.sim.many import simulate_many
from fadamgc.sim.simulate import simulate
from fadamgc.task import Task

__version__ = "0.1.0"

__all__ = [
    "FANT",
    "Algorithm",
    "CheckpointError",
    "CheckpointInUseError",
    "ClientOptimizer",
    "Cohort",
    "CostModel",
    "FANTLocal",
    "FAdamGC",
    "FadamgcError",
    "FedAMS",
    "FedAdam",
    "FedAvg",
    "FedAvgM",
    "InputError",
    "LocalAdam",
    "NonFiniteError",
    "OtherRunError",
    "Record",
    "RoundEnd",
    "Run",
    "Scaffold",
    "ScaffoldM",
    "Settings",
    "Task",
    "add",
    "algorithms",
    "load_run",
    "make_algorithm",
    "register",
    "simulate",
    "simulate_many",
]


def __getattr__(name: str) -> Any:
    if name in ("data", "models", "tasks", "trackers"):  # what they need takes time to import
        return import_module(f"fadamgc.{name}")
    raise AttributeError(f"module 'fadamgc' has no attribute {name!r}")
