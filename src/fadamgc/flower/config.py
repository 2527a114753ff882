"""The config of a Flower ServerApp: ``[tool.flwr.app.config]``, or ``flwr run --run-config``.

The keys are the options below and the settings of ``fadamgc.simulate``, both with dashes; the hyperparameters
of the algorithm by their names (``eta_l``, ``beta2``, ...); the codecs of fields (``codec.y``); and other
keys with a dot, such as ``data.alpha``, which belong to the app.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.errors import InputError, nearest, not_accepted, shown
from fadamgc.federation.settings import Settings
from fadamgc.flower.client_store import check_experiment_name
from fadamgc.methods import algorithm_class, make_algorithm

BIND_VARIABLE = "FADAMGC_BIND_CLIENTS"  # in the ServerApp's environment: the value of bind-clients = "auto"
DEFAULT_ROUNDS = 10
# Settings of ``simulate`` that a config cannot have: a value in a config is a number or a text, and a server
# always writes a checkpoint after every round and drops updates that are not finite.
NOT_IN_CONFIG = (
    *("schedule", "on_nonfinite", "checkpoint_every", "groups", "group_rounds", "dtype"),
    *("dropout", "stragglers", "deadline", "local_parameters", "privacy"),  # of a simulation
)
NO_PRIVACY = (
    "privacy is for fadamgc.simulate: its noise is a function of the seed, which the server and all clients "
    "of a federation know, so it would hide nothing; omit it"
)


@dataclass(frozen=True)
class ServerOptions:
    """The keys of a config in addition to settings and hyperparameters; docs/flower.md describes them."""

    algorithm: str = "fadamgc"
    clients: int = 3
    experiment: str = "experiment"
    folder: str = ""  # of the checkpoint and the history; empty: a folder in ~/.local/state
    min_clients: int = 1
    round_timeout: float = 600.0
    wait_timeout: float = 300.0
    below_minimum: Literal["fail", "skip"] = "fail"
    max_update_norm: float = 0.0  # 0: no limit, here and in the next three
    max_norm_ratio: float = 100.0
    max_samples: int = 0
    max_size_ratio: float = 100.0
    reset_states: bool = False
    checkpoints: int = 3
    restore_round: int = -1  # < 0: resume from the newest checkpoint
    bind_clients: str = "auto"  # "on", "off", or "auto": the value of BIND_VARIABLE, else "off"
    unbind_clients: str = ""
    metrics_file: str = ""  # in Prometheus' text format; empty: metrics.prom in the folder

    def __post_init__(self) -> None:
        check_experiment_name(self.experiment)


class ServerConfig(NamedTuple):
    """A config that was read."""

    algorithm: AnyAlgorithm
    settings: Settings
    options: ServerOptions
    app: dict[str, Any]  # keys with a dot

    @property
    def binds_clients(self) -> bool:
        """Whether clients are bound to the keys of their nodes.

        Without node authentication, a node has a new key at each start. Flower does not tell an app whether
        authentication is on, so "auto" reads an environment variable, and is "off" without it.
        """
        choice = self.options.bind_clients
        answer = os.environ.get(BIND_VARIABLE, "off") if choice == "auto" else choice
        if answer not in ("on", "off"):
            source = f"${BIND_VARIABLE}" if choice == "auto" else "config bind-clients"
            raise not_accepted(source, answer, "'on' or 'off'")
        return answer == "on"

    @property
    def unbound_clients(self) -> list[int]:
        """The clients whose next node may have another key."""
        text, clients = self.options.unbind_clients, self.options.clients
        if text == "all":
            return list(range(clients))
        words = text.replace(",", " ").split()
        if not all(word.isdecimal() and int(word) < clients for word in words):
            accepted = f"'all' or numbers of clients from 0 to {clients - 1}, such as '0, 2'"
            raise not_accepted("config unbind-clients", text, accepted)
        return [int(word) for word in words]


def config_keys() -> dict[str, str]:
    """Return the keys that a config can have with any algorithm, with the fields that they set."""
    names = [f.name for f in (*fields(ServerOptions), *fields(Settings)) if f.name not in NOT_IN_CONFIG]
    return {name.replace("_", "-"): name for name in names}


def read_config(config: Mapping[str, Any]) -> ServerConfig:
    """Read a config; an unknown key is an error."""
    keys = config_keys()
    algorithm = str(config.get("algorithm", ServerOptions.algorithm))
    names = algorithm_class(algorithm).setting_names()
    owned = (*names, "codec")
    tables = nested({key: value for key, value in config.items() if key.partition(".")[0] in owned})
    codec = tables.pop("codec", None)
    known = [*keys, *names]
    for key, value in config.items():
        if key.partition(".")[0] == "privacy":
            raise InputError(NO_PRIVACY)
        if "." not in key and key not in known:
            raise InputError(f"config {key}={shown(value)} is not known{nearest(key, known)}")
    values = {keys[key]: value for key, value in config.items() if key in keys}
    options = {f.name: _converted(f.name, values[f.name]) for f in fields(ServerOptions) if f.name in values}
    settings = {f.name: values[f.name] for f in fields(Settings) if f.name in values}
    return ServerConfig(
        make_algorithm(algorithm, **tables),
        Settings.of(**{"rounds": DEFAULT_ROUNDS} | settings | {"codec": codec}),
        ServerOptions(**options),
        {key: value for key, value in config.items() if "." in key and key.partition(".")[0] not in owned},
    )


def nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return values whose keys have dots as tables: Flower flattens the tables of a config.

    >>> nested({"eta_l": 0.1, "local.rule": "adam", "local.beta1": 0.9})
    {'eta_l': 0.1, 'local': {'rule': 'adam', 'beta1': 0.9}}
    """
    tables: dict[str, Any] = {}
    for key, value in values.items():
        first, dot, rest = key.partition(".")
        if not dot and first not in tables:
            tables[first] = value
        elif dot and isinstance(tables.setdefault(first, {}), dict):
            tables[first][rest] = value
        else:
            raise InputError(
                f"config {first}={shown(tables[first])} and {key}={shown(value)}: give one of them"
            )
    return {key: nested(value) if isinstance(value, dict) else value for key, value in tables.items()}


def _converted(name: str, value: Any) -> Any:
    """Return an option's value with the type of its default."""
    kind, key = type(getattr(ServerOptions, name)), f"config {name.replace('_', '-')}"
    if kind is bool and not isinstance(value, bool):
        raise not_accepted(key, value, "true or false, unquoted")
    try:
        return kind(value)
    except (TypeError, ValueError, OverflowError):
        raise not_accepted(key, value, "a number") from None
