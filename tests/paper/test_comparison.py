"""The paper's numbers next to ours: the bounds of the theorems, and the page of all results."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from fadamgc.bundle import read_bundle
from fadamgc.cli.main import app
from fadamgc.errors import CheckpointError, InputError
from fadamgc.experiments.report.numbers import read_results
from fadamgc.experiments.report.tables import results_markdown
from fadamgc.experiments.report.write import write_report
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.sections import MethodSpec
from fadamgc.experiments.spec.toml_io import preset, spec_of
from fadamgc.paper import comparison, overview, theory
from fadamgc.paper.published import BETA2, MAIN, METHODS
from fadamgc.paper.study import keep, parse_study, read_members, read_study, write_study, write_study_report
from fadamgc.paper.theory import Bound, Constants, bound, constants, slope
from fadamgc.tasks.build import build_task
from places import ROOT

STUDY = """
name = "theory"
title = "Least squares"
[study]
axis = "clients"
measures = ["final", "average"]
[task]
data = "linear_regression"
measure = "gradient"
dim = 3
samples = 20
[run]
rounds = 4
local_steps = 2
batch_size = 4
seeds = [0, 1]
dtype = "float64"
[[method]]
algorithm = "fa_nt"
[[method]]
algorithm = "fadamgc"
[[method]]
algorithm = "fadamgc"
label = "special"
beta2 = 0.0
eps = 0.0
[[experiment]]
name = "few"
value = 2
task = { clients = 2 }
[[experiment]]
name = "many"
value = 8
axis = "people"
task = { clients = 8 }
"""


def theory_spec(**task):
    return spec_of(
        {
            "task": {"data": "linear_regression", "measure": "gradient", "clients": 3, "dim": 4, **task},
            "run": {"rounds": 2, "local_steps": 2, "batch_size": 5},
            "method": [{"algorithm": "fadamgc"}],
        }
    )


# Theory


def test_the_gradient_measure_is_the_gradient_of_the_mean_objective():
    task = build_task(theory_spec(samples=[5, 30]).task, seed=3)
    model = task.model.double()
    objective = torch.stack([task.loss(model(X), Y) for X, Y in task.clients]).mean()
    (g,) = torch.autograd.grad(objective, list(model.parameters()))
    X, Y = task.test
    with torch.no_grad():
        found = float(task.metric(model(X), Y))
    assert found == pytest.approx(float(g.square().sum()), rel=1e-10)


def test_the_constants_are_those_of_the_problem():
    spec = theory_spec(samples=40)
    c = constants(spec, seed=5)
    task = build_task(spec.task, seed=5)
    w = next(iter(task.model.parameters())).detach().double()[0]
    data = [(X, Y[:, 0]) for X, Y in task.clients]
    assert pytest.approx(max(torch.linalg.matrix_norm(X.T @ X / 40, 2).item() for X, _ in data)) == c.L
    X, Y = torch.cat([X for X, _ in data]), torch.cat([Y for _, Y in data])
    best = torch.linalg.lstsq(X, Y[:, None]).solution[:, 0]  # equal sizes: the optimum of all samples
    f = [0.5 * (X @ v - Y).square().mean().item() for v in (w, best)]
    assert pytest.approx(f[0] - f[1]) == c.F
    rng = np.random.default_rng(0)
    spreads, norms = [], []
    for v in (w, best):
        for X_i, Y_i in data:
            each = (X_i * (X_i @ v - Y_i)[:, None]).numpy()
            drawn = np.array([each[rng.permutation(40)[:5]].mean(axis=0) for _ in range(4000)])
            spreads.append(math.sqrt(((drawn - each.mean(axis=0)) ** 2).sum(axis=1).mean()))
            norms.append(np.linalg.norm(drawn, axis=1).max())
    assert c.sigma == pytest.approx(max(spreads), rel=0.03)
    assert max(norms) <= c.G


def method(algorithm, **numbers):
    return MethodSpec(algorithm=algorithm, label=algorithm, hyperparameters=numbers)


C = Constants(L=4.0, F=9.0, sigma=2.0, G=3.0, B=5.0)


def test_bounds_by_hand():
    norm, leading, rest = bound(C, method("fadamgc", eps=1.0), n=4, K=4, T=4)
    assert (norm, leading) == ("|grad f|^2", pytest.approx(2 * 1.5))
    moments = (2 / 0.09**2 + 4 * 0.01) * 729
    assert rest == pytest.approx((36 + moments + 4 * 0.1 * 13) / 4)
    _, same, naive = bound(C, method("fa_nt", eps=1.0), n=4, K=4, T=4)
    assert same == leading
    assert naive - rest == pytest.approx((16 - 4) * 0.1 * 13 / 4)
    norm, leading, rest = bound(C, method("fadamgc", beta2=0.0, eps=0.0), n=4, K=4, T=4)
    assert (norm, leading, rest) == ("|grad f|", 1.5, (36 + 4 * (4 + 2)) / 4)
    _, leading, rest = bound(C, method("fa_nt", beta2=0.0, eps=0.0), n=4, K=4, T=4)
    assert (leading, rest) == (0.75, (36 + 4 * (4 + 2 + 20)) / 4)
    assert bound(C, method("local_adam"), n=4, K=4, T=4) is None
    assert bound(C, method("fadamgc", beta2=0.0), n=4, K=4, T=4) is None


def test_the_slope_is_the_exponent():
    lines = [Bound("", "g", "m", n, K, 9, "|grad f|", 7 * (n * K) ** -0.4, 1, 1) for n, K in ((2, 2), (4, 8))]
    assert slope(lines) == pytest.approx(-0.4)
    assert theory.speed_ups(lines) == [("g", "m", pytest.approx(-0.4))]
    assert theory.speed_ups(lines[:1]) == []


# The paper's numbers


def test_the_papers_tables_are_complete():
    for row in (*MAIN.values(), *BETA2.values()):
        assert row.rounds.keys() == row.minutes.keys()
    assert all(tuple(row.rounds) == METHODS for row in MAIN.values())
    best = [
        name for name, row in MAIN.items() if min(row.rounds, key=lambda m: row.rounds[m][0]) == "fadamgc"
    ]
    assert best == list(MAIN)
    for dataset, name in (("CIFAR-10", "main-cifar10"), ("CIFAR-100", "main-cifar100")):
        assert BETA2[dataset].rounds["FAdamGC, b2 = 0.99"] == MAIN[name].rounds["fadamgc"]


# The page


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Results of two names that the paper has, though not of its data."""
    root = tmp_path_factory.mktemp("results")
    spec = preset("digits").replace("run", rounds=3, seeds=(0, 1), target=0.3)
    run_spec(spec, root / "main-cifar10", workers=1, quiet=True)
    write_report(root / "main-cifar10")
    study = parse_study(STUDY, "here", "laptop")
    write_study(study, root / "theory")
    for member in study.members:
        run_spec(member.spec, root / "theory" / member.spec.name, workers=1, quiet=True)
    write_study_report(root / "theory")
    return root


@pytest.mark.slow
def test_the_page_has_the_papers_row_next_to_ours(root, tmp_path):
    (root / "main-cifar10" / "notes.md").write_text("Because these are digits.")
    comparison.main([str(root), str(tmp_path / "page.md")])
    text = (tmp_path / "page.md").read_text()
    line = next(line for line in text.splitlines() if line.startswith("| rounds to 75%, paper"))
    assert line.split(" | ")[1:3] == ["1014.5 ± 250.3", "544.3 ± 59.9"]
    results = read_results(root / "main-cifar10")
    ours = next(line for line in text.splitlines() if line.startswith("| rounds to 30 %, here"))
    found = [run.rounds_to(0.3) for run in results.runs["FedAvg-M"]]
    assert ours.split(" | ")[1].startswith(f"{sum(found) / 2:.1f} ±" if all(found) else "never")
    counts = re.search(r"\*\*Rounds\*\*: of 21 pairs of methods (\d+) .*?, (\d+) .*?, and (\d+) ", text)
    assert sum(map(int, counts.groups())) == 21
    assert "**Why.** Because these are digits." in text
    assert text.index("## main-cifar10") < text.index("## theory")


@pytest.mark.slow
def test_links_on_the_page_lead_somewhere(root, tmp_path):
    to = tmp_path / "page.md"
    text = comparison.page(root, to)
    (root / overview.FIGURE).touch()  # the command draws it
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert len(links) >= 5
    pages = {"which.md"}  # next to the page in docs/
    assert [link for link in links if link not in pages and not (tmp_path / link).exists()] == []
    assert all((ROOT / "docs" / page).exists() for page in pages & {*links})


@pytest.mark.slow
def test_bounds_are_written_next_to_measurements(root):
    experiments = read_members(root / "theory", read_study(root / "theory"))
    lines = theory.bounds(experiments)
    assert [(b.experiment, b.method, b.n) for b in lines] == [
        (member, name, n)
        for member, n in (("few", 2), ("many", 8))
        for name in ("FA-NT", "FAdamGC", "special")
    ]
    runs = experiments[0].results.runs["special"]
    norms = [[math.sqrt(record.test_metric) for record in run.history] for run in runs]
    assert lines[2].measured == pytest.approx(np.mean(norms))
    text = (root / "theory" / "bounds.md").read_text()
    assert f"| {lines[2].measured:.3g} |" in text
    for name in ("bounds.png", "summary.png", "report.html"):
        assert (root / "theory" / name).stat().st_size > 1000
    summary = (root / "theory" / "summary.md").read_text()
    assert "Squared gradient norm at the end" in summary
    assert "squared gradient norm, mean over the rounds" in summary.lower()


@pytest.mark.slow
def test_what_is_kept_makes_the_same_report(root, tmp_path):
    for name in ("main-cifar10", "theory"):
        assert keep(root / name, tmp_path / name) > 1000
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert not any(path.suffix in (".safetensors", ".html") for path in files)
    runs = [path for path in files if path.parent.parent.name == "runs"]
    assert runs
    assert {path.name for path in runs} == {"run.json.gz"}
    runs[0].write_bytes(runs[0].read_bytes()[:-20])
    with pytest.raises(CheckpointError, match="may be truncated"):
        read_bundle(runs[0].parent, "run")
    for name in ("main-cifar10", "theory"):
        keep(root / name, tmp_path / name)
    copy, original = (read_results(folder / "main-cifar10") for folder in (tmp_path, root))
    assert results_markdown(copy) == results_markdown(original)
    write_study_report(tmp_path / "theory")
    for name in ("summary.md", "summary.csv", "bounds.md"):
        assert (tmp_path / "theory" / name).read_bytes() == (root / "theory" / name).read_bytes()
    with pytest.raises(InputError, match=r"has no spec\.toml and no study\.json"):
        keep(tmp_path, tmp_path / "again")


@pytest.mark.slow
def test_a_study_is_priced_again_by_report(root, tmp_path):
    keep(root / "theory", tmp_path / "theory")
    shown = CliRunner().invoke(app, ["report", str(tmp_path / "theory"), "--up-mbps", "1"])
    assert shown.exit_code == 0, shown.output
    assert (tmp_path / "theory" / "summary.csv").read_bytes() == (
        root / "theory" / "summary.csv"
    ).read_bytes()
    assert (tmp_path / "theory" / "report.html").exists()


@pytest.mark.slow
def test_a_folder_of_another_study_is_refused(root, tmp_path):
    keep(root / "theory", tmp_path / "theory")
    other = parse_study(STUDY.replace('name = "theory"', 'name = "other"', 1), "here", "laptop")
    with pytest.raises(InputError, match="has the study theory at scale laptop"):
        write_study(other, tmp_path / "theory")
    (tmp_path / "theory" / "study.json").write_text("{")
    with pytest.raises(InputError, match=r"study\.json: not what"):
        read_study(tmp_path / "theory")
