"""Code that all commands share: arguments, options, output and the data folder."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from fadamgc.errors import InputError
from fadamgc.escape import printable


def argument(help: str) -> Any:
    """Declare a required argument of a command."""
    return typer.Argument(help=help, show_default=False)


def option(help: str, *names: str, default: str | bool = False) -> Any:
    """Declare an option of a command; ``default`` describes the default value, False hides it."""
    return typer.Option(*names, help=help, show_default=default)


DataRoot = Annotated[
    Path | None, option("Folder of the data sets.", "--data-root", default="FADAMGC_DATA, or a cache folder")
]


def say(message: str) -> None:
    """Print one line to stderr."""
    print(printable(message), file=sys.stderr)


def terminal() -> Console:
    """Return standard output; if it is not a terminal, wide enough not to wrap a table."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def use_data(root: Path | None) -> None:
    """Search for data in this folder, in this process and in the processes that it starts."""
    if root is not None:
        if not root.is_dir():
            raise InputError(f"data_root={str(root)!r} is not a folder; give the folder of the data sets")
        os.environ["FADAMGC_DATA"] = str(root.resolve())
