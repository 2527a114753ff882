"""Run every method of a spec with every seed, and keep each run the moment it is finished."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from fadamgc.errors import FadamgcError, InputError
from fadamgc.escape import printable
from fadamgc.experiments.folder import PARTITION, ExperimentFolder
from fadamgc.experiments.planned_run import PlannedRun
from fadamgc.experiments.run.workers import (
    Finished,
    Outcome,
    Progress,
    Space,
    Warn,
    build,
    check_workers,
    dry_run,
    in_groups,
    is_done,
    run_jobs,
)
from fadamgc.experiments.spec.sections import Spec
from fadamgc.task import Task
from fadamgc.tasks.build import label_counts


class Interrupted(FadamgcError):  # noqa: N818
    """The user stopped the work; the message says what is saved and how to go on."""


class Failure(NamedTuple):
    """A job that did not finish, and why."""

    job: str
    error: str


def run_spec(
    spec: Spec,
    out: str | Path,
    workers: int | None = None,
    quiet: bool = False,
    resume: bool = False,
    overwrite: bool = False,
    tuned: bool = False,
    checked: bool = False,
) -> tuple[Failure, ...]:
    """Run an experiment into a folder; ``write_report`` then makes its tables and figures.

    A script that calls this with more than one worker needs the usual ``if __name__ == "__main__":``.

    Args:
        spec: the experiment.
        out: the folder, new or empty unless ``resume`` or ``overwrite``.
        workers: processes; None is one for each core.
        quiet: show no progress.
        resume: keep the runs that are there and whose settings are the same.
        overwrite: remove the experiment that is there.
        tuned: the step sizes may differ from those of the experiment that is there.
        checked: ``check`` has accepted the jobs of this spec already.

    Returns:
        The runs that did not finish because a client's update was not finite.
    """
    folder = ExperimentFolder(out)
    jobs = folder.plan(spec)
    check_workers(workers)
    if not checked:
        check(jobs, workers, quiet)
    if resume:
        folder.check_resumable(spec, tuned)
    folder.make_ready(resume, overwrite)
    write_spec(spec, folder)
    todo = [job for job in jobs if not (resume and is_done(job, warn))]
    return carry_out(todo, workers, quiet, done=len(jobs) - len(todo))


def check(jobs: Sequence[PlannedRun], workers: int | None = None, quiet: bool = True) -> None:
    """Refuse what cannot run before any work is done; one seed of a method speaks for all.

    Args:
        jobs: of one spec.
        workers: processes that will run them.
        quiet: do not say on stderr what is being done.
    """
    console = Console(stderr=True, quiet=quiet)
    first = {job.method.slug: job for job in reversed(jobs)}
    tasks: dict[tuple[int, float], Task] = {}
    space: dict[str, Space] = {}
    for slug, job in first.items():
        which = (job.seed, job.validation)
        if which not in tasks:
            console.print(f"preparing {job.task.data} ...", markup=False, highlight=False, soft_wrap=True)
            tasks[which] = build(job)
            many = f"{len(first)} methods" if len(first) > 1 else job.method.label
            console.print(f"checking {many} ...", markup=False, highlight=False, soft_wrap=True)
        space[slug] = dry_run(job, tasks[which])
    records = sum(space[job.method.slug].record for job in jobs if not job.folder.exists())
    at_once = workers or os.cpu_count() or 1
    checkpoints = max(
        sum(space[jobs[i].method.slug].checkpoint for i in group) for group in in_groups(jobs, at_once)
    )
    need = records + min(at_once, len(jobs)) * checkpoints
    there = next(parent for parent in jobs[0].folder.parents if parent.exists())
    disk = shutil.disk_usage(there)
    if disk.total and need > disk.free:  # where there is no disk at all, writing will say so
        free = disk.free
        raise InputError(
            f"out={str(jobs[0].folder.parent.parent)!r} is on a disk with {_size(free)} free; the runs need "
            f"about {_size(need)} ({_size(records)} to keep, the rest for checkpoints while they run): make "
            "room, or give a folder on another disk"
        )


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def write_spec(spec: Spec, folder: ExperimentFolder) -> None:
    """Write the spec and, where the data have labels, the plot of the first seed's partition."""
    folder.write_spec(spec)
    labels = label_counts(spec.task, spec.run.seeds[0])
    if labels is not None:
        from fadamgc.experiments.report.label_plot import save_label_picture

        title = f"{labels.note} (seed {spec.run.seeds[0]})"
        save_label_picture(labels.counts, folder.path / PARTITION, title=title)


def carry_out(
    jobs: Sequence[PlannedRun], workers: int | None, quiet: bool, done: int = 0
) -> tuple[Failure, ...]:
    """Run jobs with progress on stderr; an interrupt says what is saved."""
    failures: list[Failure] = []
    with _display(jobs, quiet, done) as (progress, show, warn):

        def finished(i: int, outcome: Outcome) -> None:
            nonlocal done
            if outcome.error is None:
                done += 1
            else:
                failures.append(Failure(jobs[i].name, outcome.error))
            show(i, outcome)

        total = done + len(jobs)
        try:
            run_jobs(jobs, workers, progress, finished, warn)
        except KeyboardInterrupt:
            saved = total - sum(job.saved() is None for job in jobs)  # some may have been, since then
            raise Interrupted(
                f"stopped; {saved} of {total} runs are saved, and the same command with --resume goes on"
            ) from None
    return tuple(failures)


def warn(message: str, console: Console | None = None) -> None:
    """Print a warning to the standard error."""
    console = console or Console(stderr=True)
    console.print(f"warning: {printable(message)}", markup=False, highlight=False, soft_wrap=True)


@contextmanager
def _display(jobs: Sequence[PlannedRun], quiet: bool, done: int) -> Iterator[tuple[Progress, Finished, Warn]]:
    console = Console(stderr=True)
    above_bars = partial(warn, console=console)
    if quiet or not jobs:
        yield (lambda _: None), (lambda _, __: None), above_bars
    elif console.is_terminal:
        with _bars(console, jobs) as both:
            yield *both, above_bars
    else:
        yield (lambda _: None), _lines(console, jobs, done), above_bars


def _lines(console: Console, jobs: Sequence[PlannedRun], done: int) -> Finished:
    total = done + len(jobs)
    number, rounds, all_rounds = done, 0, sum(job.run.rounds for job in jobs)
    began = time.monotonic()

    def finished(i: int, outcome: Outcome) -> None:
        nonlocal number, rounds
        number, rounds = number + 1, rounds + jobs[i].run.rounds
        left = (time.monotonic() - began) * (all_rounds - rounds) / rounds
        more = f"; about {duration(left)} left" if number < total else ""
        metric = jobs[i].task.metric
        value = "" if outcome.metric is None else f", {metric} {outcome.metric:.4g}"
        if outcome.metric is not None and not math.isfinite(outcome.metric):
            value = ", diverged"
        said = outcome.error or f"{outcome.rounds} rounds{value}"
        line = printable(f"[{number}/{total}] {jobs[i].name}: {said}{more}")
        console.print(line, markup=False, soft_wrap=True)

    return finished


def duration(seconds: float) -> str:
    """A time in words, for people who wait.

    >>> [duration(s) for s in (8, 100, 4000, 9000)]
    ['8 s', '2 min', '1.1 h', '2.5 h']
    """
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 3600 else f"{seconds / 3600:.1f} h"


@contextmanager
def _bars(console: Console, jobs: Sequence[PlannedRun]) -> Iterator[tuple[Progress, Finished]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("rounds"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bars(*columns, console=console, transient=True) as bars:
        labels = list(dict.fromkeys(job.method.label for job in jobs))
        sizes = {label: [j.run.rounds for j in jobs if j.method.label == label] for label in labels}
        items = {label: bars.add_task(escape(printable(label)), total=sum(sizes[label])) for label in labels}
        everything = bars.add_task("[bold]all", total=sum(map(sum, sizes.values())))
        rounds = [0] * len(jobs)

        def advance(i: int, by: int) -> None:
            by = min(by, jobs[i].run.rounds - rounds[i])  # a last message may come after the end
            rounds[i] += by
            bars.advance(items[jobs[i].method.label], by)
            bars.advance(everything, by)

        def finished(i: int, _: Outcome) -> None:
            advance(i, jobs[i].run.rounds - rounds[i])  # it may have ended early

        yield (lambda i: advance(i, 1)), finished
