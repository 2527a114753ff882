"""Many runs at once: seeds and step sizes of one algorithm share the blocks of the vectorized executor."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import pairwise, repeat
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from fadamgc.cluster import ClusterError, Parcel, Surroundings, connect, pack, places, ray_module, unpack
from fadamgc.errors import (
    FadamgcError,
    InputError,
    NonFiniteError,
    first_line,
    listed,
    nearest,
    not_accepted,
    reason,
    shown,
    whole,
)
from fadamgc.federation.client_states import ForgottenStates
from fadamgc.federation.run import Run
from fadamgc.runtime import pickled
from fadamgc.samples import tensors_of
from fadamgc.sim.engine import Engine, check_flag
from fadamgc.sim.executors import VectorizedExecutor
from fadamgc.sim.progress import progress_bar
from fadamgc.sim.resources import Resources
from fadamgc.sim.simulate import ARGUMENTS, start_from

Ending = Run | NonFiniteError
RETRIES = 3  # times that Ray starts a part again whose process died
IN_MEMORY = 64  # runs that are in memory together


def simulate_many(
    runs: Sequence[Mapping[str, Any]],
    *,
    workers: int | Literal["ray"] = 1,
    errors: Literal["raise", "return"] = "raise",
    client_states: bool | None = None,
    progress: bool = True,
    **common: Any,
) -> list[Any]:
    """Run several simulations, such as seeds and step sizes, faster than one after the other.

    Each run equals that of ``simulate`` with the same arguments: the same history and the same model
    (with ``executor="auto"``, if timing chooses the same executor). Runs of one algorithm on tasks of one
    model advance together, their clients in common blocks.

    Args:
        runs: one dict per run with arguments of ``simulate``.
        workers: processes to share the runs between; with more than one, a script needs the usual
            ``if __name__ == "__main__":`` and its tasks must be picklable. "ray" shares them between all CPUs
            of a Ray cluster: the one that RAY_ADDRESS names, that runs on this machine, or a new one.
        errors: what to do if a run's update is not finite: "raise", or "return" the NonFiniteError in the
            place of the run and continue with the others.
        client_states: whether the returned runs have the states of their clients; None: if there are at most
            64 runs. Without them, the memory does not grow with the number of runs, except by their models
            and histories.
        progress: show the progress on stderr: a bar in a terminal, else a line now and then.
        common: arguments that all runs have in common. A ``checkpoint`` among them is a folder in which
            each run has its own folder, ``run-0``, ``run-1`` and so on.

    Returns:
        The runs, in the order of ``runs``.

    Example:
        >>> import fadamgc, torch
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> task = fadamgc.Task(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, data)
        >>> grid = [{"algorithm": fadamgc.FAdamGC(eta_l=e), "seed": s} for e in (0.1, 0.01) for s in (0, 1)]
        >>> [len(run.history) for run in fadamgc.simulate_many(grid, task=task, rounds=3, sampled=2)]
        [3, 3, 3, 3]
    """
    if workers != "ray":
        whole("workers", workers, 1)
    if not isinstance(errors, str) or errors not in ("raise", "return"):
        raise not_accepted("errors", errors, "'raise' or 'return'")
    if (listed_runs := listed(runs)) is None:
        raise InputError(f"runs={shown(runs)} is not accepted; give a list of dicts of arguments of simulate")
    check_flag("client_states", client_states)
    keep = len(listed_runs) <= IN_MEMORY if client_states is None else bool(client_states)
    arguments = [_arguments(i, run, common) for i, run in enumerate(listed_runs)]
    _check_folders(arguments)
    if workers == "ray":
        return _on_ray(arguments, errors, keep)
    processes = min(workers, len(arguments))
    if processes <= 1:
        return _in_this_process(arguments, errors, keep, progress)
    return _in_processes(arguments, errors, keep, processes)


def _arguments(i: int, run: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of one run, including those that all runs share."""
    if not isinstance(run, Mapping):
        raise InputError(f"runs[{i}]={shown(run)} is not accepted; give a dict of arguments of simulate")
    arguments = {**common, **run}
    if isinstance(common.get("checkpoint"), (str, os.PathLike)) and "checkpoint" not in run:
        arguments["checkpoint"] = Path(common["checkpoint"]) / f"run-{i}"
    for name in arguments:
        if name not in ARGUMENTS:
            raise InputError(
                f"runs[{i}]: {shown(name)} is not an argument of simulate{nearest(str(name), ARGUMENTS)}"
            )
    for name in ("algorithm", "task"):
        if name not in arguments:
            raise InputError(f"runs[{i}] has no {name}; give it there, or to all runs as {name}=...")
    return arguments


def _check_folders(runs: list[dict[str, Any]]) -> None:
    """Refuse a checkpoint folder that two runs would share."""
    owners: dict[Path, int] = {}
    for i, arguments in enumerate(runs):
        if not isinstance(arguments.get("checkpoint"), (str, os.PathLike)):
            continue  # no checkpoint, or a value that simulate refuses
        first = owners.setdefault(Path(arguments["checkpoint"]).resolve(), i)
        if first != i:
            raise InputError(
                f"runs[{first}] and runs[{i}] have the same checkpoint={str(arguments['checkpoint'])!r}; "
                "give each its own folder, or give checkpoint once for all, and each gets a folder in it"
            )


def _in_processes(runs: list[dict[str, Any]], errors: str, keep: bool, count: int) -> list[Any]:
    """Distribute the runs over processes; neighbours stay together, because they are most alike.

    All processes read the tasks' data from the same shared memory; the results come back without the data.
    """
    bounds = [len(runs) * w // count for w in range(count + 1)]
    try:
        parts = [pickled(runs[a:b]) for a, b in pairwise(bounds)]
    except Exception as error:
        raise InputError(
            f"workers={count} needs runs that can be pickled; use workers=1: {reason(error)}"
        ) from error
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        endings = [
            run
            for done in pool.map(_run_part, parts, repeat(errors), repeat(keep))
            for run in pickle.loads(done)
        ]
    for arguments, ending in zip(runs, endings, strict=True):
        if isinstance(ending, Run):
            ending.task = arguments["task"]
    return endings


def _on_ray(runs: list[dict[str, Any]], errors: str, keep: bool) -> list[Any]:
    """Distribute the runs over a Ray cluster, which starts a part again if its process dies.

    The data of each task is in memory once per node.
    """
    if not runs:
        return []
    disconnect = connect()
    ray = ray_module()
    try:
        tasks = list({id(arguments["task"]): arguments["task"] for arguments in runs}.values())
        data = [ray.put(pack(task, tensors_of([*task.in_memory(), task.test_samples]))) for task in tasks]
        where = {id(task): i for i, task in enumerate(tasks)}
        count = min(len(runs), places(1, 0))
        remote = ray.remote(num_cpus=1, max_retries=RETRIES)(_run_part_on_ray)
        replies = []
        for w in range(count):
            part = runs[len(runs) * w // count : len(runs) * (w + 1) // count]
            needed = sorted({where[id(arguments["task"])] for arguments in part})
            named = [arguments | {"task": where[id(arguments["task"])]} for arguments in part]
            references = {i: data[i] for i in needed}
            replies.append(remote.remote(pack(Surroundings.here()), pack(named), references, errors, keep))
        endings: list[Any] = []
        for reply in replies:
            ending = unpack(ray.get(reply))
            if isinstance(ending, Exception):
                raise ending
            endings += ending
    except (ray.exceptions.RayError, ConnectionError) as error:
        raise ClusterError(
            f"the Ray cluster has lost a part of the runs: {first_line(error)}; give runs a checkpoint= and "
            "resume=True to continue them"
        ) from error
    finally:
        disconnect()
    for arguments, ending in zip(runs, endings, strict=True):
        if isinstance(ending, Run):
            ending.task = arguments["task"]
    return endings


def _run_part_on_ray(
    surroundings: Parcel, part: Parcel, tasks: dict[int, Any], errors: str, keep: bool
) -> Parcel:
    """Return the packed endings of some runs, or the packed error that one of them raised."""
    try:
        unpack(surroundings).take_over(threads=1)
        ray = ray_module()
        loaded = {i: unpack(ray.get(reference)) for i, reference in tasks.items()}
        runs = [arguments | {"task": loaded[arguments["task"]]} for arguments in unpack(part)]
        return pack(_finished(runs, errors, keep))
    except FadamgcError as error:
        return pack(error)


def _run_part(part: bytes, errors: str, keep: bool) -> bytes:
    torch.set_num_threads(1)
    return pickle.dumps(_finished(pickle.loads(part), errors, keep))


def _finished(runs: list[dict[str, Any]], errors: str, keep: bool) -> list[Any]:
    """Return the endings of some runs, without their tasks."""
    endings = _in_this_process(runs, errors, keep, progress=False)
    for ending in endings:
        if isinstance(ending, Run):
            ending.task = None
    return endings


def _in_this_process(runs: list[dict[str, Any]], errors: str, keep: bool, progress: bool) -> list[Any]:
    endings: list[Any] = []
    with torch.inference_mode(False):
        for first in range(0, len(runs), IN_MEMORY):
            resources = Resources(len(runs[first : first + IN_MEMORY]))
            with ExitStack() as stack:
                stack.callback(resources.close)
                started = []
                for arguments in runs[first : first + IN_MEMORY]:
                    started.append(start_from(arguments, resources))
                    stack.callback(started[-1].close)
                ended = run_together(started, progress)
            for ending in ended:
                if isinstance(ending, Run) and not keep:
                    c = ending.clients
                    ending.clients = ForgottenStates(c.n, c.initial, c.participants)
            endings += ended
            for ending in endings:
                if isinstance(ending, NonFiniteError) and errors == "raise":
                    raise ending
    return endings


def run_together(
    started: Sequence[Engine],
    progress: bool = False,
    finished: Callable[[int, Ending], None] | None = None,
) -> list[Ending]:
    """Run several runs to their ends, round by round together if they share a vectorized executor.

    ``finished`` is called with the number of a run and its ending as soon as it has ended.
    """
    endings: dict[int, Ending] = {}

    def end(i: int, error: NonFiniteError | None = None) -> None:
        engine = started[i]
        if error is None:
            engine.write()
        endings[i] = engine.result() if error is None else error
        engine.close()
        if finished is not None:
            finished(i, endings[i])

    teams: dict[int, list[int]] = {}
    for i, run in enumerate(started):
        executor = run.executor
        teams.setdefault(id(executor) if isinstance(executor, VectorizedExecutor) else -i - 1, []).append(i)
    total = sum(run.settings.rounds for run in started)
    done = sum(run.t for run in started)
    with progress_bar(progress, f"{len(started)} runs", total) as shown_progress:
        shown_progress.begin(done)
        for team in teams.values():
            while active := [i for i in team if i not in endings]:
                for i in active:
                    if started[i].over():
                        end(i)
                for i, outcome in _round(started, [i for i in active if i not in endings]):
                    if isinstance(outcome, NonFiniteError):
                        end(i, outcome)
                        continue
                    done += 1
                    shown_progress.advance(outcome, done)
                    if outcome is None:
                        end(i)
    return [endings[i] for i in range(len(started))]


def _round(started: Sequence[Engine], active: list[int]) -> Iterator[tuple[int, Any]]:
    """Run one round of each active run; yield a record, an error, or None if a callback ended the run."""
    jobs: dict[int, Any] = {}
    for i in active:
        try:
            jobs[i] = started[i].begin()
        except NonFiniteError as error:  # the server's message, beyond the range of its codec
            yield i, error
    active = list(jobs)
    results: dict[int, Any] = {i: [] for i in active}
    if len(active) == 1:
        (i,) = active
        results[i] = started[i].executor.run(jobs[i])
    elif active:
        owner = {id(job): i for i, run_jobs in jobs.items() for job in run_jobs}
        all_jobs = [job for run_jobs in jobs.values() for job in run_jobs]
        for result in started[active[0]].executor.run(all_jobs):
            results[owner[id(result.job)]].append(result)
    for i in active:
        try:
            end = started[i].end(jobs[i], results[i])
        except NonFiniteError as error:
            yield i, error
        else:
            if end is not None:  # else more group rounds follow
                yield i, None if started[i].stops_after(end) else end.record
