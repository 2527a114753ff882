"""All randomness of a run, addressed and not consumed.

Who takes part in round t is a function of (seed, t); a client's batches are a function of
(seed, t, client). So nothing depends on the order of execution, on how many workers there are, or on
whether the run was interrupted.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# One number for each kind of draw, so that no two kinds share a stream.
COHORT, BATCHES, FORWARD, GRADIENT, EVALUATION = range(5)


def generator(seed: int, stream: int, *address: int) -> np.random.Generator:
    """The random numbers that live at an address."""
    return np.random.default_rng(_sequence(seed, stream, address))


def torch_seed(seed: int, stream: int, *address: int) -> int:
    """A seed for torch's own generator at an address (dropout and the like)."""
    return int(_sequence(seed, stream, address).generate_state(1, np.uint64)[0] >> 1)


def _sequence(seed: int, stream: int, address: tuple[int, ...]) -> np.random.SeedSequence:
    numbers = [seed, stream, *address]
    if max(numbers) < 1 << 32:
        return np.random.SeedSequence(np.array(numbers, dtype=np.uint32))  # the same, but quicker
    return np.random.SeedSequence(numbers)


class Draw(NamedTuple):
    """Who takes part in a round; both ascending, tracked a subset of sampled."""

    sampled: tuple[int, ...]
    tracked: tuple[int, ...]


def draw(seed: int, t: int, n: int, S: int, tracked: int) -> Draw:
    """S of n clients, and ``tracked`` of those, uniformly without replacement.

    >>> draw(seed=0, t=1, n=4, S=4, tracked=4)
    Draw(sampled=(0, 1, 2, 3), tracked=(0, 1, 2, 3))
    """
    random = generator(seed, COHORT, t)
    sampled = random.choice(n, size=S, replace=False)
    return Draw(
        sampled=tuple(sorted(int(i) for i in sampled)),
        tracked=tuple(sorted(int(i) for i in random.choice(sampled, size=tracked, replace=False))),
    )


class Batches(NamedTuple):
    """The mini-batches of one client in one round: step k uses ``rows[k, :size[k]]``."""

    rows: NDArray[np.int64]  # (K, B), positions in the client's own data; padded with valid positions
    size: NDArray[np.int64]  # (K,)


def steps_of(samples: int, batch_size: int | None, local_steps: int | None, local_epochs: int | None) -> int:
    """How many local steps K a client with that many samples takes in a round."""
    if local_steps is not None:
        return local_steps
    assert local_epochs is not None
    return local_epochs * (1 if batch_size is None else math.ceil(samples / batch_size))


def batches(
    seed: int,
    t: int,
    client: int,
    samples: int,
    batch_size: int | None,
    local_steps: int | None,
    local_epochs: int | None = None,
) -> Batches:
    """The batches of a client in round t.

    With ``local_steps`` the client walks through its data in a fresh random order, again and again,
    until K full batches are made. With ``local_epochs`` every epoch is a fresh order cut into batches,
    the last of which may be smaller. A client with no more data than a batch uses all of it in every
    step, in its own order.
    """
    K = steps_of(samples, batch_size, local_steps, local_epochs)
    if batch_size is None or samples <= batch_size:
        everything = np.arange(samples, dtype=np.int64)
        return Batches(np.broadcast_to(everything, (K, samples)), np.full(K, samples, dtype=np.int64))
    random = generator(seed, BATCHES, t, client)
    if local_epochs is None:
        walks = math.ceil(K * batch_size / samples)
        order = np.concatenate([random.permutation(samples) for _ in range(walks)])
        index = order[: K * batch_size].reshape(K, batch_size)
        return Batches(index, np.full(K, batch_size, dtype=np.int64))
    per_epoch = K // local_epochs
    index = np.empty((local_epochs, per_epoch * batch_size), dtype=np.int64)
    for epoch in index:
        order = random.permutation(samples)
        epoch[:samples] = order
        epoch[samples:] = order[0]
    size = np.full((local_epochs, per_epoch), batch_size, dtype=np.int64)
    size[:, -1] = samples - (per_epoch - 1) * batch_size
    return Batches(index.reshape(K, batch_size), size.reshape(K))
