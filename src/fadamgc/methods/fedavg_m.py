"""FedAvg-M: FedAvg with the global momentum of Cheng et al. in every local step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Empty, Flag, Steps
from fadamgc.fields import positive, share


class Server(NamedTuple):
    x: Tensor
    G: Tensor  # the mean local direction of the last round


class Down(NamedTuple):
    x: Tensor
    G: Tensor


class Up(NamedTuple):
    dx: Tensor


@dataclass(frozen=True)
class FedAvgM(Algorithm[Server, Down, Empty, Empty, Up]):
    """FedAvg-M of Cheng et al., the rule also known as FedCM.

        x_i = x_i - eta_l ( beta g + (1 - beta) G )      beta: weight of the FRESH gradient
        G   = -mean(x_i - x) / (eta_l K)                 G = 0 before round 1
        x   = x + eta_g mean(x_i - x)

    This is not the server momentum of Hsu et al. that other libraries call FedAvgM. Where K differs
    between clients, G uses the mean K of the round, so that every local step has the same weight.

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta: weight of the fresh gradient; with 1, the method is FedAvg.

    References:
        Cheng et al. 2023, Momentum Benefits Non-IID Federated Learning Simply and Provably.
    """

    title: ClassVar[str] = "FedAvg-M"
    cites: ClassVar[tuple[str, ...]] = ("cheng2024momentum", "xu2021fedcm")

    eta_l: float = positive(0.1)
    eta_g: float = positive(1.0)
    beta: float = share(0.1)

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x, G=torch.zeros_like(x))

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Empty:
        return Empty()

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.G)

    def begin(self, down: Down, client: Empty, g: Tensor | None = None) -> Empty:
        return Empty()

    def step(self, down: Down, client: Empty, local: Empty, x: Tensor, g: Tensor) -> tuple[Tensor, Empty]:
        return x - self.eta_l * (self.beta * g + (1 - self.beta) * down.G), local

    def finish(
        self, down: Down, client: Empty, local: Empty, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Empty, Up]:
        return client, Up(dx=x - down.x)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        D = total.dx / cohort.S
        return Server(x=server.x + self.eta_g * D, G=-D / (self.eta_l * cohort.K))
