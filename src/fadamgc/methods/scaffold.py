"""SCAFFOLD: local SGD with control variates."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Flag, Steps
from fadamgc.fields import choice, positive
from fadamgc.rules import select


class Server(NamedTuple):
    x: Tensor
    y: Tensor  # mean of the clients' y_i


class Down(NamedTuple):
    x: Tensor
    y: Tensor


class Client(NamedTuple):
    y: Tensor  # control variate y_i


class Local(NamedTuple):
    g_x: Tensor  # option I: the client's gradient at x; option II does not use it


class Up(NamedTuple):
    dx: Tensor
    dy: Tensor


@dataclass(frozen=True)
class Scaffold(Algorithm[Server, Down, Client, Local, Up]):
    """Local SGD on a gradient corrected by control variates.

        x_i = x_i - eta_l (g - y_i + y)
        y_i = the client's gradient at x                 option I, if tracked
        y_i = y_i - y + (x - x_i) / (K eta_l)            option II, if tracked
        x   = x + eta_g mean(x_i - x)                    over the S sampled clients
        y   = y + (1/n) sum of (y_i new - y_i old)       over the tracked clients

    Args:
        eta_l: local step size.
        eta_g: global step size.
        option: "II", or "I", which needs one more pass over the client's data per round.
        init: "zero", or "gradient" to start y_i and y at the clients' gradients at the initial model.

    References:
        Karimireddy et al. 2020, SCAFFOLD: Stochastic Controlled Averaging for Federated Learning.
    """

    title: ClassVar[str] = "SCAFFOLD"
    cites: ClassVar[tuple[str, ...]] = ("karimireddy2020scaffold",)
    tracked_only: ClassVar[tuple[str, ...]] = ("dy",)
    changes: ClassVar[dict[str, str]] = {"dy": "y"}

    eta_l: float = positive(0.1)
    eta_g: float = positive(1.0)
    option: Literal["II", "I"] = choice("II", "I")
    init: Literal["zero", "gradient"] = choice("zero", "gradient")

    @property
    def init_gradient(self) -> bool:
        return self.init == "gradient"

    @property
    def round_gradient(self) -> bool:
        return self.option == "I"

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x, torch.zeros_like(x) if g is None else g)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        return Client(torch.zeros_like(x) if g is None else g)

    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.y)

    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        return Local(g_x=torch.zeros_like(client.y) if g is None else g)

    def step(self, down: Down, client: Client, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        return x - self.eta_l * (g - client.y + down.y), local

    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        if self.option == "I":
            y = select(tracked, local.g_x, client.y)
        else:
            y = select(tracked, client.y - down.y + (down.x - x) / (K * self.eta_l), client.y)
        return Client(y), Up(dx=x - down.x, dy=y - client.y)

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        return Server(
            x=server.x + self.eta_g * (total.dx / cohort.S),
            y=server.y + total.dy / cohort.n,
        )
