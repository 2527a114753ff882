"""Code on the pages: Python runs, TOML is read as what it says it is, and commands and options exist."""

from __future__ import annotations

import re
import shlex
import tomllib
from collections.abc import Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import typer

import fadamgc
from fadamgc import methods
from fadamgc.cli.main import app
from fadamgc.experiments.spec.toml_io import METHOD_KEYS, TABLES, spec_of
from fadamgc.methods import ENTRY_POINTS
from places import ROOT

PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "AGENTS.md", "SECURITY.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    *sorted((ROOT / "benchmarks").glob("*.md")),
]
LANGUAGES = {"python", "toml", "sh", "bash", "bibtex", ""}
# Their blocks have tests of their own: with other data, without other processes, or one for each method.
OWN_TESTS = {
    *("README.md", "docs/flower.md", "docs/speed.md", "docs/text.md"),  # in test_readme.py
    *("docs/hook.md", "docs/algorithms"),  # in test_hook.py and test_website.py
}
BLOCK = re.compile(r"^```([^\n]*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


def name_of(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@cache
def blocks() -> list[tuple[str, str, str]]:
    """Page, language and text of every block."""
    return [(name_of(page), *found) for page in PAGES for found in BLOCK.findall(page.read_text())]


def of(language: str) -> list[Any]:
    found = [(page, code) for page, marked, code in blocks() if marked == language]
    return [pytest.param(*block, id=f"{block[0]}-{number}") for number, block in enumerate(found)]


def test_every_block_is_of_a_language_that_is_tested():
    assert {language for _, language, _ in blocks()} == LANGUAGES
    assert all(page in {name for name, *_ in blocks()} or (ROOT / page).is_dir() for page in OWN_TESTS)


# Python


def small_task() -> fadamgc.Task:
    generator = torch.Generator().manual_seed(0)
    data = [(torch.randn(8, 2, generator=generator), torch.ones(8, 1)) for _ in range(12)]
    return fadamgc.Task(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, data)


PYTHON = [
    block
    for block in of("python")
    if block.values[0] not in OWN_TESTS and Path(block.values[0]).parent.as_posix() not in OWN_TESTS
]
# What the text above a block has introduced. All other blocks run as they are.
INTRODUCED = {
    "docs/codecs.md": lambda: {
        **{"fadamgc": fadamgc, "task": small_task(), "Algorithm": fadamgc.Algorithm},
        **dict.fromkeys(("Server", "Down", "Client", "Local", "Up"), object),
    },
    "docs/robust.md": lambda: {"fadamgc": fadamgc, "task": small_task()},
}


@pytest.mark.slow
@pytest.mark.parametrize(("page", "code"), PYTHON)
def test_python_runs(page, code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(methods, "_REGISTRY", dict(methods._REGISTRY))  # the example may register a method
    monkeypatch.setitem(methods.NAMES, "local", dict(methods.NAMES["local"]))  # or a rule
    names: dict[str, Any] = {"__name__": "__main__", **INTRODUCED.get(page, dict)()}
    short = code.replace("rounds=80", "rounds=2") if page in INTRODUCED else code
    exec(compile(short, page, "exec"), names)
    if "HeavyBall" in names or "MaxNorm" in names:
        algo = names["algo"] if "MaxNorm" in names else fadamgc.make_algorithm("heavy_ball", eta_l=0.05)
        run = fadamgc.simulate(algo, small_task(), rounds=5, local_steps=2)
        assert run.history[-1].train_loss < run.history[0].train_loss


def test_the_pages_have_an_example_of_an_algorithm():
    assert any("HeavyBall" in block.values[1] for block in PYTHON)


# TOML


def whole(table: dict[str, Any]) -> dict[str, Any]:
    """A spec that has a part of a spec: what stands alone on a page is a key of [run]."""
    known = {*TABLES, "name", "title", "method"}
    run = {"rounds": 1, "local_steps": 1} | {key: table.pop(key) for key in table.keys() - known}
    names = ("fedprox", "feddyn", "compose") if "tune" in table else ("fedkeel",)
    task = {"data": "digits", "clients": 4}
    if {"client", "clients"} & table.get("task", {}).keys():
        task = {}
    return {
        **table,
        "task": task | table.get("task", {}),
        "run": run | table.get("run", {}),
        "method": table.get("method", [{"algorithm": name} for name in names]),
    }


FILES = {
    "patients.csv": "age,hospital,diagnosis\n" + "40,north,ill\n50,south,well\n" * 10,
    "reviews.jsonl": '{"review": "good", "sentiment": "positive", "user": "a"}\n'
    '{"review": "bad", "sentiment": "negative", "user": "b"}\n' * 10,
}


@pytest.mark.parametrize(("page", "code"), of("toml"))
def test_toml_is_what_it_says(page, code, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for name, text in FILES.items():
        Path(name).write_text(text)
    table = tomllib.loads(code)
    if "project" in table:  # a part of a pyproject.toml
        assert list(table["project"]["entry-points"]) == [ENTRY_POINTS]
        return
    spec = spec_of(whole(table))
    if spec.tune is not None and spec.tune.methods:
        assert all(spec.tune.grid_of(method) for method in spec.methods)
    for method, written in zip(spec.methods, table.get("method", ()), strict=False):
        assert written.keys() - set(METHOD_KEYS) <= set(method.make().setting_names())


# Commands


def lines() -> Iterator[tuple[str, str]]:
    """Yield the lines of shell blocks and of indented blocks, and what stands in backticks."""
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        blocks = BLOCK.findall(text)
        rest = BLOCK.sub("", text)
        shell = [code for language, code in blocks if language in ("sh", "bash")]
        found = [*"\n".join(shell).splitlines(), *re.findall(r"^    (\S.*)$", rest, re.MULTILINE)]
        for line in [*found, *re.findall(r"(?<!`)`([^`\n]+)`(?!`)", rest)]:
            yield name_of(page), line.partition(" #")[0].strip()


LINES = sorted(set(lines()))
COMMANDS = [(page, line) for page, line in LINES if re.match(r"fadamgc( |$)", line)]


root_command = cache(partial(typer.main.get_command, app))


def check(words: list[str]) -> None:
    """Raise an error if a command line has a command, an argument or an option that is not accepted."""
    command: Any = root_command()
    context, rest = command.context_class(command), words[1:]
    while hasattr(command, "commands"):
        _, rest, _ = command.make_parser(context).parse_args(list(rest))
        if not rest or rest[0] == "COMMAND":
            return
        if rest[0] not in command.commands:
            raise LookupError(f"No such command {rest[0]}")
        command, rest = command.commands[rest[0]], rest[1:]
        context = command.context_class(command, parent=context)
    if rest and "--help" not in rest:  # a name alone is no line to type
        command.make_context(None, list(rest))


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_exist(page, line):
    words = shlex.split(re.sub(r"2?> \S+$", "", line))
    check([word.removesuffix("...") for word in words])


@pytest.mark.parametrize(
    "line", ["fadamgc comapre", "fadamgc run a.toml --fast", "fadamgc advise --sampled x"]
)
def test_a_command_that_is_gone_is_found(line):
    with pytest.raises(Exception, match="No such|not a valid"):
        check(line.split())


FOREIGN = {  # options of Flower's, Docker's and TensorBoard's commands
    *("--node-config", "--run-config", "--superlink", "--trusted-entities", "--gpus"),
    *("--enable-supernode-auth", "--ssl-certfile"),
}


def test_options_exist():
    """An option that a page names in backticks is one of a command, or of a script of this repository."""
    known = set(FOREIGN)
    todo = [root_command()]
    while todo:
        command = todo.pop()
        todo += getattr(command, "commands", {}).values()
        known |= {name for option in command.params for name in (*option.opts, *option.secondary_opts)}
    for script in (*(ROOT / "benchmarks").glob("*.py"), *(ROOT / "tests").rglob("*.py")):
        known |= set(re.findall(r"add_argument\(\s*\"(--[a-z-]+)\"", script.read_text()))
    named = {(page, line.split()[0].partition("=")[0]) for page, line in LINES if line.startswith("--")}
    assert len(named) > 30
    assert not {(page, option) for page, option in named if option not in known}


def test_targets_of_make_exist():
    makefile = (ROOT / "Makefile").read_text()
    named = {line.split()[1] for _, line in LINES if re.match("make [a-z]", line)}
    assert {"demo", "test", "docs"} <= named
    assert not {target for target in named if f"\n{target}:" not in makefile}
