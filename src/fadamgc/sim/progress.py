"""The progress of one or more runs on stderr: a bar in a terminal, otherwise a line now and then."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NamedTuple

from fadamgc.escape import duration, printable
from fadamgc.federation.record import Record
from fadamgc.stages import SlowStages, listening

if TYPE_CHECKING:
    from rich.console import Console

FIRST_LINE, NEXT_LINES, SLOW_STAGE = 10.0, 60.0, 5.0  # seconds until a line is printed


class Shown(NamedTuple):
    """Functions to call while runs are executed."""

    begin: Callable[[int], None]  # with the number of rounds that are done already
    advance: Callable[..., None]  # with the record of a round, and the number of rounds done if several runs


@contextmanager
def progress_bar(show: bool, label: str, rounds: int) -> Iterator[Shown]:
    """Show the progress of ``rounds`` rounds on stderr, and the stages before the first round."""
    if not show:
        yield Shown(lambda _: None, lambda *_: None)
        return
    # Imported here because ``import fadamgc.sim`` does not need them.
    from rich.console import Console
    from rich.markup import escape
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    if not (console.is_terminal or console.is_jupyter):
        lines = _Lines(console, printable(label), rounds)
        with listening(SlowStages(lines.say, SLOW_STAGE)):
            yield Shown(lines.begin, lines.advance)
        return
    label = escape(printable(label))
    label_column, metric_column = TextColumn("{task.description}"), TextColumn("{task.fields[metric]}")
    columns = label_column, BarColumn(), MofNCompleteColumn(), metric_column, TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        item = bar.add_task(label, total=rounds, metric="")

        def hear(what: str | None) -> None:
            bar.update(item, description=label if what is None else f"{label}: {what}")

        def begin(done: int) -> None:
            bar.reset(item, completed=done)

        def advance(record: Record | None, done: int | None = None) -> None:
            if record is not None:
                now = record.round if done is None else done
                bar.update(item, completed=now, metric=_metric(record))

        with listening(hear):
            yield Shown(begin, advance)


class _Lines:
    """Prints a line if enough time has passed since the last line."""

    def __init__(self, console: Console, label: str, rounds: int) -> None:
        self.console, self.label, self.rounds = console, label, rounds
        self.begin(0)

    def begin(self, done: int) -> None:
        self.done, self.began = done, time.monotonic()
        self.due = self.began + FIRST_LINE

    def advance(self, record: Record | None, now: int | None = None) -> None:
        seconds = time.monotonic()
        if record is None or seconds < self.due:
            return
        self.due = seconds + NEXT_LINES
        now = record.round if now is None else now
        left = (seconds - self.began) * (self.rounds - now) / max(1, now - self.done)
        value = f", {_metric(record)}" if record.test_metric is not None else ""
        self.say(f"round {now} of {self.rounds}{value}; about {duration(left)} left")

    def say(self, what: str) -> None:
        self.console.print(f"{self.label}: {what}", markup=False, highlight=False, soft_wrap=True)


def _metric(record: Record) -> str:
    return "" if record.test_metric is None else f"{record.test_metric:.4g}"
