"""How a model is computed: in which type its operations run, and how images are stored."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fadamgc.errors import InputError
from fadamgc.federation.traits import fits_channels_last
from fadamgc.samples import map_tensors


class Computing(NamedTuple):
    """Options of the model's forward and backward pass; parameters and gradients keep their type."""

    autocast: str | None = None  # "bf16": operations that allow it run in bfloat16
    channels_last: bool | None = None  # whether images and kernels have their channels last

    def check(self, module: nn.Module, dtype: torch.dtype) -> None:
        """Refuse a model that cannot be computed in this way."""
        if self.autocast is not None and dtype != torch.float32:
            raise InputError(f"autocast={self.autocast!r} needs dtype=torch.float32, the model has {dtype}")
        if self.channels_last and not fits_channels_last(module):
            raise InputError(
                "channels_last=True needs a model with 2D convolutions, without 1x1 convolutions that have a "
                "stride and fewer than 16 input channels; omit it"
            )

    def context(self, device: torch.device) -> AbstractContextManager[Any]:
        """Return the context in which the model runs."""
        if self.autocast is None:
            return nullcontext()
        # Without the cache, which would keep the casts of parameters that change in every step.
        return torch.autocast(device.type, torch.bfloat16, cache_enabled=False)

    def arranged(self, inputs: Any) -> Any:
        """Return inputs, or parameters, in the layout in which the model runs."""
        return map_tensors(_channels_last, inputs) if self.channels_last else inputs

    def output(self, output: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the output of a model in the type that losses and metrics are computed in."""
        return output.to(dtype) if self.autocast is not None and output.is_floating_point() else output


PLAIN = Computing()


def _channels_last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last) if tensor.ndim == 4 else tensor
