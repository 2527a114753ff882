"""How a worker talks to the orchestrator: one JSON line out for every line in.

The worker builds everything, runs its warm-up rounds and says ``{"ready": true, ...}``. For each ``go N``
it runs N rounds and answers ``{"seconds": [...]}``. On ``quit`` or the end of its input it stops. Between
two answers it waits in a blocking read.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import IO, Any

from workloads import OPTIMIZERS, WORKLOADS, Workload


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all workers have."""
    arguments = argparse.ArgumentParser(description=description)
    arguments.add_argument("--workload", choices=list(WORKLOADS), required=True)
    arguments.add_argument("--optimizer", choices=OPTIMIZERS, required=True)
    arguments.add_argument("--warmup", type=int, help="rounds before it says that it is ready")
    return arguments


def age() -> float:
    """Seconds since this process was started."""
    started = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")


def private_stdout() -> IO[str]:
    """The real standard output for our answers; what libraries print goes to standard error from now on."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    return answers


class Gate:
    """Stands between two rounds: reports how long they took, and waits for leave to run more.

    Args:
        workload: what is being run.
        warmup: rounds before the first that counts; None is the workload's own number.
        packages: names of the packages whose versions are to be reported.
    """

    def __init__(self, workload: Workload, warmup: int | None, *packages: str) -> None:
        self.answers = private_stdout()
        self.left = workload.warmup if warmup is None else warmup
        self.packages = packages
        self.ready = False
        self.first = 0.0  # age of the process when its first round was done
        self.seconds: list[float] = []
        self.info: dict[str, Any] = {}
        self.released = time.perf_counter()

    def round_done(self) -> bool:
        """To be called after every round; tells whether to run another."""
        now = time.perf_counter()
        self.seconds.append(now - self.released)
        self.first = self.first or age()
        self.left -= 1
        if self.left <= 0:
            self._answer()
            self.left = _leave()
            self.seconds.clear()
        self.released = time.perf_counter()
        return self.left > 0

    def _answer(self) -> None:
        answer: dict[str, Any] = {"seconds": self.seconds}
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


def _leave() -> int:
    """How many rounds to run next; 0 is the end."""
    for line in iter(sys.stdin.readline, ""):
        word, _, number = line.strip().partition(" ")
        if word == "go":
            return int(number or 1)
        if word == "quit":
            return 0
    return 0
