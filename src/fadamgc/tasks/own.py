"""Your own tasks in a spec: a function that returns a Task, or a table in a file."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, mse_loss
from torch.utils.data import Subset, TensorDataset

from fadamgc.data import Partition, natural
from fadamgc.errors import InputError, cut, first_line, full_name, nearest, shown
from fadamgc.loading import find_file, load_object
from fadamgc.models import mlp
from fadamgc.runtime import seeded
from fadamgc.samples import Pair, Rows, Samples, joined
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
    """Call the function of a spec; if it does not hold out data itself, a share of each client's is."""
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
    if not validation:
        return task
    if not holds_out:
        return held_out(task, validation)
    if _same_test(task, function_task(spec, seed, validation=0.0)):
        raise InputError(
            f"[task] data={spec.data!r} returns its test data for validation={validation}; hold out a share "
            "of the train data there, or remove the argument 'validation', and a share of each client's data "
            "is held out"
        )
    return task


def _same_test(one: Task, other: Task) -> bool:
    first, second = one.test_pair, other.test_pair
    if first is None or second is None:
        return first is second
    return all(map(torch.equal, first, second))


def task_labels(spec: FunctionTask, seed: int) -> Labels | None:
    """Count the labels of a task's clients; None if its targets are no labels."""
    task = function_task(spec, seed, validation=0.0)
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
    """Return the task with a share of each client's data as test data, instead of the test data."""
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
    return replace(task, clients=train, test=joined([data for data in test if len(data)]))


def measure_of(task: Task) -> str:
    """Return the name of a task's metric."""
    return task.metric if isinstance(task.metric, str) else full_name(task.metric).rpartition(":")[2]


# A table in a file.

MANY_CLASSES = 1000


class TableData(NamedTuple):
    """The rows of a table: features, targets, and the client of each row if the table says so."""

    x: NDArray[np.float32]
    y: NDArray[Any]
    owner: NDArray[Any] | None


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
    name = Path(spec.data).stem
    if spec.kind == "classification":
        return Task(model, cross_entropy, clients, test_pair, metric="accuracy", name=name)
    return Task(model, mse_loss, clients, test_pair, metric="loss", name=name)


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


def read_table(spec: TableTask, place: str | None = None) -> TableData:
    """Read the columns of a spec from its file, or from another one with the same columns."""
    path = find_file(place or spec.data)
    try:
        if path.suffix == ".npz":
            with np.load(path, allow_pickle=False) as arrays:
                return _from_arrays(path, dict(arrays), spec)
        import pandas as pd

        frame = pd.read_parquet(path) if path.suffix == ".parquet" else pd.read_csv(path)
    except InputError:
        raise
    except ImportError:
        raise InputError("reading parquet files needs pyarrow; pip install 'fadamgc[data]'") from None
    except Exception as error:
        raise InputError(f"{path} cannot be read: {cut(first_line(error))}") from None
    return _from_frame(path, frame, spec)


def _from_arrays(path: Path, arrays: Mapping[str, Any], spec: TableTask) -> TableData:
    name = spec.features[0] if spec.features else "X"
    for wanted in filter(None, (name, spec.target, spec.client)):
        if wanted not in arrays:
            raise InputError(f"{path}: there is no array {wanted!r}; it has {cut(', '.join(arrays))}")
    x, y = np.asarray(arrays[name], dtype=np.float32), arrays[spec.target]
    owner = None if spec.client is None else arrays[spec.client]
    lengths = {len(a) for a in (x, y, owner) if a is not None}
    if len(lengths) > 1:
        raise InputError(f"{path}: the arrays have different lengths, {', '.join(map(str, sorted(lengths)))}")
    return TableData(x, y, owner)


def _from_frame(path: Path, frame: pd.DataFrame, spec: TableTask) -> TableData:
    import pandas as pd

    others = [c for c in frame.columns if c not in (spec.target, spec.client)]
    features = list(spec.features) if spec.features else others
    for column in filter(None, (spec.target, spec.client, *features)):
        if column not in frame.columns:
            has = cut(", ".join(map(str, frame.columns)))
            raise InputError(
                f"{path}: there is no column {column!r}{nearest(column, frame.columns)}; it has {has}"
            )
    if not len(frame) or not features:
        raise InputError(f"{path}: there are no {'rows' if features else 'features'} in it")
    for column in (spec.target, *features):
        missing = int(frame[column].isna().sum())
        if missing:
            raise InputError(f"{path}: {missing} rows have no value of {column!r}; fill or remove them")
    x = pd.get_dummies(frame[features], dtype=np.float32)  # texts become one column per value
    owner = None if spec.client is None else frame[spec.client].to_numpy()
    return TableData(x.to_numpy(dtype=np.float32), frame[spec.target].to_numpy(), owner)


def _train_and_test(spec: TableTask, validation: float) -> tuple[TableData, TableData, int]:
    """Return train rows, test rows and the number of classes; the same rows are held out in every run."""
    data = read_table(spec)
    tests = None if isinstance(spec.test, float) else read_table(spec, spec.test)
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
        return TableData(data.x[rows], data.y[rows], None if data.owner is None else data.owner[rows])

    return part(~is_test), part(is_test)


def _pair(x: NDArray[Any], y: NDArray[Any], spec: TableTask) -> Pair:
    inputs = torch.from_numpy(np.ascontiguousarray(x, dtype=np.float32))
    if spec.kind == "classification":
        return inputs, torch.from_numpy(y.astype(np.int64))
    try:
        return inputs, torch.from_numpy(y.astype(np.float32))[:, None]
    except ValueError:
        raise InputError(f"{spec.data}: target {shown(spec.target)} is not a column of numbers") from None
