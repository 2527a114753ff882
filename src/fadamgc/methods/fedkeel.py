"""FedKeel: a method of this package, and not of the paper; docs/fedkeel.md says how it was chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fadamgc.algebra.compose import Composition, Parts
from fadamgc.algebra.correction import PreDirection
from fadamgc.algebra.local import Adam
from fadamgc.algebra.server import Average
from fadamgc.fields import choice, decay, positive, share, unchecked


@dataclass(frozen=True)
class FedKeel(Composition):
    """Adam on a corrected gradient, with a shared second moment and the global direction in every step.

        g_hat = g + y - y_i
        m     = beta1 m + (1 - beta1) g_hat              m = 0 at the start of a round
        v     = beta2 v + (1 - beta2) g_hat^2            v = v_hat = the server's at the start of a round
        v_hat = max(v_hat, v)
        x_i   = x_i - eta_l ( alpha m / sqrt(v_hat) + (1 - alpha) G )
        y_i   = (1/K) sum of the raw g                   if tracked, else unchanged
        x     = x + eta_g mean(x_i - x)                  over the S sampled clients
        y     = y + (1/n) sum of (y_i new - y_i old)     over the tracked clients
        v_hat = mean(v_hat_i)                            eps^2 before round 1
        G     = -mean(x_i - x) / (eta_l K)               0 before round 1

    FAdamGC keeps v and v_hat at the clients, where they become old if clients are sampled rarely; here all
    clients divide by the same, recent v_hat. It is FedLADA with FAdamGC's correction, so that the optimum is
    a fixed point. G remembers the rounds before, so m, which starts at 0 in each round, forgets fast. As a
    composition: AMSGrad (m reset, v share) x pre+direction x Average.

    Args:
        eta_l: local step size.
        eta_g: global step size.
        alpha: weight of the client's own direction.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: the square root of the value at which v_hat starts.
        init: "zero", or "gradient" to start y_i and y at the clients' gradients at the initial model.

    References:
        None: it was found with this package, by a search over compositions.
        Its parts are of Chen et al. (FAdamGC) and of Sun et al. 2023 (FedLADA).
    """

    title: ClassVar[str] = "FedKeel"
    cites: ClassVar[tuple[str, ...]] = ("fadamgc", "chen2025gradient", "sun2023efficient")

    eta_l: float = positive(1e-2)
    eta_g: float = positive(1.0)
    alpha: float = share(0.4)
    beta1: float = decay(0.5)
    beta2: float = decay(0.99)
    eps: float = positive(1e-8)
    init: Literal["zero", "gradient"] = choice("zero", "gradient")

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
        correction = unchecked(PreDirection, alpha=self.alpha, init=self.init)
        return Parts(local, correction, unchecked(Average, eta_g=self.eta_g))
