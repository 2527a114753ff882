"""The command line. An error of this package is shown as its message alone; tracebacks are bugs."""

from __future__ import annotations

import signal
import sys
from importlib.metadata import version
from io import TextIOWrapper
from typing import Annotated, Any, NoReturn

import typer
from typer.core import TyperGroup

from fadamgc.cli.console import say
from fadamgc.cli.data_commands import app as data_app
from fadamgc.cli.federation_commands import app as federation_app
from fadamgc.cli.judge_commands import app as judge_app
from fadamgc.cli.run_commands import app as run_app
from fadamgc.cli.show_commands import app as show_app
from fadamgc.errors import FadamgcError
from fadamgc.loading import load_module

BAD_INPUT = 2
INTERRUPTED = 130


class Commands(TyperGroup):
    """The group of commands; the one place where errors become messages and exit codes."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except FadamgcError as error:
            from fadamgc.experiments.run.runner import Interrupted

            if isinstance(error, Interrupted):
                _end([str(error)], INTERRUPTED)
            _end([f"error: {line}" for line in str(error).splitlines()])
        except OSError as error:
            where = f"{error.filename}: " if error.filename else ""
            _end([f"error: {where}{error.strerror or error}"])
        except (MemoryError, RuntimeError) as error:
            if isinstance(error, RuntimeError) and "can't allocate memory" not in str(error):
                raise  # torch has no special error for lack of memory
            _end(["error: there is not enough memory for this; make the task smaller or use fewer --workers"])
        except KeyboardInterrupt:
            _end(["stopped"], INTERRUPTED)


def _end(lines: list[str], code: int = BAD_INPUT) -> NoReturn:
    for line in lines:
        say(line)
    raise typer.Exit(code) from None


app = typer.Typer(
    cls=Commands,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main() -> None:
    """Entry point of the command ``fadamgc``."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="replace")  # for characters that the terminal cannot show
    try:
        app()
    except SystemExit as end:
        if end.code == INTERRUPTED:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # already exiting: ignore a second Ctrl-C
        raise


def _version(wanted: bool) -> None:
    if wanted:
        print(f"fadamgc {version('fadamgc')}")
        raise typer.Exit


@app.callback()
def _fadamgc(
    _show_version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    modules: Annotated[
        list[str],
        typer.Option(
            "--import",
            metavar="MODULE",
            help="Import a module or a file first, such as one that calls fadamgc.register. Repeatable.",
        ),
    ] = [],  # noqa: B006
) -> None:
    """Federated optimisation with adaptive optimizers that do not drift.

    Start with `fadamgc compare`: it runs seven methods on handwritten digits in about a minute, prints a
    table and writes a report page.
    """
    for module in modules:
        load_module(module)


app.add_typer(run_app)
app.add_typer(show_app)
app.add_typer(judge_app)
app.add_typer(data_app, name="data")
app.add_typer(federation_app, name="federation")
