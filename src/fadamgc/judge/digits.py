"""Compare a method, tuned on held-out data, with the methods of the preset on digits."""

from __future__ import annotations

import math
from itertools import product
from statistics import fmean
from typing import Any, NamedTuple

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.experiments.spec.sections import Spec, TuneSpec
from fadamgc.experiments.spec.toml_io import preset
from fadamgc.federation.run import Run
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.sim.many import simulate_many
from fadamgc.tasks.build import build_task

BASELINES = ("fedavg_m", "scaffold_m", "fedadam", "local_adam", "fadamgc")
GLOBAL_STEPS = (0.1, 1.0)  # tried if the method has eta_g
SEEDS = (0, 1)
GROUPS = 5  # for methods with groups


class DigitsRow(NamedTuple):
    """The results of one method."""

    method: str
    rounds: float | None  # to 90 % accuracy, mean over the seeds that reached it
    reached: int
    seeds: int
    final: float  # accuracy after the last round
    mb: float  # per round, all clients together
    step_sizes: dict[str, float]
    note: str = ""  # how its runs differ from the runs of the other methods


def compare_on_digits(algorithm: AnyAlgorithm) -> list[DigitsRow]:
    """Return the rows of the method (first) and of the baselines, which have the step sizes of the preset."""
    spec = preset("digits")
    named = [(algorithm.title, tuned(algorithm, spec))]
    named += [(method.label, method.make()) for method in spec.only(BASELINES).methods]
    return [_row(label, method, spec) for label, method in named]


def tuned(algorithm: AnyAlgorithm, spec: Spec) -> AnyAlgorithm:
    """Return the method with the best step sizes of a grid, on a part of the train data."""
    grid = spec.tune
    assert isinstance(grid, TuneSpec)
    sizes: dict[str, tuple[float, ...]] = {"eta_l": grid.eta_l or (algorithm.eta_l,)}
    sizes |= dict.fromkeys(_global_step(algorithm), GLOBAL_STEPS)
    points = [dict(zip(sizes, values, strict=True)) for values in product(*sizes.values())]
    candidates = [algorithm.replace(**point) for point in points]
    task = build_task(spec.task, grid.seeds[0], grid.validation)
    runs = [{"algorithm": candidate, "seed": grid.seeds[0], "task": task} for candidate in candidates]
    results = _simulate(runs, spec, algorithm, rounds=grid.rounds)
    scores = [_score(run, spec) for run in results]
    return candidates[min(range(len(scores)), key=scores.__getitem__)]


def _global_step(algorithm: AnyAlgorithm) -> tuple[str, ...]:
    return ("eta_g",) if "eta_g" in algorithm.setting_names() and hasattr(algorithm, "eta_g") else ()


def _score(run: Run | Exception, spec: Spec) -> tuple[float, float]:
    """Return rounds to the target and the error at the end; the smallest is the best."""
    if isinstance(run, Exception):
        return math.inf, math.inf
    final = run.history[-1].test_metric
    rounds = run.rounds_to(spec.run.target or 1.0)
    return math.inf if rounds is None else rounds, math.inf if final is None else 1 - final


def _row(label: str, algorithm: AnyAlgorithm, spec: Spec) -> DigitsRow:
    runs = [{"algorithm": algorithm, "seed": seed, "task": build_task(spec.task, seed)} for seed in SEEDS]
    results = [run for run in _simulate(runs, spec, algorithm, spec.run.rounds) if isinstance(run, Run)]
    rounds = [r for run in results if (r := run.rounds_to(spec.run.target or 1.0)) is not None]
    finals = [run.history[-1].test_metric or 0.0 for run in results]
    records = [record for run in results for record in run.history]
    steps = {name: getattr(algorithm, name) for name in ("eta_l", *_global_step(algorithm))}
    return DigitsRow(
        method=label,
        rounds=fmean(rounds) if rounds else None,
        reached=len(rounds),
        seeds=len(SEEDS),
        final=fmean(finals) if finals else 0.0,
        mb=fmean(r.bytes_down + r.bytes_up for r in records) / 1e6 if records else math.nan,
        step_sizes=steps,
        note=_note(label, algorithm, spec),
    )


def _note(label: str, algorithm: AnyAlgorithm, spec: Spec) -> str:
    if not algorithm.full_participation:
        return ""
    n = spec.task.clients
    groups = f", in {GROUPS} groups with 2 group rounds" if isinstance(algorithm, GroupedAlgorithm) else ""
    return (
        f"{label} needs all clients: its rounds have {n} clients{groups}, those of the others "
        f"{spec.run.sampled or n}. Compare with care."
    )


def _simulate(runs: list[dict[str, Any]], spec: Spec, algorithm: AnyAlgorithm, rounds: int) -> list[Any]:
    everybody = algorithm.full_participation
    groups: dict[str, Any] = (
        {"groups": GROUPS, "group_rounds": 2} if isinstance(algorithm, GroupedAlgorithm) else {}
    )
    return simulate_many(
        runs,
        **groups,
        rounds=rounds,
        sampled=None if everybody else spec.run.sampled,
        tracked=None,
        local_steps=spec.run.local_steps,
        batch_size=spec.run.batch_size,
        executor=spec.run.executor,
        errors="return",
        progress=False,
    )
