"""A task as pure functions of flat vectors, on one device and in one dtype."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call, vmap

from fadamgc.errors import ClientError, InputError, reason, shown
from fadamgc.federation.sampling import EVALUATION, GRADIENT, torch_seed
from fadamgc.flat import Flat
from fadamgc.runtime import seeded
from fadamgc.task import Task, cast

Buffers: TypeAlias = dict[str, Tensor]

CHUNK = 2048  # samples in one forward pass of an evaluation or of a whole-data gradient


class Problem:
    """The functions that executors differentiate and the engine evaluates.

    Attributes:
        dtype: in which outputs, losses and gradients are computed.
        x0: the trainable parameters of the task's model; float32 if ``dtype`` has 16 bits. Algorithms
            compute in the type of x0: in 16 bits, small steps would be lost and y would drift from the mean
            of the y_i.
        buffers0: the buffers that training changes.
        fixed: everything else in the model, by name.
        inputs, targets: the data of all clients, one after the other.
        start, size: where each client's data begin, and how many samples they are.
    """

    def __init__(
        self, task: Task, dtype: torch.dtype | None = None, device: str | torch.device | None = None
    ):
        first = next(p for p in task.model.parameters() if p.requires_grad)
        self.task = task
        self.dtype = dtype or first.dtype
        self.device = first.device
        self.flat = Flat.of(task.model)
        module = self.flat.copy(task.model)
        if dtype is not None:
            module = module.to(dtype=dtype)
        if device is not None:
            try:
                self.device = torch.device(device)
                module = module.to(device=self.device)
            except (RuntimeError, AssertionError, TypeError, ValueError, OverflowError) as error:
                raise InputError(f"device={shown(device)} cannot be used here: {reason(error)}") from error
            if self.device.type == "meta":
                raise InputError("device='meta' cannot be used here: tensors have no values there")
        self.module = module.requires_grad_(False)
        self.x0 = self.flat.flatten(self.module)
        if self.mixed:
            self.x0 = self.x0.float()
        self.inputs, self.targets = (
            torch.cat([cast(pair[part], self.dtype, self.device) for pair in task.pairs]) for part in (0, 1)
        )
        self.size = np.array([len(x) for x, _ in task.pairs], dtype=np.int64)
        self.start = np.concatenate([[0], np.cumsum(self.size)[:-1]])
        self.test: tuple[Tensor, Tensor] | None = None
        if task.test_pair is not None:
            x, y = task.test_pair
            self.test = cast(x, self.dtype, self.device), cast(y, self.dtype, self.device)
        self.module.train()
        moving = self._moving_buffers()
        everything = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self.buffers0: Buffers = {
            name: value.detach().clone() for name, value in everything.items() if name in moving
        }
        self.fixed: Buffers = {
            name: value.detach()
            for name, value in everything.items()
            if name not in self.flat.names and name not in moving
        }

    @property
    def mixed(self) -> bool:
        """Whether algorithms compute in float32 and the model in a 16-bit type."""
        return self.dtype.itemsize == 2

    @property
    def n(self) -> int:
        """How many clients there are."""
        return len(self.size)

    def like(self, other: Problem) -> bool:
        """Whether another problem has the same model and loss, so that only data and weights differ."""
        same = (
            self.task.loss is other.task.loss
            and (self.flat, self.dtype, self.device) == (other.flat, other.dtype, other.device)
            and repr(self.module) == repr(other.module)
            and self.buffers0.keys() == other.buffers0.keys()
            and self.fixed.keys() == other.fixed.keys()
            and all(torch.equal(value, other.fixed[name]) for name, value in self.fixed.items())
            and self.inputs.shape[1:] == other.inputs.shape[1:]
            and self.targets.shape[1:] == other.targets.shape[1:]
        )
        if not same or self.random or other.random:
            return False
        # What modules of the same description may still do differently shows in their losses.
        losses = []
        for problem in (self, other):
            buffers = {name: value.clone() for name, value in self.buffers0.items()}
            with torch.no_grad():
                losses.append(problem.loss(self.x0, buffers, self.inputs[:8].clone(), self.targets[:8]))
        return torch.equal(*losses)

    @cached_property
    def random(self) -> bool:
        """Whether the model draws random numbers while it trains (dropout and the like)."""
        largest = int(self.size.argmax())
        first = int(self.start[largest])
        rows = slice(first, first + min(2, int(self.size[largest])))
        buffers = {name: value.clone() for name, value in self.buffers0.items()}
        with seeded(0), torch.no_grad():
            before = torch.get_rng_state()
            self.loss(self.x0, buffers, self.inputs[rows].clone(), self.targets[rows])
            return not torch.equal(before, torch.get_rng_state())

    def _moving_buffers(self) -> set[str]:
        """Names of the buffers that a forward pass in training mode changes, and of those beside them.

        Beside: of the same module, as BatchNorm's statistics, which data may leave as they are by chance.
        """
        before = {name: value.clone() for name, value in self.module.named_buffers()}
        if not before:
            return set()
        after = {name: value.clone() for name, value in before.items()}
        rows = slice(int(self.start[self.size.argmax()]), None)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            functional_call(self.module, after, (self.inputs[rows][:2].clone(),))
        owners = {
            name.rpartition(".")[0] for name, was in before.items() if not torch.equal(was, after[name])
        }
        return {name for name in before if name.rpartition(".")[0] in owners}

    def loss(
        self,
        x: Tensor,
        buffers: Buffers,
        inputs: Tensor,
        targets: Tensor,
        fixed: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Training loss at x on one batch. CHANGES the buffers, as the module would."""
        return self.task.loss(self._output(x, buffers, inputs, fixed), targets)

    def sample_losses(
        self,
        x: Tensor,
        buffers: Buffers,
        inputs: Tensor,
        targets: Tensor,
        fixed: Mapping[str, Tensor] | None = None,
    ) -> Tensor:
        """Training loss at x of each sample of a batch on its own. CHANGES the buffers."""

        def alone(output: Tensor, target: Tensor) -> Tensor:
            return self.task.loss(output[None], target[None])

        losses: Tensor = vmap(alone)(self._output(x, buffers, inputs, fixed), targets)
        return losses

    def _output(
        self, x: Tensor, buffers: Buffers, inputs: Tensor, fixed: Mapping[str, Tensor] | None
    ) -> Tensor:
        state = {**self.parameters(x), **buffers, **(self.fixed if fixed is None else fixed)}
        output: Tensor = functional_call(self.module, state, (inputs,))
        for name in buffers:  # what the module assigned instead of changing it in place
            buffers[name] = state[name]
        return output

    def parameters(self, x: Tensor) -> dict[str, Tensor]:
        """The model's parameters at x, in the type that the model computes in."""
        return self.flat.unflatten(x.to(self.dtype) if self.mixed and x.dtype == torch.float32 else x)

    def gradient(self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Gradient and loss at x on one batch. CHANGES the buffers."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            loss = self.loss(x, buffers, inputs, targets)
            (g,) = torch.autograd.grad(loss, x)
        for name, value in buffers.items():
            buffers[name] = value.detach()
        return g, loss.detach()

    def whole_gradient(
        self, x: Tensor, buffers: Mapping[str, Tensor], client: int, seed: int, t: int
    ) -> Tensor:
        """Gradient at x of the loss over all of a client's data; buffers are left alone."""
        start, size = int(self.start[client]), int(self.size[client])
        total = torch.zeros_like(x)
        with seeded(torch_seed(seed, GRADIENT, t, client)):
            for first in range(start, start + size, CHUNK):
                rows = slice(first, min(first + CHUNK, start + size))
                scratch = {name: value.clone() for name, value in buffers.items()}
                inputs, targets = self.inputs[rows].clone(), self.targets[rows].clone()
                try:
                    g, _ = self.gradient(x, scratch, inputs, targets)
                except Exception as error:
                    raise ClientError(
                        f"model or loss failed for client {client}, round {t}, on its whole data: "
                        f"{reason(error)}"
                    ) from error
                total = total + g * (len(inputs) / size)
        return total

    @torch.no_grad()
    def evaluate(self, x: Tensor, buffers: Mapping[str, Tensor], seed: int, t: int) -> dict[str, float]:
        """Loss, accuracy (where that is the metric) and metric on the test data."""
        if self.test is None:
            return {}
        inputs, targets = self.test
        state = {**self.parameters(x), **buffers, **self.fixed}
        self.module.eval()
        try:
            with seeded(torch_seed(seed, EVALUATION, t)):
                chunks = torch.split(inputs, CHUNK)
                pieces = [functional_call(self.module, state, (chunk.clone(),)) for chunk in chunks]
            output = torch.cat(pieces)
            values = {"test_loss": float(self.task.loss(output, targets))}
        except Exception as error:
            raise InputError(f"model or loss failed on the test data: {reason(error)}") from error
        finally:
            self.module.train()
        if self.task.metric == "accuracy":
            values["test_accuracy"] = float((output.argmax(dim=1) == targets).double().mean())
            values["test_metric"] = values["test_accuracy"]
        elif self.task.metric == "loss":
            values["test_metric"] = values["test_loss"]
        else:
            assert callable(self.task.metric)
            try:
                values["test_metric"] = float(self.task.metric(output, targets))
            except Exception as error:
                raise InputError(
                    f"metric={self.task.metric!r} must return a number for outputs of shape "
                    f"{tuple(output.shape)} and targets of shape {tuple(targets.shape)}: {reason(error)}"
                ) from error
        return values

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """What tells this task from another: digests of data and model, the loss by a value, the metric."""
        data = [self.inputs, self.targets, torch.from_numpy(self.size), *(self.test or ())]
        model = [self.x0, *self.buffers0.values(), *self.fixed.values()]
        layout = repr((self.flat, list(self.buffers0), list(self.fixed), self.module))
        with seeded(0), torch.no_grad():
            some = torch.linspace(0, len(self.inputs) - 1, min(64, len(self.inputs))).long()
            buffers = {name: value.clone() for name, value in self.buffers0.items()}
            loss = self.loss(self.x0, buffers, self.inputs[some], self.targets[some])
        metric = self.task.metric
        return {
            "data": _digest(data),
            "model": _digest(model, layout),
            "loss": f"{_name(self.task.loss)}, {float(loss):.4g} at the start",
            "metric": f"{metric if isinstance(metric, str) else _name(metric)}, {self.task.goal}",
        }


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _digest(tensors: list[Tensor], text: str = "") -> str:
    sha = hashlib.sha256(text.encode())
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous()
        sha.update(repr((tuple(flat.shape), flat.dtype)).encode())
        sha.update(flat.reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()
