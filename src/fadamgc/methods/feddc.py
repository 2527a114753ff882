"""FedDC: local drift variables and SCAFFOLD's correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Empty, Flag, Steps
from fadamgc.fields import nonnegative, positive
from fadamgc.rules import select


class Server(NamedTuple):
    x: Tensor
    s: Tensor  # mean of the clients' s_i
    h: Tensor  # mean of the clients' h_i


class Down(NamedTuple):
    x: Tensor
    s: Tensor


class Client(NamedTuple):
    h: Tensor  # drift: sum of the client's changes over its rounds
    s: Tensor  # mean local direction of the last tracked round


class Up(NamedTuple):
    dx: Tensor
    ds: Tensor


@dataclass(frozen=True)
class FedDC(Algorithm[Server, Down, Client, Empty, Up]):
    """FedDC of Gao et al.

        x_i = x_i - eta_l ( g + alpha (x_i - x + h_i) + s - s_i )
        h_i = h_i + (x_i - x)                            sampled clients
        s_i = s_i - s - (x_i - x) / (K eta_l)            if tracked, else unchanged
        s   = s + (1/n) sum of (s_i new - s_i old)       over the tracked clients
        h   = h + (1/n) sum of (x_i - x)
        x   = x + mean(x_i - x) + h                      with the new h

    All of h, h_i, s, s_i are 0 before round 1. In the paper all sampled clients are tracked.

    Args:
        eta_l: local step size.
        alpha: weight of the drift term; with 0 at full participation, clients step as in SCAFFOLD.

    References:
        Gao et al. 2022, FedDC: Federated Learning with Non-IID Data via Local Drift Decoupling and
        Correction.
    """

    title: ClassVar[str] = "FedDC"
    cites: ClassVar[tuple[str, ...]] = ("gao2022feddc",)
    tracked_only: ClassVar[tuple[str, ...]] = ("ds",)
    changes: ClassVar[dict[str, str]] = {"ds": "s"}

    eta_l: float = positive(0.1)
    alpha: float = nonnegative(0.1)

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        zero = torch.zeros_like(x)
        return Server(x, s=zero, h=zero)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        zero = torch.zeros_like(x)
        return Client(h=zero, s=zero)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.s)

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Empty:
        return Empty()

    def step(self, down: Down, client: Client, local: Empty, x: Tensor, g: Tensor) -> tuple[Tensor, Empty]:
        drift = self.alpha * (x - down.x + client.h)
        return x - self.eta_l * (g + drift + down.s - client.s), local

    def finish(
        self, down: Down, client: Client, local: Empty, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        dx = x - down.x
        s = select(tracked, client.s - down.s - dx / (K * self.eta_l), client.s)
        return Client(client.h + dx, s), Up(dx, s - client.s)

    def received(self, client: Client, up: Up, arrived: Up) -> Client:
        return Client(client.h + (arrived.dx - up.dx), client.s + (arrived.ds - up.ds))

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        h = server.h + total.dx / cohort.n
        return Server(server.x + total.dx / cohort.S + h, server.s + total.ds / cohort.n, h)
