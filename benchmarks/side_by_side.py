"""Measure two checkouts side by side: start with and without compiled code on disk, and speed.

python benchmarks/side_by_side.py OLD NEW [--algorithms fadamgc,fedavg] [--starts 3] [--turns 20]

Workers of both checkouts take turns, so that both see the same machine. The table has minimums and medians;
minimums are what a quiet machine would show. CPU seconds count the compiler's, too.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

from workloads import WORKLOADS

OPTIMIZER = {"fedavg": "sgd", "local_adam": "adam", "fadamgc": "adam"}
Numbers = dict[str, list[float]]


class Worker:
    """A process of one checkout that runs rounds on demand; see workers/protocol.py.

    Args:
        checkout: folder of the repository.
        cache: folder for compiled code.
        workload: name of the workload.
        algorithm: name of the algorithm.
        executor: name of the executor.
        threads: threads of torch.
    """

    def __init__(
        self, checkout: Path, cache: str, workload: str, algorithm: str, executor: str, threads: int
    ) -> None:
        benchmarks = checkout / "benchmarks"
        environment = {name: value for name, value in os.environ.items() if not name.startswith("FADAMGC")}
        environment |= {
            "PYTHONPATH": f"{checkout / 'src'}{os.pathsep}{benchmarks}",
            "FADAMGC_CACHE": cache,
            "OMP_NUM_THREADS": str(threads),
        }
        command = [sys.executable, str(benchmarks / "workers" / "ours.py"), "--workload", workload]
        command += ["--optimizer", OPTIMIZER[algorithm], "--algorithm", algorithm, "--executor", executor]
        self.process = subprocess.Popen(
            command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.start_seconds: float = self._answer()["start_seconds"]

    def rounds(self, count: int) -> list[float]:
        """Run rounds; return the seconds of each."""
        assert self.process.stdin is not None
        print(f"go {count}", file=self.process.stdin, flush=True)
        seconds: list[float] = self._answer()["seconds"]
        return seconds

    def end(self) -> float:
        """End the process; return the CPU seconds that it and its children have used."""
        assert self.process.stdin is not None
        self.process.stdin.close()
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = os.waitstatus_to_exitcode(status)
        return usage.ru_utime + usage.ru_stime

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"the worker of {self.process.args} has failed")
        answer: dict[str, Any] = json.loads(line)
        return answer


def main() -> None:
    """Measure and print one table per algorithm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--workload", default="digits", choices=list(WORKLOADS))
    parser.add_argument("--algorithms", default="fadamgc,fedavg")
    parser.add_argument("--executor", default="vectorized")
    parser.add_argument("--starts", type=int, default=3, help="starts of each checkout")
    parser.add_argument("--turns", type=int, default=20, help="turns of each checkout, for the speed")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    checkouts = {"old": options.old.resolve(), "new": options.new.resolve()}
    for algorithm in options.algorithms.split(","):
        numbers: dict[str, Numbers] = {}

        def add(name: str, checkout: str, value: float, numbers: dict[str, Numbers] = numbers) -> None:
            numbers.setdefault(name, {}).setdefault(checkout, []).append(value)

        with ExitStack() as stack:
            caches: dict[str, str] = {}
            how = (options.workload, algorithm, options.executor, options.threads)
            for i in range(options.starts):
                for checkout in sorted(checkouts, reverse=i % 2 == 1):
                    caches[checkout] = stack.enter_context(tempfile.TemporaryDirectory())
                    for kind in ("without code on disk", "with code on disk"):
                        worker = Worker(checkouts[checkout], caches[checkout], *how)
                        add(f"start {kind}, seconds", checkout, worker.start_seconds)
                        add(f"start {kind}, CPU seconds", checkout, worker.end())
            workers = {c: Worker(checkouts[c], caches[c], *how) for c in checkouts}
            count = WORKLOADS[options.workload].turn
            for i in range(options.turns):
                for checkout in sorted(workers, reverse=i % 2 == 1):
                    seconds = workers[checkout].rounds(count)
                    add("round, ms (median of a turn)", checkout, 1e3 * median(seconds))
                    add("round, ms (fastest of a turn)", checkout, 1e3 * min(seconds))
            for worker in workers.values():
                worker.end()
        show(f"{options.workload} {algorithm}, {options.threads} thread(s)", numbers)


def show(title: str, numbers: dict[str, Numbers]) -> None:
    """Print minimum and median of each checkout, and how much faster the new one is."""
    print(f"\n{title:40}{'old':>9}{'':>10}{'new':>9}{'':>10}{'old / new':>12}")
    print(f"{'':40}{'min':>9}{'median':>10}{'min':>9}{'median':>10}{'min':>12}{'median':>9}")
    for name, both in numbers.items():
        old, new = both["old"], both["new"]
        print(
            f"{name:40}{min(old):9.3g}{median(old):10.3g}{min(new):9.3g}{median(new):10.3g}"
            f"{min(old) / min(new):12.2f}{median(old) / median(new):9.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
