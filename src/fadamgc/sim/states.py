"""The clients' states, in memory; one that has never taken part costs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, overload


class ClientStates(Sequence[Any]):
    """The states of all n clients; one that has never taken part has the initial state and no memory."""

    def __init__(self, n: int, initial: Any, states: Mapping[int, Any] | None = None) -> None:
        self.n, self.initial = n, initial
        self._states: dict[int, Any] = dict(states or {})

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, i: int) -> Any: ...
    @overload
    def __getitem__(self, i: slice) -> list[Any]: ...
    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(self.n))]
        if not -self.n <= i < self.n:
            raise IndexError(f"client {i} of {self.n}")
        return self._states.get(i % self.n, self.initial)

    @property
    def participants(self) -> tuple[int, ...]:
        """The clients that have a state of their own."""
        return tuple(sorted(self._states))

    def update(self, states: Mapping[int, Any]) -> None:
        """Replace the states of some clients."""
        self._states.update(states)
