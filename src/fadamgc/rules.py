"""Mathematics that several algorithms share."""

from __future__ import annotations

import torch
from torch import Tensor

from fadamgc.algorithm import Flag

__all__ = ["adam_ratio", "ema", "number", "select"]


def ema(old: Tensor, new: Tensor, beta: float) -> Tensor:
    """Return the exponential moving average beta * old + (1 - beta) * new.

    >>> ema(torch.tensor([1.0]), torch.tensor([3.0]), beta=0.75)
    tensor([1.5000])
    """
    return beta * old + (1 - beta) * new


def adam_ratio(m: Tensor, v: Tensor, eps: float) -> Tensor:
    """Return Adam's direction m / (sqrt(v) + eps); 0 where the denominator is 0, which requires eps = 0.

    >>> adam_ratio(torch.tensor([2.0, 0.0]), torch.tensor([4.0, 0.0]), eps=0)
    tensor([1., 0.])
    """
    if eps > 0:
        return m / (v.sqrt() + eps)
    return torch.where(v > 0, m / v.sqrt(), 0.0)


def select(flag: Flag, yes: Tensor, no: Tensor) -> Tensor:
    """Return ``yes`` if the flag is true, else ``no``; fast executors pass the flag as a tensor.

    >>> select(True, torch.tensor([1.0]), torch.tensor([2.0]))
    tensor([1.])
    """
    if isinstance(flag, bool):
        return yes if flag else no
    return torch.where(flag, yes, no)


def number(x: Tensor, value: float = 0.0) -> Tensor:
    """Return a number as a tensor of shape (1,), of the type and on the device of x.

    >>> number(torch.zeros(5, dtype=torch.float64), 3)
    tensor([3.], dtype=torch.float64)
    """
    return x.new_full((1,), value)
