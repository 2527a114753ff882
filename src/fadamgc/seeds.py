"""Torch's own random numbers: from a seed for a while, then as if nothing had been."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers from a seed inside, and outside those that would have come anyway.

    >>> with seeded(3):
    ...     one = torch.rand(2)
    >>> with seeded(3):
    ...     torch.equal(one, torch.rand(2))
    True
    """
    with torch.random.fork_rng(devices=[]):
        if torch.accelerator.is_available():
            torch.manual_seed(seed)
        else:  # the same numbers, without a note of the whole stack for devices that are not there
            torch.default_generator.manual_seed(int(seed))
        yield
