"""Data sets that are known by name as Flower apps: ``examples/flower-digits`` and ``flower-sst2`` point here.

The config's ``data.`` keys are those of a spec's [task] (docs/specs.md), ``data.data`` being the name. Each
node holds the part that its ``partition-id`` has in the partition of the config's ``seed``: the same that
``fadamgc.simulate`` would give to that client.
"""

from __future__ import annotations

from flwr.app import Context

from fadamgc.flower.clientapp import Local, client_app, number
from fadamgc.flower.serverapp import server_app
from fadamgc.task import Task
from fadamgc.tasks.build import build_task
from fadamgc.tasks.sections import task_spec


def task(context: Context) -> Task:
    """The whole task; a real client would only have its own data."""
    config = context.run_config
    table = {key.removeprefix("data."): value for key, value in config.items() if key.startswith("data.")}
    spec = task_spec(**{"data": "digits", "clients": config.get("clients", 3)} | table)
    return build_task(spec, int(config.get("seed", 0)))


def local(context: Context) -> Local:
    """Model, loss and data of one client."""
    whole = task(context)
    return Local(whole.model, whole.loss, whole.pairs[number(context)])


server = server_app(task)
client = client_app(local)
