"""The privacy of a run: epsilon for a delta, from how clients are drawn and how much noise is added.

Two tasks are neighbours if all the data of one client is replaced. A client's message has F fields, each with
a norm of at most its clip c, and the sum of each field gets noise of the standard deviation noise c. In units
of its noise, the sum of all fields together moves by at most

    mu = sqrt(sum over fields of (2 c / (noise c))^2) = 2 sqrt(F) / noise

if the replaced client is drawn, and not at all if it is not. A round is bounded by its Renyi divergence of
order a (RDP). The bounds of rounds add up, also if what is sent in a round depends on earlier rounds.

Clients without a state, S of n drawn in secret: advanced joint convexity and the moments of a privacy profile
(Balle, Barthe and Gaboardi, Privacy Amplification by Subsampling, 2018):

    delta(eps)  = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)              the Gaussian mechanism
    delta'(u)   = q delta(eps),  u = log(1 + q (e^eps - 1)),  q = S / n
    rdp(a)      = 1/(a-1) log(1 + a (a-1) integral_0^inf (e^((a-1) u) + e^(-a u)) delta'(u) du)

Clients with a state: later messages depend on who was drawn before, so who is drawn is not taken as secret:

    rdp(a)      = 1/(a-1) log(1 - q + q e^(a (a-1) mu^2 / 2))

If only some of the sampled clients send some of the fields, e^(...) and delta are means over the two cases.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fadamgc.errors import not_accepted, real

ORDERS = (*(1 + k / 10 for k in range(1, 100)), *range(11, 64), *(64 * 2**k for k in range(6)))
NODES = 8192  # of the integral


class Accounting(NamedTuple):
    """What epsilon depends on, except the number of rounds and delta.

    >>> one = Accounting(noise=2.0, sampled=1.0, tracked=1.0, fields=1, tracked_fields=0, secret=True)
    >>> round(one.epsilon(rounds=1, delta=1e-5), 2)  # one Gaussian of scale 1
    4.73
    """

    noise: float  # standard deviation of the noise of a field, as a multiple of its clip
    sampled: float  # share of the clients that are sampled
    tracked: float  # share of the sampled clients that are tracked
    fields: int  # fields that all sampled clients send
    tracked_fields: int  # fields that only tracked clients send
    secret: bool  # whether it is secret who is drawn, and what clients do does not depend on it

    @classmethod
    def of(cls, plain: Mapping[str, Any]) -> Self:
        """Read what ``_asdict`` has written."""
        return cls(**{name: plain[name] for name in cls._fields})

    def shifts(self) -> list[tuple[float, float]]:
        """Return the shares of the sampled clients and their mu, each above 0."""
        counts = (1 - self.tracked, self.fields), (self.tracked, self.fields + self.tracked_fields)
        return [(share, 2 * math.sqrt(F) / self.noise) for share, F in counts if share > 0 and F > 0]

    def rdp(self, a: float) -> float:
        """Return the Renyi divergence of order a of one round."""
        if not self.shifts() or not self.sampled:
            return 0.0
        bound = subsampled if self.secret else known_clients
        return bound(a, self.sampled, self.shifts())

    def epsilon(self, rounds: int, delta: float) -> float:
        """Return epsilon after a number of rounds; infinite without noise."""
        number = real(delta)
        if number is None or not 0 < number < 1:
            raise not_accepted("delta", delta, "0 < delta < 1, less than 1 / clients")
        if not rounds:
            return 0.0
        if not self.noise:
            return math.inf
        return min(converted(a, rounds * self.rdp(a), number) for a in ORDERS)


def converted(a: float, rdp: float, delta: float) -> float:
    """Return epsilon for a Renyi divergence of order a (Canonne, Kamath and Steinke 2020, Proposition 12)."""
    epsilon = rdp + math.log1p(-1 / a) - math.log(delta * a) / (a - 1)
    return math.inf if math.isnan(epsilon) else max(0.0, epsilon)  # nan: beyond the range of floats


def known_clients(a: float, q: float, shifts: list[tuple[float, float]]) -> float:
    """Return the Renyi divergence of order a of a round in which everyone knows who takes part."""
    drawn = [math.log(q * share) + a * (a - 1) * mu**2 / 2 for share, mu in shifts]
    idle = 1 - q * sum(share for share, _ in shifts)
    logs = [*drawn, *([math.log(idle)] if idle > 1e-15 else [])]
    return float(torch.logsumexp(torch.tensor(logs, dtype=torch.float64), 0)) / (a - 1)


def subsampled(a: float, q: float, shifts: list[tuple[float, float]]) -> float:
    """Return the Renyi divergence of order a of a round with a secret share q of the clients."""
    mu = max(mu for _, mu in shifts)
    eps = torch.linspace(0, mu * ((a + 0.5) * mu + 40), NODES, dtype=torch.float64)  # e^-800 beyond
    # u = log(1 + q (e^eps - 1)) without overflow, and log(du / deps) = log q + eps - u
    u = eps + torch.log(q + (1 - q) * torch.exp(-eps))
    log_du = math.log(q) + eps - u
    log_moment = torch.logaddexp((a - 1) * u, -a * u)
    width = torch.full_like(eps, float(eps[1]))  # the trapezoidal rule
    width[0] /= 2
    terms = log_moment + log_profile(eps, shifts) + math.log(q) + log_du + width.log()
    log_integral = torch.logsumexp(terms, 0) + math.log(a * (a - 1))
    return float(torch.logaddexp(log_integral, torch.zeros_like(log_integral))) / (a - 1)


def log_profile(eps: Tensor, shifts: list[tuple[float, float]]) -> Tensor:
    """Return the logarithm of delta(eps) of Gaussian mechanisms, as their mean with these shares."""
    total = torch.full_like(eps, -math.inf)
    for share, mu in shifts:
        first = torch.special.log_ndtr(mu / 2 - eps / mu)
        second = eps + torch.special.log_ndtr(-mu / 2 - eps / mu)
        delta = first + torch.log(-torch.expm1((second - first).clamp(max=0)))
        total = torch.logaddexp(total, math.log(share) + delta)
    return total
