"""FedAdamW: AdamW at the clients with shared second moments and the global direction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, Cohort, Empty, Flag, Steps
from fadamgc.fields import choice, decay, internal, nonnegative, positive
from fadamgc.rules import adam_ratio, ema, number


class Server(NamedTuple):
    x: Tensor
    v: Tensor  # mean second moment: one number per block, or one per parameter
    G: Tensor  # mean direction of the last round
    t: Tensor  # number of local steps in all rounds, shape (1,)


class Down(NamedTuple):
    x: Tensor
    v: Tensor
    G: Tensor
    t: Tensor


class Local(NamedTuple):
    m: Tensor
    v: Tensor
    k: Tensor  # number of steps in this round, shape (1,)


class Up(NamedTuple):
    dx: Tensor
    v: Tensor


@dataclass(frozen=True)
class FedAdamW(Algorithm[Server, Down, Empty, Local, Up]):
    """FedAdamW, with the second moments as block means (the paper) or in full (the public code).

        m   = beta1 m + (1 - beta1) g                    m = 0 at the start of a round
        v   = beta2 v + (1 - beta2) g^2                  v = the server's at the start of a round
        m_c = m / (1 - beta1^k) ; v_c = v / (1 - beta2^t)     k: step of the round, t: step of all rounds
        x_i = x_i - eta_l ( m_c / (sqrt(v_c) + eps) + alpha G + weight_decay x_i )
        G   = -mean(x_i - x) / (eta_l K)                 0 before round 1
        v   = mean over the clients of v_i, as the mean of each block                 0 before round 1
        x   = x + eta_g mean(x_i - x)

    A block is a parameter tensor of the model.

    Args:
        eta_l: local step size.
        eta_g: global step size.
        alpha: weight of the global direction.
        beta1: decay of the first moment.
        beta2: decay of the second moment.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        second_moment: "blocks" sends one number per block, "full" sends v.

    References:
        Liu et al. 2025, FedAdamW: A Communication-Efficient Optimizer with Convergence and Generalization
        Guarantees for Federated Large Models.
    """

    title: ClassVar[str] = "FedAdamW"
    cites: ClassVar[tuple[str, ...]] = ("liu2025fedadamw",)

    eta_l: float = positive(1e-3)
    eta_g: float = positive(1.0)
    alpha: float = nonnegative(0.5)
    beta1: float = decay(0.9)
    beta2: float = decay(0.99)
    eps: float = nonnegative(1e-8)
    weight_decay: float = nonnegative(0.01)
    second_moment: Literal["blocks", "full"] = choice("blocks", "full")
    sizes: tuple[int, ...] = internal(())  # of the blocks; () is a single block

    def for_model(self, shapes: Sequence[torch.Size]) -> FedAdamW:
        return dataclasses.replace(self, sizes=tuple(shape.numel() for shape in shapes))

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Server:
        zero = torch.zeros_like(x)
        return Server(x, v=self._sent(zero), G=zero, t=number(x))

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Empty:
        return Empty()

    def broadcast(self, server: Server) -> Down:
        return Down(*server)

    def begin(self, down: Down, client: Empty, g: Tensor | None = None) -> Local:
        return Local(m=torch.zeros_like(down.x), v=self._received(down), k=number(down.x))

    def step(self, down: Down, client: Empty, local: Local, x: Tensor, g: Tensor) -> tuple[Tensor, Local]:
        k = local.k + 1
        m, v = ema(local.m, g, self.beta1), ema(local.v, g * g, self.beta2)
        ratio = adam_ratio(m / (1 - self.beta1**k), v / (1 - self.beta2 ** (down.t + k)), self.eps)
        x = x - self.eta_l * (ratio + self.alpha * down.G + self.weight_decay * x)
        return x, Local(m, v, k)

    def finish(
        self, down: Down, client: Empty, local: Local, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Empty, Up]:
        return client, Up(dx=x - down.x, v=self._sent(local.v))

    def aggregate(self, server: Server, total: Up, cohort: Cohort) -> Server:
        D = total.dx / cohort.S
        return Server(
            x=server.x + self.eta_g * D,
            v=total.v / cohort.S,
            G=-D / (self.eta_l * cohort.K),
            t=server.t + cohort.K,
        )

    def _sent(self, v: Tensor) -> Tensor:
        if self.second_moment == "full":
            return v
        return torch.stack([block.mean() for block in torch.split(v, self._sizes(v))])

    def _received(self, down: Down) -> Tensor:
        if self.second_moment == "full":
            return down.v
        sizes = self._sizes(down.x)
        return torch.cat([mean.expand(size) for mean, size in zip(down.v, sizes, strict=True)])

    def _sizes(self, x: Tensor) -> list[int]:
        fits = self.sizes and sum(self.sizes) == len(x)  # x may be a stand-in
        return list(self.sizes) if fits else [len(x)]
