"""FedNova: normalized averaging, for clients that take different numbers of steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Empty, Flag, Steps
from fadamgc.fields import decay, positive
from fadamgc.rules import number


class Server(NamedTuple):
    x: Tensor


class Down(NamedTuple):
    x: Tensor


class Local(NamedTuple):
    m: Tensor  # momentum


class Up(NamedTuple):
    d: Tensor  # the client's change, divided by a
    a: Tensor  # sum of the weights of the client's gradients in its change, shape (1,)


@dataclass(frozen=True)
class FedNova(Algorithm[Server, Down, Empty, Local, Up]):
    """FedNova of Wang et al., with local momentum.

        m   = rho m + g                                  m = 0 at the start of a round
        x_i = x_i - eta_l m
        a_i = (K_i - rho (1 - rho^K_i) / (1 - rho)) / (1 - rho)             rho = 0: a_i = K_i
        x   = x + eta_g mean(a_i) mean( (x_i - x) / a_i )

    Args:
        eta_l: local step size.
        eta_g: global step size.
        rho: local momentum.

    References:
        Wang et al. 2020, Tackling the Objective Inconsistency Problem in Heterogeneous Federated
        Optimization.
    """

    title: ClassVar[str] = "FedNova"
    cites: ClassVar[tuple[str, ...]] = ("wang2020tackling",)

    eta_l: float = positive(0.1)
    eta_g: float = positive(1.0)
    rho: float = decay(0.0)

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Empty:
        return Empty()

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def begin(self, down: Down, client: Empty, g: Tensor | None = None) -> Local:
        return Local(torch.zeros_like(down.x))

    def step(self, down: Down, client: Empty, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        m = self.rho * local.m + g
        return x - self.eta_l * m, Local(m)

    def finish(
        self, down: Down, client: Empty, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Empty, Up]:
        rho = self.rho
        a = number(x, 1.0) * ((K - rho * (1 - rho**K) / (1 - rho)) / (1 - rho))
        return client, Up((x - down.x) / a, a)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        return Server(server.x + self.eta_g * (total.a / cohort.S) * (total.d / cohort.S))
