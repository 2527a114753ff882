"""Plain SGD at the clients, for methods that differ only at the server."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from fadamgc.algorithm import Algorithm, Empty, Flag, ServerT, Steps


class Down(NamedTuple):
    x: Tensor


class Up(NamedTuple):
    dx: Tensor


@dataclass(frozen=True)
class LocalSGD(Algorithm[ServerT, Down, Empty, Empty, Up]):
    """Clients that take steps x_i = x_i - eta_l g, keep no state and send x_i - x; abstract."""

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Empty:
        return Empty()

    def begin(self, down: Down, client: Empty, g: Tensor | None = None) -> Empty:
        return Empty()

    def step(self, down: Down, client: Empty, local: Empty, x: Tensor, g: Tensor) -> tuple[Tensor, Empty]:
        return x - self.eta_l * g, local

    def finish(
        self, down: Down, client: Empty, local: Empty, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Empty, Up]:
        return client, Up(dx=x - down.x)
