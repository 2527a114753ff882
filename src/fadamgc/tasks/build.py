"""From the [task] of a spec to the task of one run. Each seed is an independent trial: another
partition (or another synthetic problem), other initial weights, other batches."""

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
from fadamgc.experiments.spec.sections import (
    CustomTask,
    DigitsTask,
    HarTask,
    ImageTask,
    LabelledTask,
    LinearRegressionTask,
    QuadraticsTask,
    TaskSpec,
    TextTask,
)
from fadamgc.models import ImageInput, cnn1d, convnet, mlp, resnet8, resnet18
from fadamgc.runtime import seeded
from fadamgc.task import Pair, Task

Rows: TypeAlias = NDArray[np.int64]


@contextmanager
def _room(setting: str) -> Iterator[None]:
    """Where a model is made: one that does not fit in memory is the setting's fault."""
    try:
        yield
    except (RuntimeError, MemoryError, OverflowError, TypeError):  # a TypeError: no integer of torch's
        raise InputError(f"{cut(setting)} is too large for the memory here") from None


class Labels(NamedTuple):
    """Who holds what: samples per client and class, and a sentence on how they were dealt."""

    counts: Any  # (clients, classes) integers
    note: str


def build_task(spec: TaskSpec, seed: int, validation: float = 0.0) -> Task:
    """The task of one run.

    Args:
        spec: the [task] section.
        seed: of the partition or the problem, and of the initial weights.
        validation: above 0, this share of the train data is evaluated on and the test data are not
            even loaded. A synthetic problem has nothing to hold out: another seed is another problem.
    """
    match spec:
        case DigitsTask():
            data = digits.load(validation)
            held = partition(spec, data.train_y, seed)
            rows = [torch.from_numpy(own) for own in held.indices]
            clients: list[Pair] = [(data.train_x[own], data.train_y[own]) for own in rows]
            with _room(f"hidden={list(spec.hidden)}"):
                model = mlp(64, spec.hidden, 10, seed)
            test = (data.test_x, data.test_y)
            return Task(model, cross_entropy, clients, test, metric="accuracy", name="digits")
        case ImageTask():
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
            raise InputError("[task] data='custom' is a program's own; its runs can be reported on, not run")
        case _:
            assert_never(spec)


def synthetic(spec: QuadraticsTask | LinearRegressionTask, seed: int) -> Synthetic:
    """The problem of one run."""
    if isinstance(spec, QuadraticsTask):
        return quadratics(spec.clients, spec.dim, seed, spec.condition, spec.spread)
    return linear_regression(spec.clients, spec.dim, spec.samples, seed, spec.heterogeneity, spec.noise)


def partition(spec: LabelledTask, labels: Tensor, seed: int) -> Partition:
    """The labels' partition that the spec asks for."""
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


def label_counts(spec: TaskSpec, seed: int) -> Labels | None:
    """The label distribution of the train data; None where there are no labels."""
    match spec:
        case DigitsTask():
            labels = digits.load().train_y
            held = partition(spec, labels, seed)
        case ImageTask():
            every = images.load(spec.data, "train", shrink=spec.shrink).y
            labels = torch.from_numpy(every[_some(every, spec.train_samples)])
            held = partition(spec, labels, seed)
        case TextTask():
            every = texts.load(spec.data, "train").y
            labels = torch.from_numpy(every[_some(every, spec.train_samples)])
            held = partition(spec, labels, seed)
        case HarTask():
            data = har.load()
            train = ~data.is_test
            labels, held = data.y[train], natural(data.subject[train])
        case _:
            return None
    return Labels(held.counts(labels), held.note)


def _images(spec: ImageTask, seed: int, validation: float) -> Task:
    train = images.load(spec.data, "train", shrink=spec.shrink)
    rows, test_rows = _some(train.y, spec.train_samples), None
    if validation:
        rows, held_out = _held_out(train.y, rows, validation)
        test, test_rows = train, held_out
    else:
        test = images.load(spec.data, "test", shrink=spec.shrink)
        test_rows = np.arange(len(test.y))
    test_rows = test_rows[_some(test.y[test_rows], spec.test_samples)]
    labels = torch.from_numpy(train.y[rows])
    held = partition(spec, labels, seed)
    clients = [_tensors(train, rows[own]) for own in held.indices]
    known = source(spec.data)
    side, outputs = known.side // spec.shrink, known.classes
    assert spec.mean is not None
    assert spec.std is not None
    first = ImageInput(spec.mean, spec.std, spec.augment)
    with _room(f"width={spec.width}"):
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
    model = nn.Sequential(first, net)
    test_pair = _tensors(test, test_rows)
    return Task(model, cross_entropy, clients, test_pair, metric="accuracy", name=spec.data)


def _tensors(data: images.Images, rows: Rows) -> Pair:
    return torch.from_numpy(np.ascontiguousarray(data.x[rows])), torch.from_numpy(data.y[rows])


def _texts(spec: TextTask, seed: int, validation: float) -> Task:
    from fadamgc.models.pretrained import lora
    from fadamgc.tasks.text_classification import prepare

    every = texts.load(spec.data, "train")
    pool = every.rows(_some(every.y, spec.train_samples))
    rows, tested = np.arange(len(pool.y)), np.arange(0)
    parts = [pool]
    if validation:
        rows, tested = _held_out(pool.y, rows, validation)
        tested = tested[_some(pool.y[tested], spec.test_samples)]
    else:
        test = texts.load(spec.data, "test")
        parts.append(test.rows(_some(test.y, spec.test_samples)))
    model, encoded = prepare(
        *(parts, source(spec.data).classes, seed),
        base=spec.model,
        adapters=None if spec.rank is None else lora(spec.rank, spec.targets or ()),
        upper_layers=spec.upper_layers,
        dropout=spec.dropout,
        length=spec.length,
    )
    labels = torch.from_numpy(pool.y)
    held = partition(spec, labels[rows], seed)
    clients: list[Pair] = [(encoded[0][own], labels[own]) for own in (rows[part] for part in held.indices)]
    test_pair = (
        (encoded[0][tested], labels[tested]) if validation else (encoded[1], torch.from_numpy(parts[1].y))
    )
    return Task(model, cross_entropy, clients, test_pair, metric="accuracy", name=spec.data)


def _some(labels: Rows, count: int | None) -> Rows:
    """The rows of so many samples, as evenly over the classes as can be, the same in every run."""
    if count is None or count >= len(labels):
        return np.arange(len(labels))
    order = np.random.default_rng(0).permutation(len(labels))
    turn = np.empty(len(labels), dtype=np.int64)  # how many of the same class come before
    for c in np.unique(labels):
        own = order[labels[order] == c]
        turn[own] = np.arange(len(own))
    return np.sort(order[np.argsort(turn[order], kind="stable")[:count]])


def _held_out(labels: Rows, rows: Rows, share: float) -> tuple[Rows, Rows]:
    """Rows without a share of every class, and that share, the same in every run."""
    out = rows[_some(labels[rows], max(1, round(share * len(rows))))]
    return np.setdiff1d(rows, out), out


def _har(spec: HarTask, seed: int, validation: float) -> Task:
    data = har.load()
    rows = np.flatnonzero(~data.is_test.numpy())
    test_rows = np.flatnonzero(data.is_test.numpy())
    if validation:
        rows, test_rows = _held_out(data.y.numpy(), rows, validation)
    held = natural(data.subject[rows])
    clients: list[Pair] = [(data.x[rows[own]], data.y[rows[own]]) for own in held.indices]
    with _room(f"width={spec.width}"):
        model = cnn1d(channels=9, outputs=6, width=spec.width, seed=seed)
    test = (data.x[test_rows], data.y[test_rows])
    return Task(model, cross_entropy, clients, test, metric="accuracy", name="HAR")


def _half_squared_error(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().mean()


def _least_squares(problem: Synthetic, seed: int, name: str, measure: str) -> Task:
    """A linear model; its metric is f(w) - f(w*) or |grad f(w)|^2, computed without cancellation.

    The test data are all the clients' data, scaled so that their mean squared error is the mean of
    the clients' own, whatever their sizes.
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
    test = (X_all, Y_all)
    metric = excess if measure == "excess" else gradient
    return Task(model, _half_squared_error, problem.clients, test, metric=metric, goal="min", name=name)
