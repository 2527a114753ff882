"""Clipping and weight decay, which change every local gradient before the algorithm sees it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class GradientOptions(NamedTuple):
    """Clipping by norm, then the gradient of an L2 penalty.

    g = g min(1, clip_norm / |g|)
    g = g + weight_decay x
    """

    clip_norm: float | None = None
    weight_decay: float | None = None

    def adjust(self, x: Tensor, g: Tensor) -> Tensor:
        """Return the gradient that the algorithm sees at x."""
        if self.clip_norm is not None:
            g = g * self._scale(g)
        if self.weight_decay is not None:
            g = g + self.weight_decay * x
        return g

    def adjust_in_place(self, x: Tensor, g: Tensor) -> None:
        """Change g in place to the gradient that the algorithm sees at x."""
        if self.clip_norm is not None:
            g.mul_(self._scale(g))
        if self.weight_decay is not None:
            g.add_(self.weight_decay * x)

    def _scale(self, g: Tensor) -> Tensor:
        scale: Tensor = self.clip_norm / torch.linalg.vector_norm(g).clamp(min=self.clip_norm)
        return scale
