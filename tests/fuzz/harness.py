"""Cases in forked processes, so that a hang or a crash is an outcome like any other."""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import chdir
from dataclasses import dataclass, field
from multiprocessing import connection, get_context
from pathlib import Path
from typing import Any, NamedTuple

MEMORY = 6 << 30  # bytes that a process may have
GOOD = ("accepted", "refused", "no memory", "run", "reported")


class Target(NamedTuple):
    """One kind of input.

    Attributes:
        name: of the target.
        prepare: writes what all cases share into a folder.
        case: one case, given its random numbers, the shared folder and its own empty folder. It returns
            what became of it, or raises.
        limit: seconds.
    """

    name: str
    prepare: Callable[[Path], None]
    case: Callable[[random.Random, Path, Path], str]
    limit: float = 60.0


class Outcome(NamedTuple):
    """What became of a case."""

    number: int
    kind: str  # one of GOOD, or what failed and where
    text: str = ""  # traceback, or whatever else helps
    seconds: float = 0.0


class Wrong(AssertionError):  # noqa: N818
    """Damaged files were read as other data."""


@dataclass
class Report:
    """All outcomes of a target."""

    target: str
    seed: int
    counts: Counter[str] = field(default_factory=Counter)
    failures: dict[str, list[Outcome]] = field(default_factory=dict)
    slowest: Outcome = field(default_factory=lambda: Outcome(-1, ""))

    def add(self, outcome: Outcome) -> None:
        self.counts[outcome.kind if outcome.kind in GOOD else "FAILED"] += 1
        if outcome.kind not in GOOD:
            self.failures.setdefault(outcome.kind, []).append(outcome)
        if outcome.seconds > self.slowest.seconds:
            self.slowest = outcome

    def lines(self) -> Iterator[str]:
        counts = ", ".join(f"{count} {kind}" for kind, count in sorted(self.counts.items()))
        yield f"{self.target}: {sum(self.counts.values())} cases: {counts or 'none'}"
        if self.slowest.number >= 0:
            yield f"  the slowest took {self.slowest.seconds:.1f} s: case {self.slowest.number}"
        for kind, found in sorted(self.failures.items(), key=lambda item: -len(item[1])):
            yield f"  {len(found)} x {kind}"
            cases = " ".join(f"--case {self.target}:{o.number}" for o in found[:3])
            yield f"    python -m tests.fuzz --seed {self.seed} {cases}"
            yield from (f"    | {line}" for line in found[0].text.splitlines()[-6:])


def run_case(target: Target, seed: int, number: int, shared: Path, folder: Path) -> Outcome:
    """One case, in this process."""
    from fadamgc import FadamgcError

    began = time.perf_counter()
    kind, text = "accepted", ""
    with warnings.catch_warnings(), chdir(folder):  # a relative path of a case stays in its folder
        warnings.simplefilter("ignore")
        try:
            kind = target.case(random.Random(f"{target.name} {seed} {number}"), shared, folder) or "accepted"
        except FadamgcError as error:
            kind, text = "refused", str(error)
            if len(text) > 5000:
                kind = f"a message of more than 5,000 characters ({type(error).__name__})"
        except MemoryError:
            kind, text = "no memory", traceback.format_exc()
        except Wrong as error:
            kind, text = f"accepted with another result: {str(error).splitlines()[0]}", str(error)
        except Exception as error:
            text = traceback.format_exc()
            kind = "no memory" if "can't allocate memory" in str(error) else _place(error)
    return Outcome(number, kind, text, time.perf_counter() - began)


def _place(error: BaseException) -> str:
    """What an error is, and the last line of the package that it went through."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [f for f in frames if "fadamgc" in Path(f.filename).parts] or frames
    where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
    return f"{type(error).__name__} at {where}"


def run(
    target: Target, seed: int, numbers: Iterable[int], processes: int = 2, seconds: float | None = None
) -> Report:
    """Run cases of a target, in several processes, for some seconds at the most."""
    import fadamgc  # noqa: F401 - once, and not in every process

    report, todo = Report(target.name, seed), iter(numbers)
    until = None if seconds is None else time.monotonic() + seconds
    with tempfile.TemporaryDirectory(prefix="fadamgc-fuzz-") as place:
        shared = Path(place, "shared")
        shared.mkdir()
        _prepare(target, shared)
        crew: list[_Worker] = []
        done = False
        while True:
            while not done and len(crew) < processes:
                crew.append(_Worker(target, seed, shared, Path(place, f"worker-{time.monotonic_ns()}")))
            for worker in crew:
                if worker.number is None and not done:
                    number = next(todo, None)
                    if number is None or (until is not None and time.monotonic() > until):
                        done = True
                    else:
                        worker.give(number)
            busy = [worker for worker in crew if worker.number is not None]
            if not busy:
                break
            connection.wait([worker.pipe for worker in busy], timeout=0.2)
            for worker in busy:
                outcome = worker.look(target.limit)
                if outcome is not None:
                    if outcome.kind not in GOOD and outcome.kind not in report.failures:
                        print(f"{target.name}:{outcome.number}: {outcome.kind}", file=sys.stderr, flush=True)
                    report.add(outcome)
                    if not worker.alive:
                        crew.remove(worker)
        for worker in crew:
            worker.end()
    return report


def _prepare(target: Target, shared: Path) -> None:
    """Prepare in another process, because a process with threads must not be forked."""
    process = get_context("fork").Process(target=_quietly, args=(target.prepare, shared))
    process.start()
    process.join()
    if process.exitcode:
        raise SystemExit(f"{target.name}: preparing failed")


def _quietly(function: Callable[..., Any], *arguments: Any) -> None:
    import torch

    torch.set_num_threads(1)
    os.setsid()
    resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    function(*arguments)


class _Worker:
    """A process that runs one case after the other."""

    def __init__(self, target: Target, seed: int, shared: Path, folder: Path) -> None:
        context = get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.folder, self.number, self.since = folder, None, 0.0
        self.process = context.Process(
            target=_quietly, args=(_serve, target, seed, shared, folder, theirs), daemon=False
        )
        self.process.start()
        theirs.close()
        self.alive = True

    def give(self, number: int) -> None:
        self.number, self.since = number, time.monotonic()
        self.pipe.send(number)

    def look(self, limit: float) -> Outcome | None:
        """The outcome of the case, if there is one."""
        assert self.number is not None
        number, seconds = self.number, time.monotonic() - self.since
        try:
            if self.pipe.poll():
                self.number = None
                return Outcome(*self.pipe.recv())
        except (EOFError, ConnectionResetError):
            self.end()
            return Outcome(number, f"the process died (exit code {self.process.exitcode})", "", seconds)
        if seconds > limit:
            self.end()
            return Outcome(number, f"took more than {limit:g} s", "", seconds)
        return None

    def end(self) -> None:
        self.alive = False
        if self.process.is_alive():
            try:
                os.killpg(self.process.pid or 0, signal.SIGKILL)  # with whatever the case has started
            except ProcessLookupError:
                self.process.kill()
        self.process.join()
        self.pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _serve(target: Target, seed: int, shared: Path, folder: Path, pipe: Any) -> None:
    sys.stdin = open(os.devnull)  # noqa: SIM115
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    while True:
        try:
            number = pipe.recv()
        except (EOFError, OSError):
            return
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        pipe.send(tuple(run_case(target, seed, number, shared, folder)))
