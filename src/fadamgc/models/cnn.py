"""Small convolutional networks for images and for signals."""

from __future__ import annotations

from itertools import pairwise

from torch import nn

from fadamgc.errors import INT64_MAX, counts, whole
from fadamgc.runtime import seeded


def cnn(
    channels: int = 3, side: int = 32, outputs: int = 10, widths: tuple[int, int] = (32, 64), *, seed: int
) -> nn.Module:
    """Make two convolutions with pooling and two linear layers, with torch's default initialisation.

    Args:
        channels: colour channels of an image.
        side: height and width of an image, a multiple of 4.
        outputs: number of outputs, such as classes.
        widths: channels of the two convolutions; the hidden linear layer has eight times the first.
        seed: the same seed gives the same initial weights.

    >>> sum(p.numel() for p in cnn(seed=0).parameters())
    1070794
    """
    a, b = widths
    counts(channels=channels, outputs=outputs, widths=a)
    counts(widths=b)
    whole("side", side, 4, INT64_MAX)
    with seeded(whole("seed", seed, 0, INT64_MAX)):
        return nn.Sequential(
            nn.Conv2d(channels, a, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(a, b, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(b * (side // 4) ** 2, 8 * a),
            nn.ReLU(),
            nn.Linear(8 * a, outputs),
        )


def convnet(channels: int = 3, side: int = 32, outputs: int = 10, width: int = 16, *, seed: int) -> nn.Module:
    """Make two strided convolutions with group norm and a linear layer: a fast network for its accuracy.

    ``width`` is the number of channels of the first convolution; the second has twice as many. The other
    arguments are those of ``cnn``.

    >>> sum(p.numel() for p in convnet(side=16, seed=0).parameters())
    10602
    """
    counts(channels=channels, outputs=outputs, width=width)
    whole("side", side, 4, INT64_MAX)
    with seeded(whole("seed", seed, 0, INT64_MAX)):
        return nn.Sequential(
            nn.Conv2d(channels, width, kernel_size=4, stride=2, padding=1, bias=False),
            nn.GroupNorm(_groups(width), width),
            nn.ReLU(),
            nn.Conv2d(width, 2 * width, kernel_size=3, stride=2, padding=1, bias=False),
            nn.GroupNorm(_groups(2 * width), 2 * width),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(2 * width * (side // 4) ** 2, outputs),
        )


def cnn1d(channels: int = 9, outputs: int = 6, width: int = 16, *, seed: int) -> nn.Module:
    """Make two convolutions over time with group norm and pooling, a mean over time and a linear layer.

    ``channels`` is the number of signals. The other arguments are those of ``convnet``.

    >>> sum(p.numel() for p in cnn1d(seed=0).parameters())
    3574
    """
    counts(channels=channels, outputs=outputs, width=width)
    with seeded(whole("seed", seed, 0, INT64_MAX)):
        layers: list[nn.Module] = []
        for a, b in pairwise((channels, width, 2 * width)):
            layers += [
                nn.Conv1d(a, b, kernel_size=5, padding=2, bias=False),
                nn.GroupNorm(_groups(b), b),
                nn.ReLU(),
                nn.MaxPool1d(4),
            ]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2 * width, outputs))


def _groups(channels: int) -> int:
    """Return the number of groups: at most 8, with at least 4 channels each."""
    return next(g for g in (8, 4, 2, 1) if channels % g == 0 and (g == 1 or channels // g >= 4))
