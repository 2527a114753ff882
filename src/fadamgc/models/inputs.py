"""The first layer of a network for pictures: bytes in, normalised numbers out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BORDER = 8  # a picture is moved by up to an eighth of its side


class PictureInput(nn.Module):
    """Normalises pictures, and while training may flip and move them, each in its own way.

    Pictures stay bytes until here, which takes a quarter of the memory.

    Args:
        mean: of the pixels of each colour, as shares of white.
        std: their standard deviation.
        augment: "none", "flip" (left and right, half of the pictures) or "crop-flip" (also moved by up to
            an eighth of the side, with black around).
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], augment: str = "none") -> None:
        super().__init__()
        self.augment = augment
        self.register_buffer("mean", 255 * torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std)[:, None, None], persistent=False)

    def forward(self, pictures: Tensor) -> Tensor:
        """Pictures (n, colours, side, side) as numbers of mean 0 and standard deviation 1."""
        x = (pictures.to(self.mean.dtype) - self.mean) / self.std
        if self.training and self.augment != "none":
            x = self._changed(x)
        return x

    def _changed(self, x: Tensor) -> Tensor:
        n, _, side, _ = x.shape
        flip = torch.rand(n, device=x.device) < 0.5
        x = torch.where(flip[:, None, None, None], x.flip(-1), x)
        if self.augment == "flip":
            return x
        border = side // BORDER
        padded = F.pad(x, (border,) * 4)
        down, right = (torch.randint(2 * border + 1, (n,), device=x.device) for _ in range(2))
        at = torch.arange(side, device=x.device)
        sample = torch.arange(n, device=x.device)[:, None, None]
        rows, columns = (down[:, None] + at)[:, :, None], (right[:, None] + at)[:, None, :]
        moved = padded.permute(0, 2, 3, 1)[sample, rows, columns].permute(0, 3, 1, 2)
        last = x.is_contiguous(memory_format=torch.channels_last)
        return moved.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
