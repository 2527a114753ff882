"""The trainable parameters of a module as one flat vector x.

x         the trainable parameters, in the order of ``module.parameters()``
buffers   buffers that training changes (BatchNorm's statistics): averaged over clients
fixed     frozen parameters, and buffers that training does not change: neither trained nor sent
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fadamgc.errors import InputError


@dataclass(frozen=True)
class Flat:
    """The layout of a module's trainable parameters in its flat vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Flat:
        """Return the layout of a module's trainable parameters."""
        parameters = list(module.parameters())
        model = f"model={type(module).__name__}"
        if any(nn.parameter.is_lazy(p) for p in parameters):
            raise InputError(f"{model} has lazy parameters without a shape; run it once on a batch")
        trainable = [(key, p) for key, p in module.named_parameters() if p.requires_grad]
        if not trainable:
            frozen = sum(p.numel() for p in parameters)
            raise InputError(
                f"{model} has no trainable parameters ({frozen} frozen ones); set requires_grad=True on "
                "the parameters to train"
            )
        dtypes = {p.dtype for _, p in trainable}
        if len(dtypes) > 1:
            raise InputError(
                f"{model} has trainable parameters of types {sorted(map(str, dtypes))}; use a single type"
            )
        if any(p.device.type == "meta" for p in parameters):
            raise InputError(
                f"{model} has parameters on the device 'meta', where they have no values; use a real device"
            )
        (dtype,) = dtypes
        if not dtype.is_floating_point:
            raise InputError(
                f"{model} has trainable parameters of type {dtype}; use a real type such as torch.float32"
            )
        return cls(tuple(key for key, _ in trainable), tuple(p.shape for _, p in trainable))

    @property
    def sizes(self) -> list[int]:
        """The length of each parameter in the flat vector."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def d(self) -> int:
        """The length of the flat vector."""
        return sum(self.sizes)

    def flatten(self, module: nn.Module) -> Tensor:
        """Return a copy of the module's trainable parameters as one vector."""
        parameters = dict(module.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, x: Tensor) -> dict[str, Tensor]:
        """Return views into x by parameter name; gradients flow through them."""
        pieces = torch.split(x, self.sizes)
        views = (piece.view(shape) for piece, shape in zip(pieces, self.shapes, strict=True))
        return dict(zip(self.names, views, strict=True))

    def copy(self, module: nn.Module) -> nn.Module:
        """Return a copy of a module; frozen parameters stay in the same memory."""
        frozen = [p for name, p in module.named_parameters() if name not in self.names]
        shared: dict[int, Any] = {id(p): nn.Parameter(p.data, requires_grad=False) for p in frozen}
        return copy.deepcopy(module, shared)

    @torch.no_grad()
    def load(self, module: nn.Module, x: Tensor, buffers: Mapping[str, Tensor] | None = None) -> None:
        """Copy x, and buffers if given, into the module."""
        if x.shape != (self.d,):
            raise InputError(f"x of shape {tuple(x.shape)} does not fit a model of {self.d} numbers")
        parameters = dict(module.named_parameters())
        for name, value in self.unflatten(x).items():
            parameters[name].copy_(value)
        module_buffers = dict(module.named_buffers())
        for name, value in (buffers or {}).items():
            module_buffers[name].copy_(value)
