"""Log messages of the Flower apps."""

from __future__ import annotations

import logging
import sys

log = logging.getLogger("fadamgc")


def log_to_stdout() -> None:
    """Show this package's log messages in the output of a Flower app."""
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("fadamgc: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
