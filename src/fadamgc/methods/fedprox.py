"""FedProx: local SGD with a proximal term."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fadamgc.algebra.compose import Composition, Parts
from fadamgc.algebra.correction import Proximal
from fadamgc.algebra.local import SGD
from fadamgc.algebra.server import Average
from fadamgc.fields import nonnegative, positive, unchecked


@dataclass(frozen=True)
class FedProx(Composition):
    """FedProx of Li et al.: clients minimise f_i + mu/2 |x_i - x|^2; SGD x Proximal x Average.

        x_i = x_i - eta_l (g + mu (x_i - x))
        x   = x + eta_g mean(x_i - x)

    Args:
        eta_l: local step size.
        eta_g: global step size.
        mu: weight of the proximal term; with 0, the method is FedAvg.

    References:
        Li et al. 2020, Federated Optimization in Heterogeneous Networks.
    """

    title: ClassVar[str] = "FedProx"
    cites: ClassVar[tuple[str, ...]] = ("li2020federated",)

    eta_l: float = positive(0.1)
    eta_g: float = positive(1.0)
    mu: float = nonnegative(0.01)

    def parts(self) -> Parts:
        local = unchecked(SGD, eta_l=self.eta_l)
        return Parts(local, unchecked(Proximal, mu=self.mu), unchecked(Average, eta_g=self.eta_g))
