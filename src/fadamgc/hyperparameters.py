"""The hyperparameters of an algorithm as plain data; a rule in an algorithm is a dataclass in a field.

The numbers of a rule have names with dots: ``local.eta_l`` is the field ``eta_l`` of the rule in ``local``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from fadamgc.schedules import Schedule

T = TypeVar("T")


def numbers(instance: Any) -> dict[str, float]:
    """Return the numeric fields of a dataclass and of the rules in its fields, by name.

    >>> from fadamgc import FedAvg
    >>> numbers(FedAvg(eta_l=0.5))
    {'eta_l': 0.5, 'eta_g': 1.0}
    """
    values: dict[str, float] = {}
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if isinstance(value, Schedule):
            continue
        if is_rule(value):
            values |= {f"{field.name}.{name}": number for name, number in numbers(value).items()}
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            values[field.name] = value
    return values


def schedules(instance: Any) -> dict[str, Schedule]:
    """Return the schedules in the fields of a dataclass and of the rules in its fields, by name."""
    values: dict[str, Schedule] = {}
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if isinstance(value, Schedule):
            values[field.name] = value
        elif is_rule(value):
            values |= {f"{field.name}.{name}": inner for name, inner in schedules(value).items()}
    return values


def with_schedules(instance: T, convert: Callable[[Schedule], Any]) -> T:
    """Return the dataclass with ``convert(schedule)`` for every schedule; the new values are checked."""
    changes: dict[str, Any] = {}
    for field in dataclasses.fields(instance):  # type: ignore[arg-type]
        value = getattr(instance, field.name)
        if isinstance(value, Schedule):
            changes[field.name] = convert(value)
        elif is_rule(value) and (inner := with_schedules(value, convert)) is not value:
            changes[field.name] = inner
    return dataclasses.replace(instance, **changes) if changes else instance  # type: ignore[type-var]


def with_values(instance: T, values: Mapping[str, Any]) -> T:
    """Return a copy with other values in some fields, without checking them: they may be tensors."""
    twin = copy.copy(instance)
    nested: dict[str, dict[str, Any]] = {}
    for name, value in values.items():
        first, _, rest = name.partition(".")
        if rest:
            nested.setdefault(first, {})[rest] = value
        else:
            object.__setattr__(twin, name, value)
    for name, inner in nested.items():
        object.__setattr__(twin, name, with_values(getattr(twin, name), inner))
    return twin


def plain_value(value: Any) -> Any:
    """Return the value of a hyperparameter as plain data."""
    return value.plain() if isinstance(value, Schedule) else value


def is_rule(value: object) -> bool:
    """Whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
