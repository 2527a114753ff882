"""Log messages of the Flower apps."""

from __future__ import annotations

import logging
import sys

from fadamgc.errors import FadamgcError

log = logging.getLogger("fadamgc")


def log_to_stdout() -> None:
    """Show this package's log messages in the output of a Flower app, and its errors in one sentence."""
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("fadamgc: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    logging.getLogger("flwr").addFilter(without_traceback)


def without_traceback(record: logging.LogRecord) -> bool:
    """Take the traceback out of a message of Flower about an error of this package, which explains itself."""
    error = record.exc_info[1] if record.exc_info else None
    if isinstance(error, FadamgcError):
        record.msg, record.args, record.exc_info = f"{record.getMessage()}: {error}", (), None
    return True
