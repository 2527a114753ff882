"""Tuning: which step sizes are tried, and which is chosen."""

from __future__ import annotations

import csv
import re
import shutil
import sys

import pytest
import torch

from fadamgc import InputError
from fadamgc.data import digits
from fadamgc.errors import FadamgcError
from fadamgc.experiments.points import Point
from fadamgc.experiments.run import workers
from fadamgc.experiments.spec.toml_io import load_spec, parse_spec
from fadamgc.experiments.tune import points_of, tune, tuning_plan, with_best_steps
from fadamgc.tasks import build
from fadamgc.tasks.build import build_task
from tiny_experiments import QUADRATICS, TINY, spec_of


def test_tuning_finds_the_step_that_works_and_counts_divergence(tmp_path):
    (tmp_path / "out").mkdir()
    tuned = tune(spec_of(QUADRATICS), tmp_path / "out", workers=1, quiet=True)
    assert tuned.spec.methods[0].hyperparameters == {"eta_l": 0.05, "eta_g": 1.0}
    assert load_spec(tmp_path / "out" / "tuned.toml") == tuned.spec
    grid = {tuple(dict(p.values).values()): p for p in tuned.points}
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


def point(eta_l: float = 0.1, eta_g: float = 1.0, **others: object) -> Point:
    usual = {"label": "m", "reached": 2, "rounds": 10.0, "final": 0.9, "diverged": 0, "goal": "max"}
    return Point(values=(("eta_l", eta_l), ("eta_g", eta_g)), **usual | others)


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


# Beyond the ends of the grid.


@pytest.mark.slow
@pytest.mark.parametrize("search", ["full", "halving", "race"])
@pytest.mark.parametrize("grid", [(1e-4, 3e-4, 1e-3), (0.3, 1.0, 3.0)])
def test_the_search_goes_on_until_no_chosen_step_size_is_at_an_end(tmp_path, grid, search):
    spec = spec_of(QUADRATICS).replace("tune", eta_l=grid, search=search, extend=True, rounds=30)
    tuned = tune(spec, tmp_path / "out", workers=1, quiet=True)
    assert tuned.notes == ()
    for method in tuned.spec.methods:
        tried = [dict(p.values)["eta_l"] for p in tuned.points if p.label == method.label]
        assert min(tried) < method.hyperparameters["eta_l"] < max(tried)
    (tmp_path / "out" / "tuning.csv").unlink()
    assert tune(spec, tmp_path / "out", workers=1, quiet=True, resume=True) == tuned
    shut = tune(spec.replace("tune", extend=False), tmp_path / "shut", workers=1, quiet=True)
    assert any("end of the grid" in note for note in shut.notes)


# Any hyperparameter.

OTHERS = """
name = "others"
[task]
data = "quadratics"
clients = 4
[run]
rounds = 30
local_steps = 3
seeds = [0]
target = 1e-2
executor = "loop"
[tune]
eta_l = [0.01, 0.05]
eta_g = [0.5, 1.0]
mu = [0.1, 1.0]
rounds = 20
seeds = [3]
{search}
[tune.methods.feddyn]
alpha = [0.1, 1.0]
[tune.methods."A composition"]
"local.beta1" = [0.0, 0.9]
[[method]]
algorithm = "fedprox"
[[method]]
algorithm = "feddyn"
[[method]]
algorithm = "compose"
label = "A composition"
local = {{ rule = "adam", eta_l = 0.05 }}
[[method]]
algorithm = "fedavg"
eta_l = {{ cosine = 0.3, end = 0.001 }}
"""


@pytest.mark.slow
def test_any_hyperparameter_is_tuned_where_a_method_has_it(tmp_path):
    (tmp_path / "out").mkdir()
    spec = parse_spec(OTHERS.format(search=""), "spec.toml")
    assert parse_spec(spec.to_toml(), "again.toml") == spec
    points = {label: [dict(p) for p in of] for label, of in points_of(spec).items()}
    assert [len(of) for of in points.values()] == [8, 4, 8, 4]
    assert points["FedProx"][0] == {"eta_l": 0.01, "eta_g": 0.5, "mu": 0.1}
    assert points["FedDyn"][0] == {"eta_l": 0.01, "alpha": 0.1}  # it has no eta_g
    assert points["A composition"][1] == {"eta_l": 0.01, "eta_g": 0.5, "local.beta1": 0.9}
    tuned = tune(spec, tmp_path / "out", workers=1, quiet=True)
    chosen = {m.label: m.hyperparameters for m in tuned.spec.methods}
    assert chosen["FedProx"].keys() == {"eta_l", "eta_g", "mu"}
    assert chosen["A composition"]["local"]["beta1"] in (0.0, 0.9)
    assert chosen["FedAvg"]["eta_l"]["cosine"] in (0.01, 0.05)  # the schedule stays
    assert chosen["FedAvg"]["eta_l"]["end"] == 0.001
    with open(tmp_path / "out" / "tuning.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == 24
    assert sum(line["chosen"] == "True" for line in lines) == 4
    assert {"mu", "alpha", "local.beta1"} <= set(lines[0])
    assert load_spec(tmp_path / "out" / "tuned.toml") == tuned.spec


def test_a_random_search_tries_some_points():
    spec = parse_spec(OTHERS.format(search='search = "random"\npoints = 3'), "spec.toml")
    points = points_of(spec)
    assert [len(of) for of in points.values()] == [3, 3, 3, 3]
    assert points == points_of(spec)
    every = points_of(parse_spec(OTHERS.format(search=""), "spec.toml"))
    assert all(set(points[label]) <= set(every[label]) for label in points)


SUGGESTED = QUADRATICS.replace("eta_l = [1e-9, 0.05, 1e9]", "eta_l = [1e-9, 1e-4, 1e-3, 0.01, 0.05]").replace(
    "seeds = [5]", 'seeds = [5, 6]\nsearch = "optuna"\npoints = 7'
)


@pytest.mark.slow
def test_points_are_suggested_by_optuna(tmp_path, monkeypatch):
    """Each trial is a run in the folder, with all seeds; a search that was stopped makes the same trials."""
    pytest.importorskip("optuna", reason="Optuna is not installed")
    (tmp_path / "out").mkdir()
    spec = spec_of(SUGGESTED)
    first = tune(spec, tmp_path / "out", workers=1, quiet=True)
    assert len({p.values for p in first.points}) == 7
    assert all(p.seeds == 2 for p in first.points)
    saved = {path.parent.name for path in (tmp_path / "out" / "tuning" / "scaffold").glob("*/*.json")}
    names = {"-".join(f"{name}-{value!r}" for name, value in p.values) for p in first.points}
    assert saved == {f"{name}-seed{seed}" for name in names for seed in (5, 6)}
    assert dict(first.best[0].values)["eta_l"] == 0.05
    for path in sorted((tmp_path / "out" / "tuning" / "scaffold").iterdir())[::3]:
        shutil.rmtree(path)
    assert tune(spec, tmp_path / "out", workers=1, quiet=True, resume=True) == first
    monkeypatch.setattr(workers, "execute", None)
    assert tune(spec, tmp_path / "out", workers=1, quiet=True, resume=True) == first


def test_a_grid_with_fewer_points_is_tried_as_a_whole(tmp_path):
    pytest.importorskip("optuna", reason="Optuna is not installed")
    (tmp_path / "out").mkdir()
    text = QUADRATICS.replace("rounds = 30", "rounds = 2").replace("eta_g = [0.1, 1.0]", "")
    spec = spec_of(text.replace("seeds = [5]", 'seeds = [5]\nsearch = "optuna"\npoints = 5'))
    assert len(tune(spec, tmp_path / "out", workers=1, quiet=True).points) == 3


def test_without_optuna_the_error_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(InputError, match=r"pip install 'fadamgc\[optuna\]'; or give search='random'"):
        tune(spec_of(SUGGESTED), tmp_path / "out", workers=1, quiet=True)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("mu = [0.1, 1.0]", "mux = [0.1]", "[tune] mux: no method has such a setting; did you mean 'mu'?"),
        ("mu = [0.1, 1.0]", "mu = 0.1", "[tune] mu=0.1 is not a list of values to try"),
        (
            "[tune.methods.feddyn]",
            "[tune.methods.feddin]",
            "'feddin' is not a method; did you mean 'feddyn'?",
        ),
        (
            "seeds = [3]",
            'seeds = [3]\nsearch = "random"',
            "the searches 'random' and 'optuna' need the number of points",
        ),
        ("seeds = [3]", "seeds = [3]\npoints = 3", "no other search does"),
        ("alpha = [0.1, 1.0]", "alpha = []", "must not be empty"),
        ("eta_l = [0.01, 0.05]\neta_g = [0.5, 1.0]", "", "[tune] has no values to try for FedAvg"),
    ],
)
def test_bad_grids_are_refused(old, new, message):
    text = OTHERS.format(search="")
    assert old in text
    with pytest.raises(InputError) as error:
        parse_spec(text.replace(old, new), "spec.toml")
    assert message in str(error.value)
