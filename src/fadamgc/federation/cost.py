"""The cost of a round: the bytes of its messages, and seconds from link speeds and step times.

A record keeps the work of each client of its round, so the cost of a finished run can be computed for other
links and devices without running it again.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from fadamgc.algorithm import AnyAlgorithm, example, stand_in
from fadamgc.codecs import codecs_of
from fadamgc.errors import InputError, not_accepted, real
from fadamgc.federation.functions import Buffers
from fadamgc.federation.sampling import Draw
from fadamgc.tree import leaves, named_leaves

LINK, TIME = (1e-9, math.inf, ">= 1e-09"), (0.0, 1e9, "with 0 <= value <= 1e+09")
LIMITS = {"down_mbps": LINK, "up_mbps": LINK, "seconds_per_step": TIME, "latency": TIME}
GROUP_LIMITS = {"group_down_mbps": LINK, "group_up_mbps": LINK}
"""Smallest and largest value of each number of a cost model; beyond these, minutes would overflow."""

WORK_COLUMNS = ("clients", "steps", "down", "up")
PerClient = float | tuple[float, ...]


class Work(NamedTuple):
    """The work of clients at the same time: one entry per client in each field."""

    clients: tuple[int, ...]
    steps: tuple[int, ...]  # gradient evaluations
    down: tuple[int, ...]  # bytes received
    up: tuple[int, ...]  # bytes sent
    link: str = "client"  # or "group": groups, not clients, receive from the server and send to it
    deadline: float | None = None  # seconds that the server waits for a client

    def columns(self) -> dict[str, tuple[int, ...]]:
        """Return the fields with one entry per client."""
        return {name: getattr(self, name) for name in WORK_COLUMNS}


class Traffic(NamedTuple):
    """Bytes between the server and ONE client in a round."""

    down: int
    up: int  # sent by every sampled client
    up_tracked: int  # sent in addition by a tracked client

    def work(
        self, draw: Draw, steps: Sequence[int], silent: Collection[int] = (), deadline: float | None = None
    ) -> Work:
        """Return the work of a round of the drawn clients; ``silent`` clients have sent nothing."""
        sent = dict.fromkeys(draw.sampled, self.up) | dict.fromkeys(draw.tracked, self.up + self.up_tracked)
        up = tuple(0 if i in silent else sent[i] for i in draw.sampled)
        return Work(draw.sampled, tuple(steps), (self.down,) * len(up), up, deadline=deadline)


def traffic(
    algorithm: AnyAlgorithm,
    d: int,
    dtype: torch.dtype = torch.float32,
    buffers: Buffers | None = None,
    codec: Sequence[tuple[str, str]] = (),
) -> Traffic:
    """Return the bytes that an algorithm sends for a model of d numbers, from an example of its messages.

    Buffers travel with the model, both ways. ``codec`` has pairs of a field and its codec.

    >>> from fadamgc import FAdamGC
    >>> traffic(FAdamGC(), d=1000)
    Traffic(down=8000, up=4000, up_tracked=4000)
    """
    extra = state_bytes(buffers)
    sizes = message_sizes(algorithm, d, dtype, codec)
    down, up, tracked = (sum(size for _, size in sizes[part].values()) for part in ("down", "up", "tracked"))
    return Traffic(down + extra, up + extra, tracked)


def message_sizes(
    algorithm: AnyAlgorithm,
    d: int,
    dtype: torch.dtype = torch.float32,
    codec: Sequence[tuple[str, str]] = (),
) -> dict[str, dict[str, tuple[int, int]]]:
    """Return how many numbers each field of the messages has, and in how many bytes they are sent.

    The fields are those of the server's message, "down", and of a client's: "up", which all clients send, and
    "tracked", which only tracked clients send.
    """
    sample = example(algorithm, stand_in(d, dtype))
    sizes: dict[str, dict[str, tuple[int, int]]] = {"down": {}, "up": {}, "tracked": {}}
    for part, message in (("down", sample.down), ("up", sample.up)):
        fields = named_leaves(message)
        codecs = codecs_of(tuple(codec), tuple(fields))
        for name, leaf in fields.items():
            n = leaf.numel()
            only_tracked = part == "up" and name.partition(".")[0] in algorithm.tracked_only
            size = codecs[name].size(n) if name in codecs else leaf.nbytes
            sizes["tracked" if only_tracked else part][name] = (n, size)
    return sizes


def state_bytes(state: Any) -> int:
    """Return the bytes of all tensors of a state or message."""
    return sum(tensor.nbytes for tensor in leaves(state))


@dataclass(frozen=True)
class CostModel:
    """Computes the seconds of a round from the work of its clients.

    Each client takes ``latency + bits down / down_mbps + bits up / up_mbps + steps * seconds_per_step``;
    the round takes the mean of that over its clients (the paper's reading) or the slowest client's.

    Args:
        down_mbps: link speed from the server, in millions of bits per second; math.inf is free.
        up_mbps: link speed to the server.
        seconds_per_step: time of one local gradient step.
        latency: additional seconds per round.
        per_round: "mean" or "slowest".
        group_down_mbps: link speed from the server to a group, for algorithms with groups; there,
            ``down_mbps`` and ``up_mbps`` are the links between a group and its clients.
        group_up_mbps: link speed from a group to the server.

    The first four may be one number, or one for each client of the task.

    >>> CostModel(down_mbps=8, up_mbps=8).seconds(Work((0, 1), (5, 5), (10**6, 10**6), (10**6, 0)))
    1.5
    """

    down_mbps: PerClient = 100.0
    up_mbps: PerClient = 100.0
    seconds_per_step: PerClient = 0.0
    latency: PerClient = 0.0
    per_round: Literal["mean", "slowest"] = "mean"
    group_down_mbps: float = 100.0
    group_up_mbps: float = 100.0

    def __post_init__(self) -> None:
        for name, (least, most, accepted) in (LIMITS | GROUP_LIMITS).items():
            value = getattr(self, name)
            if isinstance(value, np.ndarray):
                value = value.tolist()
            several = isinstance(value, (tuple, list)) and name in LIMITS
            entries = value if several else [value]
            if not entries:
                raise InputError(f"CostModel.{name}=() is empty; give one number, or one for each client")
            for entry in entries:
                number = real(entry)
                if number is None or not least <= number <= most:
                    raise not_accepted(f"CostModel.{name}", entry, f"a number {accepted}")
            if isinstance(value, list):
                object.__setattr__(self, name, tuple(map(float, value)))
        if not isinstance(self.per_round, str) or self.per_round not in ("mean", "slowest"):
            raise not_accepted("CostModel.per_round", self.per_round, "'mean' or 'slowest'")

    def check(self, n: int) -> None:
        """Refuse a cost model whose number of entries is neither one nor n."""
        for name in LIMITS:
            value = getattr(self, name)
            if isinstance(value, tuple) and len(value) != n:
                raise InputError(
                    f"CostModel.{name} has {len(value)} entries for clients={n}; "
                    "give one number, or one for each client"
                )

    def seconds(self, work: Work) -> float:
        """Return the seconds of one round, or of the exchange before the first round."""
        if not work.clients:
            return 0.0
        each = self.seconds_of_each(work)
        if work.deadline is not None:
            each = np.minimum(each, work.deadline)
        return float(each.mean() if self.per_round == "mean" else each.max())

    def seconds_of_each(self, work: Work) -> NDArray[np.float64]:
        """Return the seconds of each client, or of each group, without a deadline."""
        down, up, steps = (np.asarray(column, dtype=float) for column in (work.down, work.up, work.steps))
        if work.link == "group":
            return 8e-6 * (down / self.group_down_mbps + up / self.group_up_mbps)
        return (
            self._of("latency", work.clients)
            + 8e-6 * down / self._of("down_mbps", work.clients)
            + 8e-6 * up / self._of("up_mbps", work.clients)
            + steps * self._of("seconds_per_step", work.clients)
        )

    def _of(self, name: str, clients: tuple[int, ...]) -> NDArray[np.float64] | float:
        value: Any = getattr(self, name)
        if not isinstance(value, tuple):
            return float(value)
        if max(clients) >= len(value):
            raise InputError(
                f"CostModel.{name} has {len(value)} entries, client {max(clients)} needs its own; "
                "give one number, or one for each client"
            )
        return np.asarray(value, dtype=float)[list(clients)]
