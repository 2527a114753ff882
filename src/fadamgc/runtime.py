"""Memory, threads and torch's global random numbers, which all computations of a process share."""

from __future__ import annotations

import logging
import os
import pickle
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import torch
import torch.multiprocessing  # teaches ForkingPickler to share tensors
from torch import Tensor

from fadamgc.errors import InputError

log = logging.getLogger("fadamgc")

CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


_processes = 1  # that share the GPUs of the machine


def share_gpus(processes: int) -> None:
    """Say how many processes like this one take turns on the GPUs of the machine."""
    global _processes
    _processes = processes


def memory(device: torch.device | None = None) -> int | None:
    """Return the bytes of memory that this process may use; None if unknown.

    On a GPU, that is its part of what is free there.
    """
    if device is not None and device.type == "cuda":
        on_this_gpu = -(-_processes // max(1, torch.accelerator.device_count()))
        return int(torch.cuda.mem_get_info(device)[0]) // on_this_gpu
    limits = []
    with suppress(AttributeError, ValueError, OSError):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    with suppress(ImportError):  # Windows
        import resource

        limit = resource.getrlimit(resource.RLIMIT_AS)[0]
        limits += [] if limit == resource.RLIM_INFINITY else [limit]
    for path in CGROUPS:
        with suppress(OSError, ValueError):  # no such file, or "max"
            limits.append(int(Path(path).read_text()))
    return min(limits, default=None)


def check_room(setting: str, size: int) -> None:
    """Refuse arrays of ``size`` bytes if the machine has less memory; the message names the setting."""
    available = memory()
    if available is not None and size > available:
        raise InputError(
            f"{setting} needs {size / 1e9:.3g} GB, this machine has {available / 1e9:.3g} GB of memory; "
            "choose smaller numbers"
        )


def pickled(value: object) -> bytes:
    """Pickle a value for one other process of this machine; tensors stay where they are, in shared memory.

    If the machine has too little shared memory (as some containers have), the tensors are copied.
    """
    try:
        return bytes(ForkingPickler.dumps(value))
    except RuntimeError as error:
        if "shared memory" not in str(error):
            raise
        log.warning("%s; each process gets a copy of the data", error)
        return pickle.dumps(value)


def device_of(name: str | torch.device, worker: int = 0) -> torch.device:
    """Return the device of a name, for one of several worker processes.

    "auto" is a GPU if the machine has one. Where a name has no number ("auto", "cuda"), the workers take
    turns on the GPUs of the machine.
    """
    if str(name) == "auto":
        found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        name = "cpu" if found is None else found.type
    device = torch.device(name)
    if device.type in ("cpu", "mps", "meta") or ":" in str(device):
        return device
    count = torch.accelerator.device_count() if torch.accelerator.is_available() else 0
    return torch.device(device.type, worker % count) if count else device


@contextmanager
def seeded(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Seed torch's global generators in a ``with`` block; restore their states afterwards.

    They are the CPU's and the device's; None is the current GPU, if there is one.
    """
    device = _current_device() if device is None else device
    with torch.random.fork_rng(devices=[]):
        # The same numbers; torch.manual_seed would also seed the other devices, and record a stack trace.
        torch.default_generator.manual_seed(int(seed))
        if device.type == "cpu":
            yield
            return
        module = torch.get_device_module(device)
        before = module.get_rng_state(device)
        module.set_rng_state(generator_on(device, int(seed)).get_state(), device)
        try:
            yield
        finally:
            module.set_rng_state(before, device)


def random_states(device: torch.device) -> list[Tensor]:
    """Return the states of torch's global generators: the CPU's, and the device's."""
    states = [torch.get_rng_state()]
    if device.type != "cpu":
        states.append(torch.get_device_module(device).get_rng_state(device))
    return states


def generator_on(device: torch.device, seed: int) -> torch.Generator:
    """Return a generator of random numbers on a device."""
    return torch.Generator(device).manual_seed(seed)


def _current_device() -> torch.device:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is None:
        return torch.device("cpu")
    return torch.device(accelerator.type, torch.accelerator.current_device_index())


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch to a single thread in a ``with`` block."""
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
    """Start a pool of ``count`` threads, in each of which torch uses no other thread."""
    before = torch.get_num_threads()
    pool = ThreadPoolExecutor(count, thread_name_prefix="fadamgc", initializer=_use_one_thread)
    # Start all threads now: torch.set_num_threads in a thread also changes the default for threads that are
    # created later, so the default is restored below.
    barrier = threading.Barrier(count)
    list(pool.map(lambda _: barrier.wait(), range(count)))
    torch.set_num_threads(before)
    return pool


def _use_one_thread() -> None:
    torch.set_num_threads(1)
    torch.get_num_threads()  # torch stores the number for this thread now, not at first use
