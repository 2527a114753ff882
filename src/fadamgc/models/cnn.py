"""A small convolutional network for pictures."""

from __future__ import annotations

import torch
from torch import nn

from fadamgc.data.partition import check_integer


def cnn(
    channels: int = 3, side: int = 32, outputs: int = 10, widths: tuple[int, int] = (32, 64), *, seed: int
) -> nn.Module:
    """Two convolutions with pooling and two linear layers, in torch's default initialisation.

    Args:
        channels: colour channels of a picture.
        side: its height and width, a multiple of 4.
        outputs: numbers in one output.
        widths: channels of the two convolutions; the hidden linear layer has eight times the first.
        seed: of the initial weights; the same seed gives the same weights.

    >>> sum(p.numel() for p in cnn(seed=0).parameters())
    1070794
    """
    for name, value in (("channels", channels), ("outputs", outputs), ("widths", min(widths))):
        check_integer(name, value, 1)
    check_integer("side", side, 4)
    check_integer("seed", seed, 0)
    a, b = widths
    hidden = 8 * a
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return nn.Sequential(
            nn.Conv2d(channels, a, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(a, b, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(b * (side // 4) ** 2, hidden),
            nn.ReLU(),
            nn.Linear(hidden, outputs),
        )
