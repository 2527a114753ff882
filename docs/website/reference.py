"""The public names, where each is documented, and the examples in docstrings.

A page of the reference names an object as users do, ``::: fadamgc.simulate``. The site's generator finds
docstrings by the module that defines an object, so ``with_homes`` completes these lines.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from doctest import DocTestParser
from importlib import import_module
from pathlib import Path
from typing import Any

import fadamgc
from fadamgc import methods

# Public modules besides fadamgc itself; all names in their __all__ are public.
MODULES = (
    *("codecs", "correction", "data", "fields", "flower", "grouped", "local", "metrics", "models"),
    *("rules", "schedules", "server", "tasks", "trackers"),
)
FOLDER = Path(__file__).resolve().parents[1] / "reference"
_LINE = re.compile(r"^::: (fadamgc[\w.]*)$", re.MULTILINE)


def public_names() -> dict[str, Any]:
    """Return all public objects by the names that users write."""
    found = {f"fadamgc.{name}": getattr(fadamgc, name) for name in fadamgc.__all__}
    for module in MODULES:
        inside = import_module("fadamgc.flower") if module == "flower" else getattr(fadamgc, module)
        found |= {f"fadamgc.{module}.{name}": getattr(inside, name) for name in inside.__all__}
    return {name: value for name, value in found.items() if not inspect.ismodule(value)}


def method_names() -> set[str]:
    """Return the public names of the registered methods."""
    return {f"fadamgc.{methods.algorithm_class(name).__name__}" for name in methods.algorithms()}


def documented(texts: Iterable[str]) -> list[str]:
    """Return the names that these pages of the reference document, as often as they do."""
    return [name for text in texts for name in _LINE.findall(text)]


def pages() -> Iterator[str]:
    """Yield the text of all pages of the reference."""
    yield from (path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md")))


def has_example(name: str, value: Any) -> bool:
    """Whether the docstring of an object has an example, or that of its module one that uses it."""
    module = inspect.getdoc(inspect.getmodule(value)) or ""
    own = [example.source for example in _examples(inspect.getdoc(value) or "")]
    short = name.rpartition(".")[2]
    return bool(own) or any(re.search(rf"\b{short}\b", example.source) for example in _examples(module))


def _examples(text: str) -> list[Any]:
    return DocTestParser().get_examples(text)


def home(value: Any) -> str:
    """Return the place of an object's definition, such as ``fadamgc.sim.simulate.simulate``."""
    return f"{value.__module__}.{value.__qualname__}"


def with_homes(text: str) -> str:
    """Return a page with the place of each object's definition, and its public name as the heading."""
    names = public_names()

    def complete(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in names:
            return match.group()
        return f"::: {home(names[name])}\n    options:\n      heading: {name}\n      toc_label: {name}"

    return _LINE.sub(complete, text)


def fenced(text: str) -> str:
    """Return a docstring whose examples are blocks of code.

    >>> print(fenced("Add.\\n\\n>>> 1 + 1\\n2").replace("`", "'"))
    Add.
    <BLANKLINE>
    '''pycon
    >>> 1 + 1
    2
    '''
    """
    lines: list[str] = []
    indent = None
    for line in [*text.splitlines(), ""]:
        if indent is None and line.lstrip().startswith(">>> "):
            indent = line[: len(line) - len(line.lstrip())]
            lines.append(f"{indent}```pycon")
        elif indent is not None and not line.strip():
            lines.append(f"{indent}```")
            indent = None
        lines.append(line)
    return "\n".join(lines[:-1])
