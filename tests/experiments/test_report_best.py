"""Which value of a table is bold: the clearly best one, by paired differences over seeds."""

from __future__ import annotations

import io
import math

import numpy as np
import pytest
from rich.console import Console
from scipy.stats import t as student
from scipy.stats import ttest_rel

from fadamgc.experiments.report.means import T95, Difference
from fadamgc.experiments.report.numbers import CLEARLY_BEST, ReportedExperiment, read_results
from fadamgc.experiments.report.tables import caption, results_markdown, results_table, summary_latex
from fadamgc.experiments.report.write import write_report
from fadamgc.experiments.run.runner import run_spec
from page_script import drawn
from reported import experiment, forge, spec_of

pytestmark = pytest.mark.usefixtures("quick")
FAR, NEAR = [1.0, 1.0, 1.0, 1.0, 1.0, 1e-4], [1.0, 1e-4, 1e-4, 1e-4, 1e-4, 1e-4]  # target 1e-3 in round 6, 2
NEVER = [1.0] * 6


@pytest.fixture(scope="module")
def four_seeds(tmp_path_factory):
    folder = tmp_path_factory.mktemp("four") / "out"
    experiment(folder, seeds=(0, 1, 2, 3))
    return folder


def bold(results):
    """The columns with a bold cell, by method."""
    table = results_table(results)
    return {row[0].text: [table.header[i] for i, cell in enumerate(row) if cell.bold] for row in table.rows}


def test_the_quantiles_are_those_of_the_t_distribution():
    assert pytest.approx(student.ppf(0.975, range(1, 31)), abs=1e-4) == T95


def test_a_difference_is_clear_as_in_a_paired_t_test():
    random = np.random.default_rng(0)
    answers = []
    for seeds in range(2, 9):
        for _ in range(20):
            ours, rival = random.normal(0, 1, seeds), random.normal(random.choice([-2, 2]), 1, seeds)
            test = ttest_rel(rival, ours)
            found = Difference.of((rival - ours).tolist())
            interval = test.confidence_interval(0.95)
            assert (found.mean - found.half, found.mean + found.half) == pytest.approx(interval, abs=1e-3)
            answers.append(found.clear)
            assert answers[-1] == (np.sign(test.statistic) if test.pvalue < 0.05 else 0)
    assert {-1, 0, 1} == set(answers)
    assert Difference.of([5.0]).clear == Difference.of([]).clear == 0


def test_a_mean_that_is_better_by_chance_is_not_bold(four_seeds):
    forge(four_seeds, [FAR, NEAR, NEAR, NEAR])
    forge(four_seeds, [NEAR, FAR, FAR, NEAR], "SCAFFOLD")
    assert bold(read_results(four_seeds)) == {"FedAvg": [], "SCAFFOLD": []}


def test_the_pairs_decide_and_not_the_spread_of_each_method(four_seeds):
    """Seeds differ much more than methods do, and one method is ahead with every seed."""
    forge(four_seeds, [1.0, 10.0, 100.0, 1000.0])
    forge(four_seeds, [0.5, 9.6, 99.5, 999.4], "SCAFFOLD")
    assert bold(read_results(four_seeds)) == {"FedAvg": [], "SCAFFOLD": ["Final excess objective"]}
    forge(four_seeds, [0.5, 9.6, 99.5, 1009.0], "SCAFFOLD")
    assert bold(read_results(four_seeds)) == {"FedAvg": [], "SCAFFOLD": []}


@pytest.mark.parametrize(
    ("fedavg", "scaffold", "best"),
    [
        ([FAR, FAR, FAR, FAR], [NEAR, NEAR, NEAR, NEAR], "SCAFFOLD"),
        ([NEVER, NEVER, NEVER, NEVER], [NEAR, NEAR, NEAR, NEAR], "SCAFFOLD"),
        ([FAR, FAR, FAR, FAR], [NEVER, NEAR, NEAR, NEAR], None),  # the best mean, but not with every seed
        ([NEVER, NEAR, NEAR, NEAR], [NEAR, NEAR, NEAR, NEAR], None),
        ([NEVER, NEVER, NEVER, NEVER], [FAR, FAR, FAR, FAR], None),  # reached it in the last round
        ([math.nan] * 4, [NEAR, NEAR, NEAR, NEAR], "SCAFFOLD"),
        ([math.nan] * 3 + [NEAR], [NEAR, NEAR, NEAR, NEAR], None),  # one pair says nothing
        ([NEVER] * 4, [NEVER] * 4, None),
    ],
)
def test_a_run_that_missed_the_target_counts_with_all_its_rounds(four_seeds, fedavg, scaffold, best):
    """In the tables and in the script of the page, which computes the minutes again."""
    forge(four_seeds, fedavg)
    forge(four_seeds, scaffold, "SCAFFOLD")
    results = write_report(four_seeds)
    assert results.clearly_best["rounds"] == results.clearly_best["minutes"] == best
    assert drawn(four_seeds).best == best
    assert [cell.bold for cell in results_table(results).rows[1][1:3]] == [best == "SCAFFOLD"] * 2
    assert (r"& $\mathbf{2.0} \pm 0.0$" in (four_seeds / "results.tex").read_text()) == (best == "SCAFFOLD")


def test_one_seed_or_one_method_has_no_best(tmp_path):
    experiment(tmp_path / "seed", seeds=(0,))
    forge(tmp_path / "seed", [NEVER])
    assert bold(write_report(tmp_path / "seed")) == {"FedAvg": [], "SCAFFOLD": []}
    assert drawn(tmp_path / "seed").best is None
    run_spec(spec_of().only(["scaffold"]), tmp_path / "method", workers=1, quiet=True)
    assert bold(write_report(tmp_path / "method")) == {"SCAFFOLD": []}
    assert drawn(tmp_path / "method").best is None


def test_every_table_says_what_bold_means(copy):
    results = read_results(copy)
    assert CLEARLY_BEST in results_markdown(results)
    assert summary_latex([ReportedExperiment("a", results)]).startswith("% ")
    assert CLEARLY_BEST in summary_latex([ReportedExperiment("a", results)]).splitlines()[0]
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(results_table(results).to_rich(caption(results), CLEARLY_BEST))
    assert "confidence interval" in console.export_text()
