"""Specs, the runner, tuning and the report, on experiments of a few seconds."""

# ruff: noqa: E501 - a table of messages, each on its line

from __future__ import annotations

import csv
import dataclasses
import errno
import json
import math
import re
import statistics
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from fadamgc import CostModel, FedAvg, InputError, bundle, files, simulate
from fadamgc.data import digits
from fadamgc.errors import FadamgcError
from fadamgc.experiments.folder import FILES, ExperimentFolder
from fadamgc.experiments.report.numbers import Spread, read_results, summary_frame
from fadamgc.experiments.report.tables import DASH, results_markdown, results_table
from fadamgc.experiments.report.write import write_report
from fadamgc.experiments.run import execution, workers
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.sections import EXECUTORS, CostSpec, MethodSpec, RunSpec, Spec, TuneSpec
from fadamgc.experiments.spec.toml_io import load_spec, parse_spec, preset, presets
from fadamgc.experiments.tune import Point, tune, tuning_plan, with_best_steps
from fadamgc.models import mlp
from fadamgc.sim import executors
from fadamgc.tasks import build
from fadamgc.tasks.build import build_task, label_counts
from fadamgc.tasks.sections import TASKS
from fadamgc.toml import toml_value
from places import ROOT

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


EVERY = "".join(map(chr, range(160)))  # control characters, too


def spec_of(text: str) -> Spec:
    return parse_spec(text, "spec.toml")


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny experiment, run in one process, with its report."""
    out = tmp_path_factory.mktemp("tiny") / "out"
    assert run_spec(spec_of(TINY), out, workers=1, quiet=True) == ()
    write_report(out)
    return out


def records(folder: Path) -> list[dict]:
    """The history as saved, read without the package; wall time is the machine's, not the run's."""
    history = json.loads((folder / "run.json").read_text())["history"]
    for record in history:
        del record["wall_seconds"]
    return history


# The spec.


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
    "a file": ('"digits"', '"reviews.csv"', "'linear_regression'; for your own texts, use fadamgc.tasks.text in Python"),
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


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            'data = "linear_regression"\nsamples = 9223372036854775807',
            "clients=10 with samples=9223372036854775807 needs",
        ),
        (
            'data = "linear_regression"\ndim = 4000000000',
            "dim=4000000000 needs 1.28e\\+11 GB, this machine has",
        ),
        (
            'data = "linear_regression"\nclients = 1000000000000',
            "clients=1000000000000 with samples=40 needs",
        ),
        ('data = "quadratics"\nclients = 100000000\ndim = 100000', "clients=100000000 with dim=100000 needs"),
        ('data = "digits"\nhidden = [9007199254740992]', "hidden=.9007199254740992. is too large"),
    ],
)
def test_a_task_that_fits_in_no_memory_is_refused(task, message):
    spec = spec_of(f'[task]\n{task}\n[run]\nrounds = 1\nlocal_steps = 1\n[[method]]\nalgorithm = "fedavg"')
    with pytest.raises(InputError, match=message):
        build_task(spec.task, seed=0)


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


# Models and tasks.


def test_a_model_is_made_from_its_own_seed():
    before = torch.get_rng_state()
    a, b, other = mlp(4, [3], 2, seed=5), mlp(4, [3], 2, seed=5), mlp(4, [3], 2, seed=6)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(next(a.parameters()), next(other.parameters()))
    assert a(torch.zeros(5, 2, 2)).shape == (5, 2)


@pytest.mark.parametrize("settings", [{"hidden": [0]}, {"inputs": 0}, {"outputs": 0}, {"seed": -1}])
def test_a_model_with_no_room_is_refused(settings):
    (name,) = settings
    with pytest.raises(InputError, match=name):
        mlp(**{"inputs": 4, "hidden": [3], "outputs": 2, "seed": 0} | settings)


def test_each_seed_is_another_trial():
    spec = spec_of(TINY).task
    one, same, other = build_task(spec, 0), build_task(spec, 0), build_task(spec, 1)
    assert torch.equal(one.pairs[0][0], same.pairs[0][0])
    assert [len(x) for x, _ in one.pairs] != [len(x) for x, _ in other.pairs]
    assert not torch.equal(next(one.model.parameters()), next(other.model.parameters()))
    assert torch.equal(one.test_pair[0], other.test_pair[0])


@pytest.mark.parametrize(
    "more", ['partition = "iid"', 'partition = "shards"\nshards_per_client = 3', "alpha = 100"]
)
def test_every_partition_can_be_asked_for(more):
    text = TINY.replace("alpha = 1.0", more).replace("min_size = 4", "")
    labels = label_counts(spec_of(text).task, 0)
    assert labels.counts.shape == (6, 10)
    assert labels.counts.sum() == 1437


@pytest.mark.parametrize(
    "task", ['data = "quadratics"\nclients = 4\ndim = 3', 'data = "linear_regression"\nsamples = [12, 40]']
)
def test_the_metric_of_a_synthetic_task_is_the_distance_to_the_optimum(task):
    spec = spec_of(f'[task]\n{task}\n[run]\nrounds = 1\nlocal_steps = 1\n[[method]]\nalgorithm = "fedavg"')
    built = build_task(spec.task, 3)
    X, Y = built.test_pair
    W = torch.randn(X.shape[1], 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def f(w):
        return sum(0.5 * (x @ w - y).square().mean() for x, y in built.pairs) / len(built.pairs)

    w = W.clone().requires_grad_()
    best = torch.linalg.lstsq(X, Y).solution
    assert built.goal == "min"
    assert float(built.metric(X @ W, Y)) == pytest.approx(float(f(W) - f(best)), rel=1e-9)
    assert float(built.metric(X @ best, Y)) < 1e-25
    (g,) = torch.autograd.grad(f(w), w)
    assert g.abs().max() > 1e-3  # the point above was not the optimum by accident


# The runner.


def test_every_run_is_saved_with_the_spec_and_the_picture(done):
    spec = spec_of(TINY)
    assert load_spec(done / "spec.toml") == spec
    names = ["localadam-seed0", "localadam-seed1", "fadamgc-all-tracked-seed0", "fadamgc-all-tracked-seed1"]
    assert sorted(p.name for p in (done / "runs").iterdir()) == sorted(names)
    assert {p.name for p in done.iterdir()} == {*FILES, "runs"} - {"tuning.csv", "tuned.toml"}
    assert [len(r["tracked"]) for r in records(done / "runs" / names[0])] == [2, 2, 2]
    assert [len(r["tracked"]) for r in records(done / "runs" / names[2])] == [3, 3, 3]


def test_two_workers_give_the_bits_of_one(done, tmp_path):
    before = torch.get_num_threads()
    run_spec(spec_of(TINY), tmp_path / "out", workers=2, quiet=True)
    assert torch.get_num_threads() == before
    for folder in (done / "runs").iterdir():
        assert records(tmp_path / "out" / "runs" / folder.name) == records(folder)


def test_resume_keeps_what_is_finished_and_equal(done, tmp_path, monkeypatch):
    out = tmp_path / "out"
    short = spec_of(TINY).replace("run", rounds=1)
    run_spec(short, out, workers=1, quiet=True)
    made = []

    def execute(jobs, on_round, warn, tasks):
        made.extend(job.name for job in jobs)
        return [execution.RunEnd(1, 0.5)] * len(jobs)

    monkeypatch.setattr(workers, "execute", execute)
    run_spec(short, out, workers=1, quiet=True, resume=True)
    assert made == []
    (out / "runs" / "localadam-seed1" / "run.json").unlink()
    damaged = out / "runs" / "localadam-seed0" / "run.json"
    damaged.write_text(damaged.read_text()[:-40])
    run_spec(short, out, workers=1, quiet=True, resume=True)
    assert made == ["LocalAdam, seed 0", "LocalAdam, seed 1"]
    made.clear()
    with pytest.raises(InputError, match=r"other settings: \[run\] batch_size=8 there, 4 here; --overwrite"):
        run_spec(short.replace("run", batch_size=4), out, workers=1, quiet=True, resume=True)
    assert made == []
    assert load_spec(out / "spec.toml") == short
    run_spec(short.replace("run", batch_size=4), out, workers=1, quiet=True, overwrite=True)
    assert len(made) == 4


def test_resume_may_add_and_may_not_take_away(tmp_path):
    spec = spec_of(TINY).replace("run", rounds=1)
    run_spec(spec, tmp_path, workers=1, quiet=True)
    for other, message in (
        (spec.replace("run", seeds=(1,)), r"\[run\] seeds=\[0, 1\] there, \[1\] here"),
        (spec.replace("run", rounds=2), r"\[run\] rounds=1 there, 2 here"),
        (spec.replace("task", alpha=2.0), r"\[task\] alpha=1.0 there, 2.0 here"),
        (spec.only(["fadamgc"]), "LocalAdam: algorithm='local_adam' there, None here"),
        (
            parse_spec(spec.to_toml().replace('algorithm = "local_adam"', 'algorithm = "fedavg"'), "x"),
            "LocalAdam: algorithm='local_adam' there, 'fedavg' here",
        ),
        (
            parse_spec(spec.to_toml().replace("eta_l = 1e-05", "eta_l = 1e-06"), "x"),
            "LocalAdam: eta_l=1e-05 there",
        ),
    ):
        with pytest.raises(InputError, match=message):
            run_spec(other, tmp_path, workers=1, quiet=True, resume=True)
    before = {p: p.read_bytes() for p in tmp_path.glob("runs/*/run.json")}
    more = spec.replace("run", seeds=(0, 1, 2)).replace("cost", latency=7.0)
    run_spec(more, tmp_path, workers=1, quiet=True, resume=True)
    assert len(list(tmp_path.glob("runs/*/run.json"))) == 6
    assert all(path.read_bytes() == data for path, data in before.items())


def test_other_links_or_another_target_need_no_new_run(done):
    spec = spec_of(TINY).replace("cost", latency=9.0).replace("run", target=0.3)
    assert all(job.saved() is not None for job in ExperimentFolder(done).plan(spec))
    for other in (spec.replace("run", rounds=4), spec.replace("task", alpha=2.0)):
        assert all(job.saved() is None for job in ExperimentFolder(done).plan(other))


def test_a_folder_in_use_is_refused(done, tmp_path):
    with pytest.raises(InputError, match=r"already has an experiment; --resume .* --overwrite .* --out"):
        run_spec(spec_of(TINY), done, quiet=True)
    (tmp_path / "thesis.tex").write_text("mine")
    for flags in ((False, False), (True, False), (False, True)):
        with pytest.raises(InputError, match="has other files and no experiment"):
            ExperimentFolder(tmp_path).make_ready(*flags)
    with pytest.raises(InputError, match="is a file; give a folder"):
        ExperimentFolder(tmp_path / "thesis.tex").make_ready(False, False)
    with pytest.raises(InputError, match="cannot be written"):
        ExperimentFolder(tmp_path / "thesis.tex" / "below").make_ready(False, False)
    with pytest.raises(InputError, match="choose one"):
        ExperimentFolder(tmp_path).make_ready(True, True)


def test_overwrite_removes_what_an_experiment_writes_and_nothing_else(tmp_path):
    out = tmp_path / "out"
    (out / "runs" / "a-seed0").mkdir(parents=True)
    (out / "spec.toml").write_text("")
    (out / "report.html").write_text("")
    (out / "notes.txt").write_text("mine")
    ExperimentFolder(out).make_ready(resume=False, overwrite=True)
    assert [p.name for p in out.iterdir()] == ["notes.txt"]


def test_what_cannot_run_is_refused_before_any_work(tmp_path):
    for key, value, message in (
        ("sampled", 7, "sampled=7 exceeds clients=6"),
        ("tracked", 4, "tracked=4 exceeds sampled=3"),
    ):
        with pytest.raises(InputError, match=message):
            run_spec(spec_of(TINY).replace("run", **{key: value}), tmp_path / "out")
    with pytest.raises(InputError, match="workers=0"):
        run_spec(spec_of(TINY), tmp_path / "new", workers=0)
    assert not (tmp_path / "out").exists()


def test_a_disk_without_room_is_named_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=10**9, free=20_000))
    with pytest.raises(
        InputError, match=r"is on a disk with 20 kB free; the runs need about \d+ kB .*to keep"
    ):
        run_spec(spec_of(TINY), tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


class Pair(NamedTuple):
    first: torch.Tensor
    rest: tuple


class Rest(NamedTuple):
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Nested(FedAvg):
    """FedAvg with a client state in which there is another one."""

    def init_client(self, x, g=None):
        return Pair(torch.zeros_like(x), Rest(torch.zeros_like(x)))

    def finish(self, down, client, local, x, K, tracked):
        return client, super().finish(down, client, local, x, K, tracked)[1]


def test_states_in_states_are_counted_and_saved(tmp_path):
    planned = ExperimentFolder(tmp_path).plan(spec_of(TINY))[0]
    planned = dataclasses.replace(planned, algorithm=Nested(eta_l=0.01))
    task = build_task(planned.task, planned.seed)
    d = sum(p.numel() for p in task.model.parameters())
    space = execution.dry_run(planned, task)
    assert space.checkpoint == 2 * 4 * d * (1 + 6 * 2)  # the server's x, and two vectors of six clients
    (end,) = execution.execute([planned], lambda i: False)
    assert end.rounds == 3


def test_a_disk_that_fills_up_loses_no_finished_run(tmp_path, monkeypatch):
    original, room = bundle.write_atomic, 2

    def write(path: Path, data: bytes, private: bool = False) -> None:
        nonlocal room
        if path.name == "run.json":
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            room -= 1
        original(path, data)

    monkeypatch.setattr(bundle, "write_atomic", write)
    with pytest.raises(FadamgcError, match="No space left on device; finished runs are saved: make room"):
        run_spec(spec_of(TINY), tmp_path, workers=1, quiet=True)
    assert sum(job.saved() is not None for job in ExperimentFolder(tmp_path).plan(spec_of(TINY))) == 2
    room = 2  # no more than what is missing
    assert run_spec(spec_of(TINY), tmp_path, workers=1, quiet=True, resume=True) == ()
    assert all(job.saved() for job in ExperimentFolder(tmp_path).plan(spec_of(TINY)))


def test_what_a_kill_left_behind_is_removed_by_the_next_start(tmp_path):
    """Killed between saving a record and removing the checkpoint, or while a figure was being written."""
    run_spec(spec_of(TINY), tmp_path, workers=1, quiet=True)
    job = ExperimentFolder(tmp_path).plan(spec_of(TINY))[0]
    (job.folder / "checkpoint").mkdir()
    (job.folder / "checkpoint" / "checkpoint.json").write_text("{}")
    figure = tmp_path / f".partition.png.999999999-{files.this_machine()}-0123abcd.tmp"
    figure.touch()
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    run_spec(spec_of(TINY), tmp_path, workers=1, quiet=True, resume=True)
    assert not (job.folder / "checkpoint").exists()
    assert not figure.exists()
    gone = before - {path for path in tmp_path.rglob("*") if path.is_file()}
    assert gone == {figure, job.folder / "checkpoint" / "checkpoint.json"}


def test_a_folder_in_which_a_killed_process_left_temporary_files_is_empty(tmp_path):
    for name in (".lock", ".writable", ".spec.toml.999999999-01234567-0123abcd.tmp"):
        (tmp_path / name).touch()
    run_spec(spec_of(TINY), tmp_path, workers=1, quiet=True)
    assert all(job.saved() for job in ExperimentFolder(tmp_path).plan(spec_of(TINY)))


def test_where_there_is_no_terminal_lines_say_how_long_it_will_take(tmp_path, capsys):
    run_spec(spec_of(TINY), tmp_path, workers=1)
    preparing, checking, *lines = capsys.readouterr().err.splitlines()
    assert (preparing, checking) == ("preparing digits ...", "checking 2 methods ...")
    assert len(lines) == 4
    assert all(re.search(r"; about \d+ s left$", line) for line in lines[:-1])
    assert "left" not in lines[-1]


def test_a_run_that_diverges_does_not_stop_the_others(tmp_path):
    spec = spec_of(QUADRATICS + "eta_l = 1e300\n" + '[[method]]\nalgorithm = "fedavg"\neta_l = 0.05')
    failures = run_spec(spec.replace("run", rounds=3), tmp_path / "out", workers=1, quiet=True)
    assert [f.run for f in failures] == ["SCAFFOLD, seed 0", "SCAFFOLD, seed 1"]
    assert "non-finite" in failures[0].error
    results = write_report(tmp_path / "out")
    assert {label: len(runs) for label, runs in results.runs.items()} == {"SCAFFOLD": 0, "FedAvg": 2}
    assert [cell.text for cell in results_table(results).rows[0]] == ["SCAFFOLD", *["diverged"] * 3, DASH]
    assert results.missing == 0


# The report.


def test_the_numbers_of_the_report_are_those_of_the_records(done):
    """All recomputed from the JSON files, without the package's own arithmetic."""
    table = summary_frame(read_results(done)).set_index("method")
    for label, slug in (("LocalAdam", "localadam"), ("FAdamGC (all tracked)", "fadamgc-all-tracked")):
        rounds, minutes, finals, mb = [], [], [], []
        for seed in (0, 1):
            seconds = 0.0
            history = records(done / "runs" / f"{slug}-seed{seed}")
            finals.append(history[-1]["test_accuracy"])
            mb += [r["bytes_down"] + r["bytes_up"] for r in history]
            for r in history:
                (work,) = r["work"]
                ups = work["up"] if isinstance(work["up"], list) else [work["up"]] * 3
                seconds += statistics.fmean(
                    1.0 + 8e-6 * work["down"] / 0.1 + 8e-6 * up / 0.05 + 0.5 * 4 for up in ups
                )
                if r["test_accuracy"] >= 0.2:
                    rounds.append(r["round"])
                    minutes.append(seconds / 60)
                    break
        row = table.loc[label]
        assert row["runs"] == 2
        assert row["runs_reached"] == len(rounds)
        assert row["final_mean"] == pytest.approx(statistics.fmean(finals))
        assert row["final_std"] == pytest.approx(statistics.stdev(finals))
        assert row["mb_down_per_round"] + row["mb_up_per_round"] == pytest.approx(statistics.fmean(mb) / 1e6)
        if rounds:
            assert row["rounds_mean"] == pytest.approx(statistics.fmean(rounds))
            assert row["minutes_mean"] == pytest.approx(statistics.fmean(minutes))
        else:
            assert math.isnan(row["rounds_mean"])
    assert set(table["runs_reached"]) == {0, 2}  # so that both branches above were tried


def test_the_curves_are_all_rounds_summed_up(done):
    with open(done / "curves.csv", newline="") as file:
        lines = [
            line for line in csv.DictReader(file) if line["method"] == "LocalAdam" and line["seed"] == "1"
        ]
    history = records(done / "runs" / "localadam-seed1")
    assert [int(line["round"]) for line in lines] == [1, 2, 3]
    assert [float(line["test_accuracy"]) for line in lines] == [r["test_accuracy"] for r in history]
    total = sum(r["bytes_down"] + r["bytes_up"] for r in history)
    assert int(lines[-1]["bytes"]) == total
    assert float(lines[-1]["minutes"]) == pytest.approx(sum(r["simulated_seconds"] for r in history) / 60)


def test_runs_that_never_got_there_are_counted_not_averaged(done):
    histories = [records(done / "runs" / f"fadamgc-all-tracked-seed{seed}") for seed in (0, 1)]
    best = sorted(max(r["test_accuracy"] for r in history) for history in histories)
    assert best[0] < best[1]
    between = sum(best) / 2
    results = read_results(done)
    results = type(results)(spec_of(TINY).replace("run", target=between), results.cost, results.runs)
    line = results_table(results).rows[1]
    assert re.fullmatch(r"\d\.0 \(1/2 reached\)", line[1].text)
    assert not line[1].bold
    assert results_table(results).rows[0][1].text == "never (0/2)"


def test_the_spread_is_the_sample_standard_deviation():
    assert Spread.of([1.0, 3.0]) == (2.0, pytest.approx(math.sqrt(2)))
    assert Spread.of([5.0])[0] == 5.0
    assert math.isnan(Spread.of([5.0]).std)
    assert math.isnan(Spread.of([]).mean)


def test_a_report_can_be_priced_again_without_running(done):
    cheap = CostModel(down_mbps=math.inf, up_mbps=math.inf, seconds_per_step=60.0)
    row = summary_frame(read_results(done, cheap)).set_index("method").loc["FAdamGC (all tracked)"]
    assert row["minutes_mean"] == pytest.approx(4 * row["rounds_mean"])


def test_the_table_in_markdown(done):
    text = results_markdown(read_results(done))
    assert "| " + " | ".join(results_table(read_results(done)).header) + " |" in text
    assert "Rounds to 20 %" in text
    assert text.count("**") == 2 * 3  # the best of rounds, of minutes and of accuracy
    assert "0.1 Mbps down and 0.05 Mbps up, 0.5 s per local step, 1 s latency" in text


def test_the_page_loads_nothing_from_outside(done):
    html = (done / "report.html").read_text()
    ours = html[: html.index("<script>")] + html[html.index("</script>") :]  # without plotly's own code
    assert not re.search(r"<script[^>]*\ssrc\s*=|<link\b|<iframe\b|@import|url\(", ours)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", ours)
    assert "Plotly.react" in ours
    assert ours.count("data:image/png;base64,") == 1
    assert "FAdamGC (all tracked)" in ours
    assert "eta_l = 0.02" in ours
    assert "torch" in ours


def test_names_cannot_break_the_page(tmp_path):
    spec = spec_of(QUADRATICS + 'label = "<b>x</b>"').replace("run", rounds=1, seeds=(0,))
    run_spec(spec, tmp_path / "out", workers=1, quiet=True)
    write_report(tmp_path / "out")
    html = (tmp_path / "out" / "report.html").read_text()
    assert "<b>x</b>" not in html
    assert "&lt;b&gt;x&lt;/b&gt;" in html
    assert not (tmp_path / "out" / "partition.png").exists()


def test_a_report_needs_runs(tmp_path):
    with pytest.raises(InputError, match=r"has no spec\.toml"):
        write_report(tmp_path)
    (tmp_path / "spec.toml").write_text(TINY)
    with pytest.raises(InputError, match="has no finished run"):
        write_report(tmp_path)


# Tuning.


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


def test_the_held_out_data_are_no_test_data():
    task = build_task(spec_of(TINY).task, 0, validation=0.25)
    seen = torch.cat([*(x for x, _ in task.pairs), task.test_pair[0]])
    assert len(seen) == 1437
    test = {row.numpy().tobytes() for row in digits.load().test_x}
    assert not test & {row.numpy().tobytes() for row in seen}


def test_tuning_goes_on_where_it_stopped(tmp_path, monkeypatch):
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


# A run that is stopped in the middle.


def test_a_stopped_run_goes_on_where_it_was(tmp_path):
    spec = spec_of(TINY.replace("rounds = 3", "rounds = 60", 1))
    job = ExperimentFolder(tmp_path).plan(spec)[-1]
    whole = simulate(**execution.arguments(job, build_task(job.task, job.seed)), progress=False)

    def stop_after(rounds: int):
        done = 0

        def on_round(i: int) -> bool:
            nonlocal done
            done += 1
            return done == rounds

        return on_round

    with pytest.raises(execution.Stopped):
        execution.execute([job], stop_after(33))
    assert not job.saved()
    counted: list[int] = []
    (outcome,) = execution.execute([job], lambda i: bool(counted.append(1)))
    assert outcome.rounds == 60
    assert len(counted) == 60 - 25
    run = job.saved()
    assert run is not None
    assert run.history == whole.history
    assert [p.name for p in job.folder.iterdir()] == ["run.json"]


def test_a_checkpoint_of_other_settings_is_not_gone_on_from(tmp_path):
    spec = spec_of(TINY.replace("rounds = 3", "rounds = 30", 1))
    job = ExperimentFolder(tmp_path).plan(spec)[-1]
    answers = iter([False] * 26 + [True])
    with pytest.raises(execution.Stopped):
        execution.execute([job], lambda i: next(answers))
    other = dataclasses.replace(job, algorithm=dataclasses.replace(job.algorithm, beta1=0.5))
    counted: list[int] = []
    execution.execute([other], lambda i: bool(counted.append(1)))
    assert len(counted) == 30


# The page that documents the spec.


def test_the_docs_name_every_key_and_their_example_is_a_spec():
    page = (ROOT / "docs" / "specs.md").read_text()
    example = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert example
    assert parse_spec(example.group(1), "docs").name == "my-experiment"
    for cls in (*TASKS.values(), RunSpec, CostSpec, TuneSpec, MethodSpec):
        for key in set(cls.model_fields) - {"hyperparameters"}:
            assert f"`{key}`" in page, f"{cls.__name__}.{key}"
