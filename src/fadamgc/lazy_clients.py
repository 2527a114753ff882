"""Clients whose data is made when it is needed: a federation of a million clients starts at once."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from fadamgc.errors import InputError, reason, shown, whole
from fadamgc.samples import Rows, Samples, read
from fadamgc.task_checks import check_shapes

KEPT = 4096  # number of clients whose data is kept: the most recently used clients


class LazyClients(Sequence[Samples]):
    """The clients of a task, whose data a function makes when a client takes part.

    Args:
        n: number of clients.
        make: a function of the client's number, 0 .. n - 1, that returns its data: a pair (inputs, targets)
            of tensors, or a Dataset. It must return the same data whenever it is called.
        samples: the number of samples of every client: one number, or one per client.

    Example:
        >>> import fadamgc, torch
        >>> def make(i):
        ...     g = torch.Generator().manual_seed(i)
        ...     return torch.randn(8, 3, generator=g), torch.randint(2, (8,), generator=g)
        >>> clients = fadamgc.LazyClients(1_000_000, make, samples=8)
        >>> fadamgc.Task(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, clients)
        Task('task', model=Linear, clients=1000000, samples=8000000, made on demand)
    """

    def __init__(self, n: int, make: Callable[[int], Any], samples: int | Sequence[int]) -> None:
        self.n = whole("n", n, 1)
        if not callable(make):
            raise InputError(f"make={shown(make)} is not a function of a client's number")
        self.make = make
        try:
            sizes = np.asarray(samples)
            if sizes.ndim == 0:
                sizes = np.full(self.n, whole("samples", samples, 1))
        except (ValueError, OverflowError) as error:
            raise InputError(f"samples={shown(samples)} is not accepted: {reason(error)}") from None
        if sizes.shape != (self.n,) or sizes.dtype.kind not in "iu" or sizes.min() < 1:
            raise InputError(
                f"samples={shown(samples)} is not accepted; give one whole number >= 1, or one for each of "
                f"{self.n} clients"
            )
        self.sizes: NDArray[np.int64] = sizes.astype(np.int64)
        self._first: Rows | None = None
        self._kept: OrderedDict[int, Samples] = OrderedDict()

    def __len__(self) -> int:
        return self.n

    def __iter__(self) -> Iterator[Samples]:
        return (self[i] for i in range(self.n))

    @overload
    def __getitem__(self, client: int) -> Samples: ...
    @overload
    def __getitem__(self, client: slice) -> list[Samples]: ...
    def __getitem__(self, client: int | slice) -> Samples | list[Samples]:
        if isinstance(client, slice):
            return [self[i] for i in range(*client.indices(self.n))]
        client = range(self.n)[client]
        data = self._kept.pop(client, None) or self._made(client)
        self._kept[client] = data  # now the most recently used
        if len(self._kept) > KEPT:
            self._kept.popitem(last=False)
        return data

    def _made(self, client: int) -> Samples:
        try:
            data = self.make(client)
        except Exception as error:
            raise InputError(
                f"make={shown(self.make)} failed for client {client}: {reason(error)}"
            ) from error
        samples = read(data, f"client {client}")
        if len(samples) != self.sizes[client]:
            raise InputError(
                f"client {client} has {len(samples)} samples, and samples= says {self.sizes[client]}"
            )
        if isinstance(samples, Rows):
            self._first = self._first or samples
            check_shapes([("the client before", self._first), (f"client {client}", samples)])
        return samples

    def __getstate__(self) -> dict[str, Any]:
        """Pickle without the data, which is made again."""
        return self.__dict__ | {"_kept": OrderedDict(), "_first": None}
