"""MTGC with Adam: corrections within groups and between groups, before the moments are computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Cohort, Flag, Steps
from fadamgc.fields import choice, decay, nonnegative, positive
from fadamgc.grouped import GroupedAlgorithm, with_row
from fadamgc.rules import adam_ratio, ema


class Server(NamedTuple):
    x: Tensor  # the global model
    x_j: Tensor  # the groups' models, (G, d)
    y_j: Tensor  # the groups' corrections, (G, d)
    g_j: Tensor  # mean over the group of g_i in the last group round, (G, d)
    kept: Tensor  # whether clients use the g_i of their last group round: 1 or 0, (G, 1)


class Down(NamedTuple):
    x: Tensor
    y: Tensor
    g: Tensor
    kept: Tensor


class Client(NamedTuple):
    g: Tensor  # g_i: the mean raw gradient of the last group round
    v: Tensor
    v_hat: Tensor


class Local(NamedTuple):
    z: Tensor  # g_j - g_i
    m: Tensor
    v: Tensor
    v_hat: Tensor
    g_sum: Tensor


class Up(NamedTuple):
    dx: Tensor
    g: Tensor


@dataclass(frozen=True)
class MTGCAdam(GroupedAlgorithm[Server, Down, Client, Local, Up]):
    """FAdamGC's local steps with a correction within each group and a correction between the groups.

        g_hat = g + z_i + y_j
        m     = beta1 m + (1 - beta1) g_hat              m = 0 at the start of a group round
        v     = beta2 v + (1 - beta2) g_hat^2            kept by the client
        v_hat = max(v_hat, v)
        x_i   = x_i - eta_l m / (sqrt(v_hat) + eps)      H steps from the group's model x_j
        x_j   = mean of x_i over group j                 after each of E group rounds
        z_i   = g_j - g_i                                g_i: mean of the H raw g; g_j: the group's mean
        x     = mean of x_j                              after each global round; a group counts as its size
        y_j   = mean of all g_i - g_j                    of the last group round

    No paper has this method: it is MTGC's two corrections at the place where FAdamGC has its own. With one
    group and one group round it is FAdamGC with full participation and eta_g = 1.

    Args:
        eta_l: local step size.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator; with 0 a coordinate whose v_hat is 0 does not move.
        z: "keep", or "reset" to start every global round with z_i = 0.

    References:
        Fang et al. 2024, Hierarchical Federated Learning with Multi-Timescale Gradient Correction;
        Chen et al., Gradient Correction in Federated Learning with Adaptive Optimization.
    """

    title: ClassVar[str] = "MTGC (Adam)"
    cites: ClassVar[tuple[str, ...]] = ("fang2024hierarchical", "chen2025gradient")
    first_only: ClassVar[tuple[str, ...]] = ("y", "kept")

    eta_l: float = positive(1e-3)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    eps: float = nonnegative(1e-8)
    z: Literal["keep", "reset"] = choice("keep", "reset")

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        zero = self.rows(torch.zeros_like(x))
        return Server(x, x_j=self.rows(x), y_j=zero, g_j=zero, kept=self.rows(x.new_ones(1)))

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        zero = torch.zeros_like(x)
        return Client(g=zero, v=zero, v_hat=zero)

    def start_round(self, server: Server) -> Server:
        kept = torch.full_like(server.kept, 1.0 if self.z == "keep" else 0.0)
        return server._replace(x_j=self.rows(server.x), kept=kept)

    def broadcast_to(self, server: Server, j: int) -> Down:
        return Down(server.x_j[j], server.y_j[j], server.g_j[j], server.kept[j])

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        zero = torch.zeros_like(client.v)
        z = down.kept * (down.g - client.g)
        return Local(z, m=zero, v=client.v, v_hat=client.v_hat, g_sum=zero)

    def step(self, down: Down, client: Client, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        g_hat = g + local.z + down.y
        m = ema(local.m, g_hat, self.beta1)
        v = ema(local.v, g_hat * g_hat, self.beta2)
        v_hat = torch.maximum(local.v_hat, v)
        x = x - self.eta_l * adam_ratio(m, v_hat, self.eps)
        return x, Local(local.z, m, v, v_hat, local.g_sum + g)

    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        g = local.g_sum / K
        return Client(g, local.v, local.v_hat), Up(x - down.x, g)

    def aggregate_group(self, server: Server, j: int, total: Up, cohort: Cohort) -> Server:
        return server._replace(
            x_j=with_row(server.x_j, j, server.x_j[j] + total.dx / cohort.S),
            g_j=with_row(server.g_j, j, total.g / cohort.S),
            kept=with_row(server.kept, j, torch.ones_like(server.kept[j])),
        )

    def end_round(self, server: Server, cohort: Cohort) -> Server:
        y_j = self.mean_over_clients(server.g_j) - server.g_j
        return server._replace(x=self.mean_over_clients(server.x_j), y_j=y_j)

    def group_messages(self, server: Server) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
        return (server.x, server.x), (server.x, server.x)  # x and the mean of all g_i; x_j and g_j
