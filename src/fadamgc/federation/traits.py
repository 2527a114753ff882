"""Traits of a model that decide how it can be trained, found by trying it or by looking at its layers."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fadamgc.errors import InputError, first_line
from fadamgc.runtime import seeded
from fadamgc.samples import Rows, cast, map_tensors

if TYPE_CHECKING:
    from fadamgc.federation.client_data import ClientData, ClientTable
    from fadamgc.federation.functions import Buffers, TaskFunctions

log = logging.getLogger("fadamgc")

NORM_LAYERS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def changing_buffers(module: nn.Module, inputs: Any, device: torch.device) -> set[str]:
    """Return the names of the buffers that a forward pass in training mode changes.

    If it changes one buffer of a layer, all buffers of the layer count: some data leave one of BatchNorm's
    statistics unchanged by chance.
    """
    before = {name: value.clone() for name, value in module.named_buffers()}
    if not before:
        return set()
    after = {name: value.clone() for name, value in before.items()}
    with seeded(0, device), torch.no_grad():
        functional_call(module, after, (map_tensors(torch.clone, inputs),))
    owners = {name.rpartition(".")[0] for name, was in before.items() if not torch.equal(was, after[name])}
    return {name for name in before if name.rpartition(".")[0] in owners}


def statistics_of_layers(module: nn.Module) -> set[str]:
    """Return the names of the running statistics of torch's normalization layers.

    Training changes them, whatever the data; buffers of other layers can be found only by trying.
    """
    return {
        f"{name}.{buffer}" if name else buffer
        for name, layer in module.named_modules()
        if isinstance(layer, NORM_LAYERS)
        for buffer, _ in layer.named_buffers(recurse=False)
    }


def has_slow_blocks(module: nn.Module) -> bool:
    """Whether the model has layers for which a block of clients at once gains nothing on a CPU."""
    slow = (nn.modules.conv._ConvNd, nn.RNNBase)
    return any(isinstance(layer, slow) for layer in module.modules())


def fits_channels_last(module: nn.Module) -> bool:
    """Whether a model has convolutions, all of which can run with their channels last.

    Not all can: the gradient of a 1x1 convolution with a stride and very few input channels (seen with 3
    and 4, torch 2.13 on a CPU) writes beyond its memory, and the process dies. 16 is on the safe side.
    """
    convolutions = [layer for layer in module.modules() if isinstance(layer, nn.Conv2d)]
    return bool(convolutions) and not any(
        c.kernel_size == (1, 1) and c.stride != (1, 1) and c.in_channels < 16 for c in convolutions
    )


def check_batchable(functions: TaskFunctions) -> None:
    """Refuse a model that cannot be batched over clients, before the first round."""
    x = functions.x0.expand(2, -1)
    buffers = {name: value.expand(2, *value.shape) for name, value in functions.buffers0.items()}
    if not all(isinstance(part, Tensor) for part in functions.sample):
        raise InputError(
            "executor='vectorized' needs inputs and targets that are tensors; use executor='loop'"
        )
    inputs, targets = (torch.stack([part, part]) for part in functions.sample)

    def loss(x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> Tensor:
        buffers = {name: value.clone() for name, value in buffers.items()}
        return functions.loss(x, buffers, inputs, targets, functions.fixed)

    try:
        vmap(grad(loss), randomness="error")(x, buffers, inputs, targets)
    except Exception as error:
        model = type(functions.task.model).__name__
        raise InputError(
            f"executor='vectorized' cannot run model={model}: {first_line(error)}; use executor='loop'"
        ) from error


def is_samplewise(functions: TaskFunctions, clients: ClientTable) -> bool:
    """Whether the loss of a batch is the mean of the losses of its samples, for any parameters.

    Tried in float64 away from the initial model (where many losses agree by accident), by gradients, on
    samples that have all labels. In doubt the answer is no, which costs speed only.
    """
    if functions.buffers0:  # statistics over a batch
        return False
    data = clients.together()._replace(dtype=torch.float64)
    inputs, targets = data.batch(_varied_positions(data))
    fixed = {name: cast(value, torch.float64, functions.device) for name, value in functions.fixed.items()}
    random = torch.Generator().manual_seed(0)
    whole_gradient = grad(lambda x: functions.loss(x, {}, inputs.clone(), targets, fixed))
    mean_gradient = grad(lambda x: functions.sample_losses(x, {}, inputs.clone(), targets, fixed).mean())
    try:
        for scale in (0.1, 0.5):
            noise = torch.randn(functions.flat.d, generator=random, dtype=torch.float64)
            x = functions.x0.double() + scale * noise.to(functions.device)
            whole, single = whole_gradient(x), mean_gradient(x)
            if not torch.allclose(whole, single, rtol=1e-6, atol=1e-9 * float(whole.abs().max())):
                return False
    except Exception as error:
        log.info("executor vectorized: batches are not padded (%s)", error)
        return False
    return True


def _varied_positions(data: ClientData) -> NDArray[np.int64]:
    """Return positions of every label (the extreme ones, if there are very many), and some more."""
    assert isinstance(data.samples, Rows)
    total = data.size
    targets = data.samples.targets[torch.from_numpy(data.samples.index).to(data.device)]
    rows = set(torch.linspace(0, total - 1, min(16, total)).long().tolist())
    if not targets.is_floating_point():
        flat = targets.reshape(total, -1)
        values = flat.unique()  # type: ignore[no-untyped-call]
        labels = values if len(values) <= 256 else torch.cat([values[:128], values[-128:]])
        rows |= {int((flat == value).any(dim=1).nonzero()[0]) for value in labels}
    return np.array(sorted(rows))


def same_model(first: TaskFunctions, second: TaskFunctions, inputs: Any, targets: Any) -> bool:
    """Whether two tasks have the same model and loss, so that only data and weights differ.

    Modules with the same description may still behave differently, which shows in their losses on a batch.
    """
    if first is second:
        return True
    same = (
        first.task.loss is second.task.loss
        and first.task.transform is second.task.transform
        and (first.flat, first.dtype, first.device) == (second.flat, second.dtype, second.device)
        and first.computing == second.computing
        and repr(first.module) == repr(second.module)
        and first.buffers0.keys() == second.buffers0.keys()
        and first.fixed.keys() == second.fixed.keys()
        and all(torch.equal(value, second.fixed[name]) for name, value in first.fixed.items())
        and all(isinstance(part, Tensor) for part in (*first.sample, *second.sample))
        and all(a.shape[1:] == b.shape[1:] for a, b in zip(first.sample, second.sample, strict=True))
    )
    if not same or first.random or second.random:
        return False
    with torch.no_grad():
        losses = [f.loss(first.x0, first.fresh_buffers(), inputs.clone(), targets) for f in (first, second)]
    return torch.equal(*losses)
