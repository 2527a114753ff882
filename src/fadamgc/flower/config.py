"""The config of a Flower ServerApp: ``[tool.flwr.app.config]``, or ``flwr run --run-config``.

The keys are the options below and the settings of ``fadamgc.simulate``, both with dashes; the hyperparameters
of the algorithm by their names (``eta_l``, ``beta2``, ...); and keys with a dot, such as ``data.alpha``,
which belong to the app.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal, NamedTuple

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.errors import InputError, nearest, shown
from fadamgc.federation.settings import Settings
from fadamgc.methods import algorithm_class, make_algorithm

BIND_VARIABLE = "FADAMGC_BIND_CLIENTS"  # in the ServerApp's environment: what bind-clients = "auto" means
DEFAULT_ROUNDS = 10
# Settings of ``simulate`` that a config cannot have: a value in a config is a number or a text, and a server
# always writes a checkpoint after every round and drops updates that are not finite.
NOT_IN_CONFIG = ("schedule", "on_nonfinite", "checkpoint_every", "dtype")


def option(default: Any, help: str) -> Any:
    """Return a dataclass field with a default and a description."""
    return field(default=default, metadata={"help": help})


@dataclass(frozen=True)
class ServerOptions:
    """The keys of a config in addition to settings and hyperparameters, each with its description."""

    algorithm: str = option("fadamgc", "name of the algorithm")
    clients: int = option(3, "number of clients, n")
    experiment: str = option("experiment", "name under which server and clients store their states")
    folder: str = option("", "folder of the checkpoint and the history; empty: a folder in ~/.local/state")
    min_clients: int = option(1, "a round with fewer replies does not count")
    round_timeout: float = option(600.0, "seconds that a round waits for replies")
    wait_timeout: float = option(300.0, "seconds to wait for nodes: first for all, then for min-clients")
    below_minimum: Literal["fail", "skip"] = option(
        "fail", "what to do with too few clients: 'fail', or 'skip' the round"
    )
    max_update_norm: float = option(0.0, "refuse a reply with a longer vector; 0: accept any length")
    max_norm_ratio: float = option(
        100.0, "refuse a reply with a vector this many times longer than is typical; 0: accept any length"
    )
    max_samples: int = option(0, "refuse a client that says it has more samples; 0: accept any number")
    max_size_ratio: float = option(
        100.0,
        "with weights = 'size', refuse a client that says it has more than this many times the median number "
        "of samples; 0: accept any number",
    )
    reset_states: bool = option(False, "for one run: reset the states of all clients, and keep the model")
    checkpoints: int = option(3, "how many checkpoints are stored, the newest included")
    restore_round: int = option(
        -1,
        "for one run: go back to the checkpoint of this round, and reset the states of all clients; -1: no",
    )
    bind_clients: str = option(
        "auto",
        "'on': accept a client only from the node key that first spoke for it; 'off'; 'auto': what "
        f"${BIND_VARIABLE} says, else 'off'",
    )
    unbind_clients: str = option(
        "", "for one run: clients ('0, 2', or 'all') whose next node may have another key"
    )


class ServerConfig(NamedTuple):
    """A config that was read."""

    algorithm: AnyAlgorithm
    settings: Settings
    options: ServerOptions
    app: dict[str, Any]  # keys with a dot

    @property
    def binds_clients(self) -> bool:
        """Whether clients are bound to the keys of their nodes.

        Without node authentication, a node has a new key whenever it starts. Flower does not tell an app
        whether there is authentication, so "auto" reads an environment variable, and is "off" without it.
        """
        choice = self.options.bind_clients
        answer = os.environ.get(BIND_VARIABLE, "off") if choice == "auto" else choice
        if answer not in ("on", "off"):
            source = f"${BIND_VARIABLE}" if choice == "auto" else "config bind-clients"
            raise InputError(f"{source}={answer!r} is not accepted; it must be 'on' or 'off'")
        return answer == "on"

    @property
    def unbound_clients(self) -> list[int]:
        """The clients whose next node may have another key."""
        text, clients = self.options.unbind_clients, self.options.clients
        if text == "all":
            return list(range(clients))
        words = text.replace(",", " ").split()
        if not all(word.isdecimal() and int(word) < clients for word in words):
            raise InputError(
                f"config unbind-clients={text!r} is not accepted; it must be 'all' or numbers of clients "
                f"from 0 to {clients - 1}, such as '0, 2'"
            )
        return [int(word) for word in words]


def config_keys() -> dict[str, str]:
    """Return the keys that a config can have with any algorithm, with the fields that they set."""
    names = [f.name for f in (*fields(ServerOptions), *fields(Settings)) if f.name not in NOT_IN_CONFIG]
    return {name.replace("_", "-"): name for name in names}


def read_config(config: Mapping[str, Any]) -> ServerConfig:
    """Read a config; an unknown key is an error."""
    keys = config_keys()
    algorithm = str(config.get("algorithm", ServerOptions.algorithm))
    hyperparameters = [f.name for f in fields(algorithm_class(algorithm))]
    for key, value in config.items():
        if "." not in key and key not in keys and key not in hyperparameters:
            known = nearest(key, [*keys, *hyperparameters])
            raise InputError(f"config {key}={shown(value)} is not known{known}")
    values = {keys[key]: value for key, value in config.items() if key in keys}
    options = {f.name: _converted(f.name, values[f.name]) for f in fields(ServerOptions) if f.name in values}
    settings = {f.name: values[f.name] for f in fields(Settings) if f.name in values}
    return ServerConfig(
        make_algorithm(algorithm, **{key: config[key] for key in hyperparameters if key in config}),
        Settings.of(**{"rounds": DEFAULT_ROUNDS} | settings),
        ServerOptions(**options),
        {key: value for key, value in config.items() if "." in key},
    )


def _converted(name: str, value: Any) -> Any:
    """Return an option's value with the type of its default."""
    kind = type(getattr(ServerOptions, name))
    key = name.replace("_", "-")
    if kind is bool and not isinstance(value, bool):
        raise InputError(f"config {key}={shown(value)} is not accepted; it must be true or false, unquoted")
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise InputError(f"config {key}={shown(value)} is not accepted; it must be a number") from None
