"""The clients' states between rounds, in memory; a client that has never taken part costs nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from fadamgc.errors import FadamgcError
from fadamgc.tree import leaves

FORGOTTEN = (
    "the states of the clients of this run were not kept; simulate_many keeps them with client_states=True, "
    "or if there are at most 64 runs"
)


class ClientStates(Sequence[Any]):
    """The states of all n clients, in memory.

    A round stages its new states one by one, and ``update`` replaces the old states all at once. ``changed``
    are the clients whose states are newer than the last checkpoint.
    """

    def __init__(self, n: int, initial: Any, states: Mapping[int, Any] | None = None) -> None:
        self.n, self.initial = n, initial
        self._states: dict[int, Any] = dict(states or {})
        self.changed: set[int] = set(self._states)

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(self.n))]
        if not -self.n <= i < self.n:
            raise IndexError(f"client {i} of {self.n}")
        stored = self._states.get(i % self.n)
        return self.initial if stored is None else self._read(stored)

    @property
    def participants(self) -> tuple[int, ...]:
        """The clients that have taken part, whose states differ from the initial one."""
        return tuple(sorted(self._states))

    def stage(self, state: Any) -> Any:
        """Store a state for a later ``update``; return the value by which ``update`` finds it."""
        return state if leaves(state) else self.initial  # without tensors: one object for all clients

    def staged_state(self, staged: Any) -> Any:
        """Return a state that was staged."""
        return self._read(staged)

    def update(self, staged: Mapping[int, Any]) -> None:
        """Replace the states of some clients by staged ones."""
        self._states.update(staged)
        self.changed.update(staged)

    def discard(self, staged: Iterable[Any]) -> None:
        """Forget staged states."""

    def _read(self, stored: Any) -> Any:
        return stored


class ForgottenStates(ClientStates):
    """Which clients have taken part, without their states."""

    def __init__(self, n: int, initial: Any, participants: Iterable[int]) -> None:
        super().__init__(n, initial, dict.fromkeys(participants, FORGOTTEN))

    def _read(self, stored: Any) -> Any:
        raise FadamgcError(stored)
