"""Run every method of a spec with every seed, and keep each run the moment it is finished."""

from __future__ import annotations

import math
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars

from fadamgc.errors import CheckpointInUseError, FadamgcError, InputError, UnwritableError
from fadamgc.escape import printable
from fadamgc.experiments.run.workers import (
    Finished,
    Job,
    Outcome,
    Progress,
    Space,
    Warn,
    check_workers,
    in_groups,
    run_jobs,
)
from fadamgc.experiments.spec.sections import STEPS, Spec
from fadamgc.experiments.spec.toml_io import load_spec
from fadamgc.files import LOCK, lock, make_folder, write_atomic
from fadamgc.task import Task
from fadamgc.tasks.build import label_counts

SPEC = "spec.toml"
PARTITION = "partition.png"
RUNS = "runs"
TUNING = "tuning"
# What an experiment leaves in its folder; --overwrite removes these and nothing else.
FILES = (
    *(SPEC, PARTITION, "tuning.csv", "tuned.toml", "results.csv", "results.md", "results.tex"),
    *("curves.csv", "rounds.png", "minutes.png", "curves.png", "rounds.svg", "minutes.svg", "curves.svg"),
    "report.html",
)


class Interrupted(FadamgcError):  # noqa: N818
    """The user stopped the work; the message says what is saved and how to go on."""


class Failure(NamedTuple):
    """A job that did not finish, and why."""

    job: str
    error: str


def plan(spec: Spec, out: Path) -> list[Job]:
    """The jobs of a spec, method by method."""
    return [
        Job.of(spec, method, seed, out / RUNS / f"{method.slug}-seed{seed}")
        for method in spec.methods
        for seed in spec.run.seeds
    ]


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
    out = Path(out)
    jobs = plan(spec, out)
    check_workers(workers)
    if not checked:
        check(jobs, workers, quiet)
    if resume:
        check_same(spec, out, tuned)
    prepare(out, resume, overwrite)
    write_spec(spec, out)
    todo = [job for job in jobs if not (resume and job.is_done(warn))]
    return carry_out(todo, workers, quiet, done=len(jobs) - len(todo))


def check(jobs: Sequence[Job], workers: int | None = None, quiet: bool = True) -> None:
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
            tasks[which] = job.build()
            many = f"{len(first)} methods" if len(first) > 1 else job.method.label
            console.print(f"checking {many} ...", markup=False, highlight=False, soft_wrap=True)
        space[slug] = job.check(tasks[which])
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


def check_same(spec: Spec, out: Path, tuned: bool = False) -> None:
    """Refuse to go on with an experiment of other settings: its finished runs would be lost.

    Seeds and methods may be added; cost, target and title may change, since they change no run.
    """
    if not (out / SPEC).is_file():
        return
    old = load_spec(out / SPEC)
    ends_there = spec.run.stop_at_target or old.run.stop_at_target
    free = {"seeds"} if ends_there else {"seeds", "target"}
    sections = (
        ("[task]", old.task.model_dump(), spec.task.model_dump()),
        ("[run]", old.run.model_dump(exclude=free), spec.run.model_dump(exclude=free)),
    )
    for place, there, here in sections:
        for key in {**there, **here}:
            _differs(out, f"{place} {key}", there.get(key), here.get(key))
    missing = [seed for seed in old.run.seeds if seed not in spec.run.seeds]
    if missing:
        _differs(out, "[run] seeds", list(old.run.seeds), list(spec.run.seeds))
    new = {method.label: method for method in spec.methods}
    for method in old.methods:
        if method.label not in new:
            _differs(out, "[[method]]", method.label, None)
            continue
        other = new[method.label]
        _differs(out, f"{method.label}: tracked", old.tracked(method), spec.tracked(other))
        there, here = method.hyperparameters, other.hyperparameters
        for key in {**there, **here}:
            if not (tuned and key in STEPS):
                _differs(out, f"{method.label}: {key}", there.get(key), here.get(key))


def _differs(out: Path, what: str, there: object, here: object) -> None:
    if there != here:
        raise InputError(
            f"out={str(out)!r} holds an experiment with other settings: {what}={there!r} there, "
            f"{here!r} here; --overwrite replaces it, --out names another folder"
        )


@contextmanager
def only_one(out: Path) -> Iterator[None]:
    """Lock a folder, so that no other process writes an experiment into it at the same time."""
    with ExitStack() as stack:
        with suppress(UnwritableError):  # prepare() says what is wrong with the folder
            make_folder(out)
            try:
                stack.enter_context(lock(out))
            except CheckpointInUseError:
                raise InputError(
                    f"out={str(out)!r} is being written by another fadamgc; wait for it, or give another "
                    "folder"
                ) from None
        yield


def prepare(out: Path, resume: bool, overwrite: bool) -> None:
    """Make the folder ready for an experiment, or say why it cannot be used."""
    if resume and overwrite:
        raise InputError("resume and overwrite are both given; choose one")
    if out.exists() and not out.is_dir():
        raise InputError(f"out={str(out)!r} is a file; give a folder")
    try:
        out.mkdir(parents=True, exist_ok=True)
        held = any(not _is_left(path.name) for path in out.iterdir())
        if held and not (out / SPEC).exists():
            raise InputError(
                f"out={str(out)!r} holds other files and no experiment; give a new or empty folder"
            )
        if held and overwrite:
            for name in FILES:
                (out / name).unlink(missing_ok=True)
            for name in (RUNS, TUNING):
                shutil.rmtree(out / name, ignore_errors=True)
        elif held and not resume:
            raise InputError(
                f"out={str(out)!r} already holds an experiment; --resume goes on with it, "
                "--overwrite replaces it, --out names another folder"
            )
        make_folder(out)
    except (OSError, UnwritableError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise InputError(f"out={str(out)!r} cannot be written: {reason}") from None


def _is_left(name: str) -> bool:
    """Whether a file is a lock, or what a process left that was killed before it wrote an experiment."""
    return name in (LOCK, ".writable") or (name.startswith(".") and name.endswith(".tmp"))


def write_spec(spec: Spec, out: Path) -> None:
    """Write the spec and, where the data have labels, the picture of the first seed's partition."""
    write_atomic(out / SPEC, spec.to_toml().encode())
    labels = label_counts(spec.task, spec.run.seeds[0])
    if labels is not None:
        from fadamgc.experiments.report.label_plot import save_label_picture

        title = f"{labels.note} (seed {spec.run.seeds[0]})"
        save_label_picture(labels.counts, out / PARTITION, title=title)


def read_spec(out: Path) -> Spec:
    """The spec of the experiment in a folder."""
    if not (out / SPEC).is_file():
        raise InputError(
            f"folder={str(out)!r} holds no {SPEC}; give a folder that `fadamgc compare` or `run` has written"
        )
    return load_spec(out / SPEC)


def carry_out(jobs: Sequence[Job], workers: int | None, quiet: bool, done: int = 0) -> tuple[Failure, ...]:
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
def _display(jobs: Sequence[Job], quiet: bool, done: int) -> Iterator[tuple[Progress, Finished, Warn]]:
    console = Console(stderr=True)
    above_bars = partial(warn, console=console)
    if quiet or not jobs:
        yield (lambda _: None), (lambda _, __: None), above_bars
    elif console.is_terminal:
        with _bars(console, jobs) as both:
            yield *both, above_bars
    else:
        yield (lambda _: None), _lines(console, jobs, done), above_bars


def _lines(console: Console, jobs: Sequence[Job], done: int) -> Finished:
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
def _bars(console: Console, jobs: Sequence[Job]) -> Iterator[tuple[Progress, Finished]]:
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
