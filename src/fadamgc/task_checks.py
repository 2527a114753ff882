"""Checks of a new task, so that errors appear before the work starts."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn

from fadamgc.errors import InputError, reason, shown
from fadamgc.flat import Flat
from fadamgc.metrics import has_classes
from fadamgc.runtime import seeded
from fadamgc.samples import Rows, Samples, cast, map_tensors

if TYPE_CHECKING:
    from fadamgc.task import Loss, Task, Transform

BROADCAST = "Using a target size"  # the start of torch's warning that output and target differ in shape

Owned: TypeAlias = Sequence[tuple[str, Rows]]  # samples, each with the name of its owner


def in_memory(clients: Sequence[Samples], tests: Mapping[int, Samples], test: Samples | None) -> Owned:
    """Return all samples that are in memory, each with the name of its owner."""
    owned: list[tuple[str, Samples | None]] = [(f"client {i}", data) for i, data in enumerate(clients)]
    owned += [(f"the test data of client {i}", data) for i, data in tests.items()]
    owned.append(("the test data", test))
    return [(owner, rows) for owner, rows in owned if isinstance(rows, Rows)]


def check_shapes(owned: Owned) -> None:
    """Refuse samples that differ from the others in shape or type."""
    for owner, rows in owned:
        first = owned[0][1]
        for role in ("inputs", "targets"):
            part, other = getattr(rows, role), getattr(first, role)
            if part.shape[1:] != other.shape[1:]:
                raise InputError(
                    f"{owner} has {role} of shape {tuple(part.shape[1:])} per sample, client 0 has "
                    f"{tuple(other.shape[1:])}; all must be the same"
                )
            if part.is_floating_point() != other.is_floating_point() or not _compatible(part, other):
                raise InputError(
                    f"{owner} has {role} of {part.dtype}, client 0 has {other.dtype}; they must be equal"
                )


def _compatible(a: Tensor, b: Tensor) -> bool:
    """Whether torch can combine the types of two tensors (not those of some unsigned integers)."""
    try:
        torch.promote_types(a.dtype, b.dtype)
    except RuntimeError:
        return False
    return True


def check_task(task: Task, owned: Owned) -> None:
    """Run a copy of the model on two samples, if the task has any data."""
    if not (batch := task.sample()):
        return
    x, y = batch
    if task.transform is not None:
        _check_transform(task.transform, x, y)
    output, loss, error, broadcast = _probe(task.model, task.loss, x, y)
    if not isinstance(output, Tensor):
        raise InputError(
            f"model={type(task.model).__name__} returns a {type(output).__name__}; "
            "it must return a tensor: wrap it in a module that does"
        )
    _check_labels(task.loss, output, owned)
    if error is not None:
        raise InputError(
            f"loss failed on output of shape {tuple(output.shape)} and targets of shape {_shape(y)} and type "
            f"{_type(y)}: {reason(error)}"
        )
    if isinstance(y, Tensor) and (broadcast or _pairs_samples_wrongly(task.loss, output, y)):
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
    measured = task.metric == "accuracy" and task.test_samples is not None
    if measured and not (isinstance(y, Tensor) and has_classes(output, y)):
        per_sample = tuple(y.shape[1:]) if isinstance(y, Tensor) else _shape(y)
        raise InputError(
            "metric='accuracy' needs whole-number targets and one output per class, or one logit with "
            f"targets 0 and 1; here outputs have shape {tuple(output.shape[1:])} per sample, targets "
            f"{per_sample} of {_type(y)}: give metric='loss' or a function"
        )


def _check_transform(transform: Transform, x: Any, y: Any) -> None:
    """Try the transform on two samples."""
    if not callable(transform):
        raise InputError(f"transform={shown(transform)} is not a function of (inputs, targets)")
    try:
        with torch.random.fork_rng(devices=[]):
            new = transform(map_tensors(torch.clone, x), map_tensors(torch.clone, y))
        new_x, new_y = new
        shapes = [_shape(part) for part in (new_x, new_y)], [_type(part) for part in (new_x, new_y)]
    except Exception as error:
        raise InputError(
            f"transform={shown(transform)} failed on inputs of shape {_shape(x)}; it must "
            f"return (inputs, targets): {reason(error)}"
        ) from error
    if shapes != ([_shape(part) for part in (x, y)], [_type(part) for part in (x, y)]):
        raise InputError(
            f"transform={shown(transform)} must return tensors of the same shapes and types as its "
            f"arguments; inputs of shape {_shape(x)} became {_shape(new_x)}"
        )


def _pairs_samples_wrongly(loss: Loss, output: Tensor, y: Tensor) -> bool:
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
            value, flipped, other = (float(loss(outputs, t)) for t in (targets, targets.flip(0), others))
    except Exception:  # the loss does not accept random numbers
        return False
    return abs(value - flipped) <= 1e-6 * abs(value) and abs(value - other) > 1e-3 * abs(value)


def _check_labels(loss: Loss, output: Tensor, owned: Owned) -> None:
    """Refuse labels for which the model has no output, unless the loss accepts them (-100, often)."""
    classes = output.shape[1] if output.ndim > 1 else 1
    for owner, rows in owned:
        y = rows.targets
        if y.is_floating_point() or y.is_complex() or y.shape[1:] != output.shape[2:] or classes < 2:
            return
        labels = y[torch.from_numpy(rows.index).to(y.device)].long()  # some types cannot be compared
        beyond = labels[(labels < 0) | (labels >= classes)]
        for label in beyond.unique().tolist():  # type: ignore[no-untyped-call]
            sample = int((labels == label).reshape(len(labels), -1).any(dim=1).nonzero()[0])
            try:
                loss(output[:1].detach(), labels[sample : sample + 1].to(output.device, y.dtype))
            except Exception as error:
                raise InputError(
                    f"{owner} has label {label} at sample {sample}; the model has {classes} outputs, "
                    f"so labels must be in 0..{classes - 1}"
                ) from error


def _probe(model: nn.Module, loss: Loss, x: Any, y: Any) -> tuple[Any, Any, Exception | None, bool]:
    """Run one batch through a copy of the model in training mode.

    Return the output, the loss, the error of the loss, and whether torch warned that output and target differ
    in shape. Raise InputError for an error of the model.
    """
    device = next(model.parameters()).device
    with seeded(0, device), torch.inference_mode(False), torch.enable_grad():
        module = Flat.of(model).copy(model).train()
        first = next(p for p in module.parameters() if p.requires_grad)

        def ready(part: Tensor) -> Tensor:
            return cast(part, first.dtype, first.device).clone()

        x, y = map_tensors(ready, x), map_tensors(ready, y)
        try:
            output = module(x)
        except Exception as error:
            raise InputError(
                f"model={type(model).__name__} failed on inputs of shape {_shape(x)} and type {_type(x)}: "
                f"{reason(error)}"
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


def _shape(part: Any) -> Any:
    """Return the shape of inputs or targets; of several tensors, all shapes."""
    if isinstance(part, Tensor):
        return tuple(part.shape)
    if isinstance(part, dict):
        return {key: _shape(value) for key, value in part.items()}
    return tuple(map(_shape, part))


def _type(part: Any) -> Any:
    return part.dtype if isinstance(part, Tensor) else type(part).__name__
