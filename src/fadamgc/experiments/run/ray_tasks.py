"""Execute runs on a Ray cluster: each group of runs is a task that Ray starts again if its process dies.

A process of the cluster that sees the folder of the experiment, because it is on the same machine or on a
shared disk, works in that folder, with checkpoints. Any other process works in a temporary folder, and its
files come back with the result, which the driver writes.
"""

from __future__ import annotations

import os
import tempfile
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from fadamgc.cluster import ClusterError, Parcel, Surroundings, connect, pack, places, ray_module, unpack
from fadamgc.errors import FadamgcError, finite, first_line
from fadamgc.experiments.planned_run import PlannedRun
from fadamgc.experiments.run.execution import RunEnd, TaskCache, execute
from fadamgc.experiments.run.listener import Listener, in_groups
from fadamgc.files import write_atomic
from fadamgc.stages import listening

RETRIES = 3  # times that Ray restarts a group after its process or machine has died
PAUSE = 0.25  # seconds between two messages of a process about its rounds


class RayTasks(NamedTuple):
    """Which cluster executes runs, and what one run needs there."""

    address: str  # "auto", or host:port
    cpus: float = 1
    gpus: float = 0

    @classmethod
    def of(cls, address: str | None, cpus: float, gpus: float) -> RayTasks | None:
        """Return the checked options of a command; None without an address."""
        finite("ray_cpus", cpus, 0, exclusive=True)
        finite("ray_gpus", gpus, 0)
        return None if address is None else cls(address, cpus, gpus)


class GroupEnd(NamedTuple):
    """The result of a group of runs: how they ended, and their files if the driver has to write them."""

    ends: list[RunEnd]
    files: list[dict[str, bytes]] | None


class Mailbox:
    """An actor that collects the messages of all processes for the driver."""

    def __init__(self) -> None:
        self._messages: list[tuple[str, Any]] = []

    def put(self, messages: list[tuple[str, Any]]) -> None:
        """Take messages in."""
        self._messages += messages

    def take(self) -> list[tuple[str, Any]]:
        """Return the messages since the last call."""
        messages, self._messages = self._messages, []
        return messages


def run_on_ray(plan: Sequence[PlannedRun], options: RayTasks, listener: Listener) -> None:
    """Execute all runs. On an interrupt or an error the tasks are cancelled; saved runs stay."""
    if not plan:
        return
    disconnect = connect(options.address)
    ray = ray_module()
    pending: dict[Any, list[int]] = {}
    try:
        groups = in_groups(plan, places(options.cpus, options.gpus))
        inbox = ray.remote(num_cpus=0)(Mailbox).remote()
        task = ray.remote(num_cpus=options.cpus, num_gpus=options.gpus, max_retries=RETRIES)(run_group)
        surroundings, threads = pack(Surroundings.here()), max(1, int(options.cpus))
        with _proof(plan[0].folder.parent) as proof:
            for group in groups:
                message = pack([replace(plan[i], folder=plan[i].folder.absolute()) for i in group])
                pending[task.remote(surroundings, threads, message, group, inbox, proof)] = group
            while pending:
                ready, _ = ray.wait(list(pending), num_returns=1, timeout=2 * PAUSE)
                _tell(listener, ray.get(inbox.take.remote()))
                for reference in ready:
                    group = pending.pop(reference)
                    _finish(plan, group, unpack(ray.get(reference)), listener)
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise ClusterError(
            f"the Ray cluster has lost a run: {first_line(error)}; finished runs are saved: continue with "
            "--resume, with or without --ray"
        ) from error
    finally:
        _cancel(pending)
        disconnect()


def _cancel(pending: dict[Any, list[int]]) -> None:
    ray = ray_module()
    for reference in pending:
        try:
            ray.cancel(reference, force=True)
        except Exception:  # the cluster is gone, and the task with it
            return
    if pending:
        ray.wait(list(pending), num_returns=len(pending), timeout=10)  # so that no process writes afterwards


@contextmanager
def _proof(folder: Path) -> Iterator[tuple[str, str]]:
    """Make a file and yield its path and content; a process that can read these sees the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    path, content = folder.absolute() / f".ray-{uuid.uuid4().hex}", uuid.uuid4().hex
    path.write_text(content)
    try:
        yield str(path), content
    finally:
        path.unlink(missing_ok=True)


def _tell(listener: Listener, messages: list[tuple[str, Any]]) -> None:
    for kind, value in messages:
        if kind == "rounds":
            for i, count in value.items():
                for _ in range(count):
                    listener.on_round(i)
        elif kind == "warning":
            listener.warn(value)
        else:
            listener.on_stage(value)


def _finish(
    plan: Sequence[PlannedRun], group: list[int], end: GroupEnd | Exception, listener: Listener
) -> None:
    if isinstance(end, Exception):
        raise end
    for position, i in enumerate(group):
        if end.files is not None:
            # The record marks a run as complete, so it is written last.
            for name in sorted(end.files[position], key=lambda name: name.startswith("run.")):
                path = plan[i].folder / name
                path.parent.mkdir(parents=True, exist_ok=True)
                write_atomic(path, end.files[position][name])
        listener.on_end(i, end.ends[position])


# In the processes of the cluster.

_tasks: TaskCache | None = None  # of this process, which Ray uses for many groups


def run_group(
    surroundings: Parcel, threads: int, plan: Parcel, group: list[int], inbox: Any, proof: tuple[str, str]
) -> Parcel:
    """Execute a group of runs; return the packed GroupEnd, or the packed error for the user."""
    try:
        unpack(surroundings).take_over(threads)
        return pack(_run_group(unpack(plan), group, Messages(inbox), proof))
    except FadamgcError as error:
        return pack(error)


def _run_group(
    plan: list[PlannedRun], group: list[int], messages: Messages, proof: tuple[str, str]
) -> GroupEnd:
    global _tasks
    if _tasks is None:
        _tasks = TaskCache(os.cpu_count() or 1)
    with listening(messages.stage), messages:
        if _sees(*proof):
            ends = execute(plan, lambda i: messages.round(group[i]), messages.warn, _tasks)
            return GroupEnd(ends, None)
        with tempfile.TemporaryDirectory(prefix="fadamgc-") as scratch:
            here = [replace(run, folder=Path(scratch, "runs", run.folder.name)) for run in plan]
            ends = execute(here, lambda i: messages.round(group[i]), messages.warn, _tasks)
            return GroupEnd(ends, [_files(run.folder) for run in here])


def _sees(path: str, content: str) -> bool:
    try:
        return Path(path).read_text() == content
    except OSError:
        return False


def _files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files of a run."""
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


class Messages:
    """Sends rounds, warnings and stages to the driver; rounds are counted and sent now and then."""

    def __init__(self, inbox: Any) -> None:
        self._inbox = inbox
        self._rounds: dict[int, int] = {}
        self._sent = time.monotonic()
        self._lock = threading.Lock()

    def __enter__(self) -> Messages:
        return self

    def __exit__(self, *_: object) -> None:
        self._send([])

    def round(self, i: int) -> bool:
        """Count a round of run i."""
        self._rounds[i] = self._rounds.get(i, 0) + 1
        if time.monotonic() - self._sent > PAUSE:
            self._send([])
        return False

    def warn(self, message: str) -> None:
        """Send a warning."""
        self._send([("warning", message)])

    def stage(self, what: str | None) -> None:
        """Send what this process is doing."""
        self._send([("stage", what)])

    def _send(self, messages: list[tuple[str, Any]]) -> None:
        with self._lock:
            rounds, self._rounds, self._sent = self._rounds, {}, time.monotonic()
        self._inbox.put.remote([("rounds", rounds), *messages])
