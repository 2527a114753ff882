"""``fadamgc data``: list, locate, check and download data sets."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.status import Status

from fadamgc.cli.console import DataRoot, argument, say, terminal, use_data
from fadamgc.errors import InputError

if TYPE_CHECKING:
    from fadamgc.data.sources import Source

DataName = argument("Name of a data set.")

app = typer.Typer(
    no_args_is_help=True, rich_markup_mode="markdown", help="List, locate, check and download data sets."
)


@app.command("list")
def data_list(data_root: DataRoot = None) -> None:
    """List the data sets that fadamgc knows, and which of them are in the data root."""
    from rich.table import Table

    from fadamgc.data.sources import DIGITS, SOURCES, data_root_from
    from fadamgc.data.sources import data_root as root

    use_data(data_root)
    table = Table(title=f"Data sets in {root()} ({data_root_from()})", title_justify="left")
    for title in ("name", "kind", "classes", "train / test rows when complete", "present"):
        table.add_column(title, no_wrap=title in ("name", "present"))
    for data in (*SOURCES.values(), DIGITS):
        parts = sum(_has_files(data, split) for split in data.splits)
        present = "always" if data is DIGITS else ("no", "one part", "yes")[parts]
        train, test = data.rows
        table.add_row(data.name, data.kind, f"{data.classes}", f"{train:,} / {test:,}", present)
    terminal().print(table)


@app.command("path")
def data_path(name: Annotated[str | None, DataName] = None, data_root: DataRoot = None) -> None:
    """Print the data root, or the folder of one data set."""
    from fadamgc.data.sources import data_root as root
    from fadamgc.data.sources import source

    use_data(data_root)
    print(root() if name is None else root() / source(name).name)


@app.command("check")
def data_check(
    names: Annotated[
        list[str] | None, typer.Argument(help="Names of data sets.", show_default="all in the data root")
    ] = None,
    data_root: DataRoot = None,
) -> None:
    """Read data sets completely and print counts, classes and means. Decoded images are cached.

    Examples:

    - `fadamgc data check`
    - `fadamgc data check cifar10 --data-root ~/data`
    """
    from fadamgc.data.check import check
    from fadamgc.data.sources import DIGITS, SOURCES, source
    from fadamgc.data.sources import data_root as root

    use_data(data_root)
    if names:
        data_sets = [DIGITS if name == DIGITS.name else source(name) for name in names]
    else:
        data_sets = [data for data in SOURCES.values() if _has_files(data, data.splits[0])]
    if not data_sets:
        raise InputError(f"there is no data set in {root()}; `fadamgc data list` shows which are known")
    problems = []
    for data in data_sets:
        try:
            with Console(stderr=True).status(data.name) as status:
                parts = check(data, partial(_show_rows, status, data.name))
        except InputError as error:
            problems.append(str(error))
            print(f"{data.name}: damaged or missing")
            continue
        for split, part in parts.items():
            whole = "complete" if part.rows == part.complete else f"of {part.complete:,}"
            line = (
                f"{data.name} {split}: {part.rows:,} rows ({whole}), {part.classes} of {data.classes} "
                f"classes, {part.least:,} to {part.most:,} per class"
            )
            if part.mean:
                mean, std = (", ".join(f"{v:.4f}" for v in values) for values in (part.mean, part.std))
                line += f", mean {mean}, std {std}"
            print(line)
    if problems:
        raise InputError("\n".join(problems))


@app.command("get")
def data_get(name: Annotated[str, DataName], data_root: DataRoot = None) -> None:
    """Download a data set from the Hugging Face hub into the data root."""
    from fadamgc.data.sources import get, source

    use_data(data_root)
    print(get(source(name), say))


def _has_files(source: Source, split: str) -> bool:
    from fadamgc.data.sources import files_of

    try:
        files_of(source, split)
    except InputError:
        return False
    return True


def _show_rows(status: Status, name: str, split: str, rows: int) -> None:
    status.update(f"{name} {split}: {rows:,} rows")
