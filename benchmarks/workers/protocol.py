"""How a worker communicates with the orchestrator: one line of JSON out for each line in.

The worker builds everything, runs its warm-up rounds and prints ``{"ready": true, ...}``. For each ``go N``
it runs N rounds and prints ``{"seconds": [...]}``. On ``quit`` or at the end of its input it stops. Between
two answers it waits in a blocking read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from workloads import OPTIMIZERS, WORKLOADS, Workload


def parser(description: str | None) -> argparse.ArgumentParser:
    """Make the parser with the arguments of all workers."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--workload", choices=list(WORKLOADS), required=True)
    arguments.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    arguments.add_argument("--warmup", type=int, help="rounds before the worker is ready")
    return arguments


def age() -> float:
    """Return the seconds since this process was started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def private_stdout() -> IO[str]:
    """Return the real standard output, for answers; output of libraries then goes to standard error."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


class Gate:
    """Called between two rounds: reports their times, and waits for the next request.

    Args:
        workload: the workload that runs.
        warmup: rounds before the worker is ready; None is the workload's number.
        packages: packages whose versions are reported.
    """

    def __init__(self, workload: Workload, warmup: int | None, *packages: str) -> None:
        self.answers = private_stdout()
        self.left = workload.warmup if warmup is None else warmup
        self.packages = packages
        self.ready = False
        self.first = 0.0  # age of the process at the end of its first round
        self.seconds: list[float] = []
        self.info: dict[str, Any] = {}
        self.moved: Callable[[], dict[str, int]] = dict  # bytes so far, for workers that count them
        self._moved_before: dict[str, int] = {}
        self.released = time.perf_counter()

    def round_done(self) -> bool:
        """Call this after every round; it returns whether to run another."""
        now = time.perf_counter()
        self.seconds.append(now - self.released)
        self.first = self.first or age()
        self.left -= 1
        if self.left <= 0:
            self._answer()
            self.left = _next_request()
            self.seconds.clear()
        self.released = time.perf_counter()
        return self.left > 0

    def _answer(self) -> None:
        moved = self.moved()
        since = {name: count - self._moved_before.get(name, 0) for name, count in moved.items()}
        self._moved_before = moved
        answer: dict[str, Any] = {"seconds": self.seconds, "moved": since}
        if not self.ready:
            versions = {name: version(name) for name in ("torch", *self.packages)}
            versions["python"] = platform.python_version()
            answer = {
                "ready": True,
                "start_seconds": self.first,
                "warmup_seconds": self.seconds,
                "versions": versions,
                **self.info,
            }
            self.ready = True
        print(json.dumps(answer), file=self.answers, flush=True)


def _next_request() -> int:
    """Wait for a request and return its number of rounds; 0 is the end."""
    for line in iter(sys.stdin.readline, ""):
        word, _, number = line.strip().partition(" ")
        if word == "go":
            return int(number or 1)
        if word == "quit":
            return 0
    return 0
