"""The progress of one or more runs on stderr: a bar in a terminal, otherwise a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fadamgc.escape import duration, printable
from fadamgc.federation.run import Record

Advance = Callable[..., None]
FIRST_LINE, NEXT_LINES = 10.0, 60.0  # seconds until the first line, and between two lines


@contextmanager
def progress_bar(show: bool, label: str, rounds: int, done: int) -> Iterator[Advance]:
    """Show the progress on stderr; yield a function to call after each round."""
    console = Console(stderr=True)
    if not show:
        yield lambda *_: None
        return
    if not (console.is_terminal or console.is_jupyter):
        yield _lines(console, printable(label), rounds, done)
        return
    label = escape(printable(label))
    label_column, metric_column = TextColumn("{task.description}"), TextColumn("{task.fields[metric]}")
    columns = label_column, BarColumn(), MofNCompleteColumn(), metric_column, TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        item = bar.add_task(f"{label}: preparing, perhaps compiling", total=rounds, completed=done, metric="")

        def advance(record: Record | None, done: int | None = None) -> None:
            if record is not None:
                now = record.round if done is None else done
                bar.update(item, description=label, completed=now, metric=_metric(record))

        yield advance


def _lines(console: Console, label: str, rounds: int, done: int) -> Advance:
    """Return a function that prints a line if the last one is long ago."""
    began = time.monotonic()
    due = began + FIRST_LINE

    def advance(record: Record | None, now: int | None = None) -> None:
        nonlocal due
        seconds = time.monotonic()
        if record is None or seconds < due:
            return
        due = seconds + NEXT_LINES
        now = record.round if now is None else now
        left = (seconds - began) * (rounds - now) / max(1, now - done)
        value = f", {_metric(record)}" if record.test_metric is not None else ""
        line = f"{label}: round {now} of {rounds}{value}; about {duration(left)} left"
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    return advance


def _metric(record: Record) -> str:
    return "" if record.test_metric is None else f"{record.test_metric:.4g}"
