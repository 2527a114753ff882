"""Slow stages before a round, for progress displays: loading data, choosing an executor, compiling.

with stage("compiling"):
    ...

Warnings to the user go to the display as well, or to the log if there is no display.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Hear = Callable[[str | None], object]  # called with a stage when it begins, and with None when it has ended

Warn = Callable[[str], object]

log = logging.getLogger("fadamgc")

_listeners: list[Hear] = []
_displays: list[Warn] = []


def warning(message: str) -> None:
    """Show a warning to the user."""
    if not _displays:
        log.warning("%s", message)
    for warn in _displays:
        warn(message)


@contextmanager
def showing(warn: Warn) -> Iterator[None]:
    """Show warnings with a function in a ``with`` block."""
    _displays.append(warn)
    try:
        yield
    finally:
        _displays.remove(warn)


@contextmanager
def stage(what: str) -> Iterator[None]:
    """Tell all listeners that the stage ``what`` runs in a ``with`` block."""
    for hear in _listeners:
        hear(what)
    try:
        yield
    finally:
        for hear in _listeners:
            hear(None)


@contextmanager
def listening(hear: Hear) -> Iterator[None]:
    """Let a function hear all stages of this process in a ``with`` block."""
    _listeners.append(hear)
    try:
        yield
    finally:
        _listeners.remove(hear)


class SlowStages:
    """Calls ``say`` with a stage that takes longer than ``seconds``, for output without a terminal."""

    def __init__(self, say: Callable[[str], object], seconds: float) -> None:
        self.say, self.seconds = say, seconds
        self._timer: threading.Timer | None = None

    def __call__(self, what: str | None) -> None:
        """Take note that a stage begins, or that it has ended (None)."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if what is not None:
            self._timer = threading.Timer(self.seconds, self.say, (what,))
            self._timer.daemon = True
            self._timer.start()
