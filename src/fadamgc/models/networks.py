"""The multilayer perceptron, and convolutional and residual networks for small images and for signals."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from itertools import pairwise
from typing import Literal, TypeAlias

from torch import Tensor, nn
from torch.nn import functional as F

from fadamgc.errors import INT64_MAX, counts, listed, not_accepted, whole
from fadamgc.runtime import seeded

Norm: TypeAlias = Literal["group", "batch"]


def mlp(inputs: int, hidden: Sequence[int], outputs: int, seed: int) -> nn.Module:
    """Make linear layers with ReLU between them, with torch's default initialisation.

    Args:
        inputs: numbers per sample; samples of any shape are flattened.
        hidden: widths of the hidden layers; an empty list gives a linear model.
        outputs: number of outputs, such as classes.
        seed: the same seed gives the same initial weights.

    >>> sum(p.numel() for p in mlp(64, [64], 10, seed=0).parameters())
    4810
    """
    if (widths := listed(hidden)) is None:
        raise not_accepted("hidden", hidden, "a list of widths")
    for width in widths:
        counts(hidden=width)
    layers: list[nn.Module] = [nn.Flatten()]
    with _initialised(seed, inputs=inputs, outputs=outputs):
        for a, b in pairwise([inputs, *widths, outputs]):
            layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


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
    counts(widths=b)
    whole("side", side, 4, INT64_MAX)
    with _initialised(seed, channels=channels, outputs=outputs, widths=a):
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
    whole("side", side, 4, INT64_MAX)
    with _initialised(seed, channels=channels, outputs=outputs, width=width):
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
    layers: list[nn.Module] = []
    with _initialised(seed, channels=channels, outputs=outputs, width=width):
        for a, b in pairwise((channels, width, 2 * width)):
            convolution = nn.Conv1d(a, b, kernel_size=5, padding=2, bias=False)
            layers += [convolution, nn.GroupNorm(_groups(b), b), nn.ReLU(), nn.MaxPool1d(4)]
        return nn.Sequential(*layers, nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.Linear(2 * width, outputs))


def _groups(channels: int) -> int:
    """Return the number of groups: at most 8, with at least 4 channels each."""
    return next(g for g in (8, 4, 2, 1) if channels % g == 0 and (g == 1 or channels // g >= 4))


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Norm) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = _norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, outputs)
        self.around: nn.Module = nn.Identity()  # the shortcut; its name is part of saved runs
        if stride != 1 or inputs != outputs:
            convolution = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)
            self.around = nn.Sequential(convolution, _norm(norm, outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.around(x))


def resnet18(
    channels: int = 3, outputs: int = 10, norm: Norm = "group", width: int = 64, *, seed: int
) -> nn.Module:
    """Make a ResNet-18 whose first layer is a 3x3 convolution of stride 1, without pooling (the CIFAR stem).

    Args:
        channels: colour channels of an image.
        outputs: number of outputs, such as classes.
        norm: "group" (at most 32 groups; no statistics to average over clients) or "batch".
        width: channels of the first stage; each stage has twice as many as the previous one.
        seed: the same seed gives the same initial weights.

    References:
        He et al. 2016, Deep Residual Learning for Image Recognition.

    >>> sum(p.numel() for p in resnet18(seed=0).parameters())
    11173962
    """
    return _resnet((2, 2, 2, 2), channels, outputs, norm, width, seed)


def resnet8(
    channels: int = 3, outputs: int = 10, norm: Norm = "group", width: int = 16, *, seed: int
) -> nn.Module:
    """Make a small residual network: three stages of one block each; the arguments are those of ``resnet18``.

    >>> sum(p.numel() for p in resnet8(seed=0).parameters())
    78042
    """
    return _resnet((1, 1, 1), channels, outputs, norm, width, seed)


def _resnet(
    blocks: tuple[int, ...], channels: int, outputs: int, norm: Norm, width: int, seed: int
) -> nn.Module:
    if norm not in ("group", "batch"):
        raise not_accepted("norm", norm, "'group' or 'batch'")
    with _initialised(seed, channels=channels, outputs=outputs, width=width):
        stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        layers: list[nn.Module] = [stem, _norm(norm, width), nn.ReLU()]
        before = width
        for stage, count in enumerate(blocks):
            for number in range(count):
                stride = 2 if stage and not number else 1
                layers.append(Block(before, width << stage, stride, norm))
                before = width << stage
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs))


def _norm(kind: Norm, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    groups = next(g for g in range(min(32, channels), 0, -1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)


def _initialised(seed: int, **sizes: int) -> AbstractContextManager[None]:
    """Check the sizes of a network; its initial weights depend on the seed only in the ``with`` block."""
    counts(**sizes)
    return seeded(whole("seed", seed, 0, INT64_MAX))
