"""Small experiments to report on."""

from __future__ import annotations

import dataclasses
import json

from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec

RUN = """[run]
rounds = 6
local_steps = 2
seeds = [0, 1]
target = 1e-3
executor = "loop"
"""
SPEC = """
name = "small"
[task]
data = "quadratics"
clients = 3
dim = 3
RUN_SECTION
[[method]]
algorithm = "fedavg"
eta_l = ETA
[[method]]
algorithm = "scaffold"
eta_l = 0.09
""".replace("RUN_SECTION\n", RUN)


def spec_of(eta_l=0.05, **run):
    spec = parse_spec(SPEC.replace("ETA", str(eta_l)), "test")
    return spec.replace("run", **run) if run else spec


def experiment(folder, eta_l=0.05, **run):
    spec = spec_of(eta_l, **run)
    run_spec(spec, folder, workers=1, quiet=True)
    return spec


def forge(folder, metrics, label="FedAvg", **others):
    """Give the runs of a method other metrics: for each seed one in each round, or the same in all."""
    jobs = ExperimentFolder(folder).plan(parse_spec((folder / "spec.toml").read_text(), ""))
    for job, values in zip([j for j in jobs if j.method.label == label], metrics, strict=True):
        run = job.saved()
        values = values if isinstance(values, list) else [values] * len(run.history)
        pairs = zip(run.history, values, strict=True)
        history = [dataclasses.replace(record, test_metric=value, **others) for record, value in pairs]
        dataclasses.replace(run, history=history).save(job.folder, states=False)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != ".lock"}


# A stranger's files.


def write_facts(folder, *cells, **facts):
    usual = {"name": "s", "title": "t", "scale": "laptop", "axis": None, "measures": ["rounds"]}
    (folder / "study.json").write_text(json.dumps(usual | facts | {"cells": cells}))
