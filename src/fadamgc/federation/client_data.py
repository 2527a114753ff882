"""The clients' data on one device and in one dtype: the samples of a client are a value in its job."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fadamgc.lazy_clients import LazyClients
from fadamgc.random_numbers import readers_seeded
from fadamgc.runtime import seeded
from fadamgc.samples import Items, Rows, Samples, cast, joined, map_tensors

SOME = 16  # number of clients whose data represents all clients, if data is made on demand


class ClientData(NamedTuple):
    """The samples of one client, or of a test set. Batches are made in the dtype that the model needs."""

    samples: Samples
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> int:
        """The number of samples."""
        return len(self.samples)

    @property
    def is_read_per_batch(self) -> bool:
        """Whether the samples are items of a Dataset, and not in memory."""
        return isinstance(self.samples, Items)

    def batch(self, positions: NDArray[np.int64]) -> tuple[Any, Any]:
        """Return inputs and targets at some positions, 0 .. size - 1, in the client's samples."""
        inputs, targets = self.samples.batch(positions)
        return map_tensors(self._ready, inputs), map_tensors(self._ready, targets)

    def chunks(self, length: int, samples: int | None = None) -> Iterator[tuple[Any, Any]]:
        """Yield copies of all samples (or the first ones) in order, at most ``length`` at a time."""
        end = self.size if samples is None else min(samples, self.size)
        for first in range(0, end, length):
            yield self.batch(np.arange(first, min(first + length, end)))

    @contextmanager
    def draws_at(self, seed: int) -> Iterator[None]:
        """Seed torch in a ``with`` block, and also Python and numpy if the samples are items of a Dataset."""
        with seeded(seed, self.device), readers_seeded(seed) if self.is_read_per_batch else nullcontext():
            yield

    def _ready(self, part: Tensor) -> Tensor:
        return cast(part, self.dtype, self.device)


class ClientTable:
    """The samples of all clients; ``size`` has the number of samples of each.

    Samples in memory are on the device, as rows of tensors that all clients share, unless they are made on
    demand.
    """

    def __init__(
        self, clients: Sequence[Samples] | LazyClients, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype, self.device = dtype, device
        self.on_demand = isinstance(clients, LazyClients)
        if isinstance(clients, LazyClients):
            self.size: NDArray[Any] = clients.sizes
            self.is_read_per_batch = isinstance(clients[0], Items)
        else:
            rows = [data for data in clients if isinstance(data, Rows)]
            if len(rows) == len(clients):
                inputs, targets = rows[0].inputs.to(device), rows[0].targets.to(device)
                clients = [Rows(inputs, targets, data.index) for data in rows]
            self.size = np.array([len(data) for data in clients], dtype=np.int64)
            # Whether samples of some client are items of a Dataset, and not in memory.
            self.is_read_per_batch = any(isinstance(data, Items) for data in clients)
        self._clients = clients

    def __len__(self) -> int:
        return len(self.size)

    def __getitem__(self, client: int) -> ClientData:
        data = self._clients[client]
        if self.on_demand and isinstance(data, Rows):
            data = data.to(self.device)
        return ClientData(data, self.dtype, self.device)

    def __iter__(self) -> Iterator[ClientData]:
        return (self[i] for i in range(len(self)))

    def together(self) -> ClientData:
        """Return the samples of all clients, one client after the other, if they are in memory.

        If samples are made on demand, the result has only the samples of some clients.
        """
        some = np.linspace(0, len(self) - 1, min(SOME, len(self))).astype(int) if self.on_demand else None
        clients = [
            self[i].samples for i in (range(len(self)) if some is None else sorted(set(some.tolist())))
        ]
        return ClientData(joined(clients), self.dtype, self.device)


def gather(clients: Sequence[ClientData], positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return the samples at positions (steps, clients, samples) of each client's own data."""
    rows = np.stack([data.samples.index[positions[:, c]] for c, data in enumerate(clients)], axis=1)
    if len({id(data.samples.inputs) for data in clients if isinstance(data.samples, Rows)}) == 1:
        # Clients of one table: one look-up for all.
        return _rows(clients[0], rows)
    columns = [_rows(data, rows[:, c]) for c, data in enumerate(clients)]
    inputs, targets = zip(*columns, strict=True)
    return torch.stack(inputs, dim=1), torch.stack(targets, dim=1)


def _rows(data: ClientData, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    samples, index = data.samples, torch.from_numpy(rows).to(data.device)
    assert isinstance(samples, Rows)
    inputs, targets = (
        cast(torch.index_select(part, 0, index.reshape(-1)), data.dtype, data.device)
        for part in (samples.inputs, samples.targets)
    )
    return inputs.view(*rows.shape, *inputs.shape[1:]), targets.view(*rows.shape, *targets.shape[1:])
