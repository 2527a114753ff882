"""A task: a model, a loss, the clients' data, the test data and the metric."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset

from fadamgc.errors import InputError, listed, nearest, not_accepted, reason, shown
from fadamgc.flat import Flat
from fadamgc.lazy_clients import LazyClients
from fadamgc.random_numbers import reading_at
from fadamgc.samples import Collate, Items, Pair, Rows, Samples, items_vary, read, share_tensors, tensor_rows
from fadamgc.task_checks import check_shapes, check_task, in_memory

log = logging.getLogger("fadamgc")

Loss: TypeAlias = Callable[[Any, Any], Tensor]
Transform: TypeAlias = Callable[[Any, Any], tuple[Any, Any]]
Metric: TypeAlias = Literal["accuracy", "loss"] | Callable[[Any, Any], Any]
Data: TypeAlias = Pair | Dataset[Any] | Samples | list[Any]

METRICS = ("accuracy", "loss")


@dataclass(eq=False)
class Task:
    """A learning problem: a model, a loss and data. Runs never change it.

    Args:
        model: any module that maps a batch of inputs to a tensor of outputs.
        loss: ``loss(output, target)``, a scalar: the mean over the batch.
        clients: one (inputs, targets) pair of tensors, or one torch Dataset, per client. Without ``lazy``,
            all items of a Dataset are read into memory here, ONCE: random augmentation in a Dataset would be
            the same in all rounds (a warning says so); give it as ``transform``. Clients that are Subsets of
            one TensorDataset share its tensors, without a copy. ``fadamgc.LazyClients`` makes the data of a
            client when it takes part. None for no data: for the server of a federation, which has the model
            and perhaps test data (see ``fadamgc.flower.server_app``).
        test: the test data, a pair or a Dataset as well; None for no evaluation.
        metric: "accuracy", "loss", or a function ``metric(output, target)`` that returns a number, or a dict
            of named numbers, the first of which is the metric; ``fadamgc.metrics`` has some.
        goal: "max" if larger values of the metric are better, "min" if smaller ones are; None is "min" for
            the metric "loss" and "max" for all others.
        name: the name in reports.
        transform: a function ``transform(inputs, targets)`` that is applied to every training batch, such as
            random augmentation; it returns both. Random numbers of torch's functions are drawn at an address
            (seed, round, client, step), so that they are the same on every executor.
        client_tests: test data of each client, for ``simulate(eval_clients=True)``, or None for a client that
            has none and is not evaluated; None for all: the clients' own training data.
        lazy: read the items of Datasets whenever a batch needs them, so that they need not fit into memory.
            Random numbers that a Dataset draws (of Python, numpy or torch) have an address too. Such tasks
            run on the executors loop and threads.
        collate: a function that makes a batch, a pair (inputs, targets), of a list of items: for items that
            are dicts, or sequences to pad. Items are then read per batch, as with ``lazy``, and a client's
            data may also be a list of items. Inputs may be a dict or a tuple of tensors; the model is called
            with them as its one argument.

    Example:
        >>> import fadamgc, torch
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> task = fadamgc.Task(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, data)
        >>> task
        Task('task', model=Linear, clients=4, samples=32)
    """

    model: nn.Module
    loss: Loss
    clients: Iterable[Data] | LazyClients | None
    test: Data | None = None
    metric: Metric = "accuracy"
    goal: Literal["max", "min"] | None = None
    name: str = "task"
    transform: Transform | None = None
    client_tests: Iterable[Data | None] | None = None
    lazy: bool = False
    collate: Collate | None = None
    samples: list[Samples] | LazyClients = field(init=False)
    """The clients' data."""
    test_samples: Samples | None = field(init=False)
    """The test data."""
    client_test_samples: list[Samples] | None = field(init=False)
    """The test data of each client in ``evaluated``."""
    evaluated: list[int] = field(init=False)
    """The clients that ``eval_clients`` evaluates: all, or those that have test data."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InputError(f"model={shown(self.model)} is not a torch.nn.Module")
        if not callable(self.loss):
            raise InputError(f"loss={shown(self.loss)} is not a function of (output, target)")
        if not callable(self.metric) and not (isinstance(self.metric, str) and self.metric in METRICS):
            hint = nearest(self.metric, METRICS) if isinstance(self.metric, str) else ""
            raise InputError(
                f"metric={shown(self.metric)} is not known{hint}; "
                "give 'accuracy', 'loss' or a function of (output, target)"
            )
        self.name = self.name if isinstance(self.name, str) else shown(self.name)
        if self.goal is None:
            self.goal = "min" if self.metric == "loss" else "max"
        if not isinstance(self.goal, str) or self.goal not in ("max", "min"):
            raise not_accepted("goal", self.goal, "'max' or 'min'")
        if not isinstance(self.lazy, bool):
            raise not_accepted("lazy", self.lazy, "True or False")
        if self.collate is not None and not callable(self.collate):
            raise InputError(f"collate={shown(self.collate)} is not a function of a list of items")
        Flat.of(self.model)
        clients = self._listed_clients()
        samples = clients if isinstance(clients, LazyClients) else self._read_all(clients, "client {}")
        self.test_samples = None if self.test is None else self._read(self.test, "the test data")
        tests, self.evaluated = self._client_tests(len(samples))
        owned = in_memory(
            samples[:1] if isinstance(samples, LazyClients) else samples,
            dict(zip(self.evaluated, tests or [], strict=False)),
            self.test_samples,
        )
        check_shapes(owned)
        self.samples = share_tensors(samples) if isinstance(samples, list) else samples
        self.client_test_samples = None if tests is None else share_tensors(tests)
        check_task(self, owned)
        if isinstance(samples, list):
            self._tell_what_was_read([*zip(clients, samples, strict=True), (self.test, self.test_samples)])
            self.clients = None if self.clients is None else _without_copies(clients, self.samples)
        if self.client_test_samples is not None:
            given: list[Any] = listed(self.client_tests) or []
            kept = _without_copies([given[i] for i in self.evaluated], self.client_test_samples)
            by_client = dict(zip(self.evaluated, kept, strict=True))
            self.client_tests = [by_client.get(i) for i in range(len(given))]

    def _listed_clients(self) -> list[Any] | LazyClients:
        if self.clients is None:
            return []
        if isinstance(self.clients, LazyClients):
            if self.lazy or self.collate is not None:
                raise InputError(
                    "lazy and collate are for Datasets; LazyClients makes data on demand already"
                )
            return self.clients
        clients = None if isinstance(self.clients, (dict, str, Tensor)) else listed(self.clients)
        if clients is None:
            kind = type(self.clients).__name__
            raise InputError(f"clients of type {kind} are not accepted; give a list with one pair per client")
        if not clients:
            raise InputError("clients=[] is empty; give one pair of tensors per client")
        return clients

    def _read_all(self, data: Sequence[Any], owner: str) -> list[Samples]:
        return [self._read(one, owner.format(i)) for i, one in enumerate(data)]

    def _read(self, data: Any, owner: str) -> Samples:
        return read(data, owner, self.lazy, self.collate)

    def _tell_what_was_read(self, data: Sequence[tuple[Any, Samples | None]]) -> None:
        """Log how many items of Datasets were read into memory, and warn if the items are random."""
        read_now = [
            (given, rows)
            for given, rows in data
            if isinstance(given, Dataset) and isinstance(rows, Rows) and tensor_rows(given) is None
        ]
        if not read_now:
            return
        log.info(
            "task: %d items of Datasets were read into memory (%.3g MB); lazy=True reads them batch by batch",
            sum(len(rows) for _, rows in read_now),
            sum(rows.inputs.nbytes + rows.targets.nbytes for _, rows in read_now) / 1e6,
        )
        if items_vary(read_now):
            warnings.warn(
                "a Dataset returns different values when an item is read again (random augmentation?); a "
                "Task reads each item once, so every round trains on the same values. Give the augmentation "
                "as transform=, a function of (inputs, targets) for every batch, or give lazy=True",
                UserWarning,
                stacklevel=4,
            )

    @classmethod
    def split(
        cls,
        model: nn.Module,
        loss: Loss,
        X: Any,
        y: Any,
        clients: int | Any = 100,
        alpha: float | None = None,
        test: float | Pair = 0.2,
        seed: int = 0,
        min_size: int = 1,
        **options: Any,
    ) -> Task:
        """Make a task from arrays: hold out test data, and distribute the rest to clients.

        Args:
            model: the model.
            loss: the loss.
            X: inputs, one entry per sample; an array or a tensor.
            y: targets.
            clients: number of clients; or the client of each sample, such as a person or a device.
            alpha: concentration of the Dirichlet distribution of labels; small is skewed. None is 0.1 for
                labels; for any other targets, and with ``math.inf``, samples are distributed at random.
            test: share of the samples to hold out, or test data, a pair. If ``clients`` has the client of
                each sample, the share is held out from each client's samples and is also the client's own
                test data (``client_tests``); clients with too few samples have none.
            seed: seed of the split.
            min_size: least number of samples of a client.
            options: further arguments of Task.

        Example:
            >>> import fadamgc, torch
            >>> X, y = torch.randn(600, 4), torch.arange(600) % 3
            >>> loss = torch.nn.functional.cross_entropy
            >>> fadamgc.Task.split(torch.nn.Linear(4, 3), loss, X, y, clients=10, alpha=0.5)
            Task('task', model=Linear, clients=10, samples=480)
        """
        from fadamgc.data.split import split

        pairs, test_pair, tests = split(X, y, clients, alpha, test, seed, min_size)
        return cls(model, loss, pairs, test_pair, **{"client_tests": tests, **options})

    def __repr__(self) -> str:
        how = ", made on demand" if isinstance(self.samples, LazyClients) else ""
        how = ", lazy" if not how and self.n and isinstance(self.samples[0], Items) else how
        model = type(self.model).__name__
        return f"Task({self.name!r}, model={model}, clients={self.n}, samples={self.sizes.sum()}{how})"

    def in_memory(self) -> list[Samples]:
        """Return the clients' data, unless it is made on demand."""
        return [] if isinstance(self.samples, LazyClients) else self.samples

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of samples of each client."""
        if isinstance(self.samples, LazyClients):
            return self.samples.sizes
        return np.array([len(data) for data in self.samples], dtype=np.int64)

    @property
    def pairs(self) -> list[tuple[Any, Any]]:
        """The inputs and targets of each client; data that is read per batch is read as one batch."""
        return [data.pair() for data in self.samples]

    @property
    def test_pair(self) -> tuple[Any, Any] | None:
        """The inputs and targets of the test data."""
        return None if self.test_samples is None else self.test_samples.pair()

    @property
    def n(self) -> int:
        """The number of clients."""
        return len(self.samples)

    def reached(self, value: float, target: float) -> bool:
        """Whether a value of the metric is at least as good as a target."""
        return value <= target if self.goal == "min" else value >= target

    def _client_tests(self, n: int) -> tuple[list[Samples] | None, list[int]]:
        """Return the test data of the clients that have test data, and the numbers of these clients."""
        if self.client_tests is None:
            return None, list(range(n))
        tests = None if isinstance(self.client_tests, (dict, str, Tensor)) else listed(self.client_tests)
        if tests is None or len(tests) != n:
            got = shown(self.client_tests) if tests is None else f"{len(tests)} entries"
            raise InputError(f"client_tests has {got}; give one pair for each of {n} clients")
        self.client_tests = tests
        evaluated = [i for i, data in enumerate(tests) if data is not None]
        if not evaluated:
            raise InputError("client_tests has None for all clients; give client_tests=None, or test data")
        return [self._read(tests[i], f"the test data of client {i}") for i in evaluated], evaluated

    def sample(self) -> tuple[Any, ...]:
        """Return a batch of two samples (or one) of the largest client, or else of the test data.

        A task without any data returns ().
        """
        data = self.samples[int(self.sizes.argmax())] if self.n else self.test_samples
        if data is None:
            return ()
        try:
            # What is in memory draws nothing, and torch imports its compiler for the first DrawFrom.
            with nullcontext() if isinstance(data, Rows) else reading_at(0):
                return data.batch(np.arange(min(2, len(data))))
        except InputError:
            raise
        except Exception as error:
            raise InputError(f"the first items of a Dataset cannot be read: {reason(error)}") from error


def _without_copies(clients: Sequence[Any], samples: Sequence[Samples]) -> list[Any]:
    """Return the user's ``clients``, with views of the samples in the place of data that was copied."""
    kept = []
    for data, rows in zip(clients, samples, strict=True):
        copied = isinstance(rows, Rows) and not isinstance(data, Rows) and tensor_rows(data) is None
        kept.append(rows.pair() if copied else data)
    return kept
