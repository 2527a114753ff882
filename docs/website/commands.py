"""The page of the command line, docs/reference/commands.md, from the help texts of the commands."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

from fadamgc.cli.main import app

PAGE = Path(__file__).resolve().parents[1] / "reference" / "commands.md"
VARIABLES = {
    "FADAMGC_DATA": "the data root, unless `--data-root` is given ([data](../experiments.md#data))",
    "FADAMGC_CACHE": "the folder for decoded images and compiled code; default `~/.cache/fadamgc`",
    "FADAMGC_SERVERS": "where a Flower server keeps checkpoints and histories; default "
    "`~/.local/state/fadamgc/servers`",
    "FADAMGC_STATES": "where Flower nodes keep the states of clients; default `~/.local/state/fadamgc`",
    "FADAMGC_BIND_CLIENTS": '`on` or `off`: the value of `bind-clients = "auto"` on a Flower server '
    "([config](../flower.md#config))",
    "FADAMGC_PRELOAD": "modules, with commas, that a node imports once and then forks for each message; "
    "empty: it starts a new process instead",
}


def page() -> str:
    """Return the page."""
    lines = ["# Commands", ""]
    lines += ["`fadamgc COMMAND --help` shows the same in a terminal. `make tables` writes this page.", ""]
    for path, command in all_commands():
        lines += [f"## {path}", "", *_help(command), ""]
        lines += [*_table(command), ""]
    lines += ["## Environment variables", "", "| variable | meaning |", "|---|---|"]
    lines += [f"| `{name}` | {meaning} |" for name, meaning in VARIABLES.items()]
    return "\n".join(lines).strip() + "\n"


def all_commands() -> Iterator[tuple[str, Any]]:
    """Yield every command that can be run, with the words that call it."""
    return _commands("fadamgc", typer.main.get_command(app))


def _commands(path: str, group: Any) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            yield from _commands(f"{path} {name}", command)
        else:
            yield f"{path} {name}", command


def _help(command: Any) -> Iterator[str]:
    yield inspect.cleandoc(command.help or "")


def _table(command: Any) -> Iterator[str]:
    parameters = [parameter for parameter in command.params if "--help" not in parameter.opts]
    if not parameters:
        return
    yield "| argument or option | default | meaning |"
    yield "|---|---|---|"
    for parameter in parameters:
        if parameter.param_type_name == "argument":
            names = f"`{(parameter.metavar or parameter.name.upper()).strip('[]')}`"
        else:
            names = ", ".join(f"`{name}`" for name in [*parameter.opts, *parameter.secondary_opts])
        help_text = (getattr(parameter, "help", None) or "").rstrip(".")
        cells = [names, _default(parameter), help_text]
        yield f"| {' | '.join(map(_cell, cells))} |".replace("|  |", "| |")


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("[", "\\[")


def _default(parameter: Any) -> str:
    """Return the default as the help shows it: a text, a value, or nothing."""
    shown = getattr(parameter, "show_default", None)
    if isinstance(shown, str) and shown:
        return shown
    if parameter.required:
        return "required"
    value = parameter.default
    if value in (None, False, "") or callable(value):
        return ""
    return f"`{'--' + parameter.name if value is True else value}`"
