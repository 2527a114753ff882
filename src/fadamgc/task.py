"""A task: a model, a loss, the clients' data, the test data and the metric."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fadamgc.errors import InputError, listed, nearest, not_accepted, reason, shown
from fadamgc.flat import Flat
from fadamgc.metrics import has_classes

Pair: TypeAlias = tuple[Tensor, Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Transform: TypeAlias = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
Metric: TypeAlias = Literal["accuracy", "loss"] | Callable[[Tensor, Tensor], Any]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # types for training
METRICS = ("accuracy", "loss")
BROADCAST = "Using a target size"  # the start of torch's warning that output and target differ in shape
READ_AGAIN = 8  # items of Datasets that are read twice, to detect random augmentation


@dataclass(eq=False)
class Task:
    """A learning problem: a model, a loss and data. Runs never change it.

    Args:
        model: any module that maps a batch of inputs to a tensor of outputs.
        loss: ``loss(output, target)``, a scalar: the mean over the batch.
        clients: one (inputs, targets) pair of tensors, or one torch Dataset, per client. Each item of a
            Dataset is read ONCE: with random augmentation in a Dataset, all rounds would train on the same
            values (a warning says so). Give augmentation as ``transform``, or put it into the model, as a
            layer that draws random numbers in training mode.
        test: the test data, a pair or a Dataset as well; None for no evaluation.
        metric: "accuracy", "loss", or a function ``metric(output, target)`` that returns a number, or a dict
            of named numbers, the first of which is the metric; ``fadamgc.metrics`` has some.
        goal: "max" if larger values of the metric are better, "min" if smaller ones are; None is "min" for
            the metric "loss" and "max" for all others.
        name: the name in reports.
        transform: a function ``transform(inputs, targets)`` that is applied to every training batch, such as
            random augmentation; it returns both. Random numbers of torch's functions are drawn at an address
            (seed, round, client, step), so that they are the same on every executor.
        client_tests: test data of each client, for ``simulate(eval_clients=True)``; None: the clients' own
            training data.

    Example:
        >>> import fadamgc, torch
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> task = fadamgc.Task(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, data)
        >>> task
        Task('task', model=Linear, clients=4, samples=32)
    """

    model: nn.Module
    loss: Loss
    clients: Iterable[Pair | Dataset[Any]]
    test: Pair | Dataset[Any] | None = None
    metric: Metric = "accuracy"
    goal: Literal["max", "min"] | None = None
    name: str = "task"
    transform: Transform | None = None
    client_tests: Iterable[Pair | Dataset[Any]] | None = None
    pairs: list[Pair] = field(init=False)
    """The clients' data as tensors."""
    test_pair: Pair | None = field(init=False)
    """The test data as tensors."""
    client_test_pairs: list[Pair] | None = field(init=False)
    """The test data of each client as tensors."""

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
        clients = None if isinstance(self.clients, (dict, str, Tensor)) else listed(self.clients)
        if clients is None:
            kind = type(self.clients).__name__
            raise InputError(f"clients of type {kind} are not accepted; give a list with one pair per client")
        self.clients = clients
        Flat.of(self.model)
        self.pairs = [_pair(data, f"client {i}") for i, data in enumerate(self.clients)]
        if not self.pairs:
            raise InputError("clients=[] is empty; give one pair of tensors per client")
        self.test_pair = None if self.test is None else _pair(self.test, "the test data")
        self.client_test_pairs = self._client_tests()
        self._check_shapes()
        self._check_model()
        if self._items_vary():
            warnings.warn(
                "a Dataset returns different values when an item is read again (random augmentation?); a "
                "Task reads each item once, so every round trains on the same values. Give the augmentation "
                "as transform=, a function of (inputs, targets) for every batch",
                UserWarning,
                stacklevel=3,
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
            test: share of the samples (of each client, if ``clients`` says whose they are) to hold out, or
                test data, a pair.
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

        pairs, test_pair = split(X, y, clients, alpha, test, seed, min_size)
        return cls(model, loss, pairs, test_pair, **options)

    def __repr__(self) -> str:
        samples = sum(len(x) for x, _ in self.pairs)
        return f"Task({self.name!r}, model={type(self.model).__name__}, clients={self.n}, samples={samples})"

    @property
    def n(self) -> int:
        """The number of clients."""
        return len(self.pairs)

    def reached(self, value: float, target: float) -> bool:
        """Whether a value of the metric is at least as good as a target."""
        return value <= target if self.goal == "min" else value >= target

    def _client_tests(self) -> list[Pair] | None:
        if self.client_tests is None:
            return None
        tests = None if isinstance(self.client_tests, (dict, str, Tensor)) else listed(self.client_tests)
        if tests is None or len(tests) != self.n:
            got = shown(self.client_tests) if tests is None else f"{len(tests)} entries"
            raise InputError(f"client_tests has {got}; give one pair for each of {self.n} clients")
        self.client_tests = tests
        return [_pair(data, f"the test data of client {i}") for i, data in enumerate(tests)]

    def _items_vary(self) -> bool:
        """Whether an item of a Dataset has other values when it is read again; tried with a few items."""
        assert isinstance(self.clients, list)
        data = [*zip(self.clients, self.pairs, strict=True), (self.test, self.test_pair)]
        data = [(d, p) for d, p in data if isinstance(d, Dataset) and not isinstance(d, TensorDataset)]
        samples = data[:: max(1, len(data) // READ_AGAIN)]
        with _random_numbers_kept():
            for dataset, pair in samples:
                assert pair is not None
                items = np.linspace(0, len(pair[0]) - 1, -(-READ_AGAIN // len(samples))).astype(int)
                for i in sorted(set(items.tolist())):
                    try:
                        values = [torch.as_tensor(value).detach() for value in dataset[i]]
                        if not all(torch.equal(a, part[i]) for a, part in zip(values, pair, strict=True)):
                            return True
                    except Exception:  # the Dataset can be read only once
                        return False
        return False

    def _named_pairs(self) -> list[tuple[str, Pair]]:
        named = [(f"client {i}", pair) for i, pair in enumerate(self.pairs)]
        tests = enumerate(self.client_test_pairs or [])
        named += [(f"the test data of client {i}", pair) for i, pair in tests]
        return named if self.test_pair is None else [*named, ("the test data", self.test_pair)]

    def _check_shapes(self) -> None:
        x0, y0 = self.pairs[0]
        for owner, (x, y) in self._named_pairs():
            for role, part, first in (("inputs", x, x0), ("targets", y, y0)):
                if part.shape[1:] != first.shape[1:]:
                    raise InputError(
                        f"{owner} has {role} of shape {tuple(part.shape[1:])} per sample, client 0 has "
                        f"{tuple(first.shape[1:])}; all must be the same"
                    )
                if part.is_floating_point() != first.is_floating_point() or not _compatible(part, first):
                    raise InputError(
                        f"{owner} has {role} of {part.dtype}, client 0 has {first.dtype}; they must be equal"
                    )

    def _check_model(self) -> None:
        """Run a copy of the model on two samples, so that errors appear before the work starts."""
        x, y = max(self.pairs, key=lambda pair: len(pair[0]))
        self._check_transform(x[:2], y[:2])
        output, loss, error, broadcast = _probe(self.model, self.loss, x[:2], y[:2])
        if not isinstance(output, Tensor):
            raise InputError(
                f"model={type(self.model).__name__} returns a {type(output).__name__}; "
                "it must return a tensor: wrap it in a module that does"
            )
        self._check_labels(output)
        if error is not None:
            raise InputError(
                f"loss failed on output of shape {tuple(output.shape)} and targets of shape "
                f"{tuple(y[:2].shape)} and type {y.dtype}: {reason(error)}"
            )
        if broadcast or self._pairs_samples_wrongly(output, y):
            same = output.shape[1:].numel() == y.shape[1:].numel()
            remedy = f": y.reshape{(-1, *output.shape[1:])}, or squeeze the model's output" if same else ""
            raise InputError(
                f"loss would broadcast: outputs have shape {tuple(output.shape[1:])} per sample, targets "
                f"{tuple(y.shape[1:])}, so outputs are compared with the targets of other samples; give "
                f"targets of the outputs' shape{remedy}"
            )
        if not isinstance(loss, Tensor) or loss.shape != ():
            value = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(
                f"loss must return a scalar, the mean over the batch; for outputs of shape "
                f"{tuple(output.shape)} it returned {value}"
            )
        if not loss.requires_grad:
            raise InputError("loss does not depend on the model's trainable parameters, or was detached")
        if self.metric == "accuracy" and self.test is not None and not has_classes(output, y):
            raise InputError(
                "metric='accuracy' needs whole-number targets and one output per class, or one logit with "
                "targets 0 and 1; here outputs have "
                f"shape {tuple(output.shape[1:])} per sample, targets {tuple(y.shape[1:])} of {y.dtype}: "
                "give metric='loss' or a function"
            )

    def _check_transform(self, x: Tensor, y: Tensor) -> None:
        """Try the transform on two samples."""
        if self.transform is None:
            return
        if not callable(self.transform):
            raise InputError(f"transform={shown(self.transform)} is not a function of (inputs, targets)")
        try:
            with torch.random.fork_rng(devices=[]):
                new_x, new_y = self.transform(x.clone(), y.clone())
            shapes = [(t.shape, t.dtype) for t in (new_x, new_y)]
        except Exception as error:
            raise InputError(
                f"transform={shown(self.transform)} failed on inputs of shape {tuple(x.shape)}; it must "
                f"return (inputs, targets): {reason(error)}"
            ) from error
        if shapes != [(t.shape, t.dtype) for t in (x, y)]:
            raise InputError(
                f"transform={shown(self.transform)} must return tensors of the same shapes and types as its "
                f"arguments; inputs of shape {tuple(x.shape)} became {tuple(new_x.shape)}"
            )

    def _pairs_samples_wrongly(self, output: Tensor, y: Tensor) -> bool:
        """Whether the loss compares outputs with the targets of other samples, without a warning of torch.

        Such a loss depends on the targets, but not on their order. (A loss may also accept different shapes
        because it reshapes them correctly.)
        """
        if not y.is_floating_point() or output.shape[1:] == y.shape[1:]:
            return False
        generator = torch.Generator().manual_seed(0)

        def random(like: Tensor) -> Tensor:
            values = torch.rand(2, *like.shape[1:], generator=generator)
            return values.to(output.device, torch.promote_types(output.dtype, torch.float32))

        outputs, targets, others = random(output), random(y), random(y)
        try:
            with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                value, flipped, other = (
                    float(self.loss(outputs, t)) for t in (targets, targets.flip(0), others)
                )
        except Exception:  # the loss does not accept random numbers
            return False
        return abs(value - flipped) <= 1e-6 * abs(value) and abs(value - other) > 1e-3 * abs(value)

    def _check_labels(self, output: Tensor) -> None:
        """Refuse labels without an output, unless the loss accepts them, as -100 is often ignored."""
        classes = output.shape[1] if output.ndim > 1 else 1
        y0 = self.pairs[0][1]
        if y0.is_floating_point() or y0.is_complex() or y0.shape[1:] != output.shape[2:] or classes < 2:
            return
        for owner, (_, y) in self._named_pairs():
            labels = y.long()  # some integer types cannot be compared
            beyond = labels[(labels < 0) | (labels >= classes)]
            for label in beyond.unique().tolist():  # type: ignore[no-untyped-call]
                sample = int((labels == label).reshape(len(y), -1).any(dim=1).nonzero()[0])
                try:
                    self.loss(output[:1].detach(), y[sample : sample + 1].to(output.device))
                except Exception as error:
                    raise InputError(
                        f"{owner} has label {label} at sample {sample}; the model has {classes} outputs, "
                        f"so labels must be in 0..{classes - 1}"
                    ) from error


def _probe(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> tuple[Any, Any, Exception | None, bool]:
    """Run one batch through a copy of the model in training mode.

    Return the output, the loss, the error of the loss, and whether torch warned that output and target differ
    in shape. Raise InputError for an error of the model.
    """
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.enable_grad():
        module = Flat.of(model).copy(model).train()
        first = next(p for p in module.parameters() if p.requires_grad)
        x, y = (cast(part, first.dtype, first.device).clone() for part in (x, y))
        try:
            output = module(x)
        except Exception as error:
            raise InputError(
                f"model={type(model).__name__} failed on inputs of shape {tuple(x.shape)} and "
                f"type {x.dtype}: {reason(error)}"
            ) from error
        value, failure = None, None
        with warnings.catch_warnings(record=True) as caught:
            warnings.filterwarnings("always", BROADCAST, UserWarning)
            try:
                value = loss(output, y)
            except Exception as error:
                failure = error
    broadcast = [warning for warning in caught if str(warning.message).startswith(BROADCAST)]
    for warning in caught:
        if warning not in broadcast:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return output, value, failure, bool(broadcast)


def cast(data: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Move data to a device; convert floating-point data to a dtype, leave integers as they are."""
    return data.to(device=device, dtype=dtype if data.is_floating_point() else None)


def _pair(data: Pair | Dataset[Any], owner: str) -> Pair:
    """Return the data of one client, or the test data, as checked tensors."""
    try:
        x, y = (torch.as_tensor(part) for part in _columns(data))
    except Exception as error:
        raise InputError(
            f"{owner} is not a pair (inputs, targets) of tensors or a Dataset of such pairs: {reason(error)}"
        ) from error
    for role, part in (("inputs", x), ("targets", y)):
        if problem := _problem(part):
            raise InputError(f"{owner} has {role} {problem}")
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise InputError(
            f"{owner} has inputs of shape {tuple(x.shape)} and targets of shape {tuple(y.shape)}; "
            "both must have one entry per sample"
        )
    if len(x) == 0:
        raise InputError(f"{owner} is empty; every client needs at least one sample")
    for role, part in (("inputs", x), ("targets", y)):
        if part.is_floating_point() and not (finite := torch.isfinite(part)).all():
            sample = int((~finite).nonzero()[0, 0])
            value = part[sample][~finite[sample]].reshape(-1)[0].item()
            raise InputError(f"{owner} has non-finite {role}: {value} at sample {sample}")
    return x.detach(), y.detach()


def _columns(data: Any) -> tuple[Any, ...]:
    if isinstance(data, TensorDataset):
        data = data.tensors
    elif isinstance(data, Dataset):
        samples = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
        if not samples:
            return (torch.empty(0), torch.empty(0))
        data = tuple(map(_stacked, zip(*samples, strict=True)))
    if not isinstance(data, (tuple, list)) or len(data) != 2:
        raise ValueError(f"got {type(data).__name__}")
    return tuple(data)


def _stacked(column: tuple[Any, ...]) -> Tensor:
    """Return the inputs, or the targets, of all samples of a Dataset as one tensor."""
    values = [torch.as_tensor(value) for value in column]
    for i, value in enumerate(values):
        if value.shape != values[0].shape:
            raise ValueError(
                f"sample {i} has shape {tuple(value.shape)}, sample 0 has {tuple(values[0].shape)}; all must "
                "be the same: pad them to one length (torch.nn.utils.rnn.pad_sequence) or cut them"
            )
    return torch.stack(values)


def _problem(part: Tensor) -> str | None:
    """Return why a tensor cannot be used as data, and the remedy; None if it can."""
    if part.is_nested:
        return "in a nested tensor; pad them: torch.nested.to_padded_tensor"
    if part.layout is not torch.strided:
        return f"in a tensor of layout {part.layout}; make it dense: .to_dense()"
    if part.is_quantized:
        return f"in a quantized tensor ({part.dtype}); make it a plain tensor: .dequantize()"
    if part.device.type == "meta":
        return "on the device 'meta', where tensors have no values; give tensors with values"
    if part.is_floating_point() and part.dtype not in DTYPES:
        return f"of {part.dtype}, which torch cannot calculate with; convert them: .float()"
    return None


def _compatible(a: Tensor, b: Tensor) -> bool:
    """Whether torch can combine the types of two tensors (not those of some unsigned integers)."""
    try:
        torch.promote_types(a.dtype, b.dtype)
    except RuntimeError:
        return False
    return True


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Leave the global random numbers of Python, numpy and torch as they were before a ``with`` block."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
