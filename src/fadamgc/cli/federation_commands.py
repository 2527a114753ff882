"""``fadamgc federation``: a federation on this machine, and commands for one on several machines."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Annotated

import typer

from fadamgc.cli.console import say, terminal
from fadamgc.errors import FadamgcError, InputError

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    help="A Flower federation on this machine: one SuperLink and some nodes, on loopback. "
    "`superlink`, `supernode` and `login` are for federations on several machines; see docs/deploy.md.",
)

Folder = Annotated[Path, typer.Option("--folder", help="Folder for logs, keys and states.")]
Nodes = Annotated[int, typer.Option("--nodes", "-n", help="Number of nodes.")]
Secure = Annotated[
    bool,
    typer.Option(
        "--secure",
        help="Use TLS, and accept only nodes whose key the operator has registered; certificates and keys "
        "are made. With or without this option, only the holder of the operator's token in the folder can "
        "register keys and start runs. Other users of this machine who can list its processes can still act "
        "as a running app (Flower puts the app's token on its command line).",
    ),
]
AppFolder = Annotated[
    Path,
    typer.Argument(metavar="APP", help="A Flower app, such as examples/flower-digits.", show_default=False),
]
Config = Annotated[
    str,
    typer.Option(
        help="Values for the app's config, such as \"algorithm='scaffold' rounds=3\"; all keys of "
        "docs/flower.md are possible."
    ),
]
DEFAULT_FOLDER = Path("out/federation")


@app.command()
def up(nodes: Nodes = 3, secure: Secure = False, folder: Folder = DEFAULT_FOLDER) -> None:
    """Start a SuperLink and nodes in the background.

    Then use `fadamgc federation run APP`, or Flower's own `flwr run` with the environment that is printed.
    """
    from fadamgc.flower.access import FLOWER_OFFLINE
    from fadamgc.flower.loopback import FEDERATION_NAME, LoopbackFederation

    _exit_on_signals()
    federation = LoopbackFederation(folder)
    names = ", ".join(process.name for process in federation.up(nodes, secure).processes)
    say(f"running: {names}; logs are in {federation.folder / 'logs'}")
    if secure:
        from fadamgc.flower.certificates import end_of

        say(f"certificates in {federation.keys} end on {end_of(federation.keys):%Y-%m-%d}")
    variables = " ".join(f"{key}={value}" for key, value in FLOWER_OFFLINE.items())
    say(f"FLWR_HOME={federation.folder / 'flwr'} {variables} flwr run APP {FEDERATION_NAME} --stream")


@app.command()
def status(folder: Folder = DEFAULT_FOLDER) -> None:
    """Show which processes run."""
    from fadamgc.flower.loopback import LoopbackFederation

    federation = LoopbackFederation(folder)
    lines = []
    for process in federation.read().processes:
        state = "running" if process.alive else f"ended; see {process.log}"
        lines.append(f"{process.name}: process {process.pid}, port {process.port}, {state}")
    if not lines:
        lines = [f"no federation in {folder}; `fadamgc federation up` starts one"]
    if warning := federation.warning():
        lines.append(f"warning: {warning}")
    terminal().print("\n".join(lines), highlight=False, soft_wrap=True, markup=False)


@app.command()
def down(folder: Folder = DEFAULT_FOLDER) -> None:
    """Stop all processes. States, keys and logs stay."""
    from fadamgc.flower.loopback import LoopbackFederation

    say(f"stopped {LoopbackFederation(folder).down()} processes")


@app.command()
def run(
    app_folder: AppFolder,
    nodes: Nodes = 3,
    secure: Secure = False,
    folder: Folder = DEFAULT_FOLDER,
    config: Config = "",
) -> None:
    """Run a Flower app on a federation on this machine.

    If no federation is running, one is started, and stopped afterwards. An experiment that is complete starts
    again, and its states are moved to FOLDER/finished; an interrupted one, or one with more rounds, resumes.
    """
    from fadamgc.flower.loopback import LoopbackFederation

    _exit_on_signals()
    federation = LoopbackFederation(folder)
    temporary = not federation.read().alive
    try:
        if temporary:
            say(f"starting a SuperLink and {nodes} nodes")
            federation.up(nodes, secure)
        if warning := federation.warning():
            say(f"warning: {warning}")
        federation.run(app_folder, config, say)
    except KeyboardInterrupt:
        background = "the run continues in the background; `flwr ls` lists it and `flwr stop` ends it"
        stopped = "stopped; the same command resumes after the last complete round"
        raise FadamgcError(stopped if temporary else background) from None
    finally:
        if temporary:
            federation.down()


Token = Annotated[Path, typer.Option("--operator-token", help="File with the operator's token.")]
FORWARD_OPTIONS = {"allow_extra_args": True, "ignore_unknown_options": True}


@app.command(context_settings=FORWARD_OPTIONS)
def superlink(context: typer.Context, token: Token = Path("operator.token")) -> None:
    """Run Flower's SuperLink, which only the holder of the operator's token can control.

    All other options are those of `flower-superlink`, such as `--ssl-certfile`. Without the token nobody can
    register a node's key or start a run. The file is created if it does not exist.
    """
    from fadamgc.flower.access import launch_command, make_token

    if not token.expanduser().exists():
        make_token(token.expanduser())
        say(f"made {token}: everybody who has this token can run code on the SuperLink and on every node")
    _replace_process([*launch_command("superlink"), "--operator-token", str(token), *context.args])


@app.command(context_settings=FORWARD_OPTIONS)
def supernode(context: typer.Context) -> None:
    """Run Flower's SuperNode, whose tasks no other process can fetch.

    All options are those of `flower-supernode`, such as `--superlink`.
    """
    from fadamgc.flower.access import launch_command

    _replace_process([*launch_command("supernode"), *context.args])


@app.command()
def login(
    address: Annotated[
        str, typer.Argument(metavar="HOST:PORT", help="Address of the SuperLink, as in Flower's config.toml.")
    ],
    token: Token = Path("operator.token"),
) -> None:
    """Let Flower's `flwr` command send the operator's token to a SuperLink.

    The token is stored where `flwr login` would store it: in $FLWR_HOME, by default ~/.flwr.
    """
    from flwr.supercore.utils import get_flwr_home

    from fadamgc.flower.access import log_in
    from fadamgc.flower.launch import read_token

    try:
        secret = read_token(token)
    except ValueError as error:
        raise InputError(str(error)) from None
    log_in(get_flwr_home(), address, secret)
    say(f"from now on, `flwr` sends the operator's token to {address}")


def _replace_process(command: list[str]) -> None:
    """Replace this process by a command; the user's settings of Flower take precedence over ours."""
    from fadamgc.flower.access import FLOWER_OFFLINE, search_path

    os.execve(command[0], command, FLOWER_OFFLINE | os.environ | {"PATH": search_path()})


def _exit_on_signals() -> None:
    """Exit with the status of a program that the signal ends, but stop the federation first."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda received, _: sys.exit(128 + received))
