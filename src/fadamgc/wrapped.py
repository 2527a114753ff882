"""Algorithms around another algorithm, which change a part of what it does."""

from __future__ import annotations

import dataclasses
from typing import Any, Self

from fadamgc.algorithm import Algorithm, ClientT, DownT, LocalT, ServerT, UpT


@dataclasses.dataclass(frozen=True)
class Wrapped(Algorithm[ServerT, DownT, ClientT, LocalT, UpT]):
    """An algorithm with the name, the step size and the needs of an inner one, which has been checked."""

    inner: Any

    def __post_init__(self) -> None:
        """Skip the checks: ``inner`` has been checked."""

    @property
    def title(self) -> str:  # type: ignore[override]
        """The name in tables and legends."""
        return str(self.inner.title)

    @property
    def eta_l(self) -> float:
        """The local step size."""
        return float(self.inner.eta_l)

    @property
    def coin(self) -> float | None:
        """The inner algorithm's ``coin``."""
        return self.inner.coin  # type: ignore[no-any-return]

    @property
    def init_gradient(self) -> bool:
        """The inner algorithm's ``init_gradient``."""
        return bool(self.inner.init_gradient)

    @property
    def round_gradient(self) -> bool:
        """The inner algorithm's ``round_gradient``."""
        return bool(self.inner.round_gradient)

    @property
    def full_participation(self) -> bool:
        """The inner algorithm's ``full_participation``."""
        return bool(self.inner.full_participation)

    def at(self, t: int) -> Self:
        """Return the algorithm of round t."""
        return dataclasses.replace(self, inner=self.inner.at(t))

    def for_rounds(self, rounds: int) -> Self:
        """Return the algorithm for a run of ``rounds`` rounds."""
        return dataclasses.replace(self, inner=self.inner.for_rounds(rounds))
