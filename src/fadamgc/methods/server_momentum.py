"""Server momentum: local SGD, heavy-ball or Nesterov momentum at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fadamgc.algebra.compose import Composition, Parts
from fadamgc.algebra.correction import NoCorrection
from fadamgc.algebra.local import SGD
from fadamgc.algebra.server import Momentum, Nesterov
from fadamgc.fields import decay, flag, positive, unchecked


@dataclass(frozen=True)
class ServerMomentum(Composition):
    """The method that Hsu et al. and many libraries call FedAvgM; SGD x none x Momentum.

        x_i = x_i - eta_l g
        m   = beta m + mean(x_i - x)                     m = 0 before round 1
        x   = x + eta_g m                                nesterov: x + eta_g (beta m + mean(x_i - x))

    FedAvg-M of this package is another rule, of Cheng et al.

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta: decay of the momentum.
        nesterov: look ahead along the momentum.

    References:
        Hsu et al. 2019, Measuring the Effects of Non-Identical Data Distribution for Federated Visual
        Classification.
    """

    title: ClassVar[str] = "Server momentum"
    cites: ClassVar[tuple[str, ...]] = ("hsu2019measuring",)

    eta_l: float = positive(0.1)
    eta_g: float = positive(1.0)
    beta: float = decay(0.9)
    nesterov: bool = flag(False)

    def parts(self) -> Parts:
        rule = Nesterov if self.nesterov else Momentum
        server = unchecked(rule, eta_g=self.eta_g, beta=self.beta)
        return Parts(unchecked(SGD, eta_l=self.eta_l), NoCorrection(), server)
