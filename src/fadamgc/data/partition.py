"""Partitions of N labelled samples over n clients.

Every partition is computed as an array ``owner``, (N,), of the client of each sample, so each sample belongs
to exactly one client. The same arguments give the same partition.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from fadamgc.errors import INT64_MAX, InputError, counts, finite, whole
from fadamgc.runtime import check_room

IntArray = npt.NDArray[np.int64]

STREAM = 0x70617274  # "part" in ASCII; no other random numbers use this number with the seed


@dataclass(frozen=True, eq=False)
class Partition:
    """The samples of every client.

    >>> partition = shards([0, 0, 0, 1, 1, 1], clients=2, seed=0, shards_per_client=1)
    >>> [rows.tolist() for rows in partition]
    [[0, 1, 2], [3, 4, 5]]
    """

    indices: tuple[IntArray, ...]
    """For each client, the sorted positions of its samples."""
    note: str
    """How the samples were assigned, for reports and plots."""

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[IntArray]:
        return iter(self.indices)

    def __getitem__(self, client: int) -> IntArray:
        return self.indices[client]

    def sizes(self) -> IntArray:
        """Return the number of samples of every client, (clients,)."""
        return np.array([len(samples) for samples in self.indices], dtype=np.int64)

    def counts(self, labels: npt.ArrayLike | torch.Tensor) -> IntArray:
        """Return the number of samples per client and class, (clients, classes); classes are sorted.

        >>> shards([0, 0, 0, 1, 1, 1], clients=2, seed=0, shards_per_client=1).counts([0, 0, 0, 1, 1, 1])
        array([[3, 0],
               [0, 3]])
        """
        labels = _labels(labels)
        if len(labels) != self.sizes().sum():
            raise InputError(f"labels has {len(labels)} samples; this partition has {self.sizes().sum()}")
        classes, column = np.unique(labels, return_inverse=True)
        return np.stack([np.bincount(column[rows], minlength=len(classes)) for rows in self.indices])


def dirichlet(
    labels: npt.ArrayLike | torch.Tensor,
    clients: int,
    alpha: float,
    seed: int,
    *,
    min_size: int = 1,
    retries: int = 20,
) -> Partition:
    """Partition with label skew: shares of each class are drawn from Dirichlet(alpha, ..., alpha).

    A draw that leaves a client with fewer than ``min_size`` samples is rejected. If all draws are rejected,
    the one that lacks the fewest samples is repaired: samples move one at a time, from the most frequent
    class of the client that is the largest at that moment. The partition's note says which draw was used
    and how many samples were moved.

    Args:
        labels: class of every sample, (N,) integers.
        clients: number of clients n; n * min_size <= N.
        alpha: concentration; small is skewed (0.1 in most papers), large is close to iid.
        seed: the same seed gives the same partition.
        min_size: least number of samples per client.
        retries: largest number of draws.

    >>> dirichlet([0, 1] * 50, clients=5, alpha=1.0, seed=0).note
    'Dirichlet(1) over 5 clients; draw 1 of at most 20'
    """
    labels = _labels(labels)
    counts(clients=clients, min_size=min_size, retries=retries)
    alpha = finite("alpha", alpha, 0, exclusive=True)
    _check_enough(len(labels), f"clients={clients} with min_size={min_size}", clients * min_size)
    rng = generator(seed, STREAM)
    _, column, class_sizes = np.unique(labels, return_inverse=True, return_counts=True)

    best, best_draw, least_missing = np.empty(0, dtype=np.int64), 0, math.inf
    for draw in range(1, retries + 1):
        sizes = _draw(rng, class_sizes, clients, alpha)
        missing = int(np.maximum(min_size - sizes.sum(axis=1), 0).sum())
        if missing < least_missing:
            best, best_draw, least_missing = sizes, draw, missing
        if missing == 0:
            break
    sizes, moved = _repair(best, min_size)

    owner = np.empty(len(labels), dtype=np.int64)
    for c in range(len(class_sizes)):
        owner[rng.permutation(np.flatnonzero(column == c))] = np.repeat(np.arange(clients), sizes[:, c])

    note = f"Dirichlet({alpha:g}) over {_plural(clients, 'client')}; draw {best_draw} of at most {retries}"
    if moved:
        goal = "no client is empty" if min_size == 1 else f"every client has at least {min_size}"
        note += f"; {_plural(moved, 'sample')} moved so that {goal}"
    return _partition(owner, clients, note)


def iid(labels_or_count: npt.ArrayLike | torch.Tensor | int, clients: int, seed: int) -> Partition:
    """Partition at random; the clients' sizes differ by at most one.

    >>> iid(10, clients=3, seed=0).sizes()
    array([4, 3, 3])
    """
    counts(clients=clients)
    if isinstance(labels_or_count, (int, np.integer)):
        field, count = "count", whole("count", int(labels_or_count), 1, INT64_MAX)
        check_room(f"count={count}", 8 * count)
    else:
        field, count = "labels", len(_labels(labels_or_count))
    if count < clients:
        raise InputError(f"{field} gives {count} samples; clients={clients} need at least {clients}")
    owner = generator(seed, STREAM).permutation(np.arange(count) % clients)
    return _partition(owner, clients, f"iid over {_plural(clients, 'client')}")


def shards(
    labels: npt.ArrayLike | torch.Tensor, clients: int, seed: int, shards_per_client: int = 2
) -> Partition:
    """Partition with few labels per client: sort by label, cut into equal shards, assign shards at random.

    >>> shards([0, 0, 1, 1, 2, 2, 3, 3], clients=2, seed=0).sizes()
    array([4, 4])
    """
    labels = _labels(labels)
    counts(clients=clients, shards_per_client=shards_per_client)
    total = clients * shards_per_client
    _check_enough(len(labels), f"clients={clients} with shards_per_client={shards_per_client}", total)
    client_of_shard = generator(seed, STREAM).permutation(np.arange(total) % clients)
    shard_of_rank = np.arange(len(labels)) * total // len(labels)
    owner = np.empty(len(labels), dtype=np.int64)
    owner[np.argsort(labels, kind="stable")] = client_of_shard[shard_of_rank]
    note = f"{_plural(shards_per_client, 'shard')} per client over {_plural(clients, 'client')}"
    return _partition(owner, clients, note)


def natural(groups: npt.ArrayLike | torch.Tensor) -> Partition:
    """Partition into one client per distinct value of ``groups``, such as a person or a device.

    >>> natural(["bob", "ann", "bob"]).indices
    (array([1]), array([0, 2]))
    """
    values = _vector("groups", groups)
    if values.dtype.kind not in "biuUSTO":
        raise InputError(f"groups has dtype {values.dtype}; it must have integers or strings")
    try:
        names, owner = np.unique(values, return_inverse=True)
    except TypeError as error:
        raise InputError(f"groups cannot be sorted ({error}); it must have integers or strings") from None
    note = f"natural: {_plural(len(names), 'client')}, one per distinct value of groups"
    return _partition(owner, len(names), note)


def generator(seed: int, stream: int) -> np.random.Generator:
    """Return a generator of random numbers that depend on the seed and the stream only."""
    return np.random.default_rng(np.random.SeedSequence([whole("seed", seed, 0), stream]))


def _check_enough(samples: int, settings: str, needed: int) -> None:
    if samples < needed:
        raise InputError(f"labels has {samples} samples; {settings} need at least {needed}")


def _partition(owner: IntArray, clients: int, note: str) -> Partition:
    order = np.argsort(owner, kind="stable").astype(np.int64, copy=False)
    ends = np.cumsum(np.bincount(owner, minlength=clients))
    return Partition(tuple(np.split(order, ends[:-1])), note)


def _draw(rng: np.random.Generator, class_sizes: IntArray, clients: int, alpha: float) -> IntArray:
    """Draw the number of samples per client and class, (clients, classes)."""
    counts = np.empty((clients, len(class_sizes)), dtype=np.int64)
    for c, size in enumerate(class_sizes):
        ends = np.cumsum(_shares(rng, clients, alpha))
        cuts = np.rint(ends / ends[-1] * size).astype(np.int64)
        # Clients in a new order for each class; otherwise rounding would always favour the same clients.
        counts[rng.permutation(clients), c] = np.diff(cuts, prepend=0)
    return counts


def _shares(rng: np.random.Generator, clients: int, alpha: float) -> npt.NDArray[np.float64]:
    """Draw from Dirichlet(alpha, ..., alpha), or from its limit if alpha is out of numpy's range."""
    shares = rng.dirichlet(np.full(clients, alpha))
    if abs(shares.sum() - 1) < 1e-6:  # false for NaN
        return shares
    if alpha >= 1:
        return np.full(clients, 1 / clients)
    shares = np.zeros(clients)
    shares[rng.integers(clients)] = 1
    return shares


def _repair(counts: IntArray, min_size: int) -> tuple[IntArray, int]:
    """Give every client at least ``min_size`` samples; return the counts and how many samples moved."""
    counts = counts.copy()
    sizes = counts.sum(axis=1)
    moved = 0
    for poor in np.flatnonzero(sizes < min_size):
        while sizes[poor] < min_size:
            rich = sizes.argmax()  # it has more than min_size samples: the mean over clients is >= min_size
            c = counts[rich].argmax()
            counts[[rich, poor], c] += (-1, 1)
            sizes[[rich, poor]] += (-1, 1)
            moved += 1
    return counts, moved


def _labels(values: npt.ArrayLike | torch.Tensor) -> IntArray:
    labels = _vector("labels", values)
    if labels.dtype.kind not in "iu":
        raise InputError(f"labels has dtype {labels.dtype}; it must have integers")
    return labels.astype(np.int64, copy=False)


def _vector(field: str, values: npt.ArrayLike | torch.Tensor) -> npt.NDArray[Any]:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu().numpy()
    try:
        vector = np.asarray(values)
    except ValueError as error:
        raise InputError(f"{field} is not an array ({error}); it must have one dimension") from None
    if vector.ndim != 1 or not vector.size:
        raise InputError(f"{field} has shape {vector.shape}; it must have one dimension and not be empty")
    return vector


def _plural(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
