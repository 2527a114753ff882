"""Execute runs in this process: check, start or resume them, advance them together, and save them.

This is the only module of the experiments that uses the simulator.
"""

from __future__ import annotations

import errno
import logging
import os
import pickle
import shutil
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fadamgc.cache import code_folder
from fadamgc.errors import (
    CheckpointError,
    CheckpointInUseError,
    FadamgcError,
    InputError,
    NonFiniteError,
    OtherRunError,
    UnwritableError,
    first_line,
    shown,
)
from fadamgc.experiments.planned_run import (
    ADAPTER,
    CHECKPOINT,
    DIVERGED_RECORD,
    MODEL,
    RECORDS,
    PlannedRun,
)
from fadamgc.federation.run import Run
from fadamgc.files import remove_leftovers, unwritable
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.loading import load_object
from fadamgc.methods import algorithm_class
from fadamgc.runtime import device_of, memory, one_thread, pickled
from fadamgc.samples import tensors_of
from fadamgc.sim.engine import Engine, RoundEnd
from fadamgc.sim.executors.machine_code import compiler
from fadamgc.sim.many import run_together
from fadamgc.sim.resources import Resources
from fadamgc.sim.simulate import SETTINGS, simulate, start_from
from fadamgc.stages import Warn, showing, stage
from fadamgc.task import Task
from fadamgc.tasks.build import build_task
from fadamgc.tasks.sections import FunctionTask, HarTask, TableTask, TextTask
from fadamgc.trackers import trackers_of
from fadamgc.tree import leaves

log = logging.getLogger("fadamgc")

CHECKPOINT_EVERY = 25  # rounds that an interrupted run loses at the most
CACHED = 1 / 8  # share of the memory that the kept tasks of all processes together may use
SHARED = (FunctionTask, HarTask, TableTask, TextTask)  # tasks whose data may be large and in no mapped file


class DiskSpace(NamedTuple):
    """The approximate disk space of a run, in bytes."""

    record: int  # permanently
    checkpoint: int  # while the run is executed


class RunEnd(NamedTuple):
    """How a run ended."""

    rounds: int
    metric: float | None  # of the last evaluation
    error: str | None = None  # why the run did not finish


class Stopped(Exception):  # noqa: N818
    """The user has stopped the command; runs that are not finished are not saved."""


class TaskCache:
    """The tasks of runs; those that fit into this process's part of the memory are built once."""

    def __init__(self, processes: int = 1, shared: SharedTasks | None = None) -> None:
        self.limit = CACHED * (memory() or 0) / processes
        self._tasks: dict[Any, tuple[Task, int]] = {}  # with their sizes, the oldest first
        self._shared = {} if shared is None else shared.load()

    def task(self, planned: PlannedRun) -> Task:
        """Return the task of a run."""
        key = _key(planned)
        if key in self._shared:
            return self._shared[key]
        if key in self._tasks:
            return self._tasks[key][0]
        with stage(f"loading {planned.task.data}, seed {planned.seed}"):
            task = build_task(planned.task, planned.seed, planned.validation)
        data = tensors_of([*task.in_memory(), task.test_samples])
        size = _bytes(chain(task.model.parameters(), task.model.buffers(), data))
        while self._tasks and sum(s for _, s in self._tasks.values()) + size > self.limit:
            del self._tasks[next(iter(self._tasks))]
        if size <= self.limit:
            self._tasks[key] = task, size
        return task


def _key(planned: PlannedRun) -> tuple[str, int, float]:
    """Return the values that determine the task of a run."""
    return repr(planned.task), planned.seed, planned.validation


class SharedTasks:
    """Tasks that are built once, and whose data all worker processes read from the same memory.

    Images are not among them: they stay in a file that all processes map. Tasks that cannot be pickled, or
    do not fit, are built by the processes themselves.
    """

    def __init__(self, plan: Sequence[PlannedRun], tasks: TaskCache) -> None:
        self.tasks: dict[Any, Task] = {}
        self._pickled: list[tuple[Any, bytes]] = []
        size = 0
        for planned in plan:
            if not isinstance(planned.task, SHARED) or _key(planned) in self.tasks:
                continue
            with one_thread():
                task = tasks.task(planned)
            size += _bytes(tensors_of([*task.in_memory(), task.test_samples]))
            if size > tasks.limit:
                return
            self.tasks[_key(planned)] = task

    def __getstate__(self) -> dict[str, Any]:
        """Pickle the tasks for one process, which is about to start."""
        parts = []
        for key, task in self.tasks.items():
            with suppress(Exception):  # a function inside a function cannot be pickled
                parts.append((key, pickled(task)))
        return {"tasks": {}, "_pickled": parts}

    def load(self) -> dict[Any, Task]:
        """Return the tasks, in the process that they were pickled for."""
        found = dict(self.tasks)
        for key, part in self._pickled:
            with suppress(Exception):  # the task needs a module that only the other process can import
                found[key] = pickle.loads(part)
        return found


def _bytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def arguments(planned: PlannedRun, task: Task) -> dict[str, Any]:
    """Return the arguments of ``simulate`` for a run."""
    run = planned.run
    if not isinstance(planned.algorithm, GroupedAlgorithm):
        run = run.model_copy(update={"groups": None, "group_rounds": None})
    steps = run.local_steps
    return {name: getattr(run, name) for name in SETTINGS if name in type(run).model_fields} | {
        "local_steps": load_object(steps) if isinstance(steps, str) else steps,
        "algorithm": planned.algorithm,
        "task": task,
        "seed": planned.seed,
        "target": run.target if run.stop_at_target else None,
        "cost": planned.cost.model(),
        "dtype": getattr(torch, run.dtype),
        "executor": run.executor,
        "device": _device("cpu" if run.device == "auto" and run.executor == "threads" else run.device),
    }


_worker = 0  # number of this process among the workers


def set_worker(number: int) -> None:
    """Set the number of this worker process; workers take turns on the GPUs of the machine."""
    global _worker
    _worker = number


def _device(name: str) -> torch.device:
    try:
        return device_of(name, _worker)
    except RuntimeError as error:
        raise InputError(f"device={shown(name)} is not accepted: {first_line(error)}") from None


def dry_run(planned: PlannedRun, task: Task) -> DiskSpace:
    """Refuse a run that cannot be executed, without executing it; return the disk space that it needs."""
    run = planned.run
    executor = "loop" if run.executor == "auto" else run.executor  # "auto" would measure times
    dry = simulate(**arguments(planned, task) | {"rounds": 0, "executor": executor}, progress=False)
    sampled = run.sampled or dry.clients.n
    participants = min(dry.clients.n, run.rounds * sampled)
    states = _bytes(leaves(dry.server)) + participants * _bytes(leaves(dry.clients.initial))
    # A checkpoint that is replaced stays until the new one is complete.
    return DiskSpace(record=run.rounds * (300 + 60 * sampled), checkpoint=2 * states)


def share_compiled_code() -> None:
    """Make the folder of compiled code, so that processes started from here use the same one."""
    if compiler() is not None:
        code_folder()


def execute(
    plan: Sequence[PlannedRun],
    on_round: Callable[[int], object],
    warn: Warn = log.warning,
    tasks: TaskCache | None = None,
) -> list[RunEnd]:
    """Execute runs of one method together, and save each as soon as it has ended.

    ``on_round`` is called after each round with the number of the run; if it returns True, the runs stop.
    """
    tasks = tasks or TaskCache()
    for planned in plan:
        algorithm_class(planned.method.algorithm)  # imports the class, so that its name is known in a worker
    ends: dict[int, RunEnd] = {}

    def callback(i: int, _: RoundEnd) -> None:
        if on_round(i):
            raise Stopped

    def finished(i: int, result: Run | NonFiniteError) -> None:
        ends[i] = _save(plan[i], result)

    resources = Resources(len(plan))
    try:
        with torch.inference_mode(False), ExitStack() as stack:
            stack.callback(resources.close)
            stack.enter_context(showing(warn))
            started = []
            for i, planned in enumerate(plan):
                started.append(_start(planned, tasks.task(planned), partial(callback, i), resources, warn))
                stack.callback(started[-1].close)
            run_together(started, finished=finished)
    except (OSError, UnwritableError) as error:  # a full disk, most likely; the last checkpoints are complete
        message = str(unwritable(plan[0].folder.parent, error) if isinstance(error, OSError) else error)
        raise FadamgcError(
            f"{message}; finished runs are saved: make room and continue with --resume"
        ) from error
    return [ends[i] for i in range(len(plan))]


def _start(
    planned: PlannedRun, task: Task, callback: Callable[[RoundEnd], object], resources: Resources, warn: Warn
) -> Engine:
    """Start a run, or resume it from its checkpoint.

    A checkpoint of other settings is removed; one that cannot be read is moved aside, with a warning.
    """
    checkpoint = planned.folder / CHECKPOINT
    trackers = []
    if not planned.validation:
        method = planned.method
        parameters = {"algorithm": method.algorithm, **method.hyperparameters, "seed": planned.seed}
        trackers = trackers_of(planned.folder.parent.parent, planned.folder.name, parameters)
    run_arguments = arguments(planned, task) | {
        "callbacks": (*trackers, callback),
        "checkpoint": checkpoint,
        "checkpoint_every": CHECKPOINT_EVERY,
        "keep": planned.save_model or "last",
        "resume": True,
    }
    try:
        return start_from(run_arguments, resources)
    except OtherRunError:
        shutil.rmtree(checkpoint, ignore_errors=True)
    except CheckpointError as error:
        if isinstance(error, CheckpointInUseError) or is_system_error(error):
            raise
        warn(f"{error}; moved to {move_aside(checkpoint)}, and {planned.name} starts from round 1")
    return start_from(run_arguments, resources)


def _save(planned: PlannedRun, result: Run | NonFiniteError) -> RunEnd:
    if isinstance(result, NonFiniteError):
        planned.save_diverged(str(result))
        return RunEnd(result.round, None, str(result))
    if isinstance(planned.task, TextTask) and not planned.validation:
        from fadamgc.models.text import TextClassifier

        model = result.model
        assert isinstance(model, TextClassifier)
        planned.folder.mkdir(parents=True, exist_ok=True)
        model.save_adapter(planned.folder / ADAPTER)  # before the record, which marks the run as complete
    if planned.save_model is not None:
        result.export(planned.folder / MODEL, planned.save_model)
    planned.save(result)
    (planned.folder / DIVERGED_RECORD).unlink(missing_ok=True)  # of an earlier attempt
    shutil.rmtree(planned.folder / CHECKPOINT, ignore_errors=True)
    return RunEnd(len(result.history), result.history[-1].test_metric)


# Runs of an earlier process.


def is_done(planned: PlannedRun, warn: Warn) -> bool:
    """Return whether a run is saved; move a damaged record aside, with a warning.

    A process that was killed just after it saved the run has left the checkpoint, which is removed.
    """
    try:
        if planned.load() is None or (planned.save_model and not (planned.folder / MODEL).exists()):
            return False
        shutil.rmtree(planned.folder / CHECKPOINT, ignore_errors=True)
        remove_leftovers(planned.folder, "run")
        return True
    except CheckpointError as error:
        if is_system_error(error):
            raise
        aside = [str(move_aside(path)) for name in RECORDS if (path := planned.folder / name).exists()]
        warn(f"{error}; moved to {', '.join(aside)}, and {planned.name} is run again")
        return False


def is_system_error(error: CheckpointError) -> bool:
    """Return whether the system could not read or write (permission, a full disk), which is not damage."""
    cause = error.__cause__ or error.__context__
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno not in (None, errno.ENOENT, errno.ENOTDIR):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def move_aside(path: Path) -> Path:
    """Rename a file or folder that cannot be read, and replace nothing; return the new path."""
    names = (path.with_name(f"{path.name}.unreadable-{number}") for number in count(1))
    return path.rename(next(aside for aside in names if not os.path.lexists(aside)))
