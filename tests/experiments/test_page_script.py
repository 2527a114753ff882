"""The script of the page, run by Node."""

from __future__ import annotations

import math
import statistics
from itertools import accumulate

import pytest

from fadamgc.experiments.report.numbers import ReportedExperiment, curves, mean_curves, read_results
from fadamgc.experiments.report.page import page
from fadamgc.experiments.report.plots import colour, value_limits
from fadamgc.experiments.report.tables import (
    DASH,
    pricing,
    results_table,
)
from fadamgc.experiments.report.write import write_report
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from page_script import drawn
from reported import forge
from tiny_experiments import TINY, spec_of

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("metrics", [[math.inf, math.nan], [math.nan, 1e-4]])
def test_the_script_of_the_page_agrees_about_what_diverged(copy, metrics):
    forge(copy, metrics)
    results = write_report(copy)
    seen = drawn(copy)
    assert seen.minutes == [line[2].text for line in results_table(results).rows]
    for plot in seen.plots.values():
        assert plot["y"]["scale"] == "logarithmic"
        assert all(value > 0 for line in plot["lines"] for value in (*line["y"], *line["low"]))


@pytest.mark.parametrize("per_round", ["mean", "slowest"])
def test_the_script_of_the_page_says_how_rounds_are_priced(copy, per_round):
    cost = {"down_mbps": 0.1, "up_mbps": 0.05, "seconds_per_step": 0.5, "latency": 2.0}
    results = write_report(copy, cost | {"per_round": per_round})
    assert drawn(copy).pricing == pricing(results)


def test_the_script_of_the_page_prices_the_links_of_groups(tmp_path):
    text = """
        name = "groups"
        [task]
        data = "digits"
        clients = 6
        [run]
        rounds = 2
        local_steps = 2
        seeds = [0]
        groups = [[0, 1, 2], [3, 4, 5]]
        executor = "loop"
        [cost]
        group_up_mbps = 0.01
        [[method]]
        algorithm = "mtgc"
        [[method]]
        algorithm = "fedavg"
    """
    run_spec(parse_spec(text, "spec.toml"), tmp_path, workers=1, quiet=True)
    results = write_report(tmp_path)
    page = drawn(tmp_path)
    assert page.pricing == pricing(results)
    assert "of 100 Mbps down and 0.01 Mbps up for groups" in page.pricing
    for runs, priced in zip(results.runs.values(), page.priced, strict=True):
        minutes = [record.simulated_seconds / 60 for record in runs[0].history]
        assert priced == [pytest.approx([minutes[0], sum(minutes)])]


def test_the_script_of_the_page_draws_negative_numbers(copy):
    for label in ("FedAvg", "SCAFFOLD"):
        forge(copy, [-1.0, -3.0], label)
    write_report(copy)
    plot = drawn(copy).plots['[data-plot="0"]']
    assert plot["y"]["scale"] == "linear"
    assert plot["lines"][0]["y"] == [-2.0] * 6


def test_the_page_has_only_numbers_that_json_allows(copy):
    forge(copy, [1e-4, 1e-4], simulated_seconds=math.inf)
    results = read_results(copy)
    (copy / "report.html").write_text(page("title", [ReportedExperiment("title", results)]))
    assert drawn(copy).minutes == [line[2].text for line in results_table(results).rows]
    assert results_table(results).rows[0][2].text == DASH


# What curves show, and over what.


@pytest.fixture(scope="module")
def by_client(tmp_path_factory):
    """An experiment with the metric of each client, and its report."""
    folder = tmp_path_factory.mktemp("clients") / "out"
    run_spec(spec_of(TINY).replace("run", eval_clients=True, rounds=6), folder, workers=1, quiet=True)
    return folder, write_report(folder)


def expected(results, value, label="LocalAdam"):
    """A mean over the runs of a method, for each round."""
    histories = [run.history for run in results.runs[label]]
    return [statistics.fmean(map(value, records)) for records in zip(*histories, strict=True)]


@pytest.mark.parametrize(
    ("y", "value", "kind"),
    [
        ("metric", lambda record: 100 * record.test_metric, "share"),
        ("train_loss", lambda record: math.log(record.train_loss), "logarithmic"),
        ("test_loss", lambda record: math.log(record.test_loss), "logarithmic"),
        ("metrics clients: spread", lambda record: 100 * record.metrics["clients: spread"], "share"),
        (
            "metrics clients: worst tenth",
            lambda record: 100 * record.metrics["clients: worst tenth"],
            "share",
        ),
    ],
)
def test_the_curves_show_what_was_chosen(by_client, y, value, kind):
    folder, results = by_client
    for plot in drawn(folder, y=y).plots.values():
        shown = plot["lines"][0]["y"]
        assert plot["y"]["scale"] == kind
        assert (list(map(math.log, shown)) if kind == "logarithmic" else shown) == pytest.approx(
            expected(results, value), rel=1e-4
        )
        assert (plot["target"] is not None) == (y == "metric")
        assert [value for value in plot["series"][1] if value is not None] == shown
        assert plot["labels"][1::3][:2] == [line["label"] for line in plot["lines"]]
    assert f'<option value="{y}">' in (folder / "report.html").read_text()


def test_the_curves_are_over_the_chosen_axes(by_client):
    folder, results = by_client
    runs = results.runs["LocalAdam"]
    sums = {
        "round": [range(1, 7)],
        "minutes": [accumulate(r.simulated_seconds / 60 for r in run.history) for run in runs],
        "bytes": [accumulate((r.bytes_down + r.bytes_up) / 1e6 for r in run.history) for run in runs],
        "wall": [accumulate(r.wall_seconds for r in run.history) for run in runs],
    }
    for pair in (("round", "minutes"), ("bytes", "wall")):
        for axis, plot in zip(pair, drawn(folder, x=pair).plots.values(), strict=True):
            means = [statistics.fmean(values) for values in zip(*sums[axis], strict=True)]
            assert plot["lines"][0]["x"] == pytest.approx(means, rel=1e-4)


def test_quantities_that_no_run_has_cannot_be_chosen(copy):
    write_report(copy)
    html = (copy / "report.html").read_text()
    assert '<option value="train_loss">' in html
    assert "clients: spread" not in html


def test_the_page_has_the_limits_and_lines_of_the_figure(by_client):
    folder, results = by_client
    low, high = value_limits(mean_curves(results, curves(results)), results.spec.run.target, share=True)
    for plot in drawn(folder).plots.values():
        assert plot["y"]["range"] == pytest.approx([100 * low, 100 * high])
        assert [line["colour"] for line in plot["lines"]] == [colour(0), colour(1)]


def test_the_page_skips_the_steep_first_rounds_as_the_figure_does(copy):
    for label in ("FedAvg", "SCAFFOLD"):
        forge(copy, [[-1000.0, -3.0, -2.5, -2.0, -1.5, -1.0]] * 2, label)
    results = write_report(copy)
    low, high = value_limits(mean_curves(results, curves(results)), results.spec.run.target, share=False)
    assert -4 < low < -3
    for plot in drawn(copy).plots.values():
        assert plot["y"]["range"] == pytest.approx([low, high])
