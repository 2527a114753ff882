"""The orchestrator: systems take turns of one or a few rounds, so that all are measured under the same load.

python benchmarks/bench.py [--only digits,cnn] [--extras sweep] [--update] [--quick] [--out FOLDER]
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
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from environments import NoEnvironmentError, ensure, say
from extras import EXTRAS, OPTIONAL, measure
from report import chart, table
from systems import DISTURBED, SYSTEMS, System, Turn, Worker, WorkerError, run_probe, take_turn
from workloads import OPTIMIZERS, WORKLOADS, Workload

Results = dict[str, Any]
GROUPS = [workload.name for workload in WORKLOADS.values() if workload.in_groups]
LEAST_ROUNDS = 20  # of the extra million, to see what grows
SAME = ("cpu", "cores", "simd", "torch")  # facts of the machine, without which results are not comparable


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


def _give_up(entry: Results, error: Exception) -> None:
    entry["not_measured"] = str(error)
    say(f"  not measured: {error}")


def _entry(worker: Worker, turns: list[Turn]) -> Results:
    ready = {key: value for key, value in worker.ready.items() if key != "ready"}
    return {
        **ready,
        "turns": [turn.as_json() for turn in turns],
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


def saved(new: Results, path: Path, groups: bool) -> Results:
    """Return the saved results of a file, to which new parts are added; the new results without a file.

    Small and full measurements are not mixed, nor are groups of two machines, because the table compares
    them. Extras may be of another machine; the table then says which.
    """
    if not path.exists():
        return new
    old: Results = json.loads(path.read_text())
    before, now = (
        {"quick": one["settings"]["quick"]}
        | ({name: one["machine"][name] for name in SAME} if groups else {})
        for one in (old, new)
    )
    for name, value in before.items():
        if value != now[name]:
            sys.exit(f"--update: {path.name} was measured with {name}={value}, now it is {now[name]}")
    return old


def put_group(results: Results, group: Results) -> None:
    """Replace the group of the same workload and optimizer, or add it in the order of the workloads."""

    def place(group: Results) -> tuple[int, int]:
        return GROUPS.index(group["workload"]["name"]), OPTIMIZERS.index(group["optimizer"])

    others = [other for other in results["groups"] if place(other) != place(group)]
    results["groups"] = sorted([*others, group], key=place)


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
    arguments.add_argument("--only", help=f"workloads, of {','.join(GROUPS)}, or none")
    arguments.add_argument("--optimizers", help=f"of {','.join(OPTIMIZERS)}")
    arguments.add_argument("--systems", help=f"of {','.join(s.name for s in SYSTEMS)}")
    arguments.add_argument("--extras", help=f"of {','.join(EXTRAS)}, or none (all but {','.join(OPTIONAL)})")
    arguments.add_argument("--repeats", type=int, help="turns per system (5; with --quick 2)")
    arguments.add_argument("--quick", action="store_true", help="digits only and small extras: does it work?")
    arguments.add_argument("--rounds", type=int, help="rounds of the extra million (300; with --quick 20)")
    arguments.add_argument(
        "--update", action="store_true", help="keep the saved groups and extras that are not measured now"
    )
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
    if options.rounds is not None and options.rounds < LEAST_ROUNDS:
        sys.exit(f"--rounds={options.rounds} is not accepted; give at least {LEAST_ROUNDS}")
    repeats = options.repeats or (2 if quick else 5)
    workloads = _chosen(options.only or ("digits" if quick else None), GROUPS, "only")
    optimizers = _chosen(options.optimizers, list(OPTIMIZERS), "optimizers")
    names = _chosen(options.systems, [s.name for s in SYSTEMS], "systems")
    default = "speed,start" if quick else ",".join(name for name in EXTRAS if name not in OPTIONAL)
    extras = _chosen(options.extras or default, list(EXTRAS), "extras")
    systems = [s for s in SYSTEMS if s.name in names and workloads]
    began = time.time()
    origin: Results = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "command": shlex.join(_without_folder(["python", *sys.argv])),
    }
    results: Results = {
        "schema": 1,
        **origin,
        "settings": {"repeats": repeats, "quick": quick, "disturbed": DISTURBED},
        "machine": run_probe(["machine"]),
        "load_before": os.getloadavg(),
        "groups": [],
        "extras": {},
    }
    if options.update:
        machine = results["machine"]
        results = saved(results, options.out / "results.json", groups=bool(workloads))
        if any(machine[name] != results["machine"][name] for name in SAME):
            origin["machine"] = machine
    absent = make_environments(systems)
    for name in workloads:
        for optimizer in optimizers:
            chosen = [s for s in systems if s.runs(WORKLOADS[name], optimizer)]
            group = measure_group(WORKLOADS[name], optimizer, chosen, absent, repeats)
            put_group(results, {**group, **origin, "repeats": repeats})
            write(results, options.out)
    for name in extras:
        results["extras"][name] = {**measure(name, quick, options.rounds), **origin}
        write(results, options.out)
    if results["date"] == origin["date"]:
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
