"""The clients' data: the samples of a client are a value in its job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fadamgc.task import Pair, cast


class ClientData(NamedTuple):
    """The samples of one client: rows ``start`` to ``start + size - 1`` of tensors that clients may share."""

    inputs: Tensor
    targets: Tensor
    start: int
    size: int

    def batch(self, positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
        """Return inputs and targets at some positions, 0 .. size - 1, in the client's samples."""
        rows = torch.from_numpy(positions + self.start).to(self.inputs.device)
        return self.inputs[rows], self.targets[rows]

    def chunks(self, length: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield copies of all samples in order, at most ``length`` at a time."""
        end = self.start + self.size
        for first in range(self.start, end, length):
            rows = slice(first, min(first + length, end))
            yield self.inputs[rows].clone(), self.targets[rows].clone()


class ClientTable:
    """The samples of all clients, one client after the other in two tensors.

    ``start`` has the first row of each client and ``size`` its number of samples.
    """

    def __init__(self, pairs: Sequence[Pair], dtype: torch.dtype, device: torch.device) -> None:
        self.inputs, self.targets = (
            torch.cat([cast(pair[part], dtype, device) for pair in pairs]) for part in (0, 1)
        )
        self.size: NDArray[Any] = np.array([len(x) for x, _ in pairs], dtype=np.int64)
        self.start = np.concatenate([[0], np.cumsum(self.size)[:-1]])

    def __len__(self) -> int:
        return len(self.size)

    def __getitem__(self, client: int) -> ClientData:
        return ClientData(self.inputs, self.targets, int(self.start[client]), int(self.size[client]))
