"""The documentation has every public name, key, command and option, and nothing that is gone."""

from __future__ import annotations

import inspect
import math
import re
from collections import Counter
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest
import torch
import typer

import fadamgc
from fadamgc.cli.main import app
from fadamgc.experiments.spec.sections import CostSpec, MethodSpec, RunSpec, Spec, TuneSpec
from fadamgc.experiments.spec.toml_io import TABLES
from fadamgc.flower.config import config_keys
from fadamgc.methods import algorithm_class
from fadamgc.section import Section
from fadamgc.tasks import sections
from website import algorithms, commands, links, reference

ROOT = Path(__file__).resolve().parents[1]
INSIDE = {"sim.executors"}  # a module whose names are not for users


def test_every_public_name_is_documented_once():
    assert Counter(reference.documented(reference.pages())) == Counter(list(reference.public_names()))


def test_every_module_with_public_names_is_in_the_reference():
    source = ROOT / "src" / "fadamgc"
    declared = {
        ".".join(path.relative_to(source).with_suffix("").parts).removesuffix(".__init__")
        for path in source.rglob("*.py")
        if re.search(r"^__all__ = ", path.read_text(encoding="utf-8"), re.MULTILINE)
    }
    declared = {name.removeprefix("algebra.") for name in declared}
    assert declared == {*reference.MODULES, *INSIDE}
    modules = {name for name in fadamgc.__all__ if inspect.ismodule(getattr(fadamgc, name))}
    assert modules <= set(reference.MODULES)


def test_every_public_name_has_an_example():
    """Methods have theirs on pages of their own, to which the reference leads."""
    names = reference.public_names()
    without = {name for name, value in names.items() if not reference.has_example(name, value)}
    own_page = {f"fadamgc.{algorithm_class(name).__name__}": name for name in algorithms.pages()}
    assert without <= own_page.keys()
    text = (reference.FOLDER / "methods.md").read_text(encoding="utf-8")
    for name, page in own_page.items():
        assert f"::: {name}\n\n[Example, and what is known of it](../algorithms/{page}.md)\n" in text, name


@pytest.mark.parametrize("name", algorithms.pages())
def test_the_example_of_a_method_runs(name, capsys):
    text = (algorithms.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    used = vars(fadamgc)[re.findall(r"algo = fadamgc\.(\w+)\(\)", code)[0]]
    assert used is algorithm_class(name)
    torch.manual_seed(0)
    exec(compile(code, f"{name}.md", "exec"), {})
    assert math.isfinite(float(capsys.readouterr().out))


WORDS = {
    "FAdamGC",
    "all",
    "as",
    "at",
    "block",
    "both",
    "client",
    "clients",
    "each",
    "gradient",
    "group",
    "in",
    "max",
    "mean",
    "new",
    "of",
    "old",
    "on",
    "over",
    "raw",
    "sampled",
    "sent",
    "sign",
    "sqrt",
    "sum",
    "the",
    "to",
    "with",
}


@pytest.mark.parametrize("name", algorithms.pages())
def test_every_symbol_of_a_rule_is_explained_on_its_page(name):
    formula = algorithms.formula(name).replace("client's", "client")
    used = set(re.findall(r"[A-Za-z]\w*", formula))
    known = algorithms.symbols(name).keys() | algorithms.parsed(name).settings.keys()
    assert used - WORDS <= known
    assert algorithms.OWN_SYMBOLS.get(name, {}).keys() <= used | {"g_i", "g_j", "k", "t"}  # in remarks
    page = (algorithms.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    assert all(f"\n| `{symbol}` | " in page for symbol in known)


def test_links_between_files_become_links_between_pages():
    text = "[a](specs.md#run) [b](../README.md) [c](../src/fadamgc/task.py) [d](https://example.org)"
    assert links.rewritten(text, "guide.md") == (
        "[a](specs.md#run) [b](index.md) c (`src/fadamgc/task.py`) [d](https://example.org)"
    )
    example = "[e](../examples/drift.py)"
    assert links.rewritten(example, "guide.md") == "[e](examples/drift.py)"
    assert links.rewritten("[e](../../examples/drift.py)", "adr/1.md") == "[e](../examples/drift.py)"
    assert "blob/main" in links.rewritten(example, "guide.md", "https://example.org/us/it")
    at_home = links.rewritten(text, "guide.md", "https://example.org/us/it")
    assert "[c](https://example.org/us/it/blob/main/src/fadamgc/task.py)" in at_home


# Keys of specs, commands and options.


def task_classes() -> tuple[type[Section], ...]:
    """Every kind of task that a spec can have; the others are bases of these."""
    found = [cls for cls in vars(sections).values() if inspect.isclass(cls) and issubclass(cls, Section)]
    kinds = [cls for cls in found if not any(other is not cls and issubclass(other, cls) for other in found)]
    return tuple(cls for cls in kinds if cls is not sections.CustomTask)


SECTIONS = {
    "[task]": task_classes(),
    "[run]": (RunSpec,),
    "[cost]": (CostSpec,),
    "[tune]": (TuneSpec,),
    "[[method]]": (MethodSpec,),
}
NOT_WRITTEN = {"hyperparameters"}  # of a method: its keys are those of the algorithm
# Words in backticks on the page that are not keys: examples of hyperparameters, and values.
OTHER_WORDS = {
    "[tune]": {"mu", "beta2", "true", "optuna"},
    "[[method]]": {"compose", "rule", "title"},
}


def page_section(page: str, title: str) -> str:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    part = text.partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    assert part, title
    return part


def literals(annotation) -> set[str]:
    """The texts that a key accepts, if it accepts only some."""
    if get_origin(annotation) is Literal:
        return {value for value in get_args(annotation) if isinstance(value, str)}
    return {value for inner in get_args(annotation) for value in literals(inner)}


def test_the_page_of_specs_has_every_section():
    text = (ROOT / "docs" / "specs.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (\[.*)$", text, flags=re.MULTILINE) == list(SECTIONS)
    assert {f"[{name}]" for name in TABLES} | {"[[method]]"} == set(SECTIONS)
    assert set(Spec.model_fields) == {*TABLES, "methods", "name", "title"}
    assert all(f"\n{key} = " in text for key in ("name", "title"))


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_a_spec_is_documented_and_no_other(section):
    part = page_section("specs.md", section)
    fields = {key: field for cls in SECTIONS[section] for key, field in cls.model_fields.items()}
    keys = fields.keys() - NOT_WRITTEN
    assert not {key for key in keys if not re.search(rf"`{key}`|^{key} = ", part, flags=re.MULTILINE)}
    values = {value for field in fields.values() for value in literals(field.annotation)}
    assert not {value for value in values if f'"{value}"' not in part and f"`{value}`" not in part}
    rows = re.findall(r"^\| (`[^|]*) \|", part, flags=re.MULTILINE)
    text = "\n".join(rows) or re.sub(r"```.*?```", "", part, flags=re.DOTALL)
    assert set(re.findall(r"`(\w+)`", text)) <= keys | OTHER_WORDS.get(section, set())


def test_every_key_of_a_federation_is_documented_and_no_other():
    rows = re.findall(r"^\| (`[^|]*) \|", page_section("flower.md", "Config"), flags=re.MULTILINE)
    documented = {key for row in rows for key in re.findall(r"`([\w-]+)`", row)}
    assert documented == {*config_keys(), "codec"}


def test_every_environment_variable_is_documented_and_no_other():
    names = re.compile(r"\bFADAMGC_[A-Z_]+\b")
    files = (ROOT / "src").rglob("*.py")
    used = {name for file in files for name in names.findall(file.read_text(encoding="utf-8"))}
    # The last two are set by a command for the processes that it starts.
    table = page_section("reference/commands.md", "Environment variables")
    assert set(names.findall(table)) == used - {"FADAMGC_PROCESS_CODE", "FADAMGC_TRACK"}


def test_the_page_of_commands_has_every_command_and_option():
    text = commands.page()
    root = typer.main.get_command(app)
    for name in ("compare", "run", "tune", "reproduce", "report", "advise", "cite", "judge", "federation up"):
        assert f"\n## fadamgc {name}\n" in text
    for path, command in commands.all_commands():
        assert command.help, path
        for parameter in command.params:
            assert getattr(parameter, "help", None), (path, parameter.name)
    for name, command in root.commands.items():
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                if option.startswith("--") and option != "--help":
                    part = text.partition(f"\n## fadamgc {name}\n")[2].partition("\n## ")[0]
                    assert f"`{option}`" in part, (name, option)
    assert commands.PAGE.read_text(encoding="utf-8") == text, "run `make tables`"
