"""FedMuon in its sign form: signs of a corrected momentum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Flag, Steps
from fadamgc.fields import positive, share
from fadamgc.rules import select


class Server(NamedTuple):
    x: Tensor
    C: Tensor  # mean of the clients' C_i


class Down(NamedTuple):
    x: Tensor
    C: Tensor


class Client(NamedTuple):
    M: Tensor  # momentum
    C: Tensor  # momentum at the end of the last tracked round


class Local(NamedTuple):
    M: Tensor


class Up(NamedTuple):
    dx: Tensor
    dC: Tensor


@dataclass(frozen=True)
class FedMuonSign(Algorithm[Server, Down, Client, Local, Up]):
    """FedMuon with the sign of each coordinate in the place of the orthogonalization of matrices.

        M_i = (1 - alpha) M_i + alpha g                  kept by the client between rounds
        x_i = x_i - eta_l sign(M_i - C_i + C)
        C_i = M_i                                        if tracked, else unchanged
        C   = C + (1/n) sum of (C_i new - C_i old)       over the tracked clients
        x   = x + eta_g (S/n) mean(x_i - x)

    All of M_i, C_i, C are 0 before round 1. In the paper all sampled clients are tracked.

    Args:
        eta_l: local step size.
        eta_g: global step size.
        alpha: weight of the fresh gradient in the momentum.

    References:
        Takezawa et al. 2025, FedMuon: Federated Learning with Bias-corrected LMO-based Optimization.
    """

    title: ClassVar[str] = "FedMuon (sign)"
    cites: ClassVar[tuple[str, ...]] = ("takezawa2025fedmuon",)
    tracked_only: ClassVar[tuple[str, ...]] = ("dC",)
    changes: ClassVar[dict[str, str]] = {"dC": "C"}

    eta_l: float = positive(1e-3)
    eta_g: float = positive(1.0)
    alpha: float = share(0.1)

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x, C=torch.zeros_like(x))

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        zero = torch.zeros_like(x)
        return Client(M=zero, C=zero)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.C)

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        return Local(client.M)

    def step(self, down: Down, client: Client, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        M = (1 - self.alpha) * local.M + self.alpha * g
        return x - self.eta_l * torch.sign(M - client.C + down.C), Local(M)

    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        C = select(tracked, local.M, client.C)
        return Client(local.M, C), Up(dx=x - down.x, dC=C - client.C)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        return Server(
            x=server.x + self.eta_g * (total.dx / cohort.n),  # (S/n) mean = sum / n
            C=server.C + total.dC / cohort.n,
        )
