"""Measurements other than rounds: the machine, starting, memory, many runs, Ray, small models."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from environments import FIRST_STEP, ROOT, say
from fadamgc.data.sources import VARIABLE, data_root
from systems import (
    SYSTEMS,
    System,
    Turn,
    Worker,
    WorkerError,
    busy_seconds,
    end_group,
    environment_variables,
    run_probe,
    take_turn,
)
from workloads import WORKLOADS

Found = dict[str, Any]
Command = tuple[list[str], dict[str, str]]  # and environment variables
STATES_GB = 16  # free memory that the clients' states of ResNet-18 need
COMMAND_TIMEOUT = 600.0
MILLION_IN_MEMORY = 100  # rounds with states in memory; later rounds need more memory than many machines have


def _probe(name: str, variables: dict[str, str] | None = None, **keywords: Any) -> Any:
    return run_probe([name, json.dumps(keywords)], variables)


def speed(quick: bool) -> Found:
    """Measure the machine's matrix product, and count the operations of a training step."""
    del quick
    return {"sgemm_gflops": _probe("sgemm"), "step_flops": _probe("flops")}


def start(quick: bool) -> Found:
    """Measure the import, and the first round of digits with a cold and with a warm compile cache."""
    found: Found = {"imports": [_probe("imports") for _ in range(2 if quick else 5)]}
    command = _system("ours_fadamgc").command("digits", "adam", "--warmup=1")
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
    bare = _system("bare")
    rounds = 5 if quick else 1000
    with Worker(bare.command("digits", "adam")) as worker:
        before = worker.go(20).seconds
        found: Found = _probe("sweep", rounds=rounds)
        found["bare_seconds"] = before + worker.go(20).seconds
    return found


def interleaved(commands: Mapping[str, Command], rounds: int, repeats: int) -> dict[str, Found]:
    """Start workers, let them run rounds in turns whose order changes, and return the turns of each."""
    with ExitStack() as stack:
        workers = {}
        for name, command in commands.items():
            say(f"  starting {name}")
            workers[name] = stack.enter_context(Worker(*command))
        turns: dict[str, list[Turn]] = {name: [] for name in workers}
        for repeat in range(repeats):
            for name in _rotated(list(workers), repeat):
                say(f"  repeat {repeat + 1} of {repeats}, {name}")
                turns[name] += take_turn(workers[name], rounds)
        return {
            name: {
                "turns": [turn.as_json() for turn in turns[name]],
                **{key: value for key, value in worker.ready.items() if key in ("executor", "threads")},
            }
            for name, worker in workers.items()
        }


def _rotated(names: list[str], repeat: int) -> list[str]:
    shift = repeat % len(names)
    return names[shift:] + names[:shift]


def _others(systems: Mapping[str, Found]) -> float:
    """Return the largest number of cores that other processes used in a turn that counts."""
    return max(turn["others"] for one in systems.values() for turn in one["turns"] if turn["counts"])


def _system(name: str) -> System:
    return next(system for system in SYSTEMS if system.name == name)


def ray_rounds(quick: bool) -> Found:
    """Measure rounds on two Ray actors of one thread next to those on two threads, and the bytes moved."""
    found: Found = {"workloads": {}}
    for name, repeats in (("digits", 2),) if quick else (("cnn", 7), ("resnet18", 4)):
        workload = WORKLOADS[name]
        commands: dict[str, Command] = {
            which: (_system(which).command(name, "adam"), {})
            for which in ("ours_fadamgc", "ours_fadamgc_ray")
        }
        systems = interleaved(commands, workload.turn, repeats)
        model = workload.make_model(0)
        found["workloads"][name] = {
            "systems": systems,
            "sampled": workload.sampled,
            "nodes": 1,
            "parameters": sum(p.numel() for p in model.parameters() if p.requires_grad),
        }
    found["others"] = max(_others(one["systems"]) for one in found["workloads"].values())
    return found


def ray_sweep(quick: bool) -> Found:
    """Measure sixteen runs on two Ray workers and on the process pool; each sweep has new processes.

    The first sweep of each does not count: it compiles.
    """
    rounds, repeats = (5, 1) if quick else (500, 3)
    kinds = {"pool": System("pool", "", "workers.sweep", arguments=(f"--rounds={rounds}",))}
    arguments = (f"--rounds={rounds}", "--ray")
    kinds["ray"] = System("ray", "", "workers.sweep", arguments=arguments, isolated=True)
    found: Found = {"rounds": rounds, "systems": {name: {"turns": [], "start": []} for name in kinds}}
    for repeat in range(repeats + 1):
        for name in _rotated(list(kinds), repeat):
            say(f"  sweep {repeat} of {repeats}, {name}")
            with Worker(kinds[name].command("digits", "adam")) as worker:
                turn = worker.go(1)
                turn.counts = repeat > 0
                found["systems"][name]["turns"].append(turn.as_json())
                found["systems"][name]["start"].append(worker.ready["start_seconds"])
                found |= {key: worker.ready[key] for key in ("runs", "workers")}
    return {**found, "others": _others(found["systems"])}


def million(quick: bool, rounds: int | None = None) -> Found:
    """Measure a million clients that are made on demand, with states in files and in memory."""
    rounds = rounds or (20 if quick else 300)
    found: Found = {"runs": []}
    for states in ("files", "memory"):
        here = rounds if states == "files" else min(rounds, MILLION_IN_MEMORY)
        say(f"  {here} rounds, states in {states}")
        found["runs"].append(_probe("million", rounds=here, states=states))
    return found


def many(quick: bool) -> Found:
    """Measure many short runs in one call: how memory and time grow with their number."""
    return {"runs": [_probe("many", runs=runs) for runs in ((100, 200) if quick else (100, 1000))]}


def commands(quick: bool) -> Found:
    """Measure the CPU seconds of commands and imports, and the seconds until a study trains."""
    script = Path(sys.executable).with_name("fadamgc")
    program = [str(script)] if script.exists() else [sys.executable, "-m", "fadamgc"]
    used = "import fadamgc; fadamgc.simulate, fadamgc.Task, fadamgc.FAdamGC"
    measured = {
        "fadamgc --help": [*program, "--help"],
        "fadamgc list": [*program, "list"],
        "import torch": [sys.executable, "-c", "import torch"],
        "import fadamgc": [sys.executable, "-c", "import fadamgc"],
        "import fadamgc; fadamgc.simulate": [sys.executable, "-c", used],
    }
    cpu: dict[str, list[float]] = {name: [] for name in measured}
    for repeat in range(3 if quick else 8):
        for name in _rotated(list(measured), repeat):
            seconds = _cpu_of(measured[name])
            if repeat:  # before, files may not be in the memory of the machine
                cpu[name].append(seconds)
    return {"cpu": cpu, "first_step": _first_step(program, 1 if quick else 3)}


def _cpu_of(command: list[str]) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=ROOT, env=environment_variables(), **quiet)
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise WorkerError(f"{Path(command[0]).name} {' '.join(command[1:])} failed")
    return usage.ru_utime + usage.ru_stime


def _first_step(program: list[str], repeats: int) -> Found:
    """Measure the seconds from a command to the beginning and the end of the first round, caches filled."""
    if not (data_root() / "cifar10").is_dir():
        return {"not_measured": f"the data root has no cifar10; set {VARIABLE}"}
    study = ["reproduce", "main-cifar10", "--no-tune", "--rounds=1", "--seeds=1", "--workers=1"]
    hook = ROOT / "benchmarks" / "workers" / "first_step.py"
    found: Found = {"command": f"fadamgc {' '.join(study)}", "begin": [], "end": []}
    for repeat in range(repeats + 1):
        with tempfile.TemporaryDirectory() as folder:
            command = [*program, "--import", str(hook), *study, "--out", f"{folder}/out"]
            began = time.monotonic()
            times = Path(folder) / "times.json"
            with _process(command, {**environment_variables(), FIRST_STEP: str(times)}) as process:
                process.wait(COMMAND_TIMEOUT)
            if not times.exists():
                return {"not_measured": "the command ended before its first round"}
            moments = json.loads(times.read_text())
        if repeat:  # the first time fills the caches
            for name in ("begin", "end"):
                found[name].append(moments[name] - began)
    return found


@contextmanager
def _process(
    command: list[str], variables: Mapping[str, str], folder: Path = ROOT
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a process without output; at the end of the block, it and its children are stopped."""
    quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    process = subprocess.Popen(command, cwd=folder, env=variables, start_new_session=True, **quiet)
    try:
        yield process
    except subprocess.TimeoutExpired:
        raise WorkerError(f"{Path(command[0]).name} did not end in time") from None
    finally:
        end_group(process)


def short_run(quick: bool) -> Found:
    """Measure a short run of a small network in the loop and in auto, without and with compiled code."""
    less = {"rounds": 20} if quick else {}
    found: Found = {name: [] for name in ("loop", "auto, empty code cache", "auto, filled code cache")}
    for _ in range(1 if quick else 5):
        with tempfile.TemporaryDirectory() as cache:
            folders = {"FADAMGC_CACHE": f"{cache}/ours", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/torch"}
            for name, runs in found.items():
                runs.append(_probe("short_run", folders, executor=name.partition(",")[0], **less))
    return {"runs": found}


def small_cnn(quick: bool) -> Found:
    """Measure the network of the studies at laptop scale: this package's executors and bare loops."""
    workload = WORKLOADS["convnet"]
    rounds, repeats = (1, 2) if quick else (workload.turn, 9)
    found: Found = {"sampled": workload.sampled, "steps": workload.steps, "batch": workload.batch}
    found |= {"parameters": sum(p.numel() for p in workload.make_model(0).parameters()), "algorithms": {}}
    for algorithm, optimizer in (("fedavg", "sgd"), ("fadamgc", "adam")):
        systems: dict[str, Command] = {}
        for threads in (1, 2):
            bare = System("", "", "workers.bare", arguments=(f"--threads={threads}",))
            name = f"bare loop, {threads} thread" + "s" * (threads > 1)
            systems[name] = bare.command(workload.name, optimizer), {}
        for executor in ("threads", "auto", "vectorized"):
            arguments = (f"--algorithm={algorithm}", f"--executor={executor}")
            ours = System("", "", "workers.ours", arguments=arguments)
            systems[executor] = ours.command(workload.name, optimizer), {"OMP_NUM_THREADS": "2"}
        found["algorithms"][algorithm] = interleaved(systems, rounds, repeats)
    return {**found, "others": max(map(_others, found["algorithms"].values()))}


def demo(quick: bool) -> Found:
    """Measure a new clone, without caches: installing, and ``make demo`` until its table."""
    del quick
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "clone"
        variables = {name: value for name, value in os.environ.items() if not name.startswith("FADAMGC")}
        variables.pop("PYTHONPATH", None)
        variables |= {"FADAMGC_CACHE": f"{parent}/cache", "PIP_NO_CACHE_DIR": "1"}
        make = ["make", f"PYTHON={Path(sys.base_prefix) / 'bin' / 'python3'}"]
        began, found = time.monotonic(), {}
        stages = {
            "clone_seconds": ["git", "clone", "--quiet", "--depth=1", ROOT.as_uri(), str(folder)],
            "install_seconds": [*make, ".venv/.base"],
            "demo_seconds": [*make, "demo"],
        }
        for name, command in stages.items():
            since = time.monotonic()
            with _process(command, variables, folder if folder.exists() else ROOT) as process:
                if process.wait(3 * COMMAND_TIMEOUT):
                    raise WorkerError(f"{' '.join([command[0], command[-1]])} failed")
            found[name] = time.monotonic() - since
        return {**found, "total_seconds": time.monotonic() - began}


def available_gb() -> float:
    """Return the memory that is free or can be freed."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) / 2**20


EXTRAS: dict[str, Callable[..., Found]] = {
    f.__name__: f
    for f in (
        *(speed, start, scale, memory, texts, sweep),
        *(ray_rounds, ray_sweep, million, many, commands, short_run, small_cnn, demo),
    )
}
OPTIONAL = ("demo",)  # measured only if they are named: it installs packages


def measure(name: str, quick: bool, rounds: int | None = None) -> Found:
    """Run one measurement, and add the cores that other processes used; on failure, return the reason.

    A measurement whose processes have children that nobody waits for counts the cores itself, in its turns.
    """
    say(f"extra: {name}")
    busy, own, began = busy_seconds(), _children(), time.monotonic()
    try:
        found = EXTRAS[name](quick, **({"rounds": rounds} if name == "million" else {}))
    except WorkerError as error:
        say(f"  not measured: {error}")
        return {"not_measured": str(error)}
    others = busy_seconds() - busy - (_children() - own)
    return {"others": max(0.0, others) / (time.monotonic() - began), **found}


def _children() -> float:
    """Return the CPU seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime
