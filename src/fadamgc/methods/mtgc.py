"""MTGC: multi-timescale gradient correction, for clients in groups."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Cohort, Flag, Steps
from fadamgc.fields import choice, positive
from fadamgc.grouped import GroupedAlgorithm, with_row


class Server(NamedTuple):
    x: Tensor  # the global model
    x_j: Tensor  # the groups' models, (G, d)
    y_j: Tensor  # the groups' corrections, (G, d)
    d_j: Tensor  # mean over the group of d_i in the last group round, (G, d)
    kept: Tensor  # whether clients use the z_i of their last group round: 1 or 0, (G, 1)


class Down(NamedTuple):
    x: Tensor
    y: Tensor
    d: Tensor
    kept: Tensor


class Client(NamedTuple):
    z: Tensor  # the correction within the group that the last group round used
    d: Tensor  # (x_i - x_j) / (H eta_l) of the last group round


class Local(NamedTuple):
    z: Tensor


class Up(NamedTuple):
    dx: Tensor


@dataclass(frozen=True)
class MTGC(GroupedAlgorithm[Server, Down, Client, Local, Up]):
    """SGD with a correction within each group and a correction between the groups.

        x_i = x_i - eta_l (g + z_i + y_j)                H steps from the group's model x_j
        x_j = mean of x_i over group j                   after each of E group rounds
        z_i = z_i + (x_i - x_j) / (H eta_l)              z_i = 0 before round 1
        x   = mean of x_j                                after each global round; a group counts as its size
        y_j = y_j + (x_j - x) / (H E eta_l)              y_j = 0 before round 1

    The z_i sum to 0 within each group, and the y_j (weighted by the sizes of the groups) over all groups. A
    client updates its z_i when the group's new model arrives. With one group and one group round this is
    ``ScaffoldLocal`` with eta_g = 1.

    ``simulate(..., groups=[[0, 1], [2, 3]], group_rounds=E)`` says who is in which group.

    Args:
        eta_l: local step size.
        z: "keep" keeps z_i between global rounds. "reset" starts every global round with z_i = 0, as the
            authors' code does; then the method stalls at a distance from the optimum.

    References:
        Fang et al. 2024, Hierarchical Federated Learning with Multi-Timescale Gradient Correction.
    """

    title: ClassVar[str] = "MTGC"
    cites: ClassVar[tuple[str, ...]] = ("fang2024hierarchical",)
    # Later, y_j is known, and d_j is the change of the group's model divided by H eta_l.
    first_only: ClassVar[tuple[str, ...]] = ("y", "d", "kept")

    eta_l: float = positive(0.1)
    z: Literal["keep", "reset"] = choice("keep", "reset")

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        zero = self.rows(torch.zeros_like(x))
        return Server(x, x_j=self.rows(x), y_j=zero, d_j=zero, kept=self.rows(x.new_ones(1)))

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        zero = torch.zeros_like(x)
        return Client(z=zero, d=zero)

    def start_round(self, server: Server) -> Server:
        kept = torch.full_like(server.kept, 1.0 if self.z == "keep" else 0.0)
        return server._replace(x_j=self.rows(server.x), kept=kept)

    def broadcast_to(self, server: Server, j: int) -> Down:
        return Down(server.x_j[j], server.y_j[j], server.d_j[j], server.kept[j])

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        return Local(down.kept * (client.z + client.d - down.d))

    def step(self, down: Down, client: Client, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        return x - self.eta_l * (g + local.z + down.y), local

    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        dx = x - down.x
        return Client(local.z, dx / (K * self.eta_l)), Up(dx)

    def aggregate_group(self, server: Server, j: int, total: Up, cohort: Cohort) -> Server:
        D = total.dx / cohort.S
        return server._replace(
            x_j=with_row(server.x_j, j, server.x_j[j] + D),
            d_j=with_row(server.d_j, j, D / (cohort.K * self.eta_l)),
            kept=with_row(server.kept, j, torch.ones_like(server.kept[j])),
        )

    def end_round(self, server: Server, cohort: Cohort) -> Server:
        x = self.mean_over_clients(server.x_j)
        return server._replace(x=x, y_j=server.y_j + (server.x_j - x) / (cohort.K * self.eta_l))

    def group_messages(self, server: Server) -> tuple[Tensor, Tensor]:
        return server.x, server.x  # x, from which the group knows its y_j; x_j
