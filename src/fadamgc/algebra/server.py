"""Server rules: how the server moves the model by D, the mean of the clients' changes x_i - x.

A rule is a frozen dataclass with ``eta_g`` and a method ``step``; its state is a NamedTuple that ``start``
returns.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Empty
from fadamgc.fields import check_fields, choice, decay, flag, nonnegative, optional_nonnegative, positive
from fadamgc.rules import adam_ratio, ema, number

__all__ = ["AMSGrad", "AdaGrad", "Adam", "Average", "Momentum", "Nesterov", "ServerRule", "Yogi"]


@dataclass(frozen=True)
class ServerRule(ABC):
    """How the server moves the model; abstract.

    A custom rule is a frozen dataclass with the field ``eta_g`` and the methods ``start`` (unless it has no
    state) and ``step``, both pure.

    >>> @dataclass(frozen=True)
    ... class SignOfD(ServerRule):
    ...     def step(self, state, x, D):
    ...         return x + self.eta_g * D.sign(), state
    >>> SignOfD(eta_g=0.5).step(Empty(), torch.zeros(2), torch.tensor([0.1, -3.0]))[0]
    tensor([ 0.5000, -0.5000])
    """

    cites: ClassVar[tuple[str, ...]] = ()
    """As ``Algorithm.cites``."""

    eta_g: float = positive(1.0)

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def title(self) -> str:
        """The name in tables and legends."""
        return type(self).__name__

    def start(self, x: Tensor) -> Any:
        """Return the state before round 1, for a model like x."""
        return Empty()

    @abstractmethod
    def step(self, state: Any, x: Tensor, D: Tensor) -> tuple[Tensor, Any]:
        """Return the model and the state after a round with mean change D."""


@dataclass(frozen=True)
class Average(ServerRule):
    """The mean: x = x + eta_g D.

    Args:
        eta_g: global step size.

    Example:
        >>> rule, x, D = Average(eta_g=0.5), torch.zeros(2), torch.tensor([1.0, -2.0])
        >>> rule.step(rule.start(x), x, D)[0]
        tensor([ 0.5000, -1.0000])
    """

    def step(self, state: Empty, x: Tensor, D: Tensor) -> tuple[Tensor, Empty]:
        return x + self.eta_g * D, state


class MomentumState(NamedTuple):
    m: Tensor


@dataclass(frozen=True)
class Momentum(ServerRule):
    """Server momentum of Hsu et al., which other libraries call FedAvgM: m = beta m + D, x = x + eta_g m.

    Args:
        eta_g: global step size.
        beta: decay of the momentum.

    Example:
        >>> rule, x, D = Momentum(eta_g=0.5), torch.zeros(2), torch.tensor([1.0, -2.0])
        >>> rule.step(rule.start(x), x, D)[0]
        tensor([ 0.5000, -1.0000])

    References:
        Hsu et al. 2019, Measuring the Effects of Non-Identical Data Distribution.
    """

    cites: ClassVar[tuple[str, ...]] = ("hsu2019measuring",)

    beta: float = decay(0.9)

    def start(self, x: Tensor) -> MomentumState:
        return MomentumState(torch.zeros_like(x))

    def step(self, state: MomentumState, x: Tensor, D: Tensor) -> tuple[Tensor, MomentumState]:
        m = self.beta * state.m + D
        return x + self.eta_g * self._move(m, D), MomentumState(m)

    def _move(self, m: Tensor, D: Tensor) -> Tensor:
        return m


@dataclass(frozen=True)
class Nesterov(Momentum):
    """Nesterov momentum, the outer optimizer of DiLoCo: m = beta m + D, x = x + eta_g (beta m + D).

    Args:
        eta_g: global step size.
        beta: decay of the momentum.

    Example:
        >>> rule, x, D = Nesterov(eta_g=1.0, beta=0.5), torch.zeros(2), torch.tensor([1.0, -2.0])
        >>> rule.step(rule.start(x), x, D)[0]
        tensor([ 1.5000, -3.0000])

    References:
        Douillard et al. 2023, DiLoCo: Distributed Low-Communication Training of Language Models.
    """

    cites: ClassVar[tuple[str, ...]] = ("douillard2023diloco",)

    eta_g: float = positive(0.7)

    def _move(self, m: Tensor, D: Tensor) -> Tensor:
        return self.beta * m + D


class AdaptiveState(NamedTuple):
    m: Tensor
    v: Tensor
    t: Any  # number of finished rounds, shape (1,), with the bias correction; else empty


@dataclass(frozen=True)
class Adam(ServerRule):
    """FedAdam's server: m, v as in Adam on D, x = x + eta_g m / (sqrt(v) + tau); v starts at tau^2.

    Args:
        eta_g: global step size.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        tau: added to the denominator.
        v0: the value at which v starts; None is tau^2.
        bias_correction: divide m by 1 - beta1^t and v by 1 - beta2^t, where t is the round, from 1.

    Example:
        >>> rule, x, D = Adam(eta_g=1, beta2=0.75, tau=0), torch.zeros(2), torch.tensor([1.0, -2.0])
        >>> rule.step(rule.start(x), x, D)[0]
        tensor([ 0.2000, -0.2000])

    References:
        Reddi et al. 2020, Adaptive Federated Optimization.
    """

    cites: ClassVar[tuple[str, ...]] = ("reddi2021adaptive",)

    eta_g: float = positive(1e-2)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    tau: float = nonnegative(1e-3)
    v0: float | None = optional_nonnegative()
    bias_correction: bool = flag(False)

    def start(self, x: Tensor) -> AdaptiveState:
        v0 = self.tau**2 if self.v0 is None else self.v0
        t = number(x) if self.bias_correction else Empty()
        return AdaptiveState(torch.zeros_like(x), torch.full_like(x, v0), t)

    def step(self, state: AdaptiveState, x: Tensor, D: Tensor) -> tuple[Tensor, AdaptiveState]:
        m, v = ema(state.m, D, self.beta1), self._second(state.v, D)
        if not self.bias_correction:
            return x + self.eta_g * adam_ratio(m, v, self.tau), AdaptiveState(m, v, state.t)
        t = state.t + 1
        ratio = adam_ratio(m / (1 - self.beta1**t), v / (1 - self.beta2**t), self.tau)
        return x + self.eta_g * ratio, AdaptiveState(m, v, t)

    def _second(self, v: Tensor, D: Tensor) -> Tensor:
        return ema(v, D * D, self.beta2)


@dataclass(frozen=True)
class Yogi(Adam):
    """FedYogi's server: v = v - (1 - beta2) D^2 sign(v - D^2), all else as in Adam.

    Args:
        eta_g: global step size.
        beta1: decay of the first moment.
        beta2: 1 - beta2 is the rate at which v changes.
        tau: added to the denominator.
        v0: the value at which v starts; None is tau^2.
        bias_correction: divide m by 1 - beta1^t and v by 1 - beta2^t, where t is the round, from 1.

    Example:
        >>> rule, x, D = Yogi(eta_g=1, beta2=0.75, tau=0), torch.zeros(2), torch.tensor([1.0, -2.0])
        >>> rule.step(rule.start(x), x, D)[0]
        tensor([ 0.2000, -0.2000])

    References:
        Reddi et al. 2020, Adaptive Federated Optimization.
    """

    cites: ClassVar[tuple[str, ...]] = ("reddi2021adaptive",)

    def _second(self, v: Tensor, D: Tensor) -> Tensor:
        square = D * D
        return v - (1 - self.beta2) * square * torch.sign(v - square)


@dataclass(frozen=True)
class AdaGrad(ServerRule):
    """FedAdagrad's server: m as in Adam, v = v + D^2, x = x + eta_g m / (sqrt(v) + tau); v starts at tau^2.

    Args:
        eta_g: global step size.
        beta1: decay of the first moment; the paper's FedAdagrad has 0.
        tau: added to the denominator.

    Example:
        >>> rule, x, D = AdaGrad(eta_g=0.5, tau=0), torch.zeros(2), torch.tensor([1.0, -2.0])
        >>> rule.step(rule.start(x), x, D)[0]
        tensor([ 0.5000, -0.5000])

    References:
        Reddi et al. 2020, Adaptive Federated Optimization.
    """

    cites: ClassVar[tuple[str, ...]] = ("reddi2021adaptive",)

    eta_g: float = positive(1e-2)
    beta1: float = decay(0.0)
    tau: float = nonnegative(1e-3)

    def start(self, x: Tensor) -> AdaptiveState:
        return AdaptiveState(torch.zeros_like(x), torch.full_like(x, self.tau**2), Empty())

    def step(self, state: AdaptiveState, x: Tensor, D: Tensor) -> tuple[Tensor, AdaptiveState]:
        m, v = ema(state.m, D, self.beta1), state.v + D * D
        return x + self.eta_g * adam_ratio(m, v, self.tau), AdaptiveState(m, v, Empty())


class AMSGradState(NamedTuple):
    m: Tensor
    v: Tensor
    v_hat: Tensor


@dataclass(frozen=True)
class AMSGrad(ServerRule):
    """FedAMS's server: m, v as in Adam on D, from zero, and the running maximum of v.

        v_hat = max(v_hat, v, eps) ; x = x + eta_g m / sqrt(v_hat)            "fedams"
        v_hat = max(v_hat, v)      ; x = x + eta_g m / (sqrt(v_hat) + eps)    "amsgrad"

    Args:
        eta_g: global step size.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: lower bound of v_hat ("fedams"), or added to the denominator ("amsgrad").
        option: "fedams" (the paper's option 1) or "amsgrad" (option 2).

    Example:
        >>> rule, x, D = AMSGrad(eta_g=1.0, beta1=0.5, beta2=0.75), torch.zeros(2), torch.tensor([1.0, -2.0])
        >>> rule.step(rule.start(x), x, D)[0]
        tensor([ 1., -1.])

    References:
        Wang et al. 2022, Communication-Efficient Adaptive Federated Learning.
    """

    cites: ClassVar[tuple[str, ...]] = ("wang2022communication",)

    eta_g: float = positive(1e-2)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    eps: float = nonnegative(1e-3)
    option: Literal["fedams", "amsgrad"] = choice("fedams", "amsgrad")

    def start(self, x: Tensor) -> AMSGradState:
        zero = torch.zeros_like(x)
        return AMSGradState(zero, zero, zero)

    def step(self, state: AMSGradState, x: Tensor, D: Tensor) -> tuple[Tensor, AMSGradState]:
        m, v = ema(state.m, D, self.beta1), ema(state.v, D * D, self.beta2)
        v_hat = torch.maximum(state.v_hat, v)
        if self.option == "fedams":
            v_hat = v_hat.clamp(min=self.eps)
            ratio = adam_ratio(m, v_hat, 0.0)
        else:
            ratio = adam_ratio(m, v_hat, self.eps)
        return x + self.eta_g * ratio, AMSGradState(m, v, v_hat)
