"""Write the generated blocks of README.md and docs/*.md, and the catalogue of ``fadamgc list``.

python docs/tables.py

A block is the text between ``<!-- NAME -->`` and ``<!-- /NAME -->``.
"""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

import fadamgc
from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.cli.catalogue import FILE, current
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.tree import named_leaves

ROOT = Path(__file__).resolve().parent.parent
SIZE = 1000  # of a model, to tell vectors from single numbers


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


def bench() -> str:
    """Return the speeds of the last benchmark."""
    spec = importlib.util.spec_from_file_location("report", ROOT / "benchmarks" / "report.py")
    assert spec is not None
    assert spec.loader is not None
    report = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(report)
    text: str = report.summary(json.loads((ROOT / "results/benchmarks/results.json").read_text()))
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


BLOCKS: dict[str, tuple[Callable[[], str], ...]] = {
    "README.md": (results, algorithms, bench),
    "docs/flower.md": (traffic,),
    "docs/methods.md": (exactness,),
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
    text = json.dumps(current(), indent=1, ensure_ascii=False) + "\n"
    yield FILE, text


if __name__ == "__main__":
    for page, text in pages():
        if not page.is_file() or text != page.read_text():
            page.write_text(text)
            print(f"wrote {page.relative_to(ROOT)}")
