"""Hyperparameters that check their values: fields for the dataclass of an algorithm.

>>> @dataclasses.dataclass(frozen=True)
... class Rule:
...     eta_l: float = positive(0.1)
...     weight_decay: float = nonnegative(0.0)
...     v0: float | None = optional_nonnegative()
...     beta: float = decay(0.9)
...     alpha: float = share(1.0)
...     p: float | None = optional_share()
...     option: str = choice("mean", "sum")  # the first is the default
...     nesterov: bool = flag(False)
...     def __post_init__(self):
...         check_fields(self)
>>> Rule(option="sum").option
'sum'
>>> Rule(beta=1)
Traceback (most recent call last):
fadamgc.errors.InputError: Rule.beta=1 is not accepted; it must be a number with 0 <= value < 1
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import NoneType
from typing import Any, TypeVar

from fadamgc.errors import InputError, not_accepted, real
from fadamgc.schedules import as_schedule, is_lost

__all__ = [
    "check_fields",
    "choice",
    "decay",
    "flag",
    "nonnegative",
    "optional_nonnegative",
    "optional_share",
    "positive",
    "share",
]

T = TypeVar("T")

LARGEST_EXACT = 2**53  # integers up to this value are exact as floats


def check_fields(instance: Any) -> None:
    """Check and normalise the values of all fields made by this module; call it in ``__post_init__``."""
    for name, value in vars(type(instance)).items():
        if isinstance(value, dataclasses.Field):
            raise InputError(
                f"{type(instance).__name__} has the field {name!r} and is not a dataclass; write "
                "@dataclass(frozen=True) above the class"
            )
    for field in dataclasses.fields(instance):
        rule = field.metadata.get("rule")
        if rule is not None:
            value = rule(f"{type(instance).__name__}.{field.name}", getattr(instance, field.name))
            object.__setattr__(instance, field.name, value)


def unchecked(cls: type[T], **values: Any) -> T:
    """Make an instance of a dataclass without checking its fields, which may be tensors."""
    instance = object.__new__(cls)
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        object.__setattr__(instance, field.name, values.get(field.name, field.default))
    return instance


def positive(default: float) -> Any:
    """Declare a finite number > 0."""
    return _field(default, lambda v: _is_finite(v) and v > 0, "a number > 0")


def nonnegative(default: float) -> Any:
    """Declare a finite number >= 0."""
    return _field(default, lambda v: _is_finite(v) and v >= 0, "a number >= 0")


def optional_nonnegative(default: float | None = None) -> Any:
    """Declare a finite number >= 0, or None."""
    return _field(default, lambda v: v is None or (_is_finite(v) and v >= 0), "None or a number >= 0")


def decay(default: float) -> Any:
    """Declare a decay rate, 0 <= beta < 1."""
    return _field(default, lambda v: _is_finite(v) and 0 <= v < 1, "a number with 0 <= value < 1")


def share(default: float) -> Any:
    """Declare a share, 0 < share <= 1."""
    return _field(default, lambda v: _is_finite(v) and 0 < v <= 1, "a number with 0 < value <= 1")


def optional_share() -> Any:
    """Declare a share, 0 < share <= 1, or None, the default."""
    return _field(None, lambda v: v is None or (_is_finite(v) and 0 < v <= 1), "None or 0 < value <= 1")


def internal(default: Any) -> Any:
    """Declare a value that is derived from the model or the groups, and is not a hyperparameter."""
    return dataclasses.field(default=default, repr=False, metadata={"internal": True})


def choice(*options: str) -> Any:
    """Declare one of several options; the first is the default."""
    accepted = "one of " + ", ".join(map(repr, options))
    return _field(options[0], lambda v: isinstance(v, str) and v in options, accepted, options)


def flag(default: bool) -> Any:
    """Declare True or False."""
    return _field(default, lambda v: isinstance(v, bool), "True or False", (False, True))


def options(field: dataclasses.Field[Any]) -> tuple[Any, ...]:
    """Return the values that a ``choice`` or ``flag`` accepts; () for every other field."""
    values: tuple[Any, ...] = field.metadata.get("options", ())
    return values


def _is_finite(value: object) -> bool:
    number = real(value)
    return number is not None and math.isfinite(number)


def _field(
    default: object, accepts: Callable[[Any], bool], accepted: str, options: tuple[Any, ...] = ()
) -> Any:
    def rule(name: str, value: Any) -> Any:
        if not options and (schedule := as_schedule(name, value)) is not None:
            if not is_lost(schedule):
                rule(name, schedule.at(1))
            return schedule
        if not accepts(value):
            raise not_accepted(name, value, accepted)
        plain = isinstance(value, (int, float, str, NoneType))
        if plain and not (isinstance(value, int) and value > LARGEST_EXACT):
            return value
        return float(value)  # a numpy number, or an integer that is too large for torch

    return dataclasses.field(default=default, metadata={"rule": rule, "options": options})
