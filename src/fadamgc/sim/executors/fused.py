"""Steps on a GPU whose operations ``torch.compile`` fuses into few kernels."""

from __future__ import annotations

import importlib.util
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule

from fadamgc.errors import first_line
from fadamgc.sim.executors.machine_code import compile_in_private
from fadamgc.stages import stage

log = logging.getLogger("fadamgc")

DEVICES = {"cuda": "triton"}  # kinds of devices that torch compiles for, and the package that it needs


def can_fuse(device: torch.device) -> bool:
    """Whether steps on a device may be compiled with ``torch.compile``."""
    package = DEVICES.get(device.type)
    return package is not None and importlib.util.find_spec(package) is not None


def fused(graph: Callable[..., Any], arguments: Sequence[Tensor]) -> Callable[..., Any] | None:
    """Compile a recorded step for arguments like these; return None if that fails, which costs only speed."""
    if not isinstance(graph, GraphModule):
        return None
    try:
        with (
            stage("compiling (torch keeps the kernels for later runs)"),
            warnings.catch_warnings(),
            torch.no_grad(),
        ):
            warnings.simplefilter("ignore")  # torch's warnings about torch
            compile_in_private()
            code: Callable[..., Any] = torch.compile(graph.forward, fullgraph=True, dynamic=False)
            ours, theirs = code(*arguments), graph(*arguments)
        for a, b in zip(ours, theirs, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-3 * float(b.abs().max()))
    except Exception as error:  # the compiler may change between versions of torch
        log.warning("a graph is not compiled, which costs speed: %s", first_line(error))
        return None
    return code
