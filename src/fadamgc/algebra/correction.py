"""Corrections: what keeps clients with different data from drifting apart.

A correction changes a client's gradient before the local rule sees it, the direction after the rule, or both.
It may keep a state at the server (which is sent down with the model) and at each client, and send a message.
All methods are pure functions for one client, as those of an algorithm are.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Cohort, Empty, Flag, Steps
from fadamgc.fields import check_fields, choice, nonnegative, share
from fadamgc.rules import select

__all__ = ["Correction", "Direction", "NoCorrection", "Post", "Pre", "PreDirection", "Proximal"]


@dataclass(frozen=True)
class Correction:
    """No correction, and the base of all others: override what differs.

    ``down`` is the message to the client: ``down.x`` is the model and ``down.correction`` the server's state
    of the correction. ``client`` and ``local`` are the client's states of the correction, between rounds and
    between steps.

    >>> @dataclass(frozen=True)
    ... class Halved(Correction):
    ...     title = "halved"
    ...     def before(self, down, client, local, x, g):
    ...         return g / 2, local
    >>> import fadamgc
    >>> fadamgc.compose(correction=Halved()).title
    'SGD x halved x Average'
    """

    title: ClassVar[str] = ""
    """The name in specs, tables and legends."""
    cites: ClassVar[tuple[str, ...]] = ()
    """As ``Algorithm.cites``."""
    tracks: ClassVar[bool] = False
    """Whether the message of the correction is sent by tracked clients only; it is zero for all others."""
    changes: ClassVar[Mapping[str, str]] = {}
    """Fields of the message that are the change of a field of the client's state, such as {"dy": "y"}."""
    needs_average: ClassVar[bool] = False
    """Whether the server must move the model along the mean of the clients' changes."""
    shares_moments: ClassVar[bool] = True
    """Whether moments may be shared."""

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def init_gradient(self) -> bool:
        """Whether ``init_server`` and ``init_client`` need gradients at the initial model."""
        return False

    def init_server(self, x: Tensor, g: Tensor | None) -> Any:
        """Return the server's state before round 1."""
        return Empty()

    def init_client(self, x: Tensor, g: Tensor | None) -> Any:
        """Return a client's state before its first round."""
        return Empty()

    def begin(self, down: Any, client: Any) -> Any:
        """Return the state before step 1."""
        return Empty()

    def before(self, down: Any, client: Any, local: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Any]:
        """Return the corrected gradient, which the local rule sees, and the state after the step."""
        return g, local

    def after(self, down: Any, client: Any, local: Any, d: Tensor) -> Tensor:
        """Return the corrected direction."""
        return d

    def finish(
        self, down: Any, client: Any, local: Any, x: Tensor, K: Steps, eta_l: float, tracked: Flag
    ) -> tuple[Any, Any]:
        """Return the client's new state and its message, after K local steps that ended at x."""
        return client, Empty()

    def aggregate(self, server: Any, total: Any, D: Tensor, cohort: Cohort, eta_l: float) -> Any:
        """Return the server's new state, from the sum of the messages and the mean change D."""
        return server


@dataclass(frozen=True)
class NoCorrection(Correction):
    """Clients step along their own gradients.

    >>> import fadamgc
    >>> fadamgc.compose(fadamgc.local.Momentum(), fadamgc.correction.NoCorrection()).title
    'Momentum (m reset) x none x Average'
    """

    title: ClassVar[str] = "none"


@dataclass(frozen=True)
class Proximal(Correction):
    """FedProx's proximal term, before the moments: the local rule sees g + mu (x_i - x).

    Args:
        mu: weight of the term.

    Example:
        >>> import fadamgc
        >>> fadamgc.compose(fadamgc.local.Momentum(), fadamgc.correction.Proximal(mu=0.1)).title
        'Momentum (m reset) x proximal x Average'

    References:
        Li et al. 2020, Federated Optimization in Heterogeneous Networks.
    """

    title: ClassVar[str] = "proximal"
    cites: ClassVar[tuple[str, ...]] = ("li2020federated",)

    mu: float = nonnegative(0.01)

    def before(self, down: Any, client: Any, local: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Any]:
        return g + self.mu * (x - down.x), local


class Tracking(NamedTuple):
    y: Tensor  # at the server: mean of the clients' y_i; at a client: y_i


class TrackingUp(NamedTuple):
    dy: Tensor


class RawGradients(NamedTuple):
    g_sum: Tensor  # sum of the raw gradients of the round


@dataclass(frozen=True)
class Pre(Correction):
    """Gradient correction, before the moments: the local rule sees g + y - y_i.

        y_i = (1/K) sum of the raw g                   if tracked, else unchanged
        y   = y + (1/n) sum of (y_i new - y_i old)     over the tracked clients

    Args:
        init: "zero", or "gradient" to start y_i and y at the clients' gradients at the initial model.

    Example:
        >>> import fadamgc
        >>> fadamgc.compose(fadamgc.local.Momentum(), fadamgc.correction.Pre()).title
        'Momentum (m reset) x pre x Average'
    """

    title: ClassVar[str] = "pre"
    cites: ClassVar[tuple[str, ...]] = ("chen2025gradient",)
    tracks: ClassVar[bool] = True
    changes: ClassVar[Mapping[str, str]] = {"dy": "y"}

    init: Literal["zero", "gradient"] = choice("zero", "gradient")

    @property
    def init_gradient(self) -> bool:
        return self.init == "gradient"

    def init_server(self, x: Tensor, g: Tensor | None) -> Any:
        return Tracking(torch.zeros_like(x) if g is None else g)

    def init_client(self, x: Tensor, g: Tensor | None) -> Any:
        return Tracking(torch.zeros_like(x) if g is None else g)

    def begin(self, down: Any, client: Any) -> RawGradients:
        return RawGradients(torch.zeros_like(client.y))

    def before(
        self, down: Any, client: Any, local: RawGradients, x: Tensor, g: Tensor
    ) -> tuple[Tensor, RawGradients]:
        return g + down.correction.y - client.y, RawGradients(local.g_sum + g)

    def finish(
        self, down: Any, client: Any, local: RawGradients, x: Tensor, K: Steps, eta_l: float, tracked: Flag
    ) -> tuple[Any, TrackingUp]:
        y = select(tracked, local.g_sum / K, client.y)
        return Tracking(y), TrackingUp(y - client.y)

    def aggregate(self, server: Any, total: TrackingUp, D: Tensor, cohort: Cohort, eta_l: float) -> Any:
        return Tracking(server.y + total.dy / cohort.n)


class Difference(NamedTuple):
    z: Tensor  # y - y_i


@dataclass(frozen=True)
class Post(Correction):
    """Naive tracking, after the moments: the step is eta_l (d + y - y_i).

    y_i = y_i - y + (x - x_i) / (K eta_l)          if tracked, else unchanged
    y   = y + (1/n) sum of (y_i new - y_i old)     over the tracked clients

    >>> import fadamgc
    >>> fadamgc.compose(fadamgc.local.Momentum(), fadamgc.correction.Post()).title
    'Momentum (m reset) x post x Average'
    """

    title: ClassVar[str] = "post"
    cites: ClassVar[tuple[str, ...]] = ("chen2025gradient",)
    tracks: ClassVar[bool] = True
    changes: ClassVar[Mapping[str, str]] = {"dy": "y"}
    shares_moments: ClassVar[bool] = False

    def init_server(self, x: Tensor, g: Tensor | None) -> Tracking:
        return Tracking(torch.zeros_like(x))

    def init_client(self, x: Tensor, g: Tensor | None) -> Tracking:
        return Tracking(torch.zeros_like(x))

    def begin(self, down: Any, client: Tracking) -> Difference:
        return Difference(down.correction.y - client.y)

    def after(self, down: Any, client: Tracking, local: Difference, d: Tensor) -> Tensor:
        return d + local.z

    def finish(
        self, down: Any, client: Tracking, local: Difference, x: Tensor, K: Steps, eta_l: float, tracked: Flag
    ) -> tuple[Tracking, TrackingUp]:
        y = select(tracked, client.y - down.correction.y + (down.x - x) / (K * eta_l), client.y)
        return Tracking(y), TrackingUp(y - client.y)

    def aggregate(
        self, server: Tracking, total: TrackingUp, D: Tensor, cohort: Cohort, eta_l: float
    ) -> Tracking:
        return Tracking(server.y + total.dy / cohort.n)


class GlobalDirection(NamedTuple):
    G: Tensor  # the mean direction of the last round


@dataclass(frozen=True)
class Direction(Correction):
    """The global direction in every step, as in FedCM: the step is eta_l (alpha d + (1 - alpha) G).

        G = -D / (eta_l K)                             G = 0 before round 1

    Args:
        alpha: weight of the client's own direction d.

    Example:
        >>> import fadamgc
        >>> fadamgc.compose(fadamgc.local.Momentum(), fadamgc.correction.Direction(alpha=0.3)).title
        'Momentum (m reset) x direction x Average'

    References:
        Xu et al. 2021, FedCM: Federated Learning with Client-level Momentum.
    """

    title: ClassVar[str] = "direction"
    cites: ClassVar[tuple[str, ...]] = ("xu2021fedcm",)
    needs_average: ClassVar[bool] = True

    alpha: float = share(0.1)

    def init_server(self, x: Tensor, g: Tensor | None) -> GlobalDirection:
        return GlobalDirection(torch.zeros_like(x))

    def after(self, down: Any, client: Any, local: Any, d: Tensor) -> Tensor:
        return _mixed(self.alpha, d, down.correction.G)

    def aggregate(self, server: Any, total: Any, D: Tensor, cohort: Cohort, eta_l: float) -> GlobalDirection:
        return GlobalDirection(-D / (eta_l * cohort.K))


def _mixed(alpha: float, d: Tensor, G: Tensor) -> Tensor:
    return alpha * d + (1 - alpha) * G


class TrackingAndDirection(NamedTuple):
    y: Tensor
    G: Tensor


@dataclass(frozen=True)
class PreDirection(Pre):
    """Gradient correction before the moments, and the global direction after them.

    Args:
        init: "zero", or "gradient" to start y_i and y at the clients' gradients at the initial model.
        alpha: weight of the client's own direction d.

    Example:
        >>> import fadamgc
        >>> fadamgc.compose(fadamgc.local.Momentum(), fadamgc.correction.PreDirection(alpha=0.3)).title
        'Momentum (m reset) x pre+direction x Average'
    """

    title: ClassVar[str] = "pre+direction"
    cites: ClassVar[tuple[str, ...]] = ("chen2025gradient", "xu2021fedcm")
    needs_average: ClassVar[bool] = True

    alpha: float = share(0.1)

    def init_server(self, x: Tensor, g: Tensor | None) -> TrackingAndDirection:
        return TrackingAndDirection(super().init_server(x, g).y, torch.zeros_like(x))

    def after(self, down: Any, client: Any, local: Any, d: Tensor) -> Tensor:
        return _mixed(self.alpha, d, down.correction.G)

    def aggregate(
        self, server: Any, total: TrackingUp, D: Tensor, cohort: Cohort, eta_l: float
    ) -> TrackingAndDirection:
        return TrackingAndDirection(server.y + total.dy / cohort.n, -D / (eta_l * cohort.K))
