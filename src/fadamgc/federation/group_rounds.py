"""A global round of clients in groups: several group rounds, then the mean over the groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from fadamgc.algorithm import Cohort
from fadamgc.federation.cost import Work, state_bytes
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.jobs import Round
from fadamgc.federation.settings import Settings
from fadamgc.federation.sums import Sums
from fadamgc.grouped import GroupedAlgorithm

AnyGrouped = GroupedAlgorithm[Any, Any, Any, Any, Any]


class GroupRounds:
    """The state of a global round between its group rounds; the federation changes only when the round ends.

    Attributes:
        done: number of group rounds that are done.
        server: the algorithm's server state after these group rounds.
        buffers: the buffers of each group's model after these group rounds.
        losses: mean loss of each client in each group round.
        work: the work of each group round; at the end, also the work of the groups.
    """

    def __init__(
        self,
        algorithm: AnyGrouped,
        functions: TaskFunctions,
        groups: Sequence[Sequence[int]],
        count: int,
        settings: Settings,
        t: int,
        state: tuple[Any, Mapping[str, Tensor]],
    ) -> None:
        self.algorithm, self.functions, self.groups = algorithm, functions, groups
        self.count, self.settings, self.t = count, settings, t
        server, self._buffers_before = state
        self.server = algorithm.start_round(server)
        self.buffers = [dict(self._buffers_before) for _ in groups]
        self.rounds: list[Round] = []  # one per group, in the current group round
        self.done = 0
        self.losses: list[Tensor] = []
        self.work: list[Work] = []
        self._steps = 0.0

    def open(self) -> dict[int, Round]:
        """Return the next group round as each client sees it.

        Group rounds are numbered through all global rounds, so that each has its own mini-batches.
        """
        number = (self.t - 1) * self.count + self.done + 1
        common, gradients = (
            (self.functions, self.algorithm, self.settings.seed, number),
            self.settings.gradients,
        )
        self.rounds = [
            Round(*common, self.algorithm.broadcast_to(self.server, j), buffers, gradients)
            for j, buffers in enumerate(self.buffers)
        ]
        return {i: self.rounds[j] for j, group in enumerate(self.groups) for i in group}

    def close(self, sums: Sequence[Sums], work: Work) -> None:
        """End a group round with the sums of each group."""
        if self.done:
            down = self.algorithm.broadcast_to(self.server, 0)
            known = state_bytes([getattr(down, name) for name in self.algorithm.first_only])
            work = work._replace(down=tuple(received - known for received in work.down))
        self.work.append(work)
        for j, group_sums in enumerate(sums):
            steps = group_sums.steps / group_sums.S
            cohort = Cohort(n=self._n, S=group_sums.S, K=steps, t=self.t)
            self.server = self.algorithm.aggregate_group(self.server, j, group_sums.up, cohort)
            self.buffers[j] = group_sums.mean_buffers(self.buffers[j])
            self.losses += group_sums.losses
        self._steps += sum(s.steps for s in sums) / sum(s.S for s in sums)
        self.done += 1

    def end(self, sums: Sequence[Sums]) -> tuple[Any, dict[str, Tensor], Sums]:
        """Return the server's state, the buffers and the losses of the global round.

        ``sums`` are those of the last group round, whose buffers are averaged over all clients.
        """
        n = self._n
        everyone = Sums()
        for group_sums in sums:
            everyone.S += group_sums.S
            for name, value in group_sums.buffers.items():
                everyone.buffers[name] = everyone.buffers[name] + value if name in everyone.buffers else value
        everyone.losses = self.losses
        server = self.algorithm.end_round(self.server, Cohort(n=n, S=n, K=self._steps, t=self.t))
        extra = state_bytes(dict(self._buffers_before))
        down, up = (state_bytes(message) + extra for message in self.algorithm.group_messages(self.server))
        G = len(self.groups)
        self.work.append(Work(tuple(range(G)), (0,) * G, (down,) * G, (up,) * G, "group"))
        return server, everyone.mean_buffers(dict(self._buffers_before)), everyone

    @property
    def _n(self) -> int:
        return sum(map(len, self.groups))
