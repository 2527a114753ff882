"""The contract between an algorithm and whatever runs it.

An algorithm is a frozen dataclass of hyperparameters whose methods are pure functions of tensors. It knows
nothing of modules, data, devices, random numbers or networks. One round reads

    down  = algo.broadcast(server)                                  what the server sends
    local = algo.begin(down, client)                                 at each sampled client,
    for K mini-batches:                                              starting from x_i = down.x:
        x_i, local = algo.step(down, client, local, x_i, g)            g: gradient at x_i
    client, up = algo.finish(down, client, local, x_i, K, tracked)   state kept, message sent
    server = algo.aggregate(server, sum of the ups, cohort)          runners add, algorithms divide

Methods are written for one client; runners map them over clients. A vector has shape ``(d,)``, a number
in a state ``(1,)``. States and messages are NamedTuples of tensors and may contain NamedTuples
(see ``tree.py``).

Fast executors call the methods through ``vmap`` and record them as graphs. Then ``K``, ``tracked`` and the
hyperparameters are tensors without a readable value: calculate with them, and choose with ``rules.select``.
(A hyperparameter whose value a rule does read, as in ``if self.eps > 0``, is detected and stays a number.)
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from fadamgc.errors import InputError, shown
from fadamgc.fields import check_fields
from fadamgc.tree import StateT, map_leaves

ServerT = TypeVar("ServerT", bound=tuple[Any, ...])
DownT = TypeVar("DownT", bound=tuple[Any, ...])
ClientT = TypeVar("ClientT", bound=tuple[Any, ...])
LocalT = TypeVar("LocalT", bound=tuple[Any, ...])
UpT = TypeVar("UpT", bound=tuple[Any, ...])

Steps: TypeAlias = int | Tensor
Flag: TypeAlias = bool | Tensor


class Empty(NamedTuple):
    """The state of a client, or of its local steps, that keeps nothing."""


class Cohort(NamedTuple):
    """The clients that took part in a round, as ``aggregate`` needs them.

    With weighted aggregation a client counts as its weight (the mean weight over all clients is 1).
    """

    n: float  # all clients
    S: float  # the sampled clients whose updates were added
    K: float  # local steps, mean over those clients
    t: int = 0  # number of the round, from 1


@dataclasses.dataclass(frozen=True)
class Algorithm(ABC, Generic[ServerT, DownT, ClientT, LocalT, UpT]):
    """A federated optimizer: hyperparameters as fields, update rules as pure methods."""

    title: ClassVar[str]
    """The name in tables and legends."""
    tracked_only: ClassVar[tuple[str, ...]] = ()
    """Fields of Up that only tracked clients send; zero in the Up of any other client."""

    eta_l: float

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def init_gradient(self) -> bool:
        """Whether the run starts from every client's gradient at the initial model."""
        return False

    @property
    def round_gradient(self) -> bool:
        """Whether ``begin`` needs the gradient of the client's whole data at ``down.x``."""
        return False

    @property
    def full_participation(self) -> bool:
        """Whether the rules require that all clients take part, are tracked, and have equal weights."""
        return False

    @abstractmethod
    def init_server(self, x: Tensor, g: Tensor | None = None) -> ServerT:
        """Return the server before round 1; ``g`` is the clients' mean gradient at x if ``init_gradient``."""

    @abstractmethod
    def init_client(self, x: Tensor, g: Tensor | None = None) -> ClientT:
        """Return a client before its first round; ``g`` is its gradient at x if ``init_gradient``."""

    @abstractmethod
    def broadcast(self, server: ServerT) -> DownT:
        """Return what the server sends to every sampled client; its first field is the model x."""

    @abstractmethod
    def begin(self, down: DownT, client: ClientT, g: Tensor | None = None) -> LocalT:
        """Return the local state before step 1; ``g`` is the client's gradient at x if ``round_gradient``."""

    @abstractmethod
    def step(
        self, down: DownT, client: ClientT, local: LocalT, x: Tensor, g: Tensor
    ) -> tuple[Tensor, LocalT]:
        """Take one local step from x with the mini-batch gradient g at x; return the new x and state."""

    @abstractmethod
    def finish(
        self, down: DownT, client: ClientT, local: LocalT, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[ClientT, UpT]:
        """Return the state that the client keeps after K steps that ended at x, and what it sends."""

    @abstractmethod
    def aggregate(self, server: ServerT, total: UpT, cohort: Cohort) -> ServerT:
        """Return the server after the round; ``total`` is the sum of what the clients sent."""


AnyAlgorithm: TypeAlias = Algorithm[Any, Any, Any, Any, Any]


def add(a: StateT, b: StateT) -> StateT:
    """Add what two clients sent, field by field (``+`` would join the tuples)."""
    return map_leaves(torch.add, a, b)


class Example(NamedTuple):
    """One of each kind of state and message that an algorithm has."""

    server: Any
    down: Any
    client: Any
    local: Any
    up: Any


def example(algorithm: AnyAlgorithm, x: Tensor) -> Example:
    """Run one round on vectors like x, to learn the types, names and sizes of states and messages.

    x may be empty, or on torch's "meta" device, where nothing is computed.
    """
    g = x if algorithm.init_gradient or algorithm.round_gradient else None
    try:
        server = algorithm.init_server(x, g)
    except (OverflowError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "overflow" not in str(error):
            raise
        raise InputError(f"{shown(algorithm)} has a number that is too large for {x.dtype}") from error
    down = algorithm.broadcast(server)
    client = algorithm.init_client(x, g)
    _, local = algorithm.step(down, client, algorithm.begin(down, client, g), x, x)
    _, up = algorithm.finish(down, client, local, x, 1, True)
    return Example(server, down, client, local, up)


def stand_in(d: int, dtype: torch.dtype) -> Tensor:
    """Return a vector of d numbers for ``example``; a long one is on the "meta" device, without values."""
    return torch.zeros(d, dtype=dtype, device="cpu" if d <= 1_000_000 else "meta")
