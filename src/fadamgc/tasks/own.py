"""Your own tasks in a spec: a function that returns a Task, or a table in a file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Subset, TensorDataset

from fadamgc.data import Partition, natural
from fadamgc.data.split import client_tests_of
from fadamgc.errors import InputError, cut, first_line, full_name, nearest, shown
from fadamgc.flat import Flat
from fadamgc.loading import find_file, load_object
from fadamgc.models import mlp
from fadamgc.random_numbers import reading_at
from fadamgc.runtime import seeded
from fadamgc.samples import Pair, Rows, Samples, cast, joined, map_tensors
from fadamgc.task import Task
from fadamgc.tasks.sections import FunctionTask, TableTask

if TYPE_CHECKING:
    import pandas as pd


class Labels(NamedTuple):
    """How the labels are distributed to clients."""

    counts: Any  # (clients, classes): number of samples
    note: str  # how the samples were assigned


# A function that returns a Task.


def function_task(spec: FunctionTask, seed: int, validation: float) -> Task:
    """Call the function of a spec; if it holds out no data, hold out a share of each client's data."""
    function = load_object(spec.data)
    if not callable(function):
        raise InputError(f"[task] data={spec.data!r} is not a function; it must return a fadamgc.Task")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        parameters = {}  # type: ignore[assignment]
    anything = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    options = dict(spec.options)
    if spec.clients and "clients" in parameters:
        options["clients"] = spec.clients
    for name in options:
        if name not in parameters and not anything:
            known = [p for p in parameters if p not in ("seed", "validation")]
            raise InputError(f"[task.options] {name}: {spec.data} has no such argument{nearest(name, known)}")
    holds_out = "validation" in parameters or anything
    arguments: dict[str, Any] = {"seed": seed} if "seed" in parameters or anything else {}
    if holds_out:
        arguments["validation"] = validation
    try:
        with seeded(seed):
            task = function(**arguments, **options)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"[task] data={spec.data!r} failed for seed {seed}: {type(error).__name__}: {first_line(error)}"
        ) from error
    if not isinstance(task, Task):
        raise InputError(
            f"[task] data={spec.data!r} returns a {type(task).__name__}; it must return a fadamgc.Task"
        )
    if not task.n:
        raise InputError(
            f"[task] data={spec.data!r} returns a task with clients=None; give the clients' data"
        )
    if not validation:
        return task
    if not holds_out:
        return held_out(task, validation)
    if _same_test(task, function_task(spec, seed, validation=0.0)):
        raise InputError(
            f"[task] data={spec.data!r} returns its test data for validation={validation}; hold out a share "
            "of the train data in the function, or remove its argument 'validation' to hold out a share of "
            "each client's data"
        )
    return task


def _same_test(one: Task, other: Task) -> bool:
    first, second = one.test_pair, other.test_pair
    if first is None or second is None:
        return first is second
    return all(map(torch.equal, first, second))


def task_labels(task: Task) -> Labels | None:
    """Count the labels of a task's clients; None if its targets are not labels in memory."""
    if not task.in_memory() or not all(isinstance(data, Rows) for data in task.in_memory()):
        return None
    targets = [y for _, y in task.pairs]
    if any(y.is_floating_point() or y.ndim > 1 for y in targets):
        return None
    classes, column = np.unique(torch.cat(targets).cpu().numpy(), return_inverse=True)
    if len(classes) > MANY_CLASSES:
        return None
    parts = np.split(column, np.cumsum([len(y) for y in targets])[:-1])
    counts = np.stack([np.bincount(part, minlength=len(classes)) for part in parts])
    return Labels(counts, f"{task.name}: {task.n} clients")


def held_out(task: Task, share: float) -> Task:
    """Return the task with a share of each client's data held out, in the place of its test data."""
    if not task.in_memory():
        raise InputError(
            "a share of data that is made on demand (LazyClients) cannot be held out; give the function the "
            "argument 'validation'"
        )
    random = np.random.default_rng(0)
    train: list[Samples] = []
    test: list[Samples] = []
    for data in task.samples:
        order = random.permutation(len(data))
        count = min(round(share * len(data)), len(data) - 1)
        test.append(data.take(np.sort(order[:count])))
        train.append(data.take(np.sort(order[count:])))
    if not any(map(len, test)):
        raise InputError(
            f"validation={share} of the clients' data is less than one sample; the clients are too small"
        )
    own_tests = [data if len(data) else None for data in test]
    held = joined([data for data in test if len(data)])
    return replace(task, clients=train, test=held, client_tests=own_tests)


TRIED = 256  # samples with which a metric is called to learn its name


def measure_of(task: Task) -> str:
    """Return the name of a task's metric; if it has several named numbers, the name of the first."""
    if isinstance(task.metric, str):
        return task.metric
    return _first_name(task) or full_name(task.metric).rpartition(":")[2]


def _first_name(task: Task) -> str | None:
    """Call a metric with some outputs; return the name of its first number, None if it has no names."""
    samples = task.test_samples or task.samples[int(task.sizes.argmax())]
    assert callable(task.metric)
    try:
        with seeded(0), torch.no_grad(), reading_at(0):
            module = Flat.of(task.model).copy(task.model).eval()
            like = next(module.parameters())
            rows = np.unique(np.linspace(0, len(samples) - 1, TRIED).astype(np.int64))
            inputs, targets = (
                map_tensors(partial(cast, dtype=like.dtype, device=like.device), part)
                for part in samples.batch(rows)
            )
            value = task.metric(module(inputs), targets)
            return str(next(iter(value))) if isinstance(value, Mapping) and value else None
    except Exception:  # a run will report the error
        return None


# A table in a file.

MANY_CLASSES = 1000


class Columns(NamedTuple):
    """The features of a train file: those that are numbers, and those that are texts with their values."""

    numbers: tuple[str, ...]
    texts: dict[str, tuple[str, ...]]


class TableData(NamedTuple):
    """The rows of a table: features, targets, and the client of each row if the table says so."""

    x: NDArray[np.float32]
    y: NDArray[Any]
    owner: NDArray[Any] | None
    columns: Columns | None = None  # None for a file without named columns


def table_task(spec: TableTask, seed: int, validation: float, parts: Any) -> Task:
    """Build the task of a table; ``parts`` distributes labelled rows to clients."""
    train, test, classes = _train_and_test(spec, validation)
    mean, std = train.x.mean(axis=0), train.x.std(axis=0)
    std[std == 0] = 1
    pairs = [_pair((part.x - mean) / std, part.y, spec) for part in (train, test)]
    (x, y), test_pair = pairs
    rows = table_partition(spec, train, y, seed, parts).indices
    outputs = classes if spec.kind == "classification" else 1
    with seeded(seed):
        model = nn.Sequential(nn.Flatten(), mlp(x[0].numel(), spec.hidden, outputs, seed))
    clients = [Subset(TensorDataset(x, y), r.tolist()) for r in rows]
    owner, test_owner = (None if part.owner is None else part.owner.astype(str) for part in (train, test))
    options: dict[str, Any] = {
        "client_tests": client_tests_of(owner, test_owner, TensorDataset(*test_pair)),
        "name": Path(spec.data).stem,
    }
    if spec.kind == "classification":
        return Task(model, cross_entropy, clients, test_pair, metric="accuracy", **options)
    return Task(model, mse_loss, clients, test_pair, metric="loss", **options)


def table_partition(spec: TableTask, data: TableData, y: Tensor, seed: int, parts: Any) -> Partition:
    """Return which rows each client has."""
    if data.owner is not None:
        return natural(data.owner.astype(str))
    labels = y if spec.kind == "classification" else torch.zeros(len(y), dtype=torch.int64)
    partition: Partition = parts(spec, labels, seed)
    return partition


def table_labels(spec: TableTask, seed: int, parts: Any) -> Labels | None:
    """Count the labels of a table's train rows per client; None for a regression."""
    if spec.kind == "regression":
        return None
    train, _, _ = _train_and_test(spec, validation=0.0)
    labels = torch.from_numpy(train.y.astype(np.int64))
    partition = table_partition(spec, train, labels, seed, parts)
    return Labels(partition.counts(labels), partition.note)


def read_table(spec: TableTask, train: TableData | None = None) -> TableData:
    """Read the columns of a spec from its file; if the train data are given, from its test file."""
    path = find_file(spec.data if train is None else str(spec.test))
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return _from_arrays(path, dict(arrays), spec, train)
        import pandas as pd

        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except InputError:
        raise
    except ImportError:
        raise InputError("reading parquet files needs pyarrow; pip install 'fadamgc[data]'") from None
    except Exception as error:
        raise InputError(f"{path} cannot be read: {cut(first_line(error))}") from None
    return _from_frame(path, frame, spec, train)


def _from_arrays(
    path: Path, arrays: Mapping[str, Any], spec: TableTask, train: TableData | None
) -> TableData:
    name = spec.features[0] if spec.features else "X"
    client = None if train is not None and spec.client not in arrays else spec.client
    for wanted in filter(None, (name, spec.target, client)):
        if wanted not in arrays:
            raise InputError(f"{path}: there is no array {wanted!r}; it has {cut(', '.join(arrays))}")
    x, y = np.asarray(arrays[name], dtype=np.float32), arrays[spec.target]
    owner = None if client is None else arrays[client]
    lengths = {len(a) for a in (x, y, owner) if a is not None}
    if len(lengths) > 1:
        raise InputError(f"{path}: the arrays have different lengths, {', '.join(map(str, sorted(lengths)))}")
    if train is not None and x.shape[1:] != train.x.shape[1:]:
        raise InputError(
            f"{path}: the rows of {name!r} have the shape {x.shape[1:]}, and {train.x.shape[1:]} in "
            f"{spec.data}; give a test file with the same features"
        )
    return TableData(x, y, owner)


def _from_frame(path: Path, frame: pd.DataFrame, spec: TableTask, train: TableData | None) -> TableData:
    known = None if train is None else train.columns
    client = None if train is not None and spec.client not in frame.columns else spec.client
    others = [c for c in frame.columns if c not in (spec.target, spec.client)]
    features = list(spec.features or others) if known is None else [*known.numbers, *known.texts]
    for column in filter(None, (spec.target, client, *features)):
        if column not in frame.columns:
            has = cut(", ".join(map(str, frame.columns)))
            also = "" if train is None else f" of {spec.data}"
            raise InputError(
                f"{path}: there is no column {column!r}{also}{nearest(column, frame.columns)}; it has {has}"
            )
    if not len(frame) or not features:
        raise InputError(f"{path}: there are no {'rows' if features else 'features'} in it")
    for column in (spec.target, *features):
        missing = int(frame[column].isna().sum())
        if missing:
            raise InputError(f"{path}: {missing} rows have no value of {column!r}; fill or remove them")
    columns = known or _columns(frame[features])
    owner = None if client is None else frame[client].to_numpy()
    return TableData(_encoded(path, frame, columns, spec), frame[spec.target].to_numpy(), owner, columns)


def _columns(frame: pd.DataFrame) -> Columns:
    import pandas as pd

    texts = {
        str(name): tuple(dict.fromkeys(map(str, pd.Categorical(frame[name]).categories)))
        for name in frame.select_dtypes(["object", "string", "category"])
    }
    return Columns(tuple(name for name in frame.columns if name not in texts), texts)


def _encoded(path: Path, frame: pd.DataFrame, columns: Columns, spec: TableTask) -> NDArray[np.float32]:
    """Return the features of each row; a text becomes one column per value in the train file."""
    import pandas as pd

    for name in columns.numbers:
        if not pd.api.types.is_numeric_dtype(frame[name]):
            raise InputError(
                f"{path}: the column {name!r} has {frame[name].dtype}, such as {shown(frame[name].iloc[0])}, "
                "and not numbers; change the file, or leave the column out with features = [...]"
            )
    parts = [frame[list(columns.numbers)].to_numpy(dtype=np.float32)]
    for name, values in columns.texts.items():
        numbers = {value: number for number, value in enumerate(values)}
        codes = np.array([numbers.get(str(value), -1) for value in frame[name]])
        if (codes < 0).any():
            row = int(np.argmin(codes))
            raise InputError(
                f"{path}: row {row} has {name}={shown(str(frame[name].iloc[row]))}, which does not occur in "
                f"{spec.data}; it has {cut(', '.join(values))}: change the file, or add such rows there"
            )
        parts.append(np.eye(len(values), dtype=np.float32)[codes])
    return np.concatenate(parts, axis=1)


def _train_and_test(spec: TableTask, validation: float) -> tuple[TableData, TableData, int]:
    """Return train rows, test rows and the number of classes; the same rows are held out in every run."""
    data = read_table(spec)
    tests = None if isinstance(spec.test, float) else read_table(spec, data)
    classes = 1
    if spec.kind == "classification":
        targets = data.y if tests is None else np.concatenate([data.y, tests.y])
        names, codes = np.unique(
            targets.astype(str) if targets.dtype == object else targets, return_inverse=True
        )
        classes = len(names)
        if classes > MANY_CLASSES and np.issubdtype(targets.dtype, np.floating):
            raise InputError(
                f"{spec.data}: target {spec.target!r} has {classes} different numbers; for a regression give "
                'kind = "regression"'
            )
        data = data._replace(y=codes[: len(data.y)])
        tests = None if tests is None else tests._replace(y=codes[len(data.y) :])
    if isinstance(spec.test, float):
        data, tests = _cut(data, spec.test, seed=0)
    assert tests is not None
    if validation:
        data, tests = _cut(data, validation, seed=1)
    return data, tests, classes


def _cut(data: TableData, share: float, seed: int) -> tuple[TableData, TableData]:
    """Split rows into those to train on and a share to hold out, of every client if they have clients."""
    random = np.random.default_rng(seed)
    owner = np.zeros(len(data.y)) if data.owner is None else data.owner.astype(str)
    is_test = np.zeros(len(data.y), dtype=bool)
    for name in np.unique(owner):
        rows = random.permutation(np.flatnonzero(owner == name))
        is_test[rows[: min(round(share * len(rows)), len(rows) - 1)]] = True
    if not is_test.any():
        raise InputError(
            f"a share of {share} is less than one row; the table, or each client, has too few rows"
        )

    def part(rows: NDArray[Any]) -> TableData:
        owner = None if data.owner is None else data.owner[rows]
        return TableData(data.x[rows], data.y[rows], owner, data.columns)

    return part(~is_test), part(is_test)


def _pair(x: NDArray[Any], y: NDArray[Any], spec: TableTask) -> Pair:
    inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if spec.kind == "classification":
        return inputs, torch.from_numpy(y.astype(np.int64))
    try:
        return inputs, torch.from_numpy(y.astype(np.float32))[:, None]
    except ValueError:
        raise InputError(f"{spec.data}: target {shown(spec.target)} is not a column of numbers") from None
