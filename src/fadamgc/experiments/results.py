"""What an experiment found: its saved runs as numbers, and the numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, NamedTuple

from fadamgc.errors import InputError
from fadamgc.experiments.runner import plan, read_spec
from fadamgc.experiments.spec import MethodSpec, Spec
from fadamgc.sim.cost import CostModel
from fadamgc.sim.run import Run

if TYPE_CHECKING:
    import pandas as pd

DASH = "\N{EN DASH}"


@dataclass(frozen=True)
class Results:
    """What an experiment's folder holds, priced by one cost model."""

    spec: Spec
    cost: CostModel
    runs: dict[str, list[Run]]  # by the method's label, in the order of the spec

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
        return sum(len(self.spec.run.seeds) - len(runs) for runs in self.runs.values())


def read_results(folder: str | Path, cost: CostModel | None = None) -> Results:
    """Read an experiment back, priced by the cost model of its spec or by another."""
    folder = Path(folder)
    spec = read_spec(folder)
    if cost is not None:
        spec = spec.replace("cost", **asdict(cost))
    cost = cost or spec.cost.model()
    runs: dict[str, list[Run]] = {method.label: [] for method in spec.methods}
    for job in plan(spec, folder):
        run = job.saved()
        if run is not None:
            runs[job.method.label].append(run.reprice(cost))
    if not any(runs.values()):
        raise InputError(f"folder={str(folder)!r} holds no finished run of its spec; run it first")
    return Results(spec, cost, runs)


class Spread(NamedTuple):
    """Mean and sample standard deviation; NaN where there are too few values."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """The spread of some values."""
        return cls(
            fmean(values) if values else math.nan,
            stdev(values) if len(values) > 1 else math.nan,
        )


@dataclass(frozen=True)
class Row:
    """A method's line of the table. Rounds and minutes are over the runs that reached the target."""

    method: MethodSpec
    runs: int
    reached: int
    rounds: Spread
    minutes: Spread
    final: Spread
    average: Spread  # of the metric over the rounds
    mb_down: float  # a round, all clients together
    mb_up: float

    @classmethod
    def of(cls, method: MethodSpec, runs: Sequence[Run], target: float | None) -> Row:
        """The line of a method from its runs."""
        rounds = [run.rounds_to(target) for run in runs] if target is not None else []
        minutes = [run.minutes_to(target) for run in runs] if target is not None else []
        finals = [run.history[-1].test_metric for run in runs]
        records = [record for run in runs for record in run.history]
        return cls(
            method=method,
            runs=len(runs),
            reached=sum(r is not None for r in rounds),
            rounds=Spread.of([r for r in rounds if r is not None]),
            minutes=Spread.of([m for m in minutes if m is not None]),
            final=Spread.of([f for f in finals if f is not None]),
            average=Spread.of([average for run in runs if (average := _average(run)) is not None]),
            mb_down=fmean(r.bytes_down for r in records) / 1e6 if records else math.nan,
            mb_up=fmean(r.bytes_up for r in records) / 1e6 if records else math.nan,
        )


def _average(run: Run) -> float | None:
    """The metric, averaged over the rounds after which it was evaluated; None if it never was."""
    values = [record.test_metric for record in run.history if record.test_metric is not None]
    return fmean(values) if values else None


def rows(results: Results) -> list[Row]:
    """The table's lines, in the order of the spec."""
    target = results.spec.run.target
    return [Row.of(method, results.runs[method.label], target) for method in results.spec.methods]


def curves(results: Results) -> pd.DataFrame:
    """Every round of every run, with minutes and bytes summed up to it."""
    import pandas as pd

    frames = []
    for label, runs in results.runs.items():
        for run in runs:
            frame = run.to_pandas()
            frame.insert(0, "method", label)
            frame.insert(1, "seed", run.settings["seed"])
            frame["minutes"] = frame["simulated_seconds"].cumsum() / 60
            frame["bytes"] = (frame["bytes_down"] + frame["bytes_up"]).cumsum()
            frames.append(frame)
    columns = ["method", "seed", "round", "minutes", "bytes", "train_loss", "test_loss", "test_accuracy"]
    return pd.concat(frames, ignore_index=True)[[*columns, "test_metric"]]


def mean_curves(results: Results, table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """By method, over the rounds that all its runs evaluated: round, minutes, mean, and mean -+ std.

    A metric that is drawn on a logarithmic axis has its mean and its band there.
    """
    import numpy as np

    lines = {}
    for label, runs in results.runs.items():
        own = table[(table["method"] == label) & table["test_metric"].notna()]
        values = own["test_metric"] if results.accuracy else np.log(own["test_metric"].clip(lower=1e-300))
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
        else:
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
    metric = results.spec.task.metric
    to = f"to {results.target}"
    return ["Method", f"Rounds {to}", f"Minutes {to}", f"Final {metric}", "MB a round"]


def cells(results: Results) -> list[list[Cell]]:
    """The table, line by line. Only a method that reached the target with every seed can be the fastest."""
    lines = rows(results)
    seeds = len(results.spec.run.seeds)
    everywhere = [row for row in lines if row.reached == seeds]
    fewest = min((row.rounds.mean for row in everywhere), default=None)
    quickest = min((row.minutes.mean for row in everywhere), default=None)
    finals = [row.final.mean for row in lines if not math.isnan(row.final.mean)]
    best = (max if results.accuracy else min)(finals, default=None)
    minutes = _three_figures([row.minutes.mean for row in lines])
    mb = _three_figures([row.mb_down + row.mb_up for row in lines])

    def to_target(row: Row, spread: Spread, form: str, winner: float | None) -> Cell:
        if not row.reached:
            return Cell(f"never (0/{row.runs})" if row.runs and results.spec.run.target is not None else DASH)
        note = "" if row.reached == row.runs else f" ({row.reached}/{row.runs} reached)"
        return Cell(_pm(spread, form) + note, row in everywhere and spread.mean == winner)

    return [
        [
            Cell(row.method.label + ("" if row.runs == seeds else f" ({row.runs} of {seeds} runs)")),
            to_target(row, row.rounds, ".1f", fewest),
            to_target(row, row.minutes, minutes, quickest),
            Cell(_final(row.final, results.accuracy), row.final.mean == best),
            Cell(f"{row.mb_down + row.mb_up:{mb}}" if row.runs else DASH),
        ]
        for row in lines
    ]


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
    return f"{results.spec.title or results.spec.name}: {extent(results)}"


def extent(results: Results) -> str:
    """How much was run."""
    count = len(results.spec.run.seeds)
    return f"{results.spec.run.rounds} rounds, {count} seed{'s' if count > 1 else ''}"


def legend(results: Results) -> str:
    """How to read the table."""
    return (
        "Mean ± sample standard deviation over seeds; rounds and minutes over the seeds that reached the "
        f"target. Minutes are simulated: {pricing(results)}. "
        "MB a round: down and up, all clients together."
    )


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
