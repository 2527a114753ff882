"""The contract between an algorithm and whatever runs it.

An algorithm is a frozen dataclass of hyperparameters whose methods are pure functions of tensors.
It knows nothing of modules, data, devices, random numbers or networks. One round reads

    down  = algo.broadcast(server)                                  what the server sends
    local = algo.begin(down, client)                                 at each sampled client,
    for K mini-batches:                                              starting from x_i = down.x:
        direction, local = algo.direction(down, client, local, g)      g: gradient at x_i
        x_i = x_i - eta_l * direction
    client, up = algo.finish(down, client, local, x_i, K, tracked)   state kept, message sent
    server = algo.aggregate(server, sum of the ups, cohort)          runners add, algorithms divide

Shapes: d numbers a vector. Server and Down hold ``(d,)``. What belongs to a client is ``(d,)`` for one
client and ``(C, d)`` for a block of C clients: the rules are elementwise, so one text serves both; for
a block, ``K`` and ``tracked`` are tensors of shape ``(C, 1)``. A number a client keeps has shape
``(1,)`` or ``(C, 1)``.

Fast executors also map the text for one client over many. Then ``K``, ``tracked`` and hyperparameters are
tensors without a value to look at: calculate with them, and choose with ``select``. (A hyperparameter that
a rule does look at, as in ``if self.eps > 0``, is noticed and stays a plain number.)
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from types import NoneType
from typing import Any, ClassVar, Generic, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor

from fadamgc.errors import InputError, real, shown

ServerT = TypeVar("ServerT", bound=tuple[Tensor, ...])
DownT = TypeVar("DownT", bound=tuple[Tensor, ...])
ClientT = TypeVar("ClientT", bound=tuple[Tensor, ...])
LocalT = TypeVar("LocalT", bound=tuple[Tensor, ...])
UpT = TypeVar("UpT", bound=tuple[Tensor, ...])
StateT = TypeVar("StateT", bound=tuple[Tensor, ...])

Steps: TypeAlias = int | Tensor
Flag: TypeAlias = bool | Tensor


class Empty(NamedTuple):
    """The state of a client, or of its local loop, that keeps nothing."""


class Cohort(NamedTuple):
    """Who took part in a round, as ``aggregate`` needs to know it.

    With weighted aggregation a client counts as its weight (the weights' mean over all clients is 1).
    """

    n: float  # all clients
    S: float  # the sampled clients whose updates were added
    K: float  # local steps, mean over those clients


@dataclasses.dataclass(frozen=True)
class Algorithm(ABC, Generic[ServerT, DownT, ClientT, LocalT, UpT]):
    """A federated optimizer: hyperparameters as fields, update rules as pure methods."""

    title: ClassVar[str]
    """How tables and legends call it."""
    tracked_only: ClassVar[tuple[str, ...]] = ()
    """Fields of Up that only tracked clients send; zero in the Up of any other client."""

    eta_l: float

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            rule = field.metadata.get("rule")
            if rule is not None:
                value = rule(f"{type(self).__name__}.{field.name}", getattr(self, field.name))
                object.__setattr__(self, field.name, value)

    @property
    def init_gradient(self) -> bool:
        """Whether the run starts from every client's gradient at the initial model."""
        return False

    @property
    def round_gradient(self) -> bool:
        """Whether ``begin`` wants the gradient of the client's whole data at ``down.x``."""
        return False

    @property
    def full_participation(self) -> bool:
        """Whether the rules hold only if all clients take part, are tracked, and count the same."""
        return False

    @abstractmethod
    def init_server(self, x: Tensor, g: Tensor | None = None) -> ServerT:
        """The server before round 1; ``g`` is the clients' mean gradient at x if ``init_gradient``."""

    @abstractmethod
    def init_client(self, x: Tensor, g: Tensor | None = None) -> ClientT:
        """A client before its first round; ``g`` is its own gradient at x if ``init_gradient``."""

    @abstractmethod
    def broadcast(self, server: ServerT) -> DownT:
        """What the server sends to every sampled client."""

    @abstractmethod
    def begin(self, down: DownT, client: ClientT, g: Tensor | None = None) -> LocalT:
        """The local state at step 1; ``g`` is the client's gradient at x if ``round_gradient``."""

    @abstractmethod
    def direction(self, down: DownT, client: ClientT, local: LocalT, g: Tensor) -> tuple[Tensor, LocalT]:
        """One local step: the runner then does ``x_i = x_i - eta_l * direction``."""

    @abstractmethod
    def finish(
        self, down: DownT, client: ClientT, local: LocalT, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[ClientT, UpT]:
        """After K steps ended at x: the state that the client keeps, and what it sends."""

    @abstractmethod
    def aggregate(self, server: ServerT, total: UpT, cohort: Cohort) -> ServerT:
        """The server after the round; ``total`` is the sum of what the clients sent."""


AnyAlgorithm: TypeAlias = Algorithm[Any, Any, Any, Any, Any]


# Pieces of mathematics that more than one algorithm has.


def ema(old: Tensor, new: Tensor, beta: float) -> Tensor:
    """Exponential moving average, beta * old + (1 - beta) * new."""
    return beta * old + (1 - beta) * new


def adam_ratio(m: Tensor, v: Tensor, eps: float) -> Tensor:
    """m / (sqrt(v) + eps), and 0 where the denominator is 0 (possible only with eps = 0)."""
    if eps > 0:
        return m / (v.sqrt() + eps)
    return torch.where(v > 0, m / v.sqrt(), 0.0)


def select(flag: Flag, yes: Tensor, no: Tensor) -> Tensor:
    """``yes`` where the flag holds, else ``no``; the flag is a bool or a tensor over the block."""
    if isinstance(flag, bool):
        return yes if flag else no
    return torch.where(flag, yes, no)


def number(x: Tensor, value: float = 0.0) -> Tensor:
    """One number for each vector in x, of shape (1,) or (C, 1)."""
    return x.new_full((*x.shape[:-1], 1), value)


def add(a: StateT, b: StateT) -> StateT:
    """The sum, field by field, of what two clients sent (``+`` would join the tuples)."""
    return type(a)(*(p + q for p, q in zip(a, b, strict=True)))


class Example(NamedTuple):
    """One of each kind of state and message that an algorithm has."""

    server: Any
    down: Any
    client: Any
    local: Any
    up: Any


def example(algorithm: AnyAlgorithm, x: Tensor) -> Example:
    """A round on vectors like x, for what can be learned from types, names and sizes alone.

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
    _, local = algorithm.direction(down, client, algorithm.begin(down, client, g), x)
    _, up = algorithm.finish(down, client, local, x, 1, True)
    return Example(server, down, client, local, up)


def stand_in(d: int, dtype: torch.dtype) -> Tensor:
    """A vector for an example; one of many numbers has none (which takes a second to import)."""
    return torch.zeros(d, dtype=dtype, device="cpu" if d <= 1_000_000 else "meta")


# Fields with a rule, so that a wrong value is refused where it is given.


EXACT = 2**53  # integers up to this are exact as floats


def _is_number(value: object) -> bool:
    number = real(value)
    return number is not None and math.isfinite(number)


def _field(default: object, accepts: Any, accepted: str) -> Any:
    def rule(name: str, value: Any) -> Any:
        if not accepts(value):
            raise InputError(f"{name}={shown(value)} is not accepted; it must be {accepted}")
        plain = isinstance(value, (int, float, str, NoneType))
        if plain and not (isinstance(value, int) and value > EXACT):
            return value
        return float(value)  # a number of numpy's, or an integer that torch cannot take

    return dataclasses.field(default=default, metadata={"rule": rule})


def positive(default: float) -> Any:
    """A field whose value must be a finite number > 0."""
    return _field(default, lambda v: _is_number(v) and v > 0, "a number > 0")


def nonnegative(default: float) -> Any:
    """A field whose value must be a finite number >= 0."""
    return _field(default, lambda v: _is_number(v) and v >= 0, "a number >= 0")


def optional_nonnegative(default: float | None = None) -> Any:
    """A field whose value must be None or a finite number >= 0."""
    return _field(default, lambda v: v is None or (_is_number(v) and v >= 0), "None or a number >= 0")


def decay(default: float) -> Any:
    """A field whose value must be a decay rate, 0 <= beta < 1."""
    return _field(default, lambda v: _is_number(v) and 0 <= v < 1, "a number with 0 <= value < 1")


def share(default: float) -> Any:
    """A field whose value must be a share, 0 < beta <= 1."""
    return _field(default, lambda v: _is_number(v) and 0 < v <= 1, "a number with 0 < value <= 1")


def choice(*options: str) -> Any:
    """A field whose value must be one of the options; the first is the default."""
    return _field(
        options[0], lambda v: isinstance(v, str) and v in options, "one of " + ", ".join(map(repr, options))
    )


def flag(default: bool) -> Any:
    """A field whose value must be True or False."""
    return _field(default, lambda v: isinstance(v, bool), "True or False")
