"""Runs of an app on the federation of one folder: its config, and what an earlier run left there."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fadamgc.errors import InputError, nearest, shown
from fadamgc.files import make_folder, user_folder, write_atomic
from fadamgc.flower.client_store import check_experiment_name
from fadamgc.flower.config import ServerOptions, config_keys
from fadamgc.methods import algorithm_class
from fadamgc.toml import flat, parse_toml, toml_value

SERVERS_VARIABLE = "FADAMGC_SERVERS"  # in the ServerApp's environment: the folder of all servers' states
COMPLETE = "complete.json"  # in a server's folder, after its last round
HEADER = "[tool.flwr.app.config]"


def read_app(app: Path) -> tuple[str, dict[str, Any]]:
    """Return the text of an app's pyproject.toml, and its config with flat keys."""
    file = app / "pyproject.toml"
    if not file.is_file():
        raise InputError(f"app={str(app)!r} is not a Flower app: it has no pyproject.toml")
    text = file.read_text(encoding="utf-8")
    try:
        config = parse_toml(text)["tool"]["flwr"]["app"].get("config", {})
    except (KeyError, TypeError, AttributeError):
        raise InputError(f"{file} is not that of a Flower app: it has no [tool.flwr.app]") from None
    return text, dict(flat(config))


def parse_config(config: str) -> dict[str, Any]:
    """Read the keys and values of a text such as "rounds=3 algorithm='scaffold'", as Flower does."""
    from flwr.common.config import parse_config_args

    try:
        values = dict(parse_config_args([config])) if config else {}
    except (Exception, SystemExit):
        values = {}
    if config and not values:
        example = "\"rounds=3 algorithm='scaffold'\""
        raise InputError(f"config {shown(config)} is not understood; write for example {example}")
    return values


def app_with_keys(app: Path, config: Mapping[str, Any], copies: Path) -> Path:
    """Return a folder of the app whose config lists all these keys: Flower accepts no others.

    If the app lists them already, this is the app itself, else a copy of the app in the folder ``copies``.
    """
    text, listed = read_app(app)
    missing = {key: value for key, value in config.items() if key not in listed}
    if not missing:
        return app
    name = config.get("algorithm", listed.get("algorithm", ServerOptions.algorithm))
    algorithm = algorithm_class(str(name))
    known = [*config_keys(), *algorithm.setting_names()]
    for key, value in missing.items():
        if "." not in key and key not in known:
            raise InputError(f"config {key}={shown(value)} is not known{nearest(key, known)}")
    lines = "".join(f"{key} = {toml_value(value)}\n" for key, value in missing.items())
    before, header, after = text.partition(HEADER)
    changed = f"{before}{HEADER}\n{lines}{after}" if header else f"{text}\n{HEADER}\n{lines}"
    try:
        parse_toml(changed)
    except InputError:
        names = ", ".join(missing)
        raise InputError(f"{app / 'pyproject.toml'} does not list {names}; add them to {HEADER}") from None
    copy = copies / app.resolve().name
    shutil.rmtree(copy, ignore_errors=True)
    make_folder(copies, private=True)
    inside = {copies.resolve(), *copies.resolve().parents} - set(app.resolve().parents) - {app.resolve()}

    def skipped(folder: str, names: list[str]) -> list[str]:
        here = Path(folder).resolve()
        return [n for n in names if n.startswith(".") or n == "__pycache__" or here / n in inside]

    shutil.copytree(app, copy, ignore=skipped)
    write_atomic(copy / "pyproject.toml", changed.encode())
    return copy


def say_complete(server: Path, t: int, target_reached: bool) -> None:
    """Note in a server's folder that its experiment is complete."""
    write_atomic(server / COMPLETE, json.dumps({"round": t, "target": target_reached}).encode(), private=True)


def make_room(folder: Path, config: Mapping[str, Any]) -> Path | None:
    """Move a complete experiment of a federation's folder aside, so that the next run starts again.

    Return the folder to which it was moved; None if there is nothing to move, or if the next run resumes the
    experiment: an interrupted one, or one with more rounds.
    """
    experiment = str(config.get("experiment", ServerOptions.experiment))
    check_experiment_name(experiment)
    server = folder / "servers" / experiment
    clients = sorted(folder.glob(f"states/*/{experiment}"))
    if config.get("folder"):
        return None  # the server's states are somewhere else
    if not server.exists():
        earlier = user_folder("state") / "servers" / experiment
        if clients and earlier.exists():
            raise InputError(
                f"the clients' states of experiment {experiment!r} are in {folder}, and the server's, which "
                f"an earlier version has written, in {earlier}; move that folder to {server}"
            )
        return None
    try:
        complete = json.loads((server / COMPLETE).read_bytes())
        resumes = not complete["target"] and int(config.get("rounds", 0)) > complete["round"]
    except (OSError, ValueError, KeyError, TypeError):
        return None  # it is not complete
    if resumes or config.get("reset-states") or config.get("restore-round", -1) >= 0:
        return None
    number = 1
    while (aside := folder / "finished" / f"{experiment}-{number}").exists():
        number += 1
    make_folder(aside, private=True)
    for states in clients:
        states.rename(aside / states.parent.name)
    server.rename(aside / "server")
    return aside
