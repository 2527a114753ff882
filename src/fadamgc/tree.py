"""States as trees: NamedTuples of tensors, which may contain NamedTuples.

leaves(state)                 the tensors, in the order of the fields
rebuild(like, tensors)        a state with the same fields and other tensors
map_leaves(function, state)   a state whose tensors are function(tensor)
names(state)                  "y", "moments.m", ...: one name per leaf, for files and messages

All functions except those with names also accept lists, dicts and None (which has no leaves).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar

from torch import Tensor

StateT = TypeVar("StateT")
CONTAINERS = (tuple, list, dict)


def leaves(state: Any) -> list[Tensor]:
    """Return the tensors of a state, depth first."""
    if not isinstance(state, CONTAINERS):
        return [] if state is None else [state]
    tensors = []
    for part in state.values() if isinstance(state, dict) else state:
        if isinstance(part, Tensor):
            tensors.append(part)
        else:
            tensors += leaves(part)
    return tensors


def rebuild(like: StateT, tensors: Iterable[Any]) -> StateT:
    """Return a state with the fields of ``like`` whose leaves are ``tensors``, in the same order.

    >>> from typing import NamedTuple
    >>> class Point(NamedTuple):
    ...     x: float
    ...     y: float
    >>> rebuild(Point(0, Point(0, 0)), [1, 2, 3])
    Point(x=1, y=Point(x=2, y=3))
    """
    rest = iter(tensors)
    try:
        state: StateT = _rebuild(like, rest)
    except StopIteration:
        raise ValueError("there are fewer tensors than leaves") from None
    if next(rest, rest) is not rest:
        raise ValueError("there are more tensors than leaves")
    return state


def _rebuild(like: Any, rest: Iterator[Any]) -> Any:
    if not isinstance(like, CONTAINERS):
        return None if like is None else next(rest)
    if isinstance(like, dict):
        return {key: _rebuild(part, rest) for key, part in like.items()}
    parts = [next(rest) if isinstance(part, Tensor) else _rebuild(part, rest) for part in like]
    return type(like)(*parts) if hasattr(like, "_fields") else type(like)(parts)


def map_leaves(function: Callable[..., Any], state: StateT, *others: Any) -> StateT:
    """Apply a function to each leaf of a state, together with the same leaf of the other states."""
    columns = zip(leaves(state), *map(leaves, others), strict=True)
    return rebuild(state, [function(*column) for column in columns])


def skeleton(state: StateT) -> StateT:
    """Return the state without its tensors, for a later ``rebuild``."""
    return map_leaves(lambda _: 0, state)


def names(state: Any, prefix: str = "") -> list[str]:
    """Return one name per leaf: ``prefix``, the names of the states around it, and its own."""
    result: list[str] = []
    for field, value in zip(state._fields, state, strict=True):
        name = f"{prefix}.{field}" if prefix else field
        result += names(value, name) if isinstance(value, tuple) else [name]
    return result


def named_leaves(state: Any, prefix: str = "") -> dict[str, Tensor]:
    """Return the leaves by their ``names``."""
    return dict(zip(names(state, prefix), leaves(state), strict=True))


def from_names(like: StateT, tensors: Mapping[str, Tensor], prefix: str = "") -> StateT:
    """Return a state with the fields of ``like``, from tensors by name; the inverse of ``named_leaves``."""
    return rebuild(like, [tensors[name] for name in names(like, prefix)])


def other_types(state: Any, like: Any) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Yield the leaves of a state whose type or shape is not that of the same leaf of another state."""
    for name, tensor, expected in zip(names(like), leaves(state), leaves(like), strict=True):
        if (tensor.dtype, tensor.shape) != (expected.dtype, expected.shape):
            yield name, tensor, expected
