"""FedAdam: local SGD, Adam at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Cohort
from fadamgc.fields import decay, flag, nonnegative, optional_nonnegative, positive
from fadamgc.methods.local_sgd import Down, LocalSGD, Up
from fadamgc.rules import adam_ratio, ema, number


class Server(NamedTuple):
    x: Tensor
    m: Tensor
    v: Tensor
    t: Tensor  # number of finished rounds, shape (1,), for the bias correction


@dataclass(frozen=True)
class FedAdam(LocalSGD[Server]):
    """FedAdam of Reddi et al., Algorithm 2, as printed: no bias correction, v starts at tau^2.

        x_i = x_i - eta_l g
        D   = mean(x_i - x)
        m   = beta1 m + (1 - beta1) D                    m = 0 before round 1
        v   = beta2 v + (1 - beta2) D^2
        x   = x + eta_g m / (sqrt(v) + tau)

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta1: decay of the server's first moment.
        beta2: decay of the server's second moment.
        tau: the degree of adaptivity, added to the denominator.
        v0: initial value of v; None is tau^2.
        bias_correction: divide m by 1 - beta1^t and v by 1 - beta2^t, where t is the round, from 1.

    References:
        Reddi et al. 2020, Adaptive Federated Optimization.
    """

    title: ClassVar[str] = "FedAdam"
    cites: ClassVar[tuple[str, ...]] = ("reddi2021adaptive",)

    eta_l: float = positive(0.1)
    eta_g: float = positive(1e-2)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    tau: float = nonnegative(1e-3)
    v0: float | None = optional_nonnegative()
    bias_correction: bool = flag(False)

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        v0 = self.tau**2 if self.v0 is None else self.v0
        return Server(x, m=torch.zeros_like(x), v=torch.full_like(x, v0), t=number(x))

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        D = total.dx / cohort.S
        m = ema(server.m, D, self.beta1)
        v = ema(server.v, D * D, self.beta2)
        t = server.t + 1
        if self.bias_correction:
            step = adam_ratio(m / (1 - self.beta1**t), v / (1 - self.beta2**t), self.tau)
        else:
            step = adam_ratio(m, v, self.tau)
        return Server(server.x + self.eta_g * step, m, v, t)
