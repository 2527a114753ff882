"""Figures of one experiment and of several, drawn without pyplot.

Matplotlib is imported where a figure is drawn, so that reading records does not wait for it.
"""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from fadamgc.escape import printable
from fadamgc.experiments.report.numbers import TO_TARGET, Experiments, Results, measure_title, method_labels

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Colours that colour-blind readers can tell apart (Okabe and Ito's, and a grey), on white and on black.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#E69F00", "#56B4E9", "#CC79A7", "#7F7F7F")
DASHES = ((), (5, 2), (1.5, 1.5), (6, 2, 1.5, 2))  # lengths of lines and gaps; the next for every 7 methods
WIDTH = 1.6  # of all lines, in points
AXIS_TITLES = {"round": "round", "minutes": "simulated minutes"}
EARLY = 0.2  # share of first rounds, with steep curves, that the limits of an axis ignore
MARGIN = 0.06  # of an axis, above and below the curves


def colour(number: int) -> str:
    """Return the colour of a method, by its number."""
    return COLOURS[number % len(COLOURS)]


def dash(number: int) -> tuple[float, ...]:
    """Return the dash pattern of a method, by its number; () is a solid line."""
    return DASHES[number // len(COLOURS) % len(DASHES)]


def line_style(number: int) -> dict[str, Any]:
    """Return the arguments of a line for matplotlib, by the number of its method."""
    pattern = dash(number)
    return {"color": colour(number), "linewidth": WIDTH, "linestyle": (0, pattern) if pattern else "-"}


def image_files(name: str, figure: Figure) -> dict[str, bytes]:
    """Render a figure as NAME.png, NAME.svg and NAME.pdf."""
    return {f"{name}.png": png(figure), f"{name}.svg": svg(figure), f"{name}.pdf": pdf(figure)}


def png(figure: Figure) -> bytes:
    """Render a figure as PNG."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def svg(figure: Figure) -> bytes:
    """Render a figure as SVG; the same figure gives the same bytes."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "fadamgc"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


def pdf(figure: Figure) -> bytes:
    """Render a figure as PDF with its fonts (Type 42); the same figure gives the same bytes."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"pdf.fonttype": 42}):
        figure.savefig(buffer, format="pdf", metadata={"CreationDate": None})
    return buffer.getvalue()


def tidy(panel: Axes) -> None:
    """Give a panel a light grid and no frame at the top and the right."""
    panel.grid(color="0.92")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def side_legend(
    figure: Figure, handles: Sequence[Artist], labels: Sequence[str], title: str | None = None
) -> None:
    """Add a legend to the right of all panels."""
    legend = figure.legend(handles, labels, title=title, loc="outside right center", frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)


def _add_texts(figure: Figure, title: str) -> None:
    """Add the title, and the legend of the first panel."""
    side_legend(figure, *figure.axes[0].get_legend_handles_labels())
    figure.suptitle(printable(title), fontsize=12, parse_math=False)


def curves_figure(results: Results, averages: Mapping[str, pd.DataFrame], axes: Sequence[str]) -> Figure:
    """Draw ``mean_curves`` over rounds, over simulated minutes, or both side by side."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(1.4 + 5.6 * len(axes), 4.4), layout="constrained")
    panels = figure.subplots(1, len(axes), squeeze=False, sharey=True)[0]
    for panel, x in zip(panels, axes, strict=True):
        _draw_curves(panel, results, averages, x)
    metric = printable(results.spec.task.metric)
    panels[0].set_ylabel(f"test {metric}" if results.accuracy else metric, parse_math=False)
    _add_texts(figure, results.title)
    return figure


def _draw_curves(panel: Axes, results: Results, averages: Mapping[str, pd.DataFrame], x: str) -> None:
    target = results.spec.run.target
    for number, label in enumerate(results.runs):
        if label not in averages:
            continue
        curve, style = averages[label], line_style(number)
        panel.plot(curve[x], curve["mean"], label=printable(label), zorder=3, **style)
        panel.fill_between(
            curve[x], curve["low"], curve["high"], color=style["color"], alpha=0.12, linewidth=0
        )
    if target is not None:
        name = f"target {results.target}"
        panel.axhline(target, color="0.35", linewidth=1, linestyle=(0, (1, 2)), label=name)
    if results.accuracy:
        panel.yaxis.set_major_formatter(lambda value, _: f"{100 * value:.4g} %")
    if results.logarithmic:
        panel.set_yscale("log", nonpositive="mask")
    elif averages:
        panel.set_ylim(*value_limits(averages, target, results.accuracy))
    panel.set_xlim(0, max((curve[x].max() for curve in averages.values()), default=1))
    panel.set_xlabel(AXIS_TITLES[x])
    panel.ticklabel_format(axis="x", scilimits=(-2, 5))  # long numbers would overlap
    tidy(panel)


def value_limits(
    averages: Mapping[str, pd.DataFrame], target: float | None, share: bool
) -> tuple[float, float]:
    """Return the limits of a linear axis that shows the curves after their first rounds, and the target.

    ``share``: the values are shares, from 0 to 1. web/page.js has the same rule.
    """
    first = EARLY * max(curve["round"].max() for curve in averages.values())
    late = [curve[(curve["round"] > first) | (curve.index == curve.index[-1])] for curve in averages.values()]
    values = [value for curve in late for value in (curve["low"].min(), curve["high"].max())]
    values += [] if target is None else [target]
    low, high = min(values), max(values)
    margin = MARGIN * (high - low) or 0.5 * abs(high) or 1.0
    low, high = low - margin, high + margin
    return (max(low, 0.0), min(high, 1.0)) if share else (low, high)


def summary_figure(
    experiments: Experiments, axis: str, title: str, measures: Sequence[str] = TO_TARGET
) -> Figure:
    """Draw measures over the axis of several experiments, one row of panels per group."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(experiment.group for experiment in experiments))
    figure = Figure(figsize=(11, 0.6 + 3.6 * len(groups)), layout="constrained")
    labels = method_labels(experiments)
    rows = figure.subplots(len(groups), len(measures), squeeze=False)
    for group, panels in zip(groups, rows, strict=True):
        members = [experiment for experiment in experiments if experiment.group == group]
        for panel, measure in zip(panels, measures, strict=True):
            _draw_measure(panel, members, labels, measure)
            panel.set_xlabel(printable(members[0].axis or axis), parse_math=False)
            if group is not None:
                panel.set_title(textwrap.fill(printable(group), 44), fontsize=10, parse_math=False)
    _add_texts(figure, title)
    return figure


def _draw_measure(panel: Axes, experiments: Experiments, labels: Sequence[str], measure: str) -> None:
    positive = False  # whether a mean is above 0
    for number, label in enumerate(labels):
        points = sorted(
            (experiment.value, spread.mean, 0.0 if math.isnan(spread.std) else spread.std)
            for experiment in experiments
            for row in experiment.results.rows
            if row.method.label == label and experiment.value is not None
            if not math.isnan((spread := getattr(row, measure)).mean)
        )
        if points:
            x, means, bars = zip(*points, strict=True)
            positive = positive or max(means) > 0
            style = line_style(number)
            panel.errorbar(x, means, yerr=bars, label=printable(label), marker="o", capsize=3, **style)
    title = textwrap.fill(printable(measure_title(experiments, measure).lower()), 32)
    panel.set_ylabel(title, parse_math=False)
    if measure in TO_TARGET or experiments[0].results.accuracy:
        panel.set_ylim(bottom=max(0.0, panel.get_ylim()[0]))
    elif positive:
        panel.set_yscale("log")
    values = sorted({experiment.value for experiment in experiments if experiment.value is not None})
    if values and values[0] > 0 and values[-1] >= 8 * values[0]:
        panel.set_xscale("log")
        panel.set_xticks(values, [f"{value:g}" for value in values])
        panel.minorticks_off()
    tidy(panel)
