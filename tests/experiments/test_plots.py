"""The figures: all methods drawn alike, axes that show the differences, vector formats."""

from __future__ import annotations

import itertools

import pandas as pd
import pytest

from fadamgc.experiments.report.numbers import ReportedExperiment, curves, mean_curves, read_results
from fadamgc.experiments.report.plots import (
    COLOURS,
    DASHES,
    colour,
    curves_figure,
    dash,
    image_files,
    summary_figure,
    value_limits,
)
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from reported import SPEC


def figure_of(results):
    return curves_figure(results, mean_curves(results, curves(results)), ("round", "minutes"))


def rising(*values, band=0.0):
    rounds = range(1, len(values) + 1)
    frame = pd.DataFrame({"round": rounds, "minutes": rounds, "mean": values})
    return frame.assign(low=frame["mean"] - band, high=frame["mean"] + band)


@pytest.mark.slow
def test_a_pdf_has_its_fonts_and_the_same_bytes_each_time(done):
    results = read_results(done)
    first, again = (image_files("curves", figure_of(results)) for _ in range(2))
    assert set(first) == {"curves.png", "curves.svg", "curves.pdf"}
    assert first == again
    data = first["curves.pdf"]
    assert data.startswith(b"%PDF")
    assert b"/FontFile2" in data  # Type 42; journals refuse Type 3
    assert b"/Type3" not in data
    assert b"/CreationDate" not in data
    assert (done / "curves.pdf").read_bytes().startswith(b"%PDF")


def test_more_methods_than_colours_differ_in_their_dashes():
    count = len(COLOURS) * len(DASHES)
    styles = {(colour(number), dash(number)) for number in range(count)}
    assert len(styles) == count
    assert {dash(number) for number in range(len(COLOURS))} == {()}


def test_all_methods_are_drawn_alike(tmp_path):
    more = "".join(
        f'[[method]]\nalgorithm = "fedavg"\nlabel = "{i}"\neta_l = 0.05\n' for i in range(len(COLOURS))
    )
    spec = parse_spec(SPEC.replace("ETA", "0.05") + more, "test").replace("run", rounds=2, seeds=(0,))
    run_spec(spec, tmp_path, workers=1, quiet=True)
    results = read_results(tmp_path)
    experiments = [ReportedExperiment(name, results, value) for name, value in (("a", 1.0), ("b", 2.0))]
    for figure in (figure_of(results), summary_figure(experiments, "axis", "title", ("final",))):
        for panel in figure.axes:
            lines = [line for line in panel.lines if len(line.get_xdata()) > 1 and line.get_color() != "0.35"]
            lines = [line for line in lines if line.get_linestyle() != "None"]
            assert len(lines) == len(spec.methods)
            assert len({line.get_linewidth() for line in lines}) == 1
            assert len({line.get_zorder() for line in lines}) == 1
            drawn = [(line.get_color(), str(line._unscaled_dash_pattern)) for line in lines]
            assert all(a != b for a, b in itertools.combinations(drawn, 2))


def test_the_limits_show_the_differences_and_not_zero():
    averages = {
        "a": rising(0.1, 0.5, 0.88, 0.90, 0.91, 0.92, 0.93, 0.94, 0.945, 0.95),
        "b": rising(0.1, 0.4, 0.85, 0.86, 0.87, 0.88, 0.88, 0.89, 0.9, 0.9),
    }
    low, high = value_limits(averages, 0.9, share=True)
    assert 0.84 < low < 0.85
    assert 0.95 < high < 0.96
    low, high = value_limits(averages, 0.2, share=True)  # the target is always in the figure
    assert 0.1 < low < 0.2
    assert value_limits({"a": rising(0.98, 0.99, 1.0, band=0.1)}, None, share=True)[1] == 1.0
    assert value_limits({"a": rising(0.0, 0.1, 0.01, band=0.2)}, None, share=True)[0] == 0.0
    assert value_limits({"a": rising(-3.0, -2.0)}, None, share=False) == pytest.approx((-3.06, -1.94))
    low, high = value_limits({"a": rising(5.0)}, None, share=False)  # a single value
    assert low < 5.0 < high


def test_a_figure_of_accuracies_does_not_start_at_zero(done):
    results = read_results(done)
    limits = value_limits(mean_curves(results, curves(results)), 0.2, share=True)
    for panel in figure_of(results).axes:
        assert panel.get_ylim() == pytest.approx(limits)
        assert panel.yaxis.get_major_formatter()(0.9) == "90 %"
