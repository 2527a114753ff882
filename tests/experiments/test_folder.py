"""The folder of an experiment: layout, lock, and runs that are read without a spec."""

from __future__ import annotations

import dataclasses
import json

import pytest
from typer.testing import CliRunner

import fadamgc
from fadamgc.cli.main import app
from fadamgc.errors import InputError
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.report.write import write_report
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from problems import class_task

SHORT = {"rounds": 3, "sampled": 2, "tracked": 1, "local_steps": 2, "batch_size": 4, "progress": False}
SPEC = """
[task]
data = "quadratics"
clients = 3
[run]
rounds = 2
local_steps = 1
seeds = [0, 1]
[[method]]
algorithm = "fadamgc"
eta_l = 0.02
"""


def save(folder, name, algorithm, seed=0, report=None, **settings):
    """Save a run as a program other than the experiment runner does."""
    run = fadamgc.simulate(algorithm, class_task(), seed=seed, **SHORT | settings)
    if report is not None:
        run = dataclasses.replace(run, settings=run.settings | {"report": report})
    run.save(folder / "runs" / name, states=False)
    return run


@pytest.mark.slow
def test_saved_runs_are_an_experiment_without_a_spec(tmp_path):
    folder = tmp_path / "mine"
    runs = {seed: save(folder, f"x-{seed}", fadamgc.FAdamGC(eta_l=0.01), seed) for seed in (3, 5)}
    save(folder, "y", fadamgc.FedAvg(), 3)
    spec = ExperimentFolder(folder).read_plan()[0]
    assert (spec.name, spec.task.data, spec.task.clients) == ("mine", "custom", class_task().n)
    assert spec.task.metric == "accuracy"
    assert (spec.run.rounds, spec.run.sampled, spec.run.tracked, spec.run.seeds) == (3, 2, 1, (3, 5))
    assert [method.label for method in spec.methods] == ["FAdamGC", "FedAvg"]
    assert spec.methods[0].hyperparameters["eta_l"] == 0.01
    assert parse_spec(spec.to_toml(), "derived") == spec
    saved = ExperimentFolder(folder).load()
    assert [run.history for run in saved.runs["FAdamGC"]] == [run.history for run in runs.values()]
    results = write_report(folder)
    assert results.missing == 1  # FedAvg with seed 5
    assert (folder / "report.html").exists()
    shown = CliRunner().invoke(app, ["report", str(folder), "--out", str(tmp_path / "out")])
    assert shown.exit_code == 0, shown.output
    assert "FAdamGC" in shown.output
    assert not (folder / "spec.toml").exists()


def test_a_program_names_its_experiment_and_its_measure(tmp_path):
    report = {"experiment": "wards", "title": "Two\nwards", "measure": "recall", "label": "Ours"}
    save(tmp_path, "a", fadamgc.FAdamGC(), report=report)
    spec = ExperimentFolder(tmp_path).read_plan()[0]
    assert (spec.name, spec.title) == ("wards", "Two\\nwards")
    assert (spec.task.metric, spec.methods[0].label) == ("recall", "Ours")
    assert len(ExperimentFolder(tmp_path).load().runs["Ours"]) == 1


@pytest.mark.slow
def test_methods_of_one_algorithm_are_told_apart_by_what_differs(tmp_path):
    save(tmp_path, "a", fadamgc.FAdamGC(eta_l=0.1))
    save(tmp_path, "b", fadamgc.FAdamGC(eta_l=0.2))
    save(tmp_path, "c", fadamgc.FedAvg())
    spec = ExperimentFolder(tmp_path).read_plan()[0]
    assert [m.label for m in spec.methods] == ["FAdamGC (eta_l=0.1)", "FAdamGC (eta_l=0.2)", "FedAvg"]
    tracked = tmp_path / "tracked"
    save(tracked, "a", fadamgc.FAdamGC())
    save(tracked, "b", fadamgc.FAdamGC(), tracked=None)
    spec = ExperimentFolder(tracked).read_plan()[0]
    assert [m.label for m in spec.methods] == ["FAdamGC (tracked=1)", "FAdamGC (tracked=None)"]
    assert all(ExperimentFolder(tracked).load().runs.values())


def test_runs_of_other_settings_are_not_mixed(tmp_path):
    save(tmp_path, "a", fadamgc.FAdamGC())
    save(tmp_path, "b", fadamgc.FAdamGC(), seed=1, rounds=4)
    with pytest.raises(InputError, match="different settings: rounds=3 in a, 4 in b; give a folder for each"):
        ExperimentFolder(tmp_path).load()


@pytest.mark.slow
def test_an_experiment_that_lost_its_spec_is_read_from_its_runs(tmp_path):
    spec = parse_spec(SPEC, "test")
    run_spec(spec, tmp_path, workers=1, quiet=True)
    before = ExperimentFolder(tmp_path).load()
    (tmp_path / "spec.toml").unlink()
    after = ExperimentFolder(tmp_path).load()
    assert after.spec.task == spec.task
    assert after.spec.run == spec.run
    assert [r.history for r in after.runs["FAdamGC"]] == [r.history for r in before.runs["FAdamGC"]]


def test_settings_of_a_wrong_kind_are_a_message(tmp_path):
    save(tmp_path, "a", fadamgc.FAdamGC(), report=3)
    with pytest.raises(fadamgc.FadamgcError, match="is not a run of this version"):
        ExperimentFolder(tmp_path).load()


def test_a_run_is_written_in_the_format_that_the_version_before_reads(tmp_path):
    run_spec(parse_spec(SPEC, "test"), tmp_path, workers=1, quiet=True)
    job = json.loads((tmp_path / "runs" / "fadamgc-seed1" / "run.json").read_text())["settings"]["job"]
    assert job.keys() == {"task", "run", "method", "seed", "validation"}
    assert job["method"] == {"algorithm": "fadamgc", "hyperparameters": {"eta_l": 0.02}}
