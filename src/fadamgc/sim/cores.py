"""How many threads a computation uses."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import torch


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute with a single thread for a while."""
    before = torch.get_num_threads()
    if before == 1:
        yield
        return
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def single_threads(count: int) -> ThreadPoolExecutor:
    """So many threads, each of which computes with a single thread."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, thread_name_prefix="fadamgc", initializer=_alone)
    # All start now: a thread's count of threads becomes that of threads to come, which is to stay.
    together = threading.Barrier(count)
    list(pool.map(lambda _: together.wait(), range(count)))
    torch.set_num_threads(before)
    return pool


def _alone() -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # or the thread would take the count of that time when it first needs it
