"""States as trees: NamedTuples of tensors, which may contain NamedTuples.

Arguments of a computation may also contain lists and dicts of tensors, and None, which has no leaves.

leaves(state)                 the tensors, in the order of the fields
rebuild(like, tensors)        a state with the same fields and other tensors
map_leaves(function, state)   a state whose tensors are function(tensor)
names(state)                  "y", "moments.m", ...: one name per leaf, for files and messages
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

StateT = TypeVar("StateT")


def leaves(state: Any) -> list[Tensor]:
    """Return the tensors of a state, depth first."""
    return list(_leaves(state))


def _leaves(state: Any) -> Iterator[Tensor]:
    if isinstance(state, (tuple, list, dict)):
        for part in state.values() if isinstance(state, dict) else state:
            yield from _leaves(part)
    elif state is not None:
        yield state


def rebuild(like: StateT, tensors: Iterable[Any]) -> StateT:
    """Return a state with the fields of ``like`` and one of ``tensors`` for each of its leaves.

    >>> from typing import NamedTuple
    >>> class Point(NamedTuple):
    ...     x: float
    ...     y: float
    >>> rebuild(Point(0, Point(0, 0)), [1, 2, 3])
    Point(x=1, y=Point(x=2, y=3))
    """
    rest = iter(tensors)
    state: StateT = _rebuild(like, rest)
    if next(rest, rest) is not rest:
        raise ValueError("there are more tensors than leaves")
    return state


def _rebuild(like: Any, rest: Iterator[Any]) -> Any:
    if like is None:
        return None
    if isinstance(like, dict):
        return {key: _rebuild(part, rest) for key, part in like.items()}
    if isinstance(like, (tuple, list)):
        parts = [_rebuild(part, rest) for part in like]
        return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)
    try:
        return next(rest)
    except StopIteration:
        raise ValueError("there are fewer tensors than leaves") from None


def map_leaves(function: Callable[..., Any], state: StateT, *others: Any) -> StateT:
    """Apply a function to each leaf of a state, together with the same leaf of the other states."""
    columns = zip(leaves(state), *map(leaves, others), strict=True)
    return rebuild(state, [function(*column) for column in columns])


def skeleton(state: StateT) -> StateT:
    """Return the state without its tensors, for a later ``rebuild``."""
    return map_leaves(lambda _: 0, state)


def names(state: Any) -> list[str]:
    """Return one name per leaf; the fields of a nested state follow its own name and a dot."""
    found = []
    for field, value in zip(state._fields, state, strict=True):
        found += [f"{field}.{name}" for name in names(value)] if isinstance(value, tuple) else [field]
    return found


def named_leaves(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the leaves by name; ``prefix`` and a dot come before each name if it is given."""
    start = f"{prefix}." if prefix else ""
    return {start + name: leaf for name, leaf in zip(names(state), leaves(state), strict=True)}


def from_names(like: StateT, tensors: Mapping[str, Tensor], prefix: str = "") -> StateT:
    """Return a state with the fields of ``like`` from tensors by name; the inverse of ``named_leaves``."""
    start = f"{prefix}." if prefix else ""
    return rebuild(like, [tensors[start + name] for name in names(like)])
