"""The numbers of an experiment, from its saved runs: one row per method, and the curves over rounds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from fadamgc import escape
from fadamgc.errors import InputError
from fadamgc.experiments.folder import ExperimentFolder, SavedExperiment
from fadamgc.experiments.points import Point
from fadamgc.experiments.report.means import Difference, Spread, mean_of
from fadamgc.experiments.spec.sections import STEPS, MethodSpec
from fadamgc.federation.cost import CostModel
from fadamgc.federation.run import Run

if TYPE_CHECKING:
    import pandas as pd

TO_TARGET = ("rounds", "minutes")
MEASURES = {  # fields of a Row, and their titles
    "rounds": "Rounds to target",
    "minutes": "Simulated minutes to target",
    "final": "{metric} at the end",
    "average": "{metric}, mean over the rounds",
}
LARGEST = 1e300  # largest value that is drawn, because an axis needs room above it
CLEARLY_BEST = (
    "Bold: clearly best. The 95 % confidence interval of its paired difference over seeds to the second best "
    "excludes 0; a run that missed the target counts with all its rounds."
)


# One row per method.


@dataclass(frozen=True)
class Row:
    """The numbers of one method.

    Rounds and minutes are over the runs that reached the target; final and average over the runs that did
    not diverge. A run diverged if its last metric is not finite, or if it stopped at an update that was not.
    """

    method: MethodSpec
    runs: int  # all that ended, including those that diverged
    reached: int
    rounds: Spread
    minutes: Spread
    final: Spread
    average: Spread  # of the metric over the rounds
    mb_down: float  # per round, all clients together
    mb_up: float
    diverged: int = 0

    @classmethod
    def of(cls, method: MethodSpec, runs: Sequence[Run], target: float | None, stopped: int) -> Row:
        """Compute the row of a method; ``stopped`` further runs diverged and have no record."""
        rounds = [] if target is None else [r for run in runs if (r := run.rounds_to(target)) is not None]
        minutes = [] if target is None else [m for run in runs if (m := run.minutes_to(target)) is not None]
        metrics = [[r.test_metric for r in run.history if r.test_metric is not None] for run in runs]
        finals = [last for run in runs if run.history and (last := run.history[-1].test_metric) is not None]
        records = [record for run in runs for record in run.history]
        return cls(
            method=method,
            runs=len(runs) + stopped,
            reached=len(rounds),
            rounds=Spread.of(rounds),
            minutes=Spread.of(minutes),
            final=Spread.of(finals),
            average=Spread.of([mean_of(values) for values in metrics if values]),
            mb_down=fmean(r.bytes_down for r in records) / 1e6 if records else math.nan,
            mb_up=fmean(r.bytes_up for r in records) / 1e6 if records else math.nan,
            diverged=stopped + sum(not math.isfinite(final) for final in finals),
        )

    @property
    def mb(self) -> float:
        """Megabytes per round, down and up."""
        return self.mb_down + self.mb_up

    @property
    def all_diverged(self) -> bool:
        """Whether every run diverged."""
        return 0 < self.runs == self.diverged


# One experiment.


@dataclass(frozen=True)
class Results(SavedExperiment):
    """The saved runs of an experiment, priced by the cost model of its spec."""

    @cached_property
    def cost(self) -> CostModel:
        """The cost model."""
        return self.spec.cost.model()

    @property
    def title(self) -> str:
        """The title of the experiment, or else its name."""
        return self.spec.title or self.spec.name

    @property
    def accuracy(self) -> bool:
        """Whether the metric is a share, shown in per cent."""
        return self.spec.task.metric == "accuracy"

    @property
    def high_is_good(self) -> bool:
        """Whether large values of the metric are better."""
        runs = [run for runs in self.runs.values() for run in runs]
        return runs[0].goal == "max" if runs else self.accuracy

    @property
    def target(self) -> str:
        """The target as tables and legends show it."""
        target = self.spec.run.target
        if target is None:
            return "target"
        return f"{100 * target:.4g} %" if self.accuracy else f"{target:g}"

    @property
    def missing(self) -> int:
        """The number of runs of the spec that have not ended."""
        ended = sum(map(len, self.runs.values())) + sum(map(len, self.diverged.values()))
        return len(self.runs) * len(self.spec.run.seeds) - ended

    @cached_property
    def logarithmic(self) -> bool:
        """Whether the metric has a logarithmic axis; curves then skip values that are not above 0."""
        if self.accuracy:
            return False
        records = (record for runs in self.runs.values() for run in runs for record in run.history)
        values = [v for record in records if (v := record.test_metric) is not None and math.isfinite(v)]
        return 2 * sum(value > 0 for value in values) >= len(values) > 0

    @cached_property
    def rows(self) -> list[Row]:
        """The numbers of the methods, in the order of the spec."""
        target = self.spec.run.target
        return [
            Row.of(method, self.runs[method.label], target, stopped=len(self.diverged[method.label]))
            for method in self.spec.methods
        ]

    @cached_property
    def clearly_best(self) -> dict[str, str | None]:
        """The label of the clearly best method, by measure; None where the order is not clear."""
        return {measure: _clearly_best(self, measure) for measure in MEASURES}


# The clearly best method; web/page.js has the same rule for the minutes.


def _clearly_best(results: Results, measure: str) -> str | None:
    """Return the method with the best mean if it is clearly ahead of the method with the second best mean.

    That is: it reached the target (or finished) with every seed of the spec, at least two, and the 95 %
    confidence interval of the paired difference over the seeds that both have excludes 0. Methods of which
    all runs diverged are behind all others.
    """
    seeds = len(results.spec.run.seeds)
    if seeds < 2 or (measure in TO_TARGET and results.spec.run.target is None):
        return None
    sign = _sign(results, measure)
    by_seed = {label: values_by_seed(results, label, measure) for label in results.runs}
    ran = [row.method.label for row in results.rows if row.runs]
    ranked = sorted((sign * mean_of(list(v.values())), label) for label, v in by_seed.items() if v)
    if not ranked or len(ran) < 2:
        return None
    best = ranked[0][1]
    row = next(row for row in results.rows if row.method.label == best)
    if (row.reached if measure in TO_TARGET else row.runs - row.diverged) < seeds:
        return None
    if len(ranked) == 1:
        return best
    return best if difference(results, best, ranked[1][1], measure).clear > 0 else None


# Paired comparisons: seeds share the partition and the batches.


def difference(results: Results, label: str, rival: str, measure: str) -> Difference:
    """Return by how much a method is ahead of another, over the seeds that both have.

    A run that missed the target counts with all its rounds.
    """
    ours, theirs = (values_by_seed(results, name, measure) for name in (label, rival))
    sign = _sign(results, measure)
    return Difference.of([sign * (theirs[seed] - value) for seed, value in ours.items() if seed in theirs])


def values_by_seed(results: Results, label: str, measure: str) -> dict[int, float]:
    """Return a measure of the runs of a method that did not diverge."""
    values = ((run, _value(run, measure, results.spec.run.target)) for run in results.runs[label])
    return {run.settings["seed"]: value for run, value in values if math.isfinite(value)}


def _sign(results: Results, measure: str) -> int:
    """Return 1 if small values are good, else -1."""
    return -1 if results.high_is_good and measure not in TO_TARGET else 1


def _value(run: Run, measure: str, target: float | None) -> float:
    """Return a measure of a run; NaN if it diverged.

    A run that missed the target counts with all its rounds, which is less than it would have needed.
    """
    metrics = [record.test_metric for record in run.history if record.test_metric is not None]
    if not metrics or measure == "average":
        return mean_of(metrics) if metrics else math.nan
    if measure == "final" or target is None:
        return metrics[-1]
    reached = run.rounds_to(target)
    if reached is None and not math.isfinite(metrics[-1]):
        return math.nan
    records = run.history[:reached]
    return len(records) if measure == "rounds" else sum(r.simulated_seconds for r in records) / 60


def read_results(folder: str | Path, cost: Mapping[str, Any] = {}) -> Results:
    """Read the saved runs of a folder, priced by its spec; ``cost`` replaces values of [cost]."""
    saved = ExperimentFolder(folder).load()
    spec = saved.spec.replace("cost", **cost)
    model = spec.cost.model()
    runs = {label: [run.reprice(model) for run in runs] for label, runs in saved.runs.items()}
    return Results(spec, runs, saved.diverged, saved.damaged)


def curves(results: Results) -> pd.DataFrame:
    """Tabulate every round of every run, with minutes and bytes summed up to the round."""
    import pandas as pd

    frames = [
        run.to_pandas().assign(
            method=label,
            seed=run.settings["seed"],
            minutes=lambda frame: frame["simulated_seconds"].cumsum() / 60,
            bytes=lambda frame: (frame["bytes_down"] + frame["bytes_up"]).cumsum(),
        )
        for label, runs in results.runs.items()
        for run in runs
        if run.history
    ]
    if not frames:
        raise InputError(f"the runs of {results.spec.name!r} have no rounds; run at least one")
    columns = ["method", "seed", "round", "minutes", "bytes", "train_loss", "test_loss", "test_accuracy"]
    return pd.concat(frames, ignore_index=True)[[*columns, "test_metric"]]


def mean_curves(results: Results, rounds: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """Average ``curves`` over seeds: by method, round, minutes, mean, and mean -+ standard deviation.

    Rounds in which not all runs of the method have a value are skipped. Where the axis is logarithmic, the
    mean and the deviation are those of the logarithm.
    """
    import numpy as np

    metric = rounds["test_metric"].astype(float)
    drawn = (np.abs(metric) < LARGEST) & (metric > 0 if results.logarithmic else True)
    averages = {}
    for label, runs in results.runs.items():
        method_rounds = rounds[(rounds["method"] == label) & drawn]
        values = metric[method_rounds.index]
        if results.logarithmic:
            values = values.map(math.log)
        groups = method_rounds.assign(value=values).groupby("round")
        averaged = groups.agg(minutes=("minutes", "mean"), mean=("value", "mean"), std=("value", "std"))
        curve = averaged[groups.size() == len(runs)].fillna({"std": 0.0}).reset_index()
        curve["low"], curve["high"] = curve["mean"] - curve["std"], curve["mean"] + curve["std"]
        if results.accuracy:
            curve["high"] = curve["high"].clip(upper=1)
        elif results.logarithmic:
            curve[["mean", "low", "high"]] = np.exp(curve[["mean", "low", "high"]])
        if len(curve):
            averages[label] = curve[["round", "minutes", "mean", "low", "high"]]
    return averages


def summary_frame(results: Results) -> pd.DataFrame:
    """Tabulate an experiment, one row per method, as in ``results.csv``."""
    import pandas as pd

    further = further_metrics(results)
    lines = [
        {
            "method": row.method.label,
            "algorithm": row.method.algorithm,
            **{step: row.method.hyperparameter(step) for step in STEPS},
            **_counts(row),
            "target": results.spec.run.target,
            **_spreads(row, ("rounds", "minutes", "final")),
            "mb_down_per_round": row.mb_down,
            "mb_up_per_round": row.mb_up,
        }
        for row in results.rows
    ]
    for name, spreads in further.items():
        column = escape.csv_cell(name if f"{name}_mean" not in lines[0] else f"metric {name}")
        for line, row in zip(lines, results.rows, strict=True):
            spread = spreads[row.method.label]._asdict()
            line |= {f"{column}_{part}": value for part, value in spread.items()}
    return pd.DataFrame(lines)


def further_metrics(results: Results, with_first: bool = False) -> dict[str, dict[str, Spread]]:
    """Return all named numbers of the last evaluation, by name and method, over seeds.

    Without ``with_first``, the number that is the experiment's metric is skipped.
    """
    last: dict[str, list[dict[str, float]]] = {
        label: [next((r.metrics for r in reversed(run.history) if r.metrics), {}) for run in runs]
        for label, runs in results.runs.items()
    }
    names = dict.fromkeys(name for of_method in last.values() for named in of_method for name in named)
    return {
        name: {
            label: Spread.of([named[name] for named in of_method if name in named])
            for label, of_method in last.items()
        }
        for name in names
        if with_first or name != results.spec.task.metric
    }


def _counts(row: Row) -> dict[str, int]:
    return {"runs": row.runs, "runs_reached": row.reached, "runs_diverged": row.diverged}


def _spreads(row: Row, measures: Sequence[str]) -> dict[str, float]:
    spreads = {measure: getattr(row, measure)._asdict() for measure in measures}
    return {f"{measure}_{part}": value for measure, both in spreads.items() for part, value in both.items()}


# Several experiments.


class ReportedExperiment(NamedTuple):
    """An experiment in a report: its name in the report, and its place in the figure of all experiments."""

    name: str
    results: Results
    value: float | None = None  # on the axis
    group: str | None = None  # experiments of a group share a row of panels
    axis: str | None = None  # if it differs from the axis of the others
    row: float | None = None  # on the second axis, of a map
    label_plot: bytes | None = None  # PNG
    tuning: dict[Point, bool] | str | None = None  # whether each point was chosen; or the error


Experiments: TypeAlias = Sequence[ReportedExperiment]


def method_labels(experiments: Experiments) -> list[str]:
    """List the labels of all methods in the order of their first appearance."""
    return list(dict.fromkeys(label for experiment in experiments for label in experiment.results.runs))


def measure_title(experiments: Experiments, measure: str) -> str:
    """Return the title of a measure."""
    metrics = list(dict.fromkeys(experiment.results.spec.task.metric for experiment in experiments))
    title = MEASURES[measure].format(metric=" or ".join(metrics))
    return title[0].upper() + title[1:]


def experiments_frame(experiments: Experiments) -> pd.DataFrame:
    """Tabulate several experiments, one row per experiment and method, as in ``summary.csv``."""
    import pandas as pd

    lines = [
        {
            "experiment": experiment.name,
            "value": experiment.value,
            "method": row.method.label,
            "target": experiment.results.spec.run.target,
            **_counts(row),
            **_spreads(row, tuple(MEASURES)),
        }
        for experiment in experiments
        for row in experiment.results.rows
    ]
    return pd.DataFrame(lines)
