"""Build the task of one run from a [task] section.

Each seed is an independent trial, with its own partition (or synthetic problem), initial weights and batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, assert_never

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Subset, TensorDataset

from fadamgc.data import Partition, digits, dirichlet, har, iid, images, natural, shards, texts
from fadamgc.data.sources import source
from fadamgc.data.split import Tests, client_tests_of, hold_out
from fadamgc.data.synthetic import Synthetic, linear_regression, quadratics
from fadamgc.errors import InputError, cut
from fadamgc.models import ImageInput, cnn1d, convnet, mlp, resnet8, resnet18
from fadamgc.runtime import seeded
from fadamgc.samples import Pair, Positions
from fadamgc.task import Task
from fadamgc.tasks import own
from fadamgc.tasks.own import Labels
from fadamgc.tasks.sections import (
    CustomTask,
    DigitsTask,
    FunctionTask,
    HarTask,
    ImagesTask,
    LabelledTask,
    LinearRegressionTask,
    QuadraticsTask,
    TableTask,
    TaskSpec,
    TextFileTask,
    TextTask,
)
from fadamgc.tasks.text_data import section_texts


def build_task(spec: TaskSpec, seed: int, validation: float = 0.0) -> Task:
    """Build the task of one run; partition, synthetic problem and initial weights depend on the seed.

    With ``validation`` > 0, this fraction of the train data is held out and replaces the test data, which are
    not even loaded. A synthetic problem has nothing to hold out: another seed is another problem.
    """
    match spec:
        case DigitsTask():
            return _digits(spec, seed, validation)
        case ImagesTask():
            return _images(spec, seed, validation)
        case HarTask():
            return _har(spec, seed, validation)
        case TextTask():
            return _texts(spec, seed, validation)
        case QuadraticsTask() | LinearRegressionTask():
            return _least_squares(spec, seed)
        case FunctionTask():
            return own.function_task(spec, seed, validation)
        case TableTask():
            return own.table_task(spec, seed, validation, partition)
        case CustomTask():
            raise InputError("[task] data='custom' is a task of another program, which cannot be run here")
        case _:
            assert_never(spec)


def completed(spec: TaskSpec) -> TaskSpec:
    """Return the section with the number of clients and the metric of your own task."""
    if isinstance(spec, TableTask) and spec.client is not None:
        owner = own.read_table(spec).owner
        assert owner is not None
        return spec.model_copy(update={"clients": len(np.unique(owner.astype(str)))})
    if isinstance(spec, TextFileTask) and spec.client is not None:
        owner = section_texts(spec).train.owner
        assert owner is not None
        return spec.model_copy(update={"clients": len(np.unique(owner))})
    if isinstance(spec, FunctionTask) and not (spec.clients and spec.measure):
        task = build_task(spec, seed=0)
        return spec.model_copy(update={"clients": task.n, "measure": spec.measure or own.measure_of(task)})
    return spec


def synthetic(spec: QuadraticsTask | LinearRegressionTask, seed: int) -> Synthetic:
    """Return the synthetic problem of one run."""
    if isinstance(spec, QuadraticsTask):
        return quadratics(spec.clients, spec.dim, seed, spec.condition, spec.spread)
    return linear_regression(spec.clients, spec.dim, spec.samples, seed, spec.heterogeneity, spec.noise)


def partition(spec: LabelledTask, labels: Tensor, seed: int) -> Partition:
    """Distribute labelled samples to clients."""
    make: Any = {"dirichlet": dirichlet, "iid": iid, "shards": shards}[spec.partition]
    settings = {key: getattr(spec, key) for key in spec.PARTITIONS[spec.partition]}
    parts: Partition = make(labels, spec.clients, seed=seed, **settings)
    return parts


def label_counts(spec: TaskSpec, seed: int) -> Labels | None:
    """Count the labels of the train data per client; None if the task has no labels."""
    match spec:
        case DigitsTask():
            labels = digits.load().train_y
        case ImagesTask():
            labels = _subset(images.load(spec.data, "train", shrink=spec.shrink).y, spec.train_samples)
        case TextTask():
            train = section_texts(spec, with_test=False).train
            train = train.rows(_balanced(train.y, spec.train_samples))
            parts = _text_partition(spec, train, seed)
            return Labels(parts.counts(train.y), parts.note)
        case TableTask():
            return own.table_labels(spec, seed, partition)
        case FunctionTask():
            return own.task_labels(own.function_task(spec, seed, validation=0.0))
        case HarTask():
            data = har.load()
            parts = natural(data.subject[~data.is_test])
            return Labels(parts.counts(data.y[~data.is_test]), parts.note)
        case _:
            return None
    parts = partition(spec, labels, seed)
    return Labels(parts.counts(labels), parts.note)


@contextmanager
def _memory_for(setting: str) -> Iterator[None]:
    """Name a setting in the error if the model that is made in the ``with`` block is too large."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError):  # TypeError: an integer too large for torch
        raise InputError(f"{cut(setting)} is too large for the memory of this machine") from None


def classification(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    parts: Iterable[Positions],
    test: Pair | None,
    name: str,
    client_tests: Tests = None,
) -> Task:
    """Return the task whose clients have the rows ``parts`` of the inputs x and labels y."""
    clients = clients_of(x, y, parts)
    options: dict[str, Any] = {"metric": "accuracy", "name": name, "client_tests": client_tests}
    return Task(model, cross_entropy, clients, test, **options)


def clients_of(x: Tensor, y: Tensor, parts: Iterable[Positions]) -> list[Subset[Any]]:
    """Return one Subset per client, of the same tensors."""
    data = TensorDataset(x, y)
    return [Subset(data, part.tolist()) for part in parts]


def _digits(spec: DigitsTask, seed: int, validation: float) -> Task:
    data = digits.load(validation)
    parts = partition(spec, data.train_y, seed).indices
    with _memory_for(f"hidden={list(spec.hidden)}"):
        model = mlp(64, spec.hidden, 10, seed)
    test = data.test_x, data.test_y
    return classification(model, data.train_x, data.train_y, parts, test, "digits")


def _images(spec: ImagesTask, seed: int, validation: float) -> Task:
    train = images.load(spec.data, "train", shrink=spec.shrink)
    rows = _balanced(train.y, spec.train_samples)
    if validation:
        rows, test_rows = _hold_out(train.y, rows, validation)
        test = train
    else:
        test = images.load(spec.data, "test", shrink=spec.shrink)
        test_rows = np.arange(len(test.y))
    test_rows = test_rows[_balanced(test.y[test_rows], spec.test_samples)]
    parts = partition(spec, torch.from_numpy(train.y[rows]), seed)
    clients = _image_rows(train, [rows[part] for part in parts.indices])
    data_set = source(spec.data)
    side, outputs = data_set.side // spec.shrink, data_set.classes
    assert spec.mean is not None
    assert spec.std is not None
    with _memory_for(f"width={spec.width}"):
        match spec.model:
            case "mlp":
                net = mlp(3 * side * side, [spec.width or 64], outputs, seed)
            case "cnn":
                net = convnet(outputs=outputs, width=spec.width or 16, side=side, seed=seed)
            case "resnet8":
                net = resnet8(outputs=outputs, norm=spec.norm, width=spec.width or 16, seed=seed)
            case "resnet18":
                net = resnet18(outputs=outputs, norm=spec.norm, width=spec.width or 64, seed=seed)
            case _:
                assert_never(spec.model)
    model = nn.Sequential(ImageInput(spec.mean, spec.std, spec.augment), net)
    (held_out,) = _image_rows(test, [test_rows])
    return Task(model, cross_entropy, clients, held_out, metric="accuracy", name=spec.data)


def _image_rows(data: images.Images, parts: Iterable[Positions]) -> list[Subset[Any]]:
    """Return images that are read from disk when needed; all processes share them in memory."""
    return clients_of(torch.from_numpy(data.x), torch.from_numpy(data.y), parts)


def _texts(spec: TextTask, seed: int, validation: float) -> Task:
    from fadamgc.models.pretrained import lora
    from fadamgc.tasks.text_classification import encode_for_model

    data = section_texts(spec, with_test=not validation)
    train = data.train.rows(_balanced(data.train.y, spec.train_samples))
    sets, rows, test_rows = [train], np.arange(len(train.y)), np.arange(0)
    if validation:
        rows, test_rows = _hold_out_texts(train, validation)
        test_rows = test_rows[_balanced(train.y[test_rows], spec.test_samples)]
    else:
        assert data.test is not None
        sets.append(data.test.rows(_balanced(data.test.y, spec.test_samples)))
    model, tokens = encode_for_model(
        *(data, sets, seed),
        base=spec.model,
        adapters=None if spec.rank is None else lora(spec.rank, spec.targets or ()),
        upper_layers=spec.upper_layers,
        dropout=spec.dropout,
        length=spec.length,
    )
    labels = torch.from_numpy(train.y)
    parts = [rows[part] for part in _text_partition(spec, train.rows(rows), seed).indices]
    held_out = tokens[0][test_rows], labels[test_rows]
    pair = held_out if validation else (tokens[1], torch.from_numpy(sets[1].y))
    name = Path(spec.data).stem if isinstance(spec, TextFileTask) else spec.data
    test_owner = train.rows(test_rows).owner if validation else sets[1].owner
    tests = client_tests_of(train.rows(rows).owner, test_owner, TensorDataset(*pair))
    return classification(model, tokens[0], labels, parts, pair, name, tests)


def _hold_out_texts(train: texts.Texts, share: float) -> tuple[Positions, Positions]:
    if train.owner is None:
        return _hold_out(train.y, np.arange(len(train.y)), share)
    rows, held_out = hold_out(torch.from_numpy(train.y), train.owner, share, seed=1)
    return rows, held_out


def _text_partition(spec: TextTask, train: texts.Texts, seed: int) -> Partition:
    if train.owner is not None:
        return natural(train.owner)
    return partition(spec, torch.from_numpy(train.y), seed)


def _har(spec: HarTask, seed: int, validation: float) -> Task:
    data = har.load()
    is_test = data.is_test.numpy()
    rows, held_out = _hold_out(data.y.numpy(), np.flatnonzero(~is_test), validation)
    test_rows = held_out if validation else np.flatnonzero(is_test)
    with _memory_for(f"width={spec.width}"):
        model = cnn1d(channels=9, outputs=6, width=spec.width, seed=seed)
    parts = [rows[part] for part in natural(data.subject[rows]).indices]
    return classification(model, data.x, data.y, parts, (data.x[test_rows], data.y[test_rows]), "HAR")


def _balanced(labels: Positions, count: int | None) -> Positions:
    """Choose ``count`` rows, as evenly over the classes as possible; the same rows in every run."""
    if count is None or count >= len(labels):
        return np.arange(len(labels))
    order = np.random.default_rng(0).permutation(len(labels))
    turn = np.empty(len(labels), dtype=np.int64)  # number of earlier rows of the same class in ``order``
    for c in np.unique(labels):
        of_class = order[labels[order] == c]
        turn[of_class] = np.arange(len(of_class))
    return np.sort(order[np.argsort(turn[order], kind="stable")[:count]])


def _hold_out(labels: Positions, rows: Positions, fraction: float) -> tuple[Positions, Positions]:
    """Split rows into those to train on and a fraction to hold out, of every class; the same in every run."""
    if not fraction:
        return rows, rows[:0]
    held_out = rows[_balanced(labels[rows], max(1, round(fraction * len(rows))))]
    return np.setdiff1d(rows, held_out), held_out


def _subset(labels: Positions, count: int | None) -> Tensor:
    return torch.from_numpy(labels[_balanced(labels, count)])


def _half_squared_error(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().mean()


def _least_squares(spec: QuadraticsTask | LinearRegressionTask, seed: int) -> Task:
    """Return a linear model with the metric f(w) - f(w*) or |grad f(w)|^2, computed without cancellation.

    The test data are the data of all clients, scaled so that their mean squared error is the mean of the
    clients' errors, whatever the clients' sizes.
    """
    problem = synthetic(spec, seed)
    N = sum(len(X) for X, _ in problem.clients)
    scale = [(N / (len(problem.clients) * len(X))) ** 0.5 for X, _ in problem.clients]
    X_all = torch.cat([s * X for s, (X, _) in zip(scale, problem.clients, strict=True)])
    Y_all = torch.cat([s * Y for s, (_, Y) in zip(scale, problem.clients, strict=True)])
    best = X_all @ problem.optimum[:, None]

    def excess(output: Tensor, target: Tensor) -> Tensor:  # noqa: ARG001
        return _half_squared_error(output, best.to(output))

    def gradient(output: Tensor, target: Tensor) -> Tensor:  # noqa: ARG001
        return (X_all.to(output).T @ (output - best.to(output)) / N).square().sum()

    with seeded(seed):
        model = nn.Linear(problem.dim, 1, bias=False)
    metric, name = excess if spec.measure == "excess" else gradient, spec.data.replace("_", " ")
    return Task(model, _half_squared_error, problem.clients, (X_all, Y_all), metric, "min", name)
