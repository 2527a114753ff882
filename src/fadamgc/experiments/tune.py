"""Step sizes for every method from one grid, on data that the test set has no part in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
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
from fadamgc.experiments.run.runner import carry_out, check, warn
from fadamgc.experiments.run.workers import is_done
from fadamgc.experiments.spec.sections import MethodSpec, Spec, TuneSpec
from fadamgc.federation.run import Run
from fadamgc.files import write_atomic

AT_ONCE = 2  # points of each method that are tried with more seeds before the next look

Key: TypeAlias = tuple[str, float, float, int]  # label, eta_l, eta_g, rounds
Runs: TypeAlias = dict[Key, list[Run | None]]
Wanted: TypeAlias = Mapping[str, Sequence[tuple[float, float]]]  # by label: eta_l and eta_g
Tries: TypeAlias = Callable[[int, Wanted, Sequence[int]], "list[Point]"]


@dataclass(frozen=True)
class Point:
    """What came of one pair of step sizes of one method, over the tune seeds."""

    label: str
    eta_l: float
    eta_g: float
    reached: int  # seeds that reached the target
    rounds: float | None  # to the target, mean over those seeds
    final: float | None  # metric at the end, mean over the seeds that did not diverge
    diverged: int  # seeds whose updates or final metric were not finite
    goal: str  # whether a high metric is good, "max", or a low one, "min"
    tried: int = 0  # for so many rounds
    seeds: int = 1  # with so many seeds

    def rank(self) -> tuple[float, ...]:
        """Smaller is better: tried longest, most seeds at the target, fewest rounds, fewest diverged, best
        end."""
        final = math.inf if self.final is None else self.final * (-1 if self.goal == "max" else 1)
        rounds = math.inf if self.rounds is None else self.rounds
        return (-self.tried, -self.reached, rounds, self.diverged, final, self.eta_l, self.eta_g)

    def at_best(self, seeds: int, least: int) -> tuple[float, ...]:
        """The rank that it cannot surpass with so many seeds, if none reaches the target in fewer rounds."""
        more = seeds - self.seeds
        reached = self.reached + more
        total = self.reached * (self.rounds or 0.0) + more * least
        return (-self.tried, -reached, total / reached if reached else math.inf, self.diverged, -math.inf)


@dataclass(frozen=True)
class Tuned:
    """The spec with the chosen step sizes, the whole grid, and what to know about the choice."""

    spec: Spec
    points: tuple[Point, ...]
    notes: tuple[str, ...]

    def to_pandas(self) -> pd.DataFrame:
        """The grid as a table, one row a point; ``chosen`` marks those in the spec."""
        chosen = {
            (m.label, m.hyperparameters["eta_l"], m.hyperparameters["eta_g"]) for m in self.spec.methods
        }
        rows = [
            {
                "method": p.label,
                "eta_l": p.eta_l,
                "eta_g": p.eta_g,
                "rounds_tried": p.tried,
                "seeds_tried": p.seeds,
                "seeds_reached": p.reached,
                "rounds_to_target": p.rounds,
                "final_metric": p.final,
                "seeds_diverged": p.diverged,
                "chosen": (p.label, p.eta_l, p.eta_g) in chosen,
            }
            for p in self.points
        ]
        return pd.DataFrame(rows)


def tune(
    spec: Spec,
    out: str | Path,
    workers: int | None = None,
    quiet: bool = False,
    resume: bool = False,
    checked: bool = False,
) -> Tuned:
    """Search the grid of [tune] for every method, and write tuning.csv and tuned.toml.

    A grid run is evaluated on held-out train data and ends at the target. A run whose updates were
    not finite counts as one that never reached it.

    The search is "full"; or "race", which chooses the same without the runs that can no longer change the
    choice; or "halving": all points for a third of the rounds, and the best third of them for all. Each
    method has the same grid and the same chances. ``checked``: ``check`` has accepted the jobs already.
    """
    out = Path(out)
    grid = grid_of(spec)
    if not checked:
        check(tune_jobs(spec, grid, out), workers, quiet)
    found: Runs = {}

    def run(rounds: int, wanted: Wanted, seeds: Sequence[int]) -> list[Point]:
        jobs = tune_jobs(spec, grid, out, rounds, wanted, seeds)
        todo = [job for job in jobs if not (resume and is_done(job, warn))]
        before = sum(map(len, found.values()))
        carry_out(todo, workers, quiet, done=before + len(jobs) - len(todo))
        for job in jobs:
            steps = job.method.hyperparameters
            key = (job.method.label, steps["eta_l"], steps["eta_g"], rounds)
            found.setdefault(key, []).append(job.saved())
        return [_point(key, runs, spec.run.target) for key, runs in found.items()]

    every = {method.label: list(product(grid.eta_l, grid.eta_g)) for method in spec.methods}
    if grid.search == "halving":
        points = _halved(grid, every, run)
    elif grid.search == "race":
        points = _raced(grid, every, run, least=min(spec.run.eval_every, grid.rounds))
    else:
        points = run(grid.rounds, every, grid.seeds)
    tuned = choose(spec, points)
    write_atomic(out / TUNING_TABLE, csv_bytes(tuned.to_pandas()))
    write_atomic(out / TUNED_SPEC, tuned.spec.to_toml().encode())
    return tuned


def _halved(grid: TuneSpec, every: Wanted, run: Tries) -> list[Point]:
    """All points for a third of the rounds, and the best third of them for all."""
    short = -(-grid.rounds // 3)
    points = run(short, every, grid.seeds)
    if short == grid.rounds:
        return points
    best = {
        label: [(p.eta_l, p.eta_g) for p in _ranked(points, label)[: -(-len(pairs) // 3)]]
        for label, pairs in every.items()
    }
    latest = {(p.label, p.eta_l, p.eta_g): p for p in run(grid.rounds, best, grid.seeds)}
    return list(latest.values())


def _raced(grid: TuneSpec, every: Wanted, run: Tries, least: int) -> list[Point]:
    """All points with the first seed; with the others too, the best first, as long as one may be the best."""
    points = run(grid.rounds, every, grid.seeds[:1])
    count = len(grid.seeds)
    while True:
        wanted = {}
        for label in every:
            ranked = _ranked(points, label)
            best = min((p.rank() for p in ranked if p.seeds == count), default=(math.inf,))
            able = [p for p in ranked if p.seeds < count and p.at_best(count, least) < best]
            wanted[label] = [(p.eta_l, p.eta_g) for p in able[:AT_ONCE]]
        if not any(wanted.values()):
            return points
        points = run(grid.rounds, wanted, grid.seeds[1:])


def _ranked(points: Sequence[Point], label: str) -> list[Point]:
    return sorted((p for p in points if p.label == label), key=Point.rank)


def grid_of(spec: Spec) -> TuneSpec:
    """The [tune] section of a spec."""
    if spec.tune is None:
        raise InputError("the spec has no [tune] section; add one with eta_l, eta_g and rounds")
    return spec.tune


def tune_jobs(
    spec: Spec,
    grid: TuneSpec,
    out: Path,
    rounds: int | None = None,
    points: Wanted | None = None,
    seeds: Sequence[int] | None = None,
) -> list[PlannedRun]:
    """Runs of the grid, or of some of its points and seeds; all of them on held-out train data."""
    rounds = rounds or grid.rounds
    run = {"rounds": rounds, "stop_at_target": spec.run.target is not None, "on_nonfinite": "error"}
    short = spec.model_copy(update={"run": spec.run.model_copy(update=run)})
    every = list(product(grid.eta_l, grid.eta_g))
    below = TUNING if rounds == grid.rounds else f"{TUNING}/{rounds}-rounds"
    jobs = []
    for method in spec.methods:
        for eta_l, eta_g in every if points is None else points[method.label]:
            tried = method.with_(eta_l=eta_l, eta_g=eta_g)
            for seed in grid.seeds if seeds is None else seeds:
                folder = out / below / method.slug / f"eta_l-{eta_l!r}-eta_g-{eta_g!r}-seed{seed}"
                detail = f"eta_l={eta_l:g} eta_g={eta_g:g}"
                jobs.append(PlannedRun.of(short, tried, seed, folder, grid.validation, detail))
    return jobs


def choose(spec: Spec, points: list[Point]) -> Tuned:
    """The best point of each method, with a note where it lies at the grid's edge."""
    assert spec.tune is not None
    methods: list[MethodSpec] = []
    notes: list[str] = []
    for method in spec.methods:
        best = min((p for p in points if p.label == method.label), key=Point.rank)
        if best.final is None:
            raise FadamgcError(
                f"tuning {method.label}: no run of the grid stayed finite; lower the values of [tune] eta_l"
            )
        methods.append(method.with_(eta_l=best.eta_l, eta_g=best.eta_g))
        if spec.run.target is not None and best.reached < len(spec.tune.seeds):
            notes.append(
                f"{method.label}: the best point reached the target with {best.reached} of "
                f"{len(spec.tune.seeds)} seeds within {spec.tune.rounds} rounds"
            )
        for name, value, values in (
            ("eta_l", best.eta_l, spec.tune.eta_l),
            ("eta_g", best.eta_g, spec.tune.eta_g),
        ):
            if len(values) > 1 and value in (min(values), max(values)):
                end = "low" if value == min(values) else "high"
                notes.append(f"{method.label}: {name}={value:g} is at the {end} end of the grid")
    tuned = Spec(**{**dict(spec), "methods": tuple(methods)})
    return Tuned(tuned, tuple(points), tuple(notes))


def _point(key: Key, runs: list[Run | None], target: float | None) -> Point:
    finished = [run for run in runs if run is not None]
    rounds = [run.rounds_to(target) for run in finished] if target is not None else []
    at_target = [r for r in rounds if r is not None]
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
