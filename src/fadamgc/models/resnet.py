"""Residual networks for small images."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fadamgc.errors import INT64_MAX, counts, not_accepted, whole
from fadamgc.runtime import seeded

GROUPS = 32


class Block(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = _norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, outputs)
        self.around: nn.Module = nn.Identity()  # the shortcut; its name is part of saved runs
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), _norm(norm, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output."""
        hidden = F.relu(self.norm1(self.conv1(x)))
        return F.relu(self.norm2(self.conv2(hidden)) + self.around(x))


def resnet18(
    channels: int = 3,
    outputs: int = 10,
    norm: Literal["group", "batch"] = "group",
    width: int = 64,
    *,
    seed: int,
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
    channels: int = 3,
    outputs: int = 10,
    norm: Literal["group", "batch"] = "group",
    width: int = 16,
    *,
    seed: int,
) -> nn.Module:
    """Make a small residual network: three stages of one block each; the arguments are those of ``resnet18``.

    >>> sum(p.numel() for p in resnet8(seed=0).parameters())
    78042
    """
    return _resnet((1, 1, 1), channels, outputs, norm, width, seed)


def _resnet(
    blocks: tuple[int, ...], channels: int, outputs: int, norm: str, width: int, seed: int
) -> nn.Module:
    counts(channels=channels, outputs=outputs, width=width)
    if norm not in ("group", "batch"):
        raise not_accepted("norm", norm, "'group' or 'batch'")
    with seeded(whole("seed", seed, 0, INT64_MAX)):
        stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        layers: list[nn.Module] = [stem, _norm(norm, width), nn.ReLU()]
        before = width
        for stage, count in enumerate(blocks):
            after = width << stage
            for number in range(count):
                stride = 2 if stage and not number else 1
                layers.append(Block(before, after, stride, norm))
                before = after
        return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, outputs))


def _norm(kind: str, channels: int) -> nn.Module:
    if kind == "batch":
        return nn.BatchNorm2d(channels)
    groups = next(g for g in range(min(GROUPS, channels), 0, -1) if channels % g == 0)
    return nn.GroupNorm(groups, channels)
