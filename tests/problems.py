"""Small tasks that the tests share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import fadamgc
from fadamgc.data import synthetic

# One algorithm for each shape of a state, for tests of layers that do not know the algorithm: vectors, with a
# gradient to start from; a number among the vectors, and full participation; nothing.
REPRESENTATIVES = {
    "fadamgc": fadamgc.FAdamGC(init="gradient"),
    "fa_nt_local": fadamgc.FANTLocal(),
    "fedavg": fadamgc.FedAvg(),
}


def half_squared_error(output: Tensor, target: Tensor) -> Tensor:
    return 0.5 * ((output - target) ** 2).mean()


def linear_task(data: synthetic.Synthetic, x: Tensor | None = None) -> fadamgc.Task:
    """A synthetic problem as a task, with its weights at x (zero if not given)."""
    model = nn.Linear(data.dim, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.zeros(data.dim) if x is None else x)
    test = tuple(torch.cat(column) for column in zip(*data.clients, strict=True))
    return fadamgc.Task(model, half_squared_error, data.clients, (test[0], test[1]), metric="loss")


def mlp(seed: int = 0, *middle: nn.Module) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(5, 8), *middle, nn.Tanh(), nn.Linear(8, 3))


EVEN = (8, 16, 8, 24, 40, 16)  # clients whose batches of 8 are all whole: steps of one shape only


def class_task(
    sizes: Sequence[int] = (3, 20, 7, 16, 40, 9),
    model: nn.Module | None = None,
    seed: int = 0,
    **options: Any,
) -> fadamgc.Task:
    """A classification task whose clients differ in size and in distribution."""
    random = torch.Generator().manual_seed(seed)

    def data(samples: int, shift: float) -> tuple[Tensor, Tensor]:
        x = torch.randn(samples, 5, generator=random) + shift
        y = (x[:, :3] + 0.5 * torch.randn(samples, 3, generator=random)).argmax(dim=1)
        return x, y

    clients = [data(samples, 0.3 * i) for i, samples in enumerate(sizes)]
    return fadamgc.Task(model or mlp(seed), F.cross_entropy, clients, data(50, 0.5), **options)


def settings_for(algorithm: Any, n: int, sampled: int = 3, tracked: int = 2) -> dict[str, int]:
    """Partial participation where the algorithm allows it."""
    if algorithm.full_participation:
        return {"sampled": n, "tracked": n}
    return {"sampled": sampled, "tracked": tracked}
