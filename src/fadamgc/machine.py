"""What the machine has."""

from __future__ import annotations

import os

from fadamgc.errors import InputError


def memory() -> int | None:
    """Its memory in bytes; None where that cannot be known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def check_room(what: str, size: int) -> None:
    """Refuse arrays of ``size`` bytes if the machine has less memory than that; ``what`` asked for them."""
    available = memory()
    if available is not None and size > available:
        raise InputError(
            f"{what} needs {size / 1e9:.3g} GB, this machine has {available / 1e9:.3g} GB of memory; "
            "choose smaller numbers"
        )
