"""The orchestrator: systems take turns of one or a few rounds, so that all are measured under the same load.

python benchmarks/bench.py [--only digits,cnn] [--repeats 5] [--quick] [--out results/benchmarks]
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from contextlib import ExitStack
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from environments import NoEnvironmentError, ensure, say
from extras import EXTRAS, measure
from report import chart, table
from systems import DISTURBED, SYSTEMS, System, Turn, Worker, WorkerError, run_probe
from workloads import OPTIMIZERS, WORKLOADS, Workload

Results = dict[str, Any]
TRIES = 4  # of a turn that other processes disturb
PAUSE = 5.0  # seconds before the next try


def measure_group(
    workload: Workload, optimizer: str, systems: list[System], absent: dict[str, str], repeats: int
) -> Results:
    """Measure all systems on one workload with one local optimizer, interleaved.

    Args:
        workload: what to train.
        optimizer: "sgd" or "adam".
        systems: the systems to measure.
        absent: environments that could not be created, with the reasons.
        repeats: turns per system.
    """
    entries: dict[str, Results] = {}
    workers: dict[str, Worker] = {}
    turns: dict[str, list[Turn]] = {}
    with ExitStack() as stack:
        for system in systems:
            entries[system.name] = {"name": system.name, "label": system.label}
            say(f"{workload.name} {optimizer}: starting {system.name}")
            try:
                if system.environment in absent:
                    raise WorkerError(absent[system.environment])
                worker = stack.enter_context(Worker(system.command(workload.name, optimizer)))
            except (WorkerError, OSError) as error:
                _give_up(entries[system.name], error)
                continue
            workers[system.name], turns[system.name] = worker, []
        for repeat in range(repeats):
            order = list(workers)
            shift = repeat % len(order) if order else 0
            for name in order[shift:] + order[:shift]:
                if name not in workers:
                    continue
                say(f"{workload.name} {optimizer}: repeat {repeat + 1} of {repeats}, {name}")
                try:
                    turns[name] += take_turn(workers[name], workload.turn)
                except WorkerError as error:
                    _give_up(entries[name], error)
                    del workers[name]
        for name, worker in workers.items():
            entries[name] |= _entry(worker, turns[name])
    return {
        "workload": _facts(workload),
        "optimizer": optimizer,
        "systems": list(entries.values()),
    }


def take_turn(worker: Worker, rounds: int) -> list[Turn]:
    """Run one turn, again if it was disturbed; only the last try counts.

    A loop on two threads is many times slower when another process uses one of the cores, which would flatter
    every other system. So a turn is repeated if other processes were busy. The rule looks at the CPU time of
    other processes, never at the time of the turn, and is the same for all systems. The last try counts in
    any case, and the table says how many turns were disturbed.
    """
    tries: list[Turn] = []
    for number in range(TRIES):
        tries.append(worker.go(rounds))
        if tries[-1].others <= DISTURBED:
            break
        say(f"  disturbed: other processes used {tries[-1].others:.2f} cores")
        if number < TRIES - 1:
            time.sleep(PAUSE)
    tries[-1].counts = True
    return tries


def _give_up(entry: Results, error: Exception) -> None:
    entry["not_measured"] = str(error)
    say(f"  not measured: {error}")


def _entry(worker: Worker, turns: list[Turn]) -> Results:
    ready = {key: value for key, value in worker.ready.items() if key != "ready"}
    return {
        **ready,
        "turns": [asdict(turn) for turn in turns],
        "peak_rss": sum(worker.peak.values()),
        "idle_cpu": worker.idle_cpu / worker.idle_seconds if worker.idle_seconds else 0.0,
    }


def _facts(workload: Workload) -> Results:
    numbers = ("name", "clients", "sampled", "steps", "batch", "samples", "turn", "warmup")
    parameters = sum(p.numel() for p in workload.make_model(0).parameters() if p.requires_grad)
    return {**{key: getattr(workload, key) for key in numbers}, "parameters": parameters}


def make_environments(systems: list[System]) -> dict[str, str]:
    """Create the environments; return the names of those that could not be created, with the reasons."""
    absent = {}
    for name in dict.fromkeys(system.environment for system in systems):
        try:
            ensure(name)
        except (NoEnvironmentError, OSError) as error:
            absent[name] = f"no environment {name}: {error}"
            say(absent[name])
    return absent


def write(results: Results, out: Path) -> None:
    """Write results, table and chart; each file is replaced in one step."""
    out.mkdir(parents=True, exist_ok=True)
    _replace(out / "results.json", json.dumps(results, indent=1))
    _replace(out / "table.md", table(results))
    chart(results, out / "chart.png")


def _replace(path: Path, text: str) -> None:
    scratch = path.with_name(path.name + ".new")
    scratch.write_text(text)
    os.replace(scratch, path)


def _chosen(text: str | None, known: list[str], what: str) -> list[str]:
    names = known if text is None else [name for name in text.split(",") if name and name != "none"]
    unknown = [name for name in names if name not in known]
    if unknown:
        sys.exit(f"--{what}={','.join(unknown)} is not known; known are {', '.join(known)}")
    return names


def parse() -> argparse.Namespace:
    """Read the command line."""
    arguments = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    arguments.add_argument("--only", help=f"workloads, of {','.join(WORKLOADS)}")
    arguments.add_argument("--optimizers", help=f"of {','.join(OPTIMIZERS)}")
    arguments.add_argument("--systems", help=f"of {','.join(s.name for s in SYSTEMS)}")
    arguments.add_argument("--extras", help=f"of {','.join(EXTRAS)}, or none")
    arguments.add_argument("--repeats", type=int, help="turns per system (5; with --quick 2)")
    arguments.add_argument("--quick", action="store_true", help="digits only and small extras: does it work?")
    arguments.add_argument("--out", type=Path, default=Path("results/benchmarks"))
    return arguments.parse_args()


def _without_folder(words: list[str]) -> list[str]:
    """Return a command line without --out, which is a path of this machine."""
    at = words.index("--out") if "--out" in words else len(words)
    return [word for word in (*words[:at], *words[at + 2 :]) if not word.startswith("--out=")]


def main() -> None:
    """Measure, and write after each group, so that an interruption loses little."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))  # so that workers are stopped
    options = parse()
    quick = options.quick
    repeats = options.repeats or (2 if quick else 5)
    workloads = _chosen(options.only or ("digits" if quick else None), list(WORKLOADS), "only")
    optimizers = _chosen(options.optimizers, list(OPTIMIZERS), "optimizers")
    names = _chosen(options.systems, [s.name for s in SYSTEMS], "systems")
    extras = _chosen(options.extras or ("speed,start" if quick else None), list(EXTRAS), "extras")
    systems = [s for s in SYSTEMS if s.name in names]
    began = time.time()
    absent = make_environments(systems)
    results: Results = {
        "schema": 1,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(_without_folder(["python", *sys.argv])),
        "settings": {"repeats": repeats, "quick": quick, "disturbed": DISTURBED},
        "machine": run_probe(["machine"]),
        "load_before": os.getloadavg(),
        "groups": [],
        "extras": {},
    }
    for name in workloads:
        for optimizer in optimizers:
            chosen = [s for s in systems if s.runs(WORKLOADS[name], optimizer)]
            group = measure_group(WORKLOADS[name], optimizer, chosen, absent, repeats)
            results["groups"].append(group)
            write(results, options.out)
    for name in extras:
        results["extras"][name] = measure(name, quick)
        write(results, options.out)
    results["load_after"] = os.getloadavg()
    results["minutes"] = (time.time() - began) / 60
    write(results, options.out)
    print(table(results))
    say(f"{options.out}: results.json, table.md, chart.png")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        sys.exit("interrupted")
