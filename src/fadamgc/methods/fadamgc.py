"""FAdamGC: federated Adam with gradient correction (the paper's Algorithm 1)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Flag, Steps
from fadamgc.fields import choice, decay, nonnegative, positive
from fadamgc.rules import adam_ratio, ema, select


class Server(NamedTuple):
    x: Tensor  # the model
    y: Tensor  # mean of the clients' y_i


class Down(NamedTuple):
    x: Tensor
    y: Tensor


class Client(NamedTuple):
    y: Tensor  # control variate y_i: the mean raw gradient of the last tracked round
    v: Tensor  # second moment
    v_hat: Tensor  # running maximum of v


class Local(NamedTuple):
    m: Tensor
    v: Tensor
    v_hat: Tensor
    g_sum: Tensor  # sum of the raw gradients


class Up(NamedTuple):
    dx: Tensor
    dy: Tensor


@dataclass(frozen=True)
class FAdamGC(Algorithm[Server, Down, Client, Local, Up]):
    """Adam at the clients on a gradient that is corrected BEFORE the moments are computed.

        g_hat = g + y - y_i
        m     = beta1 m + (1 - beta1) g_hat              m = 0 at the start of a round
        v     = beta2 v + (1 - beta2) g_hat^2            kept by the client between rounds
        v_hat = max(v_hat, v)
        x_i   = x_i - eta_l m / (sqrt(v_hat) + eps)
        y_i   = (1/K) sum of the raw g                   if tracked, else unchanged
        x     = x + eta_g mean(x_i - x)                  over the S sampled clients
        y     = y + (1/n) sum of (y_i new - y_i old)     over the tracked clients

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta1: decay of the first moment.
        beta2: decay of the second moment; 0 is the paper's special case.
        eps: added to the denominator; with 0 a coordinate whose v_hat is 0 does not move.
        v_hat: "carry" keeps v_hat between rounds, "restart" starts it from v_i in each round.
        init: "zero", or "gradient" to start y_i and y at the clients' gradients at the initial model.

    References:
        Chen et al., Gradient Correction in Federated Learning with Adaptive Optimization, Algorithm 1.
    """

    title: ClassVar[str] = "FAdamGC"
    cites: ClassVar[tuple[str, ...]] = ("chen2025gradient",)
    tracked_only: ClassVar[tuple[str, ...]] = ("dy",)
    changes: ClassVar[dict[str, str]] = {"dy": "y"}

    eta_l: float = positive(1e-3)
    eta_g: float = positive(1.0)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    eps: float = nonnegative(1e-8)
    v_hat: Literal["carry", "restart"] = choice("carry", "restart")
    init: Literal["zero", "gradient"] = choice("zero", "gradient")

    @property
    def init_gradient(self) -> bool:
        return self.init == "gradient"

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x, torch.zeros_like(x) if g is None else g)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        zero = torch.zeros_like(x)
        return Client(y=zero if g is None else g, v=zero, v_hat=zero)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.y)

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        zero = torch.zeros_like(client.v)
        v_hat = client.v_hat if self.v_hat == "carry" else client.v
        return Local(m=zero, v=client.v, v_hat=v_hat, g_sum=zero)

    def step(self, down: Down, client: Client, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        g_hat = g + down.y - client.y
        m = ema(local.m, g_hat, self.beta1)
        v = ema(local.v, g_hat * g_hat, self.beta2)
        v_hat = torch.maximum(local.v_hat, v)
        x = x - self.eta_l * adam_ratio(m, v_hat, self.eps)
        return x, Local(m, v, v_hat, local.g_sum + g)

    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        y = select(tracked, local.g_sum / K, client.y)
        return Client(y, local.v, local.v_hat), Up(dx=x - down.x, dy=y - client.y)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        return Server(
            x=server.x + self.eta_g * (total.dx / cohort.S),
            y=server.y + total.dy / cohort.n,
        )
