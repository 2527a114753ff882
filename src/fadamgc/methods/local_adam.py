"""LocalAdam: Adam at the clients, averaging at the server, without a correction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Flag, Steps
from fadamgc.fields import choice, decay, nonnegative, positive
from fadamgc.rules import adam_ratio, ema


class Server(NamedTuple):
    x: Tensor


class Down(NamedTuple):
    x: Tensor


class Client(NamedTuple):
    v: Tensor
    v_hat: Tensor


class Local(NamedTuple):
    m: Tensor
    v: Tensor
    v_hat: Tensor


class Up(NamedTuple):
    dx: Tensor


@dataclass(frozen=True)
class LocalAdam(Algorithm[Server, Down, Client, Local, Up]):
    """FAdamGC without its correction: y = y_i = 0.

        m     = beta1 m + (1 - beta1) g                  m = 0 at the start of a round
        v     = beta2 v + (1 - beta2) g^2
        v_hat = max(v_hat, v)
        x_i   = x_i - eta_l m / (sqrt(v_hat) + eps)
        x     = x + eta_g mean(x_i - x)

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator; with 0 a coordinate whose v_hat is 0 does not move.
        v_hat: "carry" keeps v_hat between rounds, "restart" starts it from v_i in each round.
        moments: "keep" the client's v and v_hat between rounds, or "reset" them to zero in each round.

    References:
        Chen et al., Gradient Correction in Federated Learning with Adaptive Optimization (a baseline there).
    """

    title: ClassVar[str] = "LocalAdam"
    cites: ClassVar[tuple[str, ...]] = ("chen2025gradient", "reddi2018convergence")

    eta_l: float = positive(1e-3)
    eta_g: float = positive(1.0)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    eps: float = nonnegative(1e-8)
    v_hat: Literal["carry", "restart"] = choice("carry", "restart")
    moments: Literal["keep", "reset"] = choice("keep", "reset")

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        return Client(v=torch.zeros_like(x), v_hat=torch.zeros_like(x))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        zero = torch.zeros_like(client.v)
        if self.moments == "reset":
            return Local(m=zero, v=zero, v_hat=zero)
        return Local(m=zero, v=client.v, v_hat=client.v_hat if self.v_hat == "carry" else client.v)

    def step(self, down: Down, client: Client, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        m = ema(local.m, g, self.beta1)
        v = ema(local.v, g * g, self.beta2)
        v_hat = torch.maximum(local.v_hat, v)
        return x - self.eta_l * adam_ratio(m, v_hat, self.eps), Local(m, v, v_hat)

    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        kept = client if self.moments == "reset" else Client(local.v, local.v_hat)
        return kept, Up(dx=x - down.x)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        return Server(server.x + self.eta_g * (total.dx / cohort.S))
