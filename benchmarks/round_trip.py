"""Measure where the time of a round goes in a federation on Flower: a real SuperLink and nodes on loopback.

    python benchmarks/round_trip.py                       this checkout
    python benchmarks/round_trip.py OLD NEW               two checkouts, in turns
    python benchmarks/round_trip.py --rounds 5 --turns 3 --config "eval-clients=true"
    python benchmarks/round_trip.py OLD NEW --save results/benchmarks/round-trip.json      for docs/flower.md

The app is that of examples/flower-digits with three nodes. All parts note the machine's time: the app on the
nodes and the server itself, and the nodes' logs, which this script follows. The table has the median over
messages of each part of a round, except the first round, and the median time of a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import Any

HERE = Path(__file__).resolve().parent
NODES = 3
PARTS = {  # name: the part begins and ends with these times of a message
    "wait until the node asks the SuperLink (Flower, every 3 s)": ("pushed", "received"),
    "wait until the SuperExec asks the node; fork": ("received", "started"),
    "start of Python, Flower's imports, message, app": ("started", "importing"),
    "imports of the app: torch, fadamgc": ("importing", "imported"),
    "Flower finds the app and calls it": ("imported", "called"),
    "read the request": ("called", "loading"),
    "load model and data": ("loading", "loaded"),
    "train, store the state, pack the reply": ("loaded", "answered"),
    "wait until the node has the reply (Flower, every 0.5 s)": ("answered", "sending"),
    "send the reply; wait until the server asks for it": ("sending", "arrived"),
    "wait for the slowest node": ("arrived", "complete"),
    "check, aggregate, evaluate, write, ask again": ("complete", "next"),
}
TOTAL = "a round"
CPU = "CPU seconds of a client's process"


def events_of(file: Path) -> list[dict[str, Any]]:
    """Read the events that the parts have noted, in the order of their times."""
    events = [json.loads(line) for line in file.read_text().splitlines()]
    return sorted(events, key=lambda event: float(event["time"]))


def follow(log: Path, node: int, ended: threading.Event, found: list[dict[str, Any]]) -> None:
    """Note when lines about messages appear in a node's log."""
    position = 0
    while not ended.is_set():
        now, text = time.time(), b""
        if log.exists():
            with log.open("rb") as file:
                file.seek(position)
                text = file.read()
                text = text[: text.rfind(b"\n") + 1]
                position += len(text)
        for line in text.decode(errors="replace").splitlines():
            for word, event in (("Receiving: train", "received"), ("Sending: train", "sending")):
                if word in line:
                    found.append({"event": event, "client": node, "time": now})
        time.sleep(0.02)


def run_once(folder: Path, rounds: int, config: str) -> list[dict[str, Any]]:
    """Run the digits on a federation of this checkout; return the events."""
    import fadamgc
    from fadamgc.flower.loopback import LoopbackFederation

    examples = Path(fadamgc.__file__).parents[2] / "examples"  # of this checkout
    app, events = folder / "app", folder / "events.jsonl"
    shutil.copytree(examples / "flower-digits", app)
    text = (app / "pyproject.toml").read_text()
    text = text.replace("fadamgc.flower.dataset_apps:server", "app:server")
    (app / "pyproject.toml").write_text(text.replace("fadamgc.flower.dataset_apps:client", "app:timed"))
    shutil.copy(HERE / "workers" / "round_trip_app.py", app / "app.py")
    os.environ["ROUND_TRIP_EVENTS"] = str(events)
    federation, ended = LoopbackFederation(folder / "federation"), threading.Event()
    found: list[dict[str, Any]] = []
    logs = [federation.folder / "logs" / f"node-{i}.log" for i in range(NODES)]
    threads = [
        threading.Thread(target=follow, args=(log, i, ended, found), daemon=True)
        for i, log in enumerate(logs)
    ]
    try:
        began = time.time()
        federation.up(NODES)
        found.append({"event": "up", "seconds": time.time() - began, "time": time.time()})
        for thread in threads:
            thread.start()
        federation.run(app, f"rounds={rounds} {config}".strip())
    finally:
        ended.set()
        federation.down()
    return sorted(events_of(events) + found, key=lambda event: float(event["time"]))


def messages_of(events: Sequence[dict[str, Any]]) -> Iterator[dict[str, float]]:
    """Yield the times of each training message after the first round."""
    pushed = [e["time"] for e in events if e["event"] == "pushed" and e["kind"] == "train"]
    complete = [e["time"] for e in events if e["event"] == "complete"]
    for began, ended, after in zip(pushed[1:], complete[1:], pushed[2:], strict=False):
        inside = [e for e in events if began <= e["time"] <= ended]
        for client in range(NODES):
            times = {"pushed": began, "complete": ended, "next": after}
            for event in inside:
                if event.get("client") != client:
                    continue
                if event["event"] == "handled" and event["kind"] == "train":
                    names = ("started", "importing", "imported", "called", "loading", "loaded", "cpu")
                    times |= {name: event[name] for name in names} | {"answered": event["time"]}
                else:
                    times[event["event"]] = event["time"]
            if {"received", "answered", "sending", "arrived"} <= times.keys():
                # In a process that was forked when the imports were done, they are before its start.
                for name in ("importing", "imported"):
                    times[name] = max(times[name], times["started"])
                yield times


def measure(events: Sequence[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the seconds of each part of each message, and of each round."""
    numbers: dict[str, list[float]] = {}
    rounds = set()
    for times in messages_of(events):
        for name, (first, last) in PARTS.items():
            numbers.setdefault(name, []).append(times[last] - times[first])
        numbers.setdefault(CPU, []).append(times["cpu"])
        rounds.add((times["pushed"], times["next"]))
    numbers[TOTAL] = [last - first for first, last in sorted(rounds)]
    return numbers


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs="*", default=[HERE.parent])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--turns", type=int, default=2, help="federations of each checkout")
    parser.add_argument("--config", default="", help="more values for the app's config")
    parser.add_argument("--save", type=Path, help="file for the medians")
    parser.add_argument("--worker", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        events = run_once(options.worker, options.rounds, options.config)
        (options.worker / "measured.json").write_text(json.dumps(events))
        return
    measured: list[dict[str, list[float]]] = [{} for _ in options.checkouts]
    for _ in range(options.turns):
        for checkout, numbers in zip(options.checkouts, measured, strict=True):
            with tempfile.TemporaryDirectory() as folder:
                words = ["--rounds", str(options.rounds), "--config", options.config, "--worker", folder]
                subprocess.run(
                    [sys.executable, str(Path(__file__).resolve()), *words],
                    env=os.environ | {"PYTHONPATH": str(checkout.resolve() / "src")},
                    stdout=subprocess.DEVNULL,
                    check=True,
                )
                events = json.loads((Path(folder) / "measured.json").read_text())
            for name, values in measure(events).items():
                numbers.setdefault(name, []).extend(values)
    names = (*PARTS, TOTAL, CPU)
    result = {
        "columns": [path.resolve().name for path in options.checkouts],
        "medians": {name: [round(median(numbers[name]), 3) for numbers in measured] for name in names},
        "rounds": [len(numbers[TOTAL]) for numbers in measured],
        "nodes": NODES,
        "cores": os.cpu_count(),
        "machine": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "flwr": version("flwr"),
        "torch": version("torch"),
    }
    print(table(result))
    if options.save is not None:
        options.save.write_text(json.dumps(result, indent=1) + "\n")


def table(result: dict[str, Any]) -> str:
    """Return the medians as a table in Markdown, with a line that says what was measured."""
    columns = result["columns"]
    lines = [f"| Median seconds | {' | '.join(columns)} |", "|---|" + "--:|" * len(columns)]
    for name, medians in result["medians"].items():
        cells = " | ".join(f"{value:.2f}" for value in medians)
        lines.append(f"| **{name}** | {cells} |" if name == TOTAL else f"| {name} | {cells} |")
    rounds = " and ".join(map(str, result["rounds"]))
    place = f"{result['nodes']} nodes on one machine with {result['cores']} cores"
    return "\n".join(
        [*lines, "", f"{rounds} rounds of {place}, flwr {result['flwr']}, torch {result['torch']}."]
    )


if __name__ == "__main__":
    main()
