"""A composition in specs, in a federation and in the config of a Flower app."""

from __future__ import annotations

import pytest
import torch

import fadamgc
from fadamgc import compose, local, server
from fadamgc.algebra.compose import NAMES
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.report.numbers import read_results
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from fadamgc.experiments.tune import tune

SPEC = """
[task]
data = "quadratics"
clients = 4
dim = 3

[run]
rounds = 3
local_steps = 2
seeds = [0]
target = 1e-3
executor = "loop"

[tune]
eta_l = [1e-9, 0.05]
eta_g = [1.0]
seeds = [5]
rounds = 3

[[method]]
algorithm = "compose"
correction = "pre+direction"
alpha = 0.2

[method.local]
rule = "adam"
amsgrad = true
v = "share"
eta_l = 0.02

[[method]]
algorithm = "compose"
label = "SGD, server Adam"
local = { rule = "sgd", eta_l = 0.1 }
server = "adam"
"""
FIRST = compose(local.Adam(eta_l=0.02, amsgrad=True, v="share"), "pre+direction", alpha=0.2)


def test_nested_tables_in_a_spec():
    spec = parse_spec(SPEC, "test")
    assert spec.methods[0].make() == FIRST
    assert spec.methods[0].label == "AMSGrad (m reset, v share) x pre+direction x Average"
    assert spec.methods[1].make() == compose(local.SGD(0.1), "none", server.Adam())
    assert spec.methods[0].hyperparameter("eta_l") == 0.02
    assert parse_spec(spec.to_toml(), "again") == spec


def test_an_experiment_with_compositions_runs_is_tuned_and_reported(tmp_path):
    spec = parse_spec(SPEC, "test")
    assert run_spec(spec, tmp_path / "out", workers=1, quiet=True) == ()
    results = read_results(tmp_path / "out")
    assert [row.method.label for row in results.rows] == [method.label for method in spec.methods]
    assert all(row.runs == 1 for row in results.rows)
    (tmp_path / "out" / "spec.toml").unlink()  # then the spec is derived from the runs
    derived = ExperimentFolder(tmp_path / "out").load()
    assert sorted(derived.runs) == sorted(method.make().title for method in spec.methods)
    (tmp_path / "tuned").mkdir()
    tuned = tune(spec, tmp_path / "tuned", workers=1, quiet=True).spec
    assert [method.make().eta_l for method in tuned.methods] == [0.05, 0.05]
    assert parse_spec((tmp_path / "tuned" / "tuned.toml").read_text(), "tuned") == tuned


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ('rule = "adan"', r"\[\[method\]\] 1: local rule 'adan' is not known; did you mean 'adam'\?"),
        ('rule = "adam"\nbeta = 1', r"\[\[method\]\] 1: local rule adam has no setting 'beta'"),
        ("eta = 1", r"\[\[method\]\] 1: local needs the key 'rule'"),
    ],
)
def test_mistakes_in_a_nested_table_are_named(changed, message):
    with pytest.raises(fadamgc.InputError, match=message):
        parse_spec(SPEC.replace('rule = "adam"', changed), "test")


def test_a_federation_with_a_composition_gives_the_simulators_numbers(tmp_path):
    pytest.importorskip("flwr")
    from world import World

    world = World(tmp_path, FIRST, rounds=3, sampled=2, tracked=1)
    for _ in range(3):
        world.round()
    settings = {"rounds": 3, "sampled": 2, "tracked": 1, "local_steps": 3, "batch_size": 4, "seed": 5}
    run = fadamgc.simulate(FIRST, world.task, **settings, dtype=torch.float64, executor="loop")
    assert torch.equal(world.server.federation.state.server.x, run.x)


def test_the_config_of_a_flower_app_has_keys_with_dots():
    pytest.importorskip("flwr")
    from fadamgc.flower.config import read_config

    config = {"algorithm": "compose", "local.rule": "adam", "local.amsgrad": True, "local.v": "share"}
    config |= {"correction": "pre+direction", "alpha": 0.2, "eta_l": 0.02, "data.alpha": 0.1}
    read = read_config(config)
    assert read.algorithm == FIRST
    with pytest.raises(fadamgc.InputError, match="local='sgd' and local.v='share': give one of them"):
        read_config({"algorithm": "compose", "local": "sgd", "local.v": "share"})


def test_a_custom_rule_is_known_by_name(tmp_path):
    class Plain(local.SGD):
        pass

    fadamgc.register("plain_sgd", Plain)
    try:
        algorithm = fadamgc.make_algorithm("compose", local="plain_sgd", eta_l=0.5)
        assert algorithm.local == Plain(0.5)
        assert fadamgc.make_algorithm("compose", **algorithm.plain()) == algorithm
        with pytest.raises(fadamgc.InputError, match="name='sgd' is taken by SGD"):
            fadamgc.register("sgd", Plain)
    finally:
        del NAMES["local"]["plain_sgd"]
