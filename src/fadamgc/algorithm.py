"""The contract between an algorithm and its runner: the simulator, a Flower app, or your own loop.

An algorithm is a frozen dataclass. Its fields are hyperparameters and its methods are pure functions of
tensors: it knows nothing of modules, data, devices, random numbers or networks. One round is

    down = algo.broadcast(server)                                      the server's message
    each sampled client, starting from x = down.x:
        local = algo.begin(down, client)                               the state of its local steps
        for K mini-batches with gradient g at x:
            x, local = algo.step(down, client, local, x, g)            the paper's update rule
        client, up = algo.finish(down, client, local, x, K, tracked)   its new state and its message
    server = algo.aggregate(server, sum of the ups, cohort)            runners add, algorithms divide

Methods are written for one client; runners map them over clients. States and messages are NamedTuples of
tensors (see ``tree.py``): vectors of shape ``(d,)`` and numbers of shape ``(1,)``. A tracked client is a
sampled client that also sends the fields listed in ``tracked_only``.

Messages may be sent with codecs, which lose something (see ``codecs.py``). The server then aggregates what
arrives, and the client's state becomes ``received(client, up, arrived)``; ``changes`` says the usual case.

Fast executors call the methods through ``vmap`` and record them as graphs. Then ``K``, ``tracked`` and the
hyperparameters are tensors whose values cannot be read: calculate with them, and use ``rules.select`` instead
of ``if``. (If a method does read a hyperparameter, as in ``if self.eps > 0``, the executor detects this and
passes that hyperparameter as a number.)
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, Self, TypeAlias, TypeVar

import torch
from torch import Tensor

from fadamgc.errors import InputError, shown
from fadamgc.fields import check_fields
from fadamgc.hyperparameters import plain_value, with_schedules
from fadamgc.tree import StateT, from_names, map_leaves, named_leaves

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
    """The clients of a round, as numbers for ``aggregate``.

    With weighted aggregation, n and S are sums of weights; the mean weight of all clients is 1.

    >>> cohort = Cohort(n=100, S=10, K=20.0, t=1)
    >>> cohort.S / cohort.n
    0.1
    """

    n: float  # number of all clients
    S: float  # number of clients whose messages were added
    K: float  # local steps, mean over those S clients
    t: int = 0  # number of the round, from 1


@dataclasses.dataclass(frozen=True)
class Algorithm(ABC, Generic[ServerT, DownT, ClientT, LocalT, UpT]):
    """A federated optimizer: hyperparameters as fields, update rules as pure methods.

    >>> import fadamgc
    >>> algo = fadamgc.FedAvg(eta_l=0.5)
    >>> server, client = algo.init_server(torch.zeros(2)), algo.init_client(torch.zeros(2))
    >>> down = algo.broadcast(server)
    >>> x, local = algo.step(down, client, algo.begin(down, client), down.x, torch.tensor([1.0, -1.0]))
    >>> client, up = algo.finish(down, client, local, x, 1, True)
    >>> algo.aggregate(server, up, Cohort(n=1, S=1, K=1)).x
    tensor([-0.5000,  0.5000])
    """

    title: ClassVar[str]
    """The name in tables and legends."""
    cites: ClassVar[tuple[str, ...]] = ()
    """What a paper that uses it should cite: keys of the package's references.bib, or BibTeX entries."""
    tracked_only: ClassVar[tuple[str, ...]] = ()
    """Fields of ``up`` that only tracked clients send; they must be zero for all other clients."""

    changes: ClassVar[Mapping[str, str]] = {}
    """Fields of ``up`` that are the change of a field of the client's state, such as {"dy": "y"}."""

    if TYPE_CHECKING:

        @property
        def eta_l(self) -> float:
            """The local step size; every algorithm has it, as a field or as a property."""

    def __post_init__(self) -> None:
        check_fields(self)
        if not hasattr(self, "eta_l"):
            raise InputError(
                f"{type(self).__name__} has no local step size; declare the field eta_l, for example "
                "eta_l: float = positive(0.1)"
            )

    # Hyperparameters as plain data, for specs, files and messages.

    @classmethod
    def setting_names(cls) -> tuple[str, ...]:
        """Return the names of the hyperparameters that ``make`` accepts."""
        return tuple(f.name for f in dataclasses.fields(cls) if not f.metadata.get("internal"))

    @classmethod
    def make(cls, **settings: Any) -> Self:
        """Make an algorithm from plain data, the inverse of ``plain``."""
        return cls(**settings)

    def plain(self) -> dict[str, Any]:
        """Return the hyperparameters as plain data."""
        return {name: plain_value(getattr(self, name)) for name in self.setting_names()}

    def replace(self, **changes: Any) -> Self:
        """Return the algorithm with other values of some hyperparameters."""
        return dataclasses.replace(self, **changes)

    def at(self, t: int) -> Self:
        """Return the algorithm for round t (from 1), with every schedule replaced by its value."""
        try:
            return with_schedules(self, lambda schedule: schedule.at(t))
        except InputError as error:
            raise InputError(f"in round {t}: {error}") from None

    def for_rounds(self, rounds: int) -> Self:
        """Return the algorithm for a run of ``rounds`` rounds; some schedules depend on this number."""
        return with_schedules(self, lambda schedule: schedule.over(rounds))

    def for_model(self, shapes: Sequence[torch.Size]) -> Self:  # noqa: ARG002
        """Return the algorithm for a model whose parameters have these shapes; most need no shapes."""
        return self

    @property
    def coin(self) -> float | None:
        """The probability that a round ends after each step, for all clients; None: K is a setting."""
        return None

    @property
    def init_gradient(self) -> bool:
        """Whether ``init_server`` and ``init_client`` need gradients at the initial model."""
        return False

    @property
    def round_gradient(self) -> bool:
        """Whether ``begin`` needs the gradient of the client's whole data at ``down.x``."""
        return False

    @property
    def full_participation(self) -> bool:
        """Whether all clients must be sampled and tracked in every round, with equal weights."""
        return False

    @abstractmethod
    def init_server(self, x: Tensor, g: Tensor | None = None) -> ServerT:
        """Return the server's first state; ``g`` is the clients' mean gradient at x if ``init_gradient``."""

    @abstractmethod
    def init_client(self, x: Tensor, g: Tensor | None = None) -> ClientT:
        """Return a client's first state; ``g`` is the client's gradient at x if ``init_gradient``."""

    @abstractmethod
    def broadcast(self, server: ServerT) -> DownT:
        """Return the message to every sampled client; its first field is the model x."""

    @abstractmethod
    def begin(self, down: DownT, client: ClientT, g: Tensor | None = None) -> LocalT:
        """Return the local state before step 1; ``g`` is the client's gradient at x if ``round_gradient``."""

    @abstractmethod
    def step(
        self, down: DownT, client: ClientT, local: LocalT, x: Tensor, g: Tensor
    ) -> tuple[Tensor, LocalT]:
        """Take one local step from x with the mini-batch gradient g at x; return the new x and local."""

    @abstractmethod
    def finish(
        self, down: DownT, client: ClientT, local: LocalT, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[ClientT, UpT]:
        """Return the client's new state and its message, after K local steps that ended at x."""

    def received(self, client: ClientT, up: UpT, arrived: UpT) -> ClientT:
        """Return the client's state after the round, if ``arrived`` is what the server reads of ``up``.

        They differ if a message is compressed (see ``codecs.py``). A state that must agree with the
        server's, such as y_i, whose mean is y, changes by what has arrived: see ``changes``.
        """
        if not self.changes:
            return client
        state, sent, read = named_leaves(client), named_leaves(up), named_leaves(arrived)
        for field, kept in self.changes.items():
            state[kept] = state[kept] + (read[field] - sent[field])
        return from_names(client, state)

    @abstractmethod
    def aggregate(self, server: ServerT, total: UpT, cohort: Cohort) -> ServerT:
        """Return the server's new state; ``total`` is the sum of the clients' messages."""


AnyAlgorithm: TypeAlias = Algorithm[Any, Any, Any, Any, Any]


def add(a: StateT, b: StateT) -> StateT:
    """Add the messages of two clients field by field (``+`` would join the tuples).

    >>> import fadamgc
    >>> up = example(fadamgc.FAdamGC(), torch.zeros(2)).up._replace(dy=torch.ones(2))
    >>> add(up, up).dy
    tensor([2., 2.])
    """
    return map_leaves(torch.add, a, b)


class Example(NamedTuple):
    """One of each kind of state and message that an algorithm has."""

    server: Any
    down: Any
    client: Any
    local: Any
    up: Any


def example(algorithm: AnyAlgorithm, x: Tensor) -> Example:
    """Run one round on vectors like x and return its states and messages, to learn their types and sizes.

    x may be empty, or on torch's device "meta", where nothing is computed.
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
    """Return a vector of d numbers for ``example``; a long one is on the device "meta", without values."""
    return torch.zeros(d, dtype=dtype, device="cpu" if d <= 1_000_000 else "meta")
