"""FedACG: the server sends a model that is ahead along its momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Empty, Flag, Steps
from fadamgc.fields import decay, nonnegative, positive


class Server(NamedTuple):
    x: Tensor
    m: Tensor


class Down(NamedTuple):
    x: Tensor  # x + lam m


class Up(NamedTuple):
    dx: Tensor


@dataclass(frozen=True)
class FedACG(Algorithm[Server, Down, Empty, Empty, Up]):
    """FedACG of Kim et al.: accelerated client gradients.

        x_a = x + lam m                                  sent to the clients, which start there
        x_i = x_i - eta_l ( g + beta (x_i - x_a) )
        m   = lam m + mean(x_i - x_a)                    m = 0 before round 1
        x   = x + m

    Args:
        eta_l: local step size.
        lam: decay of the momentum.
        beta: weight of the proximal term.

    References:
        Kim et al. 2024, Communication-Efficient Federated Learning with Accelerated Client Gradient.
    """

    title: ClassVar[str] = "FedACG"
    cites: ClassVar[tuple[str, ...]] = ("kim2024communication",)

    eta_l: float = positive(0.1)
    lam: float = decay(0.85)
    beta: float = nonnegative(0.01)

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x, m=torch.zeros_like(x))

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Empty:
        return Empty()

    def broadcast(self, server: Server) -> Down:
        return Down(server.x + self.lam * server.m)

    def begin(self, down: Down, client: Empty, g: Tensor | None = None) -> Empty:
        return Empty()

    def step(self, down: Down, client: Empty, local: Empty, x: Tensor, g: Tensor) -> tuple[Tensor, Empty]:
        return x - self.eta_l * (g + self.beta * (x - down.x)), local

    def finish(
        self, down: Down, client: Empty, local: Empty, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Empty, Up]:
        return client, Up(x - down.x)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        m = self.lam * server.m + total.dx / cohort.S
        return Server(server.x + m, m)
