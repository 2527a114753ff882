"""Choose hyperparameters of every method from a grid, on held-out train data."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from fadamgc.errors import FadamgcError, InputError
from fadamgc.escape import csv_bytes
from fadamgc.experiments.folder import TUNED_SPEC, TUNING, TUNING_TABLE
from fadamgc.experiments.planned_run import PlannedRun
from fadamgc.experiments.points import (
    Point,
    Values,
    beyond_end,
    grid_end,
    is_number,
    points_table,
    shown_values,
)
from fadamgc.experiments.report.means import mean_of
from fadamgc.experiments.run.runner import Runner
from fadamgc.experiments.spec.sections import MethodSpec, Spec, TuneSpec
from fadamgc.federation.run import Run
from fadamgc.files import write_atomic

if TYPE_CHECKING:
    import pandas as pd

STARTS = 4  # points of each method that Optuna draws at random before it learns from them
ASKED = 100  # suggestions that Optuna may make until one is a point that was not tried yet
BEYOND = 10  # values that are tried beyond an end of a grid
AT_ONCE = 2  # points of each method that a race tries with more seeds before it ranks them again

Key: TypeAlias = tuple[str, Values, int]  # label, values, rounds
Grids: TypeAlias = Mapping[str, Sequence[Values]]  # by label: the points of its grid
Try: TypeAlias = Callable[[int, Grids, Sequence[int]], "list[Point]"]  # rounds, points, seeds


@dataclass(frozen=True)
class Tuned:
    """The spec with the chosen values, the whole grid, and notes about the choice."""

    spec: Spec
    points: tuple[Point, ...]
    notes: tuple[str, ...]
    best: tuple[Point, ...]

    @property
    def chosen(self) -> dict[str, str]:
        """The chosen values of each method, in words."""
        return {point.label: shown_values(point.values) for point in self.best}

    def to_pandas(self) -> pd.DataFrame:
        """Make a table of the grid, one row per point; ``chosen`` marks the points in the spec."""
        return points_table(self.points, self.best)


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

    The search is one of:

    - "full": all points of the grid;
    - "race": the same choice as "full", without the runs that can no longer change the choice;
    - "halving": all points for a third of the rounds with the first seed, then the best third of the
      points for all rounds with all seeds;
    - "random": some points of each grid, drawn at random;
    - "optuna": some points of each grid, one after the other, suggested by Optuna's TPE.

    With ``extend`` numbers beyond the ends of the grids are tried, until no chosen number is the smallest or
    the largest that was tried, or the method accepts none beyond it.

    All methods are searched in the same way. The arguments are those of ``run_spec``.
    """
    out = Path(out)
    grid = grid_of(spec)
    if grid.search == "optuna":
        optuna_module()  # before anything is written
    if runner is None:
        runner = Runner(workers, quiet)
        runner.check(tuning_plan(spec, out))
    results: dict[Key, list[Run | None]] = {}

    def try_points(rounds: int, points: Grids, seeds: Sequence[int]) -> list[Point]:
        planned = _planned(spec, out, rounds, points, seeds)
        runner.execute([run for _, run in planned], resume, done=sum(map(len, results.values())))
        for values, run in planned:
            results.setdefault((run.method.label, values, rounds), []).append(run.saved())
        return [_point(key, runs, spec.run.target) for key, runs in results.items()]

    pairs = points_of(spec)
    if grid.search == "halving":
        points = _halved(grid, pairs, try_points)
    elif grid.search == "race":
        points = _raced(grid, pairs, try_points, least=min(spec.run.eval_every, grid.rounds))
    elif grid.search == "optuna":
        points = _suggested(spec, grid, try_points)
    else:
        points = try_points(grid.rounds, pairs, grid.seeds)
    if grid.extend:
        points = _extended(spec, grid, points, try_points)
    tuned = with_best_steps(spec, points)
    write_atomic(out / TUNING_TABLE, csv_bytes(tuned.to_pandas()))
    write_atomic(out / TUNED_SPEC, tuned.spec.to_toml().encode())
    return tuned


def _halved(grid: TuneSpec, pairs: Grids, try_points: Try) -> list[Point]:
    """Try all points for a third of the rounds, and the best third of them for all rounds."""
    short = -(-grid.rounds // 3)
    if short == grid.rounds:
        return try_points(short, pairs, grid.seeds)
    points = try_points(short, pairs, grid.seeds[:1])
    best = {
        label: [p.values for p in _ranked(points, label)[: -(-len(of_method) // 3)]]
        for label, of_method in pairs.items()
    }
    latest = {(p.label, p.values): p for p in try_points(grid.rounds, best, grid.seeds)}
    return list(latest.values())


def _raced(grid: TuneSpec, pairs: Grids, try_points: Try, least: int) -> list[Point]:
    """Try all points with the first seed, and those that can still win with all seeds, the best first."""
    points = try_points(grid.rounds, pairs, grid.seeds[:1])
    count = len(grid.seeds)
    while True:
        contenders = {}
        for label in pairs:
            ranked = _ranked(points, label)
            best = min((p.rank() for p in ranked if p.seeds == count), default=(math.inf,))
            able = [p for p in ranked if p.seeds < count and p.at_best(count, least) < best]
            contenders[label] = [p.values for p in able[:AT_ONCE]]
        if not any(contenders.values()):
            return points
        points = try_points(grid.rounds, contenders, grid.seeds[1:])


def _extended(spec: Spec, grid: TuneSpec, points: list[Point], try_points: Try) -> list[Point]:
    """Try numbers beyond those that were tried, until the best point of each method lies between others."""
    for _ in range(BEYOND):
        beyond: dict[str, list[Values]] = {}
        for method in spec.methods:
            best, tried = _ranked(points, method.label)[0], _tried_values(grid, method, points)
            further = {name: beyond_end(value, tried[name]) for name, value in best.values}
            around = [
                tuple((key, value if key == name else old) for key, old in best.values)
                for name, value in further.items()
                if value is not None and best.final is not None
            ]
            beyond[method.label] = [values for values in around if _accepted(method, values)]
        if not any(beyond.values()):
            break
        latest = {(p.label, p.values): p for p in [*points, *try_points(grid.rounds, beyond, grid.seeds)]}
        points = list(latest.values())
    return points


def _accepted(method: MethodSpec, values: Values) -> bool:
    try:
        method.with_(**dict(values)).make()
    except InputError:
        return False
    return True


def _tried_values(grid: TuneSpec, method: MethodSpec, points: Sequence[Point]) -> dict[str, list[Any]]:
    """Return the values in the grid of a method, and those that were tried beyond it."""
    tried = [dict(point.values) for point in points if point.label == method.label]
    return {
        name: list(dict.fromkeys([*values, *(point[name] for point in tried)]))
        for name, values in grid.grid_of(method).items()
    }


def _suggested(spec: Spec, grid: TuneSpec, try_points: Try) -> list[Point]:
    """Try points that Optuna suggests, one of each method at a time.

    A suggestion depends on the seed and on the ranks of the points that were tried, so nothing but the runs
    needs to be saved: a search that is resumed makes the same suggestions.
    """
    optuna = optuna_module()
    points: list[Point] = []
    for turn in range(grid.points or 0):
        suggestions: dict[str, list[Values]] = {}
        for number, method in enumerate(spec.methods):
            grids = grid.grid_of(method)
            space = {n: optuna.distributions.IntDistribution(0, len(v) - 1) for n, v in grids.items()}
            seed = int(np.random.SeedSequence((grid.seeds[0], number, turn)).generate_state(1)[0])
            sampler = optuna.samplers.TPESampler(n_startup_trials=STARTS, seed=seed)
            study = optuna.create_study(sampler=sampler)  # minimises
            ranked = _ranked(points, method.label)
            for place, point in enumerate(ranked):
                numbers = {name: grids[name].index(value) for name, value in point.values}
                trial = optuna.trial.create_trial(params=numbers, distributions=space, value=float(place))
                study.add_trial(trial)
            asked = (study.ask(space).params for _ in range(ASKED))
            found = (tuple((name, grids[name][i]) for name, i in params.items()) for params in asked)
            new = next((values for values in found if values not in [p.values for p in ranked]), None)
            suggestions[method.label] = [] if new is None else [new]
        if any(suggestions.values()):
            points = try_points(grid.rounds, suggestions, grid.seeds)
    return points


def optuna_module() -> Any:
    """Import Optuna, which is an optional dependency."""
    try:
        import optuna
    except ImportError as error:
        raise InputError(
            "[tune] search='optuna' needs Optuna: pip install 'fadamgc[optuna]'; or give search='random'"
        ) from error
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna


def _ranked(points: Sequence[Point], label: str) -> list[Point]:
    return sorted((p for p in points if p.label == label), key=Point.rank)


def grid_of(spec: Spec) -> TuneSpec:
    """Return the [tune] section of a spec."""
    if spec.tune is None:
        raise InputError("the spec has no [tune] section; add one with eta_l, eta_g and rounds")
    return spec.tune


def points_of(spec: Spec) -> dict[str, list[Values]]:
    """Return the points of each method's grid, or some of them in a random search.

    Optuna's points are not known in advance; in their place are as many points as in a random search.
    """
    grid = grid_of(spec)
    points: dict[str, list[Values]] = {}
    for number, method in enumerate(spec.methods):
        values = grid.grid_of(method)
        grid_points = [tuple(zip(values, point, strict=True)) for point in product(*values.values())]
        if grid.points is not None and grid.points < len(grid_points):
            random = np.random.default_rng((grid.seeds[0], number))
            chosen = random.choice(len(grid_points), grid.points, replace=False)
            grid_points = [grid_points[i] for i in sorted(chosen)]
        points[method.label] = grid_points
    return points


def tuning_plan(spec: Spec, out: Path) -> list[PlannedRun]:
    """List the runs of the whole grid; all of them on held-out train data."""
    grid = grid_of(spec)
    return [run for _, run in _planned(spec, out, grid.rounds, points_of(spec), grid.seeds)]


def _planned(
    spec: Spec, out: Path, rounds: int, points: Grids, seeds: Sequence[int]
) -> list[tuple[Values, PlannedRun]]:
    """List the runs of some points with some seeds."""
    grid = grid_of(spec)
    run = {"rounds": rounds, "stop_at_target": spec.run.target is not None, "on_nonfinite": "error"}
    short = spec.model_copy(update={"run": spec.run.model_copy(update=run)})
    folder = out / TUNING if rounds == grid.rounds else out / TUNING / f"{rounds}-rounds"
    plan = []
    for method in spec.methods:
        for values in points[method.label]:
            changed, detail = method.with_(**dict(values)), shown_values(values).replace(", ", " ")
            name = "-".join(f"{key}-{_file_name(value)}" for key, value in values)
            for seed in seeds:
                planned = PlannedRun.of(short, changed, seed, folder / method.slug / f"{name}-seed{seed}")
                plan.append((values, replace(planned, validation=grid.validation, detail=detail)))
    return plan


def _file_name(value: Any) -> str:
    return repr(value) if is_number(value) else re.sub(r"[^A-Za-z0-9.]+", "_", str(value))


def with_best_steps(spec: Spec, points: list[Point]) -> Tuned:
    """Give each method the values of its best point, with a note if one is at the end of the grid."""
    grid = grid_of(spec)
    methods: list[MethodSpec] = []
    notes: list[str] = []
    chosen: list[Point] = []
    for method in spec.methods:
        best = min((p for p in points if p.label == method.label), key=Point.rank)
        if best.final is None:
            raise FadamgcError(
                f"tuning {method.label}: no run of the grid stayed finite; lower the values of [tune] eta_l"
            )
        methods.append(method.with_(**dict(best.values)))
        chosen.append(best)
        if spec.run.target is not None and best.reached < len(grid.seeds):
            notes.append(
                f"{method.label}: the best point reached the target with {best.reached} of "
                f"{len(grid.seeds)} seeds within {grid.rounds} rounds"
            )
        for name, values in _tried_values(grid, method, points).items():
            value = dict(best.values)[name]
            if (end := grid_end(value, values)) is not None:
                notes.append(f"{method.label}: {name}={value:g} is at the {end} end of the grid")
    tuned = Spec(**{**dict(spec), "methods": tuple(methods)})
    return Tuned(tuned, tuple(points), tuple(notes), tuple(chosen))


def _point(key: Key, runs: list[Run | None], target: float | None) -> Point:
    finished = [run for run in runs if run is not None]
    at_target = [r for run in finished if target is not None and (r := run.rounds_to(target)) is not None]
    finals = [final for run in finished if (final := run.history[-1].test_metric) is not None]
    numbers = [final for final in finals if math.isfinite(final)]
    return Point(
        *key[:2],
        reached=len(at_target),
        rounds=fmean(at_target) if at_target else None,
        final=mean_of(numbers) if numbers else None,
        diverged=len(runs) - len(finished) + len(finals) - len(numbers),
        goal=finished[0].goal if finished else "max",
        tried=key[2],
        seeds=len(runs),
    )
