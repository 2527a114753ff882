"""Progress of runs on stderr: bars in a terminal, otherwise one line per run."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn, TimeRemainingColumn

from fadamgc.escape import duration, printable
from fadamgc.experiments.planned_run import PlannedRun
from fadamgc.experiments.run.execution import RunEnd
from fadamgc.experiments.run.listener import Listener, OnEnd, OnRound
from fadamgc.stages import Hear, SlowStages, Warn

SLOW_STAGE = 5.0  # seconds after which a stage is printed if stderr is not a terminal


def warn(message: str, console: Console | None = None) -> None:
    """Print a warning to stderr."""
    tell(f"warning: {printable(message)}", console or Console(stderr=True))


def tell(line: str, console: Console) -> None:
    """Print a line as it is."""
    console.print(line, markup=False, highlight=False, soft_wrap=True)


def _once(show: Warn) -> Warn:
    """Return a function that shows each message once; several workers may send the same."""
    shown: set[str] = set()

    def show_new(message: str) -> None:
        if message not in shown:
            shown.add(message)
            show(message)

    return show_new


@contextmanager
def display(plan: Sequence[PlannedRun], quiet: bool, done: int, later: int = 0) -> Iterator[Listener]:
    """Show the progress of runs, and the time left for the whole command.

    ``done`` is the number of runs that the command has finished before; ``later`` is the number of rounds
    in runs that the command executes afterwards.
    """
    console = Console(stderr=True)
    above_bars = _once(partial(warn, console=console))
    if quiet or not plan:
        yield Listener(lambda _: None, lambda _, __: None, above_bars, lambda _: None)
    elif console.is_terminal:
        with _bars(console, plan, later) as (on_round, on_end, on_stage):
            yield Listener(on_round, on_end, above_bars, on_stage)
    else:
        slow = SlowStages(lambda what: tell(printable(f"{what} ..."), console), SLOW_STAGE)
        yield Listener(lambda _: None, _lines(console, plan, done, later), above_bars, slow)


def _lines(console: Console, plan: Sequence[PlannedRun], done: int, later: int) -> OnEnd:
    total, all_rounds = done + len(plan), later + sum(planned.run.rounds for planned in plan)
    number, rounds, began = done, 0, time.monotonic()

    def on_end(i: int, end: RunEnd) -> None:
        nonlocal number, rounds
        number, rounds = number + 1, rounds + plan[i].run.rounds
        left = (time.monotonic() - began) * (all_rounds - rounds) / rounds
        more = f"; about {duration(left)} left" if number < total or later else ""
        value = "" if end.metric is None else f", {plan[i].task.metric} {end.metric:.4g}"
        if end.metric is not None and not math.isfinite(end.metric):
            value = ", diverged"
        message = end.error or f"{end.rounds} rounds{value}"
        tell(printable(f"[{number}/{total}] {plan[i].name}: {message}{more}"), console)

    return on_end


@contextmanager
def _bars(console: Console, plan: Sequence[PlannedRun], later: int) -> Iterator[tuple[OnRound, OnEnd, Hear]]:
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), "rounds")
    times = (TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, *times, console=console, transient=True) as bars:
        totals: Counter[str] = Counter()
        for planned in plan:
            totals[planned.method.label] += planned.run.rounds
        bar_of = {
            label: bars.add_task(escape(printable(label)), total=total) for label, total in totals.items()
        }
        bar_of_all = bars.add_task("[bold]all", total=sum(totals.values()) + later)
        rounds = [0] * len(plan)

        def move(i: int, by: int) -> None:
            by = min(by, plan[i].run.rounds - rounds[i])  # a last message may come after the end
            rounds[i] += by
            bars.advance(bar_of[plan[i].method.label], by)
            bars.advance(bar_of_all, by)

        def on_end(i: int, _: RunEnd) -> None:
            move(i, plan[i].run.rounds - rounds[i])  # the run may have ended early

        def on_stage(what: str | None) -> None:
            more = "" if what is None else f": {escape(printable(what))}"
            bars.update(bar_of_all, description=f"[bold]all[/bold]{more}")

        yield (lambda i: move(i, 1)), on_end, on_stage
