"""The hyperparameters of an algorithm as plain data; a rule in an algorithm is a dataclass in a field.

The numbers of a rule have names with dots: ``local.eta_l`` is the field ``eta_l`` of the rule in ``local``.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any, TypeVar

T = TypeVar("T")


def numbers(instance: Any) -> dict[str, float]:
    """Return all numbers among the fields of a dataclass, also of those in its fields, by name.

    >>> from fadamgc import FedAvg
    >>> numbers(FedAvg(eta_l=0.5))
    {'eta_l': 0.5, 'eta_g': 1.0}
    """
    values: dict[str, float] = {}
    for field in dataclasses.fields(instance):
        value = getattr(instance, field.name)
        if is_rule(value):
            values |= {f"{field.name}.{name}": number for name, number in numbers(value).items()}
        elif isinstance(value, (int, float)) and not isinstance(value, bool):
            values[field.name] = value
    return values


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


def is_rule(value: object) -> bool:
    """Whether a value is an instance of a dataclass."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)
