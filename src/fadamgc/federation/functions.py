"""A task's model, loss and evaluation as pure functions of flat vectors, on one device and in one dtype."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import repeat
from typing import Any, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fadamgc.errors import ClientError, InputError, reason, shown
from fadamgc.federation.client_data import ClientData, ClientTable
from fadamgc.federation.computing import PLAIN, Computing
from fadamgc.federation.sampling import EVALUATION, GRADIENT, torch_seed
from fadamgc.federation.traits import changing_buffers, statistics_of_layers
from fadamgc.flat import Flat
from fadamgc.metrics import accuracy
from fadamgc.runtime import device_of, random_states, seeded
from fadamgc.samples import Rows, Samples, cast, map_tensors
from fadamgc.task import Loss, Metric, Task
from fadamgc.tree import leaves, rebuild

Buffers: TypeAlias = dict[str, Tensor]

CHUNK = 2048  # samples in one forward pass of an evaluation or of a whole-data gradient


class TaskFunctions:
    """The functions that executors differentiate and the server evaluates.

    Attributes:
        dtype: type of outputs, losses and gradients.
        x0: the trainable parameters of the task's model; float32 if ``dtype`` has 16 bits. Algorithms
            compute in the type of x0: in 16 bits, small steps would be lost and y would drift from the mean
            of the y_i.
        buffers0: the buffers that training changes.
        fixed: all other tensors of the model, by name.
        sample: two samples of the largest client, on which traits of the model are tried; () for a task
            without any data.
        test: the test data; None if nothing is evaluated.
    """

    def __init__(
        self,
        task: Task,
        dtype: torch.dtype | None = None,
        device: str | torch.device | None = None,
        computing: Computing = PLAIN,
    ):
        first = next(p for p in task.model.parameters() if p.requires_grad)
        self.task = task
        self.dtype = dtype or first.dtype
        self.device = first.device
        self.flat = Flat.of(task.model)
        module = self.flat.copy(task.model).to(dtype=dtype)
        if device is not None:
            try:
                self.device = device_of(device)
                if self.device.type == "meta":
                    raise ValueError("tensors have no values on this device")
                module = module.to(device=self.device)
            except (RuntimeError, AssertionError, TypeError, ValueError, OverflowError) as error:
                raise InputError(f"device={shown(device)} cannot be used here: {reason(error)}") from error
        self.module = module.requires_grad_(False)
        self.loss_function: Loss = task.loss
        if isinstance(task.loss, nn.Module) and self.device != first.device:
            self.loss_function = copy.deepcopy(task.loss).to(device=self.device)
        self.compute_with(computing)
        self.x0 = self.flat.flatten(self.module)
        if self.mixed:
            self.x0 = self.x0.float()
        self.sample = tuple(map_tensors(self._cast, part) for part in task.sample())
        self.test = None if task.test_samples is None else self.data_of(task.test_samples)
        self.module.train()
        changing = statistics_of_layers(self.module)
        if self.sample:
            changing = changing_buffers(self.module, self.sample[0], self.device)
        tensors = {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
        self.buffers0: Buffers = {n: t.detach().clone() for n, t in tensors.items() if n in changing}
        self.fixed: Buffers = {
            n: t.detach() for n, t in tensors.items() if n not in self.flat.names and n not in changing
        }

    def compute_with(self, computing: Computing) -> None:
        """Set how the model is computed from now on."""
        computing.check(self.module, self.dtype)
        self.computing = computing

    @property
    def mixed(self) -> bool:
        """Whether algorithms compute in float32 and the model in a 16-bit type."""
        return self.dtype.itemsize == 2

    @cached_property
    def random(self) -> bool:
        """Whether the model draws random numbers while it trains (dropout and the like)."""
        inputs, targets = self.sample
        with seeded(0, self.device), torch.no_grad():
            before = random_states(self.device)
            self.loss(self.x0, self.fresh_buffers(), map_tensors(torch.clone, inputs), targets)
            return not all(map(torch.equal, before, random_states(self.device)))

    def data_of(self, samples: Samples) -> ClientData:
        """Return samples on the device of the model."""
        samples = samples.to(self.device) if isinstance(samples, Rows) else samples
        return ClientData(samples, self.dtype, self.device)

    def fresh_buffers(self) -> Buffers:
        """Return a copy of ``buffers0``."""
        return {name: value.clone() for name, value in self.buffers0.items()}

    def loss(
        self, x: Tensor, buffers: Buffers, inputs: Any, targets: Any, fixed: Buffers | None = None
    ) -> Tensor:
        """Return the training loss at x on one batch. CHANGES the buffers, as the module would."""
        return self.loss_function(self._output(x, buffers, inputs, fixed), targets)

    def sample_losses(
        self, x: Tensor, buffers: Buffers, inputs: Tensor, targets: Tensor, fixed: Buffers | None = None
    ) -> Tensor:
        """Return the training loss at x of each single sample of a batch. CHANGES the buffers."""

        def loss_of_one(output: Tensor, target: Tensor) -> Tensor:
            return self.loss_function(output[None], target[None])

        losses: Tensor = vmap(loss_of_one)(self._output(x, buffers, inputs, fixed), targets)
        return losses

    def parameters(self, x: Tensor) -> dict[str, Tensor]:
        """Return the model's parameters at x, in the type that the model computes in."""
        x = x.to(self.dtype) if self.mixed and x.dtype == torch.float32 else x
        parameters: dict[str, Tensor] = self.computing.arranged(self.flat.unflatten(x))
        return parameters

    def gradient(self, x: Tensor, buffers: Buffers, inputs: Any, targets: Any) -> tuple[Tensor, Tensor]:
        """Return gradient and loss at x on one batch. CHANGES the buffers."""
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            loss = self.loss(x, buffers, inputs, targets)
            (g,) = torch.autograd.grad(loss, x)
        for name, value in buffers.items():
            buffers[name] = value.detach()
        return g, loss.detach()

    def whole_gradient(
        self, x: Tensor, buffers: Buffers, client: int, data: ClientData, seed: int, t: int
    ) -> Tensor:
        """Return the gradient at x of the loss over all of a client's data, without changing the buffers."""
        total = torch.zeros_like(x)
        done = 0
        with data.draws_at(torch_seed(seed, GRADIENT, t, client)):
            for inputs, targets in data.chunks(CHUNK):
                count = min(CHUNK, data.size - done)
                done += count
                scratch = {name: value.clone() for name, value in buffers.items()}
                try:
                    g, _ = self.gradient(x, scratch, inputs, targets)
                except Exception as error:
                    raise ClientError(
                        f"model or loss failed for client {client}, round {t}, on its whole data: "
                        f"{reason(error)}"
                    ) from error
                total = total + g * (count / data.size)
        return total

    @torch.no_grad()
    def evaluate(self, x: Tensor, buffers: Buffers, seed: int, t: int) -> dict[str, Any]:
        """Return loss, accuracy (if it is the metric) and metric on the test data; {} without test data.

        If the metric has several named numbers, they are ``metrics``, and the first is the metric.
        """
        if self.test is None:
            return {}
        metric = self.task.metric
        with self.test.draws_at(torch_seed(seed, EVALUATION, t)):
            output, targets, loss = self._test_loss(x, buffers, self.test.chunks(CHUNK))
        if not callable(metric):
            if metric == "loss":
                return {"test_loss": loss, "test_metric": loss}
            share = accuracy(output, targets)
            return {"test_loss": loss, "test_accuracy": share, "test_metric": share}
        try:
            value = metric(output, targets)
            if not isinstance(value, Mapping):
                return {"test_loss": loss, "test_metric": float(value)}
            named = {str(name): float(number) for name, number in value.items()}
            first = next(iter(named.values()))
            found = {"test_loss": loss, "test_metric": first, "metrics": named}
            return found | ({"test_accuracy": named["accuracy"]} if "accuracy" in named else {})
        except Exception as error:
            shape = tuple(targets.shape) if isinstance(targets, Tensor) else type(targets).__name__
            raise InputError(
                f"metric={metric!r} must return a number, or a dict of named numbers, for outputs of shape "
                f"{tuple(output.shape)} and targets of shape {shape}: {reason(error)}"
            ) from error

    @torch.no_grad()
    def evaluate_clients(
        self,
        x: Tensor,
        buffers: Buffers,
        clients: ClientTable,
        seed: int,
        t: int,
        models: Sequence[tuple[Tensor, Buffers]] | None = None,
        metric: Metric | None = None,
    ) -> NDArray[np.float64]:
        """Return the metric of the model on each client's data; the first number if a metric has several.

        ``clients`` has the data of the task's evaluated clients; all other clients have the value nan.
        Samples in memory pass the model together, whatever the clients' sizes. ``models`` has the parameters
        and buffers of each client, if they differ. ``metric`` replaces the task's metric.
        """
        metric, values = metric or self.task.metric, []
        seed = torch_seed(seed, EVALUATION, t, 1)
        if models is not None:
            models = [models[i] for i in self.task.evaluated]
        for outputs, targets in self._outputs_of_clients(x, buffers, clients, seed, models):
            try:
                if metric == "loss":
                    value: Any = self.loss_function(outputs, targets)
                else:
                    value = metric(outputs, targets) if callable(metric) else accuracy(outputs, targets)
                values.append(float(next(iter(value.values())) if isinstance(value, Mapping) else value))
            except Exception as error:
                client = self.task.evaluated[len(values)]
                raise InputError(
                    f"the metric failed on the data of client {client}: {reason(error)}"
                ) from error
        found = np.full(self.task.n, np.nan)
        found[self.task.evaluated] = values
        return found

    def _outputs_of_clients(
        self,
        x: Tensor,
        buffers: Buffers,
        clients: ClientTable,
        seed: int,
        models: Sequence[tuple[Tensor, Buffers]] | None,
    ) -> Iterator[tuple[Tensor, Any]]:
        """Yield outputs and targets, client by client."""
        if clients.is_read_per_batch or clients.on_demand or models is not None:
            for data, model in zip(clients, models or repeat((x, buffers)), strict=models is not None):
                with data.draws_at(seed):
                    outputs = self._outputs(*model, data.chunks(CHUNK))
                yield outputs
            return
        with seeded(seed, self.device):
            output, targets = self._outputs(x, buffers, clients.together().chunks(CHUNK))
        sizes = clients.size.tolist()
        yield from zip(torch.split(output, sizes), torch.split(targets, sizes), strict=True)

    @torch.no_grad()
    def quick_test_loss(self, x: Tensor, buffers: Buffers, samples: int) -> float | None:
        """Return the loss on the first test samples; None without test data."""
        if self.test is None:
            return None
        with seeded(0, self.device):
            return self._test_loss(x, buffers, self.test.chunks(CHUNK, samples))[2]

    def _test_loss(
        self, x: Tensor, buffers: Buffers, chunks: Iterable[tuple[Any, Any]]
    ) -> tuple[Tensor, Any, float]:
        try:
            output, targets = self._outputs(x, buffers, chunks)
            return output, targets, float(self.loss_function(output, targets))
        except Exception as error:
            raise InputError(f"model or loss failed on the test data: {reason(error)}") from error

    def _outputs(self, x: Tensor, buffers: Buffers, chunks: Iterable[tuple[Any, Any]]) -> tuple[Tensor, Any]:
        """Return the outputs of the model in evaluation mode, and the targets."""
        state = {**self.parameters(x), **buffers, **self.fixed}
        outputs, targets = [], []
        self.module.eval()
        try:
            for inputs, target in chunks:
                outputs.append(self.output_of(self._called_with(state), inputs))
                targets.append(target)
        finally:
            self.module.train()
        if len(outputs) == 1:
            return outputs[0], targets[0]
        columns = zip(*map(leaves, targets), strict=True)
        return torch.cat(outputs), rebuild(targets[0], [torch.cat(column) for column in columns])

    def output_of(self, model: Callable[[Any], Tensor], inputs: Any) -> Tensor:
        """Return the output of a model, computed as the options say."""
        with self.computing.context(self.device):
            output = model(self.computing.arranged(inputs))
        return self.computing.output(output, self.dtype)

    def _called_with(self, state: dict[str, Tensor]) -> Callable[[Any], Tensor]:
        return lambda inputs: functional_call(self.module, state, (inputs,))

    def _cast(self, part: Tensor) -> Tensor:
        return cast(part, self.dtype, self.device)

    def _output(self, x: Tensor, buffers: Buffers, inputs: Any, fixed: Buffers | None) -> Tensor:
        state = {**self.parameters(x), **buffers, **(self.fixed if fixed is None else fixed)}
        output = self.output_of(self._called_with(state), inputs)
        for name in buffers:  # a module may assign a buffer instead of changing it in place
            buffers[name] = state[name]
        return output
