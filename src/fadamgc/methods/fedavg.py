"""FedAvg: local SGD, averaging at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

from torch import Tensor

from fadamgc.algorithm import Cohort
from fadamgc.fields import positive
from fadamgc.methods.local_sgd import Down, LocalSGD, Up


class Server(NamedTuple):
    x: Tensor


@dataclass(frozen=True)
class FedAvg(LocalSGD[Server]):
    """Local SGD.

        x_i = x_i - eta_l g
        x   = x + eta_g mean(x_i - x)

    Args:
        eta_l: local step size.
        eta_g: global step size.

    References:
        McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data.
    """

    title: ClassVar[str] = "FedAvg"
    cites: ClassVar[tuple[str, ...]] = ("mcmahan2017communication",)

    eta_l: float = positive(0.1)
    eta_g: float = positive(1.0)

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        return Server(server.x + self.eta_g * (total.dx / cohort.S))
