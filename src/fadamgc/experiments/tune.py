"""Choose the step sizes of every method from one grid, on data that are not test data."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TypeAlias

import pandas as pd

from fadamgc.errors import FadamgcError, InputError
from fadamgc.escape import csv_bytes
from fadamgc.experiments.folder import TUNED_SPEC, TUNING, TUNING_TABLE
from fadamgc.experiments.planned_run import PlannedRun
from fadamgc.experiments.report.numbers import mean_of
from fadamgc.experiments.run.runner import Runner
from fadamgc.experiments.spec.sections import MethodSpec, Spec, TuneSpec
from fadamgc.federation.run import Run
from fadamgc.files import write_atomic

AT_ONCE = 2  # points of each method that a race tries with more seeds before it ranks them again
COLUMNS = {  # of tuning.csv, by the fields of a Point
    **{"label": "method", "eta_l": "eta_l", "eta_g": "eta_g", "tried": "rounds_tried"},
    **{"seeds": "seeds_tried", "reached": "seeds_reached", "rounds": "rounds_to_target"},
    **{"final": "final_metric", "diverged": "seeds_diverged"},
}

Key: TypeAlias = tuple[str, float, float, int]  # label, eta_l, eta_g, rounds
Pairs: TypeAlias = Mapping[str, Sequence[tuple[float, float]]]  # by label: eta_l and eta_g
Try: TypeAlias = Callable[[int, Pairs, Sequence[int]], "list[Point]"]  # rounds, pairs, seeds


@dataclass(frozen=True)
class Point:
    """The result of one pair of step sizes of one method, over the seeds of [tune]."""

    label: str
    eta_l: float
    eta_g: float
    reached: int  # seeds that reached the target
    rounds: float | None  # to the target, mean over those seeds
    final: float | None  # metric at the end, mean over the seeds that did not diverge
    diverged: int  # seeds whose updates or final metric were not finite
    goal: str  # "max" if a high metric is good, "min" if a low one is
    tried: int = 0  # rounds for which it was tried
    seeds: int = 1  # number of seeds with which it was tried

    def rank(self) -> tuple[float, ...]:
        """Return the place in the order of choice, smallest first.

        First come the points that were tried for the most rounds, then those with the most seeds at the
        target, the fewest rounds to it, the fewest diverged seeds, the best metric at the end.
        """
        final = math.inf if self.final is None else self.final * (-1 if self.goal == "max" else 1)
        rounds = math.inf if self.rounds is None else self.rounds
        return (-self.tried, -self.reached, rounds, self.diverged, final, self.eta_l, self.eta_g)

    def at_best(self, seeds: int, least: int) -> tuple[float, ...]:
        """Bound the rank with ``seeds`` seeds from below, if no seed needs fewer than ``least`` rounds."""
        more = seeds - self.seeds
        reached = self.reached + more
        total = self.reached * (self.rounds or 0.0) + more * least
        return (-self.tried, -reached, total / reached if reached else math.inf, self.diverged, -math.inf)


@dataclass(frozen=True)
class Tuned:
    """The spec with the chosen step sizes, the whole grid, and notes about the choice."""

    spec: Spec
    points: tuple[Point, ...]
    notes: tuple[str, ...]

    def to_pandas(self) -> pd.DataFrame:
        """Make a table of the grid, one row per point; ``chosen`` marks those in the spec."""
        best = {(m.label, m.hyperparameters["eta_l"], m.hyperparameters["eta_g"]) for m in self.spec.methods}
        frame = pd.DataFrame(map(asdict, self.points))[list(COLUMNS)].rename(columns=COLUMNS)
        return frame.assign(chosen=[(p.label, p.eta_l, p.eta_g) in best for p in self.points])


def tune(
    spec: Spec,
    out: str | Path,
    workers: int | None = None,
    quiet: bool = False,
    resume: bool = False,
    runner: Runner | None = None,
) -> Tuned:
    """Search the grid of [tune] for every method, and write tuning.csv and tuned.toml.

    A run of the search is evaluated on held-out train data and ends at the target. A run whose updates were
    not finite counts as one that never reached the target.

    The search is "full"; or "race", which chooses the same without the runs that can no longer change the
    choice; or "halving": all points for a third of the rounds, and the best third of them for all rounds.
    All methods have the same grid and the same chances. The arguments are those of ``run_spec``.
    """
    out = Path(out)
    grid = grid_of(spec)
    if runner is None:
        runner = Runner(workers, quiet)
        runner.check(tuning_plan(spec, out))
    results: dict[Key, list[Run | None]] = {}

    def try_points(rounds: int, pairs: Pairs, seeds: Sequence[int]) -> list[Point]:
        plan = tuning_plan(spec, out, rounds, pairs, seeds)
        runner.execute(plan, resume, done=sum(map(len, results.values())))
        for planned in plan:
            steps = planned.method.hyperparameters
            key = (planned.method.label, steps["eta_l"], steps["eta_g"], rounds)
            results.setdefault(key, []).append(planned.saved())
        return [_point(key, runs, spec.run.target) for key, runs in results.items()]

    pairs = {method.label: list(product(grid.eta_l, grid.eta_g)) for method in spec.methods}
    if grid.search == "halving":
        points = _halved(grid, pairs, try_points)
    elif grid.search == "race":
        points = _raced(grid, pairs, try_points, least=min(spec.run.eval_every, grid.rounds))
    else:
        points = try_points(grid.rounds, pairs, grid.seeds)
    tuned = with_best_steps(spec, points)
    write_atomic(out / TUNING_TABLE, csv_bytes(tuned.to_pandas()))
    write_atomic(out / TUNED_SPEC, tuned.spec.to_toml().encode())
    return tuned


def _halved(grid: TuneSpec, pairs: Pairs, try_points: Try) -> list[Point]:
    """Try all points for a third of the rounds, and the best third of them for all rounds."""
    short = -(-grid.rounds // 3)
    points = try_points(short, pairs, grid.seeds)
    if short == grid.rounds:
        return points
    best = {
        label: [(p.eta_l, p.eta_g) for p in _ranked(points, label)[: -(-len(of_method) // 3)]]
        for label, of_method in pairs.items()
    }
    latest = {(p.label, p.eta_l, p.eta_g): p for p in try_points(grid.rounds, best, grid.seeds)}
    return list(latest.values())


def _raced(grid: TuneSpec, pairs: Pairs, try_points: Try, least: int) -> list[Point]:
    """Try all points with the first seed, and those that can still win with all seeds, the best first."""
    points = try_points(grid.rounds, pairs, grid.seeds[:1])
    count = len(grid.seeds)
    while True:
        contenders = {}
        for label in pairs:
            ranked = _ranked(points, label)
            best = min((p.rank() for p in ranked if p.seeds == count), default=(math.inf,))
            able = [p for p in ranked if p.seeds < count and p.at_best(count, least) < best]
            contenders[label] = [(p.eta_l, p.eta_g) for p in able[:AT_ONCE]]
        if not any(contenders.values()):
            return points
        points = try_points(grid.rounds, contenders, grid.seeds[1:])


def _ranked(points: Sequence[Point], label: str) -> list[Point]:
    return sorted((p for p in points if p.label == label), key=Point.rank)


def grid_of(spec: Spec) -> TuneSpec:
    """Return the [tune] section of a spec."""
    if spec.tune is None:
        raise InputError("the spec has no [tune] section; add one with eta_l, eta_g and rounds")
    return spec.tune


def tuning_plan(
    spec: Spec,
    out: Path,
    rounds: int | None = None,
    pairs: Pairs | None = None,
    seeds: Sequence[int] | None = None,
) -> list[PlannedRun]:
    """List the runs of the grid, or of some of its points and seeds; all of them on held-out train data."""
    grid = grid_of(spec)
    rounds = rounds or grid.rounds
    run = {"rounds": rounds, "stop_at_target": spec.run.target is not None, "on_nonfinite": "error"}
    short = spec.model_copy(update={"run": spec.run.model_copy(update=run)})
    folder = out / TUNING if rounds == grid.rounds else out / TUNING / f"{rounds}-rounds"
    plan = []
    for method in spec.methods:
        for eta_l, eta_g in product(grid.eta_l, grid.eta_g) if pairs is None else pairs[method.label]:
            changed, detail = method.with_(eta_l=eta_l, eta_g=eta_g), f"eta_l={eta_l:g} eta_g={eta_g:g}"
            for seed in grid.seeds if seeds is None else seeds:
                place = folder / method.slug / f"eta_l-{eta_l!r}-eta_g-{eta_g!r}-seed{seed}"
                planned = PlannedRun.of(short, changed, seed, place)
                plan.append(replace(planned, validation=grid.validation, detail=detail))
    return plan


def with_best_steps(spec: Spec, points: list[Point]) -> Tuned:
    """Give each method the step sizes of its best point, with a note if that is at the end of the grid."""
    grid = grid_of(spec)
    methods: list[MethodSpec] = []
    notes: list[str] = []
    for method in spec.methods:
        best = min((p for p in points if p.label == method.label), key=Point.rank)
        if best.final is None:
            raise FadamgcError(
                f"tuning {method.label}: no run of the grid stayed finite; lower the values of [tune] eta_l"
            )
        methods.append(method.with_(eta_l=best.eta_l, eta_g=best.eta_g))
        if spec.run.target is not None and best.reached < len(grid.seeds):
            notes.append(
                f"{method.label}: the best point reached the target with {best.reached} of "
                f"{len(grid.seeds)} seeds within {grid.rounds} rounds"
            )
        for name, value, values in (("eta_l", best.eta_l, grid.eta_l), ("eta_g", best.eta_g, grid.eta_g)):
            if len(values) > 1 and value in (min(values), max(values)):
                end = "low" if value == min(values) else "high"
                notes.append(f"{method.label}: {name}={value:g} is at the {end} end of the grid")
    tuned = Spec(**{**dict(spec), "methods": tuple(methods)})
    return Tuned(tuned, tuple(points), tuple(notes))


def _point(key: Key, runs: list[Run | None], target: float | None) -> Point:
    finished = [run for run in runs if run is not None]
    at_target = [r for run in finished if target is not None and (r := run.rounds_to(target)) is not None]
    finals = [final for run in finished if (final := run.history[-1].test_metric) is not None]
    numbers = [final for final in finals if math.isfinite(final)]
    return Point(
        *key[:3],
        reached=len(at_target),
        rounds=fmean(at_target) if at_target else None,
        final=mean_of(numbers) if numbers else None,
        diverged=len(runs) - len(finished) + len(finals) - len(numbers),
        goal=finished[0].goal if finished else "max",
        tried=key[3],
        seeds=len(runs),
    )
