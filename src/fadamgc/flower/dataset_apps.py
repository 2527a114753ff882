"""Flower apps for named data sets, which ``examples/flower-digits`` and ``flower-sst2`` use.

The config's ``data.`` keys are those of a spec's [task] (docs/specs.md), and ``data.data`` is the name. Each
node gets the part that its ``partition-id`` has in the partition of the config's ``seed``: the same part that
``fadamgc.simulate`` gives to that client.
"""

from __future__ import annotations

from flwr.app import Context
from torch import nn

from fadamgc.flower.clientapp import client_app, client_number
from fadamgc.flower.serverapp import server_app
from fadamgc.samples import Pair
from fadamgc.task import Loss, Task
from fadamgc.tasks.build import build_task
from fadamgc.tasks.sections import task_spec


def task(context: Context) -> Task:
    """Build the task of all clients; a real client would have only its own data."""
    config = context.run_config
    table = {key.removeprefix("data."): value for key, value in config.items() if key.startswith("data.")}
    spec = task_spec(**{"data": "digits", "clients": config.get("clients", 3)} | table)
    return build_task(spec, int(config.get("seed", 0)))


def local(context: Context) -> tuple[nn.Module, Loss, Pair, Pair | None]:
    """Return model, loss, data and test data (None if it has none) of one client."""
    full_task, client = task(context), client_number(context)
    tests = dict(zip(full_task.evaluated, full_task.client_test_samples or [], strict=False))
    test = tests[client].pair() if client in tests else None
    return full_task.model, full_task.loss, full_task.samples[client].pair(), test


server = server_app(task)
client = client_app(local)
