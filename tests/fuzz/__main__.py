"""The command: see the package's docstring."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from . import arguments, data, folders, planted, specs
from .harness import GOOD, run, run_case

TARGETS = {
    target.name: target
    for target in (specs.TARGET, arguments.TARGET, data.TARGET, data.CACHE, folders.TARGET, planted.TARGET)
}
USUAL = ("specs=500", "arguments=1000", "data=500", "cache=50", "folders=100")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("budget", nargs="*", help=f"TARGET=CASES; targets are {', '.join(TARGETS)}")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--seconds", type=float, help="the most for each target")
    parser.add_argument(
        "--case", action="append", default=[], help="TARGET:NUMBER, run here and shown in full"
    )
    options = parser.parse_args()
    for case in options.case:
        name, _, number = case.partition(":")
        with tempfile.TemporaryDirectory() as place:
            shared, folder = Path(place, "shared"), Path(place, "folder")
            shared.mkdir()
            folder.mkdir()
            TARGETS[name].prepare(shared)
            os.environ["FUZZ_SHOW"] = "1"
            outcome = run_case(TARGETS[name], options.seed, int(number), shared, folder)
        print(f"{case}: {outcome.kind} ({outcome.seconds:.1f} s)\n{outcome.text}")
    budget = options.budget if options.budget or options.case else USUAL
    failed = False
    for part in budget:
        name, _, cases = part.partition("=")
        began = time.monotonic()
        numbers = range(options.first, options.first + int(cases))
        report = run(TARGETS[name], options.seed, numbers, options.processes, options.seconds)
        print("\n".join(report.lines()), f"({time.monotonic() - began:.0f} s)", flush=True)
        failed |= any(kind not in GOOD for kind in report.counts)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
