"""DiLoCo: AdamW at the workers, Nesterov momentum at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fadamgc.algebra.compose import Composition, Parts
from fadamgc.algebra.correction import NoCorrection
from fadamgc.algebra.local import AdamW
from fadamgc.algebra.server import Nesterov
from fadamgc.fields import decay, flag, nonnegative, positive, unchecked


@dataclass(frozen=True)
class DiLoCo(Composition):
    """DiLoCo of Douillard et al.; AdamW (m keep, v keep) x none x Nesterov.

        m   = beta1 m + (1 - beta1) g                    m, v kept by the worker between rounds
        v   = beta2 v + (1 - beta2) g^2
        x_i = x_i - eta_l ( m / (sqrt(v) + eps) + weight_decay x_i )
        u   = mu u + mean(x_i - x)                       u = 0 before round 1
        x   = x + eta_g ( mu u + mean(x_i - x) )

    Args:
        eta_l: step size of the inner optimizer.
        eta_g: step size of the outer optimizer.
        mu: outer momentum.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        bias_correction: correct m and v for their start at zero, as common implementations of AdamW do.

    References:
        Douillard et al. 2023, DiLoCo: Distributed Low-Communication Training of Language Models.
    """

    title: ClassVar[str] = "DiLoCo"
    cites: ClassVar[tuple[str, ...]] = ("douillard2023diloco",)

    eta_l: float = positive(1e-3)
    eta_g: float = positive(0.7)
    mu: float = decay(0.9)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    eps: float = nonnegative(1e-8)
    weight_decay: float = nonnegative(0.01)
    bias_correction: bool = flag(False)

    def parts(self) -> Parts:
        local = unchecked(
            AdamW,
            eta_l=self.eta_l,
            beta1=self.beta1,
            beta2=self.beta2,
            eps=self.eps,
            weight_decay=self.weight_decay,
            bias_correction=self.bias_correction,
            m="keep",
            v="keep",
        )
        return Parts(local, NoCorrection(), unchecked(Nesterov, eta_g=self.eta_g, beta=self.mu))
