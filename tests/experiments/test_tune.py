"""Tuning: which step sizes are tried, and which is chosen."""

from __future__ import annotations

import csv
import re

import pytest
import torch

from fadamgc import InputError
from fadamgc.data import digits
from fadamgc.errors import FadamgcError
from fadamgc.experiments.run import workers
from fadamgc.experiments.spec.toml_io import load_spec
from fadamgc.experiments.tune import Point, tune, tuning_plan, with_best_steps
from fadamgc.tasks import build
from fadamgc.tasks.build import build_task
from tiny_experiments import QUADRATICS, TINY, spec_of


def test_tuning_finds_the_step_that_works_and_counts_divergence(tmp_path):
    (tmp_path / "out").mkdir()
    tuned = tune(spec_of(QUADRATICS), tmp_path / "out", workers=1, quiet=True)
    assert tuned.spec.methods[0].hyperparameters == {"eta_l": 0.05, "eta_g": 1.0}
    assert load_spec(tmp_path / "out" / "tuned.toml") == tuned.spec
    grid = {(p.eta_l, p.eta_g): p for p in tuned.points}
    assert len(grid) == 6
    assert grid[0.05, 1.0].reached == 1
    assert grid[1e-9, 1.0].reached == 0
    assert grid[1e9, 1.0].reached == 0
    assert tuned.notes == ("SCAFFOLD: eta_g=1 is at the high end of the grid",)
    with open(tmp_path / "out" / "tuning.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["eta_l"] for line in lines if line["chosen"] == "True"] == ["0.05"]


def test_tuning_never_sees_the_test_data(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    asked = []
    load = digits.load
    monkeypatch.setattr(build.digits, "load", lambda share=0.0: asked.append(share) or load(share))
    tuned = tune(spec_of(TINY), tmp_path / "out", workers=1, quiet=True)
    assert asked == [0.25]
    assert [m.hyperparameters["eta_l"] for m in tuned.spec.methods] == [0.01, 0.01]


def test_the_held_out_data_are_not_test_data():
    task = build_task(spec_of(TINY).task, 0, validation=0.25)
    seen = torch.cat([*(x for x, _ in task.pairs), task.test_pair[0]])
    assert len(seen) == 1437
    test = {row.numpy().tobytes() for row in digits.load().test_x}
    assert not test & {row.numpy().tobytes() for row in seen}


def test_tuning_resumes(tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    spec = spec_of(QUADRATICS).replace("tune", eta_l=(0.01, 0.05))
    first = tune(spec, tmp_path / "out", workers=1, quiet=True)
    monkeypatch.setattr(workers, "execute", None)
    assert tune(spec, tmp_path / "out", workers=1, quiet=True, resume=True) == first


def point(**values: object) -> Point:
    usual = {"label": "m", "eta_l": 0.1, "eta_g": 1.0, "reached": 2, "rounds": 10.0, "final": 0.9}
    return Point(**usual | {"diverged": 0, "goal": "max"} | values)


def test_the_order_of_choice():
    """Most seeds, then fewest rounds, then the best end, then the smaller step."""
    order = [
        point(reached=3, rounds=50.0, final=0.1),
        point(rounds=9.0, final=0.5),
        point(final=0.95),
        point(eta_l=0.01),
        point(eta_g=0.1),
        point(),
        point(reached=0, rounds=None, final=0.99),
        point(reached=0, rounds=None, final=None, diverged=2),
    ]
    assert sorted([*order[4:], *order[:4]], key=Point.rank) == order
    assert point(goal="min", final=0.1).rank() < point(goal="min", final=0.2).rank()


def test_a_method_that_always_diverges_is_named():
    spec = spec_of(QUADRATICS)
    with pytest.raises(FadamgcError, match="tuning SCAFFOLD: no run of the grid stayed finite"):
        with_best_steps(spec, [point(label="SCAFFOLD", reached=0, rounds=None, final=None, diverged=2)])


def test_tuning_needs_a_grid(tmp_path):
    spec = spec_of(re.sub(r"\[tune\].*?(?=\[\[)", "", TINY, flags=re.DOTALL))
    with pytest.raises(InputError, match=r"no \[tune\] section"):
        tune(spec, tmp_path)


def test_every_method_has_the_same_grid(tmp_path):
    spec = spec_of(TINY)
    jobs = tuning_plan(spec, tmp_path)
    points = {
        label: [(j.algorithm.eta_l, j.seed, j.run.rounds) for j in jobs if j.method.label == label]
        for label in ("LocalAdam", "FAdamGC (all tracked)")
    }
    assert points["LocalAdam"] == points["FAdamGC (all tracked)"] == [(1e-9, 7, 2), (0.01, 7, 2)]
    assert all(job.validation == 0.25 and job.run.stop_at_target for job in jobs)
