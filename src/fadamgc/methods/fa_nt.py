"""FA-NT: federated Adam with naive tracking (the paper's appendix)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, ClientT, Cohort, DownT, Flag, ServerT, Steps, UpT
from fadamgc.fields import choice, decay, nonnegative, positive
from fadamgc.rules import adam_ratio, ema, select


class Local(NamedTuple):
    m: Tensor
    v: Tensor
    v_hat: Tensor
    z: Tensor  # the correction y - y_i


@dataclass(frozen=True)
class NaiveTracking(Algorithm[ServerT, DownT, ClientT, Local, UpT]):
    """The step of both forms of FA-NT: Adam on the raw gradient, plus the correction z; abstract."""

    eta_l: float = positive(1e-3)
    eta_g: float = positive(1.0)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    eps: float = nonnegative(1e-8)
    v_hat: Literal["carry", "restart"] = choice("carry", "restart")

    def start(self, v: Tensor, v_hat: Tensor, z: Tensor) -> Local:
        """Return the local state before step 1."""
        return Local(m=torch.zeros_like(v), v=v, v_hat=v_hat if self.v_hat == "carry" else v, z=z)

    def step(self, down: DownT, client: ClientT, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        m = ema(local.m, g, self.beta1)
        v = ema(local.v, g * g, self.beta2)
        v_hat = torch.maximum(local.v_hat, v)
        x = x - self.eta_l * (adam_ratio(m, v_hat, self.eps) + local.z)
        return x, Local(m, v, v_hat, local.z)


class Server(NamedTuple):
    x: Tensor
    y: Tensor  # mean of the clients' y_i


class Down(NamedTuple):
    x: Tensor
    y: Tensor


class Client(NamedTuple):
    y: Tensor  # control variate y_i: the mean Adam direction of the last tracked round
    v: Tensor
    v_hat: Tensor


class Up(NamedTuple):
    dx: Tensor
    dy: Tensor


@dataclass(frozen=True)
class FANT(NaiveTracking[Server, Down, Client, Up]):
    """Adam at the clients with SCAFFOLD's correction added AFTER the moments: the naive way.

        m, v, v_hat as in FAdamGC, on the raw g
        x_i = x_i - eta_l ( m / (sqrt(v_hat) + eps) + y - y_i )
        y_i = y_i - y + (x - x_i) / (K eta_l)            if tracked, else unchanged
        x   = x + eta_g mean(x_i - x)                    over the S sampled clients
        y   = y + (1/n) sum of (y_i new - y_i old)       over the tracked clients

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator; with 0 a coordinate whose v_hat is 0 gets no Adam step.
        v_hat: "carry" keeps v_hat between rounds, "restart" starts it from v_i in each round.

    References:
        Chen et al., Gradient Correction in Federated Learning with Adaptive Optimization, appendix.
    """

    title: ClassVar[str] = "FA-NT"
    cites: ClassVar[tuple[str, ...]] = ("chen2025gradient",)
    tracked_only: ClassVar[tuple[str, ...]] = ("dy",)
    changes: ClassVar[dict[str, str]] = {"dy": "y"}

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x, torch.zeros_like(x))

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        zero = torch.zeros_like(x)
        return Client(y=zero, v=zero, v_hat=zero)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.y)

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        return self.start(client.v, client.v_hat, z=down.y - client.y)

    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        y = select(tracked, client.y - down.y + (down.x - x) / (K * self.eta_l), client.y)
        return Client(y, local.v, local.v_hat), Up(dx=x - down.x, dy=y - client.y)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        return Server(
            x=server.x + self.eta_g * (total.dx / cohort.S),
            y=server.y + total.dy / cohort.n,
        )
