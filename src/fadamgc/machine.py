"""What the machine has."""

from __future__ import annotations

import os


def memory() -> int | None:
    """Its memory in bytes; None where that cannot be known."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None
