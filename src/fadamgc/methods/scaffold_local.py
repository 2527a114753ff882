"""SCAFFOLD in the form for full participation, which sends only the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Flag, Steps
from fadamgc.fields import positive
from fadamgc.rules import number


class Server(NamedTuple):
    x: Tensor


class Down(NamedTuple):
    x: Tensor


class Client(NamedTuple):
    z_open: Tensor  # z_i + (x_i - x) / (K eta_l) of the last round: the next z_i except for the server's term
    x: Tensor  # the server's x of that round
    rate: Tensor  # 1 / (K eta_g eta_l) of that round; 0 before the first


class Local(NamedTuple):
    z: Tensor  # the correction y - y_i


class Up(NamedTuple):
    dx: Tensor


@dataclass(frozen=True)
class ScaffoldLocal(Algorithm[Server, Down, Client, Local, Up]):
    """SCAFFOLD at FedAvg's traffic: z_i = y - y_i stays at the client.

    If all clients are sampled and tracked and take the same K steps, SCAFFOLD (option II) needs neither y
    nor y_i:

        x_i = x_i - eta_l (g + z_i)                      z_i = 0 before round 1
        z_i = z_i + ( (x_i - x) - (x_new - x) / eta_g ) / (K eta_l)      when x_new arrives

    Args:
        eta_l: local step size.
        eta_g: global step size.

    References:
        Karimireddy et al. 2020, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.
    """

    title: ClassVar[str] = "SCAFFOLD (local form)"
    cites: ClassVar[tuple[str, ...]] = ("karimireddy2020scaffold",)

    eta_l: float = positive(0.1)
    eta_g: float = positive(1.0)

    @property
    def full_participation(self) -> bool:
        return True

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        zero = torch.zeros_like(x)
        return Client(z_open=zero, x=zero, rate=number(x))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        return Local(client.z_open - client.rate * (down.x - client.x))

    def step(self, down: Down, client: Client, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        return x - self.eta_l * (g + local.z), local

    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        dx = x - down.x
        rate = number(x, 1.0) / (K * self.eta_g * self.eta_l)
        return Client(local.z + dx / (K * self.eta_l), down.x, rate), Up(dx)

    def received(self, client: Client, up: Up, arrived: Up) -> Client:
        return client._replace(z_open=client.z_open + client.rate * self.eta_g * (arrived.dx - up.dx))

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        return Server(server.x + self.eta_g * (total.dx / cohort.S))
