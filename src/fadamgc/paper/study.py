"""The paper's experiments as studies: sets of specs under a name, at two scales.

A study is a TOML file with the sections of a spec and, in addition,

- ``[laptop.*]`` and ``[paper.*]``: what differs between the scales; ``[paper.eta_l]`` and ``[paper.eta_g]``
  have a step size per algorithm,
- ``[[experiment]]``: one spec each, with what differs from the others; ``value`` is its place on the axis
  of a figure. Without these tables the study is a single spec.
- ``[study]``: ``axis``, the title of that axis; ``tune_on``, the experiment whose step sizes all use; and
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
from typing import Annotated, Any, Literal, TypeAlias, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fadamgc.errors import InputError, nearest
from fadamgc.experiments.folder import SPEC, ExperimentFolder
from fadamgc.experiments.report.numbers import MEASURES, TO_TARGET, ReportedExperiment
from fadamgc.experiments.report.write import (
    check_inside,
    copy_files,
    kept_files,
    read_experiment,
    write_files,
    write_summary,
)
from fadamgc.experiments.spec.sections import STEPS, Spec, folder_name
from fadamgc.experiments.spec.toml_io import preset, presets, spec_of
from fadamgc.federation.cost import CostModel
from fadamgc.paper.theory import bounds_files

Scale: TypeAlias = Literal["laptop", "paper"]
SCALES: tuple[Scale, ...] = get_args(Scale)


@dataclass(frozen=True)
class Member:
    """One experiment of a study."""

    name: str
    spec: Spec
    value: float | None = None  # on the axis of a figure
    group: str | None = None  # members of a group are drawn together
    axis: str | None = None  # if it differs from the study's


@dataclass(frozen=True)
class Study:
    """Experiments that belong together."""

    name: str
    title: str
    scale: Scale
    members: tuple[Member, ...]
    axis: str | None = None
    tune_on: str | None = None
    measures: tuple[str, ...] = TO_TARGET

    def left(self, done: int) -> float:
        """Return how much work is left after ``done`` of the ordered members, relative to the work done."""
        work = [_client_steps(member.spec) for member in self.ordered()]
        return sum(work[done:]) / sum(work[:done])

    def ordered(self) -> tuple[Member, ...]:
        """Return the members, first the one whose step sizes the others use."""
        return tuple(sorted(self.members, key=lambda member: member.name != self.tune_on))


def _client_steps(spec: Spec) -> float:
    """Count the local steps of all clients; an epoch counts as one step."""
    run = spec.run
    sampled = run.sampled or spec.task.clients
    return len(spec.methods) * len(run.seeds) * run.rounds * sampled * (run.local_steps or 1)


# Studies of the package.


def studies() -> tuple[str, ...]:
    """List the studies of the package; every preset is also a study."""
    return tuple(sorted({*_files(), *presets()}))


def load_study(name: str, scale: str = "laptop") -> Study:
    """Load a study of the package."""
    if name not in studies():
        known = studies()
        raise InputError(f"study {name!r} is not known{nearest(name, known)}; known are {', '.join(known)}")
    if scale not in SCALES:
        raise InputError(f"scale={scale!r} is not accepted; it must be 'laptop' or 'paper'")
    known_scale: Scale = "laptop" if scale == "laptop" else "paper"
    if name in presets():  # small enough for every scale
        spec = preset(name)
        return Study(name, spec.title or name, known_scale, (Member(name, spec),))
    return parse_study(_files()[name].read_text(encoding="utf-8"), f"study {name}", known_scale)


def _files() -> dict[str, Any]:
    folder = resources.files("fadamgc.paper") / "studies"
    return {f.name.removesuffix(".toml"): f for f in folder.iterdir() if f.name.endswith(".toml")}


def parse_study(text: str, source: str, scale: Scale) -> Study:
    """Parse the text of a study; error messages name the source."""
    try:
        return _study(tomllib.loads(text), scale)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source}: not TOML: {error}") from None
    except InputError as error:
        lines = str(error).splitlines()
        raise InputError("\n".join(f"{source}: {line}" for line in lines)) from None


def _study(tables: dict[str, Any], scale: Scale) -> Study:
    settings = tables.pop("study", {})
    experiments = tables.pop("experiment", [{}])
    at_scale = {name: tables.pop(name, {}) for name in SCALES}[scale]
    members = []
    for experiment in experiments:
        member_at_scale = {name: experiment.pop(name, {}) for name in SCALES}[scale]
        name = experiment.pop("name", tables["name"])
        value, group, axis = (experiment.pop(key, None) for key in ("value", "group", "axis"))
        merged = tables
        for changes in (at_scale, experiment, member_at_scale):
            merged = _merged(merged, changes)
        if len(experiments) > 1:
            merged |= {"name": re.sub(r"[^\w.-]+", "-", name).strip("-"), "title": name}
        members.append(Member(name, spec_of(_with_steps(merged)), value, group, axis))
    names = [member.name for member in members]
    tune_on = settings.get("tune_on")
    if len(set(names)) != len(names):
        raise InputError(f"two experiments have the same name: {', '.join(names)}")
    if tune_on is not None and tune_on not in names:
        raise InputError(f"[study] tune_on={tune_on!r} is not an experiment; it has {', '.join(names)}")
    measures = tuple(settings.get("measures", TO_TARGET))
    for measure in measures:
        if measure not in MEASURES:
            raise InputError(f"[study] measures: {measure!r} is not known; known are {', '.join(MEASURES)}")
    title = tables.get("title", tables["name"])
    return Study(tables["name"], title, scale, tuple(members), settings.get("axis"), tune_on, measures)


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge tables into tables; ``every_method`` has keys for all methods; lists are replaced."""
    result = dict(base)
    for key, value in changes.items():
        if key == "every_method":
            result["method"] = [method | value for method in result.get("method", [])]
        elif isinstance(value, dict) and isinstance(result.get(key), dict):
            result[key] = _merged(result[key], value)
        else:
            result[key] = value
    return result


def _with_steps(tables: dict[str, Any]) -> dict[str, Any]:
    """Move the step sizes that are given by algorithm into the methods."""
    methods = tables.get("method", [])
    known = {method.get("algorithm") for method in methods}
    for key in STEPS:
        sizes = tables.get(key, {})
        for algorithm in sizes:
            if algorithm not in known:
                raise InputError(f"[{key}] {algorithm} is not a method of the study")
        methods = [
            method | ({key: sizes[method["algorithm"]]} if method.get("algorithm") in sizes else {})
            for method in methods
        ]
    return {key: value for key, value in tables.items() if key not in STEPS} | {"method": methods}


# The folder of a study with several experiments: study.json names them, each has a folder.

STUDY = "study.json"
KEPT = (
    *(STUDY, "summary.csv", "summary.md", "summary.tex", "summary.png"),
    *("bounds.csv", "bounds.md", "bounds.png"),
)


class SavedMember(BaseModel):
    """An experiment of a study in a folder."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    folder: Annotated[str, AfterValidator(folder_name)]
    value: int | float | None
    group: str | None
    axis: str | None


class SavedStudy(BaseModel):
    """A study in a folder."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    title: str
    scale: str
    axis: str | None
    measures: list[Literal["rounds", "minutes", "final", "average"]]
    members: list[SavedMember] = Field(alias="cells")


def write_study(study: Study, folder: Path) -> None:
    """Write ``study.json``; another study in the folder is not replaced."""
    old = read_study(folder)
    if old is not None and (old.name, old.scale) != (study.name, study.scale):
        raise InputError(
            f"out={str(folder)!r} holds the study {old.name} at scale {old.scale}; give another folder"
        )
    cells = [
        {"name": m.name, "folder": m.spec.name, "value": m.value, "group": m.group, "axis": m.axis}
        for m in study.members
    ]
    facts = {"name": study.name, "title": study.title, "scale": study.scale, "axis": study.axis}
    saved = facts | {"measures": study.measures, "cells": cells}
    write_files(folder, {STUDY: json.dumps(saved, indent=1).encode()})


def read_study(folder: Path) -> SavedStudy | None:
    """Read the study in a folder; None if there is none."""
    path = folder / STUDY
    if not path.is_file():
        return None
    try:
        study = SavedStudy.model_validate(json.loads(path.read_bytes()))
    except (ValueError, RecursionError) as error:
        reason = str(error)
        if isinstance(error, ValidationError):
            first = error.errors()[0]
            reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}"
        raise InputError(f"{path}: not what `fadamgc reproduce` wrote there ({reason})") from None
    for member in study.members:
        check_inside(folder, folder / member.folder, f"{path}: folder")
    return study


def read_members(folder: Path, study: SavedStudy, cost: CostModel | None = None) -> list[ReportedExperiment]:
    """Read those experiments of a study that have run."""
    return [
        read_experiment(folder / member.folder, cost)._replace(
            name=member.name, value=member.value, group=member.group, axis=member.axis
        )
        for member in study.members
        if ExperimentFolder(folder / member.folder).has_spec
    ]


def write_study_report(
    folder: str | Path, cost: CostModel | None = None, out: str | Path | None = None
) -> list[Path]:
    """Write the tables, figures and page of a study into its folder, or into another."""
    folder = Path(folder)
    study = read_study(folder)
    if study is None:
        raise InputError(f"folder={str(folder)!r} holds no {STUDY}; `fadamgc reproduce` writes one")
    experiments = read_members(folder, study, cost)
    to = folder if out is None else out
    return write_summary(to, experiments, study.title, study.axis, study.measures, bounds_files(experiments))


def keep(folder: str | Path, to: str | Path) -> int:
    """Copy the records, tables and some figures of an experiment or a study; return the bytes written.

    ``fadamgc report`` makes the rest again from the copy.
    """
    folder, to = Path(folder), Path(to)
    study = read_study(folder)
    if study is None and not ExperimentFolder(folder).has_experiment:
        raise InputError(
            f"folder={str(folder)!r} holds no {SPEC} and no {STUDY}; run an experiment there first"
        )
    paths = [path for name in KEPT if (path := folder / name).is_file()] + kept_files(folder)
    for member in () if study is None else study.members:
        paths += kept_files(folder / member.folder)
    return copy_files(folder, to, paths)
