"""FedDyn: dynamic regularization, which makes the clients' optima agree with the global one."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Empty, Flag, Steps
from fadamgc.fields import positive


class Server(NamedTuple):
    x: Tensor
    h: Tensor  # sum of the clients' changes over all rounds, divided by n


class Down(NamedTuple):
    x: Tensor


class Client(NamedTuple):
    h: Tensor  # sum of the client's changes over its rounds


class Up(NamedTuple):
    dx: Tensor


@dataclass(frozen=True)
class FedDyn(Algorithm[Server, Down, Client, Empty, Up]):
    """FedDyn of Acar et al., in the form of the authors' code: h_i is the sum of the client's changes.

        x_i = x_i - eta_l ( g + alpha (x_i - x + h_i) )
        h_i = h_i + (x_i - x)                            sampled clients; h_i = 0 before the first round
        h   = h + (1/n) sum of (x_i - x)                 h = 0 before round 1
        x   = x + mean(x_i - x) + h                      with the new h

    In the paper's notation, h_i here is -1/alpha times the stored gradient, and h is -1/alpha times theirs.

    Args:
        eta_l: local step size.
        alpha: weight of the regularization.

    References:
        Acar et al. 2021, Federated Learning Based on Dynamic Regularization.
    """

    title: ClassVar[str] = "FedDyn"
    cites: ClassVar[tuple[str, ...]] = ("acar2021federated",)

    eta_l: float = positive(0.1)
    alpha: float = positive(0.1)

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x, h=torch.zeros_like(x))

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        return Client(h=torch.zeros_like(x))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Empty:
        return Empty()

    def step(self, down: Down, client: Client, local: Empty, x: Tensor, g: Tensor) -> tuple[Tensor, Empty]:
        return x - self.eta_l * (g + self.alpha * (x - down.x + client.h)), local

    def finish(
        self, down: Down, client: Client, local: Empty, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        dx = x - down.x
        return Client(client.h + dx), Up(dx)

    def received(self, client: Client, up: Up, arrived: Up) -> Client:
        return Client(client.h + (arrived.dx - up.dx))

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        h = server.h + total.dx / cohort.n
        return Server(server.x + total.dx / cohort.S + h, h)
