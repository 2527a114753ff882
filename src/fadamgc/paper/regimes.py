"""Maps of regimes: where a method needs fewer rounds than the best of its rivals.

A map has one cell per experiment, on two axes such as the number of sampled clients and of local steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict

from fadamgc.escape import csv_bytes, markdown, printable
from fadamgc.experiments.report.means import mean_of
from fadamgc.experiments.report.numbers import (
    Experiments,
    ReportedExperiment,
    Results,
    difference,
    values_by_seed,
)
from fadamgc.experiments.report.plots import image_files

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 4  # the ratio at which the colours end
CAPTION = (
    "How many times as many rounds to the target the best rival needs, and which one it is: above 1, the "
    "method is ahead. Bold: the 95 % confidence interval of the paired difference over seeds excludes 0. A "
    "run that missed the target counts with all its rounds; > says that runs of the rival missed it, < that "
    "runs of the method did, ≈ that runs of both did."
)


class RegimeMap(BaseModel):
    """A map: the label of a method, and those of its rivals."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    method: str
    rivals: tuple[str, ...]


class Cell(NamedTuple):
    """What an experiment says about a method and its best rival: the one with the fewest rounds."""

    rival: str
    rounds: float  # of the method, to the target; a run that missed it counts with all its rounds
    rival_rounds: float
    missed: int  # runs of the method without the target
    rival_missed: int
    clear: int  # 1 or -1: the confidence interval of the paired difference excludes 0

    @property
    def ratio(self) -> float:
        """How many times as many rounds the rival needs."""
        return self.rival_rounds / self.rounds

    @property
    def text(self) -> str:
        """The ratio, with a sign before it where runs missed the target."""
        signs = {(False, False): "", (False, True): ">", (True, False): "<", (True, True): "≈"}
        return f"{signs[self.missed > 0, self.rival_missed > 0]}{self.ratio:.2g}"


def cell(results: Results, wanted: RegimeMap) -> Cell | None:
    """Compare the method of a map with its best rival; None if one has no runs."""
    by_label = {label: values_by_seed(results, label, "rounds") for label in results.runs}
    means = {label: mean_of(list(values.values())) for label, values in by_label.items() if values}
    rivals = [label for label in wanted.rivals if label in means]
    if wanted.method not in means or not rivals:
        return None
    rival = min(rivals, key=means.__getitem__)
    rows = {row.method.label: row for row in results.rows}
    return Cell(
        rival=rival,
        rounds=means[wanted.method],
        rival_rounds=means[rival],
        missed=rows[wanted.method].runs - rows[wanted.method].reached,
        rival_missed=rows[rival].runs - rows[rival].reached,
        clear=difference(results, wanted.method, rival, "rounds").clear,
    )


def map_files(
    experiments: Experiments, maps: Sequence[RegimeMap], axis: str, rows: str, title: str
) -> dict[str, bytes]:
    """Render map.csv, map.md and the figure; nothing while no experiment has a place on both axes."""
    placed = [e for e in experiments if e.value is not None and e.row is not None]
    cells = [(e, wanted, found) for e in placed for wanted in maps if (found := cell(e.results, wanted))]
    if not cells:
        return {}
    import pandas as pd

    lines = [
        {"group": e.group, rows: e.row, axis: e.value, "method": wanted.method, **found._asdict()}
        | {"ratio": found.ratio}
        for e, wanted, found in cells
    ]
    return {
        "map.csv": csv_bytes(pd.DataFrame(lines)),
        "map.md": f"# {markdown(title)}\n\n{map_markdown(placed, maps, axis, rows)}".encode(),
        **image_files("map", map_figure(placed, maps, axis, rows, title)),
    }


def map_markdown(experiments: Experiments, maps: Sequence[RegimeMap], axis: str, rows: str) -> str:
    """Write one table per map and group: the ratio of rounds, and the best rival."""
    parts = []
    for wanted in maps:
        for group, members in _groups(experiments):
            values, steps = _ticks(members)
            heading = f"{wanted.method} against the best of {', '.join(wanted.rivals)}"
            parts.append(f"**{markdown(heading if group is None else f'{group}: {heading}')}**\n")
            parts.append(f"| {markdown(rows)} | {' | '.join(f'{markdown(axis)} {v:g}' for v in values)} |")
            parts.append(f"|--:|{':--|' * len(values)}")
            by_place = {(member.row, member.value): cell(member.results, wanted) for member in members}
            for step in steps:
                texts = (_markdown(by_place.get((step, value))) for value in values)
                parts.append(f"| {step:g} | {' | '.join(texts)} |")
            parts.append("")
    parts.append(CAPTION)
    return "\n".join(parts) + "\n"


def _markdown(found: Cell | None) -> str:
    if found is None:
        return ""
    ratio = f"**{found.text}**" if found.clear else found.text
    return f"{ratio} {markdown(found.rival)}"


def _groups(experiments: Experiments) -> list[tuple[str | None, list[ReportedExperiment]]]:
    groups = dict.fromkeys(experiment.group for experiment in experiments)
    return [(group, [e for e in experiments if e.group == group]) for group in groups]


def _ticks(experiments: Experiments) -> tuple[list[float], list[float]]:
    """Return the places on both axes, in order."""
    values = sorted({e.value for e in experiments if e.value is not None})
    return values, sorted({e.row for e in experiments if e.row is not None})


def map_figure(
    experiments: Experiments, maps: Sequence[RegimeMap], axis: str, rows: str, title: str
) -> Figure:
    """Draw every map, one panel per group; the colour has the logarithm of the ratio."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

    groups = _groups(experiments)
    figure = Figure(figsize=(2.2 + 4.4 * len(groups), 0.8 + 3.4 * len(maps)), layout="constrained")
    panels = figure.subplots(len(maps), len(groups), squeeze=False)
    end = math.log2(MOST)
    colours = ScalarMappable(Normalize(-end, end), "PuOr_r")
    for wanted, line in zip(maps, panels, strict=True):
        for (group, members), panel in zip(groups, line, strict=True):
            _draw(panel, members, wanted, colours)
            head = f"{wanted.method} against the best of\n{', '.join(wanted.rivals)}"
            name = printable(head if group is None else f"{group}: {head}")
            panel.set_title(name, fontsize=9, parse_math=False)
            panel.set_xlabel(printable(axis), parse_math=False)
            panel.set_ylabel(printable(rows), parse_math=False)
    bar = figure.colorbar(
        colours, ax=panels, shrink=0.8, label="rounds of the best rival / rounds of the method"
    )
    bar.set_ticks([-end, -end / 2, 0, end / 2, end], labels=["1/4", "1/2", "1", "2", "4"])
    figure.suptitle(printable(title), fontsize=12, parse_math=False)
    return figure


def _draw(panel: Axes, experiments: Experiments, wanted: RegimeMap, colours: Any) -> None:
    values, steps = _ticks(experiments)
    for experiment in experiments:
        found = cell(experiment.results, wanted)
        if found is None or experiment.value is None or experiment.row is None:
            continue
        x, y = values.index(experiment.value), steps.index(experiment.row)
        height = math.log2(max(1 / MOST, min(MOST, found.ratio)))
        panel.fill_between(
            [x - 0.49, x + 0.49], y - 0.49, y + 0.49, color=colours.to_rgba(height), linewidth=0
        )
        ink = "white" if abs(height) > 1.3 else "black"
        weight = "bold" if found.clear else "normal"
        panel.text(x, y + 0.1, found.text, ha="center", va="center", color=ink, fontsize=13, weight=weight)
        rival = printable(found.rival)
        panel.text(x, y - 0.27, rival, ha="center", va="center", color=ink, fontsize=8, parse_math=False)
    panel.set_xticks(range(len(values)), [f"{value:g}" for value in values])
    panel.set_yticks(range(len(steps)), [f"{step:g}" for step in steps])
    panel.set_xlim(-0.5, len(values) - 0.5)
    panel.set_ylim(-0.5, len(steps) - 0.5)
    panel.tick_params(length=0)
    panel.spines[:].set_visible(False)
