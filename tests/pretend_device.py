"""Two devices that are not the CPU, on a machine that has no others: "pretend:0" and "pretend:1".

Their tensors keep their numbers in the memory of the CPU. Every operation refuses tensors of two devices,
as a GPU would. Each device has its own random numbers. The current device is always the first one.
``install`` changes torch for the whole process: tests run it in another process.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

NAME = "pretend"
DEVICES = 2
BETWEEN_DEVICES = {"copy_", "_to_copy"}
INDEXING = {"index", "index_put", "index_put_"}  # a GPU's tensor may have an index on the CPU
VALUES = {"_local_scalar_dense", "equal"}  # that return a number of Python


class Backend:
    """What torch asks of the module of a device."""

    def __init__(self) -> None:
        self.generators = [torch.Generator() for _ in range(DEVICES)]

    def is_available(self) -> bool:
        return True

    def is_initialized(self) -> bool:
        return True

    def _is_in_bad_fork(self) -> bool:
        return False

    def device_count(self) -> int:
        return DEVICES

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    def current_device(self) -> int:
        return 0

    def get_rng_state(self, device: Any = NAME) -> Tensor:
        return self.generators[index_of(device)].get_state()

    def set_rng_state(self, state: Tensor, device: Any = NAME) -> None:
        self.generators[index_of(device)].set_state(state)

    def manual_seed_all(self, seed: int) -> None:
        for generator in self.generators:
            generator.manual_seed(seed)

    manual_seed = manual_seed_all


def index_of(device: Any) -> int:
    """Return the number of a device; without one, that of the current device."""
    return device if isinstance(device, int) else torch.device(device).index or 0


BACKEND = Backend()


class Pretend(Tensor):
    """A tensor on the device; ``raw`` has its numbers."""

    raw: Tensor

    @staticmethod
    def __new__(cls, raw: Tensor, index: int) -> Pretend:
        made: Pretend = Tensor._make_wrapper_subclass(
            cls,
            raw.shape,
            strides=raw.stride(),
            storage_offset=raw.storage_offset(),
            dtype=raw.dtype,
            device=torch.device(NAME, index),
        )
        made.raw = raw
        return made

    def __init__(self, raw: Tensor, index: int) -> None:
        """Do nothing more."""

    def tolist(self) -> Any:
        return self.raw.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        if id(self) not in memo:
            memo[id(self)] = Pretend(self.raw.clone(), self.device.index)
        return memo[id(self)]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, dict(kwargs or {}))


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operation on the numbers, if all its tensors are on the device."""
    name = func._schema.name.removeprefix("aten::")
    leaves = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
    on_cpu = [t for t in leaves if not isinstance(t, Pretend) and t.dim() > 0]
    indexing = name in INDEXING and isinstance(args[0], Pretend)
    if on_cpu and not indexing and name not in BETWEEN_DEVICES:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got cpu and {NAME}")
    indices = {t.device.index for t in leaves if isinstance(t, Pretend)}
    if len(indices) > 1 and name not in BETWEEN_DEVICES:
        raise RuntimeError(f"Expected all tensors to be on the same device, but {name} got two of {NAME}")
    if name == "copy_" and not isinstance(args[0], Pretend):
        return args[0].copy_(args[1].raw)
    to_cpu = kwargs.get("device") is not None and torch.device(kwargs["device"]).type == "cpu"
    index = min(indices, default=0)
    if kwargs.get("device") is not None:
        index = index_of(kwargs["device"])
        kwargs["device"] = torch.device("cpu")
    owners = {id(t.raw): t for t in leaves if isinstance(t, Pretend)}  # operations in place return their own
    raw_args, raw_kwargs = tree_map_only(Pretend, lambda t: t.raw, (args, kwargs))
    with _drawing_from(BACKEND.generators[index]):
        result = func(*raw_args, **raw_kwargs)
    if to_cpu or name in VALUES:
        return result
    return tree_map_only(Tensor, lambda t: owners[id(t)] if id(t) in owners else Pretend(t, index), result)


@contextmanager
def _drawing_from(generator: torch.Generator) -> Iterator[None]:
    """Let operations that are given no generator draw from this one."""
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(generator.get_state())
        yield
        generator.set_state(torch.get_rng_state())


# Operations that make tensors on a device, or copy between devices in C++.


def _empty(size: Any, dtype: Any = None, device: Any = NAME, **_: Any) -> Tensor:
    return Pretend(torch.empty(size, dtype=dtype or torch.get_default_dtype()), index_of(device))


def _empty_strided(size: Any, stride: Any, dtype: Any = None, device: Any = NAME, **_: Any) -> Tensor:
    raw = torch.empty_strided(size, stride, dtype=dtype or torch.get_default_dtype())
    return Pretend(raw, index_of(device))


def _copy_from(source: Any, to: Any, non_blocking: bool = False) -> Any:
    raw, place = (t.raw if isinstance(t, Pretend) else t for t in (source, to))
    place.copy_(raw, non_blocking=non_blocking)
    return to


def _autocast(op: Any) -> Any:
    """Return an operation that computes in the type of autocast, as it does on other devices."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def lower(*args: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            dtype = torch.get_autocast_dtype(NAME)
            cast = (a.to(dtype) if isinstance(a, Tensor) and a.is_floating_point() else a for a in args)
            return op(*cast)

    return lower


LIBRARIES: list[torch.library.Library] = []  # they last as long as they are referred to


def install() -> torch.device:
    """Tell torch about the devices, for the rest of this process; return the first one."""
    _setup_privateuseone_for_python_backend(NAME, BACKEND)
    library = torch.library.Library("aten", "IMPL")
    library.impl("empty.memory_format", _empty, "PrivateUse1")
    library.impl("empty_strided", _empty_strided, "PrivateUse1")
    library.impl("_copy_from", _copy_from, "PrivateUse1")
    for op in (torch.ops.aten.linear.default, torch.ops.aten.conv1d.default, torch.ops.aten.conv2d.default):
        library.impl(op, _autocast(op), "AutocastPrivateUse1")
    others = torch.library.Library("_", "IMPL")
    others.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")
    LIBRARIES.extend([library, others])
    return torch.device(NAME, 0)
