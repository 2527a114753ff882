"""Hyperparameters that check their values: fields for the dataclass of an algorithm.

eta_l: float = positive(1e-3)
init: str = choice("zero", "gradient")      # the first option is the default
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from types import NoneType
from typing import Any

from fadamgc.errors import not_accepted, real

LARGEST_EXACT = 2**53  # integers up to this value are exact as floats


def check_fields(instance: Any) -> None:
    """Check and normalise the values of all fields made by this module; call it in ``__post_init__``."""
    for field in dataclasses.fields(instance):
        rule = field.metadata.get("rule")
        if rule is not None:
            value = rule(f"{type(instance).__name__}.{field.name}", getattr(instance, field.name))
            object.__setattr__(instance, field.name, value)


def positive(default: float) -> Any:
    """Declare a finite number > 0."""
    return _number(default, lambda v: v > 0, "a number > 0")


def nonnegative(default: float) -> Any:
    """Declare a finite number >= 0."""
    return _number(default, lambda v: v >= 0, "a number >= 0")


def optional_nonnegative(default: float | None = None) -> Any:
    """Declare a finite number >= 0, or None."""
    return _number(default, lambda v: v >= 0, "None or a number >= 0", optional=True)


def decay(default: float) -> Any:
    """Declare a decay rate, 0 <= beta < 1."""
    return _number(default, lambda v: 0 <= v < 1, "a number with 0 <= value < 1")


def share(default: float) -> Any:
    """Declare a share, 0 < share <= 1."""
    return _number(default, lambda v: 0 < v <= 1, "a number with 0 < value <= 1")


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


def _number(default: object, in_range: Callable[[Any], bool], accepted: str, optional: bool = False) -> Any:
    def accepts(value: Any) -> bool:
        number = real(value)
        if number is None:
            return optional and value is None
        return math.isfinite(number) and in_range(value)

    return _field(default, accepts, accepted)


def _field(
    default: object, accepts: Callable[[Any], bool], accepted: str, options: tuple[Any, ...] = ()
) -> Any:
    def rule(name: str, value: Any) -> Any:
        if not accepts(value):
            raise not_accepted(name, value, accepted)
        plain = isinstance(value, (int, float, str, NoneType))
        if plain and not (isinstance(value, int) and value > LARGEST_EXACT):
            return value
        return float(value)  # a numpy number, or an integer that is too large for torch

    return dataclasses.field(default=default, metadata={"rule": rule, "options": options})
