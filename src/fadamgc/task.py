"""A task: a model, a loss, the clients' data, the test data and the metric."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from fadamgc.errors import InputError, nearest
from fadamgc.flat import Flat

Pair: TypeAlias = tuple[Tensor, Tensor]
Loss: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Metric: TypeAlias = Literal["accuracy", "loss"] | Callable[[Tensor, Tensor], Any]


@dataclass
class Task:
    """What is to be learned. Nothing in it is ever changed by a run.

    Args:
        model: any module that maps a batch of inputs to outputs.
        loss: ``loss(output, target)``, a scalar: the mean over the batch.
        clients: one (inputs, targets) pair of tensors, or one torch Dataset, for each client.
        test: the same for the test data; None where nothing is to be evaluated.
        metric: "accuracy", "loss", or a function ``metric(output, target)`` giving a number.
        goal: whether a target is reached from below ("max") or above ("min"); None is "min" for the
            metric "loss" and "max" for all others.
        name: what reports call it.

    Example:
        >>> import fadamgc, torch
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> task = fadamgc.Task(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, data)
        >>> task.n
        4
    """

    model: nn.Module
    loss: Loss
    clients: Sequence[Pair | Dataset[Any]]
    test: Pair | Dataset[Any] | None = None
    metric: Metric = "accuracy"
    goal: Literal["max", "min"] | None = None
    name: str = "task"
    pairs: list[Pair] = field(init=False, repr=False)
    """The clients' data as pairs of tensors."""
    test_pair: Pair | None = field(init=False, repr=False)
    """The test data as a pair of tensors."""

    def __post_init__(self) -> None:
        if not isinstance(self.model, nn.Module):
            raise InputError(f"model={self.model!r} is not a torch.nn.Module")
        if not callable(self.metric) and self.metric not in ("accuracy", "loss"):
            hint = nearest(str(self.metric), ("accuracy", "loss"))
            raise InputError(
                f"metric={self.metric!r} is not known{hint}; "
                "give 'accuracy', 'loss' or a function of (output, target)"
            )
        if self.goal is None:
            self.goal = "min" if self.metric == "loss" else "max"
        if self.goal not in ("max", "min"):
            raise InputError(f"goal={self.goal!r} is not accepted; it must be 'max' or 'min'")
        if len(self.clients) == 0:
            raise InputError("clients=[] is empty; give one pair of tensors for each client")
        Flat.of(self.model)
        self.pairs = [_pair(data, f"client {i}") for i, data in enumerate(self.clients)]
        self.test_pair = None if self.test is None else _pair(self.test, "the test data")
        self._check_shapes()
        self._check_model()

    @property
    def n(self) -> int:
        """How many clients there are."""
        return len(self.pairs)

    def reached(self, value: float, target: float) -> bool:
        """Whether a value of the metric is at least as good as a target."""
        return value <= target if self.goal == "min" else value >= target

    def _check_shapes(self) -> None:
        x0, y0 = self.pairs[0]
        everyone = [(f"client {i}", pair) for i, pair in enumerate(self.pairs)]
        if self.test_pair is not None:
            everyone.append(("the test data", self.test_pair))
        for who, (x, y) in everyone:
            for what, got, first in (("inputs", x, x0), ("targets", y, y0)):
                if got.shape[1:] != first.shape[1:]:
                    raise InputError(
                        f"{who} has {what} of shape {tuple(got.shape[1:])} a sample, client 0 has "
                        f"{tuple(first.shape[1:])}; all must be the same"
                    )
                if got.is_floating_point() != first.is_floating_point():
                    raise InputError(
                        f"{who} has {what} of {got.dtype}, client 0 has {first.dtype}; all must be the same"
                    )

    def _check_model(self) -> None:
        """Run the model once, on a copy, so that what cannot work is said before the work starts."""
        x, y = max(self.pairs, key=lambda pair: len(pair[0]))
        x, y = x[:2], y[:2]
        output, loss = probe(self.model, self.loss, x, y)
        if not isinstance(loss, Tensor) or loss.shape != ():
            got = f"shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise InputError(
                f"loss must return a scalar, the mean over the batch; for a batch of {len(x)} it gave {got}"
            )
        labels = y.ndim == 1 and not y.is_floating_point()
        if labels and isinstance(output, Tensor) and output.ndim == 2:
            self._check_labels(output.shape[1])

    def _check_labels(self, classes: int) -> None:
        everyone = [(f"client {i}", y) for i, (_, y) in enumerate(self.pairs)]
        if self.test_pair is not None:
            everyone.append(("the test data", self.test_pair[1]))
        for who, y in everyone:
            bad = (y < 0) | (y >= classes)
            if bad.any():
                sample = int(bad.nonzero()[0])
                raise InputError(
                    f"{who} has label {int(y[sample])} at sample {sample}; the model has {classes} outputs, "
                    f"so labels must lie in 0..{classes - 1}"
                )


def probe(model: nn.Module, loss: Loss, x: Tensor, y: Tensor) -> tuple[Any, Any]:
    """Output and loss of a copy of the model in training mode, with errors that name the shapes."""
    module = copy.deepcopy(model).train()
    dtype = next(p.dtype for p in module.parameters() if p.is_floating_point())
    device = next(module.parameters()).device
    x, y = cast(x, dtype, device), cast(y, dtype, device)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        try:
            output = module(x)
        except Exception as error:
            raise InputError(
                f"model={type(model).__name__} failed on inputs of shape {tuple(x.shape)} and "
                f"type {x.dtype}: {error}"
            ) from error
        try:
            value = loss(output, y)
        except Exception as error:
            shape = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
            raise InputError(
                f"loss failed on output of shape {shape} and targets of shape {tuple(y.shape)} and "
                f"type {y.dtype}: {error}"
            ) from error
    return output, value


def cast(data: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Data on a device; floating-point data in a dtype, integers as they are."""
    return data.to(device=device, dtype=dtype if data.is_floating_point() else None)


def _pair(data: Pair | Dataset[Any], who: str) -> Pair:
    """The data of one client as tensors, checked on their own."""
    parts: Any = data
    if isinstance(data, TensorDataset):
        parts = data.tensors
    elif isinstance(data, Dataset):
        samples = [data[i] for i in range(len(data))]  # type: ignore[arg-type]
        if not samples:
            raise InputError(f"{who} is empty; every client needs at least one sample")
        columns = list(zip(*samples, strict=True))
        parts = tuple(torch.stack([torch.as_tensor(v) for v in column]) for column in columns)
    if not isinstance(parts, (tuple, list)) or len(parts) != 2:
        raise InputError(f"{who} must be a pair (inputs, targets) or a Dataset of such pairs")
    x, y = (torch.as_tensor(part) for part in parts)
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
