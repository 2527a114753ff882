"""Hyperparameters that change over the rounds: ``FAdamGC(eta_l=fadamgc.schedules.cosine(1e-3))``.

Every number of an algorithm may be a schedule or a function of the round. In a spec a schedule is a table,
``eta_l = { cosine = 1e-3, end = 1e-5 }``. Runners ask for the numbers of a round, so that algorithms and
executors see numbers only.
"""

from __future__ import annotations

import dataclasses
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from fadamgc.errors import InputError, nearest, not_accepted, real, reason, shown, whole
from fadamgc.loading import is_trusted, load_object, reference_of

__all__ = ["Schedule", "constant", "cosine", "exponential", "function", "linear", "step", "warmup"]


@dataclass(frozen=True)
class Schedule(ABC):
    """A number that depends on the round.

    >>> @dataclass(frozen=True)
    ... class Alternating(Schedule):
    ...     name = "alternating"
    ...     value: float
    ...     def at(self, t):
    ...         return self.value if t % 2 else 0.0
    >>> [Alternating(0.1).at(t) for t in (1, 2, 3)]
    [0.1, 0.0, 0.1]
    """

    name: ClassVar[str]
    """The first key of its table in a spec; its value is the first field."""

    @abstractmethod
    def at(self, t: int) -> float:
        """Return the number of round t, from 1."""

    def over(self, rounds: int) -> Schedule:
        """Return the schedule for a run of ``rounds`` rounds."""
        return self

    def with_value(self, value: float) -> Self:
        """Return the schedule with another largest value, such as the next one of a grid."""
        return dataclasses.replace(self, **{"value": value})

    def plain(self) -> dict[str, Any]:
        """Return the schedule as plain data."""
        first, *others = dataclasses.fields(self)
        values = {other.name: getattr(self, other.name) for other in others}
        plain = {self.name: getattr(self, first.name), **values}
        return {
            key: value.plain()
            if isinstance(value, Schedule)
            else list(value)
            if isinstance(value, tuple)
            else value
            for key, value in plain.items()
            if value is not None
        }

    def _check(self, **accepted: str) -> None:
        """Convert the named fields to floats; refuse values that are not finite numbers of their kind."""
        for name, kind in accepted.items():
            value = real(getattr(self, name))
            if value is None or not math.isfinite(value) or (kind == "a number > 0" and value <= 0):
                raise not_accepted(f"{self.name}: {name}", getattr(self, name), kind)
            object.__setattr__(self, name, value)

    def _check_rounds(self, name: str = "rounds") -> None:
        if getattr(self, name) is not None:
            object.__setattr__(self, name, whole(f"{self.name}: {name}", getattr(self, name), 1))


@dataclass(frozen=True)
class Constant(Schedule):
    """The same value in all rounds.

    >>> [constant(0.1).at(t) for t in (1, 100)]
    [0.1, 0.1]
    """

    name: ClassVar[str] = "constant"
    value: float

    def __post_init__(self) -> None:
        self._check(value="a number")

    def at(self, t: int) -> float:
        return self.value


@dataclass(frozen=True)
class Step(Schedule):
    """Multiply the value by a factor after every ``every`` rounds, or at the rounds ``at_rounds``.

    >>> schedule = step(1.0, every=10, factor=0.1)
    >>> [schedule.at(t) for t in (1, 10, 11)]
    [1.0, 1.0, 0.1]
    """

    name: ClassVar[str] = "step"
    value: float
    every: int | None = None
    factor: float = 0.1
    at_rounds: Sequence[int] | None = None

    def __post_init__(self) -> None:
        self._check(value="a number", factor="a number > 0")
        self._check_rounds("every")
        if (self.every is None) == (self.at_rounds is None):
            raise InputError("step: give either every, a number of rounds, or at_rounds, a list of rounds")
        if self.at_rounds is not None:
            rounds = tuple(whole("step: at_rounds", t, 1) for t in self.at_rounds)
            object.__setattr__(self, "at_rounds", rounds)

    def at(self, t: int) -> float:
        if self.every is not None:
            return self.value * self.factor ** ((t - 1) // self.every)
        return self.value * self.factor ** sum(t >= start for start in self.at_rounds or ())


@dataclass(frozen=True)
class Exponential(Schedule):
    """Multiply the value by a factor after each round: value * factor ** (t - 1).

    >>> [exponential(1.0, factor=0.5).at(t) for t in (1, 2, 3)]
    [1.0, 0.5, 0.25]
    """

    name: ClassVar[str] = "exponential"
    value: float
    factor: float

    def __post_init__(self) -> None:
        self._check(value="a number", factor="a number > 0")

    def at(self, t: int) -> float:
        return self.value * self.factor ** (t - 1)


@dataclass(frozen=True)
class _Decay(Schedule):
    value: float
    rounds: int | None = None
    end: float = 0.0

    def __post_init__(self) -> None:
        self._check(value="a number", end="a number")
        self._check_rounds()

    def over(self, rounds: int) -> Schedule:
        return self if self.rounds is not None else dataclasses.replace(self, rounds=max(1, rounds))

    def _share(self, t: int) -> float:
        """Return the share of the rounds that come before round t."""
        if self.rounds is None and t > 1:
            raise InputError(
                f"{self.name}: rounds=None; give the number of rounds, or use the schedule in a run"
            )
        return min(1.0, (t - 1) / (self.rounds or 1))


@dataclass(frozen=True)
class Linear(_Decay):
    """Go from the value in round 1 to ``end`` after the last round, in equal steps.

    ``rounds`` None is the number of rounds of the run.

    >>> [linear(1.0, rounds=4).at(t) for t in (1, 2, 3, 4)]
    [1.0, 0.75, 0.5, 0.25]
    """

    name: ClassVar[str] = "linear"

    def at(self, t: int) -> float:
        return self.value + (self.end - self.value) * self._share(t)


@dataclass(frozen=True)
class Cosine(_Decay):
    """Go from the value in round 1 to ``end`` after the last round, along half a period of a cosine.

    ``rounds`` None is the number of rounds of the run.

    >>> schedule = cosine(1.0, rounds=4)
    >>> [round(schedule.at(t), 3) for t in (1, 2, 3, 4)]
    [1.0, 0.854, 0.5, 0.146]
    """

    name: ClassVar[str] = "cosine"

    def at(self, t: int) -> float:
        return self.end + (self.value - self.end) * (1 + math.cos(math.pi * self._share(t))) / 2


@dataclass(frozen=True)
class WarmUp(Schedule):
    """Rise in equal steps to the first value of another schedule (or to a number), then follow that one.

    >>> schedule = warmup(4, then=1.0)
    >>> [schedule.at(t) for t in (1, 2, 3, 4, 5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """

    name: ClassVar[str] = "warmup"
    rounds: int
    then: Schedule

    def __post_init__(self) -> None:
        self._check_rounds()
        then: Any = self.then
        object.__setattr__(self, "then", as_schedule("warmup: then", then) or Constant(then))

    def at(self, t: int) -> float:
        return self.then.at(1) * t / self.rounds if t <= self.rounds else self.then.at(t - self.rounds)

    def over(self, rounds: int) -> Schedule:
        return dataclasses.replace(self, then=self.then.over(max(1, rounds - self.rounds)))

    def with_value(self, value: float) -> Self:
        return dataclasses.replace(self, then=self.then.with_value(value))


@dataclass(frozen=True)
class Function(Schedule):
    """Any function of the round.

    The file of a run has the function's module and name. Reading it does not import the module: to resume
    such a run, give the function again.

    >>> [function(lambda t: 1 / t).at(t) for t in (1, 2, 4)]
    [1.0, 0.5, 0.25]
    """

    name: ClassVar[str] = "function"
    function: Callable[[int], float] | str

    def __post_init__(self) -> None:
        if isinstance(self.function, str) and "<" not in self.function and is_trusted():
            object.__setattr__(self, "function", load_object(self.function))

    @property
    def lost(self) -> bool:
        """Whether only the name of the function is known."""
        return isinstance(self.function, str)

    def at(self, t: int) -> float:
        if isinstance(self.function, str):
            raise InputError(f"the function {self.function} of a schedule is not in its file; give it again")
        try:
            return float(self.function(t))
        except Exception as error:
            raise InputError(f"schedule {self.function!r} failed for round {t}: {reason(error)}") from error

    def with_value(self, value: float) -> Self:
        raise InputError(f"a function has no value to replace by {value}; give a number or another schedule")

    def plain(self) -> dict[str, Any]:
        if isinstance(self.function, str):
            return {self.name: self.function}
        return {self.name: reference_of(self.function)}


KINDS = {kind.name: kind for kind in (Constant, Step, Exponential, Linear, Cosine, WarmUp, Function)}
constant, step, exponential, linear, cosine, warmup, function = (
    *(Constant, Step, Exponential, Linear, Cosine),
    *(WarmUp, Function),
)


def as_schedule(name: str, value: Any) -> Schedule | None:
    """Return a hyperparameter's value as a schedule; None if the value is not a schedule."""
    if isinstance(value, Schedule):
        return value
    if isinstance(value, Mapping):
        return from_plain(name, value)
    return Function(value) if callable(value) and not isinstance(value, type) else None


def functions_of(schedule: Schedule) -> list[Function]:
    """Return the functions in a schedule: itself, or the one that follows a warm-up."""
    while isinstance(schedule, WarmUp):
        schedule = schedule.then
    return [schedule] if isinstance(schedule, Function) else []


def is_lost(schedule: Schedule) -> bool:
    """Whether a schedule was a function that cannot be found again, so that its numbers are not known."""
    return any(function.lost for function in functions_of(schedule))


def first_number(schedule: Schedule) -> float:
    """Return the value in round 1; an arbitrary number if the schedule's function is lost."""
    return 0.5 if is_lost(schedule) else schedule.at(1)


def from_plain(name: str, plain: Mapping[str, Any]) -> Schedule:
    """Return the schedule of a table such as ``{"cosine": 1e-3, "end": 1e-5}``; the inverse of ``plain``."""
    kinds = [key for key in plain if key in KINDS]
    if len(kinds) != 1:
        hint = next((nearest(str(key), KINDS) for key in plain), "")
        raise InputError(
            f"{name}={shown(dict(plain))} is not a schedule{hint}; its table has one of the keys "
            f"{', '.join(KINDS)}, such as {{ cosine = 1e-3, end = 1e-5 }}"
        )
    cls = KINDS[kinds[0]]
    others = [field.name for field in dataclasses.fields(cls)[1:]]
    for key in plain:
        if key != kinds[0] and key not in others:
            known = f"it has {', '.join(others)}" if others else "it has no other"
            raise InputError(
                f"{name}: {kinds[0]} has no key {shown(key)}{nearest(str(key), others)}; {known}"
            )
    try:
        return cls(plain[kinds[0]], **{key: value for key, value in plain.items() if key != kinds[0]})
    except TypeError as error:
        missing = [f.name for f in dataclasses.fields(cls)[1:] if f.default is dataclasses.MISSING]
        raise InputError(f"{name}: {kinds[0]} needs {', '.join(missing)}: {error}") from None
    except InputError as error:
        raise InputError(f"{name}: {error}") from None
