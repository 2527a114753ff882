"""The generated parts of the pages of algorithms, docs/algorithms/NAME.md.

``head`` is above the notes of a page, which are written by hand, and ``foot`` below them.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import torch

import fadamgc
from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.experiments.citations import bibtex
from fadamgc.federation.cost import traffic
from fadamgc.methods import algorithm_class
from fadamgc.paper.advice import TRACKING, Evidence
from fadamgc.tree import named_leaves

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "algorithms"
ZOO = ROOT / "tests" / "methods" / "test_transcription_zoo.py"
SIZE = 1000  # of a model, to tell vectors from single numbers
SYMBOLS = {  # of the rules; a rule lists those that it uses
    "x_i": "the client's model, which starts a round at x",
    "x": "the server's model",
    "g": "the gradient of a batch at x_i",
    "n": "number of clients",
    "S": "number of clients that are sampled in a round",
    "K": "local steps of a client in a round",
    "D": "mean over the sampled clients of x_i - x, at the end of the round",
    "y": "mean of the clients' y_i",
    "y_i": "control variate, kept by the client between its rounds",
    "G": "mean direction of the last round",
    "m": "first moment",
    "v": "second moment",
    "v_hat": "running maximum of v",
    "g_hat": "the corrected gradient",
    "h_i": "the client's own correction",
    "z_i": "the client's own correction",
    "z": "y - y_i",
    "x_new": "the server's model after the round",
    "v_hat_i": "a client's v_hat at the end of the round",
    "m_i": "a client's m at the end of the round",
    "v_i": "a client's v at the end of the round",
    "j": "a group of clients",
    "x_j": "the model of group j",
    "y_j": "control variate of group j",
    "E": "group rounds in a global round",
    "H": "local steps of a client in a group round",
}
OWN_SYMBOLS = {  # of single rules, where they have another meaning or are words elsewhere
    "diloco": {"u": "the server's momentum"},
    "fedacg": {"m": "the server's momentum", "x_a": "the model ahead of x, at which the clients start"},
    "fedadamw": {
        "m_c": "first moment, corrected for its start at 0",
        "v_c": "second moment, corrected for its start at 0",
        "k": "number of the step in the round",
        "t": "number of the step over all rounds",
    },
    "feddc": {
        "h": "mean of all clients' h_i",
        "s_i": "control variate, kept by the client between its rounds",
        "s": "mean of the clients' s_i",
    },
    "feddyn": {"h": "mean of all clients' h_i"},
    "fedexp": {"eta_g": "global step size, computed in each round"},
    "fedmuon_sign": {
        "M_i": "momentum, kept by the client between its rounds",
        "C_i": "control variate: the client's M_i when it was last tracked",
        "C": "mean of the clients' C_i",
    },
    "fednova": {
        "m": "momentum of the local steps",
        "K_i": "local steps of client i",
        "a_i": "sum of the weights that the gradients of a round have in x_i",
    },
    "mimelite": {
        "f_i": "the loss of a client on all of its data",
        "c": "mean of the sampled clients' gradients at x",
    },
    "mtgc_adam": {"g_i": "mean of the client's raw gradients", "g_j": "mean of the g_i of group j"},
}


class Docstring(NamedTuple):
    """The parts of an algorithm's docstring."""

    summary: str
    rule: str
    notes: str
    settings: dict[str, str]
    references: str


def pages() -> list[str]:
    """List the algorithms that have a page: all that are registered in the package."""
    return [name for name in fadamgc.algorithms() if name != "compose"]


def parsed(name: str) -> Docstring:
    """Split the docstring of an algorithm into its parts."""
    text = inspect.getdoc(algorithm_class(name)) or ""
    body, _, rest = text.partition("\nArgs:\n")
    settings, _, references = rest.partition("\nReferences:\n")
    summary, _, body = body.partition("\n")
    blocks = [block for block in re.split(r"\n\s*\n", body.strip("\n")) if block.strip()]
    rule = [block for block in blocks if block.startswith("    ")]
    notes = [block for block in blocks if not block.startswith("    ")]
    found = re.findall(r"^    (\w+): (.*(?:\n {8}.*)*)", settings, flags=re.MULTILINE)
    return Docstring(
        summary=summary.strip(),
        rule="\n".join(line.removeprefix("    ") for block in rule for line in block.splitlines()),
        notes="\n\n".join(" ".join(block.split()) for block in notes),
        settings={key: " ".join(value.split()) for key, value in found},
        references=" ".join(references.split()),
    )


def head(name: str) -> str:
    """Return the rule, its symbols and settings, and what is kept and sent."""
    algorithm, text = fadamgc.make_algorithm(name), parsed(name)
    lines = [text.summary, "", "```", text.rule, "```", ""]
    lines += [text.notes, ""] if text.notes else []
    lines += ["| symbol | what it is |", "|---|---|"]
    lines += [f"| `{symbol}` | {what} |" for symbol, what in symbols(name).items()]
    lines += ["", "| setting | default | what it is |", "|---|---|---|"]
    plain = algorithm.plain()
    lines += [f"| `{key}` | `{plain[key]!r}` | {what.rstrip('.')} |" for key, what in text.settings.items()]
    lines += ["", "## Example", "", "```python", *_example(algorithm, name), "```"]
    lines += ["", "## State and traffic", "", *_traffic(algorithm)]
    return "\n".join(lines)


def _example(algorithm: AnyAlgorithm, name: str) -> Iterator[str]:
    how = ["rounds=20", "sampled=4"] if len(_saved()["methods"][name]["quadratics"]) > 1 else ["rounds=20"]
    how += ["tracked=2"] if algorithm.tracked_only and "sampled=4" in how else []
    how += ["local_steps=5", "batch_size=8"]
    yield "import fadamgc, torch"
    yield "from torch.nn.functional import mse_loss"
    yield ""
    yield "clients = [(torch.randn(16, 3), torch.randn(16, 1) + i / 5) for i in range(10)]"
    yield 'task = fadamgc.Task(torch.nn.Linear(3, 1), mse_loss, clients, metric="loss")'
    yield f"algo = fadamgc.{type(algorithm).__name__}()"
    yield f"run = fadamgc.simulate(algo, task, {', '.join(how)})"
    yield "print(run.history[-1].train_loss)"


def formula(name: str) -> str:
    """Return the rule of an algorithm without the remarks at the right."""
    return "\n".join(line.split(" " * 5)[0] for line in parsed(name).rule.splitlines())


def symbols(name: str) -> dict[str, str]:
    """Return what the symbols of an algorithm's rule are, except its settings."""
    text, own = parsed(name), OWN_SYMBOLS.get(name, {})
    used = set(re.findall(r"[A-Za-z]\w*", text.rule))
    common = {key: own.get(key, what) for key, what in SYMBOLS.items() if key in used}
    return {key: what for key, what in (common | own).items() if key not in text.settings}


def _traffic(algorithm: AnyAlgorithm) -> Iterator[str]:
    messages = example(algorithm, torch.zeros(SIZE))
    up = named_leaves(messages.up)
    tracked = [name for name in up if name.split(".")[0] in algorithm.tracked_only]
    rows = {
        "a client keeps between its rounds": named_leaves(messages.client),
        "a client receives": named_leaves(messages.down),
        "a client sends": {name: leaf for name, leaf in up.items() if name not in tracked},
        "and, if it is tracked": {name: up[name] for name in tracked},
    }
    yield "| | fields | vectors of the model's size |"
    yield "|---|---|--:|"
    for title, leaves in rows.items():
        names = [f"`{name.rpartition('.')[2]}`" for name in leaves]
        count = sum(leaf.numel() for leaf in leaves.values()) / SIZE
        if leaves or title != "and, if it is tracked":
            yield f"| {title} | {', '.join(names) or 'nothing'} | {count:.2g} |"
    sent = traffic(algorithm, SIZE)
    half = (sent.down + sent.up + sent.up_tracked / 2) / 4 / SIZE
    yield ""
    yield f"A round moves {half:.2g} vectors per sampled client" + (
        ", where half of them are tracked." if tracked else "."
    )


def foot(name: str, evidence: tuple[Evidence, ...]) -> str:
    """Return whether the method is exact, its measured rows, mistakes, and its reference."""
    algorithm = fadamgc.make_algorithm(name)
    lines = ["## Exact or not", "", *_exact(name), ""]
    lines += ["## Measured", "", *_measured(name, evidence), ""]
    if mistakes := _mistakes(type(algorithm).__name__):
        lines += ["## Mistakes that a test sees", ""]
        lines += ["An implementation of the rule with one of these is told apart from ours by a test:", ""]
        lines += [f"- {mistake}" for mistake in mistakes] + [""]
    lines += ["## Reference", "", parsed(name).references, "", "```bibtex"]
    lines += [bibtex(algorithm.cites).strip(), "```", "", f"`fadamgc cite {name}` prints it."]
    return "\n".join(lines)


@cache
def _saved() -> Any:
    return json.loads((ROOT / "results" / "exactness" / "results.json").read_text())


def _exact(name: str) -> Iterator[str]:
    saved = _saved()
    settings, found = saved["settings"], saved["methods"][name]["quadratics"]
    words = {"exact": "reaches the optimum", "stalls": "stalls", "converging": "is still converging"}
    for result in found:
        all_of_them = result["sampled"] == settings["clients"]
        who = "all clients" if all_of_them else f"{result['sampled']} of {settings['clients']} clients"
        yield (
            f"- With {who} in each round it {words.get(result['verdict'], result['verdict'])}: "
            f"the squared gradient norm ends at {result['norm']:.0e}."
        )
    if len(found) == 1:
        yield "- It needs all clients in every round."
    yield ""
    yield (
        f"On {settings['clients']} quadratics with different curvatures and minimisers, in "
        f"{settings['rounds']:,} rounds of {settings['steps']} local steps with exact gradients, with "
        f"the best of {len(settings['eta_l'])} local step sizes "
        "([all methods](../methods.md#which-methods-are-exact))."
    )


def _measured(name: str, evidence: tuple[Evidence, ...]) -> Iterator[str]:
    rows = [
        (line, {method.algorithm: method for method in line.methods})
        for line in evidence
        if line.study != TRACKING and any(method.algorithm == name for method in line.methods)
    ]
    if not rows:
        yield "No saved run compares it with other methods yet."
        return
    yield "Rounds to the target, means over seeds; a run that missed it counts with all its rounds."
    yield ""
    yield "| experiment | step sizes | rounds | missed | place among |"
    yield "|---|---|--:|--:|--:|"
    for line, methods in rows:
        rounds = {other: fmean(method.rounds.values()) for other, method in methods.items()}
        place = 1 + sum(value < rounds[name] for value in rounds.values())
        settings = ", ".join(f"{key}={value:g}" for key, value in methods[name].settings.items())
        missed = f"{methods[name].missed} of {len(methods[name].rounds)}"
        experiment = line.experiment.partition(" clients")[0].rpartition(",")[0] or line.experiment
        title = experiment if line.study.startswith(("main-", "har", "digits")) else line.experiment
        yield (
            f"| {title}, to {line.target:.0%} ([{line.study}](../../results/{line.study})) | `{settings}` | "
            f"{rounds[name]:.1f} | {missed} | {place} of {len(rounds)} |"
        )


@cache
def _all_mistakes() -> list[tuple[str, str]]:
    """List the class of the method and the name of each mistake in the tests."""
    text = ZOO.read_text(encoding="utf-8")
    classes = dict(re.findall(r'Case\(\s*"([^"]+)",\s*"(\w+)"', text))
    found = re.findall(r'^    "([\w-]+): ([^"]+)": Mistake\(', text, flags=re.MULTILINE)
    return [(classes[case], mistake) for case, mistake in found if case in classes]


def _mistakes(cls: str) -> list[str]:
    return list(dict.fromkeys(mistake for owner, mistake in _all_mistakes() if owner == cls))


def with_blocks(text: str, name: str, evidence: tuple[Evidence, ...]) -> str:
    """Return a page with its generated parts as they should be."""
    parts: dict[str, Any] = {"head": head(name), "foot": foot(name, evidence)}
    for part, made in parts.items():
        start, end = f"<!-- {part} -->", f"<!-- /{part} -->"
        before, found, rest = text.partition(start)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise SystemExit(f"docs/algorithms/{name}.md needs {start} and {end}")
        text = f"{before}{start}\n{made.strip()}\n{end}{after}"
    return text
