"""FedLADA: AMSGrad at the clients with a shared second moment, and the global direction in every step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fadamgc.algebra.compose import Composition, Parts
from fadamgc.algebra.correction import Direction
from fadamgc.algebra.local import Adam
from fadamgc.algebra.server import Average
from fadamgc.fields import decay, positive, share, unchecked


@dataclass(frozen=True)
class FedLADA(Composition):
    """FedLADA of Sun et al.; AMSGrad (m reset, v share) x direction x Average.

        m     = beta1 m + (1 - beta1) g                  m = 0 at the start of a round
        v     = beta2 v + (1 - beta2) g^2                v = v_hat = the server's at the start of a round
        v_hat = max(v_hat, v)
        x_i   = x_i - eta_l ( alpha m / sqrt(v_hat) + (1 - alpha) G )
        x     = x + eta_g mean(x_i - x)
        v_hat = mean(v_hat_i)                            eps^2 before round 1
        G     = -mean(x_i - x) / (eta_l K)               0 before round 1

    Args:
        eta_l: local step size.
        eta_g: global step size.
        alpha: weight of the client's own direction.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: the square root of the value at which v_hat starts.

    References:
        Sun et al. 2023, Efficient Federated Learning via Local Adaptive Amended Optimizer with Linear
        Speedup.
    """

    title: ClassVar[str] = "FedLADA"
    cites: ClassVar[tuple[str, ...]] = ("sun2023efficient",)

    eta_l: float = positive(1e-3)
    eta_g: float = positive(1.0)
    alpha: float = share(0.1)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    eps: float = positive(1e-8)

    def parts(self) -> Parts:
        local = unchecked(
            Adam,
            eta_l=self.eta_l,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=0.0,
            v0=self.eps**2,
            amsgrad=True,
            m="reset",
            v="share",
        )
        return Parts(local, unchecked(Direction, alpha=self.alpha), unchecked(Average, eta_g=self.eta_g))
