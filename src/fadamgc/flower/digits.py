"""The digits as a Flower app: ``examples/flower-digits`` points here.

Each node holds the part of the digits that its ``partition-id`` has in the partition of the config's ``seed``
and ``data.alpha``: the same that ``fadamgc.simulate`` would give to that client.
"""

from __future__ import annotations

from flwr.app import Context

from fadamgc.experiments.build import build_task
from fadamgc.experiments.spec import DigitsTask
from fadamgc.flower.client import Local, client_app, number
from fadamgc.flower.server import server_app
from fadamgc.task import Task


def task(context: Context) -> Task:
    """The whole task; a real client would only have its own data."""
    config = context.run_config
    spec = DigitsTask(
        data="digits",
        clients=int(config.get("clients", 3)),
        alpha=float(config.get("data.alpha", 0.1)),
        hidden=(int(config.get("data.hidden", 64)),),
    )
    return build_task(spec, int(config.get("seed", 0)))


def local(context: Context) -> Local:
    """Model, loss and data of one client."""
    whole = task(context)
    return Local(whole.model, whole.loss, whole.pairs[number(context)])


server = server_app(task)
client = client_app(local)
