"""Random numbers of torch's functions from a given generator, also in a thread."""

from __future__ import annotations

from typing import Any

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
        if _takes_generator(func):
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
