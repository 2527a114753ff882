"""Specs from TOML, with errors that name the place, the key, the value and the nearest known key."""

from __future__ import annotations

import dataclasses
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from fadamgc.errors import InputError, cut, nearest, shown
from fadamgc.experiments.spec.sections import (
    RUNNABLE,
    TASKS,
    CostSpec,
    CustomTask,
    MethodSpec,
    RunSpec,
    Section,
    Spec,
    TaskSpec,
    TuneSpec,
    make_section,
    validated,
)
from fadamgc.methods import algorithm_class, make_algorithm


def load_spec(path: str | Path) -> Spec:
    """Read a spec from a TOML file; whatever is wrong in it is one InputError, a line for each."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give the path of a spec in TOML") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return parse_spec(text, str(path))


def parse_spec(text: str, source: str) -> Spec:
    """A spec from the text of a TOML file; messages name the source."""
    try:
        return spec_of(parse_toml(text))
    except InputError as error:
        lines = str(error).splitlines()
        raise InputError("\n".join(f"{source}: {line}" for line in lines)) from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML file."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"not TOML: {cut(str(error))}") from None
    except ValueError as error:  # of Python: an integer of thousands of digits, a day that does not exist
        raise InputError(f"not TOML: a number or a date is not valid: {cut(str(error))}") from None
    except RecursionError:
        raise InputError("not TOML that can be read: lists or tables are nested too deeply") from None


def spec_of(tables: dict[str, Any]) -> Spec:
    """A spec from the tables of a TOML file."""
    return _spec(frozen(tables))


def task_spec(**table: Any) -> TaskSpec:
    """A [task] section on its own; None stands for a key that is not given."""
    return _task({key: frozen(value) for key, value in table.items() if value is not None})


def presets() -> tuple[str, ...]:
    """Names of the experiments that come with the package."""
    folder = resources.files("fadamgc.experiments.spec") / "presets"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def preset(name: str) -> Spec:
    """An experiment that comes with the package."""
    if name not in presets():
        raise InputError(
            f"preset {shown(name)} is not known{nearest(name, presets())}; known are {', '.join(presets())}"
        )
    file = resources.files("fadamgc.experiments.spec") / "presets" / f"{name}.toml"
    return parse_spec(file.read_text(encoding="utf-8"), f"preset {name}")


# From tables to sections.

T = TypeVar("T")

SECTIONS = ("task", "run", "cost", "tune", "method")


def _spec(tables: dict[str, Any]) -> Spec:
    problems: list[str] = []

    def attempt(make: Callable[[], T]) -> T | None:
        try:
            return make()
        except InputError as error:
            problems.append(str(error))
            return None

    for key in tables:
        if key not in ("name", "title", *SECTIONS):
            hint = nearest(key, ("name", "title", *SECTIONS))
            problems.append(f"there is no key or section {shown(key)}{hint}")
    for key in ("task", "run", "cost", "tune"):
        if not isinstance(tables.get(key, {}), dict):
            raise InputError(f"{key} must be a table, [{key}]")
    given = tables.get("method", ())
    if not isinstance(given, tuple) or not all(isinstance(m, dict) for m in given):
        raise InputError("method must be a list of tables; write each as [[method]]")
    parts: dict[str, Any] = {key: tables[key] for key in ("name", "title") if key in tables}
    problems += [f"there is no section [{key}]" for key in ("task", "run") if key not in tables]
    if "task" in tables:
        parts["task"] = attempt(lambda: _task(tables["task"]))
    classes: dict[str, type[Section]] = {"run": RunSpec, "cost": CostSpec, "tune": TuneSpec}
    for key, cls in classes.items():
        if key in tables:
            parts[key] = attempt(lambda cls=cls, key=key: make_section(cls, tables[key], f"[{key}]"))  # type: ignore[misc]
    from_program = isinstance(parts.get("task"), CustomTask)
    make = _saved_method if from_program else _method
    methods = [attempt(lambda i=i, m=m: make(m, i)) for i, m in enumerate(given, start=1)]  # type: ignore[misc]
    if problems:
        raise InputError("\n".join(problems))
    return validated(Spec, parts | {"methods": tuple(methods)}, "")


def _task(table: dict[str, Any]) -> TaskSpec:
    if "data" not in table:
        raise InputError(f"[task] needs the key 'data', one of {', '.join(map(repr, RUNNABLE))}")
    data = table["data"]
    if not isinstance(data, str) or data not in TASKS:
        hint = nearest(data, RUNNABLE) if isinstance(data, str) else ""
        if isinstance(data, str) and data.lower().endswith((".csv", ".parquet")):
            hint = "; for texts of your own, use fadamgc.tasks.text in Python"
        known = ", ".join(map(repr, RUNNABLE))
        raise InputError(f"[task] data={shown(data)} is not accepted; it must be one of {known}{hint}")
    return make_section(TASKS[data], table, f"[task] with data='{data}'")


def _saved_method(table: dict[str, Any], number: int) -> MethodSpec:
    """A method as a program has saved it, whose algorithm need not be known here."""
    own = set(MethodSpec.model_fields) - {"hyperparameters"}
    plain = {"label": str(table.get("algorithm"))} | {key: table[key] for key in own if key in table}
    hyperparameters = {key: value for key, value in table.items() if key not in own}
    return make_section(MethodSpec, plain | {"hyperparameters": hyperparameters}, f"[[method]] {number}")


def _method(table: dict[str, Any], number: int) -> MethodSpec:
    place = f"[[method]] {number}"
    if "algorithm" not in table:
        raise InputError(f"{place} needs the key 'algorithm'")
    name = table["algorithm"]
    if not isinstance(name, str):
        raise InputError(f"{place}: algorithm={shown(name)} is not accepted; it must be a name")
    own = ("algorithm", "label", "tracked")
    try:
        cls = algorithm_class(name)
        known = [*own, *(field.name for field in dataclasses.fields(cls))]
        for key in table:
            if key not in known:
                raise InputError(
                    f"{name} has no key {shown(key)}{nearest(key, known)}; it has {', '.join(known)}"
                )
        hyperparameters = {key: value for key, value in table.items() if key not in own}
        make_algorithm(name, **hyperparameters)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
    plain = {"label": cls.title} | {key: table[key] for key in own if key in table}
    return make_section(MethodSpec, plain | {"hyperparameters": hyperparameters}, place)


DEEPEST = 20  # tables and lists within each other; a spec has three
INTEGERS = range(-(2**63), 2**63)  # that TOML has


def frozen(value: Any, place: str = "", depth: int = 0) -> Any:
    """Lists as tuples, all the way down; what TOML does not have, or no spec has, is refused."""
    if depth > DEEPEST:
        raise InputError(f"{cut(place, 100)}: lists or tables are nested too deeply")
    if isinstance(value, dict):
        return {
            key: frozen(item, f"{place}.{key}" if place else key, depth + 1) for key, item in value.items()
        }
    if isinstance(value, list):
        return tuple(frozen(item, place, depth + 1) for item in value)
    if isinstance(value, int) and value not in INTEGERS:
        raise InputError(
            f"{cut(place, 100)}={shown(value)} is not accepted; integers go from -2^63 to 2^63 - 1"
        )
    return value
