"""The contract of algorithms with two levels: clients in groups, each with a server of its own.

A global round has E group rounds. One global round is

    server = algo.start_round(server)                            the groups receive the model
    E times, for each group j:
        down = algo.broadcast_to(server, j)
        ... the clients of the group train, as in ``algorithm.py`` ...
        server = algo.aggregate_group(server, j, sum of the group's ups, cohort)
    server = algo.end_round(server, cohort)                      the mean over the groups

The state of all groups is part of the server's state: a field with one row per group, of shape ``(G, d)``.
"""

from __future__ import annotations

import dataclasses
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from torch import Tensor

from fadamgc.algorithm import Algorithm, ClientT, Cohort, DownT, LocalT, ServerT, UpT
from fadamgc.fields import internal

__all__ = ["GroupedAlgorithm"]


@dataclasses.dataclass(frozen=True)
class GroupedAlgorithm(Algorithm[ServerT, DownT, ClientT, LocalT, UpT]):
    """A federated optimizer for clients in groups. Without groups, all clients are one group.

    >>> import fadamgc, torch
    >>> algo = fadamgc.MTGC(eta_l=0.1).for_groups([2, 3])
    >>> server = algo.start_round(algo.init_server(torch.zeros(4)))
    >>> algo.broadcast_to(server, 1).x.shape
    torch.Size([4])
    """

    first_only: ClassVar[tuple[str, ...]] = ()
    """Fields of ``down`` that clients receive only in the first group round of a global round."""

    group_sizes: tuple[int, ...] = internal((1,))  # number of clients of each group

    def for_groups(self, sizes: Sequence[int]) -> Self:
        """Return the algorithm for groups with these numbers of clients."""
        return dataclasses.replace(self, group_sizes=tuple(sizes))

    @property
    def full_participation(self) -> bool:
        """All clients take part in every group round."""
        return True

    def rows(self, vector: Tensor) -> Tensor:
        """Return a copy of the vector for each group, (G, d)."""
        return vector.expand(len(self.group_sizes), -1).clone()

    def mean_over_clients(self, rows: Tensor) -> Tensor:
        """Return the mean of the groups' rows, in which a group counts as its number of clients."""
        total = rows[0] * self.group_sizes[0]
        for row, size in zip(rows[1:], self.group_sizes[1:], strict=True):
            total = total + row * size
        return total / sum(self.group_sizes)

    @abstractmethod
    def start_round(self, server: ServerT) -> ServerT:
        """Return the state in which every group has received the global model."""

    @abstractmethod
    def broadcast_to(self, server: ServerT, j: int) -> DownT:
        """Return the message to every client of group j; its first field is the group's model."""

    @abstractmethod
    def aggregate_group(self, server: ServerT, j: int, total: UpT, cohort: Cohort) -> ServerT:
        """Return the state after a group round of group j; ``cohort.S`` is its number of clients."""

    @abstractmethod
    def end_round(self, server: ServerT, cohort: Cohort) -> ServerT:
        """Return the state after the last group round; ``cohort.K`` counts the steps of all group rounds."""

    @abstractmethod
    def group_messages(self, server: ServerT) -> tuple[Any, Any]:
        """Return the messages of ONE group in a global round: received from the server, and sent to it."""

    # With one group and one group round, these methods fulfil the contract of ``Algorithm``.

    def broadcast(self, server: ServerT) -> DownT:
        """Return the message to the clients of the first group in the first group round."""
        return self.broadcast_to(self.start_round(server), 0)

    def aggregate(self, server: ServerT, total: UpT, cohort: Cohort) -> ServerT:
        """Return the state after a global round of one group with one group round."""
        return self.end_round(self.aggregate_group(self.start_round(server), 0, total, cohort), cohort)


def with_row(rows: Tensor, j: int, row: Tensor) -> Tensor:
    """Return a copy of all groups' rows in which ``row`` replaces the row of group j."""
    changed = rows.clone()
    changed[j] = row
    return changed
