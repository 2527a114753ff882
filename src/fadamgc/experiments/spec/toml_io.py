"""Read specs from TOML; errors name the place, the key, the value and the nearest known key."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypeVar

from fadamgc.errors import InputError, nearest, not_accepted, shown
from fadamgc.experiments.spec.sections import CostSpec, MethodSpec, RunSpec, Spec, TuneSpec
from fadamgc.loading import is_trusted, look_in
from fadamgc.methods import algorithm_class, make_algorithm
from fadamgc.section import Section
from fadamgc.tasks.sections import CustomTask, FunctionTask, TableTask, TaskSpec, TextFileTask, task_spec
from fadamgc.toml import frozen, parse_toml

T = TypeVar("T")


def toml_files(package: str, folder: str) -> dict[str, Traversable]:
    """Return the TOML files in a folder of the package, by their names without the ending."""
    files = {file.name: file for file in (resources.files(package) / folder).iterdir()}
    return {n.removesuffix(".toml"): files[n] for n in sorted(files) if n.endswith(".toml")}


PRESETS = toml_files("fadamgc.experiments.spec", "presets")
SECTIONS: dict[str, type[Section]] = {"run": RunSpec, "cost": CostSpec, "tune": TuneSpec}
TABLES = ("task", *SECTIONS)
# Of a [[method]]; all others are hyperparameters.
METHOD_KEYS = ("algorithm", "label", "tracked", "codec", "aggregation", "privacy")


def load_spec(path: str | Path) -> Spec:
    """Read a spec from a TOML file; all its problems are one InputError, one line per problem."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give the path of a spec in TOML") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    look_in(Path(path).parent)
    return parse_spec(text, str(path))


def parse_spec(text: str, source: str) -> Spec:
    """Read a spec from the text of a TOML file; messages name the source."""
    with naming(source):
        return spec_of(parse_toml(text))


@contextmanager
def naming(source: str) -> Iterator[None]:
    """Put the name of a file in front of every line of an InputError."""
    try:
        yield
    except InputError as error:
        raise InputError(textwrap.indent(str(error), f"{source}: ")) from None


def presets() -> tuple[str, ...]:
    """List the experiments that come with the package."""
    return tuple(PRESETS)


def preset(name: str) -> Spec:
    """Read an experiment that comes with the package."""
    if name not in presets():
        raise unknown("preset", name, presets())
    return parse_spec(PRESETS[name].read_text(encoding="utf-8"), f"preset {name}")


def unknown(kind: str, name: str, known: Sequence[str]) -> InputError:
    """Return the error for a name that the package does not have."""
    return InputError(
        f"{kind} {shown(name)} is not known{nearest(name, known)}; known are {', '.join(known)}"
    )


def spec_of(tables: dict[str, Any]) -> Spec:
    """Make a spec from the tables of a TOML file."""
    tables = frozen(tables)
    problems: list[str] = []

    def attempt(make: Callable[..., T], *arguments: Any) -> T | None:
        try:
            return make(*arguments)
        except InputError as error:
            problems.append(str(error))
            return None

    names = ("name", "title", *TABLES, "method")
    problems += [
        f"there is no key or section {shown(key)}{nearest(key, names)}" for key in tables if key not in names
    ]
    for key in TABLES:
        if not isinstance(tables.get(key, {}), dict):
            raise InputError(f"{key} must be a table, [{key}]")
    method_tables = tables.get("method", ())
    if not isinstance(method_tables, tuple) or not all(isinstance(table, dict) for table in method_tables):
        raise InputError("method must be a list of tables; write each as [[method]]")
    problems += [f"there is no section [{key}]" for key in ("task", "run") if key not in tables]
    parts: dict[str, Any] = {key: tables[key] for key in ("name", "title") if key in tables}
    if "task" in tables:
        parts["task"] = attempt(lambda: _completed(task_spec(**tables["task"])))
    for key, section in SECTIONS.items():
        if key in tables:
            parts[key] = attempt(section.from_table, tables[key], f"[{key}]")
    custom = isinstance(parts.get("task"), CustomTask)
    methods = [attempt(_method, table, i, custom) for i, table in enumerate(method_tables, start=1)]
    if problems:
        raise InputError("\n".join(problems))
    return Spec.from_table(parts | {"methods": tuple(methods)}, "")


def _completed(task: TaskSpec) -> TaskSpec:
    if not (is_trusted() and isinstance(task, FunctionTask | TableTask | TextFileTask)):
        return task
    from fadamgc.tasks.build import completed  # which imports models

    return completed(task)


def _method(table: dict[str, Any], number: int, custom: bool) -> MethodSpec:
    """Make a [[method]]; with ``custom``, for other programs, its algorithm may be unknown."""
    place = f"[[method]] {number}"
    if "algorithm" not in table:
        raise InputError(f"{place} needs the key 'algorithm'")
    name = label = table["algorithm"]
    if not isinstance(name, str):
        raise not_accepted(f"{place}: algorithm", name, "a name")
    hyperparameters = {key: value for key, value in table.items() if key not in METHOD_KEYS}
    if not (custom or (":" in name and not is_trusted())):
        try:
            cls = algorithm_class(name)
            known = [*METHOD_KEYS, *cls.setting_names()]
            for key in table:
                if key not in known:
                    raise InputError(
                        f"{name} has no key {shown(key)}{nearest(key, known)}; it has {', '.join(known)}"
                    )
            label = make_algorithm(name, **hyperparameters).title
        except InputError as error:
            raise InputError(f"{place}: {error}") from None
    plain = {"label": label} | {key: table[key] for key in METHOD_KEYS if key in table}
    return MethodSpec.from_table(plain | {"hyperparameters": hyperparameters}, place)
