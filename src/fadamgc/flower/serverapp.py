"""A Flower ServerApp for every algorithm; its config says which algorithm runs, and how (see ``config``)."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import nn

from fadamgc.errors import InputError, shown
from fadamgc.escape import printable
from fadamgc.federation.record import Record
from fadamgc.files import user_folder
from fadamgc.flower.config import read_config
from fadamgc.flower.coordinator import Coordinator
from fadamgc.flower.experiment_runs import COMPLETE, SERVERS_VARIABLE, say_complete
from fadamgc.flower.logs import log, log_to_stdout
from fadamgc.flower.metrics_file import METRICS_FILE, start_metrics, update_metrics
from fadamgc.flower.protocol import metric_name
from fadamgc.flower.strategy import Strategy
from fadamgc.samples import Pair
from fadamgc.task import Loss, Task

ServerData = tuple[nn.Module, Loss] | tuple[nn.Module, Loss, Pair]  # model, loss, test data


def server_app(load: Callable[[Context], Task | ServerData]) -> ServerApp:
    """Return a ServerApp that runs the algorithm named in its config.

    Args:
        load: function of Flower's context that returns model and loss; or model, loss and (inputs, targets)
            to test on; or a ``Task``, for a metric other than accuracy: ``Task(model, loss, clients=None,
            test=test, metric="loss")``. The clients of a task are not used.

    Example:
        >>> import fadamgc.flower, torch
        >>> def load(context):  # model, loss and test data
        ...     test = torch.ones(8, 3), torch.zeros(8, 1)
        ...     return torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, test
        >>> app = fadamgc.flower.server_app(load)
        >>> type(app).__name__
        'ServerApp'
    """
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        log_to_stdout()
        federate(grid, server_task(load(context)), dict(context.run_config))

    return app


def server_task(part: Task | ServerData) -> Task:
    """Return the task of a server: what its ``load`` function has returned, as a task."""
    if isinstance(part, Task):
        return part
    if not isinstance(part, (tuple, list)) or len(part) not in (2, 3):
        raise InputError(
            f"the server's load returned {shown(part)}; it must return (model, loss), "
            "(model, loss, test data) or a Task"
        )
    model, loss, test = part if len(part) == 3 else (*part, None)
    return Task(model, loss, None, test)


def federate(grid: Grid, task: Task, config: Mapping[str, Any]) -> Coordinator:
    """Run the federation that a config describes, and save its history for ``fadamgc report``."""
    server = read_config(config)
    experiment = server.options.experiment
    servers = Path(os.environ.get(SERVERS_VARIABLE) or user_folder("state") / "servers")
    folder = Path(server.options.folder or servers / experiment).expanduser()
    coordinator = Coordinator(task, server, folder)
    was_complete = (folder / COMPLETE).exists()
    (folder / COMPLETE).unlink(missing_ok=True)
    metrics = Path(server.options.metrics_file or folder / METRICS_FILE).expanduser()
    start_metrics(coordinator, metrics)
    if coordinator.over() and (was_complete or not coordinator.awaits_evaluation):
        write_history(coordinator, folder)  # missing if the server was killed after its last round
        say_complete(folder, coordinator.t, coordinator.t < coordinator.settings.rounds)
        log.info(
            "%s: already complete after round %d; set rounds higher to resume it, or use another experiment. "
            "`fadamgc report %s` shows it",
            *(experiment, coordinator.t, folder),
        )
        return coordinator

    def on_round(record: Record) -> None:
        value = "" if record.test_metric is None else f", {record.test_metric:.4g} on the test data"
        missing = f", without {list(record.dropped)}" if record.dropped else ""
        log.info("round %d of %d%s%s", record.round, coordinator.settings.rounds, value, missing)
        write_history(coordinator, folder)
        update_metrics(coordinator, metrics)

    strategy = Strategy(
        coordinator,
        round_timeout=server.options.round_timeout,
        wait_timeout=server.options.wait_timeout,
        below_minimum=server.options.below_minimum,
        on_round=on_round,
        bind_clients=server.binds_clients,
    )
    strategy.start(grid)
    say_complete(folder, coordinator.t, coordinator.t < coordinator.settings.rounds)
    log.info("%s: complete; `fadamgc report %s` shows it", experiment, folder)
    return coordinator


def write_history(coordinator: Coordinator, folder: Path) -> None:
    """Save the rounds so far as a run, with the names that a report shows."""
    c = coordinator
    run = c.run()
    report = {
        "experiment": c.experiment,
        "title": f"{c.algorithm.title} on {c.task.name}, {c.n} clients, on Flower",
        "label": printable(c.algorithm.title),
        "measure": metric_name(c.task.metric),
    }
    name = re.sub(r"[^a-z0-9]+", "-", report["label"].lower()).strip("-") or "method"
    labelled = replace(run, settings=run.settings | {"report": report})
    labelled.save(folder / "runs" / f"{name}-seed{c.settings.seed}", states=False)
    (folder / "spec.toml").unlink(missing_ok=True)  # of an earlier version, and perhaps of other settings
