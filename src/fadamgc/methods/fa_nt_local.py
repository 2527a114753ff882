"""FA-NT in the form for full participation, which sends only the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Cohort, Flag, Steps
from fadamgc.methods.fa_nt import Local, NaiveTracking
from fadamgc.rules import number


class Server(NamedTuple):
    x: Tensor


class Down(NamedTuple):
    x: Tensor


class Client(NamedTuple):
    z_open: Tensor  # z_i + (x_i - x) / (K eta_l) of the last round: the next z_i except for the server's term
    x: Tensor  # the server's x of that round
    rate: Tensor  # 1 / (K eta_g eta_l) of that round; 0 before the first
    v: Tensor
    v_hat: Tensor


class Up(NamedTuple):
    dx: Tensor


@dataclass(frozen=True)
class FANTLocal(NaiveTracking[Server, Down, Client, Up]):
    """FA-NT for full participation: z_i = y - y_i stays at the client, and only x is sent.

    If all clients are sampled and tracked and take the same K steps, FA-NT needs neither y nor y_i:

        x_i = x_i - eta_l ( m / (sqrt(v_hat) + eps) + z_i )
        z_i = z_i + ( (x_i - x) - (x_new - x) / eta_g ) / (K eta_l)      when x_new arrives

    The paper prints (x_i - x_new) / (K eta_g eta_l) for the last term. This equals the rule above only for
    eta_g = 1; for any other eta_g the printed rule is not FA-NT, because its z_i no longer sum to zero.

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator; with 0 a coordinate whose v_hat is 0 gets no Adam step.
        v_hat: "carry" keeps v_hat between rounds, "restart" starts it from v_i in each round.

    References:
        Chen et al., Gradient Correction in Federated Learning with Adaptive Optimization, appendix.
    """

    title: ClassVar[str] = "FA-NT (local form)"
    cites: ClassVar[tuple[str, ...]] = ("chen2025gradient",)

    @property
    def full_participation(self) -> bool:
        return True

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        zero = torch.zeros_like(x)
        return Client(z_open=zero, x=zero, rate=number(x), v=zero, v_hat=zero)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x)

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        return self.start(client.v, client.v_hat, z=client.z_open - client.rate * (down.x - client.x))

    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        dx = x - down.x
        z_open = local.z + dx / (K * self.eta_l)
        rate = number(x, 1.0) / (K * self.eta_g * self.eta_l)
        return Client(z_open, down.x, rate, local.v, local.v_hat), Up(dx)

    def received(self, client: Client, up: Up, arrived: Up) -> Client:
        return client._replace(z_open=client.z_open + client.rate * self.eta_g * (arrived.dx - up.dx))

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        return Server(server.x + self.eta_g * (total.dx / cohort.S))
