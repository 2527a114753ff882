"""Reports of runs that diverged, and of metrics that are not above 0."""

from __future__ import annotations

import dataclasses
import io
import math
import re

import pandas as pd
import pytest
from rich.console import Console

from command import fadamgc
from fadamgc.errors import InputError
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.report.means import Spread
from fadamgc.experiments.report.numbers import (
    ReportedExperiment,
    curves,
    mean_curves,
    read_results,
    summary_frame,
)
from fadamgc.experiments.report.plots import summary_figure
from fadamgc.experiments.report.tables import (
    DASH,
    caption,
    results_table,
    summary_markdown,
)
from fadamgc.experiments.report.write import write_report
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from fadamgc.experiments.tune import tune
from fadamgc.paper.study import keep, parse_study, read_members, read_study, write_study, write_study_report
from reported import RUN, SPEC, experiment, forge, spec_of

pytestmark = pytest.mark.usefixtures("quick")
DIVERGES = 10.0  # the model stays finite for some rounds in which its metric is not
STUDY = """
name = "theory"
title = "Least squares"
[study]
axis = "clients"
measures = ["rounds", "final", "average"]
[task]
data = "quadratics"
dim = 3
measure = "gradient"
RUN_SECTION
[[method]]
algorithm = "fadamgc"
[[method]]
algorithm = "fedavg"
eta_l = 0.05
[[experiment]]
name = "two"
value = 2
task = { clients = 2 }
[[experiment]]
name = "four"
value = 4
task = { clients = 4 }
""".replace("RUN_SECTION\n", RUN)


@pytest.fixture
def figures():
    """Real ones, which take their time."""


# Runs that diverged.


@pytest.mark.slow
def test_a_method_that_diverges_leaves_the_table_to_the_others(tmp_path, figures):
    experiment(tmp_path, DIVERGES)
    results = write_report(tmp_path)
    assert not math.isfinite(results.runs["FedAvg"][0].history[-1].test_metric)
    assert [cell.text for cell in results_table(results).rows[0]][1:4] == ["diverged"] * 3
    assert re.fullmatch(r"\d\.\d\de-\d\d ± \d\.\d\de-\d\d", results_table(results).rows[1][3].text)
    assert results_table(results).rows[1][3].bold
    buffer = io.StringIO()
    Console(file=buffer, width=120).print(results_table(results).to_rich(caption(results)))
    texts = [buffer.getvalue()]
    texts += [(tmp_path / name).read_text() for name in ("results.md", "results.tex", "report.html")]
    for text in texts:
        assert "diverged" in text
        assert re.search(r"\d\.\d\d(e-\d\d| \\cdot 10\^\{-\d+\})", text)
    row = pd.read_csv(tmp_path / "results.csv").set_index("method").loc["FedAvg"]
    assert (row["runs"], row["runs_diverged"]) == (2, 2)
    assert math.isnan(row["final_mean"])


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_seed_that_diverges_is_counted_and_not_averaged(copy, value):
    forge(copy, [value, 0.5])
    results = write_report(copy)
    assert results_table(results).rows[0][1].text == "never (0/2, 1 diverged)"
    assert results_table(results).rows[0][3].text == "5.00e-01 (1/2 diverged)"
    assert not results_table(results).rows[0][3].bold
    row = summary_frame(read_results(copy)).set_index("method").loc["FedAvg"]
    assert (row["runs_diverged"], row["final_mean"]) == (1, 0.5)
    assert "diverged" in fadamgc("report", copy).stdout


def test_numbers_too_large_to_add_have_a_mean():
    assert Spread.of([1.5e308, 1.7e308]).mean == pytest.approx(1.6e308)
    assert Spread.of([math.inf, 1.0, 3.0]).mean == 2.0


def test_a_run_that_stopped_is_diverged_in_kept_records_too(copy, tmp_path):
    spec = spec_of(1e30)
    folder = tmp_path / "stopped"
    assert len(run_spec(spec, folder, workers=1, quiet=True)) == 2
    for place in (folder, tmp_path / "kept"):
        results = read_results(place) if place == folder else keep(folder, place) and read_results(place)
        assert [cell.text for cell in results_table(results).rows[0]] == ["FedAvg", *["diverged"] * 3, DASH]
        assert results.missing == 0
    only = spec.only(["fedavg"])
    run_spec(only, tmp_path / "only", workers=1, quiet=True)
    with pytest.raises(InputError, match=r"has no finished run of its spec\nFedAvg, seed 0: client \d"):
        read_results(tmp_path / "only")


def test_a_study_shows_what_diverged(tmp_path):
    study = parse_study(STUDY, "here", "laptop")
    write_study(study, tmp_path)
    for member in study.members:
        run_spec(member.spec, tmp_path / member.spec.name, workers=1, quiet=True)
        forge(tmp_path / member.spec.name, [math.inf, math.nan], "FAdamGC")
    write_study_report(tmp_path)
    for name in ("summary.md", "summary.tex", "bounds.md"):
        text = (tmp_path / name).read_text()
        assert "diverged" in text
        assert not re.search(r"\b(nan|inf)\b", text)
    frame = pd.read_csv(tmp_path / "summary.csv")
    assert frame["runs_diverged"].tolist() == [2, 0, 2, 0]
    experiments = read_members(tmp_path, read_study(tmp_path))
    assert "| two | diverged | **" in summary_markdown(experiments, ["final"])


def test_tuning_counts_a_point_whose_metric_is_not_finite(tmp_path):
    text = (
        SPEC.replace("ETA", "1.0") + "[tune]\neta_l = [0.05, 10.0]\neta_g = [1.0]\nrounds = 6\nseeds = [3]\n"
    )
    spec = parse_spec(text, "test").only(["fedavg"])
    for search in ("full", "race", "halving"):
        tuned = tune(spec.replace("tune", search=search), tmp_path / search, workers=1, quiet=True)
        diverged = {dict(point.values)["eta_l"]: point.diverged for point in tuned.points if point.tried == 6}
        assert diverged[0.05] == 0
        assert diverged.get(10.0, 1) == 1
        assert tuned.spec.methods[0].hyperparameters["eta_l"] == 0.05


# A metric that is not above 0.


@pytest.mark.slow
def test_a_metric_that_is_never_above_0_has_a_linear_axis(copy, figures):
    for label in ("FedAvg", "SCAFFOLD"):
        forge(copy, [-1.0, [-3.0, -2.0, -1.0, 0.0, 0.0, 0.0]], label)
    results = write_report(copy)
    assert not results.logarithmic
    line = mean_curves(results, curves(results))["FedAvg"]
    assert line["mean"].tolist() == [-2.0, -1.5, -1.0, -0.5, -0.5, -0.5]
    experiments = [ReportedExperiment("a", results, 1.0), ReportedExperiment("b", results, 2.0)]
    summary_figure(experiments, "axis", "title", ("final",)).savefig(io.BytesIO())


def test_a_metric_that_is_never_finite_has_no_curve(tmp_path, figures):
    spec = spec_of(DIVERGES, seeds=(0,), rounds=1).only(["fedavg"])
    spec = spec.model_copy(update={"run": spec.run.model_copy(update={"target": None})})
    run_spec(spec, tmp_path, workers=1, quiet=True)
    forge(tmp_path, [math.inf])
    results = write_report(tmp_path)
    assert mean_curves(results, curves(results)) == {}


def test_the_largest_numbers_and_runs_without_rounds_are_reported(copy):
    forge(copy, [1.7e308] * 2)
    results = write_report(copy)
    assert "FedAvg" not in mean_curves(results, curves(results))
    assert results_table(results).rows[0][3].text.startswith("1.70e+308")
    for job in ExperimentFolder(copy).plan(parse_spec((copy / "spec.toml").read_text(), ""))[:2]:
        dataclasses.replace(job.saved(), history=[]).save(job.folder, states=False)
    assert results_table(write_report(copy)).rows[0][3].text == DASH


def test_a_metric_that_is_sometimes_0_has_a_logarithmic_axis_without_that_round(copy):
    forge(copy, [[1.0, 0.1, 0.0, 1e-3, 1e-4, 1e-5]] * 2)
    results = write_report(copy)
    assert results.logarithmic
    line = mean_curves(results, curves(results))["FedAvg"]
    assert line["round"].tolist() == [1, 2, 4, 5, 6]
    assert line["mean"].min() == pytest.approx(1e-5)
