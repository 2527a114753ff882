"""Local rules: how a client turns gradients into steps, x_i = x_i - eta_l * direction.

A rule is a frozen dataclass with ``eta_l`` and a method ``direction``. The moments of a rule are a NamedTuple
that ``start`` returns; each of its fields is named like the field of the rule that says where this moment
lives between rounds:

- "reset": nowhere, it starts again in every round,
- "keep": at the client,
- "share": at the server, which averages the clients' moments and sends the mean with the next model.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from fadamgc.algorithm import Empty
from fadamgc.fields import check_fields, choice, decay, flag, nonnegative, positive
from fadamgc.rules import adam_ratio, ema, number

__all__ = ["SGD", "AdaGrad", "Adam", "AdamW", "Lion", "LocalRule", "Momentum", "RMSProp", "Sign"]

Home: TypeAlias = Literal["reset", "keep", "share"]
HOMES: tuple[Home, ...] = ("reset", "keep", "share")


@dataclass(frozen=True)
class LocalRule(ABC):
    """How a client steps; abstract.

    A custom rule is a frozen dataclass with the field ``eta_l``, one field for the home of each moment, and
    the methods ``start`` (unless it has no moments) and ``direction``, which are pure and for one client.

    >>> @dataclass(frozen=True)
    ... class Clipped(LocalRule):
    ...     def direction(self, moments, x, g):
    ...         return g.clamp(-1, 1), moments
    >>> Clipped(eta_l=0.1).direction(Empty(), torch.zeros(2), torch.tensor([0.5, -3.0]))[0]
    tensor([ 0.5000, -1.0000])
    """

    cites: ClassVar[tuple[str, ...]] = ()
    """As ``Algorithm.cites``."""

    eta_l: float = positive(1e-2)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def title(self) -> str:
        """The name in tables and legends."""
        return type(self).__name__

    def start(self, x: Tensor) -> Any:
        """Return the moments before the first step, for a model like x."""
        return Empty()

    @abstractmethod
    def direction(self, moments: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Any]:
        """Return the direction of a step from x with the gradient g, and the new moments."""

    def shared(self, name: str, moment: Any) -> Any:
        """Return what the server averages of a moment whose home is "share"."""
        return moment

    def received(self, name: str, shared: Any) -> Any:
        """Return the moment with which a round starts, from the average; the inverse of ``shared``."""
        return shared


@dataclass(frozen=True)
class SGD(LocalRule):
    """The gradient: d = g.

    Args:
        eta_l: local step size.

    Example:
        >>> rule, g = SGD(eta_l=0.1), torch.tensor([0.5, -2.0])
        >>> rule.direction(rule.start(g), g, g)[0]
        tensor([ 0.5000, -2.0000])
    """

    eta_l: float = positive(0.1)

    def direction(self, moments: Empty, x: Tensor, g: Tensor) -> tuple[Tensor, Empty]:
        return g, moments


@dataclass(frozen=True)
class Sign(LocalRule):
    """The sign of the gradient: d = sign(g).

    Args:
        eta_l: local step size.

    Example:
        >>> rule, g = Sign(), torch.tensor([0.5, -2.0])
        >>> rule.direction(rule.start(g), g, g)[0]
        tensor([ 1., -1.])
    """

    eta_l: float = positive(1e-3)

    def direction(self, moments: Empty, x: Tensor, g: Tensor) -> tuple[Tensor, Empty]:
        return g.sign(), moments


class FirstMoment(NamedTuple):
    m: Tensor


class SecondMoment(NamedTuple):
    v: Tensor


@dataclass(frozen=True)
class Momentum(LocalRule):
    """Heavy-ball momentum, as in torch's SGD: m = beta m + g, d = m; with nesterov d = g + beta m.

    Args:
        eta_l: local step size.
        beta: decay of the momentum.
        nesterov: look ahead along the momentum.
        m: home of m between rounds: "reset", "keep" or "share".

    Example:
        >>> rule, g = Momentum(beta=0.5, nesterov=True), torch.tensor([0.5, -2.0])
        >>> rule.direction(rule.start(g), g, g)[0]
        tensor([ 0.7500, -3.0000])
    """

    eta_l: float = positive(0.1)
    beta: float = decay(0.9)
    nesterov: bool = flag(False)
    m: Home = choice(*HOMES)

    def start(self, x: Tensor) -> FirstMoment:
        return FirstMoment(torch.zeros_like(x))

    def direction(self, moments: FirstMoment, x: Tensor, g: Tensor) -> tuple[Tensor, FirstMoment]:
        m = self.beta * moments.m + g
        return g + self.beta * m if self.nesterov else m, FirstMoment(m)


@dataclass(frozen=True)
class Lion(LocalRule):
    """Lion: d = sign(beta1 m + (1 - beta1) g), then m = beta2 m + (1 - beta2) g.

    Args:
        eta_l: local step size.
        beta1: weight of m in the direction.
        beta2: decay of m.
        m: home of m between rounds: "reset", "keep" or "share".

    Example:
        >>> rule, g = Lion(beta1=0.9), torch.tensor([0.5, -2.0])
        >>> rule.direction(rule.start(g), g, g)[0]
        tensor([ 1., -1.])

    References:
        Chen et al. 2023, Symbolic Discovery of Optimization Algorithms.
    """

    cites: ClassVar[tuple[str, ...]] = ("chen2023symbolic",)

    eta_l: float = positive(1e-3)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    m: Home = choice(*HOMES)

    def start(self, x: Tensor) -> FirstMoment:
        return FirstMoment(torch.zeros_like(x))

    def direction(self, moments: FirstMoment, x: Tensor, g: Tensor) -> tuple[Tensor, FirstMoment]:
        return ema(moments.m, g, self.beta1).sign(), FirstMoment(ema(moments.m, g, self.beta2))


@dataclass(frozen=True)
class AdaGrad(LocalRule):
    """AdaGrad: v = v + g^2, d = g / (sqrt(v) + eps).

    Args:
        eta_l: local step size.
        eps: added to the denominator; with 0 a coordinate whose v is 0 does not move.
        v: home of v between rounds: "keep", "reset" or "share".

    Example:
        >>> rule, g = AdaGrad(eps=0), torch.tensor([0.5, 0.0])
        >>> rule.direction(rule.start(g), g, g)[0]
        tensor([1., 0.])
    """

    cites: ClassVar[tuple[str, ...]] = ("duchi2011adaptive",)

    eta_l: float = positive(1e-2)
    eps: float = nonnegative(1e-8)
    v: Home = choice("keep", "reset", "share")

    def start(self, x: Tensor) -> SecondMoment:
        return SecondMoment(torch.zeros_like(x))

    def direction(self, moments: SecondMoment, x: Tensor, g: Tensor) -> tuple[Tensor, SecondMoment]:
        v = moments.v + g * g
        return adam_ratio(g, v, self.eps), SecondMoment(v)


@dataclass(frozen=True)
class RMSProp(LocalRule):
    """RMSProp: v = beta2 v + (1 - beta2) g^2, d = g / (sqrt(v) + eps).

    Args:
        eta_l: local step size.
        beta2: decay of v.
        eps: added to the denominator; with 0 a coordinate whose v is 0 does not move.
        v: home of v between rounds: "keep", "reset" or "share".

    Example:
        >>> rule, g = RMSProp(beta2=0.75, eps=0), torch.tensor([0.5, -2.0])
        >>> rule.direction(rule.start(g), g, g)[0]
        tensor([ 2., -2.])
    """

    eta_l: float = positive(1e-3)
    beta2: float = decay(0.99)
    eps: float = nonnegative(1e-8)
    v: Home = choice("keep", "reset", "share")

    def start(self, x: Tensor) -> SecondMoment:
        return SecondMoment(torch.zeros_like(x))

    def direction(self, moments: SecondMoment, x: Tensor, g: Tensor) -> tuple[Tensor, SecondMoment]:
        v = ema(moments.v, g * g, self.beta2)
        return adam_ratio(g, v, self.eps), SecondMoment(v)


class AdamFirst(NamedTuple):
    m: Tensor
    k: Any  # steps in m, shape (1,), with the bias correction; else empty


class AdamSecond(NamedTuple):
    v: Any  # empty in a message where the running maximum says it
    v_hat: Any  # running maximum of v, with amsgrad; else empty
    k: Any  # steps in v, shape (1,), with the bias correction; else empty


class AdamMoments(NamedTuple):
    m: AdamFirst
    v: AdamSecond


@dataclass(frozen=True)
class Adam(LocalRule):
    """Adam, with options for AMSGrad and for the bias correction.

        m = beta1 m + (1 - beta1) g
        v = beta2 v + (1 - beta2) g^2
        d = m / (sqrt(v) + eps)                          amsgrad: v_hat = max(v_hat, v) instead of v

    With ``bias_correction``, m and v are divided by 1 - beta^k in d, where k counts the steps since the
    moment was zero: the steps of the round where a moment is reset, all steps of the client where it is kept.
    With amsgrad, v_hat is then the maximum of the corrected v, as in optax and declearn; torch corrects the
    maximum. With amsgrad and ``v="share"``, v_hat is averaged and v starts a round at the average.

    Args:
        eta_l: local step size.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator; with 0 a coordinate whose denominator is 0 does not move.
        amsgrad: divide by the running maximum of v.
        bias_correction: correct both moments for their start at zero.
        m: home of the first moment between rounds: "reset", "keep" or "share".
        v: home of the second moment between rounds: "keep", "reset" or "share".
        v0: the value at which v starts.

    Example:
        >>> rule, g = Adam(beta1=0.5, beta2=0.75, eps=0), torch.tensor([0.5, -2.0])
        >>> rule.direction(rule.start(g), g, g)[0]
        tensor([ 1., -1.])
    """

    cites: ClassVar[tuple[str, ...]] = ("kingma2015adam",)

    eta_l: float = positive(1e-3)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    eps: float = nonnegative(1e-8)
    amsgrad: bool = flag(False)
    bias_correction: bool = flag(False)
    m: Home = choice(*HOMES)
    v: Home = choice("keep", "reset", "share")
    v0: float = nonnegative(0.0)

    @property
    def title(self) -> str:
        return type(self).__name__.replace("Adam", "AMSGrad") if self.amsgrad else type(self).__name__

    def start(self, x: Tensor) -> AdamMoments:
        zero = torch.zeros_like(x)
        v = zero + self.v0
        k = number(x.float() if x.dtype.itemsize == 2 else x) if self.bias_correction else Empty()
        return AdamMoments(AdamFirst(zero, k), AdamSecond(v, v if self.amsgrad else Empty(), k))

    def direction(self, moments: AdamMoments, x: Tensor, g: Tensor) -> tuple[Tensor, AdamMoments]:
        first, second = moments
        m, k_m = ema(first.m, g, self.beta1), first.k
        v, k_v = ema(second.v, g * g, self.beta2), second.k
        above, below = m, v
        if self.bias_correction:
            k_m, k_v = k_m + 1, k_v + 1
            above = m / (1 - self.beta1**k_m).to(m.dtype)
            below = v / (1 - self.beta2**k_v).to(v.dtype)
        if self.amsgrad:
            below = torch.maximum(second.v_hat, below)
        v_hat: Any = below if self.amsgrad else Empty()
        moments = AdamMoments(AdamFirst(m, k_m), AdamSecond(v, v_hat, k_v))
        return adam_ratio(above, below, self.eps), moments

    def shared(self, name: str, moment: Any) -> Any:
        return moment._replace(v=Empty()) if name == "v" and self.amsgrad else moment

    def received(self, name: str, shared: Any) -> Any:
        if name != "v" or not self.amsgrad:
            return shared
        v = shared.v_hat
        if self.bias_correction:  # v_hat is a maximum of corrected v: then v, corrected, is v_hat
            v = v * (1 - self.beta2**shared.k).to(v.dtype)
        return shared._replace(v=v)


@dataclass(frozen=True)
class AdamW(Adam):
    """Adam with weight decay: d = d + weight_decay x; not decoupled: g = g + weight_decay x before Adam.

    Args:
        eta_l: local step size.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        amsgrad: divide by the running maximum of v.
        bias_correction: correct both moments for their start at zero.
        m: home of the first moment between rounds: "reset", "keep" or "share".
        v: home of the second moment between rounds: "keep", "reset" or "share".
        v0: the value at which v starts.
        weight_decay: the decay.
        decoupled: whether the decay is added to the step (AdamW) or to the gradient (L2 in Adam).

    Example:
        >>> rule, g = AdamW(beta1=0.5, beta2=0.75, eps=0, weight_decay=0.5), torch.tensor([0.5, -2.0])
        >>> rule.direction(rule.start(g), g, g)[0]
        tensor([ 1.2500, -2.0000])

    References:
        Loshchilov and Hutter 2019, Decoupled Weight Decay Regularization.
    """

    cites: ClassVar[tuple[str, ...]] = ("loshchilov2019decoupled",)

    weight_decay: float = nonnegative(0.01)
    decoupled: bool = flag(True)

    def direction(self, moments: AdamMoments, x: Tensor, g: Tensor) -> tuple[Tensor, AdamMoments]:
        if not self.decoupled:
            return super().direction(moments, x, g + self.weight_decay * x)
        d, moments = super().direction(moments, x, g)
        return d + self.weight_decay * x, moments
