"""What the methods with plain SGD at the clients and all cleverness at the server share."""

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
    """Clients that do ``x_i = x_i - eta_l g``, keep nothing and send x_i - x; abstract."""

    def init_client(self, x: Tensor, g: Tensor | None = None) -> Empty:
        return Empty()

    def begin(self, down: Down, client: Empty, g: Tensor | None = None) -> Empty:
        return Empty()

    def direction(self, down: Down, client: Empty, local: Empty, g: Tensor) -> tuple[Tensor, Empty]:
        return g, local

    def finish(
        self, down: Down, client: Empty, local: Empty, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[Empty, Up]:
        return client, Up(dx=x - down.x)
