"""FedYogi: local SGD, Yogi at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fadamgc.algebra.compose import Composition, Parts
from fadamgc.algebra.correction import NoCorrection
from fadamgc.algebra.local import SGD
from fadamgc.algebra.server import Yogi
from fadamgc.fields import decay, nonnegative, positive, unchecked


@dataclass(frozen=True)
class FedYogi(Composition):
    """FedYogi of Reddi et al., Algorithm 2, as printed; SGD x none x Yogi.

        x_i = x_i - eta_l g
        D   = mean(x_i - x)
        m   = beta1 m + (1 - beta1) D                    m = 0 before round 1
        v   = v - (1 - beta2) D^2 sign(v - D^2)          v = tau^2 before round 1
        x   = x + eta_g m / (sqrt(v) + tau)

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta1: decay of the server's first moment.
        beta2: 1 - beta2 is the rate at which v changes.
        tau: the degree of adaptivity, added to the denominator.

    References:
        Reddi et al. 2020, Adaptive Federated Optimization.
    """

    title: ClassVar[str] = "FedYogi"
    cites: ClassVar[tuple[str, ...]] = ("reddi2021adaptive",)

    eta_l: float = positive(0.1)
    eta_g: float = positive(1e-2)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    tau: float = nonnegative(1e-3)

    def parts(self) -> Parts:
        server = unchecked(Yogi, eta_g=self.eta_g, beta1=self.beta1, beta2=self.beta2, tau=self.tau)
        return Parts(unchecked(SGD, eta_l=self.eta_l), NoCorrection(), server)
