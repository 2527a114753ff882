"""A progress bar for one or more runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from fadamgc.federation.run import Record

Advance = Callable[..., None]


@contextmanager
def progress_bar(show: bool, label: str, rounds: int, done: int) -> Iterator[Advance]:
    """Show a progress bar on stderr if that is a terminal; yield a function to call after each round."""
    console = Console(stderr=True)
    if not show or not (console.is_terminal or console.is_jupyter):
        yield lambda *_: None
        return
    label_column, metric_column = TextColumn("{task.description}"), TextColumn("{task.fields[metric]}")
    columns = label_column, BarColumn(), MofNCompleteColumn(), metric_column, TimeRemainingColumn()
    with Progress(*columns, console=console, transient=True) as bar:
        item = bar.add_task(label, total=rounds, completed=done, metric="")

        def advance(record: Record | None, done: int | None = None) -> None:
            if record is not None:
                shown = "" if record.test_metric is None else f"{record.test_metric:.4g}"
                bar.update(item, completed=record.round if done is None else done, metric=shown)

        yield advance
