"""A skeleton to copy: local SGD with momentum and gradient correction, in one file.

fadamgc new my_method      writes a copy with a test; docs/extending.md explains the parts
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Flag, Steps
from fadamgc.fields import choice, decay, positive
from fadamgc.rules import select

# States and messages are NamedTuples of tensors (or of further NamedTuples). A vector has the shape (d,) of
# the model; a single number has the shape (1,), and fadamgc.rules.number makes one.


class Server(NamedTuple):  # what the server keeps between rounds; x is required
    x: Tensor  # the model
    y: Tensor  # mean of the clients' y_i


class Down(NamedTuple):  # what the server sends to each sampled client; the first field is x
    x: Tensor
    y: Tensor


class Client(NamedTuple):  # what a client keeps between its rounds; fadamgc.algorithm.Empty if nothing
    y: Tensor  # control variate y_i: the mean raw gradient of the last tracked round


class Local(NamedTuple):  # what a client keeps between the local steps of one round
    m: Tensor  # momentum
    g_sum: Tensor  # sum of the raw gradients


class Up(NamedTuple):  # what a client sends; the runner adds these over the clients
    dx: Tensor
    dy: Tensor


@dataclass(frozen=True)
class MyMethod(Algorithm[Server, Down, Client, Local, Up]):
    """SGD with momentum at the clients, on a gradient that is corrected before the momentum.

        g_hat = g + y - y_i
        m     = beta m + g_hat                           m = 0 at the start of a round
        x_i   = x_i - eta_l m
        y_i   = (1/K) sum of the raw g                   if tracked, else unchanged
        x     = x + eta_g mean(x_i - x)                  over the S sampled clients
        y     = y + (1/n) sum of (y_i new - y_i old)     over the tracked clients

    Args:
        eta_l: local step size.
        eta_g: global step size.
        beta: decay of the momentum.
        init: "zero", or "gradient" to start y_i and y at the clients' gradients at the initial model.

    References:
        Author et al. YEAR, Title, Algorithm N.
    """

    title: ClassVar[str] = "My method"  # in tables and legends
    tracked_only: ClassVar[tuple[str, ...]] = ("dy",)  # fields of Up that only tracked clients send
    changes: ClassVar[dict[str, str]] = {"dy": "y"}  # fields of Up that are the change of a field of Client

    # Hyperparameters: every field has a default and checks its value (fadamgc.fields).
    eta_l: float = positive(0.1)
    eta_g: float = positive(1.0)
    beta: float = decay(0.9)
    init: Literal["zero", "gradient"] = choice("zero", "gradient")

    # Three properties say what the algorithm needs. All are False unless they are overridden.
    #   init_gradient       gradients at the initial model, passed to init_server and init_client
    #   round_gradient      the gradient of a client's whole data at down.x, passed to begin
    #   full_participation  all clients take part and are tracked in every round, with equal weights
    @property
    def init_gradient(self) -> bool:
        return self.init == "gradient"

    # Before round 1. g is the mean of the clients' gradients at x, or None without init_gradient.
    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        return Server(x, y=torch.zeros_like(x) if g is None else g)

    # Before the client's first round. g is this client's gradient at x, or None without init_gradient.
    def init_client(self, x: Tensor, g: Tensor | None = None) -> Client:
        return Client(y=torch.zeros_like(x) if g is None else g)

    # At the start of a round: the same message for all sampled clients.
    def broadcast(self, server: Server) -> Down:
        return Down(server.x, server.y)

    # At the client, before step 1.
    def begin(self, down: Down, client: Client, g: Tensor | None = None) -> Local:
        zero = torch.zeros_like(down.x)
        return Local(m=zero, g_sum=zero)

    # One local step from x, with the mini-batch gradient g at x: the new x and the new local state.
    def step(self, down: Down, client: Client, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        g_hat = g + down.y - client.y
        m = self.beta * local.m + g_hat
        return x - self.eta_l * m, Local(m, local.g_sum + g)

    # At the client, after K steps that ended at x: the state to keep, and the message to send. K and tracked
    # may be tensors: calculate with K, and choose with select. Fields in tracked_only are 0 if not tracked.
    def finish(
        self, down: Down, client: Client, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Client, Up]:
        y = select(tracked, local.g_sum / K, client.y)
        return Client(y), Up(dx=x - down.x, dy=y - client.y)

    # At the server: total is the sum of the messages; cohort has n, S, K and the round t. Divide by S before
    # the product with eta_g, as all algorithms do: those that are equal in theory are then equal to the bit.
    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        return Server(
            x=server.x + self.eta_g * (total.dx / cohort.S),
            y=server.y + total.dy / cohort.n,
        )
