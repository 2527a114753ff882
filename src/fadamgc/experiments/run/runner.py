"""Run every method of a spec with every seed, and save each run as soon as it is finished."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal, NamedTuple

from rich.console import Console
from rich.filesize import decimal as size

from fadamgc.errors import FadamgcError, InputError, not_accepted, whole
from fadamgc.experiments.folder import PARTITION, SPEC, ExperimentFolder
from fadamgc.experiments.planned_run import PlannedRun
from fadamgc.experiments.run.execution import DiskSpace, RunEnd, TaskCache, dry_run, is_done
from fadamgc.experiments.run.listener import in_groups
from fadamgc.experiments.run.progress import display, tell, warn
from fadamgc.experiments.run.ray_tasks import RayTasks
from fadamgc.experiments.run.workers import run_all
from fadamgc.experiments.spec.sections import Spec
from fadamgc.files import remove_leftovers, write_atomic
from fadamgc.tasks.build import label_counts


class Interrupted(FadamgcError):  # noqa: N818
    """The user stopped the command; the message says how many runs are saved and how to continue."""


class Failure(NamedTuple):
    """A run that did not finish, and why."""

    run: str
    error: str


class Runner:
    """Checks and executes the runs of one command, in ``workers`` processes (None: one per core).

    ``save_models`` is the model that each run saves in its folder, "last" or "best"; None: no model. With
    ``ray``, a Ray cluster executes the runs instead.
    """

    def __init__(
        self,
        workers: int | None = None,
        quiet: bool = False,
        save_models: Literal["last", "best"] | None = None,
        ray: RayTasks | None = None,
    ) -> None:
        if save_models not in (None, "last", "best"):
            raise not_accepted("save_models", save_models, "'last' or 'best'")
        self.save_models = save_models
        self.workers = (os.cpu_count() or 1) if workers is None else whole("workers", workers, 1)
        self.quiet, self.ray = quiet, ray
        self.later = 0  # rounds of runs that the command executes later, for the time left
        self._tasks = TaskCache()

    def check(self, plan: Sequence[PlannedRun]) -> None:
        """Refuse runs of one spec that cannot be executed; the first run of each method is tried."""
        first: dict[str, PlannedRun] = {}  # by method; all of them have the first seed, and so the same task
        for planned in plan:
            first.setdefault(planned.method.slug, planned)
        console = Console(stderr=True, quiet=self.quiet)
        tell(f"preparing {plan[0].task.data} ...", console)
        task = self._tasks.task(plan[0])
        tell(f"checking {f'{len(first)} methods' if len(first) > 1 else plan[0].method.label} ...", console)
        self._check_disk(plan, {slug: dry_run(planned, task) for slug, planned in first.items()})

    @contextmanager
    def before(self, plan: Sequence[PlannedRun]) -> Iterator[None]:
        """Include the rounds of these later runs in the displayed time left, in a ``with`` block."""
        self.later = sum(planned.run.rounds for planned in plan)
        try:
            yield
        finally:
            self.later = 0

    def _check_disk(self, plan: Sequence[PlannedRun], space: dict[str, DiskSpace]) -> None:
        records = sum(space[planned.method.slug].record for planned in plan if not planned.folder.exists())
        checkpoints = max(
            sum(space[plan[i].method.slug].checkpoint for i in group)
            for group in in_groups(plan, self.workers)
        )
        need = records + min(self.workers, len(plan)) * checkpoints
        folder = plan[0].folder
        disk = shutil.disk_usage(next(parent for parent in folder.parents if parent.exists()))
        if disk.total and need > disk.free:  # total 0: no disk, so writing fails
            raise InputError(
                f"out={str(folder.parent.parent)!r} is on a disk with {size(disk.free)} free; the runs need "
                f"about {size(need)} ({size(records)} to keep, the rest for checkpoints while they run): "
                "make room, or give a folder on another disk"
            )

    def execute(self, plan: Sequence[PlannedRun], resume: bool, done: int = 0) -> tuple[Failure, ...]:
        """Execute runs, with ``resume`` only those that are not saved, with progress on stderr.

        ``done`` is the number of runs that the same command has already finished.
        """
        total = done + len(plan)
        plan = [p if p.validation else replace(p, save_model=self.save_models) for p in plan]
        plan = [planned for planned in plan if not (resume and is_done(planned, warn))]
        failures: list[Failure] = []
        with display(plan, self.quiet, total - len(plan), self.later) as shown:

            def on_end(i: int, end: RunEnd) -> None:
                if end.error is not None:
                    failures.append(Failure(plan[i].name, end.error))
                shown.on_end(i, end)

            try:
                run_all(plan, self.workers, self._tasks, shown._replace(on_end=on_end), self.ray)
            except KeyboardInterrupt:
                saved = total - sum(planned.saved() is None for planned in plan)
                count = f"{saved} of {total} runs are saved"
                raise Interrupted(f"stopped; {count}, and the same command with --resume continues") from None
        return tuple(failures)


def run_spec(
    spec: Spec,
    out: str | Path,
    workers: int | None = None,
    quiet: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    tuned: bool = False,
    runner: Runner | None = None,
) -> tuple[Failure, ...]:
    """Run an experiment into a folder; ``write_report`` then makes its tables and plots.

    A script that calls this with more than one worker needs the usual ``if __name__ == "__main__":``.

    Args:
        spec: the experiment.
        out: the folder, new or empty unless ``resume`` or ``overwrite``.
        workers: processes; None is one per core.
        quiet: show no progress.
        resume: keep the saved runs in the folder that have the same settings.
        overwrite: remove the experiment in the folder.
        tuned: the step sizes may differ from those of the experiment in the folder.
        runner: instead of ``workers`` and ``quiet``: a runner that has checked the runs.

    Returns:
        The runs that did not finish because a client's update was not finite.
    """
    folder = ExperimentFolder(out)
    plan = folder.plan(spec)
    if runner is None:
        runner = Runner(workers, quiet)
        runner.check(plan)
    with open_folder(folder, spec, resume, overwrite, tuned):
        return runner.execute(plan, resume)


@contextmanager
def open_folder(
    folder: ExperimentFolder, spec: Spec, resume: bool, overwrite: bool, tuned: bool = False
) -> Iterator[None]:
    """Write an experiment in a ``with`` block: first its spec, at the end the plot of the partition.

    Drawing takes longer than the rest of the start, and so does importing what draws. An interrupted
    experiment has the plot, too.
    """
    if resume:
        folder.check_resumable(spec, tuned)
    folder.make_ready(resume, overwrite)
    write_atomic(folder.path / SPEC, spec.to_toml().encode())
    try:
        yield
    except Interrupted:
        _save_partition(folder, spec)
        raise
    _save_partition(folder, spec)


def _save_partition(folder: ExperimentFolder, spec: Spec) -> None:
    """Draw which client has which labels, where the data have labels."""
    seed, path = spec.run.seeds[0], folder.path / PARTITION
    if path.exists():  # from before the experiment was resumed, of the same data
        remove_leftovers(folder.path, PARTITION)
        return
    labels = label_counts(spec.task, seed)
    if labels is not None:
        from fadamgc.experiments.report.label_plot import save_label_plot

        save_label_plot(labels.counts, path, title=f"{labels.note} (seed {seed})")
