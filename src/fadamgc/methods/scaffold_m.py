"""SCAFFOLD-M: SCAFFOLD with the global momentum of Cheng et al. in every local step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Flag, Steps
from fadamgc.fields import choice, positive, share
from fadamgc.rules import select


class Server(NamedTuple):
    x: Tensor
    y: Tensor  # mean of the clients' y_i
    G: Tensor  # the mean local direction of the last round


class Down(NamedTuple):
    x: Tensor
    y: Tensor
    G: Tensor


class Client(NamedTuple):
    y: Tensor  # control variate y_i: the mean raw gradient of the last tracked round


class Local(NamedTuple):
    g_sum: Tensor  # sum of the raw gradients


class Up(NamedTuple):
    dx: Tensor
    dy: Tensor


@dataclass(frozen=True)
class ScaffoldM(Algorithm[Server, Down, Client, Local, Up]):
    """SCAFFOLD-M of Cheng et al.

        x_i = x_i - eta_l ( beta (g - y_i + y) + (1 - beta) G )
        y_i = (1/K) sum of the raw g                     if tracked, else unchanged
        G   = -mean(x_i - x) / (eta_l K)                 G = 0 before round 1
        x   = x + eta_g mean(x_i - x)                    over the S sampled clients
        y   = y + (1/n) sum of (y_i new - y_i old)       over the tracked clients

    Where K differs between clients, G uses the mean K of the round, so that every local step has the
    same weight.

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta: weight of the fresh gradient; with 1, x follows SCAFFOLD's trajectory.
        init: "zero", or "gradient" to start y_i and y at the clients' gradients at the initial model.

    References:
        Cheng et al. 2023, Momentum Benefits Non-IID Federated Learning Simply and Provably.
    """

    title: ClassVar[str] = "SCAFFOLD-M"
    cites: ClassVar[tuple[str, ...]] = ("cheng2024momentum", "karimireddy2020scaffold")
    tracked_only: ClassVar[tuple[str, ...]] = ("dy",)
    changes: ClassVar[dict[str, str]] = {"dy": "y"}

    eta_l: float = positive(0.1)
    eta_g: float = positive(1.0)
    beta: float = share(0.1)
    init: Literal["zero", "gradient"] = choice("zero", "gradient")

    @property
    def init_gradient(self) -> bool:
        return self.init == "gradient"

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        zero = torch.zeros_like(x)
        return Server(x, y=zero if g is None else g, G=zero)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        return Client(torch.zeros_like(x) if g is None else g)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.y, server.G)

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        return Local(g_sum=torch.zeros_like(client.y))

    def step(self, down: Down, client: Client, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        corrected = g - client.y + down.y
        x = x - self.eta_l * (self.beta * corrected + (1 - self.beta) * down.G)
        return x, Local(local.g_sum + g)

    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        y = select(tracked, local.g_sum / K, client.y)
        return Client(y), Up(dx=x - down.x, dy=y - client.y)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        D = total.dx / cohort.S
        return Server(
            x=server.x + self.eta_g * D,
            y=server.y + total.dy / cohort.n,
            G=-D / (self.eta_l * cohort.K),
        )
