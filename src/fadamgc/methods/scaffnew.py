"""Scaffnew (ProxSkip for federated learning): local steps between communications that a coin decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Flag, Steps
from fadamgc.fields import optional_share, positive
from fadamgc.rules import number


class Server(NamedTuple):
    x: Tensor


class Down(NamedTuple):
    x: Tensor


class Client(NamedTuple):
    h: Tensor  # control variate of the last round
    x: Tensor  # the client's model at the end of that round
    rate: Tensor  # p / eta_l of that round; 0 before the first


class Local(NamedTuple):
    h: Tensor


class Up(NamedTuple):
    dx: Tensor


@dataclass(frozen=True)
class Scaffnew(Algorithm[Server, Down, Client, Local, Up]):
    """Scaffnew of Mishchenko et al., at full participation.

        x_i = x_i - eta_l (g - h_i)                      h_i = 0 before round 1
        x   = mean(x_i)                                  with probability p after each step, for all clients
        h_i = h_i + (p / eta_l) (x - x_i)                when x arrives

    A round is the steps between two communications. With ``p``, the coin is drawn from the run's seed and
    the round, and ``local_steps`` is not given. Without it, a round has ``local_steps`` steps, and p is
    1 / local_steps.

    Args:
        eta_l: local step size.
        p: probability of communication after each step; None is a fixed number of steps.

    References:
        Mishchenko et al. 2022, ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication
        Acceleration! Finally!
    """

    title: ClassVar[str] = "Scaffnew"
    cites: ClassVar[tuple[str, ...]] = ("mishchenko2022proxskip",)

    eta_l: float = positive(0.1)
    p: float | None = optional_share()

    @property
    def full_participation(self) -> bool:
        return True

    @property
    def coin(self) -> float | None:
        return self.p

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        zero = torch.zeros_like(x)
        return Client(h=zero, x=zero, rate=number(x))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        return Local(client.h + client.rate * (down.x - client.x))

    def step(self, down: Down, client: Client, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        return x - self.eta_l * (g - local.h), local

    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        one = number(x, 1.0)
        rate = one / (K * self.eta_l) if self.p is None else one * (self.p / self.eta_l)
        return Client(local.h, x, rate), Up(x - down.x)

    def received(self, client: Client, up: Up, arrived: Up) -> Client:
        return client._replace(x=client.x + (arrived.dx - up.dx))

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        return Server(server.x + total.dx / cohort.S)
