"""``fadamgc data``: which data sets are known, where they are, and whether they are complete."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer
from rich.console import Console
from rich.status import Status

from fadamgc.cli.console import DataRoot, say, terminal, use_data
from fadamgc.errors import InputError

DataName = Annotated[str | None, typer.Argument(help="A data set.", show_default=False)]

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="Which data sets are known, where they are, and whether they are complete.",
)


@app.command("list")
def data_list(data_root: DataRoot = None) -> None:
    """Show the data sets that are known, and which of them are there."""
    from rich.table import Table

    from fadamgc.data.sources import DIGITS, SOURCES, data_root_from, files_of
    from fadamgc.data.sources import data_root as root

    use_data(data_root)
    table = Table(title=f"Data sets in {root()} ({data_root_from()})", title_justify="left")
    for title in ("name", "what", "classes", "train / test rows when complete", "there"):
        table.add_column(title, no_wrap=title in ("name", "there"))
    for source in SOURCES.values():
        there = 0
        for split in source.splits:
            try:
                files_of(source, split)
                there += 1
            except InputError:
                continue
        train, test = source.rows
        said = ("no", "one part", "yes")[there]
        table.add_row(source.name, source.kind, f"{source.classes}", f"{train:,} / {test:,}", said)
    train, test = DIGITS.rows
    table.add_row(DIGITS.name, DIGITS.kind, f"{DIGITS.classes}", f"{train:,} / {test:,}", "always")
    terminal().print(table)


@app.command("path")
def data_path(name: DataName = None, data_root: DataRoot = None) -> None:
    """Print the data root, or the folder of one data set."""
    from fadamgc.data.sources import data_root as root
    from fadamgc.data.sources import source

    use_data(data_root)
    print(root() if name is None else root() / source(name).name)


@app.command("check")
def data_check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Data sets.", show_default="all in the data root")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Read data sets from end to end: counts, classes, means. Pictures are decoded, once.

    Examples:

    - `fadamgc data check`
    - `fadamgc data check cifar10 --data-root ~/data`
    """
    from fadamgc.data.check import check
    from fadamgc.data.sources import DIGITS, SOURCES, files_of, source
    from fadamgc.data.sources import data_root as root

    use_data(data_root)
    console = terminal()
    chosen = [DIGITS if name == DIGITS.name else source(name) for name in names or ()]
    for known in () if names else SOURCES.values():
        try:
            files_of(known, known.splits[0])
            chosen.append(known)
        except InputError:
            continue
    if not chosen:
        raise InputError(f"there is no data set in {root()}; `fadamgc data list` shows which are known")
    problems = []
    for known in chosen:
        try:
            with Console(stderr=True).status(known.name) as status:
                parts = check(known, partial(_reading, status, known.name))
        except InputError as error:
            problems.append(str(error))
            console.print(f"{known.name}: damaged or missing", highlight=False)
            continue
        for split, part in parts.items():
            whole = "complete" if part.rows == part.complete else f"of {part.complete:,}"
            line = (
                f"{known.name} {split}: {part.rows:,} rows ({whole}), {part.classes} of {known.classes} "
                f"classes, {part.least:,} to {part.most:,} a class"
            )
            if part.mean:
                mean, std = (", ".join(f"{v:.4f}" for v in values) for values in (part.mean, part.std))
                line += f", mean {mean}, std {std}"
            console.print(line, highlight=False, soft_wrap=True)
    if problems:
        raise InputError("\n".join(problems))


@app.command("get")
def data_get(
    name: Annotated[str, typer.Argument(help="A data set.", show_default=False)], data_root: DataRoot = None
) -> None:
    """Download a data set from the Hugging Face hub into the data root."""
    from fadamgc.data.sources import get, source

    use_data(data_root)
    folder = get(source(name), say)
    terminal().print(f"{folder}", highlight=False, soft_wrap=True)


def _reading(status: Status, name: str, split: str, rows: int) -> None:
    status.update(f"{name} {split}: {rows:,} rows")
