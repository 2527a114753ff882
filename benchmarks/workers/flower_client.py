"""The client's part for Flower, in a separate module: Ray's actors import it instead of unpickling it."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workers.bare import make_optimizer
from workloads import WORKLOADS, Workload

app = ClientApp()


class ActorState(NamedTuple):
    """What an actor keeps between messages."""

    workload: Workload
    module: nn.Module
    optimizer: torch.optim.Optimizer
    inputs: Tensor
    targets: Tensor


@cache
def actor_state(name: str, optimizer: str) -> ActorState:
    """Make model and data, once per actor."""
    torch.set_num_threads(1)
    workload = WORKLOADS[name]
    module = workload.make_model(0).train()
    return ActorState(workload, module, make_optimizer(optimizer, module), *workload.data())


@app.train()
def train(message: Message, context: Context) -> Message:
    """Take K local steps from the arrays received."""
    config = message.content["config"]
    names = str(config["workload"]), str(config["optimizer"])
    workload, module, optimizer, inputs, targets = actor_state(*names)
    client = int(context.node_config["partition-id"])
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    optimizer.state.clear()
    for rows in torch.randperm(workload.samples).split(workload.batch):
        optimizer.zero_grad(set_to_none=True)
        cross_entropy(module(inputs[client, rows]), targets[client, rows]).backward()
        optimizer.step()
    reply = RecordDict(
        {
            "arrays": ArrayRecord(module.state_dict()),
            "metrics": MetricRecord({"num-examples": workload.samples}),
        }
    )
    return Message(content=reply, reply_to=message)
