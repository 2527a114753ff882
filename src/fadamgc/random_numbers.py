"""Seeded random numbers: of torch's functions, in any thread, and of Datasets."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fadamgc.errors import InputError

# These functions take no generator in torch 2.6; filling a tensor draws the same numbers, and takes one.
FILL: dict[Any, Any] = {
    torch.ops.aten.rand_like: torch.Tensor.uniform_,
    torch.ops.aten.randn_like: torch.Tensor.normal_,
}


class DrawFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Makes operations of this thread draw from ``generator`` instead of torch's global generator."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, with the generator if it draws random numbers."""
        kwargs = dict(kwargs or {})
        if _draws(func, args, kwargs) and not _takes_generator(func):
            if (fill := FILL.get(func.overloadpacket)) is not None:
                return fill(torch.empty_like(args[0], **kwargs), generator=self.generator)
            name = func._overloadname
            other = "generator" if name == "default" else f"{name}_generator"
            func = getattr(func.overloadpacket, other, func)
            if not _takes_generator(func):
                raise InputError(
                    f"executor='threads' cannot give {func} its own random numbers; use executor='loop'"
                )
        if _takes_generator(func) and kwargs.get("generator") is None:  # else set by an inner DrawFrom
            kwargs["generator"] = self.generator
        return func(*args, **kwargs)


def _draws(func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operation draws random numbers; attention without dropout does not, although it could."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            dropout = args[place] if place < len(args) else kwargs.get("dropout_p", argument.default_value)
            return bool(dropout != 0.0)
    return True


def _takes_generator(func: Any) -> bool:
    return any(argument.name == "generator" for argument in func._schema.arguments)


_lock = threading.Lock()  # all threads share the generators of Python and numpy


@contextmanager
def readers_seeded(seed: int) -> Iterator[None]:
    """Seed the global generators of Python and numpy, which a Dataset may use, in a ``with`` block."""
    with _lock:
        state, numpy_state = random.getstate(), np.random.get_state()
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(state)
            np.random.set_state(numpy_state)


@contextmanager
def reading_at(seed: int) -> Iterator[None]:
    """Seed Python, numpy and torch for reading a Dataset in a ``with`` block, in any thread."""
    with readers_seeded(seed), DrawFrom(torch.Generator().manual_seed(seed)):
        yield
