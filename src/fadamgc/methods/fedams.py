"""FedAMS: local SGD, AMSGrad at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Cohort
from fadamgc.fields import choice, decay, nonnegative, positive
from fadamgc.methods.local_sgd import Down, LocalSGD, Up
from fadamgc.rules import adam_ratio, ema


class Server(NamedTuple):
    x: Tensor
    m: Tensor
    v: Tensor
    v_hat: Tensor


@dataclass(frozen=True)
class FedAMS(LocalSGD[Server]):
    """FedAMS of Wang et al., with its two options.

        x_i   = x_i - eta_l g
        D     = mean(x_i - x)
        m     = beta1 m + (1 - beta1) D                  m = v = v_hat = 0 before round 1
        v     = beta2 v + (1 - beta2) D^2
        v_hat = max(v_hat, v, eps) ; x = x + eta_g m / sqrt(v_hat)            "fedams"
        v_hat = max(v_hat, v)      ; x = x + eta_g m / (sqrt(v_hat) + eps)    "amsgrad"

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta1: decay of the server's first moment.
        beta2: decay of the server's second moment.
        eps: lower bound of v_hat ("fedams"), or added to the denominator ("amsgrad").
        option: "fedams" (the paper's option 1) or "amsgrad" (option 2).

    References:
        Wang et al. 2022, Communication-Efficient Adaptive Federated Learning.
    """

    title: ClassVar[str] = "FedAMS"
    cites: ClassVar[tuple[str, ...]] = ("wang2022communication",)

    eta_l: float = positive(0.1)
    eta_g: float = positive(1e-2)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    eps: float = nonnegative(1e-3)
    option: Literal["fedams", "amsgrad"] = choice("fedams", "amsgrad")

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        zero = torch.zeros_like(x)
        return Server(x, m=zero, v=zero, v_hat=zero)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        D = total.dx / cohort.S
        m = ema(server.m, D, self.beta1)
        v = ema(server.v, D * D, self.beta2)
        v_hat = torch.maximum(server.v_hat, v)
        if self.option == "fedams":
            v_hat = v_hat.clamp(min=self.eps)
            step = adam_ratio(m, v_hat, 0.0)
        else:
            step = adam_ratio(m, v_hat, self.eps)
        return Server(server.x + self.eta_g * step, m, v, v_hat)
