"""The paper's experiments: one or several specs under a name, at two scales.

A study is a TOML file with the sections of a spec and, beside them,

- ``[laptop.*]`` and ``[paper.*]``: what differs between the scales; ``[paper.eta_l]`` and ``[paper.eta_g]``
  have a step size for each algorithm,
- ``[[cell]]``: one spec each, with what differs from the others; ``value`` is where it stands on the axis
  of a figure. Without cells the study is a single spec.
- ``[study]``: ``axis``, the name of that axis; ``tune_on``, the cell whose step sizes all cells use; and
  ``measures``, what tables and figure show.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

from fadamgc.errors import InputError, nearest
from fadamgc.experiments.report.summary import TITLES, TO_TARGET
from fadamgc.experiments.spec.sections import STEPS, Spec, folder_name
from fadamgc.experiments.spec.toml_io import preset, presets, spec_of
from fadamgc.files import write_atomic

Scale: TypeAlias = Literal["laptop", "paper"]
SCALES: tuple[Scale, ...] = ("laptop", "paper")


@dataclass(frozen=True)
class Cell:
    """One spec of a study."""

    name: str
    spec: Spec
    value: float | None = None  # on the axis of a figure
    group: str | None = None  # cells that are drawn together
    axis: str | None = None  # if theirs is not the study's


@dataclass(frozen=True)
class Study:
    """Specs that belong together."""

    name: str
    title: str
    scale: Scale
    cells: tuple[Cell, ...]
    axis: str | None = None
    tune_on: str | None = None
    measures: tuple[str, ...] = TO_TARGET

    def left(self, done: int) -> float:
        """How much of the study is left after some of its ordered cells, as a share of what was done."""
        work = [_work(cell.spec) for cell in self.ordered()]
        return sum(work[done:]) / sum(work[:done])

    def ordered(self) -> tuple[Cell, ...]:
        """The cells, the one whose step sizes the others use first."""
        return tuple(sorted(self.cells, key=lambda cell: cell.name != self.tune_on))


def _work(spec: Spec) -> float:
    """Client-steps of an experiment; an epoch counts as one."""
    run = spec.run
    sampled = run.sampled or spec.task.clients
    return len(spec.methods) * len(run.seeds) * run.rounds * sampled * (run.local_steps or 1)


def studies() -> tuple[str, ...]:
    """Names of the studies that come with the package; every preset is one, too."""
    return tuple(sorted({*_files(), *presets()}))


def load_study(name: str, scale: str = "laptop") -> Study:
    """A study that comes with the package."""
    if name not in studies():
        known = studies()
        raise InputError(f"study {name!r} is not known{nearest(name, known)}; known are {', '.join(known)}")
    if scale not in SCALES:
        raise InputError(f"scale={scale!r} is not accepted; it must be 'laptop' or 'paper'")
    if name in presets():  # small enough for every scale
        spec = preset(name)
        return Study(
            name, spec.title or name, "laptop" if scale == "laptop" else "paper", (Cell(name, spec),)
        )
    text = _files()[name].read_text(encoding="utf-8")
    return parse_study(text, f"study {name}", "laptop" if scale == "laptop" else "paper")


def parse_study(text: str, source: str, scale: Scale) -> Study:
    """A study from the text of its file; messages name the source."""
    try:
        tables = tomllib.loads(text)
        return _study(tables, scale)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source}: not TOML: {error}") from None
    except InputError as error:
        lines = str(error).splitlines()
        raise InputError("\n".join(f"{source}: {line}" for line in lines)) from None


# In the folder of a study with several cells: which of them are where.

STUDY = "study.json"


class SavedCell(NamedTuple):
    """A cell of a study in a folder."""

    name: str
    folder: str
    value: float | None
    group: str | None
    axis: str | None


class SavedStudy(NamedTuple):
    """A study in a folder."""

    name: str
    title: str
    scale: str
    axis: str | None
    measures: list[str]
    cells: list[SavedCell]


def write_study(study: Study, folder: Path) -> None:
    """Write down what will be in the folder; another study that is there is not replaced."""
    cells = [SavedCell(c.name, c.spec.name, c.value, c.group, c.axis)._asdict() for c in study.cells]
    facts = SavedStudy(study.name, study.title, study.scale, study.axis, list(study.measures), [])
    there = read_study(folder)
    if there is not None and (there.name, there.scale) != (study.name, study.scale):
        raise InputError(
            f"out={str(folder)!r} holds the study {there.name} at scale {there.scale}; give another folder"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_atomic(folder / STUDY, json.dumps(facts._asdict() | {"cells": cells}, indent=1).encode())
    except OSError as error:
        raise InputError(f"out={str(folder)!r} cannot be written: {error.strerror}") from None


def read_study(folder: Path) -> SavedStudy | None:
    """The study in a folder, or None."""
    path = folder / STUDY
    if not path.is_file():
        return None
    try:
        facts = json.loads(path.read_bytes())
        cells = [SavedCell(**cell) for cell in facts["cells"]]
        study = SavedStudy(**facts | {"cells": cells})
        texts = [study.name, study.title, study.scale, *(cell.name for cell in cells)]
        texts += [text for text in (study.axis, *(t for c in cells for t in (c.group, c.axis))) if text]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("its names must be texts")
        if not all(isinstance(cell.value, int | float | None) for cell in cells):
            raise TypeError("the value of a cell must be a number")
        if not isinstance(study.measures, list) or not all(measure in TITLES for measure in study.measures):
            raise ValueError(f"measures={study.measures!r}; known are {', '.join(TITLES)}")
        for cell in cells:
            folder_name(cell.folder)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError(f"{path}: not what `fadamgc reproduce` wrote there ({error})") from None
    for cell in cells:
        check_inside(folder, folder / cell.folder, f"{path}: folder")
    return study


def check_inside(folder: Path, path: Path, name: str) -> None:
    """Refuse a path that leads out of a folder, by ``..`` or by a symbolic link; the name is the error's."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"{name}={str(path)!r} leads out of {str(folder)!r}; give a folder without such links"
        )


def _files() -> dict[str, Any]:
    folder = resources.files("fadamgc.paper") / "studies"
    return {f.name.removesuffix(".toml"): f for f in folder.iterdir() if f.name.endswith(".toml")}


def _study(tables: dict[str, Any], scale: Scale) -> Study:
    facts = tables.pop("study", {})
    cells = tables.pop("cell", [{}])
    at = {name: tables.pop(name, {}) for name in SCALES}
    made = []
    for cell in cells:
        own = {name: cell.pop(name, {}) for name in SCALES}
        name = cell.pop("name", tables["name"])
        value, group, axis = (cell.pop(key, None) for key in ("value", "group", "axis"))
        merged = tables
        for more in (at[scale], cell, own[scale]):
            merged = _merged(merged, more)
        if len(cells) > 1:
            merged |= {"name": re.sub(r"[^\w.-]+", "-", name).strip("-"), "title": name}
        made.append(Cell(name, spec_of(_with_steps(merged)), value, group, axis))
    names = [cell.name for cell in made]
    tune_on = facts.get("tune_on")
    if len(set(names)) != len(names):
        raise InputError(f"two cells have the same name: {', '.join(names)}")
    if tune_on is not None and tune_on not in names:
        raise InputError(f"[study] tune_on={tune_on!r} is no cell; it has {', '.join(names)}")
    measures = tuple(facts.get("measures", TO_TARGET))
    for measure in measures:
        if measure not in TITLES:
            raise InputError(f"[study] measures: {measure!r} is not known; known are {', '.join(TITLES)}")
    title = tables.get("title", tables["name"])
    return Study(tables["name"], title, scale, tuple(made), facts.get("axis"), tune_on, measures)


def _merged(base: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Tables over tables; ``every_method`` holds keys for all methods; lists are replaced."""
    result = dict(base)
    for key, value in more.items():
        if key == "every_method":
            result["method"] = [method | value for method in result.get("method", [])]
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _merged(result[key], value)
        else:
            result[key] = value
    return result


def _with_steps(tables: dict[str, Any]) -> dict[str, Any]:
    """The step sizes given by algorithm, as keys of the methods."""
    steps = {key: tables.get(key, {}) for key in STEPS}
    rest = {key: value for key, value in tables.items() if key not in steps}
    for key, values in steps.items():
        known = {method.get("algorithm") for method in rest.get("method", [])}
        for algorithm in values:
            if algorithm not in known:
                raise InputError(f"[{key}] {algorithm} is no method of the study")
        rest["method"] = [
            method | ({key: values[method["algorithm"]]} if method.get("algorithm") in values else {})
            for method in rest.get("method", [])
        ]
    return rest
