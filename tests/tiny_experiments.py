"""Experiments of a few seconds."""

from __future__ import annotations

import json
from pathlib import Path

from fadamgc.experiments.spec.sections import Spec
from fadamgc.experiments.spec.toml_io import parse_spec

TINY = """
name = "tiny"

[task]
data = "digits"
hidden = [16]
clients = 6
alpha = 1.0
min_size = 4

[run]
rounds = 3
sampled = 3
tracked = 2
local_steps = 4
batch_size = 8
seeds = [0, 1]
target = 0.2
executor = "loop"

[cost]
down_mbps = 0.1
up_mbps = 0.05
seconds_per_step = 0.5
latency = 1.0

[tune]
eta_l = [1e-9, 0.01]
eta_g = [1.0]
seeds = [7]
rounds = 2
validation = 0.25

[[method]]
algorithm = "local_adam"
eta_l = 0.00001

[[method]]
algorithm = "fadamgc"
label = "FAdamGC (all tracked)"
tracked = 3
eta_l = 0.02
"""
QUADRATICS = """
[task]
data = "quadratics"
clients = 4
dim = 3

[run]
rounds = 30
local_steps = 3
seeds = [0, 1]
target = 1e-3
dtype = "float64"
executor = "loop"

[tune]
eta_l = [1e-9, 0.05, 1e9]
eta_g = [0.1, 1.0]
seeds = [5]
rounds = 30

[[method]]
algorithm = "scaffold"
"""


def spec_of(text: str) -> Spec:
    return parse_spec(text, "spec.toml")


def records(folder: Path) -> list[dict]:
    """The history as saved, read without the package; wall time is the machine's, not the run's."""
    history = json.loads((folder / "run.json").read_text())["history"]
    for record in history:
        del record["wall_seconds"]
    return history
