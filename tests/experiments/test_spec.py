"""Specs in TOML: what is read is what is written, and a mistake is named with its place."""

# ruff: noqa: E501 - a table of messages, each on its line

from __future__ import annotations

import dataclasses
import math
import re
import tomllib

import pytest

import fadamgc
from fadamgc import InputError
from fadamgc.experiments.spec.sections import EXECUTORS, RunSpec
from fadamgc.experiments.spec.toml_io import load_spec, parse_spec, preset, presets
from fadamgc.sim import executors
from fadamgc.toml import toml_value
from tiny_experiments import QUADRATICS, TINY, spec_of

EVERY = "".join(map(chr, range(160)))  # control characters, too


@pytest.mark.parametrize("text", [TINY, QUADRATICS], ids=["digits", "quadratics"])
def test_a_spec_survives_the_way_to_toml_and_back(text):
    spec = spec_of(text)
    assert spec_of(spec.to_toml()) == spec


def test_every_kind_of_value_survives_the_way_to_toml_and_back():
    spec = spec_of(
        QUADRATICS.replace('"scaffold"', '"scaffold"\nlabel = "S \\"x\\" \\\\ \\u00e9"\ninit = "gradient"')
        + '[[method]]\nalgorithm = "fedadam"\nv0 = 0.0\nbias_correction = true\neta_l = 1e-05\n'
        + "[cost]\ndown_mbps = [1.0, 2, 3.5, inf]\nlatency = 2"
    )
    assert spec.cost.down_mbps == (1.0, 2, 3.5, math.inf)
    assert tomllib.loads(f"text = {toml_value(EVERY)}")["text"] == EVERY
    assert spec.methods[0].label == 'S "x" \\ é'
    assert spec.methods[1].make().bias_correction is True
    assert spec_of(spec.to_toml()) == spec


def test_every_preset_loads_and_survives_the_way_to_toml_and_back():
    assert "digits" in presets()
    for name in presets():
        assert spec_of(preset(name).to_toml()) == preset(name)


def test_the_digits_preset_is_the_papers_table():
    spec = preset("digits")
    assert [m.label for m in spec.methods] == [
        *("FedAvg-M", "SCAFFOLD-M", "FedAdam", "FedAMS", "LocalAdam", "FA-NT", "FAdamGC")
    ]
    assert [spec.tracked(m) for m in spec.methods] == [None] * 5 + [5, 5]
    assert (spec.task.clients, spec.task.alpha, spec.task.hidden) == (50, 0.1, (64,))
    assert (spec.run.sampled, spec.run.local_steps, spec.run.batch_size) == (10, 20, 16)
    assert not set(spec.tune.seeds) & set(spec.run.seeds)
    for method in spec.methods:
        assert method.hyperparameters["eta_l"] in spec.tune.eta_l
        assert method.hyperparameters["eta_g"] in spec.tune.eta_g


REFUSED = {
    "unknown key": ("local_steps = 4", "local_step = 4", "[run] has no key 'local_step'; did you mean 'local_steps'?"),
    "unknown key of a task": ("alpha = 1.0", "alhpa = 1.0", "[task] with data='digits' has no key 'alhpa'; did you mean 'alpha'?"),
    "key of another task": ("hidden = [16]", "dim = 8", "[task] with data='digits' has no key 'dim'"),
    "unknown section": ("[cost]", "[costs]", "there is no key or section 'costs'; did you mean 'cost'?"),
    "unknown data": ('"digits"', '"digts"', "[task] data='digts' is not accepted; it must be one of 'digits', 'cifar10', 'cifar100', 'tiny-imagenet', 'uci_har', '20_newsgroups', 'glue/sst2', 'glue/qnli', 'glue/qqp', 'quadratics', 'linear_regression'; did you mean 'digits'?"),
    "a file": ('"digits"', '"reviews.csv"', "[task] with data='reviews.csv' needs the key 'target'"),
    "data that are no name": ('"digits"', '["digits"]', "[task] data=('digits',) is not accepted"),
    "no data": ('data = "digits"', "", "[task] needs the key 'data'"),
    "no rounds": ("rounds = 3", "", "[run] needs the key 'rounds'"),
    "K = 0": ("local_steps = 4", "local_steps = 0", "[run] local_steps=0 is not accepted; it must be >= 1"),
    "no K": ("local_steps = 4", "", "[run] local_steps=None and local_epochs=None: give one of the two"),
    "two K": ("local_steps = 4", "local_steps = 4\nlocal_epochs = 1", "[run] local_steps=4 and local_epochs=1: give one of the two"),
    "not a number": ("batch_size = 8", 'batch_size = "8"', '[run] batch_size="8" is not accepted; it must be a whole number'),
    "not whole": ("sampled = 3", "sampled = 3.5", "[run] sampled=3.5 is not accepted; it must be a whole number"),
    "no seeds": ("seeds = [0, 1]", "seeds = []", "[run] seeds=[] is not accepted; it must not be empty"),
    "a step size twice": ("eta_l = [1e-9, 0.01]", "eta_l = [0.1, 0.1]", "[tune] eta_l=[0.1, 0.1] is not accepted; each may be given once"),
    "a seed twice": ("seeds = [0, 1]", "seeds = [1, 1]", "[run] seeds=[1, 1] is not accepted; each may be given once"),
    "a negative seed": ("seeds = [0, 1]", "seeds = [-1]", "[run] seeds[0]=-1 is not accepted; it must be >= 0"),
    "unknown executor": ('executor = "loop"', 'executor = "lop"', "did you mean 'loop'?"),
    "stop without target": ("target = 0.2", "stop_at_target = true", "[run] stop_at_target=true needs a target"),
    "target in per cent": ("target = 0.2", "target = 20.0", "[run] target=20.0 is not accepted; accuracy goes from 0 to 1, 0.9 is 90 %"),
    "weights": ("target = 0.2", 'weights = "sizes"', "[run] weights=\"sizes\" is not accepted; it must be 'uniform', 'size' or a list"),
    "too few weights": ("target = 0.2", "weights = [1, 2]", "[run] weights has 2 entries; give one number, or one for each of 6 clients"),
    "zero link": ("up_mbps = 0.05", "up_mbps = 0", "[cost] up_mbps=0 is not accepted; it must be a number >= 1e-09"),
    "per round": ("latency = 1.0", 'per_round = "median"', "[cost] per_round=\"median\" is not accepted; it must be 'mean' or 'slowest'"),
    "empty grid": ("eta_l = [1e-9, 0.01]", "eta_l = []", "[tune] eta_l=[] is not accepted; it must not be empty"),
    "validation": ("validation = 0.25", "validation = 1.0", "[tune] validation=1.0 is not accepted; it must be <= 0.99"),
    "unknown algorithm": ('"fadamgc"', '"fadamg"', "[[method]] 2: algorithm 'fadamg' is not known; did you mean 'fadamgc'?"),
    "no algorithm": ('algorithm = "fadamgc"', "", "[[method]] 2 needs the key 'algorithm'"),
    "unknown hyperparameter": ("eta_l = 0.02", "eta_1 = 0.02", "[[method]] 2: fadamgc has no key 'eta_1'; did you mean 'eta_l'?"),
    "bad hyperparameter": ("eta_l = 0.02", "eta_l = -1.0", "[[method]] 2: FAdamGC.eta_l=-1.0 is not accepted; it must be a number > 0"),
    "same label": ('"FAdamGC (all tracked)"', '"LocalAdam"', "[[method]] 1 and 2 are both called 'LocalAdam'; give one of them another label"),
    "key of another partition": ("alpha = 1.0", 'partition = "iid"\nalpha = 1.0', "alpha=1.0 is a setting of partition='dirichlet', not of 'iid'; remove it"),
    "unknown partition": ("alpha = 1.0", 'partition = "diri"', "[task] with data='digits' partition=\"diri\" is not accepted"),
    "not a table": ("[cost]", "cost = 3\n[tune2]", "cost must be a table"),
    "not TOML": ("[cost]", "[cost", "not TOML"),
    "a partition that is a table": ("alpha = 1.0", "partition = {}", "partition={} is not accepted; it must be 'dirichlet', 'iid' or 'shards'"),
    "an algorithm that is a list": ('"fadamgc"', '["fadamgc"]', "[[method]] 2: algorithm=('fadamgc',) is not accepted; it must be a name"),
    "an integer of 400 digits": ("eta_l = 0.02", f"eta_l = 1{'0' * 400}", "method.eta_l=10000"),
    "an integer of 400 digits in [cost]": ("up_mbps = 0.05", f"up_mbps = 1{'0' * 400}", "is not accepted; integers go from -2^63 to 2^63 - 1"),
    "an integer of 5,000 digits": ("rounds = 3", f"rounds = 1{'0' * 5000}", "not TOML: a number or a date is not valid"),
    "a hexadecimal of 6,000 digits": ("rounds = 3", f"rounds = 0x{'f' * 6000}", "run.rounds=<an integer of 24000 bits> is not accepted"),
    "1,000 levels": ("alpha = 1.0", f"alpha = {'[' * 1000}{']' * 1000}", "nested too deeply"),
    "2,000 tables": ("[cost]", f"[{'.'.join('a' * 2000)}]\n[cost]", "nested too deeply"),
    "too many steps": ("local_steps = 4", "local_steps = 9007199254740993", "local_steps=9007199254740993 is not accepted; it must be <= 9007199254740992"),
}  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_is_wrong_in_a_spec_is_named_with_its_place(old, new, message):
    if new.startswith("cost ="):  # a key of the top level must come first
        text = "cost = 3\n" + TINY.split("[cost]")[0]
    else:
        assert old in TINY
        text = TINY.replace(old, new, 1)
    with pytest.raises(InputError) as caught:
        spec_of(text)
    said = str(caught.value)
    assert message in said
    assert all(line.startswith("spec.toml: ") for line in said.splitlines())
    assert not re.search(r"pydantic|Input should|Value error|validation error", said)


@pytest.mark.parametrize("old", ['"digits"', '"fadamgc"', "[16]", "hidden", "eta_l = 0.02", "[cost]", "0.05"])
def test_a_long_text_is_not_repeated_in_a_message(old):
    long = "y" * 100_000
    with pytest.raises(InputError) as caught:
        spec_of(
            TINY.replace(
                old, f"[{long}]" if old == "[cost]" else f'"{long}" = 1' if "eta" in old else f'"{long}"', 1
            )
        )
    assert len(str(caught.value)) < 2000


def test_the_executors_of_a_spec_are_those_of_the_simulator():
    assert ("auto", *executors.EXECUTORS) == EXECUTORS


def test_all_problems_are_named_at_once():
    text = (
        TINY.replace("sampled", "smpled")
        .replace("down_mbps", "down_mbs")
        .replace("eta_l = 0.02", 'eta_l = "big"')
    )
    with pytest.raises(InputError) as caught:
        spec_of(text)
    assert len(str(caught.value).splitlines()) == 3


def test_an_objective_cannot_be_asked_to_reach_zero():
    with pytest.raises(InputError, match=r"\[run\] target=0\.0 is out of reach"):
        spec_of(QUADRATICS.replace("target = 1e-3", "target = 0.0"))


def test_a_missing_spec_file_is_named(tmp_path):
    with pytest.raises(InputError, match=r"none\.toml does not exist"):
        load_spec(tmp_path / "none.toml")


def test_methods_are_chosen_by_label_or_algorithm_and_keep_their_order():
    spec = preset("digits").only(["FAdamGC", "local_adam"])
    assert [m.algorithm for m in spec.methods] == ["local_adam", "fadamgc"]
    with pytest.raises(InputError, match="method 'fadmgc' is not in the spec; did you mean 'fadamgc'"):
        spec.only(["fadmgc"])


# The page that documents the spec.


def test_a_chosen_method_keeps_its_grids_and_loses_those_of_others():
    text = """
    [task]
    data = "digits"
    [run]
    rounds = 1
    local_steps = 1
    [tune]
    rounds = 1
    eta_l = [0.1]
    mu = [0.1, 1.0]
    [tune.methods.fedprox]
    eta_l = [0.3]
    [tune.methods.feddyn]
    alpha = [0.1]
    [[method]]
    algorithm = "fedprox"
    [[method]]
    algorithm = "feddyn"
    """
    spec = parse_spec(text, "a spec")
    prox, dyn = spec.only(["FedProx"]), spec.only(["feddyn"])
    assert (prox.tune.grids, prox.tune.methods) == ({"mu": (0.1, 1.0)}, {"fedprox": {"eta_l": (0.3,)}})
    assert (dyn.tune.grids, dyn.tune.methods) == ({}, {"feddyn": {"alpha": (0.1,)}})
    assert spec.only(["fedprox", "feddyn"]) == spec
    for chosen in (prox, dyn):
        assert parse_spec(chosen.to_toml(), "again") == chosen


def test_the_run_section_has_every_setting_with_its_default():
    """A new setting of a run cannot be missed: it is a key of [run], or it is named here."""
    elsewhere = {"seed", "schedule", "checkpoint_every"}  # seeds are a list; the runner sets the last one
    for setting in dataclasses.fields(fadamgc.Settings):
        if setting.name in elsewhere:
            continue
        key = RunSpec.model_fields[setting.name]
        if setting.name == "rounds":
            assert key.is_required()
        elif setting.name == "dtype":
            assert key.default == "float32"  # a spec's models are float32
        else:
            assert key.default == setting.default
