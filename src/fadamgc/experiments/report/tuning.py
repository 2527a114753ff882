"""The tuning of each method as a map of eta_l and eta_g, from tuning.csv."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fadamgc.errors import InputError
from fadamgc.escape import printable
from fadamgc.experiments.folder import TUNING_TABLE
from fadamgc.experiments.points import Point, grid_end, read_points, shown_value
from fadamgc.experiments.report.numbers import Results
from fadamgc.experiments.report.tables import DASH, DIVERGED, Cell, Table
from fadamgc.experiments.spec.sections import STEPS

LEGEND = (
    "Each cell has the metric at the end on held-out train data and, if a seed reached the target, the mean "
    "rounds to it; k/n seeds: not all did. The stronger the colour, the earlier in the order of choice."
)


class MapCell(NamedTuple):
    """A cell of a map."""

    lines: tuple[str, ...]
    shade: float = 0.0  # 1 for the first in the order of choice, 0 for the last
    chosen: bool = False
    diverged: bool = False  # with every seed


class TuningMap(NamedTuple):
    """The tuning of one method."""

    label: str
    corner: str  # names of the rows and of the columns
    columns: list[str]
    rows: list[tuple[str, list[MapCell]]]
    others: Table | None  # the other hyperparameters
    warnings: list[str]  # chosen values at the end of the grid


def read_tuning(folder: Path, results: Results) -> dict[Point, bool] | str | None:
    """Read the tuning of an experiment from its folder.

    Returns whether each point was chosen; or the error if the file cannot be read; or None without a file.
    """
    path, tune = folder / TUNING_TABLE, results.spec.tune
    if not path.is_file():
        return None
    labels, goal = list(results.runs), "max" if results.high_is_good else "min"
    try:
        return read_points(path, labels, goal, seeds=1 if tune is None else len(tune.seeds)) or None
    except InputError as error:
        return str(error)


def tuning_maps(results: Results, points: Mapping[Point, bool]) -> list[TuningMap]:
    """Return the map of each method that was tuned, in the order of the spec."""
    maps = []
    for label in results.runs:
        of_method = {point: chosen for point, chosen in points.items() if point.label == label}
        if of_method:
            maps.append(tuning_map(results, label, of_method))
    return [entry for entry in maps if entry.rows or entry.others]


def tuning_map(results: Results, label: str, points: Mapping[Point, bool]) -> TuningMap:
    """Lay out the points of one method; a cell has the best point with its step sizes."""
    ordered = sorted(points, key=Point.rank)
    chosen = next((dict(point.values) for point in ordered if points[point]), {})
    tried = _tried(ordered)
    steps = [name for name in STEPS if len(tried.get(name, ())) > 1]
    fixed = [f"{name} = {shown_value(tried[name][0])}" for name in STEPS if len(tried.get(name, ())) == 1]
    best: dict[tuple[Any, ...], Point] = {}  # by step sizes, in the order of choice
    for point in ordered:
        best.setdefault(_place(dict(point.values), steps), point)
    most = max(point.tried for point in ordered)
    cells = {
        place: MapCell(
            _lines(results, point, most),
            shade=1 - number / max(len(best) - 1, 1),
            chosen=bool(chosen) and place == _place(chosen, steps),
            diverged=point.final is None,
        )
        for number, (place, point) in enumerate(best.items())
    }
    empty = MapCell((DASH,))
    columns = tried[steps[-1]] if steps else []
    heads = [(value,) for value in tried[steps[0]]] if len(steps) > 1 else [()] if steps else []
    names = [name for name in tried if name not in STEPS and len(tried[name]) > 1]
    ends = {name: grid_end(value, tried[name]) for name, value in chosen.items()}
    return TuningMap(
        label=label,
        corner=" \\ ".join(steps),
        columns=[shown_value(value) for value in columns],
        rows=[
            (
                ", ".join(map(shown_value, head) if head else fixed),
                [cells.get((*head, c), empty) for c in columns],
            )
            for head in heads
        ],
        others=_others_table(results, {name: tried[name] for name in names}, ordered, chosen)
        if names
        else None,
        warnings=[f"chosen at the {end} end of {name}: extend the grid" for name, end in ends.items() if end],
    )


def _tried(points: Sequence[Point]) -> dict[str, list[Any]]:
    """Return the values of each hyperparameter, sorted."""
    names = dict.fromkeys(name for point in points for name, _ in point.values)
    found = {name: {dict(p.values)[name] for p in points if name in dict(p.values)} for name in names}
    return {
        name: sorted(values, key=lambda value: (isinstance(value, str), value))
        for name, values in found.items()
    }


def _place(values: Mapping[str, Any], steps: Sequence[str]) -> tuple[Any, ...]:
    return tuple(values.get(name) for name in steps)


def _lines(results: Results, point: Point, most: int) -> tuple[str, ...]:
    """Return the texts of a cell."""
    if point.final is None:
        return (DIVERGED,)
    lines = []
    if point.rounds is not None:
        lines.append(f"{point.rounds:.3g} rounds")
    lines.append(f"{100 * point.final:.1f} %" if results.accuracy else f"{point.final:.3g}")
    if 0 < point.reached < point.seeds:
        lines.append(f"{point.reached}/{point.seeds} seeds")
    if point.diverged:
        lines.append(f"{point.diverged}/{point.seeds} {DIVERGED}")
    if point.tried < most:
        lines.append(f"tried {point.tried} rounds")
    return tuple(lines)


def _others_table(
    results: Results, tried: Mapping[str, list[Any]], ordered: Sequence[Point], chosen: Mapping[str, Any]
) -> Table:
    """Tabulate the best result for each value of the hyperparameters that are no step sizes."""
    most = max(point.tried for point in ordered)
    rows = []
    for name, values in tried.items():
        for value in values:
            best = next(point for point in ordered if (name, value) in point.values)
            is_chosen = chosen.get(name) == value
            cells = (printable(name), printable(shown_value(value)), ", ".join(_lines(results, best, most)))
            rows.append([*map(Cell, cells), Cell("chosen" if is_chosen else "", bold=is_chosen)])
    return Table(["Hyperparameter", "Value", "Best result", ""], rows, "lrrl")
