"""Recorded and compiled graphs, and algorithms whose numbers are inputs of a graph.

``record`` writes down the tensor operations of a function once, so that running them again costs no work
in Python; ``compiled`` turns such a record into machine code where a C++ compiler is there.
"""

from __future__ import annotations

import copy
import dataclasses
import logging
import os
import shutil
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from fadamgc.algorithm import AnyAlgorithm, example

log = logging.getLogger("fadamgc")

Function = Callable[..., Any]
KEPT = 64  # compiled graphs that a process keeps


def liftable(algorithm: AnyAlgorithm) -> tuple[str, ...]:
    """The numbers of an algorithm that its rules only calculate with, so that a tensor may stand in.

    A number that a rule looks at (``if self.eps > 0``) cannot be one of them. Found by trying, on
    tensors that have no values and so refuse to be looked at.
    """
    names = []
    for field in dataclasses.fields(algorithm):
        value = getattr(algorithm, field.name)
        if isinstance(value, float) or (isinstance(value, int) and not isinstance(value, bool)):
            stand_in = torch.empty((), dtype=torch.float64, device="meta")
            try:
                example(lifted(algorithm, {field.name: stand_in}), torch.empty(2, device="meta"))
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
        # Copies, because two arguments that are the same tensor would be recorded as one.
        graph: Function = make_fx(function)(*(a.clone() for a in arguments))
    except Exception as error:
        # What vmap can do and the recorder cannot still runs, only slower.
        log.info("not recorded as a graph (%s)", error)
        return function
    return graph


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


@cache
def compiler() -> str | None:
    """The C++ compiler that torch would use, or None."""
    given = os.environ.get("CXX")
    return next((c for c in (given, "g++", "clang++") if c and shutil.which(c)), None)


_compiled: dict[Any, Function] = {}


def compiled(graph: Function, arguments: Sequence[Tensor]) -> Function:
    """The graph as machine code for arguments like these, or the graph where that cannot be had.

    The code of a graph serves all runs of the process, and torch keeps it on disk for later ones. It
    computes with one thread.
    """
    if not isinstance(graph, GraphModule) or compiler() is None:
        return graph
    if any(node.op == "get_attr" for node in graph.graph.nodes):  # constants of its own
        return _compile(graph, arguments)
    layout = tuple((a.shape, a.stride(), a.dtype, a.device) for a in arguments)
    key = (graph.code, layout)
    if key not in _compiled:
        while len(_compiled) >= KEPT:
            del _compiled[next(iter(_compiled))]
        _compiled[key] = _compile(graph, arguments)
    return _compiled[key]


def _compile(graph: GraphModule, arguments: Sequence[Tensor]) -> Function:
    import torch._inductor

    options = {"cpp.threads": 1, "compile_threads": 1, "cpp_wrapper": True, "size_asserts": False}
    for node in graph.graph.nodes:
        node.meta.clear()  # the compiler finds shapes itself, and stumbles over the recorder's
    try:
        log.info("compiling a graph of %d operations", len(graph.graph.nodes))
        code: Function = torch._inductor.compile(graph, [a.clone() for a in arguments], options=options)
    except Exception as error:
        log.warning("a graph is not compiled, which costs speed: %s", str(error).strip().splitlines()[0])
        return graph
    return code
