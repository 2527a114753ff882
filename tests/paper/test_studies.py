"""The paper's experiments as studies: what they are at both scales, and that they run, stop and go on."""

from __future__ import annotations

import csv
import gzip
import re
from random import Random
from statistics import fmean, mode

import pytest

import sets
from command import fadamgc
from fadamgc import simulate
from fadamgc.errors import InputError
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.planned_run import PlannedRun
from fadamgc.experiments.points import Point
from fadamgc.experiments.report.numbers import ReportedExperiment, experiments_frame, read_results
from fadamgc.experiments.report.plots import summary_figure
from fadamgc.experiments.report.tables import summary_latex, summary_markdown
from fadamgc.experiments.run import execution
from fadamgc.experiments.run.runner import open_folder, run_spec
from fadamgc.experiments.spec.sections import TuneSpec
from fadamgc.experiments.tune import _raced, tune
from fadamgc.paper.study import load_study, parse_study, scales_of, studies
from fadamgc.tasks.build import build_task
from places import ROOT

SEVEN = ["FedAvg-M", "SCAFFOLD-M", "FedAdam", "FedAMS", "LocalAdam", "FA-NT", "FAdamGC"]
SMALL = """
name = "small"
title = "A small study"
[study]
axis = "clients"
tune_on = "two"
[task]
data = "quadratics"
[run]
seeds = [0, 1]
local_steps = 2
[[method]]
algorithm = "local_adam"
[[method]]
algorithm = "fadamgc"
[[experiment]]
name = "four"
value = 4
task = { clients = 4 }
[[experiment]]
name = "two"
value = 2
task = { clients = 2 }
laptop.run = { target = 0.5 }
[laptop.run]
rounds = 3
target = 0.4
[laptop.tune]
eta_l = [1e-9, 0.01]
eta_g = [1.0]
seeds = [7]
rounds = 3
[paper.run]
rounds = 9
[paper.eta_l]
fadamgc = 0.5
[paper.every_method]
tracked = 1
"""


# What they are


@pytest.mark.parametrize(("name", "scale"), [(n, scale) for n in studies() for scale in scales_of(n)])
def test_every_study_is_complete_at_its_scales(name, scale):
    study = load_study(name, scale)
    for member in study.members:
        spec = member.spec
        assert len(spec.run.seeds) == 4
        if name == "theory":  # it has no target: what counts is where a method ends
            assert all("eta_l" in method.hyperparameters for method in spec.methods)
            assert set(study.measures) == {"final", "average"}
            continue
        assert spec.run.target is not None
        for method in spec.methods:
            given = method.hyperparameters
            assert ("eta_l" in given and "eta_g" in given) or spec.tune is not None
            algorithm = method.make()
            if hasattr(algorithm, "beta2") and name != "beta2" and method.algorithm != "fedkeel":
                assert (algorithm.beta1, algorithm.beta2) == (0.9, 0.99)


NOT_RUN = [("ours", "QNLI"), ("ours", "QQP")]  # experiments without records


@pytest.mark.parametrize("name", studies())
def test_every_study_names_the_executor_of_its_records(name):
    for scale in scales_of(name):
        for member in load_study(name, scale).members:
            for_a_gpu = scale == "paper" and getattr(member.spec.task, "model", "") == "resnet18"
            assert (member.spec.run.executor == "auto") == for_a_gpu
    records = ROOT / "results" / name
    if not records.is_dir():  # the curves are those of other studies
        assert name in ("curves", "paper-steps", "regimes")
        return
    for member in load_study(name, scales_of(name)[0]).members:
        folder = records if (records / "runs").is_dir() else records / member.spec.name
        texts = [gzip.decompress(path.read_bytes()) for path in folder.glob("runs/*/run.json.gz")]
        if not texts:
            assert (name, member.spec.name) in NOT_RUN
            continue
        used = [re.search(rb'"executor": "(\w+)", "compiled"', text)[1].decode() for text in texts]
        assert mode(used) == member.spec.run.executor  # timing chose another one for a few


@pytest.mark.parametrize("scale", scales_of("curves"))
def test_the_curves_are_those_of_the_main_studies(scale):
    for member, name in zip(
        load_study("curves", scale).members, ("main-cifar100", "main-20news"), strict=True
    ):
        (main,) = load_study(name, scale).members
        for part in ("task", "run", "cost", "tune", "methods"):
            assert getattr(member.spec, part) == getattr(main.spec, part)


@pytest.mark.parametrize("name", ["main-cifar10", "main-cifar100", "main-tinyimagenet"])
def test_the_main_studies_are_those_of_the_paper(name):
    (paper,) = load_study(name, "paper").members
    task, run = paper.spec.task, paper.spec.run
    assert [m.label for m in paper.spec.methods] == SEVEN
    assert (task.clients, task.alpha, task.model, run.sampled, run.local_steps) == (
        100,
        0.1,
        "resnet18",
        10,
        60,
    )
    assert {m.label: paper.spec.tracked(m) for m in paper.spec.methods if m.tracked} == {
        "FA-NT": 5,
        "FAdamGC": 5,
    }
    assert run.target == {"main-cifar10": 0.75, "main-cifar100": 0.5, "main-tinyimagenet": 0.3}[name]
    steps = {m.label: (m.hyperparameters["eta_l"], m.hyperparameters["eta_g"]) for m in paper.spec.methods}
    tiny = name == "main-tinyimagenet"
    assert steps["FAdamGC"] == (1e-3, 0.3 if tiny else 1.0)
    assert steps["FedAdam"] == (1e-2 if tiny else 3e-2, 1e-3)
    assert steps["SCAFFOLD-M"] == (1e-2, 0.3 if tiny else 1.0)
    (laptop,) = load_study(name, "laptop").members
    for key in ("data", "clients", "partition", "alpha"):
        assert getattr(laptop.spec.task, key) == getattr(task, key)
    assert laptop.spec.run.sampled == run.sampled
    assert [m.label for m in laptop.spec.methods] == SEVEN


def test_half_of_the_sampled_clients_are_tracked_however_many_there_are():
    for member in load_study("participation").members:
        run = member.spec.run
        assert run.sampled == member.value
        assert {member.spec.tracked(m) for m in member.spec.methods} == {run.sampled // 2}


def test_tables_of_a_scale_override_those_of_the_study():
    laptop, paper = (parse_study(SMALL, "here", scale) for scale in ("laptop", "paper"))
    assert [(c.name, c.value, c.spec.task.clients) for c in laptop.members] == [("four", 4, 4), ("two", 2, 2)]
    assert [c.spec.run.target for c in laptop.members] == [0.4, 0.5]
    assert [c.spec.run.rounds for c in paper.members] == [9, 9]
    assert [m.hyperparameters for m in paper.members[0].spec.methods] == [{}, {"eta_l": 0.5}]
    assert {paper.members[0].spec.tracked(m) for m in paper.members[0].spec.methods} == {1}
    assert laptop.members[0].spec.tracked(laptop.members[0].spec.methods[0]) is None
    assert [member.name for member in laptop.ordered()] == ["two", "four"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("fadamgc = 0.5", "fadamg = 0.5"), r"here: \[eta_l\] fadamg is not a method"),
        (('tune_on = "two"', 'tune_on = "three"'), "tune_on='three' is not an experiment; it has four, two"),
        (('name = "four"', 'name = "two"'), "two experiments have the same name"),
        (("rounds = 9", "runds = 9"), r"\[run\] has no key 'runds'"),
        (("[study]", "[study"), "here: not TOML"),
    ],
)
def test_a_mistake_in_a_study_is_named(change, said):
    with pytest.raises(InputError, match=said):
        parse_study(SMALL.replace(*change), "here", "paper")


def test_unknown_studies_and_scales_are_refused():
    with pytest.raises(InputError, match="study 'main-cifar' is not known.*main-cifar10"):
        load_study("main-cifar")
    with pytest.raises(InputError, match="scale='desktop' is not accepted"):
        load_study("digits", "desktop")
    with pytest.raises(InputError, match="study beta2: it has no scale 'desk'; give --scale laptop or paper"):
        load_study("beta2", "desk")
    assert load_study("digits", "desk").members == load_study("digits", "paper").members


# That they run


@pytest.mark.slow
def test_a_study_tunes_on_one_experiment_and_sums_up_all(tmp_path, monkeypatch):
    monkeypatch.setattr("fadamgc.paper.study.load_study", lambda *_: parse_study(SMALL, "here", "laptop"))
    shown = fadamgc("reproduce", "small", "--out", tmp_path / "out", "--workers", 1, "--quiet")
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "out" / "two" / "tuning.csv").exists()
    assert not (tmp_path / "out" / "four" / "tuning.csv").exists()
    both = [read_results(tmp_path / "out" / member).spec for member in ("two", "four")]
    steps = [[m.hyperparameters["eta_l"] for m in spec.methods] for spec in both]
    assert steps[0] == steps[1] == [0.01, 0.01]
    with open(tmp_path / "out" / "summary.csv") as file:
        lines = list(csv.DictReader(file))
    assert [(line["experiment"], line["method"]) for line in lines] == [
        ("four", "LocalAdam"),
        ("four", "FAdamGC"),
        ("two", "LocalAdam"),
        ("two", "FAdamGC"),
    ]
    for name in ("summary.md", "summary.tex", "summary.png", "summary.svg"):
        assert (tmp_path / "out" / name).stat().st_size > 100
    again = fadamgc("reproduce", "small", "--out", tmp_path / "out", "--workers", 1, "--quiet", "--resume")
    assert again.exit_code == 0, again.output
    refused = fadamgc("reproduce", "small", "--out", tmp_path / "out", "--workers", 1, "--quiet")
    assert refused.exit_code == 2
    assert "--resume continues it" in refused.output.replace("\n", " ")


def test_a_study_without_its_data_says_what_to_do(folders, tmp_path):
    folders.mkdir()
    shown = fadamgc("reproduce", "main-cifar10", "--out", tmp_path / "out")
    assert shown.exit_code == 2
    assert "huggingface.co/datasets/uoft-cs/cifar10" in shown.output.replace("\n", "")
    assert not (tmp_path / "out" / "runs").exists()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["main-cifar10", "har"])
def test_the_laptop_scale_runs_from_end_to_end(folders, tmp_path, name):
    (sets.cifar10(folders, train=300) if name != "har" else sets.har(folders))
    words = (
        "--no-tune",
        "--rounds",
        1,
        "--seeds",
        1,
        "--methods",
        "fadamgc,fedadam",
        "--workers",
        1,
        "--quiet",
    )
    shown = fadamgc("reproduce", name, "--out", tmp_path / "out", *words)
    assert shown.exit_code == 0, shown.output
    assert "FAdamGC" in shown.output
    for file in ("report.html", "results.csv", "results.tex", "curves.png", "curves.svg", "partition.png"):
        assert (tmp_path / "out" / file).stat().st_size > 100


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_the_paper_scale_starts_stops_and_resumes(folders, tmp_path):
    """ResNet-18 with a hundred clients, on a cut-down data set and with fewer local steps."""
    sets.cifar10(folders, train=250, test=10)
    (member,) = load_study("main-cifar10", "paper").members
    spec = member.spec.only(["fadamgc"]).replace(
        "run", rounds=2, local_steps=1, sampled=2, seeds=(0,), tracked=1
    )
    spec = spec.model_copy(
        update={"methods": tuple(m.model_copy(update={"tracked": 1}) for m in spec.methods)}
    )
    (job,) = ExperimentFolder(tmp_path / "out").plan(spec)
    task = build_task(job.task, job.seed)
    assert sum(p.numel() for p in task.model.parameters()) == 11_173_962
    whole = simulate(**execution.arguments(job, task), progress=False)
    (tmp_path / "out").mkdir()
    with open_folder(ExperimentFolder(tmp_path / "out"), spec, resume=False, overwrite=False):
        stop_after(job, rounds=1)
    assert (job.folder / "checkpoint").exists()
    assert job.saved() is None
    assert run_spec(spec, tmp_path / "out", workers=1, quiet=True, resume=True) == ()
    for name in ("train_loss", "test_loss", "test_accuracy"):
        assert [getattr(r, name) for r in job.saved().history] == [getattr(r, name) for r in whole.history]


def stop_after(job: PlannedRun, rounds: int):
    done = 0

    def on_round(_: int) -> bool:
        nonlocal done
        done += 1
        return done == rounds

    every, execution.CHECKPOINT_EVERY = execution.CHECKPOINT_EVERY, 1
    try:
        with pytest.raises(execution.Stopped):
            execution.execute([job], on_round)
    finally:
        execution.CHECKPOINT_EVERY = every


# Halving


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_halving_tries_a_few_points_for_long_and_many_for_a_short_time(tmp_path):
    spec = parse_study(SMALL, "here", "laptop").members[1].spec
    grid = {
        "eta_l": (1e-9, 1e-4, 1e-3, 1e-2, 0.1, 0.3),
        "eta_g": (0.5, 1.0),
        "rounds": 18,
        "search": "halving",
    }
    spec = spec.replace("tune", **grid)
    found = tune(spec, tmp_path, workers=1, quiet=True)
    frame = found.to_pandas()
    for label in ("LocalAdam", "FAdamGC"):
        own = frame[frame["method"] == label]
        assert len(own) == 12
        assert sorted(own["rounds_tried"]) == [6] * 8 + [18] * 4
        assert own[own["chosen"]]["rounds_tried"].tolist() == [18]
    again = tune(spec, tmp_path, workers=1, quiet=True, resume=True)
    assert again.spec == found.spec


def outcomes(random, grid, target):
    """What comes of every point with every seed: rounds to the target or None, and the metric at the end."""
    reach, made = random.random(), {}
    for eta_l in grid.eta_l:
        for seed in grid.seeds:
            rounds = random.choice((5, 10, 15, 20, 25)) if random.random() < reach else None
            made[eta_l, seed] = None if random.random() < 0.1 else (rounds, round(random.random(), 1))
    return made


@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_race_chooses_what_the_full_grid_does(count):
    random = Random(count)
    grid = TuneSpec(eta_l=tuple(range(1, 9)), eta_g=(1.0,), seeds=tuple(range(count)), rounds=25)
    spared = 0
    for _ in range(300):
        made = outcomes(random, grid, 0.5)
        tried = {}

        def run(rounds, wanted, seeds, made=made, tried=tried):
            for ((_, eta_l),) in wanted["A"]:
                for seed in seeds:
                    assert (eta_l, seed) not in tried
                    tried[eta_l, seed] = made[eta_l, seed]
            found = []
            for eta_l in grid.eta_l:
                own = [made for (e, _), made in tried.items() if e == eta_l]
                ended = [one for one in own if one is not None]
                reached = [rounds for rounds, _ in ended if rounds is not None]
                found.append(
                    Point(
                        *("A", (("eta_l", eta_l),), len(reached), fmean(reached) if reached else None),
                        final=fmean(final for _, final in ended) if ended else None,
                        diverged=len(own) - len(ended),
                        goal="max",
                        tried=rounds,
                        seeds=len(own),
                    )
                )
            return found

        raced = min(_raced(grid, {"A": [(("eta_l", e),) for e in grid.eta_l]}, run, least=5), key=Point.rank)
        spared += len(made) - len(tried)
        tried.clear()
        full = min(run(25, {"A": [(("eta_l", e),) for e in grid.eta_l]}, grid.seeds), key=Point.rank)
        assert raced == full
    assert (spared > 0) == (count > 1)


@pytest.mark.slow
@pytest.mark.usefixtures("without_figures")
def test_a_race_makes_fewer_runs(tmp_path):
    spec = parse_study(SMALL, "here", "laptop").members[1].spec.replace("run", target=15.0)
    grid = {"eta_l": (1e-9, 1e-8, 1e-7, 1e-2, 0.1), "eta_g": (1.0,), "seeds": (100, 101, 102), "rounds": 18}
    full = tune(spec.replace("tune", **grid), tmp_path / "full", workers=1, quiet=True)
    raced = tune(spec.replace("tune", **grid, search="race"), tmp_path / "race", workers=1, quiet=True)
    assert raced.spec.methods == full.spec.methods
    runs = {way: len(list((tmp_path / way).glob("tuning/*/*/run.json"))) for way in ("full", "race")}
    assert runs["full"] == 2 * 5 * 3
    assert 2 * 5 < runs["race"] < runs["full"]
    frame = raced.to_pandas()
    assert frame["seeds_tried"].sum() == runs["race"]
    assert set(frame[frame["chosen"]]["seeds_tried"]) == {3}
    again = tune(
        spec.replace("tune", **grid, search="race"), tmp_path / "full", workers=1, quiet=True, resume=True
    )
    assert again.to_pandas().equals(frame)  # though there are more runs in that folder


def test_the_tune_command_writes_the_grid_and_the_tuned_spec(tmp_path):
    spec = parse_study(SMALL, "here", "laptop").members[1].spec
    (tmp_path / "spec.toml").write_text(spec.to_toml())
    words = ("--out", tmp_path / "out", "--workers", 1, "--quiet")
    shown = fadamgc("tune", tmp_path / "spec.toml", *words)
    assert shown.exit_code == 0, shown.output
    assert "eta_l = 0.01" in (tmp_path / "out" / "tuned.toml").read_text()
    assert not (tmp_path / "out" / "runs").exists()


# Tables


@pytest.fixture
def experiments(tmp_path):
    found = []
    for member in parse_study(SMALL, "here", "laptop").members:
        spec = member.spec.replace("run", target=1e9 if member.name == "two" else 1e-30)
        methods = tuple(m.with_(eta_l=0.01) for m in spec.methods)
        run_spec(spec.model_copy(update={"methods": methods}), tmp_path / member.name, workers=1, quiet=True)
        found.append(ReportedExperiment(member.name, read_results(tmp_path / member.name), member.value))
    return found


@pytest.mark.slow
def test_summaries_show_what_was_reached_and_what_was_not(experiments):
    frame = experiments_frame(experiments)
    assert frame["runs_reached"].tolist() == [0, 0, 2, 2]
    text = summary_markdown(experiments)
    assert "| four | never (0/2) | never (0/2) |" in text
    assert "| two | 1.0 ± 0.0 | 1.0 ± 0.0 |" in text  # equal: none is best
    tex = summary_latex(experiments)
    assert r"$1.0 \pm 0.0$ & $1.0 \pm 0.0$" in tex
    assert "never (0/2)" in tex
    assert tex.count(r"\\") == 1 + 3 * len(experiments)  # rounds, minutes, final
    drawn = summary_figure(experiments, "clients", "title")
    assert len(drawn.axes) == 2
