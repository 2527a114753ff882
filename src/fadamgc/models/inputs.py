"""The first layer of a network for images: it turns bytes into normalised numbers."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F

BORDER = 8  # an image is shifted by at most side / BORDER pixels


class ImageInput(nn.Module):
    """Normalise images and, in training mode, flip and shift each of them at random.

    Images are stored as bytes until this layer, in a quarter of the memory of floats.

    Args:
        mean: mean of the pixels of each colour; white is 1.
        std: standard deviation of the pixels of each colour.
        augment: "none", "flip" (half of the images, left to right) or "crop-flip" (also shifted by up to
            an eighth of the side, with a border of the mean colour).

    Example:
        >>> images = torch.full((1, 1, 8, 8), 255, dtype=torch.uint8)
        >>> ImageInput(mean=[0.5], std=[0.25])(images).unique()
        tensor([2.])
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Sequence[float], std: Sequence[float], augment: str = "none") -> None:
        super().__init__()
        self.augment = augment
        self.register_buffer("mean", 255 * torch.tensor(mean)[:, None, None], persistent=False)
        self.register_buffer("std", 255 * torch.tensor(std)[:, None, None], persistent=False)

    def _get_name(self) -> str:
        return "ImageInput"  # for all time: it is part of the fingerprints in checkpoints

    def forward(self, images: Tensor) -> Tensor:
        """Return images (n, colours, side, side) as numbers of mean 0 and standard deviation 1."""
        x = (images.to(self.mean.dtype) - self.mean) / self.std
        return self._augmented(x) if self.training and self.augment != "none" else x

    def _augmented(self, x: Tensor) -> Tensor:
        n, _, side, _ = x.shape
        flip = torch.rand(n, device=x.device) < 0.5
        x = torch.where(flip[:, None, None, None], x.flip(-1), x)
        if self.augment == "flip":
            return x
        border = side // BORDER
        padded = F.pad(x, (border,) * 4)
        down, right = (torch.randint(2 * border + 1, (n,), device=x.device) for _ in range(2))
        pixel = torch.arange(side, device=x.device)
        sample = torch.arange(n, device=x.device)[:, None, None]
        rows, columns = (down[:, None] + pixel)[:, :, None], (right[:, None] + pixel)[:, None, :]
        shifted = padded.permute(0, 2, 3, 1)[sample, rows, columns].permute(0, 3, 1, 2)
        last = x.is_contiguous(memory_format=torch.channels_last)
        return shifted.contiguous(memory_format=torch.channels_last if last else torch.contiguous_format)
