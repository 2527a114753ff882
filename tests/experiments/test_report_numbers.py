"""The numbers of a report are those of the records."""

from __future__ import annotations

import csv
import dataclasses
import math
import re
import statistics
from importlib import resources

import pytest

from fadamgc import InputError
from fadamgc.experiments.report.means import Spread
from fadamgc.experiments.report.numbers import read_results, summary_frame
from fadamgc.experiments.report.page import page
from fadamgc.experiments.report.tables import results_markdown, results_table
from fadamgc.experiments.report.write import read_experiment, write_report
from fadamgc.experiments.run.runner import run_spec
from tiny_experiments import QUADRATICS, TINY, records, spec_of


@pytest.mark.slow
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
    results = dataclasses.replace(results, spec=spec_of(TINY).replace("run", target=between))
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
    cheap = {"down_mbps": math.inf, "up_mbps": math.inf, "seconds_per_step": 60.0, "latency": 0.0}
    row = summary_frame(read_results(done, cheap)).set_index("method").loc["FAdamGC (all tracked)"]
    assert row["minutes_mean"] == pytest.approx(4 * row["rounds_mean"])


def test_the_table_in_markdown(done):
    text = results_markdown(read_results(done))
    assert "| " + " | ".join(results_table(read_results(done)).header) + " |" in text
    assert "Rounds to 20 %" in text
    assert "**" not in text  # with two seeds, the order is not clear
    assert "0.1 Mbps down and 0.05 Mbps up, 0.5 s per local step, 1 s latency" in text


def test_the_page_loads_nothing_from_outside(done):
    html = (done / "report.html").read_text()
    ours = html[: html.index("<script>")] + html[html.index("</script>") :]  # without the library
    assert not re.search(r"<script[^>]*\ssrc\s*=|<link\b|<iframe\b|@import|url\(", ours)
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", ours)
    assert "new uPlot" in ours
    assert len(html) < 1_500_000
    licence = (resources.files("fadamgc.experiments.report") / "web" / "uPlot.LICENSE").read_text()
    assert licence in html
    assert ours.count("data:image/png;base64,") == 1
    assert "FAdamGC (all tracked)" in ours
    assert "eta_l = 0.02" in ours
    assert "torch" in ours


def test_equal_label_plots_are_in_a_page_once(done):
    one = read_experiment(done)._replace(name="one", label_plot=b"plot")
    others = [one._replace(name="two"), one._replace(name="three", label_plot=b"another")]
    html = page("A study", [one, *others])
    assert html.count("data:image/png;base64,") == 2
    assert html.count("The same clients as in one") == 1


@pytest.mark.slow
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
