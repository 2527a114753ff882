"""What an experiment found: its saved runs as numbers, and the numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

from fadamgc.errors import InputError
from fadamgc.escape import printable
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.spec.sections import MethodSpec, Spec
from fadamgc.federation.cost import CostModel
from fadamgc.federation.run import Run

if TYPE_CHECKING:
    import pandas as pd

DASH = "\N{EN DASH}"
DIVERGED = "diverged"


@dataclass(frozen=True)
class Results:
    """What an experiment's folder holds, priced by one cost model."""

    spec: Spec
    cost: CostModel
    runs: dict[str, list[Run]]  # by the method's label, in the order of the spec
    stopped: dict[str, list[str]] = field(default_factory=dict)  # by label: why runs stopped that diverged
    damaged: dict[str, list[str]] = field(default_factory=dict)  # by label: what is wrong with their records

    @property
    def accuracy(self) -> bool:
        """Whether the metric is a share, shown in per cent."""
        return self.spec.task.metric == "accuracy"

    @property
    def target(self) -> str:
        """The target as tables and legends show it."""
        target = self.spec.run.target
        if target is None:
            return "target"
        return f"{100 * target:.4g} %" if self.accuracy else f"{target:g}"

    @property
    def missing(self) -> int:
        """How many runs of the spec are not there."""
        ended = sum(map(len, self.runs.values())) + sum(map(len, self.stopped.values()))
        return len(self.runs) * len(self.spec.run.seeds) - ended

    @cached_property
    def logarithmic(self) -> bool:
        """Whether the metric has a logarithmic axis; curves then skip values that are not above 0."""
        if self.accuracy:
            return False
        records = (record for runs in self.runs.values() for run in runs for record in run.history)
        values = [v for record in records if (v := record.test_metric) is not None and math.isfinite(v)]
        return 2 * sum(value > 0 for value in values) >= len(values) > 0


def read_results(folder: str | Path, cost: CostModel | None = None) -> Results:
    """Read an experiment back, priced by the cost model of its spec or by another."""
    saved = ExperimentFolder(folder).load()
    spec = saved.spec if cost is None else saved.spec.replace("cost", **asdict(cost))
    cost = cost or spec.cost.model()
    runs = {label: [run.reprice(cost) for run in runs] for label, runs in saved.runs.items()}
    return Results(spec, cost, runs, saved.diverged, saved.damaged)


def mean_of(values: Sequence[float]) -> float:
    """The mean of any numbers, also of those whose sum is beyond the largest number."""
    try:
        return fmean(values)
    except (OverflowError, ValueError):
        largest = max(map(abs, values))
        return fmean(value / largest for value in values) * largest


class Spread(NamedTuple):
    """Mean and sample standard deviation; NaN where there are too few values."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of those values that are finite."""
        finite = [value for value in values if math.isfinite(value)]
        return cls(
            mean_of(finite) if finite else math.nan,
            _stdev(finite) if len(finite) > 1 else math.nan,
        )


def _stdev(values: Sequence[float]) -> float:
    try:
        return stdev(values)
    except OverflowError:
        return math.nan


@dataclass(frozen=True)
class Row:
    """A method's line of the table.

    Rounds and minutes are over the runs that reached the target; final and average over those that did not
    diverge. A run diverged if its last metric is not finite, or if it stopped because an update was not.
    """

    method: MethodSpec
    runs: int  # all that ended, also those that diverged
    reached: int
    rounds: Spread
    minutes: Spread
    final: Spread
    average: Spread  # of the metric over the rounds
    mb_down: float  # a round, all clients together
    mb_up: float
    diverged: int = 0  # runs

    @classmethod
    def of(cls, method: MethodSpec, runs: Sequence[Run], target: float | None, stopped: int = 0) -> Row:
        """The line of a method from its runs; ``stopped`` more have left no record because they diverged."""
        rounds = [run.rounds_to(target) for run in runs] if target is not None else []
        minutes = [run.minutes_to(target) for run in runs] if target is not None else []
        finals = [final for run in runs if (final := _last_metric(run)) is not None]
        records = [record for run in runs for record in run.history]
        return cls(
            method=method,
            runs=len(runs) + stopped,
            reached=sum(r is not None for r in rounds),
            rounds=Spread.of([r for r in rounds if r is not None]),
            minutes=Spread.of([m for m in minutes if m is not None]),
            final=Spread.of(finals),
            average=Spread.of([average for run in runs if (average := _average(run)) is not None]),
            mb_down=fmean(r.bytes_down for r in records) / 1e6 if records else math.nan,
            mb_up=fmean(r.bytes_up for r in records) / 1e6 if records else math.nan,
            diverged=stopped + sum(not math.isfinite(final) for final in finals),
        )

    @property
    def all_diverged(self) -> bool:
        """Whether no run is left."""
        return 0 < self.runs == self.diverged


def _last_metric(run: Run) -> float | None:
    return run.history[-1].test_metric if run.history else None


def _average(run: Run) -> float | None:
    """The metric, averaged over the rounds after which it was evaluated; None if it never was."""
    values = [record.test_metric for record in run.history if record.test_metric is not None]
    return mean_of(values) if values else None


def rows(results: Results) -> list[Row]:
    """The table's lines, in the order of the spec."""
    target = results.spec.run.target
    return [
        Row.of(method, results.runs[method.label], target, len(results.stopped.get(method.label, ())))
        for method in results.spec.methods
    ]


def curves(results: Results) -> pd.DataFrame:
    """Every round of every run, with minutes and bytes summed up to it."""
    import pandas as pd

    frames = []
    for label, runs in results.runs.items():
        for run in runs:
            if not run.history:
                continue
            frame = run.to_pandas()
            frame.insert(0, "method", label)
            frame.insert(1, "seed", run.settings["seed"])
            frame["minutes"] = frame["simulated_seconds"].cumsum() / 60
            frame["bytes"] = (frame["bytes_down"] + frame["bytes_up"]).cumsum()
            frames.append(frame)
    if not frames:
        raise InputError(f"the runs of {results.spec.name!r} have no rounds; run at least one")
    columns = ["method", "seed", "round", "minutes", "bytes", "train_loss", "test_loss", "test_accuracy"]
    return pd.concat(frames, ignore_index=True)[[*columns, "test_metric"]]


LARGEST = 1e300  # of the numbers that are drawn: an axis needs room above them


def mean_curves(results: Results, table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By method, over the rounds in which all its runs have a value: round, minutes, mean, and mean -+ std.

    A metric that is drawn on a logarithmic axis has its mean and its band there.
    """
    import numpy as np

    lines = {}
    for label, runs in results.runs.items():
        metric = table["test_metric"].astype(float)
        drawn = (np.abs(metric) < LARGEST) & (metric > 0 if results.logarithmic else True)
        own = table[(table["method"] == label) & drawn]
        values = metric[own.index]
        if results.logarithmic:
            values = values.map(math.log)
        by_round = (
            own.assign(value=values)
            .groupby("round")
            .agg(
                minutes=("minutes", "mean"),
                mean=("value", "mean"),
                std=("value", "std"),
                runs=("seed", "count"),
            )
        )
        line = by_round[by_round["runs"] == len(runs)].fillna({"std": 0.0}).reset_index()
        line["low"], line["high"] = line["mean"] - line["std"], line["mean"] + line["std"]
        if results.accuracy:
            line["high"] = line["high"].clip(upper=1)
        elif results.logarithmic:
            line[["mean", "low", "high"]] = np.exp(line[["mean", "low", "high"]])
        if len(line):
            lines[label] = line[["round", "minutes", "mean", "low", "high"]]
    return lines


# The table as people read it.


class Cell(NamedTuple):
    """What a cell shows, and whether it is the best of its column."""

    text: str
    best: bool = False


def header(results: Results) -> list[str]:
    """The titles of the columns."""
    metric = printable(results.spec.task.metric)
    to = f"to {results.target}"
    return ["Method", f"Rounds {to}", f"Minutes {to}", f"Final {metric}", "MB a round"]


def cells(results: Results) -> list[list[Cell]]:
    """The table, line by line. Only a method that reached the target with every seed can be the fastest."""
    lines = rows(results)
    seeds = len(results.spec.run.seeds)
    everywhere = [row for row in lines if row.reached == seeds]
    fewest = min((row.rounds.mean for row in everywhere), default=None)
    quickest = min((row.minutes.mean for row in everywhere), default=None)
    finals = [row.final.mean for row in lines if not math.isnan(row.final.mean) and not row.diverged]
    best = (max if results.accuracy else min)(finals, default=None)
    minutes = minutes_format(lines)
    mb = _three_figures([row.mb_down + row.mb_up for row in lines])

    def to_target(row: Row, spread: Spread, form: str, winner: float | None) -> Cell:
        if not row.runs or results.spec.run.target is None:
            return Cell(DASH)
        if row.all_diverged and not row.reached:
            return Cell(DIVERGED)
        more = f", {row.diverged} {DIVERGED}" if row.diverged else ""
        if not row.reached:
            return Cell(f"never (0/{row.runs}{more})")
        note = "" if row.reached == row.runs else f" ({row.reached}/{row.runs} reached{more})"
        return Cell(_pm(spread, form) + note, row in everywhere and spread.mean == winner)

    return [
        [
            Cell(printable(row.method.label) + _of_all(row, seeds, results)),
            to_target(row, row.rounds, ".1f", fewest),
            to_target(row, row.minutes, minutes, quickest),
            Cell(_final_of(row, results.accuracy), not row.diverged and row.final.mean == best),
            Cell(DASH if math.isnan(row.mb_down) else f"{row.mb_down + row.mb_up:{mb}}"),
        ]
        for row in lines
    ]


def _of_all(row: Row, seeds: int, results: Results) -> str:
    """How many runs of a method there are, if not all."""
    damaged = len(results.damaged.get(row.method.label, ()))
    more = f", {damaged} damaged" if damaged else ""
    return "" if row.runs == seeds else f" ({row.runs} of {seeds} runs{more})"


def _final_of(row: Row, accuracy: bool) -> str:
    if row.all_diverged:
        return DIVERGED
    note = f" ({row.diverged}/{row.runs} {DIVERGED})" if row.diverged else ""
    return _final(row.final, accuracy) + note


def minutes_format(lines: Sequence[Row]) -> str:
    """The format of the minutes in the table of an experiment."""
    return _three_figures([row.minutes.mean for row in lines])


def _final(final: Spread, accuracy: bool) -> str:
    if not accuracy or math.isnan(final.mean):
        return _pm(final, ".2e")
    return _pm(Spread(100 * final.mean, 100 * final.std), ".1f") + " %"


def _pm(spread: Spread, form: str) -> str:
    if math.isnan(spread.mean):
        return DASH
    std = "" if math.isnan(spread.std) else f" ± {spread.std:{form}}"
    return f"{spread.mean:{form}}{std}"


def _three_figures(column: Sequence[float]) -> str:
    """The format that gives the largest number of a column about three figures."""
    largest = max((value for value in column if math.isfinite(value)), default=0.0)
    if 0 < largest < 1e-3:
        return ".2e"
    decimals = 2 - math.floor(math.log10(largest)) if largest > 0 else 2
    return f".{max(decimals, 0)}f"


def caption(results: Results) -> str:
    """One line above the table."""
    return f"{printable(results.spec.title or results.spec.name)}: {extent(results)}"


def extent(results: Results) -> str:
    """How much was run."""
    count = len(results.spec.run.seeds)
    return f"{results.spec.run.rounds} rounds, {count} seed{'s' if count > 1 else ''}"


def legend(results: Results) -> str:
    """How to read the table."""
    return (
        "Mean ± sample standard deviation over seeds; rounds and minutes over the seeds that reached the "
        f"target. Minutes are simulated: {pricing(results)}. "
        f"MB a round: down and up, all clients together.{diverged_note(rows(results))}"
    )


def diverged_note(lines: Sequence[Row]) -> str:
    """What "diverged" means, where a table has it."""
    if not any(row.diverged for row in lines):
        return ""
    return " Diverged: the last metric or a client's update was not finite; no mean includes these runs."


def pricing(results: Results) -> str:
    """How rounds are priced."""
    cost = results.cost
    links = f"links of {_each(cost.down_mbps)} Mbps down and {_each(cost.up_mbps)} Mbps up"
    steps = f"{_each(cost.seconds_per_step)} s a local step"
    latency = f", {_each(cost.latency)} s latency" if cost.latency else ""
    which = "the mean over its clients" if cost.per_round == "mean" else "its slowest client"
    return f"{links}, {steps}{latency}, a round takes {which}"


def _each(value: float | tuple[float, ...]) -> str:
    return f"{min(value):g} to {max(value):g}" if isinstance(value, tuple) else f"{value:g}"
