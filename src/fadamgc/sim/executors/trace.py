"""Recorded graphs, and algorithms whose numbers are inputs of a graph.

``record`` records the tensor operations of a function once, so that running them again costs little work in
Python. ``machine_code`` compiles such a graph.
"""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.hyperparameters import is_rule, numbers, with_values
from fadamgc.tree import leaves, rebuild, skeleton

log = logging.getLogger("fadamgc")

REMEMBERED = 1000  # algorithms whose kind is remembered

Function = Callable[..., Any]
_one_at_a_time = threading.Lock()  # torch.fx replaces methods of nn.Module for all threads while it records


class Hidden(Tensor):
    """A tensor that supports arithmetic, but raises if its value or any derived value is inspected."""

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("its value is not known")

    __bool__ = __float__ = __int__ = __index__ = __complex__ = __len__ = __iter__ = _refuse
    __array__ = item = tolist = numpy = _refuse  # type: ignore[assignment]


def liftable(algorithm: AnyAlgorithm) -> tuple[str, ...]:
    """Return the names of those numbers of an algorithm that tensors may replace in its rules.

    The rules only calculate with such a number; they do not inspect it (``if self.eps > 0``). This is found
    by trying the rules on tensors that refuse to be inspected.
    """
    names = []
    for name, value in numbers(algorithm).items():
        stand_in = torch.tensor(float(value), dtype=torch.float64).as_subclass(Hidden)
        try:
            example(with_values(algorithm, {name: stand_in}), torch.zeros(2))
        except Exception as error:  # a rule may do anything with a number that it inspects
            log.debug("%s.%s is a constant of its graph (%s)", algorithm, name, error)
        else:
            names.append(name)
    return tuple(names)


class Kind(NamedTuple):
    """The part of an algorithm that equal graphs have in common: everything except lifted numbers."""

    lifted_names: tuple[str, ...]
    description: Hashable


class Kinds:
    """Finds the kinds of algorithms, and remembers them: step sizes of a grid or a schedule are one kind."""

    def __init__(self) -> None:
        self._of: dict[AnyAlgorithm, Kind] = {}
        self._alike: dict[Hashable, set[Kind]] = {}  # kinds that differ in numbers only

    def of(self, algorithm: AnyAlgorithm) -> Kind:
        """Return the kind of an algorithm."""
        if algorithm not in self._of:
            if len(self._of) >= REMEMBERED:
                self._of.clear()
            self._of[algorithm] = self._find(algorithm)
        return self._of[algorithm]

    def changes(self, algorithm: AnyAlgorithm, varying: Sequence[str]) -> bool:
        """Whether a varying number is a constant of its graph, so that compiling cannot pay."""
        constants = set(varying).difference(self.of(algorithm).lifted_names)
        if constants:
            names = ", ".join(sorted(constants))
            log.info("not compiled: the rules of %s inspect %s, which follows a schedule", algorithm, names)
        return bool(constants)

    def _find(self, algorithm: AnyAlgorithm) -> Kind:
        alike = self._alike.setdefault(_without(algorithm, tuple(numbers(algorithm))), set())
        for kind in alike:
            if _without(algorithm, kind.lifted_names) == kind.description:
                return kind
        names = liftable(algorithm)
        kind = Kind(names, _without(algorithm, names))
        alike.add(kind)
        return kind


def _without(algorithm: AnyAlgorithm, names: Sequence[str]) -> Hashable:
    """Return an algorithm without some of its numbers, as a value that can be compared."""
    return _description(with_values(algorithm, dict.fromkeys(names)))


def _description(value: Any) -> Hashable:
    if is_rule(value):
        fields = [field for field in dataclasses.fields(value) if not field.metadata.get("internal")]
        return type(value), *((field.name, _description(getattr(value, field.name))) for field in fields)
    try:
        hash(value)
    except TypeError:
        return repr(value)
    return type(value), value  # 1, 1.0 and True are equal, but have different types


def flat_function(function: Function, arguments: tuple[Any, ...]) -> Callable[..., list[Tensor]]:
    """Return a function of the tensors in the arguments that returns the tensors in the result."""
    like = skeleton(arguments)
    return lambda *tensors: leaves(function(*rebuild(like, tensors)))


def record(function: Function, arguments: Sequence[Tensor]) -> Function:
    """Record the operations of a function of tensors as a graph; return the function if that fails."""
    try:
        with _one_at_a_time:
            # Copies, because two arguments that are the same tensor would be recorded as one.
            graph: Function = make_fx(function)(*(a.clone() for a in arguments))
    except Exception as error:  # the function still runs, only slower
        log.info("not recorded as a graph (%s)", error)
        return function
    return graph


def pointwise(graph: Function) -> bool:
    """Whether each number of a graph's outputs depends only on the inputs' numbers at the same position."""
    if not isinstance(graph, GraphModule):
        return False
    aten = torch.ops.aten
    harmless = (aten.zeros_like.default, aten.clone.default, aten.detach.default)
    return all(
        isinstance(node.target, torch._ops.OpOverload)
        and (torch.Tag.pointwise in node.target.tags or node.target in harmless)
        for node in graph.graph.nodes
        if node.op not in ("placeholder", "output")
    )
