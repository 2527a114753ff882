"""Write the generated blocks of README.md and docs/*.md, and the catalogue of ``fadamgc list``.

python docs/tables.py

A block is the text between ``<!-- NAME -->`` and ``<!-- /NAME -->``.
"""

from __future__ import annotations

import csv
import importlib.util
import json
import math
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

import fadamgc
from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.cli.catalogue import FILE, current
from fadamgc.experiments.report.means import Difference
from fadamgc.experiments.report.numbers import read_results
from fadamgc.experiments.report.tables import to_target
from fadamgc.experiments.report.write import read_experiment
from fadamgc.experiments.spec.toml_io import load_spec
from fadamgc.federation.run import Run
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.models import cnn, convnet, mlp, resnet18
from fadamgc.paper import advice_records
from fadamgc.paper import ours as fedkeel
from fadamgc.paper.advice import FILE as ADVICE
from fadamgc.paper.advice import Evidence, Situation, advise
from fadamgc.paper.study import read_members, read_study
from fadamgc.tree import named_leaves
from website import algorithms as algorithm_pages
from website import commands

ROOT = Path(__file__).resolve().parent.parent
SIZE = 1000  # of a model, to tell vectors from single numbers
RAY_VECTORS = 8  # that Ray moves per client with FAdamGC; see docs/ray.md
LINK = 1e10  # bits per second


def sent(algorithm: AnyAlgorithm) -> tuple[list[str], list[str], list[str]]:
    """Return the names of the vectors that one client receives, sends, and sends only if it is tracked."""
    messages = example(algorithm, torch.zeros(SIZE))
    up = named_leaves(messages.up)
    tracked = {name: leaf for name, leaf in up.items() if name.split(".")[0] in algorithm.tracked_only}
    others = {name: leaf for name, leaf in up.items() if name not in tracked}
    return _short(named_leaves(messages.down)), _short(others), _short(tracked)


def _short(message: dict[str, torch.Tensor]) -> list[str]:
    """Return the names of the leaves of a message; a single number is marked as one."""
    names = {name.rpartition(".")[2]: leaf for name, leaf in message.items()}
    return [name if len(leaf) == SIZE else f"{name} (a number)" for name, leaf in names.items()]


def algorithms() -> str:
    """Return the table of all methods, with the names of the vectors that they send."""
    rows = ["| name | class | down | up | also up if tracked |", "|---|---|---|---|---|"]
    for name in fadamgc.algorithms():
        algorithm = fadamgc.make_algorithm(name)
        cells = [f"`{name}`", f"`{type(algorithm).__name__}`", *map(", ".join, sent(algorithm))]
        rows.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(rows)


def traffic() -> str:
    """Return the table of how many vectors travel; methods that send the same share a row."""
    rows: dict[tuple[int, int, int], list[str]] = {}
    for name in fadamgc.algorithms():
        algorithm = fadamgc.make_algorithm(name)
        if isinstance(algorithm, GroupedAlgorithm):
            continue  # Flower has no groups
        down, up, tracked = (sum(not name.endswith(")") for name in names) for names in sent(algorithm))
        rows.setdefault((down, up, up + tracked), []).append(algorithm.title)
    lines = ["| Method | down | up | up, if tracked |", "|---|--:|--:|--:|"]
    lines += [f"| {', '.join(rows[key])} | {' | '.join(map(str, key))} |" for key in sorted(rows)]
    return "\n".join(lines)


def ray_traffic() -> str:
    """Return what rounds on Ray move, by the model of docs/ray.md, and how exact the model is if measured."""
    nets = {
        "perceptron of the digits": mlp(64, [64], 10, seed=0),
        "small network for 16 x 16": convnet(side=16, seed=0),
        "`models.cnn`": cnn(seed=0),
        "`models.resnet18`": resnet18(seed=0),
    }
    head = "| model | parameters | MB per client, FAdamGC | FedAvg | clients per minute, FAdamGC | FedAvg |"
    rows = [f"{head} GB of states of 1,000 clients, FAdamGC |", "|---|--:|--:|--:|--:|--:|--:|"]
    for name, net in nets.items():
        vector = 4 * sum(p.numel() for p in net.parameters())
        moved = [count * vector for count in (RAY_VECTORS, 1)]
        cells = [f"{vector // 4:,}", *(f"{size / 1e6:.3g}" for size in moved)]
        cells += [f"{float(f'{60 * LINK / 8 / size:.3g}'):,.0f}" for size in moved]
        rows.append(f"| {' | '.join([name, *cells, f'{1000 * 3 * vector / 1e9:.3g}'])} |")
    measured = _report().ray_check(_benchmarks())
    return "\n".join([*rows, "", measured or "`ray_rounds` of `make bench` measures these bytes."])


def _report() -> Any:
    return _module("report")


def _module(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, ROOT / "benchmarks" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _benchmarks() -> Any:
    return json.loads((ROOT / "results/benchmarks/results.json").read_text())


def bench() -> str:
    """Return the speeds of the last benchmark."""
    text: str = _report().summary(_benchmarks())
    return text


def results() -> str:
    """Return the table of the saved runs on digits, as ``fadamgc report`` wrote it."""
    return (ROOT / "results" / "digits" / "results.md").read_text()


def exactness() -> str:
    """Return which methods reach the optimum of different quadratics, what clients keep, and what is sent."""
    saved = json.loads((ROOT / "results" / "exactness" / "results.json").read_text())
    n = saved["settings"]["clients"]
    header = [
        "method",
        f"all {n} clients",
        "4 clients per round",
        "kept per client",
        "down",
        "up",
        "if tracked",
    ]
    rows = [f"| {' | '.join(header)} |", "|---|---|---|--:|--:|--:|--:|"]
    for method in saved["methods"].values():
        found = [f"{result['norm']:.0e}, {result['verdict']}" for result in method["quadratics"]]
        found = [f"**{text}**" if text.endswith("exact") else text for text in found]
        found += ["needs all clients"] * (2 - len(found))
        sent = [f"{method[key]:.2g}" for key in ("state", "down", "up", "tracked")]
        rows.append(f"| {' | '.join([method['title'], *found, *sent])} |")
    return "\n".join(rows)


def codecs() -> str:
    """Return what codecs save and cost on digits, from runs with the same seeds with and without them."""
    return codec_table("codecs")


def codecs_elsewhere() -> str:
    """Return the same on other data."""
    return "\n\n".join(codec_table(name) for name in ("codecs-cifar10", "codecs-20news"))


def codec_table(name: str) -> str:
    """Return the table of one experiment; each method has a row without codecs."""
    results = read_results(ROOT / "results" / name)
    spec, target = results.spec, results.target
    header = ["method", "codecs", "transfers per round", f"rounds to {target}", "difference"]
    header += [f"minutes to {target}", "final accuracy"]
    title = f"{spec.title}, {spec.run.rounds} rounds, {len(spec.run.seeds)} seeds:"
    lines = [title, "", f"| {' | '.join(header)} |", "|---|---|--:|--:|--:|--:|--:|"]
    plain = {row.method.algorithm: row.method.label for row in results.rows if spec.codec(row.method) is None}
    for row in results.rows:
        codec, runs = spec.codec(row.method), results.runs[row.method.label]
        others = results.runs[plain[row.method.algorithm]]
        cells = [
            "" if runs[0].algorithm is None else runs[0].algorithm.title,
            "none" if codec is None else ", ".join(f"`{field}` {text}" for field, text in codec.items()),
            f"{transfers(runs):.2f}",
            to_target(results, row, "rounds").text,
            "" if codec is None else difference(runs, others, results.spec.run.target or 0),
            to_target(results, row, "minutes", ".2f").text,
            f"{100 * row.final.mean:.1f} ± {100 * row.final.std:.1f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines)


def privacy() -> str:
    """Return epsilon and accuracy of private runs on digits, by the noise."""
    results = read_results(ROOT / "results" / "privacy")
    spec = results.spec
    run = spec.run
    title = f"{spec.title}, {run.rounds} rounds with {run.sampled} clients, {len(run.seeds)} seeds:"
    lines = [title, "", "| method | clips | noise | epsilon | final accuracy |", "|---|---|--:|--:|--:|"]
    for row in results.rows:
        chosen, first = spec.privacy(row.method), results.runs[row.method.label][0]
        clips = {} if chosen is None else chosen["clip"]
        cells = [
            "" if first.algorithm is None else first.algorithm.title,
            ", ".join(f"`{field}` {clip:g}" for field, clip in clips.items()) or "none",
            "none" if chosen is None else f"{chosen['noise']:g}",
            f"{first.epsilon():.1f}" if math.isfinite(first.epsilon()) else "infinite",
            f"{100 * row.final.mean:.1f} ± {100 * row.final.std:.1f} %",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def transfers(runs: list[Run]) -> float:
    """Return how many vectors of float32 as long as the model travel per round and sampled client."""
    model = 4 * runs[0].settings["messages"]["down"]["x"][0]
    records = [record for run in runs for record in run.history]
    each = [(record.bytes_down + record.bytes_up) / len(record.sampled) for record in records]
    return mean(each) / float(model)


def difference(runs: list[Run], others: list[Run], target: float) -> str:
    """Return the mean difference of the rounds to the target over the same seeds, and its 95 % interval."""
    rounds, plain = (
        {run.settings["seed"]: run.rounds_to(target) or len(run.history) for run in group}
        for group in (runs, others)
    )
    found = Difference.of([rounds[seed] - plain[seed] for seed in sorted(rounds.keys() & plain.keys())])
    return f"{found.mean:+.1f} ± {found.half:.1f}"


@cache
def advice() -> tuple[Evidence, ...]:
    """Return what ``fadamgc advise`` relies on, from the saved runs."""
    return tuple(_evidence())


def _evidence() -> Iterator[Evidence]:
    for folder in sorted((ROOT / "results").iterdir()):
        if folder.name.startswith(advice_records.STUDIES):
            study = read_study(folder)
            experiments = [read_experiment(folder)] if study is None else read_members(folder, study)
            yield from advice_records.evidence(folder.name, experiments)


def ours() -> str:
    """Return FedKeel next to the other methods on every row that has run."""
    study = read_study(ROOT / "results" / fedkeel.STUDY)
    assert study is not None
    others = {name: read_experiment(ROOT / "results" / name) for name in fedkeel.ROWS.values()}
    return fedkeel.table(fedkeel.lines(read_members(ROOT / "results" / fedkeel.STUDY, study), others))


CHOSEN = "v shared, alpha 0.4, beta1 0.5"  # the candidate that is FedKeel


def search() -> str:
    """Return what the search for FedKeel found: the rounds with the best step size, by candidate."""
    found: dict[str, dict[str, tuple[float, int, float]]] = {}
    titles, seeds = [], 0
    for folder in sorted((ROOT / "results" / "fedkeel-search").iterdir()):
        spec = load_spec(folder / "spec.toml")
        assert spec.tune is not None
        titles.append(spec.title or spec.name)
        seeds = len(spec.tune.seeds)
        for line in csv.DictReader((folder / "tuning.csv").read_text().splitlines()):
            reached = int(line["seeds_reached"])
            late = (seeds - reached) * spec.tune.rounds
            rounds = (reached * float(line["rounds_to_target"] or 0) + late) / seeds
            point = (rounds, reached, float(line["eta_l"]))
            best = found.setdefault(line["method"], {})
            best[titles[-1]] = min(best.get(titles[-1], point), point)
    lines = [f"| candidate | ratio | {' | '.join(titles)} |", f"|---|--:|{'--:|' * len(titles)}"]
    fewest = {title: min(best[title][0] for best in found.values() if title in best) for title in titles}
    ratios = {
        name: math.exp(mean(math.log(rounds / fewest[title]) for title, (rounds, *_) in best.items()))
        for name, best in found.items()
    }
    for name, best in sorted(found.items(), key=lambda item: (-len(item[1]), ratios[item[0]])):
        cells = [f"{ratios[name]:.2f}"]
        for title in titles:
            rounds, reached, eta_l = best.get(title, (0.0, 0, 0.0))
            missed = "" if reached == seeds else f" ({reached}/{seeds} reached)"
            cells.append(f"{rounds:.0f}{missed}, eta_l {eta_l:g}" if title in best else "")
        label = {CHOSEN: f"**{name}: FedKeel**", "FAdamGC": "**FAdamGC**"}.get(name, name)
        lines.append(f"| {label} | {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(lines)


CLOSE = 1.1  # times as many rounds or minutes as the first method
SITUATIONS: dict[str, dict[str, Any]] = {
    "images, few local steps": {"kind": "images", "local_steps": 10},
    "images, many local steps": {"kind": "images", "local_steps": 60},
    "images, a tenth of a megabit per second up": {"kind": "images", "down_mbps": 1.0, "up_mbps": 0.1},
    "images, clients keep nothing": {"kind": "images", "stateless": True},
    "texts, adapters": {"kind": "texts", "local_steps": 3.0, "parameters": 15e3},
    "texts, adapters, 10 Mbps down and 1 up": {
        **{"kind": "texts", "local_steps": 3.0, "parameters": 15e3},
        **{"down_mbps": 10.0, "up_mbps": 1.0},
    },
    "sensors of 30 people": {
        **{"kind": "sensors", "clients": 30, "sampled": 6, "parameters": 4e3},
    },
}


def default() -> str:
    """Return the method to start with where nothing is known, and the situations with another one."""
    evidence = advice()
    usual = Situation()
    found = advise(usual, evidence)
    first, *others = found.suggestions
    kinds = sorted({experiment.kind for _, experiment in found.evidence})
    close = [other.label for other in others if other.ratio < CLOSE]
    closest = f" {' and '.join(close)} {'is' if len(close) == 1 else 'are'} within 10 %." if close else ""
    lines = [
        f"**Start with {first.label}**, with {_steps(first.settings)}. In {len(found.evidence)} experiments "
        f"on {', '.join(kinds[:-1])} and {kinds[-1]}, weighted for {usual.clients} clients of which "
        f"{usual.sampled} take part in a round, it needs the fewest rounds.{closest}",
        "",
    ]
    exceptions = []
    for name, values in SITUATIONS.items():
        situation = Situation(**values)
        best, *rest = advise(situation, evidence).suggestions
        usual_one = {other.algorithm: other for other in rest}.get(first.algorithm)
        if best.algorithm == first.algorithm or (usual_one is not None and usual_one.ratio < CLOSE):
            continue
        text = f"- {name.capitalize()}: **{best.label}**, with {_steps(best.settings)}."
        if usual_one is not None:
            ahead, behind = usual_one.clear
            text += (
                f" {first.label} needs {usual_one.ratio:.2f} times as many {situation.by} on average. Of the "
                f"{usual_one.shared} experiments with both, {best.label} is clearly ahead in {ahead} and "
                f"{first.label} in {behind}{'' if ahead > behind else ': try both'}."
            )
        exceptions.append(text)
    lines += ["Exceptions:", "", *exceptions] if exceptions else ["Below, it is nowhere far from the best."]
    return "\n".join(lines)


def _steps(settings: Mapping[str, Any]) -> str:
    return "`" + ", ".join(f"{key}={value:g}" for key, value in settings.items()) + "`"


def which() -> str:
    """Return the advice for typical situations."""
    titles = ["situation", "start with", "step sizes", "close", "clearly behind", "experiments"]
    rows = [f"| {' | '.join(titles)} |", "|---|---|---|---|---|--:|"]
    evidence = advice()
    for name, values in SITUATIONS.items():
        found = advise(Situation(**values), evidence)
        first, *others = found.suggestions
        close = [other.label for other in others if other.ratio < CLOSE]
        behind = [other.label for other in others if 2 * other.clear[0] > other.shared]
        cells = [f"{name}, by {Situation(**values).by}", f"**{first.label}**", _steps(first.settings)]
        cells += [", ".join(close), ", ".join(behind), str(len(found.evidence))]
        rows.append(f"| {' | '.join(cells)} |".replace("|  |", "| |"))
    return "\n".join(rows)


def places() -> str:
    """Return the rounds without correction, and with it after the moments and before them."""
    labels = {"local_adam": "no correction", "fa_nt": "after the moments", "fadamgc": "before the moments"}
    rows = [f"| data | {' | '.join(labels.values())} |", f"|---|{'--:|' * len(labels)}"]
    table: list[dict[str, float]] = []
    for line in advice():
        methods = {method.algorithm: mean(method.rounds.values()) for method in line.methods}
        main = line.study.startswith("main-") and not line.study.endswith("-desk")
        if main and labels.keys() <= methods.keys():
            table.append(methods)
            cells = " | ".join(f"{methods[name]:.1f}" for name in labels)
            rows.append(
                f"| [{line.study}](../results/{line.study}), to {100 * line.target:.0f} % | {cells} |"
            )
    none, after, before = ([methods[name] for methods in table] for name in labels)
    pairs = {"before": (before, after), "none": (before, none), "after": (after, none)}
    counts = {
        name: sum(a < b for a, b in zip(first, second, strict=True))
        for name, (first, second) in pairs.items()
    }
    summary = (
        f"In {len(table)} comparisons, the correction before the moments has fewer rounds than after them in "
        f"{counts['before']}, and fewer than no correction in {counts['none']}. The correction after the "
        f"moments has fewer rounds than no correction in {counts['after']}."
    )
    return "\n".join([*rows, "", *textwrap.wrap(summary, 116)])


def round_trip() -> str:
    """Return where the time of a federation's round goes, as ``benchmarks/round_trip.py`` has measured it."""
    measured = json.loads((ROOT / "results" / "benchmarks" / "round-trip.json").read_text())
    return str(_module("round_trip").table(measured))


BLOCKS: dict[str, tuple[Callable[[], str], ...]] = {
    "README.md": (results, algorithms, bench),
    "docs/codecs.md": (codecs, codecs_elsewhere),
    "docs/fedkeel.md": (ours, search),
    "docs/flower.md": (traffic, round_trip),
    "docs/methods.md": (exactness,),
    "docs/privacy.md": (privacy,),
    "docs/ray.md": (ray_traffic,),
    "docs/scaffold-and-adam.md": (places,),
    "docs/which.md": (default, which),
}


def pages() -> Iterator[tuple[Path, str]]:
    """Yield each file that is generated, or has generated blocks, and its text as it should be."""
    for name, makers in BLOCKS.items():
        text = (ROOT / name).read_text()
        for make in makers:
            start, end = f"<!-- {make.__name__} -->\n", f"\n<!-- /{make.__name__} -->"
            block = f"{start}{make().strip()}{end}"
            text, count = re.subn(f"{start}.*?{end}", block.replace("\\", r"\\"), text, flags=re.DOTALL)
            if count != 1:
                raise SystemExit(f"{name} has {count} blocks {start.strip()}; it must have one")
        yield ROOT / name, text
    for name in algorithm_pages.pages():
        path = algorithm_pages.FOLDER / f"{name}.md"
        yield path, algorithm_pages.with_blocks(path.read_text(), name, advice())
    yield commands.PAGE, commands.page()
    text = json.dumps(current(), indent=1, ensure_ascii=False) + "\n"
    yield FILE, text
    lines = [line.model_dump() for line in advice()]
    yield ADVICE, json.dumps(lines, indent=None, ensure_ascii=False).replace("}, {", "},\n{") + "\n"


if __name__ == "__main__":
    for page, text in pages():
        if not page.is_file() or text != page.read_text():
            page.write_text(text)
            print(f"wrote {page.relative_to(ROOT)}")
