"""``fadamgc federation``: a federation on this machine, for a first try and for tests."""

from __future__ import annotations

import signal
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from fadamgc.console import say, terminal
from fadamgc.errors import FadamgcError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="A Flower federation on this machine: one SuperLink and some nodes, on loopback.",
)

Folder = Annotated[Path, typer.Option("--folder", help="Where its logs, keys and states are.")]
Nodes = Annotated[int, typer.Option("--nodes", "-n", help="How many nodes.")]
Secure = Annotated[
    bool,
    typer.Option(
        "--secure", help="TLS, and only nodes with a registered key; certificates and keys are made."
    ),
]
HERE = Path("out/federation")


@app.command()
def up(nodes: Nodes = 3, secure: Secure = False, folder: Folder = HERE) -> None:
    """Start a SuperLink and nodes.

    Then `fadamgc federation run APP`, or Flower's own `flwr run` with the environment that is printed.
    """
    from fadamgc.flower.local import NAME, QUIET, Federation

    _end_well()
    federation = Federation(folder)
    state = federation.up(nodes, secure)
    names = ", ".join(process.name for process in state.processes)
    say(f"running: {names}; logs in {federation.folder / 'logs'}")
    settings = " ".join(f"{key}={value}" for key, value in QUIET.items())
    say(f"FLWR_HOME={federation.folder / 'flwr'} {settings} flwr run APP {NAME} --stream")


@app.command()
def status(folder: Folder = HERE) -> None:
    """Show what runs."""
    from fadamgc.flower.local import Federation

    show = partial(terminal().print, highlight=False, soft_wrap=True, markup=False)
    processes = Federation(folder).read().processes
    if not processes:
        show(f"no federation in {folder}; `fadamgc federation up` starts one")
    for process in processes:
        said = "runs" if process.alive else f"has ended; see {process.log}"
        show(f"{process.name}: process {process.pid}, port {process.port}, {said}")


@app.command()
def down(folder: Folder = HERE) -> None:
    """Stop everything that was started. States, keys and logs stay."""
    from fadamgc.flower.local import Federation

    say(f"stopped {Federation(folder).down()} processes")


@app.command()
def run(
    app_folder: Annotated[
        Path,
        typer.Argument(
            metavar="APP", help="A Flower app, such as examples/flower-digits.", show_default=False
        ),
    ],
    nodes: Nodes = 3,
    secure: Secure = False,
    folder: Folder = HERE,
    config: Annotated[
        str, typer.Option(help="Values for the app's config, such as \"algorithm='scaffold' rounds=3\".")
    ] = "",
) -> None:
    """Run a Flower app on a federation here; if none runs, one is started, and stopped afterwards."""
    from fadamgc.flower.local import Federation

    _end_well()
    federation = Federation(folder)
    own = not federation.read().alive
    try:
        if own:
            say(f"starting a SuperLink and {nodes} nodes")
            federation.up(nodes, secure)
        federation.run(app_folder, config)
    except KeyboardInterrupt:
        if not own:
            raise FadamgcError(
                "no longer shown, but the run goes on; `flwr ls` and `flwr stop` end it"
            ) from None
        raise FadamgcError("stopped; the same command goes on with the last complete round") from None
    finally:
        if own:
            federation.down()


def _end_well() -> None:
    """Stop what was started also when this process is told to end."""

    def end(number: int, _: object) -> None:
        sys.exit(128 + number)

    for name in ("SIGTERM", "SIGHUP"):
        if hasattr(signal, name):
            signal.signal(getattr(signal, name), end)
