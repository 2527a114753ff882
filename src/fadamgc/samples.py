"""The samples of a client or of a test set: rows of tensors, or items that are read when a batch needs them.

samples.batch(positions)    inputs and targets of some samples
samples.take(positions)     some of the samples, without a copy
len(samples)
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, default_collate

from fadamgc.errors import InputError, reason

log = logging.getLogger("fadamgc")

Pair: TypeAlias = tuple[Tensor, Tensor]
Collate: TypeAlias = Callable[[list[Any]], Any]
Positions: TypeAlias = NDArray[np.int64]

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # types for training
READ_AGAIN = 8  # items of Datasets that are read twice, to detect random augmentation
CHECKED = 1 << 24  # numbers that are checked at once


class Rows:
    """Samples in memory: some rows of two tensors, which other clients may share."""

    def __init__(self, inputs: Tensor, targets: Tensor, index: Positions | None = None) -> None:
        self.inputs, self.targets = inputs, targets
        self.index = np.arange(len(inputs)) if index is None else index

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, positions: Positions) -> Pair:
        """Return copies of inputs and targets at some positions, 0 .. len - 1."""
        rows = torch.from_numpy(self.index[positions]).to(self.inputs.device)
        return self.inputs[rows], self.targets[rows]

    def take(self, positions: Positions) -> Rows:
        """Return the samples at some positions, in the same tensors."""
        return Rows(self.inputs, self.targets, self.index[positions])

    def pair(self) -> Pair:
        """Return all inputs and targets: views of the tensors if the rows follow each other, else copies."""
        first, count = int(self.index[0]), len(self)
        if np.array_equal(self.index, np.arange(first, first + count)):
            return self.inputs[first : first + count], self.targets[first : first + count]
        return self.batch(np.arange(count))

    def to(self, device: torch.device) -> Rows:
        """Return the samples on a device; tensors that are already on it are not copied."""
        return Rows(self.inputs.to(device), self.targets.to(device), self.index)


class Items:
    """Samples that stay in a Dataset, or in any list, until a batch needs them."""

    def __init__(self, dataset: Any, collate: Collate | None, index: Positions | None = None) -> None:
        self.dataset, self.collate = dataset, collate
        self.index = np.arange(len(dataset)) if index is None else index

    def __len__(self) -> int:
        return len(self.index)

    def batch(self, positions: Positions) -> tuple[Any, Any]:
        """Read the items at some positions, and make a batch of them."""
        places = [int(i) for i in self.index[positions]]
        read = getattr(self.dataset, "__getitems__", None)
        items = [self.dataset[i] for i in places] if read is None else list(read(places))
        if self.collate is None:
            try:
                batch = default_collate(items)
            except RuntimeError as error:
                raise InputError(
                    f"items have different shapes: {reason(error)}; give collate=, a function that makes a "
                    "batch of a list of items, for example with torch.nn.utils.rnn.pad_sequence"
                ) from error
        else:
            batch = self.collate(items)
        if not isinstance(batch, (tuple, list)) or len(batch) != 2:
            source = "collate returned" if self.collate else "the items of the Dataset become"
            raise InputError(
                f"{source} a {type(batch).__name__}; a batch must be a pair (inputs, targets): give "
                "collate=, a function of a list of items that returns one"
            )
        inputs, targets = (_plain(part) for part in batch)
        return inputs, targets

    def take(self, positions: Positions) -> Items:
        """Return the samples at some positions, in the same Dataset."""
        return Items(self.dataset, self.collate, self.index[positions])

    def pair(self) -> tuple[Any, Any]:
        """Read all items as one batch."""
        return self.batch(np.arange(len(self)))


Samples: TypeAlias = Rows | Items


def tensors_of(samples: Iterable[Samples | None]) -> list[Tensor]:
    """Return the tensors in memory that hold samples, each once."""
    rows = [data for data in samples if isinstance(data, Rows)]
    return list({id(t): t for data in rows for t in (data.inputs, data.targets)}.values())


def _plain(part: Any) -> Any:
    """Return the inputs or targets of a batch as tensors in dicts and tuples."""
    if isinstance(part, Mapping):
        return {str(key): _plain(value) for key, value in part.items()}
    if isinstance(part, (tuple, list)):
        return tuple(map(_plain, part))
    return torch.as_tensor(part)


def map_tensors(function: Callable[[Tensor], Tensor], part: Any) -> Any:
    """Apply a function to all tensors of the inputs, or the targets, of a batch."""
    if isinstance(part, Tensor):
        return function(part)
    if isinstance(part, Mapping):
        return {key: map_tensors(function, value) for key, value in part.items()}
    return tuple(map_tensors(function, value) for value in part)


def cast(data: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Move data to a device; convert floating-point data to a dtype, leave integers as they are."""
    return data.to(device=device, dtype=dtype if data.is_floating_point() else None)


# Reading the user's data.


def read(data: Any, owner: str, lazy: bool = False, collate: Collate | None = None) -> Samples:
    """Return the data of one client, or the test data, as samples; tensors are checked.

    The items of a Dataset are read now, unless ``lazy`` is set or ``collate`` is given.
    """
    if isinstance(data, (Rows, Items)):
        return data
    if isinstance(data, IterableDataset):
        raise InputError(f"{owner} is an IterableDataset; give a Dataset with a length and data[i]")
    rows = tensor_rows(data)
    is_list = isinstance(data, list) and collate is not None
    if rows is None and (is_list or (isinstance(data, Dataset) and (lazy or collate is not None))):
        items = Items(data, collate)
        if not len(items):
            raise InputError(f"{owner} is empty; every client needs at least one sample")
        return items
    if rows is None:
        try:
            inputs, targets = (torch.as_tensor(part).detach() for part in _columns(data))
        except Exception as error:
            raise InputError(
                f"{owner} is not a pair (inputs, targets) of tensors or a Dataset of such pairs: "
                f"{reason(error)}"
            ) from error
        _check_tensors(inputs, targets, owner)
        rows = Rows(inputs, targets)
    else:
        _check_tensors(rows.inputs, rows.targets, owner)
    _check_values(rows, owner)
    return rows


def tensor_rows(data: Any) -> Rows | None:
    """Return the rows of a TensorDataset of two tensors, or of a Subset of one; None for other data."""
    if isinstance(data, Subset):
        rows = tensor_rows(data.dataset)
        return None if rows is None else rows.take(np.asarray(data.indices, dtype=np.int64))
    if isinstance(data, TensorDataset) and len(data.tensors) == 2:
        return Rows(data.tensors[0].detach(), data.tensors[1].detach())
    return None


def _columns(data: Any) -> tuple[Any, ...]:
    """Return all inputs and all targets; those of a Dataset are read item by item."""
    if isinstance(data, Dataset):
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
                "be the same: give collate=, a function that pads the items of a batch "
                "(torch.nn.utils.rnn.pad_sequence)"
            )
    return torch.stack(values)


def _check_tensors(x: Tensor, y: Tensor, owner: str) -> None:
    for role, part in (("inputs", x), ("targets", y)):
        if problem := _problem(part):
            raise InputError(f"{owner} has {role} {problem}")
    if x.ndim == 0 or y.ndim == 0 or len(x) != len(y):
        raise InputError(
            f"{owner} has inputs of shape {tuple(x.shape)} and targets of shape {tuple(y.shape)}; "
            "both must have one entry per sample"
        )


def _check_values(rows: Rows, owner: str) -> None:
    if not len(rows):
        raise InputError(f"{owner} is empty; every client needs at least one sample")
    for role, part in (("inputs", rows.inputs), ("targets", rows.targets)):
        if not part.is_floating_point():
            continue
        length = max(1, CHECKED // max(1, part[:1].numel()))
        for first in range(0, len(rows), length):
            values = part[torch.from_numpy(rows.index[first : first + length]).to(part.device)]
            if not (finite := torch.isfinite(values)).all():
                sample = int((~finite).nonzero()[0, 0])
                value = values[sample][~finite[sample]].reshape(-1)[0].item()
                raise InputError(f"{owner} has non-finite {role}: {value} at sample {first + sample}")


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


def share_tensors(clients: Sequence[Samples]) -> list[Samples]:
    """Return the samples of all clients as rows of the same two tensors; items stay items.

    Samples that are in different tensors are copied into new ones, one client after the other.
    """
    rows = [data for data in clients if isinstance(data, Rows)]
    if not rows or len(rows) < len(clients):
        return list(clients)
    if len({(*_place(data.inputs), *_place(data.targets)) for data in rows}) == 1:
        return [Rows(rows[0].inputs, rows[0].targets, data.index) for data in rows]
    inputs, targets = (
        torch.cat([data.pair()[part] for data in rows]).to(rows[0].inputs.device) for part in (0, 1)
    )
    ends = np.cumsum([len(data) for data in rows])
    return [Rows(inputs, targets, np.arange(end - len(r), end)) for r, end in zip(rows, ends, strict=True)]


def joined(parts: Sequence[Samples]) -> Samples:
    """Return several samples as one."""
    shared = share_tensors(parts)
    if isinstance(first := shared[0], Rows):
        return Rows(first.inputs, first.targets, np.concatenate([data.index for data in shared]))
    items = [data for data in shared if isinstance(data, Items)]
    chain = ConcatDataset[Any]([Subset(data.dataset, data.index.tolist()) for data in items])
    return Items(chain, first.collate)


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Return where a tensor is in memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride(), tensor.device


def items_vary(data: Sequence[tuple[Dataset[Any], Rows]]) -> bool:
    """Whether an item of a Dataset has other values when it is read again; tried with a few items.

    Each entry is a Dataset and the samples that were read from it.
    """
    tried = data[:: max(1, len(data) // READ_AGAIN)]
    with _random_numbers_kept():
        for dataset, rows in tried:
            places = np.linspace(0, len(rows) - 1, -(-READ_AGAIN // len(tried))).astype(int)
            for i in sorted(set(places.tolist())):
                try:
                    values = [torch.as_tensor(value).detach() for value in dataset[i]]
                    stored = [part[0] for part in rows.batch(np.array([i]))]
                    if not all(map(torch.equal, values, stored)):
                        return True
                except Exception:  # the Dataset can be read only once
                    return False
    return False


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
