"""The [task] section of a spec: the data, their distribution to clients, and the model."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, TypeAlias, get_args

from pydantic import BeforeValidator, Field, model_validator

from fadamgc.errors import InputError, nearest, shown
from fadamgc.section import Count, Line, NonNegative, Positive, Reference, Section
from fadamgc.toml import frozen

Fraction: TypeAlias = Annotated[float, Field(ge=0, le=1)]
Share: TypeAlias = Annotated[float, Field(gt=0, lt=1)]


class LabelledTask(Section):
    """Labelled samples that are distributed to clients."""

    metric: ClassVar[str] = "accuracy"

    data: str
    model: str
    clients: Count = 50
    partition: Literal["dirichlet", "iid", "shards"] = "dirichlet"
    alpha: Positive | None = None
    min_size: Count | None = None
    shards_per_client: Count | None = None

    # The settings of each partition, and their defaults.
    PARTITIONS: ClassVar[dict[str, dict[str, Any]]] = {
        "dirichlet": {"alpha": 0.1, "min_size": 1},
        "iid": {},
        "shards": {"shards_per_client": 2},
    }

    @model_validator(mode="before")
    @classmethod
    def _check_partition_settings(cls, table: Any) -> Any:
        """Fill in the defaults of the partition; refuse settings of another partition."""
        kind = table.get("partition", "dirichlet") if isinstance(table, dict) else None
        if not isinstance(kind, str) or kind not in cls.PARTITIONS:
            return table
        defaults = cls.PARTITIONS[kind]
        for other, settings in cls.PARTITIONS.items():
            for key in settings:
                if key not in defaults and table.get(key) is not None:
                    raise ValueError(
                        f"{key}={shown(table[key])} is a setting of partition='{other}', not of '{kind}'; "
                        "remove it"
                    )
        return defaults | {key: value for key, value in table.items() if value is not None}


class DigitsTask(LabelledTask):
    """Digits of scikit-learn, classified by a multilayer perceptron."""

    data: Literal["digits"]
    model: Literal["mlp"] = "mlp"
    hidden: tuple[Count, ...] = (64,)


class ImagesTask(LabelledTask):
    """Images from the data root, classified by a network."""

    data: Literal["cifar10", "cifar100", "tiny-imagenet"]
    model: Literal["mlp", "cnn", "resnet8", "resnet18"] = "cnn"
    width: Count | None = None  # of the first layer; None: the model's default
    norm: Literal["group", "batch"] = "group"
    clients: Count = 100
    mean: tuple[Fraction, Fraction, Fraction] | None = None  # per colour; white is 1; None: the data set's
    std: tuple[Positive, Positive, Positive] | None = None
    shrink: Literal[1, 2, 4] = 1  # each square of shrink x shrink pixels becomes one pixel
    augment: Literal["none", "flip", "crop-flip"] = "none"  # random changes of training images
    train_samples: Count | None = None  # size of a subset, balanced over classes; None: all samples
    test_samples: Count | None = None

    # Means and standard deviations over the train parts, as `fadamgc data check` prints them.
    COLOURS: ClassVar[dict[str, dict[str, tuple[float, float, float]]]] = {
        "cifar10": {"mean": (0.4914, 0.4822, 0.4465), "std": (0.2470, 0.2435, 0.2616)},
        "cifar100": {"mean": (0.5071, 0.4866, 0.4409), "std": (0.2673, 0.2564, 0.2762)},
        "tiny-imagenet": {"mean": (0.4802, 0.4481, 0.3975), "std": (0.2770, 0.2691, 0.2821)},
    }

    @model_validator(mode="before")
    @classmethod
    def _default_colours(cls, table: Any) -> Any:
        data = table.get("data") if isinstance(table, dict) else None
        if not isinstance(data, str) or data not in cls.COLOURS:
            return table
        return cls.COLOURS[data] | {key: value for key, value in table.items() if value is not None}

    @model_validator(mode="after")
    def _check_norm(self) -> ImagesTask:
        if self.norm == "batch" and self.model in ("mlp", "cnn"):
            raise ValueError("norm='batch' is for the resnets; the cnn has group norm, the mlp has no norm")
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
    """Texts, classified by a pretrained transformer; only its adapters and its head are trained."""

    model: Annotated[str, Field(min_length=1)] = "minilm"  # or a folder, or a name on the hub
    rank: Count | None = None  # of the adapters; None: the default for the model
    targets: Annotated[tuple[str, ...], Field(min_length=1)] | None = None  # with adapters; None: default
    upper_layers: Count | None = None  # number of layers, from the top, that have adapters; None: all
    dropout: Annotated[float, Field(ge=0, lt=1)] | None = None  # None: the model's default
    length: Annotated[int, Field(ge=2)] = 128  # tokens; longer texts are cut
    clients: Count = 100
    train_samples: Count | None = None  # size of a subset, balanced over classes; None: all samples
    test_samples: Count | None = None

    @model_validator(mode="after")
    def _check_adapters(self) -> TextTask:
        if (self.rank is None) != (self.targets is None):
            raise ValueError(f"rank={self.rank} and targets={shown(self.targets)}: give both or neither")
        return self


class KnownTextTask(TextTask):
    """Texts of a known data set, from the data root."""

    data: Literal["20_newsgroups", "glue/sst2", "glue/qnli", "glue/qqp"]


def _as_tuple(value: object) -> object:
    return (value,) if isinstance(value, str) else value


class TextFileTask(TextTask):
    """Texts in the user's file; one column is the label, and another column may be the client."""

    data: Annotated[str, Field(pattern=r"(?i)\.(csv|parquet|jsonl|json)$")]
    columns: Annotated[tuple[str, ...], BeforeValidator(_as_tuple), Field(min_length=1, max_length=2)] = (
        "text",
    )
    label: Annotated[str, Field(min_length=1)] = "label"
    client: str | None = None  # column with the client of each text; None: a partition
    test: Share | str = 0.2  # share of the texts that is held out, or another file
    classes: Annotated[int, Field(ge=2)] | tuple[str, ...] | None = None  # names, or how many

    @model_validator(mode="after")
    def _check_clients(self) -> TextFileTask:
        if self.client is not None and self.train_samples is not None:
            raise ValueError(
                f"train_samples={self.train_samples} and client={shown(self.client)} cannot be combined; "
                "remove one of them"
            )
        return self


class LeastSquaresTask(Section):
    """A least-squares problem with a known optimum."""

    data: str
    measure: Literal["excess", "gradient"] = "excess"  # f(w) - f(w*), or the squared norm of f's gradient

    @property
    def metric(self) -> str:
        """The name of the measure."""
        return "excess objective" if self.measure == "excess" else "squared gradient norm"


class QuadraticsTask(LeastSquaresTask):
    """Quadratics; curvatures and minimisers differ between clients."""

    data: Literal["quadratics"]
    clients: Count = 10
    dim: Count = 20
    condition: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 10.0
    spread: NonNegative = 1.0


def _check_samples(value: object) -> object:
    pair = value if isinstance(value, tuple) else (value, value)
    if len(pair) != 2 or not all(type(n) is int and n > 0 for n in pair) or pair[0] > pair[1]:
        raise ValueError("it must be a whole number > 0, or [low, high]")
    return value


class LinearRegressionTask(LeastSquaresTask):
    """Linear regression; features and ground truths differ between clients."""

    data: Literal["linear_regression"]
    clients: Count = 10
    dim: Count = 10
    samples: Annotated[Any, BeforeValidator(_check_samples)] = 40
    heterogeneity: NonNegative = 1.0
    noise: NonNegative = 0.1


class FunctionTask(Section):
    """A function of the user's own that returns a Task: ``my_module:make_task``, ``my_file.py:make_task``.

    It is called as ``make_task(seed=..., validation=..., **options)``, with the arguments that it has.
    """

    data: Reference
    clients: Annotated[int, Field(ge=0)] = 0  # 0: as many as the task has
    measure: Line | None = None  # name of the metric; None: the task's
    options: dict[str, Any] = Field(default_factory=dict)

    @property
    def metric(self) -> str:
        """The name of the measure."""
        return self.measure or "metric"


TABLES = (".csv", ".parquet", ".npz")
TEXTS = (".jsonl", ".json")  # files that always have texts; tables have texts if one of TEXT_KEYS is given
TEXT_KEYS = ("columns", "label")


class TableTask(LabelledTask):
    """A table in the user's file; one column is the target, and another column may be the client."""

    data: Annotated[str, Field(pattern=r"(?i)\.(csv|parquet|npz)$")]
    target: Annotated[str, Field(min_length=1)]
    features: Annotated[tuple[str, ...], Field(min_length=1)] | None = None  # None: all other columns, or "X"
    client: str | None = None  # column with the client of each row; None: a partition
    kind: Literal["classification", "regression"] = "classification"
    test: Share | str = 0.2  # share of the rows that is held out, or another file
    model: Literal["mlp"] = "mlp"
    hidden: tuple[Count, ...] = (64,)  # empty: a linear model
    clients: Count = 10

    @property
    def metric(self) -> str:  # type: ignore[override]
        """The name of the metric."""
        return "accuracy" if self.kind == "classification" else "mean squared error"

    @model_validator(mode="after")
    def _check_kind(self) -> TableTask:
        if self.kind == "regression" and self.client is None and self.partition != "iid":
            raise ValueError(
                f"partition='{self.partition}' needs classes; for a regression give partition = \"iid\" or "
                "the column of the client"
            )
        return self


class CustomTask(Section):
    """The task of another program, such as a federation; its runs can be reported on, but not repeated."""

    data: Literal["custom"]
    clients: Count
    measure: Line = "accuracy"

    @property
    def metric(self) -> str:
        """The name of the measure."""
        return self.measure


TaskSpec: TypeAlias = (
    DigitsTask
    | ImagesTask
    | HarTask
    | KnownTextTask
    | TextFileTask
    | QuadraticsTask
    | LinearRegressionTask
    | CustomTask
    | FunctionTask
    | TableTask
)
TASKS: dict[str, type[TaskSpec]] = {
    name: kind for kind in get_args(TaskSpec) for name in get_args(kind.model_fields["data"].annotation)
}
RUNNABLE = tuple(name for name in TASKS if name != "custom")


def task_spec(**table: Any) -> TaskSpec:
    """Make a [task] section from its keys; a key with the value None counts as missing."""
    table = {key: frozen(value, key) for key, value in table.items() if value is not None}
    names = ", ".join(map(repr, RUNNABLE))
    if "data" not in table:
        raise InputError(f"[task] needs the key 'data', one of {names}")
    data = table["data"]
    place = f"[task] with data={shown(data)}"
    if isinstance(data, str) and _has_texts(data.lower(), table):
        return TextFileTask.from_table(table, place)
    if isinstance(data, str) and data.lower().endswith(TABLES):
        return TableTask.from_table(table, place)
    if isinstance(data, str) and ":" in data:
        return FunctionTask.from_table(table, place)
    if not isinstance(data, str) or data not in TASKS:
        hint = nearest(data, RUNNABLE) if isinstance(data, str) else ""
        raise InputError(
            f"[task] data={shown(data)} is not accepted; it must be one of {names}{hint}, a table such as "
            "'my_data.csv', texts such as 'my_texts.jsonl', or a function such as 'my_module:make_task'"
        )
    return TASKS[data].from_table(table, place)


def _has_texts(data: str, table: dict[str, Any]) -> bool:
    is_table = data.endswith((".csv", ".parquet"))
    return data.endswith(TEXTS) or (is_table and any(key in table for key in TEXT_KEYS))
