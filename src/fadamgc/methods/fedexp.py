"""FedExP: FedAvg with a global step size that follows from the clients' changes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Empty, Flag, Steps
from fadamgc.fields import nonnegative, positive


class Server(NamedTuple):
    x: Tensor


class Down(NamedTuple):
    x: Tensor


class Up(NamedTuple):
    dx: Tensor
    square: Tensor  # |dx|^2, shape (1,)


@dataclass(frozen=True)
class FedExP(Algorithm[Server, Down, Empty, Empty, Up]):
    """FedExP of Jhunjhunwala et al.: the global step size is extrapolated.

        x_i   = x_i - eta_l g
        D     = mean(x_i - x)
        eta_g = max( 1, sum of |x_i - x|^2 / (2 S (|D|^2 + eps)) )
        x     = x + eta_g D

    The paper reports the mean of the last two models; here x is the last one.

    Args:
        eta_l: local step size.
        eps: keeps eta_g bounded where D is small.

    References:
        Jhunjhunwala et al. 2023, FedExP: Speeding Up Federated Averaging via Extrapolation.
    """

    title: ClassVar[str] = "FedExP"
    cites: ClassVar[tuple[str, ...]] = ("jhunjhunwala2023fedexp",)

    eta_l: float = positive(0.1)
    eps: float = nonnegative(1e-3)

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Empty:
        return Empty()

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def begin(self, down: Down, client: Empty, g: Tensor | None = None) -> Empty:
        return Empty()

    def step(self, down: Down, client: Empty, local: Empty, x: Tensor, g: Tensor) -> tuple[Tensor, Empty]:
        return x - self.eta_l * g, local

    def finish(
        self, down: Down, client: Empty, local: Empty, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Empty, Up]:
        dx = x - down.x
        return client, Up(dx, (dx * dx).sum().view(1))

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        D = total.dx / cohort.S
        bound = 2 * ((D * D).sum() + self.eps)
        ratio = (total.square / cohort.S / bound).nan_to_num(1.0)  # 0/0: nobody has moved
        return Server(server.x + ratio.clamp(min=1.0) * D)
