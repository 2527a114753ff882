"""The documentation has every public name, key, command and option, and nothing that is gone."""

from __future__ import annotations

import math
import re
from collections import Counter
from pathlib import Path

import pytest
import torch
import typer

import fadamgc
from fadamgc.cli.main import app
from fadamgc.experiments.spec.sections import CostSpec, MethodSpec, RunSpec, TuneSpec
from fadamgc.methods import algorithm_class
from fadamgc.tasks import sections
from website import algorithms, commands, links, reference

ROOT = Path(__file__).resolve().parents[1]


def test_every_public_name_is_documented_once():
    assert Counter(reference.documented(reference.pages())) == Counter(list(reference.public_names()))


def test_every_public_name_has_an_example():
    """Methods have theirs on pages of their own."""
    names = reference.public_names()
    without = [name for name, value in names.items() if not reference.has_example(name, value)]
    assert set(without) <= reference.method_names()


@pytest.mark.parametrize("name", algorithms.pages())
def test_the_example_of_a_method_runs(name, capsys):
    text = (algorithms.FOLDER / f"{name}.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^```python\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)
    used = vars(fadamgc)[re.findall(r"algo = fadamgc\.(\w+)\(\)", code)[0]]
    assert used is algorithm_class(name)
    torch.manual_seed(0)
    exec(compile(code, f"{name}.md", "exec"), {})
    assert math.isfinite(float(capsys.readouterr().out))


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


SECTIONS = {
    "[task]": (
        *(sections.DigitsTask, sections.ImagesTask, sections.HarTask, sections.TextTask),
        *(sections.TextFileTask, sections.TableTask, sections.FunctionTask),
        *(sections.QuadraticsTask, sections.LinearRegressionTask),
    ),
    "[run]": (RunSpec,),
    "[cost]": (CostSpec,),
    "[tune]": (TuneSpec,),
    "[[method]]": (MethodSpec,),
}
NOT_WRITTEN = {"hyperparameters"}  # of a method: its keys are those of the algorithm


@pytest.mark.parametrize("section", SECTIONS)
def test_every_key_of_a_spec_is_documented(section):
    text = (ROOT / "docs" / "specs.md").read_text(encoding="utf-8")
    _, _, rest = text.partition(f"\n## {section}\n")
    part = rest.partition("\n## ")[0]
    assert part
    keys = {key for cls in SECTIONS[section] for key in cls.model_fields} - NOT_WRITTEN
    assert not {key for key in keys if not re.search(rf"`{key}`|^{key} = ", part, flags=re.MULTILINE)}
    rows = re.findall(r"^\| (`[^|]*) \|", part, flags=re.MULTILINE)
    documented = {key for row in rows for key in re.findall(r"`(\w+)`", row)}
    assert documented <= keys


def test_the_page_of_commands_has_every_command_and_option():
    text = commands.page()
    root = typer.main.get_command(app)
    for name in ("compare", "run", "tune", "reproduce", "report", "advise", "cite", "judge", "federation up"):
        assert f"\n## fadamgc {name}\n" in text
    for name, command in root.commands.items():
        for parameter in command.params:
            for option in (*parameter.opts, *parameter.secondary_opts):
                if option.startswith("--") and option != "--help":
                    part = text.partition(f"\n## fadamgc {name}\n")[2].partition("\n## ")[0]
                    assert f"`{option}`" in part, (name, option)
    assert commands.PAGE.read_text(encoding="utf-8") == text, "run `make tables`"
