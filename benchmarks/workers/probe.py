"""Measurements that need a new process; each prints one line of JSON."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any


def imports() -> dict[str, float]:
    """Measure the seconds to import torch, and then this package."""
    began = time.perf_counter()
    import torch  # noqa: F401

    torch_done = time.perf_counter()
    import fadamgc  # noqa: F401

    done = time.perf_counter()
    return {"torch": torch_done - began, "fadamgc_after_torch": done - torch_done, "both": done - began}


def sgemm(side: int = 2048, repeats: int = 15) -> dict[str, float]:
    """Measure the billions of operations per second of torch.mm in float32, for 1 and 2 threads."""
    import torch

    a, b = torch.randn(side, side), torch.randn(side, side)
    found = {}
    for threads in (1, 2):
        torch.set_num_threads(threads)
        seconds = []
        for _ in range(repeats):
            began = time.perf_counter()
            torch.mm(a, b)
            seconds.append(time.perf_counter() - began)
        found[str(threads)] = 2 * side**3 / median(seconds) / 1e9
    return found


def flops() -> dict[str, int]:
    """Count the operations of one training step, forward and backward, of each workload."""
    import torch
    from torch.nn.functional import cross_entropy
    from torch.utils.flop_counter import FlopCounterMode

    from workloads import WORKLOADS

    found = {}
    for workload in WORKLOADS.values():
        module = workload.make_model(0).train()
        inputs = workload.data()[0][0][: workload.batch]
        targets = torch.zeros(workload.batch, dtype=torch.long)
        with FlopCounterMode(display=False) as counter:
            cross_entropy(module(inputs), targets).backward()
        found[workload.name] = counter.get_total_flops()
    return found


def scale(
    clients: int, rounds: int = 6, sampled: int = 1000, steps: int = 5, batch: int = 16
) -> dict[str, Any]:
    """Measure time and memory per round of FAdamGC with very many clients, on a model of the digits' size."""
    import torch
    from torch.nn.functional import cross_entropy

    import fadamgc
    from fadamgc.models import mlp
    from systems import status

    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(clients, batch, 64, generator=random)
    targets = torch.randint(10, (clients, batch), generator=random)
    task = fadamgc.Task(mlp(64, [64], 10, seed=0), cross_entropy, list(zip(inputs, targets, strict=True)))
    took_part: set[int] = set()
    found: dict[str, Any] = {"clients": clients, "sampled": sampled, "steps": steps, "batch": batch}
    found |= {"rss_before": status()["VmRSS"], "rss": [], "participants": [], "seconds": []}

    def note(end: fadamgc.RoundEnd) -> None:
        took_part.update(end.record.sampled)
        found["rss"].append(status()["VmRSS"])
        found["participants"].append(len(took_part))
        found["seconds"].append(end.record.wall_seconds)

    fadamgc.simulate(
        fadamgc.FAdamGC(),
        task,
        rounds=rounds,
        sampled=sampled,
        local_steps=steps,
        batch_size=batch,
        progress=False,
        callbacks=[note],
    )
    return found


def texts(
    clients: int, sampled: int, states: str, rounds: int = 20, texts: int = 1600, steps: int = 10
) -> dict[str, Any]:
    """Measure the memory of FAdamGC on MiniLM with LoRA, for the same texts at one client or at many.

    Clients take turns, so that all of them take part. The clients of a round share ``steps`` local steps, at
    least one each.
    """
    import dataclasses

    from torch.nn.functional import cross_entropy

    import fadamgc
    from systems import status
    from workloads import WORKLOADS

    workload = WORKLOADS["minilm"]
    whole = dataclasses.replace(workload, clients=1, steps=texts // workload.batch)
    parts = [part[0].chunk(clients) for part in whole.data()]
    assert workload.make_own is not None
    task = fadamgc.Task(workload.make_own(0), cross_entropy, list(zip(*parts, strict=True)))
    turns = [[(t * sampled + i) % clients for i in range(sampled)] for t in range(rounds)]
    before = status()["VmRSS"]
    fadamgc.simulate(
        *(fadamgc.FAdamGC(), task),
        rounds=rounds,
        schedule=[(turn, turn) for turn in turns],
        local_steps=max(1, steps // sampled),
        batch_size=workload.batch,
        executor="threads",
        states=states,
        progress=False,
    )
    peak = status()["VmHWM"]
    facts = {"clients": clients, "texts": texts, "sampled": sampled, "states": states}
    return {**facts, "rss_before": before, "peak_rss": peak}


def memory(states: str, clients: int = 100, again: int = 2) -> dict[str, Any]:
    """Measure FAdamGC on ResNet-18 until every client has taken part, and for ``again`` more rounds."""
    import dataclasses

    from torch.nn.functional import cross_entropy

    import fadamgc
    from systems import status
    from workloads import WORKLOADS

    workload = dataclasses.replace(WORKLOADS["resnet18"], clients=clients)
    task = fadamgc.Task(workload.make_model(0), cross_entropy, list(zip(*workload.data(), strict=True)))
    S = workload.sampled
    groups = [list(range(first, first + S)) for first in range(0, clients, S)]
    schedule = [(group, group) for group in (*groups, *groups[:again])]
    seconds: list[float] = []
    rss: list[dict[str, int]] = []

    def note(end: fadamgc.RoundEnd) -> None:
        seconds.append(end.record.wall_seconds)
        rss.append({name: status()[name] for name in ("VmRSS", "RssAnon", "RssFile", "RssShmem")})

    before = status()["VmRSS"]
    fadamgc.simulate(
        fadamgc.FAdamGC(),
        task,
        local_steps=workload.steps,
        batch_size=workload.batch,
        schedule=schedule,
        progress=False,
        callbacks=[note],
        states=states,
    )
    parameters = sum(p.numel() for p in task.model.parameters())
    return {
        "states": states,
        "clients": clients,
        "parameters": parameters,
        "rss_before": before,
        "rss": rss,
        "peak_rss": status()["VmHWM"],
        "seconds": seconds,
    }


def steps(rounds: int = 500) -> dict[str, float]:
    """Measure the milliseconds of a round of FAdamGC on digits, and of the compiled steps in it."""
    import fadamgc
    from fadamgc.sim.executors.machine_code import NativeCode
    from workers.ours import FOREVER, make_task
    from workloads import WORKLOADS

    workload = WORKLOADS["digits"]
    inside: list[float] = []
    original = NativeCode.repeat

    def timed(self: NativeCode, *arguments: Any, **named: Any) -> None:
        began = time.perf_counter()
        original(self, *arguments, **named)
        inside.append(time.perf_counter() - began)

    NativeCode.repeat = timed  # type: ignore[method-assign]
    run = fadamgc.simulate(
        fadamgc.FAdamGC(),
        make_task(workload),
        rounds=rounds,
        sampled=workload.sampled,
        local_steps=workload.steps,
        batch_size=workload.batch,
        eval_every=FOREVER,
        executor="vectorized",
        progress=False,
    )
    whole = [record.wall_seconds for record in run.history[rounds // 5 :]]
    return {"round_ms": 1e3 * median(whole), "compiled_steps_ms": 1e3 * median(inside[rounds // 5 :])}


def rules(repeats: int = 30) -> dict[str, Any]:
    """Measure the milliseconds of an algorithm's rules in one step, compiled, on two threads at once."""
    import torch

    import fadamgc
    from fadamgc.algorithm import example
    from fadamgc.runtime import single_threads
    from fadamgc.sim.executors.inplace import Rules, Workspace
    from workers.ours import ALGORITHMS
    from workloads import WORKLOADS

    found: dict[str, Any] = {}
    for name in ("cnn", "resnet18"):
        x = torch.nn.utils.parameters_to_vector(WORKLOADS[name].make_model(0).parameters()).detach()
        for algorithm in ALGORITHMS:
            algo = fadamgc.make_algorithm(algorithm)
            code, kinds = Rules(algo, True), example(algo, x)

            def work(code: Rules = code, kinds: Any = kinds, x: torch.Tensor = x) -> float:
                own, g = x.clone(), torch.randn_like(x)
                local = code.begin(kinds.down, kinds.client, None, own, Workspace())
                seconds = []
                for _ in range(repeats):
                    began = time.perf_counter()
                    code.step(kinds.down, kinds.client, own, local, g)
                    seconds.append(time.perf_counter() - began)
                return median(seconds)

            work()
            pool = single_threads(2)
            pair = [pool.submit(work) for _ in range(2)]
            found[f"{name} {algorithm} ms"] = 1e3 * max(future.result() for future in pair)
            pool.shutdown()
    return found


def sweep(rounds: int) -> dict[str, Any]:
    """Measure runs of FAdamGC on digits, seeds times step sizes, in one call; the first of two compiles."""
    from workers.ours import make_task
    from workers.sweep import WORKERS, grid, run_all
    from workloads import WORKLOADS

    task, runs, seconds = make_task(WORKLOADS["digits"]), grid(), []
    for _ in range(2):
        began = time.perf_counter()
        run_all(runs, task, WORKERS, rounds)
        seconds.append(time.perf_counter() - began)
    return {"runs": len(runs), "rounds": rounds, "workers": WORKERS, "seconds": seconds}


def million(
    rounds: int,
    states: str,
    clients: int = 1_000_000,
    sampled: int = 1000,
    steps: int = 5,
    batch: int = 16,
    windows: int = 10,
) -> dict[str, Any]:
    """Measure FAdamGC on clients that are made on demand, with a checkpoint after every round.

    The rounds are summed up in windows of equal length, because a run may have many of them.
    """
    import tempfile

    import torch
    from torch.nn.functional import cross_entropy

    import fadamgc
    from fadamgc.models import mlp
    from systems import status
    from workers.protocol import age

    def make(client: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(client)
        inputs = torch.randn(batch, 64, generator=random)
        return inputs, torch.randint(10, (batch,), generator=random)

    model = mlp(64, [64], 10, seed=0)
    began = time.perf_counter()
    task = fadamgc.Task(model, cross_entropy, fadamgc.LazyClients(clients, make, batch))
    built = time.perf_counter() - began
    facts = {"clients": clients, "sampled": sampled, "steps": steps, "batch": batch, "states": states}
    found: dict[str, Any] = {**facts, "rounds": rounds, "task_seconds": built, "windows": []}
    ends = [rounds * (i + 1) // windows for i in range(windows)]
    took_part: set[int] = set()
    seconds: list[float] = []
    computing: list[float] = []
    before = time.perf_counter()
    written = _written()

    def note(end: fadamgc.RoundEnd) -> None:
        nonlocal before, written
        t, now = end.record.round, time.perf_counter()
        found.setdefault("first_round_seconds", age())
        took_part.update(end.record.sampled)
        seconds.append(now - before)
        computing.append(end.record.wall_seconds)
        if t in ends:
            total = _written()
            window = {"last_round": t, "seconds": median(seconds), "computing": median(computing)}
            window |= {"written": (total - written) / len(seconds), "rss_anon": status()["RssAnon"]}
            found["windows"].append({**window, "participants": len(took_part)})
            written = total
            seconds.clear()
            computing.clear()
        before = time.perf_counter()

    with tempfile.TemporaryDirectory() as folder:
        fadamgc.simulate(
            fadamgc.FAdamGC(),
            task,
            rounds=rounds,
            sampled=sampled,
            local_steps=steps,
            batch_size=batch,
            states=states,
            checkpoint=folder,
            progress=False,
            callbacks=[note],
        )
    parameters = sum(p.numel() for p in model.parameters())
    return {**found, "parameters": parameters, "peak_rss": status()["VmHWM"]}


def _written() -> int:
    """Return the bytes that this process has passed to system calls that write."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return int(next(line for line in lines if line.startswith("wchar")).split()[1])


def many(runs: int, rounds: int = 5) -> dict[str, Any]:
    """Measure the time and the peak memory of many short runs of FAdamGC on digits in one call."""
    import fadamgc
    from systems import status
    from workers.ours import FOREVER, make_task
    from workloads import WORKLOADS

    workload = WORKLOADS["digits"]
    task = make_task(workload)
    before, began = status()["VmRSS"], time.perf_counter()
    finished = fadamgc.simulate_many(
        [{"seed": seed} for seed in range(runs)],
        algorithm=fadamgc.FAdamGC(),
        task=task,
        progress=False,
        rounds=rounds,
        sampled=workload.sampled,
        local_steps=workload.steps,
        batch_size=workload.batch,
        eval_every=FOREVER,
    )
    seconds = time.perf_counter() - began
    if any(len(run.history) != rounds for run in finished):
        raise SystemExit("simulate_many did not run all rounds of all runs")
    memory = {"rss_before": before, "peak_rss": status()["VmHWM"]}
    return {"runs": runs, "rounds": rounds, "seconds": seconds, **memory}


def short_run(executor: str, rounds: int = 250, steps: int = 5, sampled: int = 10) -> dict[str, Any]:
    """Measure wall and CPU seconds of a short run of FAdamGC on a network of a thousand parameters."""
    import os

    import torch
    from torch.nn.functional import cross_entropy

    import fadamgc
    from fadamgc.models import mlp

    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(20, 16, 20, generator=random)
    targets = torch.randint(10, (20, 16), generator=random)
    model = mlp(20, [32], 10, seed=0)
    task = fadamgc.Task(model, cross_entropy, list(zip(inputs, targets, strict=True)))
    algorithm = fadamgc.FAdamGC()
    began, cpu = time.perf_counter(), sum(os.times()[:4])
    run = fadamgc.simulate(
        algorithm,
        task,
        rounds=rounds,
        sampled=sampled,
        local_steps=steps,
        batch_size=16,
        eval_every=rounds,
        executor=executor,
        progress=False,
    )
    seconds, cpu = time.perf_counter() - began, sum(os.times()[:4]) - cpu
    found = {"seconds": seconds, "cpu": cpu, "executor": run.settings["executor"]}
    facts = {"rounds": rounds, "steps": steps, "sampled": sampled}
    parameters = sum(p.numel() for p in model.parameters())
    return {**found, **facts, "parameters": parameters, "compiled": run.settings["compiled"]}


def machine() -> dict[str, Any]:
    """Describe the machine."""
    import os
    import platform

    import torch

    cpu = Path("/proc/cpuinfo").read_text().splitlines()
    total = Path("/proc/meminfo").read_text().splitlines()[0].split()[1]
    return {
        "cpu": next((line.partition(":")[2].strip() for line in cpu if line.startswith("model name")), "?"),
        "cores": os.cpu_count(),
        "memory_gb": round(int(total) / 2**20, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torch_threads": torch.get_num_threads(),
        "simd": torch.backends.cpu.get_cpu_capability(),
    }


PROBES: dict[str, Callable[..., Any]] = {
    f.__name__: f
    for f in (
        *(imports, sgemm, flops, scale, memory, texts, steps, rules, sweep),
        *(million, many, short_run, machine),
    )
}

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))  # also if the file is run by its path
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("probe", choices=list(PROBES))
    arguments.add_argument("keywords", nargs="?", default="{}", help="arguments of the probe, as JSON")
    options = arguments.parse_args()
    print(json.dumps(PROBES[options.probe](**json.loads(options.keywords))))
