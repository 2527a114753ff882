"""Your own model and data in a federation: replace `model` and `measurements` by yours."""

import torch
from flwr.app import Context
from torch import nn
from torch.nn.functional import cross_entropy

from fadamgc.flower import client_app, server_app


def model() -> nn.Module:
    """Return the model, the same at server and clients; training starts from the server's weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 3))


def measurements(place: int, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return inputs and labels: three clouds of points, of which each place sees mostly one."""
    random = torch.Generator().manual_seed(place)
    centres = torch.tensor([[2.0, 0.0], [-1.0, 2.0], [-1.0, -2.0]])
    share = torch.full((3,), 0.1)
    share[place % 3] = 1.0
    labels = torch.multinomial(share, samples, replacement=True, generator=random)
    return centres[labels] + torch.randn(samples, 2, generator=random), labels


def load(context: Context) -> tuple[nn.Module, object, tuple[torch.Tensor, torch.Tensor]]:
    """Return a client's model, loss and data. The node's --node-config has the number of the client."""
    return model(), cross_entropy, measurements(int(context.node_config["partition-id"]), 60)


def load_server(_: Context) -> tuple[nn.Module, object, tuple[torch.Tensor, torch.Tensor]]:
    """Return the server's model, loss and test data, from all places."""
    parts = [measurements(100 + place, 100) for place in range(3)]
    return model(), cross_entropy, (torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts]))


client = client_app(load)
server = server_app(load_server)
