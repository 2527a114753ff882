"""An experiment as data: every setting of it, read from and written to TOML.

- ``[task]``: what is learned, and how it is spread over clients
- ``[run]``: rounds, participation, local work, seeds, target
- ``[cost]``: links and devices, to price rounds in simulated minutes
- ``[tune]``: the grid of step sizes and the held-out data (optional)
- ``[[method]]``: an algorithm with its hyperparameters; one table a method
"""

from __future__ import annotations

import dataclasses
import json
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic import model_validator as after_all

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.algorithms import algorithm_class, make_algorithm
from fadamgc.errors import InputError, nearest
from fadamgc.sim.cost import CostModel
from fadamgc.sim.executors import EXECUTORS


class Section(BaseModel):
    """A table of the spec: fixed once made, no key that is not known, no silent conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _distinct(values: tuple[int, ...]) -> tuple[int, ...]:
    if len(set(values)) != len(values):
        raise ValueError("each may be given once")
    return values


def _executor(name: str) -> str:
    known = ["auto", *EXECUTORS]
    if name not in known:
        raise ValueError(f"it must be one of {', '.join(map(repr, known))}{nearest(name, known)}")
    return name


def _weights(value: object) -> object:
    numbers = isinstance(value, tuple) and all(type(w) in (int, float) and w > 0 for w in value)
    if value not in ("uniform", "size") and not numbers:
        raise ValueError("it must be 'uniform', 'size' or a list of numbers > 0, one for each client")
    return value


def _samples(value: object) -> object:
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2 or not all(type(n) is int and n > 0 for n in pair) or pair[0] > pair[1]:
        raise ValueError("it must be a whole number > 0, or [low, high]")
    return value


def _per_client(value: object) -> object:
    numbers = value if isinstance(value, tuple) else (value,)
    if not numbers or not all(type(n) in (int, float) for n in numbers):
        raise ValueError("it must be a number, or a list of numbers, one for each client")
    return value


Count: TypeAlias = Annotated[int, Field(ge=1)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Seeds: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=0)], ...], Field(min_length=1), AfterValidator(_distinct)
]
Steps: TypeAlias = Annotated[tuple[Positive, ...], Field(min_length=1)]
PerClient: TypeAlias = Annotated[Any, BeforeValidator(_per_client)]


class DigitsTask(Section):
    """scikit-learn's digits, classified by a multilayer perceptron."""

    metric: ClassVar[str] = "accuracy"

    data: Literal["digits"]
    model: Literal["mlp"] = "mlp"
    hidden: tuple[Count, ...] = (64,)
    clients: Count = 50
    partition: Literal["dirichlet", "iid", "shards"] = "dirichlet"
    alpha: Positive | None = None  # of dirichlet
    min_size: Count | None = None  # of dirichlet
    shards_per_client: Count | None = None  # of shards

    PARTITION: ClassVar[dict[str, dict[str, Any]]] = {
        "dirichlet": {"alpha": 0.1, "min_size": 1},
        "iid": {},
        "shards": {"shards_per_client": 2},
    }

    @after_all(mode="before")
    @classmethod
    def _partition_keys(cls, table: Any) -> Any:
        """Each partition has keys of its own: fill in their defaults, refuse the others'."""
        if not isinstance(table, dict) or table.get("partition", "dirichlet") not in cls.PARTITION:
            return table
        own = cls.PARTITION[table.get("partition", "dirichlet")]
        for kind, keys in cls.PARTITION.items():
            for key in keys:
                if key not in own and table.get(key) is not None:
                    raise ValueError(
                        f"{key}={table[key]!r} is a setting of partition='{kind}', "
                        f"not of '{table.get('partition', 'dirichlet')}'; leave it out"
                    )
        return own | {key: value for key, value in table.items() if value is not None}


class QuadraticsTask(Section):
    """Quadratics with other curvatures and minimisers for each client; the optimum is known."""

    metric: ClassVar[str] = "excess objective"

    data: Literal["quadratics"]
    clients: Count = 10
    dim: Count = 20
    condition: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 10.0
    spread: NonNegative = 1.0


class LinearRegressionTask(Section):
    """Linear regression with other features and ground truths for each client; the optimum is known."""

    metric: ClassVar[str] = "excess objective"

    data: Literal["linear_regression"]
    clients: Count = 10
    dim: Count = 10
    samples: Annotated[Any, BeforeValidator(_samples)] = 40
    heterogeneity: NonNegative = 1.0
    noise: NonNegative = 0.1


TaskSpec: TypeAlias = DigitsTask | QuadraticsTask | LinearRegressionTask
TASKS: dict[str, type[TaskSpec]] = {
    "digits": DigitsTask,
    "quadratics": QuadraticsTask,
    "linear_regression": LinearRegressionTask,
}


class RunSpec(Section):
    """What all methods have in common; see ``fadamgc.simulate`` for what each setting means."""

    rounds: Count
    sampled: Count | None = None
    tracked: Annotated[int, Field(ge=0)] | None = None
    local_steps: Count | None = None
    local_epochs: Count | None = None
    batch_size: Count | None = None
    seeds: Seeds = (0, 1, 2, 3)
    target: Finite | None = None
    stop_at_target: bool = False
    eval_every: Count = 1
    weights: Annotated[Any, BeforeValidator(_weights)] = "uniform"
    on_nonfinite: Literal["error", "drop"] = "error"
    dtype: Literal["float32", "float64"] = "float32"
    executor: Annotated[str, AfterValidator(_executor)] = "auto"

    @after_all(mode="after")
    def _fits(self) -> RunSpec:
        if (self.local_steps is None) == (self.local_epochs is None):
            raise ValueError(
                f"local_steps={self.local_steps} and local_epochs={self.local_epochs}: give one of the two"
            )
        if self.stop_at_target and self.target is None:
            raise ValueError("stop_at_target=true needs a target")
        return self


class CostSpec(Section):
    """The fields of ``fadamgc.CostModel``."""

    down_mbps: PerClient = 100.0
    up_mbps: PerClient = 100.0
    seconds_per_step: PerClient = 0.0
    latency: PerClient = 0.0
    per_round: Literal["mean", "slowest"] = "mean"

    @after_all(mode="after")
    def _accepted(self) -> CostSpec:
        self.model()
        return self

    def model(self) -> CostModel:
        """The cost model."""
        return CostModel(**self.model_dump())


class TuneSpec(Section):
    """The grid that the step sizes of every method are chosen from, and on what."""

    eta_l: Steps
    eta_g: Steps
    seeds: Seeds = (100, 101)
    rounds: Count
    validation: Annotated[float, Field(ge=0.01, le=0.99)] = 0.25  # share of the TRAIN data


class MethodSpec(Section):
    """A row of the table: an algorithm, its hyperparameters, and what it is called."""

    algorithm: str
    label: Annotated[str, Field(min_length=1)]
    tracked: Annotated[int, Field(ge=0)] | None = None  # None: as in [run]
    hyperparameters: dict[str, Any] = Field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The label as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-") or "method"

    def make(self) -> AnyAlgorithm:
        """The algorithm."""
        return make_algorithm(self.algorithm, **self.hyperparameters)

    def with_(self, **hyperparameters: Any) -> MethodSpec:
        """The same method with some hyperparameters replaced."""
        return self.model_copy(update={"hyperparameters": self.hyperparameters | hyperparameters})


class Spec(Section):
    """An experiment: methods that are compared on one task, under the same settings."""

    name: Annotated[str, Field(min_length=1)] = "experiment"
    title: str | None = None
    task: TaskSpec = Field(discriminator="data")
    run: RunSpec
    cost: CostSpec = CostSpec()
    tune: TuneSpec | None = None
    methods: tuple[MethodSpec, ...]

    @after_all(mode="after")
    def _distinct_labels(self) -> Spec:
        if not self.methods:
            raise ValueError("there is no [[method]]; give at least one")
        seen: dict[str, int] = {}
        for number, method in enumerate(self.methods, start=1):
            if method.slug in seen:
                raise ValueError(
                    f"[[method]] {seen[method.slug]} and {number} are both called {method.label!r}; "
                    "give one of them another label"
                )
            seen[method.slug] = number
        return self

    @after_all(mode="after")
    def _one_entry_a_client(self) -> Spec:
        for place, section in (("[cost]", self.cost), ("[run]", self.run)):
            for key, value in section:
                if key != "seeds" and isinstance(value, tuple) and len(value) != self.task.clients:
                    raise ValueError(
                        f"{place} {key} has {len(value)} entries; "
                        f"give one number, or one for each of {self.task.clients} clients"
                    )
        return self

    @after_all(mode="after")
    def _target_can_be_met(self) -> Spec:
        target = self.run.target
        if target is not None and self.task.metric == "accuracy" and not 0 <= target <= 1:
            raise ValueError(f"[run] target={target!r} is no share; accuracy goes from 0 to 1, 0.9 is 90 %")
        if target is not None and self.task.metric != "accuracy" and target <= 0:
            raise ValueError(f"[run] target={target!r} is out of reach; {self.task.metric} is above 0")
        return self

    def tracked(self, method: MethodSpec) -> int | None:
        """How many sampled clients are tracked under a method; None is all of them."""
        return self.run.tracked if method.tracked is None else method.tracked

    def replace(self, section: str, **values: Any) -> Spec:
        """The spec with some values of one section replaced, checked again."""
        old = getattr(self, section).model_dump(exclude_none=True)
        table = old | {key: value for key, value in values.items() if value is not None}
        return Spec(**{**dict(self), section: _section(type(getattr(self, section)), table, f"[{section}]")})

    def only(self, names: Iterable[str]) -> Spec:
        """The spec with some of its methods, named by label or algorithm."""
        chosen: list[MethodSpec] = []
        for name in names:
            found = [m for m in self.methods if name.lower() in (m.label.lower(), m.slug, m.algorithm)]
            if not found:
                known = [m.algorithm for m in self.methods]
                raise InputError(
                    f"method {name!r} is not in the spec{nearest(name, known)}; it has {', '.join(known)}"
                )
            chosen += [m for m in found if m not in chosen]
        return Spec(**{**dict(self), "methods": tuple(m for m in self.methods if m in chosen)})

    def to_toml(self) -> str:
        """The spec as a file that ``load_spec`` reads back."""
        top = {"name": self.name, "title": self.title}
        parts = [_table("", top)]
        parts += [
            _table(f"[{name}]", getattr(self, name).model_dump())
            for name in ("task", "run", "cost", "tune")
            if getattr(self, name) is not None
        ]
        for method in self.methods:
            plain = method.model_dump(exclude={"hyperparameters"})
            parts.append(_table("[[method]]", plain | method.hyperparameters))
        return "\n".join(parts)


def load_spec(path: str | Path) -> Spec:
    """Read a spec from a TOML file; whatever is wrong in it is one InputError, a line for each."""
    path = Path(path)
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise InputError(f"{path} does not exist; give the path of a spec in TOML") from None
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    return parse_spec(text, str(path))


def parse_spec(text: str, source: str) -> Spec:
    """A spec from the text of a TOML file; messages name the source."""
    try:
        tables = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{source}: not TOML: {error}") from None
    try:
        return _spec(_frozen(tables))
    except InputError as error:
        lines = str(error).splitlines()
        raise InputError("\n".join(f"{source}: {line}" for line in lines)) from None


def task_spec(**table: Any) -> TaskSpec:
    """A [task] section on its own; None stands for a key that is not given."""
    return _task({key: _frozen(value) for key, value in table.items() if value is not None})


def presets() -> tuple[str, ...]:
    """Names of the experiments that come with the package."""
    folder = resources.files("fadamgc.experiments") / "presets"
    return tuple(sorted(f.name.removesuffix(".toml") for f in folder.iterdir() if f.name.endswith(".toml")))


def preset(name: str) -> Spec:
    """An experiment that comes with the package."""
    if name not in presets():
        raise InputError(
            f"preset {name!r} is not known{nearest(name, presets())}; known are {', '.join(presets())}"
        )
    file = resources.files("fadamgc.experiments") / "presets" / f"{name}.toml"
    return parse_spec(file.read_text(encoding="utf-8"), f"preset {name}")


# From tables to sections.

T = TypeVar("T")
S = TypeVar("S", bound=Section)

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
            problems.append(f"there is no key or section {key!r}{hint}")
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
            parts[key] = attempt(lambda cls=cls, key=key: _section(cls, tables[key], f"[{key}]"))  # type: ignore[misc]
    methods = [attempt(lambda i=i, m=m: _method(m, i)) for i, m in enumerate(given, start=1)]  # type: ignore[misc]
    if problems:
        raise InputError("\n".join(problems))
    return _validated(Spec, parts | {"methods": tuple(methods)}, "")


def _task(table: dict[str, Any]) -> TaskSpec:
    if "data" not in table:
        raise InputError(f"[task] needs the key 'data', one of {', '.join(map(repr, TASKS))}")
    data = table["data"]
    if data not in TASKS:
        hint = nearest(str(data), TASKS)
        raise InputError(
            f"[task] data={data!r} is not accepted; it must be one of {', '.join(map(repr, TASKS))}{hint}"
        )
    return _section(TASKS[data], table, f"[task] with data='{data}'")


def _method(table: dict[str, Any], number: int) -> MethodSpec:
    place = f"[[method]] {number}"
    if "algorithm" not in table:
        raise InputError(f"{place} needs the key 'algorithm'")
    name = str(table["algorithm"])
    own = ("algorithm", "label", "tracked")
    try:
        cls = algorithm_class(name)
        known = [*own, *(field.name for field in dataclasses.fields(cls))]
        for key in table:
            if key not in known:
                raise InputError(f"{name} has no key {key!r}{nearest(key, known)}; it has {', '.join(known)}")
        hyperparameters = {key: value for key, value in table.items() if key not in own}
        make_algorithm(name, **hyperparameters)
    except InputError as error:
        raise InputError(f"{place}: {error}") from None
    plain = {"label": cls.title} | {key: table[key] for key in own if key in table}
    return _section(MethodSpec, plain | {"hyperparameters": hyperparameters}, place)


def _section(cls: type[S], table: dict[str, Any], place: str) -> S:
    for key in table:
        if key not in cls.model_fields:
            hint = nearest(key, cls.model_fields) or f"; it has {', '.join(cls.model_fields)}"
            raise InputError(f"{place} has no key {key!r}{hint}")
    return _validated(cls, table, place)


def _validated(cls: type[S], table: Mapping[str, Any], place: str) -> S:
    try:
        return cls(**table)
    except ValidationError as error:
        said: dict[str, str] = {}
        for problem in error.errors():
            key = ".".join(map(str, problem["loc"][:1]))
            said.setdefault(key, f"{place} {_sentence(problem)}".strip())
        raise InputError("\n".join(said.values())) from None


def _sentence(problem: Mapping[str, Any]) -> str:
    """One problem that pydantic found, in our words."""
    where = "".join(f"[{part}]" if isinstance(part, int) else str(part) for part in problem["loc"])
    what = problem["msg"].removeprefix("Value error, ").replace("CostModel.", "")
    if problem["type"] == "missing":
        return f"needs the key '{where}'"
    if not where:
        return str(what)
    what = what.replace("Input should be", "it must be").replace("a valid integer", "a whole number")
    what = what.replace("a valid ", "a ").replace("Tuple should have at least 1 item", "it must not be empty")
    what = re.sub(r" after validation.*", "", what)
    return f"{where}={_value(problem['input'])} is not accepted; {what}"


def _frozen(value: Any) -> Any:
    """Lists as tuples, all the way down."""
    if isinstance(value, dict):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


# From sections to TOML.


def _table(header: str, values: Mapping[str, Any]) -> str:
    lines = [header] if header else []
    lines += [f"{key} = {_value(value)}" for key, value in values.items() if value is not None]
    return "\n".join(lines) + "\n"


def _value(value: Any) -> str:
    """A value as TOML writes it."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (tuple, list)):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    return repr(value)
