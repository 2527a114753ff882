"""MimeLite: Adam at the clients with moments of whole-data gradients, which are frozen in a round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Empty, Flag, Steps
from fadamgc.fields import decay, nonnegative, positive
from fadamgc.rules import adam_ratio, ema


class Server(NamedTuple):
    x: Tensor
    m: Tensor
    v: Tensor


class Down(NamedTuple):
    x: Tensor
    m: Tensor
    v: Tensor


class Local(NamedTuple):
    c: Tensor  # gradient of the client's whole data at x


class Up(NamedTuple):
    dx: Tensor
    c: Tensor


@dataclass(frozen=True)
class MimeLite(Algorithm[Server, Down, Empty, Local, Up]):
    """MimeLite of Karimireddy et al., with Adam as the base optimizer.

        x_i = x_i - eta_l ( beta1 m + (1 - beta1) g ) / (sqrt(v) + eps)     m, v do not change in a round
        c   = mean over the sampled clients of the gradient of f_i at x
        m   = beta1 m + (1 - beta1) c                    m = v = 0 before round 1
        v   = beta2 v + (1 - beta2) c^2
        x   = x + eta_g mean(x_i - x)

    As v is 0 in round 1, its steps are (1 - beta1) g / eps.

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator; with 0 a coordinate whose v is 0 does not move.

    References:
        Karimireddy et al. 2020, Mime: Mimicking Centralized Stochastic Algorithms in Federated Learning.
    """

    title: ClassVar[str] = "MimeLite"
    cites: ClassVar[tuple[str, ...]] = ("karimireddy2020mime",)

    eta_l: float = positive(1e-3)
    eta_g: float = positive(1.0)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    eps: float = nonnegative(1e-3)

    @property
    def round_gradient(self) -> bool:
        return True

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        zero = torch.zeros_like(x)
        return Server(x, m=zero, v=zero)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Empty:
        return Empty()

    def broadcast(self, server: Server) -> Down:
        return Down(*server)

    def begin(self, down: Down, client: Empty, g: Tensor | None = None) -> Local:
        return Local(torch.zeros_like(down.x) if g is None else g)

    def step(self, down: Down, client: Empty, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        return x - self.eta_l * adam_ratio(ema(down.m, g, self.beta1), down.v, self.eps), local

    def finish(
        self, down: Down, client: Empty, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Empty, Up]:
        return client, Up(dx=x - down.x, c=local.c)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        c = total.c / cohort.S
        m, v = ema(server.m, c, self.beta1), ema(server.v, c * c, self.beta2)
        return Server(server.x + self.eta_g * (total.dx / cohort.S), m, v)
