"""The folder of an experiment: its layout, its lock, its spec and its runs.

    spec.toml                   the experiment as it was run
    runs/NAME/run.json          the record of a finished run, written at once
    tuning/                     runs of the search for step sizes
    tuning.csv, tuned.toml      the result of the search
    partition.png               which client has which labels
    report.html, results.*, ... made from the above by `fadamgc report`

A folder that another program wrote may have no spec.toml: the spec is then derived from the runs.
"""

from __future__ import annotations

import copy
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from fadamgc.bundle import has_bundle
from fadamgc.errors import CheckpointError, CheckpointInUseError, InputError, UnwritableError
from fadamgc.escape import printable
from fadamgc.experiments.planned_run import REPORT, PlannedRun
from fadamgc.experiments.spec.sections import PER_METHOD, STEPS, MethodSpec, Spec
from fadamgc.experiments.spec.toml_io import load_spec
from fadamgc.federation.run import Run, read_run
from fadamgc.files import LOCK, lock, make_folder
from fadamgc.loading import untrusted
from fadamgc.tasks.sections import FunctionTask, TaskSpec

SPEC = "spec.toml"
PARTITION = "partition.png"
RUNS = "runs"
TUNING = "tuning"
TUNING_TABLE = "tuning.csv"
TUNED_SPEC = "tuned.toml"
# Everything that an experiment writes, except runs; --overwrite removes these and nothing else.
FILES = (
    *(SPEC, PARTITION, TUNING_TABLE, TUNED_SPEC, "results.csv", "results.md", "results.tex"),
    *(f"{name}.{ending}" for name in ("rounds", "minutes", "curves") for ending in ("png", "svg", "pdf")),
    *("curves.csv", "report.html"),
)


@dataclass(frozen=True)
class SavedExperiment:
    """The spec and the saved runs of an experiment, by the labels of the methods in the order of the spec."""

    spec: Spec
    runs: dict[str, list[Run]]  # finished
    diverged: dict[str, list[str]]  # the errors of runs that stopped at a non-finite update
    damaged: dict[str, list[str]]  # the errors in the records of other runs


class ExperimentFolder:
    """A folder that has, or will have, one experiment."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def has_spec(self) -> bool:
        """Whether a command of this package has written an experiment here."""
        return (self.path / SPEC).is_file()

    @property
    def has_experiment(self) -> bool:
        """Whether there is a spec, or at least a saved run."""
        return self.has_spec or bool(self._saved_folders())

    # Reading.

    def read_plan(self) -> tuple[Spec, list[PlannedRun]]:
        """Read the spec, or derive it from the saved runs, and list its runs, saved or not."""
        if self.has_spec:
            with untrusted():  # a report runs no code of a spec
                spec = load_spec(self.path / SPEC)
            return spec, self.plan(spec)
        return self._derived()

    def plan(self, spec: Spec) -> list[PlannedRun]:
        """List the runs of a spec, method by method."""
        return [
            PlannedRun.of(spec, method, seed, self.path / RUNS / f"{method.slug}-seed{seed}")
            for method in spec.methods
            for seed in spec.run.seeds
        ]

    def load(self) -> SavedExperiment:
        """Read the spec and all saved runs; at least one must be finished."""
        spec, plan = self.read_plan()
        empty: dict[str, list[Any]] = {method.label: [] for method in spec.methods}
        saved = SavedExperiment(spec, *(copy.deepcopy(empty) for _ in range(3)))
        for planned in plan:
            label = planned.method.label
            try:
                if (run := planned.load()) is not None:
                    saved.runs[label].append(run)
                elif (reason := planned.diverged()) is not None:
                    saved.diverged[label].append(f"{planned.name}: {reason}")
            except CheckpointError as error:
                saved.damaged[label].append(f"{planned.name}: {error}")
        if not any(saved.runs.values()):
            reasons = list(chain(*saved.damaged.values(), *saved.diverged.values()))
            why = "\n".join(["", *reasons]) if reasons else "; run it first"
            raise InputError(f"folder={str(self.path)!r} has no finished run of its spec{why}")
        return saved

    def _saved_folders(self) -> list[Path]:
        return [path for path in sorted(self.path.glob(f"{RUNS}/*")) if has_bundle(path, "run")]

    def _derived(self) -> tuple[Spec, list[PlannedRun]]:
        """Derive a spec from the settings of saved runs that agree in everything but method and seed."""
        folders = self._saved_folders()
        if not folders:
            raise InputError(
                f"folder={str(self.path)!r} has no {SPEC}; give a folder that `fadamgc compare` or `run` "
                "has written"
            )
        saved = [read_run(path) for path in folders]
        plan = [PlannedRun.of_saved(run, path) for run, path in zip(saved, folders, strict=True)]
        first = plan[0]
        for other in plan[1:]:
            for key, expected, value in _differences(_shared_settings(first), _shared_settings(other)):
                raise InputError(
                    f"folder={str(self.path)!r} has no {SPEC}, and its runs have different settings: "
                    f"{key}={expected!r} in {first.folder.name}, {value!r} in {other.folder.name}; "
                    "give a folder for each"
                )
        methods = [planned.method for planned in plan]
        shared: dict[str, Any] = {key: getattr(first.run, key) for key in PER_METHOD}
        for key in PER_METHOD:
            if any(getattr(planned.run, key) != shared[key] for planned in plan):
                values = [getattr(planned.run, key) for planned in plan]
                methods = [m.model_copy(update={key: v}) for m, v in zip(methods, values, strict=True)]
                shared[key] = None
        methods = _distinct(methods)
        report = saved[0].settings.get(REPORT, {})
        name = re.sub(r"[^\w .-]", "-", str(report.get("experiment", self.path.resolve().name)))
        title = report.get("title", f"{saved[0].settings['task']}, {first.task.clients} clients")
        seeds = tuple(dict.fromkeys(planned.seed for planned in plan))
        tables = {
            "name": name.lstrip(" .-") or "experiment",
            "title": printable(str(title)),
            "task": first.task,
            "run": first.run.model_copy(update={"seeds": seeds} | shared),
            "cost": first.cost,
            "methods": tuple({method.label: method for method in methods}.values()),
        }
        spec = Spec.from_table(tables, f"the runs of {self.path}:")
        return spec, [PlannedRun.of(spec, m, p.seed, p.folder) for p, m in zip(plan, methods, strict=True)]

    # Writing.

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Lock the folder, so that no other process writes an experiment into it at the same time."""
        with ExitStack() as stack:
            with suppress(UnwritableError):  # make_ready() says what is wrong with the folder
                make_folder(self.path)
                try:
                    stack.enter_context(lock(self.path))
                except CheckpointInUseError:
                    raise InputError(
                        f"out={str(self.path)!r} is being written by another fadamgc; wait for it, or give "
                        "another folder"
                    ) from None
            yield

    def make_ready(self, resume: bool, overwrite: bool) -> None:
        """Make the folder, and check that an experiment may be written into it."""
        out = self.path
        if resume and overwrite:
            raise InputError("resume and overwrite are both given; choose one")
        if out.exists() and not out.is_dir():
            raise InputError(f"out={str(out)!r} is a file; give a folder")
        try:
            out.mkdir(parents=True, exist_ok=True)
            occupied = any(not _is_leftover(path.name) for path in out.iterdir())
            if occupied and not (out / SPEC).exists():
                raise InputError(
                    f"out={str(out)!r} has other files and no experiment; give a new or empty folder"
                )
            if occupied and overwrite:
                for name in FILES:
                    (out / name).unlink(missing_ok=True)
                for name in (RUNS, TUNING):
                    shutil.rmtree(out / name, ignore_errors=True)
            elif occupied and not resume:
                raise InputError(
                    f"out={str(out)!r} already has an experiment; --resume continues it, "
                    "--overwrite replaces it, --out names another folder"
                )
            make_folder(out)
        except (OSError, UnwritableError) as error:
            reason = error.strerror if isinstance(error, OSError) else error
            raise InputError(f"out={str(out)!r} cannot be written: {reason}") from None

    def check_resumable(self, spec: Spec, tuned: bool = False) -> None:
        """Refuse to resume an experiment of other settings: its finished runs would be lost.

        Seeds and methods may be added; cost, target and title may change, because runs do not depend on
        them. With ``tuned``, step sizes may differ.
        """
        if not self.has_spec:
            return
        with untrusted():
            old = load_spec(self.path / SPEC)
        free = {"seeds"} if spec.run.stop_at_target or old.run.stop_at_target else {"seeds", "target"}
        labels = [method.label for method in old.methods]
        saved, new = (_settings(s, free, labels, tuned) for s in (old, spec))
        if not set(old.run.seeds) <= set(spec.run.seeds):
            saved["[run] seeds"], new["[run] seeds"] = list(old.run.seeds), list(spec.run.seeds)
        for key, old_value, value in _differences(saved, new):
            raise InputError(
                f"out={str(self.path)!r} has an experiment with other settings: {key}={old_value!r} there, "
                f"{value!r} here; --overwrite replaces it, --out names another folder"
            )


def _settings(spec: Spec, free: set[str], labels: list[str], tuned: bool) -> dict[str, Any]:
    """List the settings that determine the runs of some methods, without those that may change."""
    values = {f"[task] {key}": value for key, value in _task_settings(spec.task).items()}
    values |= {f"[run] {key}": value for key, value in spec.run.model_dump(exclude=free).items()}
    for method in spec.methods:
        if method.label in labels:
            values[f"{method.label}: algorithm"] = method.algorithm
            values |= {f"{method.label}: {key}": getattr(spec, key)(method) for key in PER_METHOD}
            for key, value in method.hyperparameters.items():
                if not (tuned and key in (STEPS if spec.tune is None else spec.tune.names())):
                    values[f"{method.label}: {key}"] = value
    return values


def _task_settings(task: TaskSpec) -> dict[str, Any]:
    """List the settings of a task, without the metric's name if a function makes the task."""
    return task.model_dump(exclude={"measure"} if isinstance(task, FunctionTask) else set())


def _is_leftover(name: str) -> bool:
    """Whether a file is a lock, or was left by a process that was killed before it wrote an experiment."""
    return name in (LOCK, ".writable") or (name.startswith(".") and name.endswith(".tmp"))


def _shared_settings(planned: PlannedRun) -> dict[str, Any]:
    """Return the settings that all runs of an experiment share."""
    run = planned.run.model_dump(exclude={"seeds", *PER_METHOD})
    return {**_task_settings(planned.task), **run, **dict(planned.cost)}


def _differences(a: dict[str, Any], b: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """List the keys whose values differ, with both values; a missing value is None."""
    return [(key, a.get(key), b.get(key)) for key in {**a, **b} if a.get(key) != b.get(key)]


def _distinct(methods: list[MethodSpec]) -> list[MethodSpec]:
    """Make equal labels of different methods distinct: add the settings in which the methods differ."""
    shared = ("algorithm", *PER_METHOD)
    settings = [{key: getattr(m, key) for key in shared} | m.hyperparameters for m in methods]
    result = []
    for method, values in zip(methods, settings, strict=True):
        rivals = [s for m, s in zip(methods, settings, strict=True) if m.slug == method.slug]
        keys = [key for key in values if any(rival.get(key) != values[key] for rival in rivals)]
        differing = [f"{key}={values[key]!r}" for key in keys]
        label = f"{method.label} ({', '.join(differing)})" if differing else method.label
        result.append(method.model_copy(update={"label": label}))
    return result
