"""A Flower ServerApp for every algorithm: which one, and how, is in the app's config.

The keys of ``[tool.flwr.app.config]``, with dashes:

- ``algorithm`` and its hyperparameters by their own names (``eta_l``, ``beta2``, ...)
- ``clients``, ``rounds``, ``sampled``, ``tracked``, ``local-steps`` or ``local-epochs``, ``batch-size``,
  ``seed``, ``weights``, ``eval-every``, ``target``: as of ``fadamgc.simulate``
- ``experiment``: name under which server and clients keep their states
- ``folder``: where the server keeps its checkpoint and its history
- ``min-clients``, ``round-timeout``, ``wait-timeout``, ``below-minimum``: when to go on without somebody
- ``max-update-norm``, ``max-norm-ratio``: longer updates are refused; the second is relative to the others'
- ``max-samples``, ``max-size-ratio``: clients that say that they have more samples are refused
- ``reset-states``: reset the states of all clients
- ``checkpoints``, ``restore-round``: how many rounds are kept, and to which of them to go back
- ``bind-clients``, ``unbind-clients``: whether a client belongs to the node key that first spoke for it

Keys with a dot, such as ``data.alpha``, are the app's own.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fadamgc.errors import InputError, nearest
from fadamgc.escape import printable
from fadamgc.experiments.run.runner import RUNS, SPEC
from fadamgc.experiments.run.workers import Job
from fadamgc.experiments.spec.sections import CustomTask, MethodSpec, RunSpec, Spec
from fadamgc.federation.run import Record
from fadamgc.federation.settings import Settings
from fadamgc.files import user_folder, write_atomic
from fadamgc.flower.coordinator import Coordinator
from fadamgc.flower.protocol import check_name, show_log
from fadamgc.flower.strategy import Strategy
from fadamgc.methods import algorithm_class, make_algorithm
from fadamgc.task import Loss, Pair, Task

log = logging.getLogger("fadamgc")

SETTINGS = (
    *("rounds", "sampled", "tracked", "local-steps", "local-epochs", "batch-size", "seed", "weights"),
    *("eval-every", "target"),
)
OTHERS = {
    "algorithm": "fadamgc",
    "clients": 3,
    "experiment": "experiment",
    "folder": "",
    "min-clients": 1,
    "round-timeout": 600.0,
    "wait-timeout": 300.0,
    "below-minimum": "fail",
    "max-update-norm": 0.0,
    "max-norm-ratio": 100.0,
    "max-samples": 0,
    "max-size-ratio": 100.0,
    "reset-states": False,
    "checkpoints": 3,
    "restore-round": -1,
    "bind-clients": "auto",
    "unbind-clients": "",
}

BIND = "FADAMGC_BIND_CLIENTS"  # in the ServerApp's environment: what bind-clients = "auto" means

ServerSide = tuple[nn.Module, Loss, Pair]


def server_app(load: Callable[[Context], Task | ServerSide]) -> ServerApp:
    """A ServerApp that runs the algorithm its config names.

    Args:
        load: gives model, loss and (inputs, targets) to test on, from Flower's context; or a Task, for
            another metric than accuracy. The clients of the task are not looked at.
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        show_log()
        given = load(context)
        if not isinstance(given, Task):
            model, loss, test = given
            given = Task(model, loss, [test], test)
        federate(grid, given, dict(context.run_config))

    return app


def federate(grid: Grid, task: Task, config: Mapping[str, Any]) -> Coordinator:
    """Run a federation as its config says, and write its history as an experiment that can be reported on."""
    values = read_config(config)
    experiment = str(values["experiment"])
    check_name(experiment)
    folder = Path(str(values["folder"])).expanduser() if values["folder"] else default_folder(experiment)
    coordinator = make_coordinator(task, values, folder)
    if coordinator.over():
        write_history(coordinator, folder)  # a server killed after its last round had no time for it
        log.info(
            "%s: ended before, after round %d; more rounds go on with it, another experiment begins anew. "
            "`fadamgc report %s` draws it",
            *(coordinator.experiment, coordinator.t, folder),
        )
        return coordinator

    def on_round(record: Record) -> None:
        value = "" if record.test_metric is None else f", {record.test_metric:.4g} on the test data"
        missing = f", without {list(record.dropped)}" if record.dropped else ""
        log.info("round %d of %d%s%s", record.round, coordinator.settings.rounds, value, missing)
        write_history(coordinator, folder)

    strategy = Strategy(
        coordinator,
        round_timeout=float(values["round-timeout"]),
        wait_timeout=float(values["wait-timeout"]),
        below_minimum=values["below-minimum"],
        on_round=on_round,
        bind_clients=binds(values["bind-clients"]),
    )
    strategy.start(grid)
    log.info("%s: done; `fadamgc report %s` draws it", coordinator.experiment, folder)
    return coordinator


def binds(choice: str) -> bool:
    """Whether clients are bound to the keys of their nodes.

    Without node authentication a node has a new key whenever it starts, and nothing in Flower tells whether
    there is authentication; so "auto" asks the environment, and is "off" without an answer.
    """
    answer = os.environ.get(BIND, "off") if choice == "auto" else choice
    if answer not in ("on", "off"):
        source = f"${BIND}" if choice == "auto" else "config bind-clients"
        raise InputError(f"{source}={answer!r} is not accepted; it must be 'on' or 'off'")
    return answer == "on"


def numbers(text: object, clients: int) -> list[int]:
    """Numbers of clients, such as "0, 3", or "all" of them."""
    if text == "all":
        return list(range(clients))
    words = str(text).replace(",", " ").split()
    if not all(word.isdecimal() and int(word) < clients for word in words):
        raise InputError(
            f"config unbind-clients={text!r} is not accepted; it must be 'all' or numbers of clients from 0 "
            f"to {clients - 1}, such as '0, 2'"
        )
    return [int(word) for word in words]


def read_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with defaults; a key that nobody knows is refused."""
    values = OTHERS | {"rounds": 10} | dict(config)
    known = {field.name for field in fields(algorithm_class(str(values["algorithm"])))}
    for key in values:
        if "." not in key and key not in OTHERS and key not in SETTINGS and key not in known:
            every = [*OTHERS, *SETTINGS, *known]
            raise InputError(f"config {key}={values[key]!r} is not known{nearest(key, every)}")
    given = values["reset-states"]
    if not isinstance(given, bool):
        raise InputError(f"config reset-states={given!r} is not accepted; it must be true or false, no text")
    return values


def make_coordinator(task: Task, values: Mapping[str, Any], folder: Path) -> Coordinator:
    """The federation that a config describes, new or from its checkpoint."""
    name = str(values["algorithm"])
    own = {field.name for field in fields(algorithm_class(name))}
    algorithm = make_algorithm(name, **{key: value for key, value in values.items() if key in own})
    chosen: dict[str, Any] = {k.replace("-", "_"): values[k] for k in SETTINGS if k in values}
    if "local_steps" not in chosen and "local_epochs" not in chosen:
        chosen["local_steps"] = 10
    return Coordinator(
        algorithm,
        task,
        int(values["clients"]),
        Settings(**chosen),
        str(values["experiment"]),
        folder,
        max_norm=float(values["max-update-norm"]) or None,
        max_norm_ratio=float(values["max-norm-ratio"]) or None,
        max_samples=int(values["max-samples"]) or None,
        max_size_ratio=float(values["max-size-ratio"]) or None,
        min_clients=int(values["min-clients"]),
        checkpoints=int(values["checkpoints"]),
        restore_round=None if int(values["restore-round"]) < 0 else int(values["restore-round"]),
        unbind=numbers(values["unbind-clients"], int(values["clients"])),
        reset_states=values["reset-states"],
        facts={key: value for key, value in values.items() if "." in key},
    )


def default_folder(experiment: str) -> Path:
    """Where a server keeps an experiment unless it is told."""
    return user_folder("state") / "servers" / experiment


def write_history(coordinator: Coordinator, folder: Path) -> None:
    """The history so far as an experiment's folder."""
    c = coordinator
    s = c.settings
    metric = c.task.metric if isinstance(c.task.metric, str) else "metric"
    method = MethodSpec(
        algorithm=c.identity()["algorithm"],
        label=printable(c.algorithm.title),
        hyperparameters=c.identity()["hyperparameters"],
    )
    spec = Spec(
        name=c.experiment,
        title=printable(f"{c.algorithm.title} on {c.task.name}, {c.n} clients, on Flower"),
        task=CustomTask(data="custom", clients=c.n, measure=printable(metric)),
        run=RunSpec(
            rounds=s.rounds,
            sampled=s.sampled,
            tracked=s.tracked,
            local_steps=s.local_steps,
            local_epochs=s.local_epochs,
            batch_size=s.batch_size,
            seeds=(s.seed,),
            target=s.target,
            eval_every=s.eval_every,
            weights=s.weights,
        ),
        methods=(method,),
    )
    job = Job.of(spec, method, s.seed, folder / RUNS / f"{method.slug}-seed{s.seed}")
    write_atomic(folder / SPEC, spec.to_toml().encode())
    job.labelled(c.run()).save(job.folder, states=False)
