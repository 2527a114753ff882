"""A module as one flat vector, with everything that is not optimised kept apart.

x         the trainable parameters, in the order of ``module.parameters()``
buffers   what training changes beside them (BatchNorm statistics): averaged, never corrected
fixed     frozen parameters and buffers that training leaves alone: neither trained nor sent
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fadamgc.errors import InputError


@dataclass(frozen=True)
class Flat:
    """Where each trainable parameter of a module lies in its flat vector."""

    names: tuple[str, ...]
    shapes: tuple[torch.Size, ...]

    @classmethod
    def of(cls, module: nn.Module) -> Flat:
        """The layout of a module's trainable parameters."""
        if any(nn.parameter.is_lazy(p) for p in module.parameters()):
            raise InputError(
                f"model={type(module).__name__} has lazy parameters without a shape; run it once on a batch"
            )
        named = [(name, p.shape) for name, p in module.named_parameters() if p.requires_grad]
        if not named:
            total = sum(p.numel() for p in module.parameters())
            raise InputError(
                f"model={type(module).__name__} has no trainable parameters ({total} frozen ones); "
                "set requires_grad=True on what is to be trained"
            )
        kinds = {p.dtype for p in module.parameters() if p.requires_grad}
        if len(kinds) > 1:
            raise InputError(
                f"model={type(module).__name__} has trainable parameters of types {sorted(map(str, kinds))}; "
                "all must be the same"
            )
        if any(p.device.type == "meta" for p in module.parameters()):
            raise InputError(
                f"model={type(module).__name__} has parameters on the device 'meta', where they have no "
                "values; make it on a real device"
            )
        (kind,) = kinds
        if not kind.is_floating_point:
            raise InputError(
                f"model={type(module).__name__} has trainable parameters of type {kind}; "
                "use a real type such as torch.float32"
            )
        names, shapes = zip(*named, strict=True)
        return cls(names, shapes)

    @property
    def sizes(self) -> list[int]:
        """How many numbers each parameter has."""
        return [math.prod(shape) for shape in self.shapes]

    @property
    def d(self) -> int:
        """How many numbers the flat vector has."""
        return sum(self.sizes)

    def flatten(self, module: nn.Module) -> Tensor:
        """A copy of the module's trainable parameters as one vector."""
        parameters = dict(module.named_parameters())
        return torch.cat([parameters[name].detach().reshape(-1) for name in self.names])

    def unflatten(self, x: Tensor) -> dict[str, Tensor]:
        """Views into x by parameter name; gradients flow through them."""
        pieces = torch.split(x, self.sizes)
        return {
            name: piece.view(shape)
            for name, piece, shape in zip(self.names, pieces, self.shapes, strict=True)
        }

    def copy(self, module: nn.Module) -> nn.Module:
        """A module of its own, whose frozen parameters lie where the other's do."""
        shared: dict[int, nn.Parameter] = {
            id(p): nn.Parameter(p.data, requires_grad=False)
            for name, p in module.named_parameters()
            if name not in self.names
        }
        return copy.deepcopy(module, shared)

    @torch.no_grad()
    def load(self, module: nn.Module, x: Tensor, buffers: Mapping[str, Tensor] | None = None) -> None:
        """Copy x, and buffers if given, into the module."""
        if x.shape != (self.d,):
            raise InputError(f"x of shape {tuple(x.shape)} does not fit a model of {self.d} numbers")
        parameters = dict(module.named_parameters())
        for name, value in self.unflatten(x).items():
            parameters[name].copy_(value)
        own = dict(module.named_buffers())
        for name, value in (buffers or {}).items():
            own[name].copy_(value)
