"""The paper's experiments as studies: named sets of specs, at up to three scales.

A study is a TOML file with the sections of a spec and, in addition,

- ``[laptop.*]``, ``[desk.*]`` and ``[paper.*]``: the settings in which the scales differ; a study has the
  scales that it has settings for. ``[paper.eta_l]`` and ``[paper.eta_g]`` have one step size per algorithm,
- ``[[experiment]]``: the settings in which an experiment differs from the others; ``value`` is its place
  on the axis of a figure. Without these tables the study is a single experiment,
- ``[study]``: ``axis``, the title of that axis; ``tune_on``, the experiment whose step sizes all use;
  ``measures``, which the tables and the figure show; and ``rows`` and ``maps``, for maps of two axes: ``row``
  is then an experiment's place on the second axis, whose title is ``rows``.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from fadamgc.errors import InputError, nearest, not_accepted
from fadamgc.experiments.folder import PARTITION, RUNS, SPEC, TUNED_SPEC, TUNING_TABLE, ExperimentFolder
from fadamgc.experiments.planned_run import DIVERGED_RECORD, RECORDS
from fadamgc.experiments.report.numbers import MEASURES, TO_TARGET, ReportedExperiment
from fadamgc.experiments.report.write import read_experiment, write_files, write_summary
from fadamgc.experiments.spec.sections import STEPS, Spec, folder_name
from fadamgc.experiments.spec.toml_io import PRESETS, naming, spec_of, toml_files, unknown
from fadamgc.files import write_atomic
from fadamgc.paper.regimes import CAPTION, RegimeMap, map_files
from fadamgc.paper.theory import bounds_files
from fadamgc.toml import parse_toml

SCALES = ("laptop", "desk", "paper")
STUDIES = PRESETS | toml_files("fadamgc.paper", "studies")  # a preset is the same at all scales
STUDY = "study.json"  # in the folder of a study with several experiments; each experiment has a subfolder
# The files that ``keep`` copies in addition to the records of runs: no weights, no page.
KEPT = (
    *(SPEC, PARTITION, TUNING_TABLE, TUNED_SPEC, "results.csv", "results.md", "results.tex", "curves.png"),
    *(STUDY, "summary.csv", "summary.md", "summary.tex", "summary.png"),
    *("bounds.csv", "bounds.md", "bounds.png", "map.csv", "map.md", "map.png"),
)


class SavedMember(BaseModel):
    """An experiment of a study, as in ``study.json``."""

    model_config = ConfigDict(extra="forbid", strict=True)
    name: str
    folder: Annotated[str, AfterValidator(folder_name)]
    value: int | float | None  # on the axis of a figure
    row: int | float | None = None  # on the second axis of a map
    group: str | None  # members of a group are drawn together
    axis: str | None  # if it differs from the study's


class SavedStudy(BaseModel):
    """A study, as in ``study.json``."""

    model_config = ConfigDict(extra="forbid", strict=True, populate_by_name=True)
    name: str
    title: str
    scale: str
    axis: str | None
    measures: tuple[Literal["rounds", "minutes", "final", "average"], ...]
    rows: str | None = None
    maps: tuple[RegimeMap, ...] = ()
    members: tuple[SavedMember, ...] = Field(alias="cells")


class Member(SavedMember):
    """An experiment of a study, with its spec."""

    spec: Spec = Field(exclude=True)


class Study(SavedStudy):
    """Experiments that belong together."""

    members: tuple[Member, ...] = Field(alias="cells")
    tune_on: str | None = Field(exclude=True)

    def left(self, done: int) -> float:
        """Return how much work is left after ``done`` of the ordered members, relative to the work done."""
        work = [_client_steps(member.spec) for member in self.ordered()]
        return sum(work[done:]) / sum(work[:done])

    def ordered(self) -> tuple[Member, ...]:
        """Return the members, first the member whose step sizes all others use."""
        return tuple(sorted(self.members, key=lambda member: member.name != self.tune_on))


def _client_steps(spec: Spec) -> float:
    """Count the local steps of all clients; an epoch counts as one step, as do the steps of a function."""
    run = spec.run
    sampled = run.sampled or spec.task.clients
    steps: float = run.local_steps if isinstance(run.local_steps, int) else 1
    if isinstance(run.local_steps, tuple):
        steps = fmean(run.local_steps)
    return len(spec.methods) * len(run.seeds) * run.rounds * sampled * steps


# Studies of the package.


def studies() -> tuple[str, ...]:
    """List the studies of the package; every preset is also a study."""
    return tuple(sorted(STUDIES))


def load_study(name: str, scale: str = "laptop") -> Study:
    """Load a study of the package."""
    if scale not in SCALES:
        raise not_accepted("scale", scale, "'laptop', 'desk' or 'paper'")
    return parse_study(_text(name), f"study {name}", scale)


def scales_of(name: str) -> tuple[str, ...]:
    """List the scales of a study of the package."""
    return _scales(parse_toml(_text(name)))


def _text(name: str) -> str:
    if name not in studies():
        raise unknown("study", name, studies())
    return STUDIES[name].read_text(encoding="utf-8")


def _scales(tables: Mapping[str, Any]) -> tuple[str, ...]:
    """List the scales that the tables of a study have settings for; all if they have none for any."""
    named = {key for table in (tables, *tables.get("experiment", ())) for key in table}
    return tuple(scale for scale in SCALES if scale in named) or SCALES


def parse_study(text: str, source: str, scale: str) -> Study:
    """Parse the text of a study; error messages name the source."""
    with naming(source):
        return _study(parse_toml(text), scale)


def _study(tables: dict[str, Any], scale: str) -> Study:
    if scale not in (scales := _scales(tables)):
        raise InputError(f"it has no scale {scale!r}; give --scale {' or '.join(scales)}")
    settings = tables.pop("study", {})
    experiments = tables.pop("experiment", [{}])
    at_scale = {name: tables.pop(name, {}) for name in SCALES}[scale]
    members = []
    for experiment in experiments:
        member_at_scale = {name: experiment.pop(name, {}) for name in SCALES}[scale]
        name = experiment.pop("name", tables["name"])
        place = {key: experiment.pop(key, None) for key in ("value", "row", "group", "axis")}
        merged = tables
        for changes in (at_scale, experiment, member_at_scale):
            merged = _merged(merged, changes)
        if len(experiments) > 1:
            merged |= {"name": re.sub(r"[^\w.-]+", "-", name).strip("-"), "title": name}
        spec = spec_of(_with_steps(merged))
        members.append(Member(name=name, folder=spec.name, spec=spec, **place))
    names = [member.name for member in members]
    tune_on, measures = settings.get("tune_on"), tuple(settings.get("measures", TO_TARGET))
    if len(set(names)) != len(names):
        raise InputError(f"two experiments have the same name: {', '.join(names)}")
    if tune_on is not None and tune_on not in names:
        raise InputError(f"[study] tune_on={tune_on!r} is not an experiment; it has {', '.join(names)}")
    for measure in measures:
        if measure not in MEASURES:
            raise InputError(f"[study] measures: {measure!r} is not known; known are {', '.join(MEASURES)}")
    maps = settings.get("maps", ())
    if maps and not (settings.get("axis") and settings.get("rows")):
        raise InputError("[study] maps need the titles of their axes, axis and rows")
    labels = {method.label for member in members for method in member.spec.methods}
    for wanted in maps:
        for label in (wanted["method"], *wanted["rivals"]):
            if label not in labels:
                raise InputError(
                    f"[study] maps: {label!r} is not the label of a method{nearest(label, labels)}"
                )
    title, axis = tables.get("title", tables["name"]), settings.get("axis")
    facts = {"name": tables["name"], "title": title, "scale": scale, "axis": axis, "tune_on": tune_on}
    return Study(
        **facts, measures=measures, rows=settings.get("rows"), maps=tuple(maps), members=tuple(members)
    )


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Merge changes into tables; a list replaces a list; the keys in ``every_method`` go into all methods."""
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
    methods = [dict(method) for method in tables.get("method", [])]
    for key in STEPS:
        for algorithm, size in tables.get(key, {}).items():
            chosen = [method for method in methods if method.get("algorithm") == algorithm]
            if not chosen:
                raise InputError(f"[{key}] {algorithm} is not a method of the study")
            for method in chosen:
                method[key] = size
    return {key: value for key, value in tables.items() if key not in STEPS} | {"method": methods}


# The folder of a study.


def write_study(study: Study, folder: Path) -> None:
    """Write ``study.json``; another study in the folder is not replaced."""
    old = read_study(folder)
    if old is not None and (old.name, old.scale) != (study.name, study.scale):
        raise InputError(
            f"out={str(folder)!r} has the study {old.name} at scale {old.scale}; give another folder"
        )
    write_files(folder, {STUDY: json.dumps(study.model_dump(by_alias=True), indent=1).encode()})


def read_study(folder: Path) -> SavedStudy | None:
    """Read the study in a folder; None if there is none."""
    path = folder / STUDY
    if not path.is_file():
        return None
    try:
        study = SavedStudy.model_validate_json(path.read_bytes())
    except ValidationError as error:
        first = error.errors()[0]
        reason = f"{'.'.join(map(str, first['loc']))}: {first['msg']}".removeprefix(": ")
        raise InputError(f"{path}: not what `fadamgc reproduce` wrote there ({reason})") from None
    for member in study.members:
        check_inside(folder, folder / member.folder, f"{path}: folder")
    return study


def read_members(folder: Path, study: SavedStudy, cost: Mapping[str, Any] = {}) -> list[ReportedExperiment]:
    """Read those experiments of a study that have run."""
    return [
        read_experiment(folder / member.folder, cost)._replace(**member.model_dump(exclude={"folder"}))
        for member in study.members
        if ExperimentFolder(folder / member.folder).has_spec
    ]


def write_study_report(
    folder: str | Path, cost: Mapping[str, Any] = {}, out: str | Path | None = None
) -> list[Path]:
    """Write the tables, figures and page of a study into its folder, or into another."""
    folder = Path(folder)
    study = read_study(folder)
    if study is None:
        raise InputError(f"folder={str(folder)!r} has no {STUDY}; `fadamgc reproduce` writes one")
    experiments = read_members(folder, study, cost)
    to = folder if out is None else out
    more = bounds_files(experiments)
    axis = None if study.maps else study.axis  # maps show what the panels of the figure would
    figures = {}
    if study.maps and study.axis is not None and study.rows is not None:
        more |= (files := map_files(experiments, study.maps, study.axis, study.rows, study.title))
        figures = {CAPTION: files["map.png"]} if files else {}
    return write_summary(to, experiments, study.title, axis, study.measures, more, figures)


def keep(folder: str | Path, to: str | Path) -> int:
    """Copy the records, tables and some figures of an experiment or a study; return the bytes written.

    Records are compressed. ``fadamgc report`` makes the other files again from the copy.
    """
    folder, to = Path(folder), Path(to)
    study = read_study(folder)
    if study is None and not ExperimentFolder(folder).has_experiment:
        raise InputError(
            f"folder={str(folder)!r} has no {SPEC} and no {STUDY}; run an experiment there first"
        )
    folders = [folder, *(folder / member.folder for member in (study.members if study else ()))]
    paths = [path / name for path in folders for name in KEPT]
    runs = [run for path in folders for run in sorted(path.glob(f"{RUNS}/*"))]
    paths += [run / name for run in runs for name in (*RECORDS, DIVERGED_RECORD)]
    total = 0
    try:
        for path in filter(Path.is_file, paths):
            target = to / path.relative_to(folder)
            check_inside(folder, path, "folder")
            check_inside(to, target, "to")
            target.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            if path.name == "run.json":
                target, data = target.with_name("run.json.gz"), gzip.compress(data, mtime=0)
            write_atomic(target, data)
            total += len(data)
    except OSError as error:
        raise InputError(f"to={str(to)!r} cannot be written: {error.strerror}") from None
    return total


def check_inside(folder: Path, path: Path, argument: str) -> None:
    """Refuse a path that leads out of a folder, by ``..`` or by a symbolic link."""
    if not path.resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"{argument}={str(path)!r} leads out of {str(folder)!r}; give a folder without such links"
        )
