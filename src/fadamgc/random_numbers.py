"""Random numbers from given seeds: of torch's functions, also in a thread, and of Datasets."""

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


class DrawFrom(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lets operations of this thread draw from another generator than torch's global one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the operation, with the generator if it draws random numbers."""
        kwargs = dict(kwargs or {})
        if _draws(func, args, kwargs) and not _takes_generator(func):
            name = func._overloadname
            other = "generator" if name == "default" else f"{name}_generator"
            func = getattr(func.overloadpacket, other, func)
            if not _takes_generator(func):
                raise InputError(
                    f"executor='threads' cannot give {func} its own random numbers; use executor='loop'"
                )
        if _takes_generator(func) and kwargs.get("generator") is None:  # an inner DrawFrom has set it
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


_lock = threading.Lock()  # the generators of Python and numpy belong to all threads


@contextmanager
def readers_seeded(seed: int) -> Iterator[None]:
    """Seed the global numbers of Python and numpy, which a Dataset may use, in a ``with`` block."""
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
    """Let a Dataset draw from a seed, with torch's functions too, in any thread."""
    with readers_seeded(seed), DrawFrom(torch.Generator().manual_seed(seed)):
        yield
