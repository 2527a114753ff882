"""Recorded graphs, and algorithms whose numbers are inputs of a graph.

``record`` writes down the tensor operations of a function once, so that running them again costs no work
in Python. ``native`` turns such a record into machine code.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental import proxy_tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fadamgc.algorithm import AnyAlgorithm, example

log = logging.getLogger("fadamgc")

Function = Callable[..., Any]
_one_at_a_time = threading.RLock()


class Hidden(Tensor):
    """A tensor to calculate with whose values nobody may know, nor those of what comes of it."""

    def _refuse(self, *_: Any) -> Any:
        raise TypeError("its value is not known")

    __bool__ = __float__ = __int__ = __index__ = __complex__ = __len__ = __iter__ = _refuse
    __array__ = item = tolist = numpy = _refuse  # type: ignore[assignment]


def liftable(algorithm: AnyAlgorithm) -> tuple[str, ...]:
    """The numbers of an algorithm that its rules only calculate with, so that a tensor may stand in.

    A number that a rule looks at (``if self.eps > 0``) cannot be one of them. Found by trying, with
    tensors that refuse to be looked at.
    """
    names = []
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
            stand_in = torch.tensor(float(value), dtype=torch.float64).as_subclass(Hidden)
            try:
                example(lifted(algorithm, {field.name: stand_in}), torch.zeros(2))
            except Exception as error:  # whatever a rule does with a number that it wants to know
                log.debug("%s.%s is a constant of its graph (%s)", algorithm, field.name, error)
            else:
                names.append(field.name)
    return tuple(names)


def lifted(algorithm: AnyAlgorithm, values: dict[str, Tensor]) -> AnyAlgorithm:
    """The algorithm with tensors in the place of some of its numbers."""
    twin = copy.copy(algorithm)
    for name, value in values.items():
        object.__setattr__(twin, name, value)
    return twin


def record(function: Function, arguments: Sequence[Tensor]) -> Function:
    """The operations of a function of tensors as a graph; the function itself where that fails."""
    try:
        with _without_shapes():
            # Copies, because two arguments that are the same tensor would be recorded as one.
            graph: Function = make_fx(function)(*(a.clone() for a in arguments))
    except Exception as error:
        # What vmap can do and the recorder cannot still runs, only slower.
        log.info("not recorded as a graph (%s)", error)
        return function
    return graph


@contextmanager
def _without_shapes() -> Iterator[None]:
    """Record without a note of each result's shape: nobody reads it here, and it takes most of the time."""
    here = threading.get_ident()
    with _one_at_a_time:
        original: Function | None = getattr(proxy_tensor, "set_meta", None)
        if original is None:  # another version of torch
            yield
            return

        def set_meta(proxy: Any, value: Any) -> Any:
            return proxy if threading.get_ident() == here else original(proxy, value)

        with patch.object(proxy_tensor, "set_meta", set_meta):
            yield


def pointwise(graph: Function) -> bool:
    """Whether each number of a recorded graph's outputs depends only on the numbers at its own place."""
    if not isinstance(graph, GraphModule):
        return False
    harmless = {
        torch.ops.aten.zeros_like.default,
        torch.ops.aten.clone.default,
        torch.ops.aten.detach.default,
    }
    return all(
        isinstance(node.target, torch._ops.OpOverload)
        and (torch.Tag.pointwise in node.target.tags or node.target in harmless)
        for node in graph.graph.nodes
        if node.op not in ("placeholder", "output")
    )
