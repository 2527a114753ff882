"""The curves as pictures, drawn without pyplot."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from fadamgc.escape import printable
from fadamgc.experiments.report.numbers import Results

if TYPE_CHECKING:
    import pandas as pd

# Okabe and Ito's colours, told apart by all kinds of eyes; the last method of a spec, its subject, is red.
COLOURS = ("#0072B2", "#56B4E9", "#009E73", "#E69F00", "#CC79A7", "#7F7F7F", "#000000")
SUBJECT = "#D62728"
X_TITLE = {"round": "round", "minutes": "simulated minutes"}


def colour(number: int, of: int) -> str:
    """The colour of a method, by its place in the spec."""
    return SUBJECT if number == of - 1 else COLOURS[number % len(COLOURS)]


def curves_figure(results: Results, lines: Mapping[str, pd.DataFrame], axes: Sequence[str]) -> Figure:
    """The metric over rounds, over simulated minutes, or both side by side."""
    figure = Figure(figsize=(1.4 + 5.6 * len(axes), 4.4), layout="constrained")
    panels = figure.subplots(1, len(axes), squeeze=False, sharey=True)[0]
    for panel, x in zip(panels, axes, strict=True):
        _draw(panel, results, lines, x)
    metric = printable(results.spec.task.metric)
    panels[0].set_ylabel(f"test {metric}" if results.accuracy else metric, parse_math=False)
    handles = panels[0].get_legend_handles_labels()
    for text in figure.legend(*handles, loc="outside right center", frameon=False).get_texts():
        text.set_parse_math(False)
    figure.suptitle(printable(results.spec.title or results.spec.name), fontsize=12, parse_math=False)
    return figure


def png(figure: Figure) -> bytes:
    """A figure as the bytes of a file."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=150)
    return buffer.getvalue()


def svg(figure: Figure) -> bytes:
    """A figure as the text of an SVG file; the same figure gives the same bytes."""
    from matplotlib import rc_context

    buffer = io.BytesIO()
    with rc_context({"svg.hashsalt": "fadamgc"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    return buffer.getvalue()


ALMOST_ALL = 0.7  # curves that come so high are shown up to 100 %


def _draw(panel: Axes, results: Results, lines: Mapping[str, pd.DataFrame], x: str) -> None:
    labels = list(results.runs)
    for number, label in enumerate(labels):
        if label not in lines:
            continue
        line, shade = lines[label], colour(number, len(labels))
        subject = number == len(labels) - 1
        panel.plot(
            line[x],
            line["mean"],
            color=shade,
            linewidth=2.4 if subject else 1.5,
            label=printable(label),
            zorder=3 + subject,
        )
        panel.fill_between(line[x], line["low"], line["high"], color=shade, alpha=0.12, linewidth=0)
    if results.spec.run.target is not None:
        target = f"target {results.target}"
        panel.axhline(results.spec.run.target, color="0.35", linewidth=1, linestyle=(0, (4, 3)), label=target)
    if results.accuracy:
        panel.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0, symbol=" %"))
        highest = max([*(line["high"].max() for line in lines.values()), results.spec.run.target or 0.0])
        panel.set_ylim(0, 1 if highest > ALMOST_ALL else 1.1 * highest or 1)
    elif results.logarithmic:
        panel.set_yscale("log", nonpositive="mask")
    panel.set_xlim(0, max((line[x].max() for line in lines.values()), default=1))
    panel.set_xlabel(X_TITLE[x])
    panel.grid(color="0.92")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
