"""What the machine offers to this process."""

from __future__ import annotations

import os
from pathlib import Path

from fadamgc.errors import InputError

CGROUPS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def memory() -> int | None:
    """The memory in bytes that this process may use: the machine's, or a smaller limit; None if unknown."""
    limits = [_physical(), _address_space(), *map(_cgroup, CGROUPS)]
    return min((limit for limit in limits if limit is not None), default=None)


def _physical() -> int | None:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def _address_space() -> int | None:
    try:
        import resource
    except ImportError:  # Windows
        return None
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    return None if limit == resource.RLIM_INFINITY else limit


def _cgroup(path: str) -> int | None:
    try:
        return int(Path(path).read_text())
    except (OSError, ValueError):  # no such file, or "max"
        return None


def check_room(what: str, size: int) -> None:
    """Refuse arrays of ``size`` bytes if the machine has less memory than that; ``what`` asked for them."""
    available = memory()
    if available is not None and size > available:
        raise InputError(
            f"{what} needs {size / 1e9:.3g} GB, this machine has {available / 1e9:.3g} GB of memory; "
            "choose smaller numbers"
        )
