"""FedLALR: AMSGrad at the clients with moments that the server averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fadamgc.algebra.compose import Composition, Parts
from fadamgc.algebra.correction import NoCorrection
from fadamgc.algebra.local import Adam
from fadamgc.algebra.server import Average
from fadamgc.fields import decay, nonnegative, positive, unchecked


@dataclass(frozen=True)
class FedLALR(Composition):
    """FedLALR of Sun et al.; AMSGrad (m share, v share) x none x Average.

        m     = beta1 m + (1 - beta1) g                  m = the server's at the start of a round
        v     = beta2 v + (1 - beta2) g^2                v = v_hat = the server's at the start of a round
        v_hat = max(v_hat, v)
        x_i   = x_i - eta_l m / sqrt(v_hat)              a coordinate whose v_hat is 0 does not move
        x     = x + eta_g mean(x_i - x) ; m = mean(m_i) ; v_hat = mean(v_hat_i)

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: the square root of the value at which v_hat starts.

    References:
        Sun et al. 2023, FedLALR: Client-Specific Adaptive Learning Rates Achieve Linear Speedup for Non-IID
        Data.
    """

    title: ClassVar[str] = "FedLALR"
    cites: ClassVar[tuple[str, ...]] = ("sun2023fedlalr",)

    eta_l: float = positive(1e-3)
    eta_g: float = positive(1.0)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    eps: float = nonnegative(0.0)

    def parts(self) -> Parts:
        local = unchecked(
            Adam,
            eta_l=self.eta_l,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=0.0,
            v0=self.eps**2,
            amsgrad=True,
            m="share",
            v="share",
        )
        return Parts(local, NoCorrection(), unchecked(Average, eta_g=self.eta_g))
