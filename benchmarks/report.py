"""Write the table and the chart from saved results, without measuring.

python benchmarks/report.py results/benchmarks/results.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, median
from typing import Any, NamedTuple

Results = dict[str, Any]
GB, MB, KB = 2**30, 2**20, 2**10


class Line(NamedTuple):
    """The numbers of one system in one group."""

    label: str
    name: str
    seconds: float  # per round: median over repeats
    low: float
    high: float
    ratio: float  # how many times as fast as the bare loop: median over repeats
    ratio_low: float
    ratio_high: float
    start: float  # seconds from the start of the process to the end of its first round
    peak: int  # bytes
    idle: float  # cores used while other systems had their turn
    version: str


class Missing(NamedTuple):
    """A system that was not measured."""

    label: str
    name: str
    reason: str


def per_repeat(system: Results) -> list[float]:
    """Return the seconds per round of each repeat."""
    return [mean(turn["seconds"]) for turn in system["turns"] if turn["counts"]]


def ratios(system: Results, yardstick: Results) -> list[float]:
    """Return how many times as fast as the yardstick a system is, for each repeat."""
    pairs = zip(per_repeat(yardstick), per_repeat(system), strict=True)
    return [reference / seconds for reference, seconds in pairs]


def lines(group: Results) -> Iterator[Line | Missing]:
    """Yield the rows of a group's table."""
    bare = next((s for s in group["systems"] if s["name"] == "bare" and "turns" in s), None)
    for system in group["systems"]:
        if system["name"] == "ours_fedavg" and group["optimizer"] != "sgd":
            continue  # only for _correction: SGD is not comparable with the bare loop's Adam
        if "turns" not in system:
            yield Missing(system["label"], system["name"], system["not_measured"])
            continue
        seconds = per_repeat(system)
        ratio = [float("nan")] if bare is None else ratios(system, bare)
        versions = {k: v for k, v in system["versions"].items() if k not in ("torch", "python")}
        yield Line(
            label=system["label"],
            name=system["name"],
            seconds=median(seconds),
            low=min(seconds),
            high=max(seconds),
            ratio=median(ratio),
            ratio_low=min(ratio),
            ratio_high=max(ratio),
            start=system["start_seconds"],
            peak=system["peak_rss"],
            idle=system["idle_cpu"],
            version=", ".join(f"{k} {v}" for k, v in versions.items()),
        )


def table(results: Results) -> str:
    """Return all measurements in Markdown."""
    machine, settings = results["machine"], results["settings"]
    parts = [
        f"{_machine(machine)}; {results['date']}; {settings['repeats']} interleaved repeats; "
        "median (minimum to maximum)."
    ]
    parts += [_group_table(group, results) for group in results["groups"]]
    parts += [text for text in (_correction(results), *_extras(results)) if text]
    return "\n\n".join(parts) + "\n"


def summary(results: Results) -> str:
    """Return the speeds alone, for the README: one row per group, one column per system."""
    columns = {
        "ours_fedavg": "fadamgc: FedAvg",
        "ours_local_adam": "LocalAdam",
        "ours_fadamgc": "FAdamGC",
        "gradients": "gradients alone",
        "pfl": "pfl",
        "pfl_fused": "pfl, fused",
        "pfl_2_processes": "pfl, fused, 2 processes",
        "flower": "Flower",
    }
    rows = []
    for group in results["groups"]:
        by_name = {line.name: line for line in lines(group)}
        cells = [_speed_of(by_name.get(name)) for name in columns]
        bare = by_name["bare"]
        seconds = _s(bare.seconds) if isinstance(bare, Line) else ""
        rows.append([f"{group['workload']['name']}, {group['optimizer']}", seconds, *cells])
    kept = [i for i in range(len(columns) + 2) if i < 2 or any(row[i] for row in rows)]
    head = ["Workload", "bare loop, s per round", *columns.values()]
    machine, settings = results["machine"], results["settings"]
    repeats = sorted({group.get("repeats", settings["repeats"]) for group in results["groups"]})
    note = (
        f"Rounds per second, relative to a bare PyTorch loop (1.00); higher is faster. Medians of "
        f"{' or '.join(map(str, repeats))} interleaved repeats on {machine['cores']} cores "
        f"({machine['cpu']}, {machine['simd']}), torch {machine['torch']}."
    )
    return f"{note}\n\n{markdown([head[i] for i in kept], [[row[i] for i in kept] for row in rows])}\n"


def _speed_of(line: Line | Missing | None) -> str:
    if line is None:
        return ""
    return f"{line.ratio:.2f}" if isinstance(line, Line) else "not measured"


def _group_table(group: Results, results: Results) -> str:
    w = group["workload"]
    title = (
        f"**{w['name']}, local {group['optimizer']}** ({w['parameters']:,} parameters, S={w['sampled']}, "
        f"K={w['steps']}, batch {w['batch']})"
    )
    rows = []
    for line in lines(group):
        if isinstance(line, Missing):
            rows.append([line.label, f"not measured: {line.reason}", "", "", "", ""])
            continue
        rows.append(
            [
                line.label + (f" ({line.version})" if line.version else ""),
                f"{_s(line.seconds)} ({_s(line.low)} to {_s(line.high)})",
                f"{line.ratio:.2f} ({line.ratio_low:.2f} to {line.ratio_high:.2f})",
                f"{line.start:.1f}",
                f"{line.peak / GB:.2f}",
                _share(group, line, results),
            ]
        )
    head = ["System", "Seconds per round", "Speed, bare loop = 1", "Start, s", "Peak GB", "Share of sgemm"]
    turns = [turn for system in group["systems"] for turn in system.get("turns", ())]
    counted = [turn for turn in turns if turn["counts"]]
    limit = results["settings"]["disturbed"]
    disturbed = sum(turn["others"] > limit for turn in counted)
    idle = max((line.idle for line in lines(group) if isinstance(line, Line)), default=0.0)
    note = (
        f"{len(turns) - len(counted)} turns were repeated because other processes used more than {limit} "
        f"of a core; {disturbed} of the {len(counted)} turns that count were disturbed nevertheless. "
        f"A waiting worker uses at most {idle:.2f} of a core."
    )
    return f"{title}\n\n{markdown(head, rows)}\n\n{note}{_origin(group, results)}"


def _share(group: Results, line: Line, results: Results) -> str:
    """Return the operations per second of local training, as a share of sgemm on 2 threads."""
    speed = results["extras"].get("speed", {})
    w = group["workload"]
    if "sgemm_gflops" not in speed:
        return ""
    gflops = speed["step_flops"][w["name"]] * w["sampled"] * w["steps"] / line.seconds / 1e9
    return f"{gflops / speed['sgemm_gflops']['2']:.0%}"


def _correction(results: Results) -> str:
    """Return the speed of FAdamGC relative to FedAvg and to LocalAdam in this simulator."""
    rows = []
    for group in results["groups"]:
        systems = {s["name"]: s for s in group["systems"] if "turns" in s}
        if "ours_fadamgc" not in systems:
            continue
        against = [systems.get(name) for name in ("ours_fedavg", "ours_local_adam")]
        cells = ["" if s is None else f"{median(ratios(systems['ours_fadamgc'], s)):.2f}" for s in against]
        rows.append([group["workload"]["name"], *cells])
    if not rows:
        return ""
    head = ["FAdamGC's speed", "FedAvg = 1", "LocalAdam = 1"]
    return f"**The cost of the correction, in this simulator**\n\n{markdown(head, rows)}"


def _extras(results: Results) -> Iterator[str]:
    for name, found in results["extras"].items():
        if "not_measured" in found:
            yield f"{name}: not measured: {found['not_measured']}{_origin(found, results)}"
            continue
        text = WRITERS[name](found)
        if found["others"] > results["settings"]["disturbed"]:
            text += f"\n\n(Disturbed: other processes used {found['others']:.2f} cores meanwhile.)"
        yield text + _origin(found, results)


def _origin(part: Results, results: Results) -> str:
    """Return when and how a group or an extra was measured, if that was later than the first of them."""
    if part.get("date", results["date"]) == results["date"]:
        return ""
    repeats = f", {part['repeats']} repeats" if "repeats" in part else ""
    machine = part.get("machine")
    where = "" if machine is None else f" on another machine ({_machine(machine)})"
    return f"\n\n(Measured {part['date']}{where}{repeats}: `{part['command']}`.)"


def _machine(machine: Results) -> str:
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['simd']}, torch {machine['torch']}"


def _speed(found: Results) -> str:
    gemm = found["sgemm_gflops"]
    steps = ", ".join(f"{name} {flops / 1e9:.3g}" for name, flops in found["step_flops"].items())
    return (
        f"sgemm (2048 x 2048): {gemm['1']:.0f} GFLOP/s on 1 thread, {gemm['2']:.0f} on 2. "
        f"GFLOP in one training step: {steps}."
    )


def _start(found: Results) -> str:
    both, torch = (median(one[key] for one in found["imports"]) for key in ("both", "torch"))
    cache = "" if found["compile_cache_used"] else " (nothing was compiled)"
    return (
        f"`import fadamgc`: {both:.2f} s, of which torch {torch:.2f} s. From the start of the process "
        f"to the end of the first round of digits: {found['first_round_cold']:.1f} s with an empty "
        f"compile cache, {found['first_round_warm']:.1f} s with a filled one{cache}."
    )


def _scale(found: Results) -> str:
    rows = []
    for run in found["runs"]:
        per_step = median(run["seconds"][1:]) / (run["sampled"] * run["steps"])
        new = run["participants"][-1] - run["participants"][0]
        growth = f"{(run['rss'][-1] - run['rss'][0]) / new / KB:.1f}" if new else "none after round 1"
        rows.append([f"{run['clients']:,}", f"{per_step * 1e6:.1f}", growth, f"{run['rss'][-1] / GB:.2f}"])
    head = ["Clients", "µs per client step", "KB per new participant", "GB at the end"]
    return f"**Scale: FAdamGC, digits-sized model, S=1,000, K=5, batch 16**\n\n{markdown(head, rows)}"


def _memory(found: Results) -> str:
    rows = []
    for states in ("memory", "files"):
        run = found[states]
        if "not_measured" in run:
            rows.append([states, f"not measured: {run['not_measured']}", "", "", ""])
            continue
        anonymous = max(one["RssAnon"] for one in run["rss"])
        rows.append(
            [
                states,
                f"{run['clients']}",
                f"{run['peak_rss'] / GB:.2f}",
                f"{anonymous / GB:.2f}",
                f"{median(run['seconds'][1:]):.2f}",
            ]
        )
    head = ["Clients' states in", "Clients", "Peak GB", "Peak GB without file pages", "Seconds per round"]
    return f"**Memory: FAdamGC, ResNet-18, every client took part**\n\n{markdown(head, rows)}"


def _texts(found: Results) -> str:
    one = found["runs"][0]["peak_rss"]
    rows = [
        [
            str(run["clients"]),
            str(run["sampled"]),
            run["states"],
            f"{run['rss_before'] / GB:.2f}",
            f"{run['peak_rss'] / GB:.2f}",
            f"{run['peak_rss'] / one:.2f}",
        ]
        for run in found["runs"]
    ]
    head = ["Clients", "per round", "States in", "GB before", "Peak GB", "Peak, one client = 1"]
    texts = found["runs"][0]["texts"]
    return f"**Memory: FAdamGC, MiniLM with LoRA, {texts} texts**\n\n{markdown(head, rows)}"


def _sweep(found: Results) -> str:
    bare = median(found["bare_seconds"])
    each = [seconds / (found["runs"] * found["rounds"]) for seconds in found["seconds"]]
    return (
        f"Sweep: {found['runs']} runs of {found['rounds']} rounds of FAdamGC on digits in one call: "
        f"{each[0] * 1e3:.1f} ms per round of a run ({bare / each[0]:.1f} times the bare loop's speed); "
        f"in a second call, {each[1] * 1e3:.1f} ms ({bare / each[1]:.1f} times)."
    )


def _ray_rounds(found: Results) -> str:
    rows = []
    for name, one in found["workloads"].items():
        threads, ray = (one["systems"][which] for which in ("ours_fadamgc", "ours_fadamgc_ray"))
        ratio = ratios(ray, threads)
        moved, model = traffic(one)
        rows.append(
            [
                name,
                f"{_s(median(per_repeat(threads)))} ({threads['executor']})",
                _s(median(per_repeat(ray))),
                f"{median(ratio):.2f} ({min(ratio):.2f} to {max(ratio):.2f})",
                f"{moved / 1e6:.4g}",
                f"{moved / model:.3f}",
            ]
        )
    head = ["Workload", "Seconds per round, two threads", "Two actors", "Speed, two threads = 1"]
    head += ["MB per round through the object store", "Measured / model of docs/ray.md"]
    return f"**Rounds on Ray: FAdamGC, two actors of one thread on one node**\n\n{markdown(head, rows)}"


def traffic(one: Results) -> tuple[float, float]:
    """Return the bytes of a round of FAdamGC through Ray's object store: measured, and by the model.

    The model counts vectors of d parameters in float32: to an actor three of a client's state, back three of
    the state and two of the message; and two of the server's message per node. A client that takes part for
    the first time has equal vectors, which are sent once, so the round with the most bytes counts.
    """
    turns = [turn for turn in one["systems"]["ours_fadamgc_ray"]["turns"] if turn["counts"]]
    measured = max(sum(turn["moved"].values()) / len(turn["seconds"]) for turn in turns)
    return measured, 4 * one["parameters"] * (one["sampled"] * (3 + 3 + 2) + one["nodes"] * 2)


def ray_check(results: Results) -> str:
    """Return how exact the model of the traffic is, for docs/ray.md; "" if it was not measured."""
    workloads = results["extras"].get("ray_rounds", {}).get("workloads", {})
    shares = [f"{measured / model:.3f} ({name})" for name, (measured, model) in _traffics(workloads)]
    if not shares:
        return ""
    return (
        f"`ray_rounds` of `make bench` has measured {' and '.join(shares)} times the bytes of this model "
        "([all numbers](../results/benchmarks/table.md))."
    )


def _traffics(workloads: Results) -> Iterator[tuple[str, tuple[float, float]]]:
    for name, one in workloads.items():
        yield name, traffic(one)


def _ray_sweep(found: Results) -> str:
    pool, ray = (found["systems"][name] for name in ("pool", "ray"))
    ratio, each = ratios(ray, pool), found["runs"] * found["rounds"]
    seconds = [1e3 * median(per_repeat(one)) / each for one in (pool, ray)]
    start = median(ray["start"]) - median(pool["start"])
    return (
        f"Sweep on Ray: {found['runs']} runs of {found['rounds']} rounds of FAdamGC on digits, "
        f"{found['workers']} workers: {seconds[0]:.2f} ms per round of a run on the process pool, "
        f"{seconds[1]:.2f} ms on Ray, {median(ratio):.2f} ({min(ratio):.2f} to {max(ratio):.2f}) times the "
        f"pool's speed. Not included: starting a Ray cluster on this machine, {start:.1f} s."
    )


def _million(found: Results) -> str:
    rows = []
    for run in found["runs"]:
        first, second, *_, before, last = run["windows"]
        early, late = _growth(first, second), _growth(before, last)
        rows.append(
            [
                run["states"],
                f"{run['rounds']:,}",
                f"{run['task_seconds']:.1f}",
                f"{run['first_round_seconds']:.1f}",
                f"{second['seconds']:.2f}, {last['seconds']:.2f}",
                f"{second['computing']:.2f}, {last['computing']:.2f}",
                f"{second['written'] / MB:.1f}, {last['written'] / MB:.1f}",
                f"{early[0] / MB:.1f}, {late[0] / MB:.1f}",
                f"{early[1] / KB:.1f}, {late[1] / KB:.1f}",
                f"{run['peak_rss'] / GB:.2f}",
            ]
        )
    head = ["Clients' states in", "Rounds", "Task, s", "Start to end of round 1, s"]
    head += ["Seconds per round with a checkpoint", "of these, the round"]
    head += ["MB written per checkpoint", "MB of memory per round", "KB per new participant", "Peak GB"]
    run = found["runs"][0]
    title = (
        f"**{run['clients']:,} clients made on demand: FAdamGC, {run['parameters']:,} parameters, "
        f"S={run['sampled']:,}, K={run['steps']}, batch {run['batch']}, a checkpoint per round** "
        "(two numbers: early and late; memory without file pages)"
    )
    return f"{title}\n\n{markdown(head, rows)}"


def _growth(first: Results, last: Results) -> tuple[float, float]:
    """Return how many bytes of memory a round adds, and a client that takes part for the first time."""
    grown = last["rss_anon"] - first["rss_anon"]
    new = last["participants"] - first["participants"]
    return grown / (last["last_round"] - first["last_round"]), grown / max(1, new)


def _many(found: Results) -> str:
    rows = [
        [
            f"{run['runs']:,}",
            f"{run['seconds']:.1f}",
            f"{1e3 * run['seconds'] / run['runs']:.1f}",
            f"{run['rss_before'] / GB:.2f}",
            f"{run['peak_rss'] / GB:.2f}",
        ]
        for run in found["runs"]
    ]
    head = ["Runs", "Seconds", "ms per run", "GB before", "Peak GB"]
    first, last = found["runs"][0], found["runs"][-1]
    more = (last["peak_rss"] - first["peak_rss"]) / (last["runs"] - first["runs"]) / KB
    note = f"Each further run adds {more:.0f} KB to the peak, for its model and its history."
    title = f"**Many runs in one call: FAdamGC on digits, {first['rounds']} rounds each**"
    return f"{title}\n\n{markdown(head, rows)}\n\n{note}"


def _commands(found: Results) -> str:
    rows = [[f"`{name}`", f"{median(seconds):.2f}"] for name, seconds in found["cpu"].items()]
    first = found["first_step"]
    if "not_measured" in first:
        note = f"First training step of a study: not measured: {first['not_measured']}"
    else:
        note = (
            f"`{first['command']}`, caches filled: training begins {median(first['begin']):.1f} s after the "
            f"command, and the first round ends after {median(first['end']):.1f} s."
        )
    return f"**Commands and imports**\n\n{markdown(['', 'CPU seconds'], rows)}\n\n{note}"


def _short_run(found: Results) -> str:
    rows = []
    for name, runs in found["runs"].items():
        chosen = sorted({run["executor"] + ", compiled" * run["compiled"] for run in runs})
        wall, cpu = (median(run[key] for run in runs) for key in ("seconds", "cpu"))
        rows.append([name, f"{wall:.2f}", f"{cpu:.2f}", " or ".join(chosen)])
    run = next(iter(found["runs"].values()))[0]
    title = (
        f"**A short run: FAdamGC, {run['rounds']} rounds, K={run['steps']}, S={run['sampled']}, "
        f"{run['parameters']:,} parameters; a new process each**"
    )
    return f"{title}\n\n{markdown(['Executor', 'Seconds', 'CPU seconds', 'Used'], rows)}"


def _small_cnn(found: Results) -> str:
    jobs = found["sampled"] * found["steps"]
    parts = []
    for algorithm, systems in found["algorithms"].items():
        names = list(systems)
        bare, threads = systems[names[0]], systems["threads"]
        rows = []
        for name, one in systems.items():
            ms = [1e3 * seconds / jobs for seconds in per_repeat(one)]
            chosen = f" ({one['executor']})" if name == "auto" else ""
            rows.append(
                [
                    f"{algorithm}: {name}{chosen}",
                    f"{median(ms):.3f} ({min(ms):.3f} to {max(ms):.3f})",
                    f"{median(ratios(one, bare)):.2f}",
                    f"{median(ratios(one, threads)):.2f}",
                ]
            )
        head = ["", "ms per client-step", f"Speed, {names[0]} = 1", "Speed, executor threads = 1"]
        parts.append(markdown(head, rows))
    title = (
        f"**A small convolutional network: {found['parameters']:,} parameters, S={found['sampled']}, "
        f"K={found['steps']}, batch {found['batch']}; executors on two threads**"
    )
    return "\n\n".join([title, *parts])


def _demo(found: Results) -> str:
    return (
        f"A new clone, without caches: cloned in {found['clone_seconds']:.1f} s, installed in "
        f"{found['install_seconds']:.0f} s; `make demo` has printed its table {found['total_seconds']:.0f} s "
        "after the start."
    )


WRITERS = {
    "speed": _speed,
    "start": _start,
    "scale": _scale,
    "memory": _memory,
    "texts": _texts,
    "sweep": _sweep,
    "ray_rounds": _ray_rounds,
    "ray_sweep": _ray_sweep,
    "million": _million,
    "many": _many,
    "commands": _commands,
    "short_run": _short_run,
    "small_cnn": _small_cnn,
    "demo": _demo,
}


def _s(seconds: float) -> str:
    return f"{seconds:.4f}" if seconds < 0.1 else f"{seconds:.3g}"


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return a Markdown table with right-aligned numbers."""
    align = [":--", *["--:"] * (len(head) - 1)]
    return "\n".join(f"| {' | '.join(row)} |" for row in (head, align, *rows))


def chart(results: Results, path: Path) -> None:
    """Draw the speed relative to the bare loop, one panel per group, on a logarithmic axis."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    groups = results["groups"]
    if not groups:
        return
    columns = min(2, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6.4 * columns, 3.0 * rows), squeeze=False)
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    for axis, group in zip(axes.flat, groups, strict=False):
        measured = [line for line in lines(group) if isinstance(line, Line)][::-1]
        if not measured:
            continue
        ratio = [line.ratio for line in measured]
        spread = [
            [line.ratio - line.ratio_low for line in measured],
            [line.ratio_high - line.ratio for line in measured],
        ]
        colours = ["#c44e52" if line.name.startswith("ours") else "#8c8c8c" for line in measured]
        axis.barh([line.label for line in measured], ratio, xerr=spread, color=colours, ecolor="#333333")
        axis.axvline(1.0, color="black", linewidth=1)
        axis.set_xscale("log")
        low = min(0.5, *(line.ratio_low for line in measured))
        high = max(2.0, *(line.ratio_high for line in measured))
        axis.set_xlim(low / 1.2, high * 1.4)
        ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50) if low / 1.2 <= t <= high * 1.4]
        axis.set_xticks(ticks, [f"{t:g}" for t in ticks])
        axis.minorticks_off()
        axis.set_title(f"{group['workload']['name']}, local {group['optimizer']}")
        axis.set_xlabel("speed, bare loop = 1")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    for name in sys.argv[1:]:
        saved = json.loads(Path(name).read_text())
        print(table(saved))
        Path(name).with_name("table.md").write_text(table(saved))
        chart(saved, Path(name).with_name("chart.png"))
