"""The script of the page, run by Node."""

from __future__ import annotations

import math

import pytest

from fadamgc.experiments.report.numbers import (
    ReportedExperiment,
    read_results,
)
from fadamgc.experiments.report.page import page
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

pytestmark = pytest.mark.usefixtures("quick")


@pytest.mark.parametrize("metrics", [[math.inf, math.nan], [math.nan, 1e-4]])
def test_the_script_of_the_page_agrees_about_what_diverged(copy, metrics):
    forge(copy, metrics)
    results = write_report(copy)
    seen = drawn(copy)
    assert seen.minutes == [line[2].text for line in results_table(results).rows]
    for plot in seen.plots.values():
        assert plot["layout"]["yaxis"]["type"] == "log"
        assert all(value is not None and value > 0 for trace in plot["traces"] for value in trace["y"])


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
    plot = drawn(copy).plots['[data-axis="round"]']
    assert plot["layout"]["yaxis"]["type"] == "linear"
    assert plot["traces"][1]["y"] == [-2.0] * 6


def test_the_page_has_only_numbers_that_json_allows(copy):
    forge(copy, [1e-4, 1e-4], simulated_seconds=math.inf)
    results = read_results(copy)
    (copy / "report.html").write_text(page("title", [ReportedExperiment("title", results)]))
    assert drawn(copy).minutes == [line[2].text for line in results_table(results).rows]
    assert results_table(results).rows[0][2].text == DASH
