"""An experiment as data: every setting of it, as read from and written to TOML.

- ``[task]``: what is learned, and how it is distributed to clients (see ``fadamgc.tasks.sections``)
- ``[run]``: rounds, participation, local work, seeds, target
- ``[cost]``: links and devices, to price rounds in simulated minutes
- ``[tune]``: the grid of step sizes and the held-out data (optional)
- ``[[method]]``: an algorithm with its hyperparameters; one table per method
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Annotated, Any, Literal, Self, TypeAlias, get_args

import torch
from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.codecs import codec_table
from fadamgc.errors import InputError, nearest, real, shown
from fadamgc.federation.cost import CostModel
from fadamgc.federation.messages import MessageCodecs
from fadamgc.federation.privacy import Privacy, check_privacy
from fadamgc.federation.robust import check_aggregation, check_robust
from fadamgc.loading import untrusted
from fadamgc.methods import algorithm_class, make_algorithm
from fadamgc.schedules import KINDS, from_plain
from fadamgc.section import (
    Count,
    Finite,
    Line,
    NonNegative,
    Positive,
    Probability,
    Reference,
    Section,
    Seeds,
    StepSizes,
)
from fadamgc.tasks.sections import LeastSquaresTask, TaskSpec
from fadamgc.toml import toml_table

STEPS = ("eta_l", "eta_g")  # the step sizes, which tuning chooses
PER_METHOD = ("tracked", "codec", "aggregation", "privacy")  # settings of [run] that a [[method]] may replace
ExecutorName: TypeAlias = Literal["auto", "loop", "threads", "vectorized", "ray"]  # sim.executors load torch
EXECUTORS: tuple[str, ...] = get_args(ExecutorName)


def folder_name(name: str) -> str:
    """Refuse a name that a folder inside another folder cannot have."""
    if not re.fullmatch(r"[\w][\w .-]*", name):
        raise ValueError(
            "it names a folder: letters, digits, spaces, dots and dashes, a letter or digit first"
        )
    return name


def _check_weights(value: object) -> object:
    numbers = isinstance(value, tuple) and all((real(w) or 0) > 0 for w in value)
    if value not in ("uniform", "size") and not numbers:
        raise ValueError("it must be 'uniform', 'size' or a list of numbers > 0, one per client")
    return value


def _check_groups(value: object) -> object:
    lists = isinstance(value, tuple) and all(isinstance(group, (tuple, list)) for group in value)
    count = isinstance(value, int) and not isinstance(value, bool) and value >= 1
    if value is not None and not lists and not count:
        raise ValueError("it must be a number of groups, or a list of lists of client numbers")
    return value


def _check_codec(value: object) -> object:
    return None if value is None else dict(codec_table(value))


def _check_aggregation(value: object) -> object:
    check_aggregation(value)
    return value


def _check_privacy(value: object) -> object:
    """Return the table with all its keys; an empty one, which is none, stays empty."""
    privacy = Privacy.of(value)
    return value if privacy is None else privacy.plain()


Aggregation: TypeAlias = Annotated[Any, BeforeValidator(_check_aggregation)]
PrivacyTable: TypeAlias = Annotated[Any, BeforeValidator(_check_privacy)]  # a dict with clip and noise
Codec: TypeAlias = Annotated[Any, BeforeValidator(_check_codec)]  # a dict of fields and their codecs


class RunSpec(Section):
    """The settings that all methods share; ``fadamgc.simulate`` explains them."""

    rounds: Count
    sampled: Count | None = None
    tracked: Annotated[int, Field(ge=0)] | None = None
    local_steps: Count | tuple[Count, ...] | Reference | None = None  # or a function of client and round
    local_epochs: Count | None = None
    batch_size: Count | None = None
    seeds: Seeds = (0, 1, 2, 3)
    target: Finite | None = None
    stop_at_target: bool = False
    eval_every: Count = 1
    eval_clients: bool | Literal["epoch"] = False
    weights: Annotated[Any, BeforeValidator(_check_weights)] = "uniform"
    on_nonfinite: Literal["error", "drop"] = "error"
    groups: Annotated[Any, BeforeValidator(_check_groups)] = None  # for methods with groups, as group_rounds
    group_rounds: Count | None = None
    dropout: Probability | None = None
    stragglers: Probability | None = None
    deadline: Positive | None = None
    clip_norm: Positive | None = None
    weight_decay: NonNegative | None = None
    local_parameters: str | tuple[str, ...] | None = None
    codec: Codec = None
    aggregation: Aggregation = None
    privacy: PrivacyTable = None
    dtype: Literal["float32", "float64"] = "float32"
    autocast: Literal["bf16"] | None = None
    channels_last: Annotated[bool | None, AfterValidator(lambda chosen: chosen or None)] = None
    executor: ExecutorName = "auto"
    device: Annotated[str, Field(min_length=1)] = "auto"

    @model_validator(mode="after")
    def _check_local_work_and_target(self) -> RunSpec:
        if (self.local_steps is None) == (self.local_epochs is None):
            raise ValueError(
                f"local_steps={self.local_steps} and local_epochs={self.local_epochs}: give one of the two"
            )
        if self.stop_at_target and self.target is None:
            raise ValueError("stop_at_target=true needs a target")
        return self

    @property
    def local_work(self) -> str:
        """The local steps or epochs, in words."""
        if isinstance(self.local_steps, tuple):
            return f"{min(self.local_steps)} to {max(self.local_steps)} local steps"
        if isinstance(self.local_steps, str):
            return f"local steps by {self.local_steps}"
        return f"{self.local_steps} local steps" if self.local_steps else f"{self.local_epochs} local epochs"


class CostSpec(Section):
    """The fields of ``fadamgc.CostModel``; the first four are one number, or one number per client."""

    down_mbps: Any = 100.0
    up_mbps: Any = 100.0
    seconds_per_step: Any = 0.0
    latency: Any = 0.0
    per_round: Literal["mean", "slowest"] = "mean"
    group_down_mbps: Any = 100.0
    group_up_mbps: Any = 100.0

    @model_validator(mode="after")
    def _check_model(self) -> CostSpec:
        try:
            self.model()
        except InputError as error:
            raise ValueError(str(error).removeprefix("CostModel.")) from None
        return self

    def model(self) -> CostModel:
        """Make the cost model."""
        return CostModel(**self.model_dump())


Values: TypeAlias = Annotated[tuple[Any, ...], Field(min_length=1)]


class TuneSpec(Section):
    """The grid from which hyperparameters are chosen, and the runs that choose them.

    Any other key of the section is a hyperparameter with the values to try, for the methods that have it.
    ``methods`` has grids of single methods, by label or algorithm, which replace the common ones.
    """

    eta_l: StepSizes | None = None
    eta_g: StepSizes | None = None
    grids: dict[str, Values] = Field(default_factory=dict)
    methods: dict[str, dict[str, Values]] = Field(default_factory=dict)
    points: Count | None = None  # for "random" and "optuna": how many points of each grid are tried
    seeds: Seeds = (100, 101)
    rounds: Count
    validation: Annotated[float, Field(ge=0.01, le=0.99)] = 0.25  # fraction of the TRAIN data
    search: Literal["full", "race", "halving", "random", "optuna"] = "full"  # see ``tune``
    extend: bool = False  # whether numbers beyond the ends of the grids are tried

    @classmethod
    def from_table(cls, table: Mapping[str, Any], place: str) -> Self:
        """Check a table; keys that are no settings of the search are hyperparameters."""
        others = {key: table[key] for key in table if key not in cls.model_fields}
        for key, value in others.items():
            if not isinstance(value, tuple):
                hint = nearest(key, cls.model_fields)
                raise InputError(f"{place} {key}={shown(value)} is not a list of values to try{hint}")
        known = {key: table[key] for key in table if key in cls.model_fields}
        grids = {**others, **known.get("grids", {})}
        return super().from_table({**known, **({"grids": grids} if grids else {})}, place)

    @model_validator(mode="after")
    def _check_search(self) -> TuneSpec:
        if (self.search in ("random", "optuna")) != (self.points is not None):
            raise ValueError(
                f"search='{self.search}' and points={self.points}: the searches 'random' and 'optuna' need "
                "the number of points, and no other search does"
            )
        return self

    def for_methods(self, methods: Sequence[MethodSpec]) -> Self:
        """Return the section without the grids that apply to none of these methods."""
        labels = {name for method in methods for name in (method.label, method.algorithm)}
        settings = {name for method in methods for name in method.setting_names()}
        grids = {name: grid for name, grid in self.grids.items() if name.partition(".")[0] in settings}
        of_methods = {name: grid for name, grid in self.methods.items() if name in labels}
        return self.model_copy(update={"grids": grids, "methods": of_methods})

    def names(self) -> set[str]:
        """Return the names of all tuned hyperparameters; for a number of a rule, the name of the rule."""
        names = {*STEPS, *self.grids, *(name for grid in self.methods.values() for name in grid)}
        return {name.partition(".")[0] for name in names}

    def grid_of(self, method: MethodSpec) -> dict[str, tuple[Any, ...]]:
        """Return the values to try for each tuned hyperparameter that the method has."""
        common = {"eta_l": self.eta_l, "eta_g": self.eta_g, **self.grids}
        names = method.setting_names()
        grid = {name: values for name, values in common.items() if values and name.partition(".")[0] in names}
        for name in (method.algorithm, method.label):
            grid |= self.methods.get(name, {})
        return grid


def _with_value(table: Mapping[str, Any], name: str, value: Any) -> dict[str, Any]:
    first, dot, rest = name.partition(".")
    old = table.get(first)
    if dot:
        inner = {"rule": old} if isinstance(old, str) else old or {}
        return {**table, first: _with_value(inner, rest, value)}
    if isinstance(old, Mapping) and not isinstance(value, Mapping) and set(old) & set(KINDS):
        value = from_plain(first, old).with_value(value).plain()
    return {**table, first: value}


class MethodSpec(Section):
    """A row of the table: an algorithm, its hyperparameters, and its label."""

    algorithm: str
    label: Annotated[Line, Field(min_length=1)]
    tracked: Annotated[int, Field(ge=0)] | None = None  # None: as in [run]
    codec: Codec = None  # None: as in [run]; an empty table: none
    aggregation: Aggregation = None  # None: as in [run]
    privacy: PrivacyTable = None  # None: as in [run]; an empty table: none
    hyperparameters: dict[str, Any] = Field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The label as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-") or "method"

    @property
    def known(self) -> bool:
        """Whether the algorithm's class is known in this process."""
        with suppress(InputError), untrusted():
            return algorithm_class(self.algorithm) is not None
        return False

    def setting_names(self) -> tuple[str, ...]:
        """Return the names of the algorithm's hyperparameters; the step sizes if it is not known."""
        return algorithm_class(self.algorithm).setting_names() if self.known else STEPS

    def make(self) -> AnyAlgorithm:
        """Make the algorithm."""
        return make_algorithm(self.algorithm, **self.hyperparameters)

    def hyperparameter(self, name: str) -> Any:
        """Look up a hyperparameter: as given, else the algorithm's default; None if neither is known."""
        if name in self.hyperparameters or not self.known:
            return self.hyperparameters.get(name)
        return getattr(self.make(), name, None)

    def with_(self, **hyperparameters: Any) -> MethodSpec:
        """Replace hyperparameters, or the value of a schedule; ``local.beta1`` is beta1 in table local."""
        values = self.hyperparameters
        for name, value in hyperparameters.items():
            values = _with_value(values, name, value)
        return self.model_copy(update={"hyperparameters": values})


class Spec(Section):
    """An experiment: methods that are compared on one task, under the same settings."""

    name: Annotated[str, AfterValidator(folder_name)] = "experiment"
    title: Line | None = None
    task: TaskSpec
    run: RunSpec
    cost: CostSpec = CostSpec()
    tune: TuneSpec | None = None
    methods: tuple[MethodSpec, ...]

    @model_validator(mode="after")
    def _check_labels(self) -> Spec:
        if not self.methods:
            raise ValueError("there is no [[method]]; give at least one")
        seen: dict[str, int] = {}
        for number, method in enumerate(self.methods, start=1):
            if (first := seen.setdefault(method.slug, number)) != number:
                raise ValueError(
                    f"[[method]] {first} and {number} are both called {shown(method.label)}; "
                    "give one of them another label"
                )
        return self

    @model_validator(mode="after")
    def _check_entries_and_target(self) -> Spec:
        for place, section in (("[cost]", self.cost), ("[run]", self.run)):
            for key, value in section:
                if (
                    key not in ("seeds", "groups")
                    and isinstance(value, tuple)
                    and len(value) != (self.task.clients or len(value))
                ):
                    raise ValueError(
                        f"{place} {key} has {len(value)} entries; "
                        f"give one number, or one for each of {self.task.clients} clients"
                    )
        target, metric = self.run.target, self.task.metric
        if target is not None and metric == "accuracy" and not 0 <= target <= 1:
            raise ValueError(
                f"[run] target={target!r} is not accepted; accuracy goes from 0 to 1, 0.9 is 90 %"
            )
        if target is not None and isinstance(self.task, LeastSquaresTask) and target <= 0:
            raise ValueError(f"[run] target={target!r} is out of reach; {metric} is above 0")
        return self

    @model_validator(mode="after")
    def _check_messages(self) -> Spec:
        """Refuse codecs, aggregations and privacy that a method cannot have; name a remedy if in [run]."""
        for method in self.methods:
            codec, aggregation, privacy = self.codec(method), self.aggregation(method), self.privacy(method)
            if not method.known or not (codec or aggregation or privacy):
                continue
            algorithm, label = method.make().at(1), method.label
            remedy = f"give [[method]] {label} a codec of its own, or codec = {{}} for none"
            with _blaming(method, "codec", remedy):
                MessageCodecs(codec_table(codec or ()), algorithm, 1, torch.float32)
            with _blaming(method, "aggregation", f"give [[method]] {label} aggregation = 'mean'"):
                check_robust(aggregation, algorithm, self.run.weights)
            remedy = f"give [[method]] {label} privacy of its own, or privacy = {{}} for none"
            run = self.run.model_copy(update={"aggregation": aggregation})
            with _blaming(method, "privacy", remedy):
                check_privacy(Privacy.of(privacy), run, algorithm)
        return self

    @model_validator(mode="after")
    def _check_grids(self) -> Spec:
        if self.tune is None:
            return self
        for name in self.tune.methods:
            known = [known for m in self.methods for known in (m.label, m.algorithm)]
            if name not in known:
                raise ValueError(f"[tune.methods] {shown(name)} is not a method{nearest(name, known)}")
        for name in self.tune.grids:
            known = sorted({setting for m in self.methods for setting in m.setting_names()})
            if name.partition(".")[0] not in known:
                raise ValueError(f"[tune] {name}: no method has such a setting{nearest(name, known)}")
        for method in self.methods:
            if not self.tune.grid_of(method):
                has = ", ".join(method.setting_names())
                raise ValueError(f"[tune] has no values to try for {method.label}, which has {has}")
        return self

    def tracked(self, method: MethodSpec) -> int | None:
        """Return how many sampled clients are tracked under a method; None is all of them."""
        return self.run.tracked if method.tracked is None else method.tracked

    def codec(self, method: MethodSpec) -> dict[str, str] | None:
        """Return the codecs of the messages of a method; None is none."""
        codec: dict[str, str] | None = self.run.codec if method.codec is None else method.codec
        return codec or None

    def aggregation(self, method: MethodSpec) -> str | None:
        """Return how the clients' messages of a method are aggregated; None is the mean."""
        chosen = self.run.aggregation if method.aggregation is None else method.aggregation
        return check_aggregation(chosen)

    def privacy(self, method: MethodSpec) -> dict[str, Any] | None:
        """Return clipping and noise of the messages of a method; None is none."""
        privacy: dict[str, Any] | None = self.run.privacy if method.privacy is None else method.privacy
        return privacy or None

    def replace(self, section: str, **values: Any) -> Spec:
        """Replace some values of one section, and check the spec again; None leaves a value as it is."""
        old: Section = getattr(self, section)
        table = old.model_dump(exclude_none=True) | {k: v for k, v in values.items() if v is not None}
        return self.from_table({**dict(self), section: old.from_table(table, f"[{section}]")}, "")

    def only(self, names: Iterable[str]) -> Spec:
        """Keep some of the methods, named by label or algorithm."""
        wanted: list[MethodSpec] = []
        for name in names:
            matching = [
                m for m in self.methods if name.lower() in (m.label.lower(), m.slug, m.algorithm.lower())
            ]
            if not matching:
                present = [m.algorithm for m in self.methods]
                raise InputError(
                    f"method {shown(name)} is not in the spec{nearest(name, present)}; "
                    f"it has {', '.join(present)}"
                )
            wanted += matching
        methods = tuple(m for m in self.methods if m in wanted)
        tune = None if self.tune is None else self.tune.for_methods(methods)
        return Spec.from_table({**dict(self), "methods": methods, "tune": tune}, "")

    def with_steps_of(self, other: Spec) -> Spec:
        """Take the step sizes of methods with the same label from another spec."""
        found = {method.label: method.hyperparameters for method in other.methods}
        tuned = {*STEPS, *(() if other.tune is None else other.tune.names())}
        steps = [{k: v for k, v in found.get(m.label, {}).items() if k in tuned} for m in self.methods]
        methods = tuple(m.with_(**sizes) for m, sizes in zip(self.methods, steps, strict=True))
        return self.model_copy(update={"methods": methods})

    def to_toml(self) -> str:
        """Write the spec as TOML that ``load_spec`` reads."""
        parts = [toml_table("", {"name": self.name, "title": self.title})]
        for name in ("task", "run", "cost", "tune"):
            section: Section | None = getattr(self, name)
            if section is not None:
                values = {key: value for key, value in section.model_dump().items() if value != {}}
                parts.append(toml_table(f"[{name}]", values))
        for method in self.methods:
            table = method.model_dump(exclude={"hyperparameters"})
            parts.append(toml_table("[[method]]", table | method.hyperparameters))
        return "\n".join(parts)


@contextmanager
def _blaming(method: MethodSpec, key: str, remedy: str) -> Iterator[None]:
    """Say in an error whether the value of a key is that of the method or of [run], and the remedy then."""
    try:
        yield
    except InputError as error:
        if getattr(method, key) is not None:
            raise ValueError(f"[[method]] {method.label}: {error}") from None
        raise ValueError(f"[run] {error}; {remedy}") from None
