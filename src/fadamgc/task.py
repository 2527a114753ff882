"""A task: a model, a loss, the clients' data, the test data and the metric."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fadamgc.errors import InputError, listed, nearest, reason, shown
from fadamgc.flat import Flat

Pair: TypeAlias = tuple[Tensor, Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Metric: TypeAlias = Literal["accuracy", "loss"] | Callable[[Tensor, Tensor], Any]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # that can be trained in
BROADCAST = "Using a target size"  # how torch's losses begin to say that shapes differ
READ_AGAIN = 8  # items of Datasets, to see whether they are the same each time


@dataclass(eq=False)
class Task:
    """What is to be learned. Nothing in it is ever changed by a run.

    Args:
        model: any module that maps a batch of inputs to a tensor of outputs.
        loss: ``loss(output, target)``, a scalar: the mean over the batch.
        clients: one (inputs, targets) pair of tensors, or one torch Dataset, for each client. Each item of a
            Dataset is read ONCE: a Dataset with random augmentation would be trained on in the values of that
            one reading, which is warned of. Put augmentation into the model, as a layer that draws random
            numbers in training mode (for images, ``fadamgc.models.PictureInput`` is one).
        test: the same for the test data; None where nothing is to be evaluated.
        metric: "accuracy", "loss", or a function ``metric(output, target)`` giving a number.
        goal: whether a target is reached from below ("max") or above ("min"); None is "min" for the
            metric "loss" and "max" for all others.
        name: what reports call it.

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
    pairs: list[Pair] = field(init=False)
    """The clients' data as pairs of tensors."""
    test_pair: Pair | None = field(init=False)
    """The test data as a pair of tensors."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InputError(f"model={shown(self.model)} is not a torch.nn.Module")
        if not callable(self.loss):
            raise InputError(f"loss={shown(self.loss)} is not a function of (output, target)")
        if not callable(self.metric) and not _is_one_of(self.metric, "accuracy", "loss"):
            hint = nearest(self.metric, ("accuracy", "loss")) if isinstance(self.metric, str) else ""
            raise InputError(
                f"metric={shown(self.metric)} is not known{hint}; "
                "give 'accuracy', 'loss' or a function of (output, target)"
            )
        name: Any = self.name
        self.name = name if isinstance(name, str) else shown(name)
        if self.goal is None:
            self.goal = "min" if self.metric == "loss" else "max"
        if not _is_one_of(self.goal, "max", "min"):
            raise InputError(f"goal={shown(self.goal)} is not accepted; it must be 'max' or 'min'")
        clients = None if isinstance(self.clients, (dict, str, Tensor)) else listed(self.clients)
        if clients is None:
            kind = type(self.clients).__name__
            raise InputError(f"clients of type {kind} are not accepted; give a list with one pair per client")
        self.clients = clients
        Flat.of(self.model)
        self.pairs = [_pair(data, f"client {i}") for i, data in enumerate(self.clients)]
        if not self.pairs:
            raise InputError("clients=[] is empty; give one pair of tensors for each client")
        self.test_pair = None if self.test is None else _pair(self.test, "the test data")
        self._check_shapes()
        self._check_model()
        if self._read_again():
            warnings.warn(
                "a Dataset gives other values when an item is read again (random augmentation?); a Task "
                "reads each item once, so every round trains on the same values. Put the augmentation into "
                "the model, as a layer that draws random numbers in training mode",
                UserWarning,
                stacklevel=3,
            )

    def __repr__(self) -> str:
        samples = sum(len(x) for x, _ in self.pairs)
        return f"Task({self.name!r}, model={type(self.model).__name__}, clients={self.n}, samples={samples})"

    @property
    def n(self) -> int:
        """How many clients there are."""
        return len(self.pairs)

    def reached(self, value: float, target: float) -> bool:
        """Whether a value of the metric is at least as good as a target."""
        return value <= target if self.goal == "min" else value >= target

    def _read_again(self) -> bool:
        """Whether an item of a Dataset is another when it is read again; a few are."""
        assert isinstance(self.clients, list)
        read = [*zip(self.clients, self.pairs, strict=True), (self.test, self.test_pair)]
        read = [(d, p) for d, p in read if isinstance(d, Dataset) and not isinstance(d, TensorDataset)]
        some = read[:: max(1, len(read) // READ_AGAIN)]
        with _random_numbers_kept():
            for data, pair in some:
                assert pair is not None
                items = np.linspace(0, len(pair[0]) - 1, -(-READ_AGAIN // len(some))).astype(int)
                for i in sorted(set(items.tolist())):
                    try:
                        again = [torch.as_tensor(value).detach() for value in data[i]]
                        same = all(torch.equal(a, part[i]) for a, part in zip(again, pair, strict=True))
                    except Exception:  # of a Dataset that can be read only once
                        return False
                    if not same:
                        return True
        return False

    def _everyone(self) -> list[tuple[str, Pair]]:
        named = [(f"client {i}", pair) for i, pair in enumerate(self.pairs)]
        return named if self.test_pair is None else [*named, ("the test data", self.test_pair)]

    def _check_shapes(self) -> None:
        x0, y0 = self.pairs[0]
        for who, (x, y) in self._everyone():
            for what, got, first in (("inputs", x, x0), ("targets", y, y0)):
                if got.shape[1:] != first.shape[1:]:
                    raise InputError(
                        f"{who} has {what} of shape {tuple(got.shape[1:])} a sample, client 0 has "
                        f"{tuple(first.shape[1:])}; all must be the same"
                    )
                if got.is_floating_point() != first.is_floating_point() or not _go_together(got, first):
                    raise InputError(
                        f"{who} has {what} of {got.dtype}, client 0 has {first.dtype}; all must be the same"
                    )

    def _check_model(self) -> None:
        """Run the model once, on a copy, so that what cannot work is said before the work starts."""
        x, y = max(self.pairs, key=lambda pair: len(pair[0]))
        outcome = probe(self.model, self.loss, x[:2], y[:2])
        output, loss = outcome.output, outcome.loss
        if not isinstance(output, Tensor):
            raise InputError(
                f"model={type(self.model).__name__} returns a {type(output).__name__}; "
                "it must return a tensor: wrap it in a module that does"
            )
        self._check_labels(output)
        if outcome.error is not None:
            raise InputError(
                f"loss failed on output of shape {tuple(output.shape)} and targets of shape "
                f"{tuple(y[:2].shape)} and type {y.dtype}: {reason(outcome.error)}"
            )
        if outcome.broadcast or self._pairs_samples_wrongly(output, y):
            same = output.shape[1:].numel() == y.shape[1:].numel()
            remedy = f": y.reshape{(-1, *output.shape[1:])}, or squeeze the model's output" if same else ""
            raise InputError(
                f"loss would broadcast: outputs have shape {tuple(output.shape[1:])} per sample, targets "
                f"{tuple(y.shape[1:])}, so outputs are compared with other samples' targets; give targets of "
                f"the outputs' shape{remedy}"
            )
        if not isinstance(loss, Tensor) or loss.shape != ():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(
                f"loss must return a scalar, the mean over the batch; for outputs of shape "
                f"{tuple(output.shape)} it gave {got}"
            )
        if not loss.requires_grad:
            raise InputError("loss does not depend on the model's trainable parameters, or was detached")
        classes = output.ndim > 1 and output.shape[1] > 1 and y.shape[1:] == output.shape[2:]
        if self.metric == "accuracy" and self.test is not None and (not classes or y.is_floating_point()):
            raise InputError(
                "metric='accuracy' needs whole-number targets and one output a class; here outputs have "
                f"shape {tuple(output.shape[1:])} a sample, targets {tuple(y.shape[1:])} of {y.dtype}: "
                "give metric='loss' or a function"
            )

    def _pairs_samples_wrongly(self, output: Tensor, y: Tensor) -> bool:
        """Whether the loss depends on the targets, but not on which sample has which of them.

        Then outputs and targets of different shapes were broadcast against each other. A loss that brings
        them to one shape itself is not affected.
        """
        if not y.is_floating_point() or output.shape[1:] == y.shape[1:]:
            return False
        generator = torch.Generator().manual_seed(0)

        def some(like: Tensor) -> Tensor:
            values = torch.rand(2, *like.shape[1:], generator=generator)
            return values.to(output.device, torch.promote_types(output.dtype, torch.float32))

        outputs, targets, others = some(output), some(y), some(y)
        try:
            with warnings.catch_warnings(), torch.no_grad(), torch.random.fork_rng(devices=[]):
                warnings.simplefilter("ignore")
                value, flipped, other = (
                    float(self.loss(outputs, t)) for t in (targets, targets.flip(0), others)
                )
        except Exception:  # made for other numbers than these
            return False
        return abs(value - flipped) <= 1e-6 * abs(value) and abs(value - other) > 1e-3 * abs(value)

    def _check_labels(self, output: Tensor) -> None:
        """Labels beyond the outputs are refused if the loss refuses them (not if it ignores them)."""
        classes = output.shape[1] if output.ndim > 1 else 1
        y0 = self.pairs[0][1]
        numbers = y0.is_floating_point() or y0.is_complex()
        if numbers or y0.shape[1:] != output.shape[2:] or classes < 2:
            return
        for who, (_, y) in self._everyone():
            labels = y.long()  # not all types of integers can be compared
            bad = (labels < 0) | (labels >= classes)
            if not bad.any():
                continue
            for label in labels[bad].unique().tolist():  # type: ignore[no-untyped-call]
                sample = int((labels == label).reshape(len(y), -1).any(dim=1).nonzero()[0])
                try:
                    self.loss(output[:1].detach(), y[sample : sample + 1].to(output.device))
                except Exception as error:
                    raise InputError(
                        f"{who} has label {label} at sample {sample}; the model has {classes} outputs, "
                        f"so labels must lie in 0..{classes - 1}"
                    ) from error


class Probe(NamedTuple):
    """What came of one batch."""

    output: Any
    loss: Any
    error: Exception | None = None  # of the loss
    broadcast: bool = False  # whether torch warned that output and target have different sizes


def probe(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> Probe:
    """One batch through a copy of the model in training mode; an error of the model names the shapes."""
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
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("error", BROADCAST, UserWarning)
                return Probe(output, loss(output, y))
        except UserWarning as warning:
            broadcast = str(warning).startswith(BROADCAST)
        except Exception as error:
            return Probe(output, None, error)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", BROADCAST, UserWarning)
                return Probe(output, loss(output, y), broadcast=broadcast)
        except Exception as error:
            return Probe(output, None, error)


def cast(data: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Data on a device; floating-point data in a dtype, integers as they are."""
    return data.to(device=device, dtype=dtype if data.is_floating_point() else None)


def _pair(data: Pair | Dataset[Any], who: str) -> Pair:
    """The data of one client as tensors, checked on their own."""
    try:
        parts = _columns(data)
        x, y = (torch.as_tensor(part) for part in parts)
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"{who} is not a pair (inputs, targets) of tensors or a Dataset of such pairs: {reason(error)}"
        ) from error
    for what, part in (("inputs", x), ("targets", y)):
        problem = _unusable(part)
        if problem:
            raise InputError(f"{who} has {what} {problem}")
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise InputError(
            f"{who} has inputs of shape {tuple(x.shape)} and targets of shape {tuple(y.shape)}; "
            "both must have one entry a sample"
        )
    if len(x) == 0:
        raise InputError(f"{who} is empty; every client needs at least one sample")
    for what, part in (("inputs", x), ("targets", y)):
        if part.is_floating_point():
            finite = torch.isfinite(part).reshape(len(part), -1).all(dim=1)
            if not finite.all():
                sample = int((~finite).nonzero()[0])
                value = part[sample][~torch.isfinite(part[sample])].reshape(-1)[0].item()
                raise InputError(f"{who} has non-finite {what}: {value} at sample {sample}")
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
    """One part of all samples of a Dataset."""
    values = [torch.as_tensor(value) for value in column]
    for i, value in enumerate(values):
        if value.shape != values[0].shape:
            raise ValueError(
                f"sample {i} has shape {tuple(value.shape)}, sample 0 has {tuple(values[0].shape)}; all must "
                "have the same: pad them to one length (torch.nn.utils.rnn.pad_sequence) or cut them"
            )
    return torch.stack(values)


def _unusable(part: Tensor) -> str | None:
    """Why a tensor cannot be data, and what to do; None if it can be."""
    if part.is_nested:
        return "in a nested tensor; pad them: torch.nested.to_padded_tensor"
    if part.layout is not torch.strided:
        return f"in a tensor of layout {part.layout}; make it dense: .to_dense()"
    if part.is_quantized:
        return f"in a quantized tensor ({part.dtype}); make it one of plain numbers: .dequantize()"
    if part.device.type == "meta":
        return "on the device 'meta', where tensors have no values; give tensors with values"
    if part.is_floating_point() and part.dtype not in DTYPES:
        return f"of {part.dtype}, which torch cannot calculate with; convert them: .float()"
    return None


def _go_together(a: Tensor, b: Tensor) -> bool:
    """Whether torch can put them into one tensor (not so with some unsigned integers)."""
    try:
        torch.promote_types(a.dtype, b.dtype)
    except RuntimeError:
        return False
    return True


def _is_one_of(value: object, *names: str) -> bool:
    return isinstance(value, str) and value in names


@contextmanager
def _random_numbers_kept() -> Iterator[None]:
    """Leave the global random numbers of Python, numpy and torch as they were."""
    state, numpy_state = random.getstate(), np.random.get_state()
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        np.random.set_state(numpy_state)
