"""Which models can be batched over clients, and whether their batches may be padded."""

from __future__ import annotations

import logging

import torch
from torch import Tensor
from torch.func import grad, vmap

from fadamgc.errors import InputError
from fadamgc.federation.problem import Buffers, Problem
from fadamgc.task import cast

log = logging.getLogger("fadamgc")


def check_batchable(problem: Problem) -> None:
    """Say now, and not in the first round, that a model cannot be batched over clients."""
    client = int(problem.size.argmax())
    start = int(problem.start[client])
    rows = torch.arange(start, start + min(2, int(problem.size[client])), device=problem.device)
    twice = torch.stack([rows, rows])
    x = problem.x0.expand(2, -1)
    buffers = {name: value.expand(2, *value.shape) for name, value in problem.buffers0.items()}
    pair = problem.inputs[twice], problem.targets[twice]

    def loss(x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Tensor:
        buffers = {name: value.clone() for name, value in buffers.items()}
        return problem.loss(x, buffers, inputs, targets, problem.fixed)

    try:
        vmap(grad(loss), randomness="error")(x, buffers, *pair)
    except Exception as error:
        reason = str(error).strip().splitlines()[0]
        raise InputError(
            f"executor='vectorized' cannot run model={type(problem.task.model).__name__}: {reason}; "
            "use executor='loop'"
        ) from error


def is_samplewise(problem: Problem) -> bool:
    """Whether the loss of a batch is the mean of the losses of its samples, whatever the parameters.

    Tried in float64 away from the initial model (where many losses agree by accident), by gradients,
    on samples that have all the labels there are. If in doubt the answer is no, which costs speed.
    """
    if problem.buffers0:  # statistics over a batch
        return False
    rows = _varied_rows(problem.targets)
    inputs, targets = (
        cast(data[rows], torch.float64, problem.device) for data in (problem.inputs, problem.targets)
    )
    fixed = {name: cast(value, torch.float64, problem.device) for name, value in problem.fixed.items()}
    random = torch.Generator().manual_seed(0)

    def gradients(x: Tensor) -> tuple[Tensor, Tensor]:
        whole = grad(lambda x: problem.loss(x, {}, inputs.clone(), targets, fixed))(x)
        alone = grad(lambda x: problem.sample_losses(x, {}, inputs.clone(), targets, fixed).mean())(x)
        return whole, alone

    try:
        for scale in (0.1, 0.5):
            noise = torch.randn(problem.flat.d, generator=random, dtype=torch.float64)
            x = problem.x0.double() + scale * noise.to(problem.device)
            whole, alone = gradients(x)
            if not torch.allclose(whole, alone, rtol=1e-6, atol=1e-9 * float(whole.abs().max())):
                return False
    except Exception as error:
        log.info("executor vectorized: batches are not padded (%s)", error)
        return False
    return True


def _varied_rows(targets: Tensor) -> Tensor:
    """Rows that have among them every label (the extreme ones, if there are very many), and some more."""
    total = len(targets)
    rows = set(torch.linspace(0, total - 1, min(16, total)).long().tolist())
    if not targets.is_floating_point():
        flat = targets.reshape(total, -1)
        values = flat.unique()  # type: ignore[no-untyped-call]
        some = values if len(values) <= 256 else torch.cat([values[:128], values[-128:]])
        rows |= {int((flat == value).any(dim=1).nonzero()[0]) for value in some}
    return torch.tensor(sorted(rows), device=targets.device)
