"""Residual networks with the stem for small pictures."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn
from torch.nn import functional as F

from fadamgc.data.partition import check_integer
from fadamgc.errors import InputError
from fadamgc.runtime import seeded

GROUPS = 32


class Block(nn.Module):
    """Two 3x3 convolutions and a way around them."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: str) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = _norm(norm, outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = _norm(norm, outputs)
        self.around: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.around = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), _norm(norm, outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """The block's output."""
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
    """ResNet-18 whose first layer is a 3x3 convolution of stride 1, without pooling (the CIFAR stem).

    Args:
        channels: colour channels of a picture.
        outputs: numbers in one output.
        norm: "group" (32 groups, or one a channel where there are fewer; no state to average between
            clients) or "batch".
        width: channels of the first stage; each later stage has twice those of the one before.
        seed: of the initial weights; the same seed gives the same weights.

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
    """A residual network of laptop size: three stages of one block each, with the CIFAR stem.

    Args:
        channels: colour channels of a picture.
        outputs: numbers in one output.
        norm: "group" or "batch", as in ``resnet18``.
        width: channels of the first stage; each later stage has twice those of the one before.
        seed: of the initial weights; the same seed gives the same weights.

    >>> sum(p.numel() for p in resnet8(seed=0).parameters())
    78042
    """
    return _resnet((1, 1, 1), channels, outputs, norm, width, seed)


def _resnet(
    blocks: tuple[int, ...], channels: int, outputs: int, norm: str, width: int, seed: int
) -> nn.Module:
    for name, value in (("channels", channels), ("outputs", outputs), ("width", width)):
        check_integer(name, value, 1)
    check_integer("seed", seed, 0)
    if norm not in ("group", "batch"):
        raise InputError(f"norm={norm!r} is not accepted; it must be 'group' or 'batch'")
    with seeded(seed):
        layers: list[nn.Module] = [
            nn.Conv2d(channels, width, 3, padding=1, bias=False),
            _norm(norm, width),
            nn.ReLU(),
        ]
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
