"""Several experiments in one table of the paper's shape, a row each, a column a method, and in a figure."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fadamgc import escape
from fadamgc.errors import InputError
from fadamgc.experiments.report.numbers import (
    DASH,
    DIVERGED,
    Results,
    Row,
    Spread,
    diverged_note,
    minutes_format,
    rows,
)
from fadamgc.experiments.report.plots import colour, png, svg
from fadamgc.files import write_atomic

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

TO_TARGET = ("rounds", "minutes")
TITLES = {
    "rounds": "Rounds to target",
    "minutes": "Simulated minutes to target",
    "final": "{metric} at the end",
    "average": "{metric}, mean over the rounds",
}


class Entry(NamedTuple):
    """An experiment of the table."""

    name: str
    results: Results
    value: float | None = None  # on the axis of a figure
    group: str | None = None  # drawn together
    axis: str | None = None  # if it is not that of the others


def methods_of(entries: Sequence[Entry]) -> list[str]:
    """The labels of all methods, in the order in which they come."""
    return list(dict.fromkeys(label for entry in entries for label in entry.results.runs))


def table(entries: Sequence[Entry]) -> pd.DataFrame:
    """One row for each experiment and method."""
    import pandas as pd

    lines = [
        {
            "experiment": entry.name,
            "value": entry.value,
            "method": row.method.label,
            "target": entry.results.spec.run.target,
            "runs": row.runs,
            "runs_reached": row.reached,
            "runs_diverged": row.diverged,
            **{
                f"{measure}_{part}": getattr(getattr(row, measure), part)
                for measure in TITLES
                for part in ("mean", "std")
            },
        }
        for entry in entries
        for row in rows(entry.results)
    ]
    return pd.DataFrame(lines)


def title_of(entries: Sequence[Entry], measure: str) -> str:
    """What a measure is called."""
    metrics = list(dict.fromkeys(entry.results.spec.task.metric for entry in entries))
    title = TITLES[measure].format(metric=" or ".join(metrics))
    return title[0].upper() + title[1:]


class Number(NamedTuple):
    """What a cell of the table shows."""

    spread: Spread
    note: str  # where not all seeds reached the target, or some diverged
    best: bool
    form: str = ".1f"
    instead: str = ""  # what is shown where there is no number

    @property
    def mean(self) -> str:
        """The mean as text."""
        return f"{self.spread.mean:{self.form}}"

    @property
    def std(self) -> str:
        """The standard deviation as text, empty if there is none."""
        return "" if math.isnan(self.spread.std) else f"{self.spread.std:{self.form}}"


def grid(
    entries: Sequence[Entry], measure: str, as_alone: bool = False
) -> list[tuple[str, list[Number | None]]]:
    """The table of one measure: an experiment's name, and a number for each method.

    Only a method that reached the target with every seed can be the best; or that finished with every seed,
    where the measure is the metric itself. ``as_alone``: minutes are as precise as in the experiment's own
    table.
    """
    labels = methods_of(entries)
    lines = []
    for entry in entries:
        found: dict[str, Row] = {row.method.label: row for row in rows(entry.results)}
        seeds, accuracy = len(entry.results.spec.run.seeds), entry.results.accuracy
        reach, target = measure in TO_TARGET, entry.results.spec.run.target
        minutes = minutes_format(list(found.values())) if as_alone and measure == "minutes" else ".1f"
        ended = {label: r.reached if reach else r.runs - r.diverged for label, r in found.items()}
        means = [getattr(r, measure).mean for label, r in found.items() if ended[label] == seeds]
        whole = [mean for mean in means if not math.isnan(mean)]
        best = (max if accuracy and not reach else min)(whole, default=math.nan)
        line: list[Number | None] = []
        for label in labels:
            row = found.get(label)
            if row is None or not row.runs:
                line.append(None)
                continue
            spread = getattr(row, measure)
            count, of = ended[label], row.runs if reach else seeds
            note = "" if count == of else f"{count}/{of}"
            if note and row.diverged:
                note += f", {row.diverged} {DIVERGED}"
            instead = f"never ({note})" if reach and target is not None else DASH
            instead = DIVERGED if row.all_diverged and (target is not None or not reach) else instead
            form = minutes if reach else ".1%" if accuracy else ".2e"
            line.append(Number(spread, note, count == seeds and spread.mean == best, form, instead))
        lines.append((entry.name, line))
    return lines


def markdown(entries: Sequence[Entry], measures: Sequence[str] = TO_TARGET) -> str:
    """The tables in Markdown."""
    labels = methods_of(entries)
    parts = []
    for measure in measures:
        titles = [title_of(entries, measure), *labels]
        head = "| " + " | ".join(map(escape.markdown, titles)) + " |"
        lines = [head, "|:--" + "|--:" * len(labels) + "|"]
        for name, numbers in grid(entries, measure):
            lines.append(f"| {escape.markdown(name)} | " + " | ".join(map(_markdown, numbers)) + " |")
        parts.append("\n".join(lines))
    did = "reached the target" if set(measures) <= set(TO_TARGET) else "finished"
    said = (
        f"Mean ± sample standard deviation over the seeds that {did}; (k/n): k of n seeds did. "
        "Bold: the best of those that always did."
        + diverged_note([row for entry in entries for row in rows(entry.results)])
    )
    return "\n\n".join(parts) + f"\n\n{said}\n"


def _markdown(number: Number | None) -> str:
    if number is None:
        return DASH
    if math.isnan(number.spread.mean):
        return number.instead
    text = number.mean + (f" ± {number.std}" if number.std else "")
    text = f"**{text}**" if number.best else text
    return f"{text} ({number.note})" if number.note else text


def latex(entries: Sequence[Entry], measures: Sequence[str] = TO_TARGET, as_alone: bool = False) -> str:
    """The tables as one LaTeX tabular (needs booktabs); ``as_alone`` as of ``grid``."""
    labels = methods_of(entries)
    lines = [
        r"\begin{tabular}{ll" + "c" * len(labels) + "}",
        r"\toprule",
        "Measure & Data & " + " & ".join(map(escape.latex, labels)) + r" \\",
    ]
    for measure in measures:
        lines.append(r"\midrule")
        title = escape.latex(title_of(entries, measure))
        for i, (name, numbers) in enumerate(grid(entries, measure, as_alone)):
            cells = [title if i == 0 else "", escape.latex(name), *map(_latex, numbers)]
            lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex(number: Number | None) -> str:
    if number is None:
        return "--"
    if math.isnan(number.spread.mean):
        return "--" if number.instead == DASH else number.instead
    mean = _in_math(number.mean)
    mean = rf"\mathbf{{{mean}}}" if number.best else mean
    std = rf" \pm {_in_math(number.std)}" if number.std else ""
    return f"${mean}{std}$" + (f" ({number.note})" if number.note else "")


def _in_math(number: str) -> str:
    """A number as mathematics: 2.13e-06 is 2.13 times a power of ten.

    >>> _in_math("2.13e-06")
    '2.13 \\\\cdot 10^{-6}'
    """
    return re.sub(r"e([+-]\d+)", lambda found: rf" \cdot 10^{{{int(found[1])}}}", escape.latex(number))


def figure(entries: Sequence[Entry], axis: str, title: str, measures: Sequence[str] = TO_TARGET) -> Figure:
    """The measures over what the experiments vary."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(entry.group for entry in entries))
    made = Figure(figsize=(11, 0.6 + 3.6 * len(groups)), layout="constrained")
    labels = methods_of(entries)
    for group, panels in zip(groups, made.subplots(len(groups), len(measures), squeeze=False), strict=True):
        own = [entry for entry in entries if entry.group == group]
        for panel, measure in zip(panels, measures, strict=True):
            _draw(panel, own, labels, measure)
            panel.set_xlabel(escape.printable(own[0].axis or axis), parse_math=False)
            if group is not None:
                panel.set_title(escape.printable(group), fontsize=10, parse_math=False)
    handles = made.axes[0].get_legend_handles_labels()
    for text in made.legend(*handles, loc="outside right center", frameon=False).get_texts():
        text.set_parse_math(False)
    made.suptitle(escape.printable(title), fontsize=12, parse_math=False)
    return made


def _draw(panel: Axes, entries: Sequence[Entry], labels: Sequence[str], measure: str) -> None:
    values = sorted({entry.value for entry in entries if entry.value is not None})
    lines = grid(entries, measure)
    above = False  # whether a mean is above 0
    for number, label in enumerate(labels):
        points = []
        for entry, (_, numbers) in zip(entries, lines, strict=True):
            cell = dict(zip(methods_of(entries), numbers, strict=True)).get(label)
            if entry.value is not None and cell is not None and not math.isnan(cell.spread.mean):
                bar = 0.0 if math.isnan(cell.spread.std) else cell.spread.std
                points.append((entry.value, cell.spread.mean, bar))
        if points:
            x, mean, bars = zip(*sorted(points), strict=True)
            shade = colour(number, len(labels))
            above = above or max(mean) > 0
            named = escape.printable(label)
            panel.errorbar(x, mean, yerr=bars, label=named, color=shade, marker="o", capsize=3)
    panel.set_ylabel(escape.printable(title_of(entries, measure).lower()), parse_math=False)
    if measure in TO_TARGET or entries[0].results.accuracy:
        panel.set_ylim(bottom=0)
    elif above:
        panel.set_yscale("log")
    if values and values[0] > 0 and values[-1] >= 8 * values[0]:
        panel.set_xscale("log")
        panel.set_xticks(values, [f"{v:g}" for v in values])
        panel.minorticks_off()
    panel.grid(color="0.92")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def write_summary(
    folder: Path,
    entries: Sequence[Entry],
    title: str,
    axis: str | None = None,
    measures: Sequence[str] = TO_TARGET,
) -> list[Path]:
    """The tables of several experiments (CSV, Markdown, LaTeX), and their figure where there is an axis."""
    files = {
        "summary.csv": escape.csv_bytes(table(entries)),
        "summary.md": f"# {escape.markdown(title)}\n\n{markdown(entries, measures)}".encode(),
        "summary.tex": latex(entries, measures).encode(),
    }
    if axis is not None:
        drawn = figure(entries, axis, title, measures)
        files |= {"summary.png": png(drawn), "summary.svg": svg(drawn)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomic(folder / name, data)
    except OSError as error:
        raise InputError(f"out={str(folder)!r} cannot be written: {error.strerror}") from None
    return [folder / name for name in files]
