"""Jobs over processes: each is one run, saved the moment it is finished.

Jobs of one method go to a process as a group, whose runs advance together (see ``sim/many.py``). A process
computes with one thread, also where there is only one process, so that the bits of a run do
not depend on how many there are.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import count as numbers_from
from itertools import groupby, pairwise
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from queue import SimpleQueue
from typing import Any, NamedTuple

import torch

from fadamgc.cache import code_folder
from fadamgc.errors import (
    CheckpointError,
    CheckpointInUseError,
    FadamgcError,
    NonFiniteError,
    OtherRunError,
    UnwritableError,
    whole,
)
from fadamgc.experiments.planned_run import ADAPTER, CHECKPOINT, DIVERGED_RECORD, RECORDS, PlannedRun
from fadamgc.experiments.spec.sections import PicturesTask, TextTask
from fadamgc.federation.run import Run
from fadamgc.files import remove_leftovers
from fadamgc.runtime import one_thread
from fadamgc.sim.engine import RoundEnd
from fadamgc.sim.executors.machine_code import compiler
from fadamgc.sim.many import run_together
from fadamgc.sim.resources import Resources
from fadamgc.sim.simulate import StartedRun, simulate, start_from
from fadamgc.task import Task
from fadamgc.tasks.build import build_task
from fadamgc.trackers import chosen

log = logging.getLogger("fadamgc")

CHECKPOINT_EVERY = 25  # rounds that an interrupted run loses at the most
TOGETHER = 16  # runs that advance together at the most


Warn = Callable[[str], object]  # tells the user


def build(planned: PlannedRun) -> Task:
    """Build the task of a run."""
    return build_task(planned.task, planned.seed, planned.validation)


def dry_run(planned: PlannedRun, task: Task) -> Space:
    """Refuse a run that cannot be executed, without executing it; return the disk space that it needs."""
    run = planned.run
    executor = "loop" if run.executor == "auto" else run.executor  # made in no time
    dry = simulate(**arguments(planned, task) | {"rounds": 0, "executor": executor}, progress=False)
    sampled = run.sampled or dry.clients.n
    taking_part = min(dry.clients.n, run.rounds * sampled)
    states = _bytes(dry.server) + taking_part * _bytes(dry.clients.initial)
    # A checkpoint that is replaced is there until the new one is.
    return Space(record=run.rounds * (300 + 60 * sampled), checkpoint=2 * states)


def simulate_alone(planned: PlannedRun) -> Run:
    """Run it on its own, and keep nothing."""
    return planned.labelled(simulate(**arguments(planned), progress=False))


def arguments(planned: PlannedRun, task: Task | None = None) -> dict[str, Any]:
    """What ``simulate`` is called with, on a task that was built before, or a new one."""
    run = planned.run
    return {
        "algorithm": planned.algorithm,
        "task": task or build(planned),
        "rounds": run.rounds,
        "sampled": run.sampled,
        "tracked": run.tracked,
        "local_steps": run.local_steps,
        "batch_size": run.batch_size,
        "seed": planned.seed,
        "local_epochs": run.local_epochs,
        "weights": run.weights,
        "eval_every": run.eval_every,
        "target": run.target if run.stop_at_target else None,
        "on_nonfinite": run.on_nonfinite,
        "cost": planned.cost.model(),
        "dtype": {"float32": torch.float32, "float64": torch.float64}[run.dtype],
        "executor": run.executor,
    }


def start(
    planned: PlannedRun, callback: Callable[[RoundEnd], object], resources: Resources, warn: Warn
) -> StartedRun:
    """Start a run before its first round, or where its checkpoint is.

    A checkpoint of other settings is removed; one that cannot be read is moved aside, with a warning.
    """
    checkpoint = planned.folder / CHECKPOINT
    parameters = {
        "algorithm": planned.method.algorithm,
        **planned.method.hyperparameters,
        "seed": planned.seed,
    }
    trackers = (
        [] if planned.validation else chosen(planned.folder.parent.parent, planned.folder.name, parameters)
    )
    given = arguments(planned) | {
        "callbacks": (*trackers, callback),
        "checkpoint": checkpoint,
        "checkpoint_every": CHECKPOINT_EVERY,
        "resume": True,
    }
    try:
        return start_from(given, resources)
    except OtherRunError:
        shutil.rmtree(checkpoint, ignore_errors=True)
    except CheckpointInUseError:
        raise
    except CheckpointError as error:
        if is_system_error(error):
            raise
        warn(f"{error}; moved to {move_aside(checkpoint)}, and {planned.name} starts from round 1")
    return start_from(given, resources)


def is_done(planned: PlannedRun, warn: Warn) -> bool:
    """Whether the run need not be made again; a damaged record is moved aside, with a warning.

    A process that was killed just after it saved the run has left the checkpoint, which is removed.
    """
    try:
        if planned.load() is None:
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
    """Whether the system could not read or write (permission, a full disk): that is not damage."""
    cause = error.__cause__ or error.__context__
    while cause is not None:
        if isinstance(cause, OSError) and cause.errno not in (None, errno.ENOENT, errno.ENOTDIR):
            return True
        cause = cause.__cause__ or cause.__context__
    return False


def move_aside(path: Path) -> Path:
    """Rename a file or folder that cannot be read, and replace nothing; the new path."""
    names = (path.with_name(f"{path.name}.unreadable-{number}") for number in numbers_from(1))
    return path.rename(next(aside for aside in names if not os.path.lexists(aside)))


class Space(NamedTuple):
    """Bytes that a job takes on disk, about."""

    record: int  # for good
    checkpoint: int  # while it runs


def _bytes(state: Any) -> int:
    return sum(t.numel() * t.element_size() for t in state)


class Outcome(NamedTuple):
    """How a job ended."""

    rounds: int
    metric: float | None  # of the last evaluation
    error: str | None = None  # why it did not finish


Progress = Callable[[int], None]  # a round of job i is done
Finished = Callable[[int, Outcome], None]


class Stopped(Exception):  # noqa: N818
    """The user wants no more; what was not finished is not kept."""


def execute(
    jobs: Sequence[PlannedRun], on_round: Callable[[int], bool], warn: Warn = log.warning
) -> list[Outcome]:
    """Run jobs of one method together, and save each as soon as it has ended.

    ``on_round`` is told after each round which job had it, and says whether to stop. ``warn`` is told what
    the user should know.
    """
    outcomes: dict[int, Outcome] = {}

    def callback(i: int, _: RoundEnd) -> None:
        if on_round(i):
            raise Stopped

    def finished(i: int, run: Run | NonFiniteError) -> None:
        job = jobs[i]
        if isinstance(run, NonFiniteError):
            outcomes[i] = Outcome(run.round, None, str(run))
            job.save_diverged(str(run))
            return
        if isinstance(job.task, TextTask) and not job.validation:
            from fadamgc.models.text import TextClassifier

            model = run.model
            assert isinstance(model, TextClassifier)
            job.folder.mkdir(parents=True, exist_ok=True)
            model.save_adapter(job.folder / ADAPTER)  # before the record, which says that all is there
        job.labelled(run).save(job.folder, states=False)
        (job.folder / DIVERGED_RECORD).unlink(missing_ok=True)  # of an earlier attempt
        shutil.rmtree(job.folder / CHECKPOINT, ignore_errors=True)
        outcomes[i] = Outcome(len(run.history), run.history[-1].test_metric)

    resources = Resources()
    try:
        with torch.inference_mode(False), ExitStack() as stack:
            started = []
            for i, job in enumerate(jobs):
                started.append(start(job, partial(callback, i), resources, warn))
                stack.callback(started[-1].engine.close)
            run_together(started, finished=finished)
    except (OSError, UnwritableError) as error:  # a full disk, most likely; the last checkpoints are there
        folder = jobs[0].folder.parent
        message = (
            f"{folder} cannot be written: {error.strerror or error}" if isinstance(error, OSError) else error
        )
        raise FadamgcError(
            f"{message}; what was finished is saved: make room and continue with --resume"
        ) from error
    return [outcomes[i] for i in range(len(jobs))]


def in_groups(jobs: Sequence[PlannedRun], workers: int) -> list[list[int]]:
    """Numbers of jobs that go to a process together: of one method, and enough groups for all processes."""
    most = max(1, min(TOGETHER, -(-len(jobs) // (3 * workers))))
    if any(isinstance(job.task, PicturesTask | TextTask) for job in jobs):
        most = 1  # they would share nothing, and each has its data in memory
    groups: list[list[int]] = []
    for _, alike in groupby(range(len(jobs)), key=lambda i: jobs[i].method.algorithm):
        numbers = list(alike)
        count = -(-len(numbers) // most)
        bounds = [len(numbers) * g // count for g in range(count + 1)]
        groups += [numbers[a:b] for a, b in pairwise(bounds)]
    return groups


def run_jobs(
    jobs: Sequence[PlannedRun],
    workers: int | None,
    progress: Progress,
    finished: Finished,
    warn: Warn = log.warning,
) -> None:
    """Run all jobs. On an interrupt or an error the workers stop; what was saved by then stays."""
    check_workers(workers)
    count = min(workers or os.cpu_count() or 1, len(jobs))
    groups = in_groups(jobs, max(1, count))
    if count <= 1:
        with one_thread():
            for group in groups:
                outcomes = execute([jobs[i] for i in group], partial(_advance, progress, group), warn)
                for i, outcome in zip(group, outcomes, strict=True):
                    finished(i, outcome)
        return
    if compiler() is not None:
        code_folder()  # if it is a temporary one, the processes share it
    context = get_context("spawn")
    # Pipes and not queues or events: those have locks, which a worker that is killed would keep for good.
    stop, stopper = context.Pipe(duplex=False)
    messages, sender = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(count, context, _start_worker, (stop, sender))
    listener = threading.Thread(target=_listen, args=(messages, progress, warn), daemon=True)
    listener.start()
    try:
        # A queue and not concurrent.futures.wait: that takes the locks of all futures, and an interrupt in
        # the middle of it would leave some of them held, and the shutdown waiting for ever.
        ended: SimpleQueue[Future[list[Outcome]]] = SimpleQueue()
        with no_interrupts():  # the parent gets it and says what to do
            owned = {pool.submit(_work, group, [jobs[i] for i in group]): group for group in groups}
            for future in owned:
                future.add_done_callback(ended.put)
        for _ in groups:
            future = ended.get()
            for i, outcome in zip(owned[future], future.result(), strict=True):
                finished(i, outcome)
    except BrokenProcessPool:
        raise FadamgcError(
            "a worker process died, perhaps for lack of memory; what was finished is saved: "
            "go on with --resume and fewer --workers"
        ) from None
    finally:
        with no_interrupts():
            stopper.send_bytes(b"stop")  # nobody reads it, so all workers see it
            pool.shutdown(cancel_futures=True)
            sender.send_bytes(END)
            listener.join()
            for end in (stop, stopper, messages, sender):
                end.close()


def check_workers(workers: int | None) -> None:
    """Refuse a number of workers that is none."""
    if workers is not None:
        whole("workers", workers, 1)


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C for a moment; processes that are started meanwhile ignore it for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _advance(progress: Progress, group: Sequence[int], i: int) -> bool:
    progress(group[i])
    return False


# In the workers.

_stop: Any = None
_sender: Any = None

END, ROUND, WARNING = b"e", b"r", b"w"  # how a message starts
LONGEST = 3_000  # bytes of a warning: what fits into a pipe at once is written whole, whoever else writes


def _start_worker(stop: Any, sender: Any) -> None:
    global _stop, _sender
    _stop, _sender = stop, sender
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it and says what to do
    torch.set_num_threads(1)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _work(group: list[int], jobs: list[PlannedRun]) -> list[Outcome]:
    def on_round(i: int) -> bool:
        _sender.send_bytes(ROUND + str(group[i]).encode())
        return bool(_stop.poll())

    def warn(message: str) -> None:
        _sender.send_bytes(WARNING + message.encode(errors="replace")[:LONGEST])

    return execute(jobs, on_round, warn)


def _listen(messages: Any, progress: Progress, warn: Warn) -> None:
    """Read messages until the end: which job had a round, and warnings."""
    while (message := messages.recv_bytes()) != END:
        if message.startswith(WARNING):
            warn(message[1:].decode(errors="replace"))
        else:
            progress(int(message[1:]))
