"""Many runs at once: seeds and step sizes of one algorithm share the blocks of the vectorized executor."""

from __future__ import annotations

import inspect
import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from itertools import pairwise
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from fadamgc.errors import FadamgcError, InputError, NonFiniteError, listed, nearest, reason, shown, whole
from fadamgc.federation.problem import Problem
from fadamgc.federation.run import Run
from fadamgc.sim.engine import Engine, Hooks, Makers, prepare, simulate, stops
from fadamgc.sim.executors import Executor, ExecutorChoice, Plan, VectorizedExecutor, make_executor
from fadamgc.sim.progress import progress_bar
from fadamgc.task import Task

Outcome = Run | NonFiniteError
AT_ONCE = 64  # runs that are in memory together


def simulate_many(
    runs: Sequence[Mapping[str, Any]],
    *,
    workers: int = 1,
    errors: Literal["raise", "return"] = "raise",
    progress: bool = True,
    **common: Any,
) -> list[Any]:
    """Run several simulations, such as seeds and step sizes, faster than one after the other.

    Each is what ``simulate`` would make of the same arguments: the same history and the same model
    (with ``executor="auto"``, if timing chooses the same executor). Runs of one algorithm on tasks of one
    model advance together, their clients in common blocks.

    Args:
        runs: the arguments of each run that are its own, by the names that ``simulate`` has for them.
        workers: processes to share the runs between; with more than one, a script needs the usual
            ``if __name__ == "__main__":`` and its tasks must be picklable.
        errors: what to do if a run's update is not finite: "raise", or "return" the NonFiniteError in the
            place of the run and go on with the others.
        progress: show a progress bar, where there is a terminal to show it on.
        common: the arguments that all runs have in common. A ``checkpoint`` among them is a folder in which
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
    whole("workers", workers, 1)
    if not isinstance(errors, str) or errors not in ("raise", "return"):
        raise InputError(f"errors={shown(errors)} is not accepted; it must be 'raise' or 'return'")
    if (each := listed(runs)) is None:
        raise InputError(f"runs={shown(runs)} is not accepted; give a list of dicts of arguments of simulate")
    every = [_arguments(i, own, common) for i, own in enumerate(each)]
    _check_folders(every)
    count = min(workers, len(every))
    if count <= 1:
        return _in_this_process(every, errors, progress)
    return _in_processes(every, errors, count)


def _arguments(i: int, own: Any, common: Mapping[str, Any]) -> dict[str, Any]:
    known = [name for name in inspect.signature(simulate).parameters if name != "progress"]
    if not isinstance(own, Mapping):
        raise InputError(f"runs[{i}]={shown(own)} is not accepted; give a dict of arguments of simulate")
    every = {**common, **own}
    if isinstance(common.get("checkpoint"), (str, os.PathLike)) and "checkpoint" not in own:
        every["checkpoint"] = Path(common["checkpoint"]) / f"run-{i}"
    for name in every:
        if name not in known:
            raise InputError(
                f"runs[{i}]: {shown(name)} is not an argument of simulate{nearest(str(name), known)}"
            )
    for name in ("algorithm", "task"):
        if name not in every:
            raise InputError(f"runs[{i}] has no {name}; give it there, or to all runs as {name}=...")
    return every


def _check_folders(every: list[dict[str, Any]]) -> None:
    """Refuse a checkpoint folder that two runs would share."""
    owners: dict[Path, int] = {}
    for i, arguments in enumerate(every):
        if not isinstance(arguments.get("checkpoint"), (str, os.PathLike)):
            continue  # none, or one that simulate refuses
        first = owners.setdefault(Path(arguments["checkpoint"]).resolve(), i)
        if first != i:
            raise InputError(
                f"runs[{first}] and runs[{i}] have the same checkpoint={str(arguments['checkpoint'])!r}; "
                "give each its own folder, or give checkpoint once for all, and each gets a folder in it"
            )


def _in_processes(every: list[dict[str, Any]], errors: str, count: int) -> list[Any]:
    """Deal the runs out; neighbours stay together, because they are most alike."""
    bounds = [len(every) * w // count for w in range(count + 1)]
    try:
        parts = [pickle.dumps(every[a:b]) for a, b in pairwise(bounds)]
    except Exception as error:
        raise InputError(
            f"workers={count} needs runs that can be pickled; use workers=1: {reason(error)}"
        ) from error
    with ProcessPoolExecutor(count, get_context("spawn")) as pool:
        futures = [pool.submit(_work, part, errors) for part in parts]
        return [run for future in futures for run in pickle.loads(future.result())]


def _work(part: bytes, errors: str) -> bytes:
    torch.set_num_threads(1)
    return pickle.dumps(_in_this_process(pickle.loads(part), errors, progress=False))


def _in_this_process(every: list[dict[str, Any]], errors: str, progress: bool) -> list[Any]:
    outcomes: list[Any] = []
    with torch.inference_mode(False):
        for first in range(0, len(every), AT_ONCE):
            share = Share()
            with ExitStack() as stack:
                started = []
                for arguments in every[first : first + AT_ONCE]:
                    started.append(prepare(**arguments, make=share.makers))
                    stack.callback(started[-1][0].close)
                outcomes += advance(started, progress)
            failed = [outcome for outcome in outcomes if isinstance(outcome, FadamgcError)]
            if failed and errors == "raise":
                raise failed[0]
    return outcomes


def advance(
    started: Sequence[tuple[Engine, Hooks]],
    progress: bool = False,
    finished: Callable[[int, Outcome], None] | None = None,
) -> list[Outcome]:
    """Bring runs to their ends, together where they share a vectorized executor.

    ``finished`` is called with the number of a run and its outcome as soon as there is one.
    """
    outcomes: dict[int, Outcome] = {}

    def done(i: int, outcome: Outcome | None = None) -> None:
        engine, _ = started[i]
        if outcome is None:
            engine.write()
            outcome = engine.result()
        outcomes[i] = outcome
        engine.close()
        if finished is not None:
            finished(i, outcome)

    teams: dict[int, list[int]] = {}
    for i, (engine, _) in enumerate(started):
        together = isinstance(engine.executor, VectorizedExecutor)
        teams.setdefault(id(engine.executor) if together else -i - 1, []).append(i)
    total = sum(engine.settings.rounds for engine, _ in started)
    before = sum(engine.t for engine, _ in started)
    with ExitStack() as stack:
        show = stack.enter_context(progress_bar(progress, f"{len(started)} runs", total, before))
        for team in teams.values():
            going = list(team)
            while going:
                for i in [i for i in going if started[i][0].over()]:
                    going.remove(i)
                    done(i)
                for i, outcome in _round(started, going):
                    if isinstance(outcome, NonFiniteError):
                        going.remove(i)
                        done(i, outcome)
                        continue
                    before += 1
                    show(outcome, before)
                    if outcome is None:
                        going.remove(i)
                        done(i)
    return [outcomes[i] for i in range(len(started))]


def _round(started: Sequence[tuple[Engine, Hooks]], going: list[int]) -> list[tuple[int, Any]]:
    """One round of each; a record, an error, or None where a callback ended the run."""
    if not going:
        return []
    jobs = {i: started[i][0].begin() for i in going}
    executor = started[going[0]][0].executor
    if len(going) == 1:
        results = {going[0]: executor.run(jobs[going[0]])}
    else:
        owner = {id(job): i for i, own in jobs.items() for job in own}
        collected: dict[int, list[Any]] = {i: [] for i in going}
        for result in executor.run([job for own in jobs.values() for job in own]):
            collected[owner[id(result.job)]].append(result)
        results = {i: iter(found) for i, found in collected.items()}
    outcome: list[tuple[int, Any]] = []
    for i in going:
        engine, hooks = started[i]
        try:
            end = engine.end(jobs[i], results[i])
        except NonFiniteError as error:
            outcome.append((i, error))
            continue
        outcome.append((i, None if stops(hooks, end) else end.record))
    return outcome


class Share:
    """Problems and executors that several engines may have in common."""

    def __init__(self) -> None:
        self._problems: list[tuple[Task, Any, Any, Problem]] = []
        self._executors: list[tuple[Any, Problem, Executor]] = []
        self.makers = Makers(self.problem, self.executor)

    def problem(self, task: Task, dtype: Any, device: Any) -> Problem:
        """The problem of a task, made once."""
        for other, its_dtype, its_device, problem in self._problems:
            if other is task and (its_dtype, its_device) == (dtype, device):
                return problem
        problem = Problem(task, dtype, device)
        self._problems.append((task, dtype, device, problem))
        return problem

    def executor(
        self, choice: ExecutorChoice, problem: Problem, plan: Plan, compiled: bool | None
    ) -> Executor:
        """The executor of an engine like this one, if there is one."""
        kind = (choice, type(plan.algorithm), plan[1:], compiled)
        for its_kind, its_problem, executor in self._executors:
            if its_kind == kind and (its_problem is problem or its_problem.like(problem)):
                return executor
        executor = make_executor(choice, problem, plan, compiled)
        self._executors.append((kind, problem, executor))
        return executor
