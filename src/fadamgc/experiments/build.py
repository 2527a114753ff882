"""From the [task] of a spec to the task of one run. Each seed is an independent trial: another
partition (or another synthetic problem), other initial weights, other batches."""

from __future__ import annotations

from typing import Any, NamedTuple, assert_never

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fadamgc.data import Partition, digits, dirichlet, iid, shards
from fadamgc.data.synthetic import Synthetic, linear_regression, quadratics
from fadamgc.errors import InputError
from fadamgc.experiments.spec import DigitsTask, LinearRegressionTask, QuadraticsTask, TaskSpec
from fadamgc.models import mlp
from fadamgc.task import Pair, Task


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
            try:
                model = mlp(64, spec.hidden, 10, seed)
            except (RuntimeError, MemoryError):
                raise InputError(f"hidden={list(spec.hidden)} is too large for the memory here") from None
            test = (data.test_x, data.test_y)
            return Task(model, cross_entropy, clients, test, metric="accuracy", name="digits")
        case QuadraticsTask():
            problem = quadratics(spec.clients, spec.dim, seed, spec.condition, spec.spread)
            return _least_squares(problem, seed, "quadratics")
        case LinearRegressionTask():
            problem = linear_regression(
                spec.clients, spec.dim, spec.samples, seed, spec.heterogeneity, spec.noise
            )
            return _least_squares(problem, seed, "linear regression")
        case _:
            assert_never(spec)


def partition(spec: DigitsTask, labels: Tensor, seed: int) -> Partition:
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
    if not isinstance(spec, DigitsTask):
        return None
    labels = digits.load().train_y
    held = partition(spec, labels, seed)
    return Labels(held.counts(labels), held.note)


def _half_squared_error(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * (output - target).square().mean()


def _least_squares(problem: Synthetic, seed: int, name: str) -> Task:
    """A linear model; its metric is f(w) - f(w*), computed without cancellation.

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

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = nn.Linear(problem.dim, 1, bias=False)
    test = (X_all, Y_all)
    return Task(model, _half_squared_error, problem.clients, test, metric=excess, goal="min", name=name)
