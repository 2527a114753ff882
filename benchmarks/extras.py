"""Measurements other than rounds: the speed of the machine, starting, scale, memory, sweeps."""

from __future__ import annotations

import json
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from environments import say
from systems import SYSTEMS, Worker, WorkerError, busy_seconds, run_probe

Found = dict[str, Any]
STATES_GB = 16  # free memory that the clients' states of ResNet-18 need


def _probe(name: str, variables: dict[str, str] | None = None, **keywords: Any) -> Any:
    return run_probe([name, json.dumps(keywords)], variables)


def speed(quick: bool) -> Found:
    """Measure the machine's matrix product, and count the operations of a training step."""
    del quick
    return {"sgemm_gflops": _probe("sgemm"), "step_flops": _probe("flops")}


def start(quick: bool) -> Found:
    """Measure the import, and the first round of digits with a cold and with a warm compile cache."""
    found: Found = {"imports": [_probe("imports") for _ in range(2 if quick else 5)]}
    ours = next(system for system in SYSTEMS if system.name == "ours_fadamgc")
    command = ours.command("digits", "adam", "--warmup=1")
    with tempfile.TemporaryDirectory() as cache:
        for state in ("cold", "warm"):
            folders = {"FADAMGC_CACHE": f"{cache}/ours", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch"}
            with Worker(command, folders) as worker:
                found[f"first_round_{state}"] = worker.ready["start_seconds"]
        found["compile_cache_used"] = any(Path(cache).iterdir())
    return found


def scale(quick: bool) -> Found:
    """Measure time and memory with very many clients."""
    sizes = (1_000, 10_000) if quick else (1_000, 10_000, 100_000)
    return {"runs": [_probe("scale", clients=n) for n in sizes]}


def memory(quick: bool) -> Found:
    """Measure ResNet-18 with a hundred clients that keep states, in memory and in files."""
    found: Found = {}
    for states in ("memory", "files"):
        if states == "memory" and not quick and available_gb() < STATES_GB:
            found[states] = {"not_measured": f"less than {STATES_GB} GB of memory free"}
            continue
        keywords = {"clients": 20, "again": 1} if quick else {}
        try:
            found[states] = _probe("memory", states=states, **keywords)
        except WorkerError as error:
            found[states] = {"not_measured": str(error)}
    return found


def texts(quick: bool) -> Found:
    """Measure a pretrained transformer with adapters: one client and a hundred."""
    less = {"rounds": 2} if quick else {}
    kinds = ((1, 1, "memory"), (100, 10, "memory"), (100, 100, "memory"), (100, 100, "files"))
    return {"runs": [_probe("texts", clients=n, sampled=S, states=at, **less) for n, S, at in kinds]}


def sweep(quick: bool) -> Found:
    """Measure sixteen runs in one call, with the bare loop before and after."""
    bare = next(system for system in SYSTEMS if system.name == "bare")
    rounds = 5 if quick else 1000
    with Worker(bare.command("digits", "adam")) as worker:
        before = worker.go(20).seconds
        found: Found = _probe("sweep", rounds=rounds)
        found["bare_seconds"] = before + worker.go(20).seconds
    return found


def available_gb() -> float:
    """Return the memory that is free or can be freed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) / 2**20


EXTRAS: dict[str, Callable[[bool], Found]] = {
    f.__name__: f for f in (speed, start, scale, memory, texts, sweep)
}


def measure(name: str, quick: bool) -> Found:
    """Run one measurement, and add the cores that other processes used; on failure, return the reason."""
    say(f"extra: {name}")
    busy, own, began = busy_seconds(), _children(), time.monotonic()
    try:
        found = EXTRAS[name](quick)
    except WorkerError as error:
        say(f"  not measured: {error}")
        return {"not_measured": str(error)}
    others = busy_seconds() - busy - (_children() - own)
    return {**found, "others": max(0.0, others) / (time.monotonic() - began)}


def _children() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
