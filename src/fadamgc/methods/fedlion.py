"""FedLion: Lion at the clients, with a momentum that the server averages."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fadamgc.algebra.compose import Composition, Parts
from fadamgc.algebra.correction import NoCorrection
from fadamgc.algebra.local import Lion
from fadamgc.algebra.server import Average
from fadamgc.fields import decay, positive, unchecked


@dataclass(frozen=True)
class FedLion(Composition):
    """FedLion of Tang et al.; Lion (m share) x none x Average.

        x_i = x_i - eta_l sign(beta1 m + (1 - beta1) g)
        m   = beta2 m + (1 - beta2) g
        x   = x + eta_g mean(x_i - x) ; m = mean(m_i)    both sent to the clients

    The paper quantizes the message of a client to integers without loss; here it is counted as a vector.

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta1: weight of m in the direction.
        beta2: decay of m.

    References:
        Tang and Chang 2024, FedLion: Faster Adaptive Federated Optimization with Fewer Communication.
    """

    title: ClassVar[str] = "FedLion"
    cites: ClassVar[tuple[str, ...]] = ("tang2024fedlion",)

    eta_l: float = positive(1e-3)
    eta_g: float = positive(1.0)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)

    def parts(self) -> Parts:
        local = unchecked(Lion, eta_l=self.eta_l, beta1=self.beta1, beta2=self.beta2, m="share")
        return Parts(local, NoCorrection(), unchecked(Average, eta_g=self.eta_g))
