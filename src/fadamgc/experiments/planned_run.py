"""One run of an experiment: the settings that determine it, where it is saved, and how it is read back."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.bundle import has_bundle
from fadamgc.errors import CheckpointError
from fadamgc.escape import printable
from fadamgc.experiments.spec.sections import PER_METHOD, CostSpec, MethodSpec, RunSpec, Spec
from fadamgc.federation.record import BY_CLIENT
from fadamgc.federation.run import Run, read_run, sound
from fadamgc.files import as_json, write_atomic
from fadamgc.tasks.sections import CustomTask, TaskSpec, task_spec
from fadamgc.toml import frozen

# In the folder of a run.
RECORDS = ("run.json", "run.json.gz")  # the record of a finished run, plain or compressed
DIVERGED_RECORD = "diverged.json"  # the error of a run that stopped at a non-finite update
MODEL = "model.safetensors"  # the trained model, if it was asked for
ADAPTER = "adapter"  # adapters of a run on texts, in peft's format
CHECKPOINT = "checkpoint"  # exists while the run is not finished

IDENTITY = "job"  # in the settings of a saved run: its identity; absent from runs of other programs
REPORT = "report"  # in the settings of a saved run: how reports name it and what it measures


@dataclass(frozen=True)
class PlannedRun:
    """One run of one method with one seed, and where it is saved."""

    task: TaskSpec
    run: RunSpec
    cost: CostSpec
    method: MethodSpec
    algorithm: AnyAlgorithm | None  # so that a worker process needs no registry; None: cannot be run
    seed: int
    folder: Path
    validation: float = 0.0  # share of the train data to evaluate on; 0: evaluate on the test data
    detail: str = ""  # distinguishes runs of the same method and seed in messages
    save_model: Literal["last", "best"] | None = None  # which model the run leaves in its folder

    @classmethod
    def of(cls, spec: Spec, method: MethodSpec, seed: int, folder: Path) -> PlannedRun:
        """Plan the run of a spec's method with one seed."""
        own = {key: getattr(spec, key)(method) for key in PER_METHOD}
        run = spec.run.model_copy(update=own)
        algorithm = None if isinstance(spec.task, CustomTask) or not method.known else method.make()
        return cls(spec.task, run, spec.cost, method, algorithm, seed, folder)

    @classmethod
    def of_saved(cls, run: Run, folder: Path) -> PlannedRun:
        """Describe a saved run by its settings, where there is no spec.

        Runs that another program saved (``Run.save``, a Flower server) have a custom task. Such a program may
        put the ``label`` of the method and the ``measure``, the metric's name, into ``settings["report"]``.
        """
        with sound(folder, "run"):
            settings = run.settings
            shown = {key: printable(value) for key, value in settings.get(REPORT, {}).items()}
            identity = settings.get(IDENTITY)
            if identity is None:
                measure = _measure(run)
                table = {"data": "custom", "clients": run.clients.n, "measure": shown.get("measure", measure)}
                shared = set(RunSpec.model_fields) - {"executor", "dtype"}
                common = {key: value for key, value in settings.items() if key in shared}
                if isinstance(common.get("local_steps"), str):  # the name of a function
                    common["local_steps"] = max(w for r in run.history for w in r.work[-1].steps)
                identity = {"task": table, "run": common, "method": settings}
            seed, algorithm = settings["seed"], settings["algorithm"]
            run_table = identity["run"] | {"seeds": [seed], "target": settings.get("target")}
            run_spec = RunSpec.from_table(frozen(run_table), "[run]")
            title = str(algorithm) if run.algorithm is None else run.algorithm.title
            values = identity["method"]["hyperparameters"]
            method = MethodSpec(algorithm=algorithm, label=shown.get("label", title), hyperparameters=values)
            task, cost = task_spec(**identity["task"]), CostSpec(**asdict(run.cost))
            return cls(task, run_spec, cost, method, run.algorithm, seed, folder)

    @property
    def name(self) -> str:
        """The name in messages."""
        return ", ".join(filter(None, (self.method.label, self.detail, f"seed {self.seed}")))

    def identity(self) -> dict[str, Any]:
        """Everything that determines the run, as plain data; the cost only if there is a deadline."""
        return {
            "task": as_json(self.task.model_dump()),
            "run": as_json(self.run.model_dump(exclude={"seeds", "target", "device"}))
            | ({"target": self.run.target} if self.run.stop_at_target else {}),
            "method": as_json(self.method.model_dump(include={"algorithm", "hyperparameters"})),
            "seed": self.seed,
            "validation": self.validation,
        } | ({} if self.run.deadline is None else {"cost": as_json(self.cost.model_dump())})

    def save(self, run: Run) -> None:
        """Write the record of the finished run, with its identity."""
        settings = run.settings | {IDENTITY: self.identity()}
        replace(run, settings=settings).save(self.folder, states=False)

    def load(self) -> Run | None:
        """Read the saved run; None if there is none, or if the saved run has another identity.

        Raises:
            CheckpointError: the record is damaged, or cannot be read.
        """
        if not has_bundle(self.folder, "run"):
            return None
        run = read_run(self.folder)
        identity = run.settings.get(IDENTITY)
        if identity is None:  # a run of another program
            identity = PlannedRun.of_saved(run, self.folder).identity()
        return run if self._is_identity(identity) else None

    def saved(self) -> Run | None:
        """Read the saved run; None also if its record is damaged."""
        try:
            return self.load()
        except CheckpointError:
            return None

    def diverged(self) -> str | None:
        """Return why the run stopped, if one of its updates was not finite."""
        try:
            record = json.loads((self.folder / DIVERGED_RECORD).read_bytes())
        except (OSError, ValueError, RecursionError):
            return None
        same = isinstance(record, dict) and self._is_identity(record.get(IDENTITY))
        return str(record.get("error")) if same else None

    def save_diverged(self, error: str) -> None:
        """Write a record of why the run stopped."""
        self.folder.mkdir(parents=True, exist_ok=True)
        record = {IDENTITY: self.identity(), "error": error}
        write_atomic(self.folder / DIVERGED_RECORD, json.dumps(record).encode())

    def _is_identity(self, saved: object) -> bool:
        """Compare a saved identity with this one.

        Settings with their default do not count (a record of an earlier version lacks newer ones), nor do
        hyperparameters that are None.
        """
        return bool(_essential(saved) == _essential(self.identity()))


def _measure(run: Run) -> str:
    """Return the name of a run's metric; "metric" if its records do not have the name."""
    last = next((r for r in reversed(run.history) if r.test_metric is not None), None)
    named = [] if last is None else [name for name in last.metrics if not name.startswith(BY_CLIENT)]
    if named:
        return printable(named[0])
    return "accuracy" if any(r.test_accuracy is not None for r in run.history) else "metric"


def _essential(identity: Any) -> Any:
    defaults = {name: field.default for name, field in RunSpec.model_fields.items()}
    try:
        method, run = identity["method"], identity["run"]
        values = {key: value for key, value in method["hyperparameters"].items() if value is not None}
        settings = {key: value for key, value in run.items() if value != defaults.get(key)}
        task = identity["task"]
        if ":" in task["data"]:  # a function: ``measure`` only names its metric
            task = {key: value for key, value in task.items() if key != "measure"}
        return identity | {
            "task": task,
            "run": settings,
            "method": method | {"hyperparameters": values},
        }
    except (KeyError, TypeError, AttributeError):
        return identity  # not an identity
