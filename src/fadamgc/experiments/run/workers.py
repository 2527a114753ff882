"""Execute runs in several processes; each run is saved as soon as it is finished.

A process gets runs of one method as a group, whose runs advance together (see ``sim/many.py``). A process
computes with one thread, even if there is only one process, so that the numbers of a run do not depend on
the number of processes.
"""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from itertools import count
from multiprocessing import connection, get_context, parent_process
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch

from fadamgc.errors import FadamgcError
from fadamgc.experiments.planned_run import PlannedRun
from fadamgc.experiments.run.execution import (
    RunEnd,
    SharedTasks,
    TaskCache,
    execute,
    set_worker,
    share_compiled_code,
)
from fadamgc.experiments.run.listener import Listener, in_groups
from fadamgc.experiments.run.ray_tasks import RayTasks, run_on_ray
from fadamgc.loading import import_again, imports
from fadamgc.runtime import one_thread, share_gpus
from fadamgc.stages import listening


def run_all(
    plan: Sequence[PlannedRun],
    workers: int,
    tasks: TaskCache,
    listener: Listener,
    ray: RayTasks | None = None,
) -> None:
    """Execute all runs. On an interrupt or an error the workers stop; runs that are saved by then stay."""
    if ray is not None:
        run_on_ray(plan, ray, listener)
        return
    count = min(workers, len(plan))
    groups = in_groups(plan, max(1, count))
    with listening(listener.on_stage):
        if count > 1:
            _run_in_processes(plan, groups, count, listener, SharedTasks(plan, tasks))
            return
        for group in groups:
            _run_group(plan, group, tasks, listener)


def _run_group(plan: Sequence[PlannedRun], group: list[int], tasks: TaskCache, listener: Listener) -> None:
    with one_thread():
        runs = [plan[i] for i in group]
        ends = execute(runs, lambda i: listener.on_round(group[i]), listener.warn, tasks)
    for i, end in zip(group, ends, strict=True):
        listener.on_end(i, end)


def _run_in_processes(
    plan: Sequence[PlannedRun],
    groups: list[list[int]],
    count: int,
    listener: Listener,
    shared: SharedTasks,
) -> None:
    share_compiled_code()
    context = get_context("spawn")
    numbers = tempfile.TemporaryDirectory(prefix="fadamgc-")
    # Pipes, because queues and events have locks, which a worker that is killed would never release.
    stop, stopper = context.Pipe(duplex=False)
    messages, sender = context.Pipe(duplex=False)
    pool = ProcessPoolExecutor(
        count, context, _start_worker, (stop, sender, count, imports(), shared, numbers.name)
    )
    thread = threading.Thread(target=_listen, args=(messages, listener), daemon=True)
    thread.start()
    try:
        # A queue, because concurrent.futures.wait takes the locks of all futures: an interrupt in the middle
        # of it would leave some of them locked, and the shutdown would never end.
        ended: SimpleQueue[Future[list[RunEnd]]] = SimpleQueue()
        with no_interrupts():  # only the parent process handles Ctrl-C
            group_of = {pool.submit(_work, group, [plan[i] for i in group]): group for group in groups}
            for future in group_of:
                future.add_done_callback(ended.put)
        for _ in groups:
            future = ended.get()
            for i, end in zip(group_of[future], future.result(), strict=True):
                listener.on_end(i, end)
    except BrokenProcessPool:
        raise FadamgcError(
            "a worker process died, perhaps for lack of memory; finished runs are saved: "
            "continue with --resume and fewer --workers"
        ) from None
    finally:
        with no_interrupts():
            stopper.send_bytes(b"stop")  # never read, so that every worker can poll it
            pool.shutdown(cancel_futures=True)
            sender.send_bytes(END)
            thread.join()
            for end_of_pipe in (stop, stopper, messages, sender):
                end_of_pipe.close()
            numbers.cleanup()


@contextmanager
def no_interrupts() -> Iterator[None]:
    """Ignore Ctrl-C inside the block; processes that are started inside ignore it until they end."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _listen(messages: Any, listener: Listener) -> None:
    """Read the messages of the workers until END: a run has made a round, a warning, or a stage."""
    while (message := messages.recv_bytes()) != END:
        text = message[1:].decode(errors="replace")
        if message.startswith(WARNING):
            listener.warn(text)
        elif message.startswith(STAGE):
            listener.on_stage(text or None)
        else:
            listener.on_round(int(text))


# In the workers.

_stop: Any = None
_sender: Any = None
_tasks: TaskCache | None = None

END, ROUND, WARNING, STAGE = b"e", b"r", b"w", b"s"  # how a message starts
LONGEST = 3_000  # bytes of a warning: a pipe writes such short messages at once, without mixing them


def _start_worker(
    stop: Any,
    sender: Any,
    processes: int,
    imported: tuple[list[str], list[str]],
    shared: SharedTasks,
    numbers: str,
) -> None:
    global _stop, _sender, _tasks
    import_again(*imported)
    set_worker(free_number(Path(numbers)))
    share_gpus(processes)
    _stop, _sender, _tasks = stop, sender, TaskCache(processes, shared)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent process handles Ctrl-C
    torch.set_num_threads(1)
    threading.Thread(target=_die_with_parent, daemon=True).start()


def free_number(folder: Path) -> int:
    """Return the smallest number that no other process has taken in the folder, and take it."""
    for number in count():
        with suppress(FileExistsError):
            (folder / str(number)).touch(exist_ok=False)
            return number
    raise AssertionError


def _die_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    connection.wait([parent.sentinel])
    os._exit(1)


def _work(group: list[int], plan: list[PlannedRun]) -> list[RunEnd]:
    def on_round(i: int) -> bool:
        _sender.send_bytes(ROUND + str(group[i]).encode())
        return bool(_stop.poll())

    def warn(message: str) -> None:
        _sender.send_bytes(WARNING + message.encode(errors="replace")[:LONGEST])

    def hear(what: str | None) -> None:
        _sender.send_bytes(STAGE + (what or "").encode(errors="replace")[:LONGEST])

    with listening(hear):
        return execute(plan, on_round, warn, _tasks)
