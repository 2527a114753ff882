"""Build the task of one run from a [task] section.

Each seed is an independent trial: another partition (or another synthetic problem), other initial weights,
other batches.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, TypeAlias, assert_never

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fadamgc.data import Partition, digits, dirichlet, har, iid, images, natural, shards, texts
from fadamgc.data.sources import source
from fadamgc.data.synthetic import Synthetic, linear_regression, quadratics
from fadamgc.errors import InputError, cut
from fadamgc.models import ImageInput, cnn1d, convnet, mlp, resnet8, resnet18
from fadamgc.runtime import seeded
from fadamgc.task import Pair, Task
from fadamgc.tasks.sections import (
    CustomTask,
    DigitsTask,
    HarTask,
    ImagesTask,
    LabelledTask,
    LinearRegressionTask,
    QuadraticsTask,
    TaskSpec,
    TextTask,
)

Rows: TypeAlias = NDArray[np.int64]


def build_task(spec: TaskSpec, seed: int, validation: float = 0.0) -> Task:
    """Build the task of one run.

    Args:
        spec: the [task] section.
        seed: of the partition or the synthetic problem, and of the initial weights.
        validation: if above 0, this fraction of the train data is held out and evaluated on, and the test
            data are not even loaded. A synthetic problem has no data to hold out: another seed is another
            problem.
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
        case QuadraticsTask():
            return _least_squares(synthetic(spec, seed), seed, "quadratics", spec.measure)
        case LinearRegressionTask():
            return _least_squares(synthetic(spec, seed), seed, "linear regression", spec.measure)
        case CustomTask():
            raise InputError(
                "[task] data='custom' is the task of another program; its runs can be reported on, not run"
            )
        case _:
            assert_never(spec)


def synthetic(spec: QuadraticsTask | LinearRegressionTask, seed: int) -> Synthetic:
    """Draw the synthetic problem of one run."""
    if isinstance(spec, QuadraticsTask):
        return quadratics(spec.clients, spec.dim, seed, spec.condition, spec.spread)
    return linear_regression(spec.clients, spec.dim, spec.samples, seed, spec.heterogeneity, spec.noise)


def partition(spec: LabelledTask, labels: Tensor, seed: int) -> Partition:
    """Distribute labelled samples to clients."""
    match spec.partition:
        case "dirichlet":
            assert spec.alpha is not None
            assert spec.min_size is not None
            return dirichlet(labels, spec.clients, spec.alpha, seed, min_size=spec.min_size)
        case "iid":
            return iid(labels, spec.clients, seed)
        case "shards":
            assert spec.shards_per_client is not None
            return shards(labels, spec.clients, seed, spec.shards_per_client)
        case _:
            assert_never(spec.partition)


class Labels(NamedTuple):
    """How many samples of each class each client has, and a sentence about the partition."""

    counts: Any  # (clients, classes) integers
    note: str


def label_counts(spec: TaskSpec, seed: int) -> Labels | None:
    """Count the labels of the train data per client; None where there are no labels."""
    match spec:
        case DigitsTask():
            labels = digits.load().train_y
            parts = partition(spec, labels, seed)
        case ImagesTask() | TextTask():
            if isinstance(spec, ImagesTask):
                y = images.load(spec.data, "train", shrink=spec.shrink).y
            else:
                y = texts.load(spec.data, "train").y
            labels = torch.from_numpy(y[_balanced(y, spec.train_samples)])
            parts = partition(spec, labels, seed)
        case HarTask():
            data = har.load()
            train = ~data.is_test
            labels, parts = data.y[train], natural(data.subject[train])
        case _:
            return None
    return Labels(parts.counts(labels), parts.note)


@contextmanager
def _memory_for(setting: str) -> Iterator[None]:
    """Blame a setting if the model that is made inside does not fit in memory."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError):  # TypeError: too large an integer for torch
        raise InputError(f"{cut(setting)} is too large for the memory here") from None


def _digits(spec: DigitsTask, seed: int, validation: float) -> Task:
    data = digits.load(validation)
    parts = [torch.from_numpy(rows) for rows in partition(spec, data.train_y, seed).indices]
    clients: list[Pair] = [(data.train_x[rows], data.train_y[rows]) for rows in parts]
    with _memory_for(f"hidden={list(spec.hidden)}"):
        model = mlp(64, spec.hidden, 10, seed)
    test = (data.test_x, data.test_y)
    return Task(model, cross_entropy, clients, test, metric="accuracy", name="digits")


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
    clients = [_image_pair(train, rows[part]) for part in parts.indices]
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
    pair = _image_pair(test, test_rows)
    return Task(model, cross_entropy, clients, pair, metric="accuracy", name=spec.data)


def _image_pair(data: images.Images, rows: Rows) -> Pair:
    return torch.from_numpy(np.ascontiguousarray(data.x[rows])), torch.from_numpy(data.y[rows])


def _texts(spec: TextTask, seed: int, validation: float) -> Task:
    from fadamgc.models.pretrained import lora
    from fadamgc.tasks.text_classification import encode_for_model

    train = texts.load(spec.data, "train")
    train = train.rows(_balanced(train.y, spec.train_samples))
    rows, test_rows = np.arange(len(train.y)), np.arange(0)
    sets = [train]
    if validation:
        rows, test_rows = _hold_out(train.y, rows, validation)
        test_rows = test_rows[_balanced(train.y[test_rows], spec.test_samples)]
    else:
        test = texts.load(spec.data, "test")
        sets.append(test.rows(_balanced(test.y, spec.test_samples)))
    model, tokens = encode_for_model(
        *(sets, source(spec.data).classes, seed),
        base=spec.model,
        adapters=None if spec.rank is None else lora(spec.rank, spec.targets or ()),
        upper_layers=spec.upper_layers,
        dropout=spec.dropout,
        length=spec.length,
    )
    labels = torch.from_numpy(train.y)
    parts = [rows[part] for part in partition(spec, labels[rows], seed).indices]
    clients: list[Pair] = [(tokens[0][part], labels[part]) for part in parts]
    if validation:
        pair = tokens[0][test_rows], labels[test_rows]
    else:
        pair = tokens[1], torch.from_numpy(sets[1].y)
    return Task(model, cross_entropy, clients, pair, metric="accuracy", name=spec.data)


def _har(spec: HarTask, seed: int, validation: float) -> Task:
    data = har.load()
    rows = np.flatnonzero(~data.is_test.numpy())
    test_rows = np.flatnonzero(data.is_test.numpy())
    if validation:
        rows, test_rows = _hold_out(data.y.numpy(), rows, validation)
    parts = [rows[part] for part in natural(data.subject[rows]).indices]
    clients: list[Pair] = [(data.x[part], data.y[part]) for part in parts]
    with _memory_for(f"width={spec.width}"):
        model = cnn1d(channels=9, outputs=6, width=spec.width, seed=seed)
    test = (data.x[test_rows], data.y[test_rows])
    return Task(model, cross_entropy, clients, test, metric="accuracy", name="HAR")


def _balanced(labels: Rows, count: int | None) -> Rows:
    """Choose the rows of ``count`` samples, as evenly over the classes as possible; the same in every run."""
    if count is None or count >= len(labels):
        return np.arange(len(labels))
    order = np.random.default_rng(0).permutation(len(labels))
    turn = np.empty(len(labels), dtype=np.int64)  # how many of the same class come before
    for c in np.unique(labels):
        of_class = order[labels[order] == c]
        turn[of_class] = np.arange(len(of_class))
    return np.sort(order[np.argsort(turn[order], kind="stable")[:count]])


def _hold_out(labels: Rows, rows: Rows, fraction: float) -> tuple[Rows, Rows]:
    """Split off a fraction of every class: the other rows, and those; the same in every run."""
    held_out = rows[_balanced(labels[rows], max(1, round(fraction * len(rows))))]
    return np.setdiff1d(rows, held_out), held_out


def _half_squared_error(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().mean()


def _least_squares(problem: Synthetic, seed: int, name: str, measure: str) -> Task:
    """Make a linear model with the metric f(w) - f(w*) or |grad f(w)|^2, computed without cancellation.

    The test data are the data of all clients, scaled so that their mean squared error is the mean of the
    clients' errors, for clients of any sizes.
    """
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
    metric = excess if measure == "excess" else gradient
    return Task(
        model, _half_squared_error, problem.clients, (X_all, Y_all), metric=metric, goal="min", name=name
    )
