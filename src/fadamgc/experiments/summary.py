"""Several experiments in one table of the paper's shape, a row each, a column a method, and in a figure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from fadamgc.errors import InputError
from fadamgc.experiments.figures import colour, png, svg
from fadamgc.experiments.results import DASH, Results, Row, Spread, rows
from fadamgc.files import write_atomic

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURES = ("rounds", "minutes")
TITLES = {"rounds": "Rounds to target", "minutes": "Simulated minutes to target"}


class Entry(NamedTuple):
    """An experiment of the table."""

    name: str
    results: Results
    value: float | None = None  # on the axis of a figure
    group: str | None = None  # drawn together


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
            **{
                f"{measure}_{part}": getattr(getattr(row, measure), part)
                for measure in (*MEASURES, "final")
                for part in ("mean", "std")
            },
        }
        for entry in entries
        for row in rows(entry.results)
    ]
    return pd.DataFrame(lines)


class Number(NamedTuple):
    """What a cell of the table shows."""

    spread: Spread
    note: str  # where not all seeds reached the target
    best: bool


def grid(entries: Sequence[Entry], measure: str) -> list[tuple[str, list[Number | None]]]:
    """The table of one measure: an experiment's name, and a number for each method.

    Only a method that reached the target with every seed can be the best.
    """
    labels = methods_of(entries)
    lines = []
    for entry in entries:
        found: dict[str, Row] = {row.method.label: row for row in rows(entry.results)}
        seeds = len(entry.results.spec.run.seeds)
        whole = [getattr(r, measure).mean for r in found.values() if r.reached == seeds]
        best = min(whole, default=math.nan)
        line: list[Number | None] = []
        for label in labels:
            row = found.get(label)
            if row is None or not row.runs:
                line.append(None)
                continue
            spread = getattr(row, measure)
            note = "" if row.reached == row.runs else f"{row.reached}/{row.runs}"
            line.append(Number(spread, note, row.reached == seeds and spread.mean == best))
        lines.append((entry.name, line))
    return lines


def markdown(entries: Sequence[Entry]) -> str:
    """The tables in Markdown."""
    labels = methods_of(entries)
    parts = []
    for measure in MEASURES:
        head = f"| {TITLES[measure]} | " + " | ".join(label.replace("|", "\\|") for label in labels) + " |"
        lines = [head, "|:--" + "|--:" * len(labels) + "|"]
        for name, numbers in grid(entries, measure):
            lines.append(f"| {name} | " + " | ".join(map(_markdown, numbers)) + " |")
        parts.append("\n".join(lines))
    said = (
        "Mean ± sample standard deviation over the seeds that reached the target; (k/n): k of n seeds did. "
        "Bold: the best of those that always did."
    )
    return "\n\n".join(parts) + f"\n\n{said}\n"


def _markdown(number: Number | None) -> str:
    if number is None:
        return DASH
    if math.isnan(number.spread.mean):
        return f"never ({number.note})"
    text = f"{number.spread.mean:.1f}"
    if not math.isnan(number.spread.std):
        text += f" ± {number.spread.std:.1f}"
    text = f"**{text}**" if number.best else text
    return f"{text} ({number.note})" if number.note else text


def latex(entries: Sequence[Entry]) -> str:
    """The tables as one LaTeX tabular (needs booktabs)."""
    labels = methods_of(entries)
    lines = [
        r"\begin{tabular}{ll" + "c" * len(labels) + "}",
        r"\toprule",
        "Measure & Data & " + " & ".join(map(_escaped, labels)) + r" \\",
    ]
    for measure in MEASURES:
        lines.append(r"\midrule")
        for i, (name, numbers) in enumerate(grid(entries, measure)):
            cells = [TITLES[measure] if i == 0 else "", _escaped(name), *map(_latex, numbers)]
            lines.append(" & ".join(cells) + r" \\")
    return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"


def _latex(number: Number | None) -> str:
    if number is None:
        return "--"
    if math.isnan(number.spread.mean):
        return f"never ({number.note})"
    mean = f"{number.spread.mean:.1f}"
    mean = rf"\mathbf{{{mean}}}" if number.best else mean
    std = "" if math.isnan(number.spread.std) else rf" \pm {number.spread.std:.1f}"
    return f"${mean}{std}$" + (f" ({number.note})" if number.note else "")


def _escaped(text: str) -> str:
    for sign in "&%$#_{}":
        text = text.replace(sign, "\\" + sign)
    return text.replace("~", r"\textasciitilde{}").replace("^", r"\textasciicircum{}")


def figure(entries: Sequence[Entry], axis: str, title: str) -> Figure:
    """Rounds and minutes to the target over what the experiments vary."""
    from matplotlib.figure import Figure

    groups = list(dict.fromkeys(entry.group for entry in entries))
    made = Figure(figsize=(11, 0.6 + 3.6 * len(groups)), layout="constrained")
    labels = methods_of(entries)
    for group, panels in zip(groups, made.subplots(len(groups), 2, squeeze=False), strict=True):
        own = [entry for entry in entries if entry.group == group]
        for panel, measure in zip(panels, MEASURES, strict=True):
            _draw(panel, own, labels, measure)
            panel.set_xlabel(axis)
            if group is not None:
                panel.set_title(group, fontsize=10, parse_math=False)
    handles = made.axes[0].get_legend_handles_labels()
    made.legend(*handles, loc="outside right center", frameon=False)
    made.suptitle(title, fontsize=12, parse_math=False)
    return made


def _draw(panel: Axes, entries: Sequence[Entry], labels: Sequence[str], measure: str) -> None:
    values = sorted({entry.value for entry in entries if entry.value is not None})
    lines = grid(entries, measure)
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
            panel.errorbar(x, mean, yerr=bars, label=label, color=shade, marker="o", capsize=3)
    panel.set_ylabel(TITLES[measure].lower())
    panel.set_ylim(bottom=0)
    if values and values[0] > 0 and values[-1] >= 8 * values[0]:
        panel.set_xscale("log")
        panel.set_xticks(values, [f"{v:g}" for v in values])
        panel.minorticks_off()
    panel.grid(color="0.92")
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def write_summary(folder: Path, entries: Sequence[Entry], title: str, axis: str | None = None) -> list[Path]:
    """The tables of several experiments (CSV, Markdown, LaTeX), and their figure where there is an axis."""
    files = {
        "summary.csv": table(entries).to_csv(index=False).encode(),
        "summary.md": f"# {title}\n\n{markdown(entries)}".encode(),
        "summary.tex": latex(entries).encode(),
    }
    if axis is not None:
        drawn = figure(entries, axis, title)
        files |= {"summary.png": png(drawn), "summary.svg": svg(drawn)}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomic(folder / name, data)
    except OSError as error:
        raise InputError(f"out={str(folder)!r} cannot be written: {error.strerror}") from None
    return [folder / name for name in files]
