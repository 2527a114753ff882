"""All random numbers of a run: each depends on its address, not on the numbers drawn before.

The clients of round t are a function of (seed, t); a client's batches are a function of (seed, t, client). So
nothing depends on the order of execution, on the number of workers, or on whether the run was interrupted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import repeat
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# One number for each kind of draw, so that no two kinds share a stream.
COHORT, BATCHES, FORWARD, GRADIENT, EVALUATION, COIN, DROPOUT, STRAGGLER, TRANSFORM, READ = range(10)
CODEC, NOISE = 10, 11


def generator(seed: int, stream: int, *address: int) -> np.random.Generator:
    """Return the random generator of an address."""
    return np.random.default_rng(_sequence(seed, stream, address))


def torch_seed(seed: int, stream: int, *address: int) -> int:
    """Return a seed for torch's generator at an address (dropout and the like)."""
    return int(_sequence(seed, stream, address).generate_state(1, np.uint64)[0]) >> 1


def _sequence(seed: int, stream: int, address: tuple[int, ...]) -> np.random.SeedSequence:
    numbers = [seed, stream, *address]
    if max(numbers) < 1 << 32:
        return np.random.SeedSequence(np.array(numbers, dtype=np.uint32))  # the same sequence, made faster
    return np.random.SeedSequence(numbers)


class Draw(NamedTuple):
    """Who takes part in a round; both ascending, tracked a subset of sampled."""

    sampled: tuple[int, ...]
    tracked: tuple[int, ...]


def draw(seed: int, t: int, n: int, S: int, tracked: int) -> Draw:
    """Draw S of n clients, and ``tracked`` of those, uniformly without replacement.

    >>> draw(seed=0, t=1, n=4, S=4, tracked=4)
    Draw(sampled=(0, 1, 2, 3), tracked=(0, 1, 2, 3))
    """
    random = generator(seed, COHORT, t)
    sampled = random.choice(n, size=S, replace=False)
    both = sampled, random.choice(sampled, size=tracked, replace=False)
    return Draw(*(tuple(sorted(ids.tolist())) for ids in both))


def draw_steps(seed: int, t: int, coin: float) -> int:
    """Draw the number of local steps of round t, which ends after each step with probability ``coin``.

    >>> draw_steps(seed=0, t=1, coin=1.0)
    1
    """
    return int(generator(seed, COIN, t).geometric(coin))


def draw_silent(seed: int, t: int, clients: Sequence[int], probability: float) -> tuple[int, ...]:
    """Draw the sampled clients that do not answer in round t.

    >>> draw_silent(seed=0, t=1, clients=(0, 1, 2), probability=0.0)
    ()
    """
    return tuple(i for i in clients if generator(seed, DROPOUT, t, i).random() < probability)


def draw_part(seed: int, t: int, client: int, K: int, probability: float) -> int:
    """Draw the steps of a client that with some probability does only a part of its K steps in round t.

    >>> draw_part(seed=0, t=1, client=0, K=10, probability=0.0)
    10
    """
    random = generator(seed, STRAGGLER, t, client)
    return int(random.integers(1, K)) if random.random() < probability and K > 1 else K


POSITIONS, SMALL = 1 << 20, 1 << 12  # samples whose positions are made at once: at most, and at least


@dataclass(frozen=True)
class Batches:
    """The mini-batches of one client in one round, drawn while they are read: K may be any number."""

    steps: int  # number of batches, K
    width: int  # samples in a full batch, B
    samples: int  # of the client
    address: tuple[int, int, int] | None = None  # (seed, t, client) of random orders; None: order of the data
    period: int = 1  # batches per epoch, if the last batch of an epoch is smaller; 1 if all batches are full
    last: int = 0  # samples in the last batch of an epoch

    def __post_init__(self) -> None:
        if self.period == 1:
            object.__setattr__(self, "last", self.width)

    @property
    def total(self) -> int:
        """Samples of all batches together."""
        return self.steps * self.width - self.steps // self.period * (self.width - self.last)

    @property
    def sizes(self) -> tuple[int, int, int, int]:
        """A key for the sizes of all batches: equal keys mean equal sizes."""
        return self.steps, self.width, self.period, self.last

    def size_of(self, first: int, last: int) -> NDArray[np.int64]:
        """Return the number of samples in each of the batches first .. last - 1."""
        if self.period == 1:
            return np.full(last - first, self.width)
        ends = np.arange(first + 1, last + 1) % self.period == 0
        return np.where(ends, self.last, self.width)

    def __iter__(self) -> Iterator[NDArray[np.int64]]:
        """Yield positions in the client's data, batch by batch."""
        read, some = self.reader(), max(1, POSITIONS // self.width)
        for first in range(0, self.steps, some):
            last = min(first + some, self.steps)
            sizes = self.size_of(first, last).tolist()
            for rows, size in zip(read(last - first), sizes, strict=True):
                yield rows[:size]

    def reader(self) -> Callable[[int], NDArray[np.int64]]:
        """Return a function that reads the next k batches, (k, B); short ones are padded."""
        orders = self._orders()
        rest = np.empty(0, dtype=np.int64)

        def read(k: int) -> NDArray[np.int64]:
            nonlocal rest
            parts, missing = [rest], k * self.width - len(rest)
            while missing > 0:
                parts.append(next(orders))
                missing -= len(parts[-1])
            order = np.concatenate(parts)
            rest = order[k * self.width :]
            return order[: k * self.width].reshape(k, self.width)

        return read

    def _orders(self) -> Iterator[NDArray[np.int64]]:
        """Yield orders of the client's data, one per epoch, padded to whole batches."""
        if self.address is None:
            everything = np.arange(self.samples, dtype=np.int64)
            yield from repeat(np.tile(everything, max(1, SMALL // self.samples)))
            return
        seed, t, client = self.address
        random = generator(seed, BATCHES, t, client)
        padding = self.width - self.last
        while True:
            order = random.permutation(self.samples)
            yield np.concatenate([order, np.repeat(order[:1], padding)]) if padding else order
