"""An experiment as data: every setting of it, read from and written to TOML.

- ``[task]``: what is learned, and how it is spread over clients
- ``[run]``: rounds, participation, local work, seeds, target
- ``[cost]``: links and devices, to price rounds in simulated minutes
- ``[tune]``: the grid of step sizes and the held-out data (optional)
- ``[[method]]``: an algorithm with its hyperparameters; one table a method
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal, TypeAlias, TypeVar

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic import model_validator as after_all

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.errors import InputError, cut, nearest, real, shown
from fadamgc.escape import UNPRINTABLE
from fadamgc.experiments.spec.toml_writer import toml_table, toml_value
from fadamgc.federation.cost import CostModel
from fadamgc.methods import algorithms, make_algorithm
from fadamgc.sim.executors import EXECUTORS

STEPS = ("eta_l", "eta_g")  # the step sizes, which tuning chooses


class Section(BaseModel):
    """A table of the spec: fixed once made, no key that is not known, no silent conversion."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


def _distinct(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(set(values)) != len(values):
        raise ValueError("each may be given once")
    return values


def folder_name(name: str) -> str:
    """Refuse a name that cannot be that of a folder inside another."""
    if not re.fullmatch(r"[\w][\w .-]*", name):
        raise ValueError(
            "it names a folder: letters, digits, spaces, dots and dashes, a letter or digit first"
        )
    return name


def _one_line(text: str) -> str:
    if UNPRINTABLE.search(text):
        raise ValueError("it must have no control characters, such as line breaks")
    return text


def _executor(name: str) -> str:
    known = ["auto", *EXECUTORS]
    if name not in known:
        raise ValueError(f"it must be one of {', '.join(map(repr, known))}{nearest(name, known)}")
    return name


def _weights(value: object) -> object:
    numbers = isinstance(value, tuple) and all((real(w) or 0) > 0 for w in value)
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
    if not numbers or not all(real(n) is not None for n in numbers):
        raise ValueError("it must be a number, or a list of numbers, one for each client")
    return value


Count: TypeAlias = Annotated[int, Field(ge=1, le=2**53)]
Positive: TypeAlias = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NonNegative: TypeAlias = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Finite: TypeAlias = Annotated[float, Field(allow_inf_nan=False)]
Seeds: TypeAlias = Annotated[
    tuple[Annotated[int, Field(ge=0, lt=2**63)], ...], Field(min_length=1), AfterValidator(_distinct)
]
Steps: TypeAlias = Annotated[tuple[Positive, ...], Field(min_length=1), AfterValidator(_distinct)]
PerClient: TypeAlias = Annotated[Any, BeforeValidator(_per_client)]
Share: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Colour: TypeAlias = tuple[Share, Share, Share]
SomeColour: TypeAlias = tuple[Positive, Positive, Positive]


class LabelledTask(Section):
    """Labelled samples that are dealt out to clients."""

    metric: ClassVar[str] = "accuracy"

    data: str
    model: str
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
        chosen = table.get("partition", "dirichlet") if isinstance(table, dict) else None
        if not isinstance(chosen, str) or chosen not in cls.PARTITION:
            return table
        own = cls.PARTITION[chosen]
        for kind, keys in cls.PARTITION.items():
            for key in keys:
                if key not in own and table.get(key) is not None:
                    raise ValueError(
                        f"{key}={shown(table[key])} is a setting of partition='{kind}', "
                        f"not of '{chosen}'; leave it out"
                    )
        return own | {key: value for key, value in table.items() if value is not None}


class DigitsTask(LabelledTask):
    """scikit-learn's digits, classified by a multilayer perceptron."""

    data: Literal["digits"]
    model: Literal["mlp"] = "mlp"
    hidden: tuple[Count, ...] = (64,)


class ImageTask(LabelledTask):
    """Images from a data root, classified by a convolutional network."""

    data: Literal["cifar10", "cifar100", "tiny-imagenet"]
    model: Literal["mlp", "cnn", "resnet8", "resnet18"] = "cnn"
    width: Count | None = None  # of the first layer; None: the model's own
    norm: Literal["group", "batch"] = "group"
    clients: Count = 100
    mean: Colour | None = None  # of the pixels, as shares of white; None: the data set's
    std: SomeColour | None = None
    shrink: Literal[1, 2, 4] = 1  # each square of shrink x shrink pixels becomes one, their mean
    augment: Literal["none", "flip", "crop-flip"] = "none"  # of training images
    train_samples: Count | None = None  # so many of the train part, evenly over its classes; None: all
    test_samples: Count | None = None

    # Known from the complete train parts; `fadamgc data check` computes those of the files that are there.
    COLOURS: ClassVar[dict[str, dict[str, tuple[float, float, float]]]] = {
        "cifar10": {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)},
        "cifar100": {"mean": (0.5071, 0.4866, 0.4409), "std": (0.2673, 0.2564, 0.2762)},
        "tiny-imagenet": {"mean": (0.4802, 0.4481, 0.3975), "std": (0.2770, 0.2691, 0.2821)},
    }

    @after_all(mode="before")
    @classmethod
    def _colours(cls, table: Any) -> Any:
        if not isinstance(table, dict) or not isinstance(table.get("data"), str):
            return table
        if table["data"] not in cls.COLOURS:
            return table
        return cls.COLOURS[table["data"]] | {k: v for k, v in table.items() if v is not None}

    @after_all(mode="after")
    def _batch_norm(self) -> ImageTask:
        if self.norm == "batch" and self.model in ("mlp", "cnn"):
            raise ValueError("norm='batch' is for the resnets; the cnn has group norm, the mlp none")
        return self


class HarTask(Section):
    """Signals of thirty people's phones; each person is a client."""

    metric: ClassVar[str] = "accuracy"

    data: Literal["uci_har"]
    model: Literal["cnn1d"] = "cnn1d"
    width: Count = 16
    clients: Literal[30] = 30
    partition: Literal["people"] = "people"


class TextTask(LabelledTask):
    """Texts, classified by a pretrained transformer of which adapters and head are trained."""

    data: Literal["20_newsgroups", "glue/sst2", "glue/qnli", "glue/qqp"]
    model: Annotated[str, Field(min_length=1)] = "minilm"  # or a folder, or a name on the hub
    rank: Count | None = None  # of the adapters; None: the model's own, as are
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None  # the parts that are adapted
    upper_layers: Count | None = None  # adapters in so many layers from the top; None: in all
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None  # None: the model's own
    length: Annotated[int, Field(ge=2)] = 128  # tokens; the rest is cut
    clients: Count = 100
    train_samples: Count | None = None  # so many of the train part, evenly over its classes; None: all
    test_samples: Count | None = None

    @after_all(mode="after")
    def _adapters(self) -> TextTask:
        if (self.rank is None) != (self.targets is None):
            raise ValueError(f"rank={self.rank} and targets={shown(self.targets)}: give both, or none")
        return self


class LeastSquaresTask(Section):
    """A problem whose optimum is known."""

    data: str
    measure: Literal["excess", "gradient"] = "excess"  # f(w) - f(w*), or the squared norm of f's gradient

    @property
    def metric(self) -> str:
        """What the measure is called."""
        return "excess objective" if self.measure == "excess" else "squared gradient norm"


class QuadraticsTask(LeastSquaresTask):
    """Quadratics with other curvatures and minimisers for each client; the optimum is known."""

    data: Literal["quadratics"]
    clients: Count = 10
    dim: Count = 20
    condition: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 10.0
    spread: NonNegative = 1.0


class LinearRegressionTask(LeastSquaresTask):
    """Linear regression with other features and ground truths for each client; the optimum is known."""

    data: Literal["linear_regression"]
    clients: Count = 10
    dim: Count = 10
    samples: Annotated[Any, BeforeValidator(_samples)] = 40
    heterogeneity: NonNegative = 1.0
    noise: NonNegative = 0.1


class CustomTask(Section):
    """A task that a program brought itself, as of a federation: its runs can be read, not made again."""

    data: Literal["custom"]
    clients: Count
    measure: Annotated[str, AfterValidator(_one_line)] = "accuracy"

    @property
    def metric(self) -> str:
        """What the measure is called."""
        return self.measure


TaskSpec: TypeAlias = (
    DigitsTask | ImageTask | HarTask | TextTask | QuadraticsTask | LinearRegressionTask | CustomTask
)
TASKS: dict[str, type[TaskSpec]] = {
    "digits": DigitsTask,
    "cifar10": ImageTask,
    "cifar100": ImageTask,
    "tiny-imagenet": ImageTask,
    "uci_har": HarTask,
    "20_newsgroups": TextTask,
    "glue/sst2": TextTask,
    "glue/qnli": TextTask,
    "glue/qqp": TextTask,
    "quadratics": QuadraticsTask,
    "linear_regression": LinearRegressionTask,
    "custom": CustomTask,
}
RUNNABLE = tuple(name for name in TASKS if name != "custom")


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
    search: Literal["full", "race", "halving"] = "full"  # see ``tune``


class MethodSpec(Section):
    """A row of the table: an algorithm, its hyperparameters, and what it is called."""

    algorithm: str
    label: Annotated[str, Field(min_length=1), AfterValidator(_one_line)]
    tracked: Annotated[int, Field(ge=0)] | None = None  # None: as in [run]
    hyperparameters: dict[str, Any] = Field(default_factory=dict)

    @property
    def slug(self) -> str:
        """The label as part of a file name."""
        return re.sub(r"[^a-z0-9]+", "-", self.label.lower()).strip("-") or "method"

    def make(self) -> AnyAlgorithm:
        """The algorithm."""
        return make_algorithm(self.algorithm, **self.hyperparameters)

    def hyperparameter(self, name: str) -> Any:
        """A hyperparameter by name: as given, else the algorithm's default; None if neither is known."""
        if name in self.hyperparameters or self.algorithm not in algorithms():
            return self.hyperparameters.get(name)
        return getattr(self.make(), name, None)

    def with_(self, **hyperparameters: Any) -> MethodSpec:
        """The same method with some hyperparameters replaced."""
        return self.model_copy(update={"hyperparameters": self.hyperparameters | hyperparameters})


class Spec(Section):
    """An experiment: methods that are compared on one task, under the same settings."""

    name: Annotated[str, AfterValidator(folder_name)] = "experiment"
    title: Annotated[str, AfterValidator(_one_line)] | None = None
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
                    f"[[method]] {seen[method.slug]} and {number} are both called {shown(method.label)}; "
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
        return Spec(
            **{**dict(self), section: make_section(type(getattr(self, section)), table, f"[{section}]")}
        )

    def only(self, names: Iterable[str]) -> Spec:
        """The spec with some of its methods, named by label or algorithm."""
        chosen: list[MethodSpec] = []
        for name in names:
            found = [m for m in self.methods if name.lower() in (m.label.lower(), m.slug, m.algorithm)]
            if not found:
                known = [m.algorithm for m in self.methods]
                raise InputError(
                    f"method {shown(name)} is not in the spec{nearest(name, known)}; "
                    f"it has {', '.join(known)}"
                )
            chosen += [m for m in found if m not in chosen]
        return Spec(**{**dict(self), "methods": tuple(m for m in self.methods if m in chosen)})

    def with_steps_of(self, other: Spec) -> Spec:
        """The spec with the step sizes that methods of the same label have in another."""
        steps = {
            method.label: {key: value for key, value in method.hyperparameters.items() if key in STEPS}
            for method in other.methods
        }
        methods = tuple(method.with_(**steps.get(method.label, {})) for method in self.methods)
        return self.model_copy(update={"methods": methods})

    def to_toml(self) -> str:
        """The spec as a file that ``load_spec`` reads back."""
        top = {"name": self.name, "title": self.title}
        parts = [toml_table("", top)]
        parts += [
            toml_table(f"[{name}]", getattr(self, name).model_dump())
            for name in ("task", "run", "cost", "tune")
            if getattr(self, name) is not None
        ]
        for method in self.methods:
            plain = method.model_dump(exclude={"hyperparameters"})
            parts.append(toml_table("[[method]]", plain | method.hyperparameters))
        return "\n".join(parts)


# Sections from tables, with errors in our words.

S = TypeVar("S", bound=Section)


def make_section(cls: type[S], table: dict[str, Any], place: str) -> S:
    """A section from its table; the place is what errors call it."""
    for key in table:
        if key not in cls.model_fields:
            hint = nearest(key, cls.model_fields) or f"; it has {', '.join(cls.model_fields)}"
            raise InputError(f"{place} has no key {shown(key)}{hint}")
    return validated(cls, table, place)


def validated(cls: type[S], table: Mapping[str, Any], place: str) -> S:
    """A section from a table whose keys are known."""
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
    what = (
        what.replace("a valid ", "a ")
        .replace("a tuple", "a list")
        .replace("Tuple should have at least 1 item", "it must not be empty")
    )
    what = re.sub(r" after validation.*", "", what)
    return f"{cut(where, 100)}={cut(toml_value(problem['input']), 120)} is not accepted; {what}"
