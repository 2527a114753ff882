"""Fast training of one client at a time on a CPU.

Images have their channels last, which is faster for convolutions, and the algorithm's rules run in place over
flat vectors.
"""

from __future__ import annotations

import threading
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor

from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.jobs import Job, Result
from fadamgc.federation.sampling import FORWARD, torch_seed
from fadamgc.federation.traits import fits_channels_last
from fadamgc.random_numbers import DrawFrom
from fadamgc.sim.executors.inplace import Code, Rules, Workspace
from fadamgc.sim.executors.loop import failure, run_job


def train(job: Job) -> Result:
    """Run a single job: the fast path of a process that has one client.

    The reference loop runs the job if this path is not possible: on other devices, and for models that draw
    random numbers, because some operations cannot draw from a generator.
    """
    functions = job.round.functions
    if functions.device.type != "cpu" or functions.random:
        return run_job(job)
    rules = Rules(job.round.algorithm, Code())
    result = Trainer(functions).train(job, rules, threading.Lock(), threading.Event())
    assert result is not None
    return result


class Trainer:
    """Trains one client at a time, with a copy of the module whose parameters are views of a flat vector."""

    def __init__(self, functions: TaskFunctions) -> None:
        self.functions = functions
        self.module = functions.flat.copy(functions.module).train()
        self.x, self.g = torch.empty_like(functions.x0), torch.empty_like(functions.x0)
        self.workspace = Workspace()
        named = dict(self.module.named_parameters())
        self.parameters = [named[name] for name in functions.flat.names]
        inputs = functions.sample[0]
        images = isinstance(inputs, Tensor) and inputs.ndim == 4 and functions.dtype == torch.float32
        self.channels_last = images and fits_channels_last(self.module)
        self.copied: list[tuple[Tensor, Tensor]] = []  # a parameter that is a copy, and its view of x
        for parameter, view in zip(self.parameters, functions.flat.unflatten(self.x).values(), strict=True):
            parameter.data = view
            last = self.channels_last and view.ndim == 4
            if functions.mixed or last:
                layout = torch.channels_last if last else torch.preserve_format
                parameter.data = torch.empty_like(view, dtype=functions.dtype, memory_format=layout)
                self.copied.append((parameter.data, view))
            parameter.requires_grad_()
        self.g_views = list(functions.flat.unflatten(self.g).values())

    def train(self, job: Job, rules: Rules, lock: threading.Lock, stop: threading.Event) -> Result | None:
        """Run one client's round; return None if ``stop`` was set. Threads share ``rules`` and ``lock``."""
        round, client = job.round, job.state
        down, functions = round.down, round.functions
        self._switch_to(functions)
        with lock:  # the whole gradient uses the module that all threads share
            g_x = job.whole_gradient()
        local = rules.begin(down, client, g_x, self.x, self.workspace)
        self.x.copy_(down.x)
        self._set_buffers(round.buffers)
        loss_sum = torch.zeros((), dtype=functions.x0.dtype)
        generator = torch.Generator().manual_seed(torch_seed(round.seed, FORWARD, round.t, job.client))
        with DrawFrom(generator) if functions.random else nullcontext():
            for k, positions in enumerate(job.batches):
                if stop.is_set():
                    return None
                try:
                    loss_sum += self._gradient(*job.batch(k, positions))
                except Exception as error:
                    raise failure(job, k, len(positions), error) from error
                with torch.no_grad():
                    round.gradients.adjust_in_place(self.x, self.g)
                    rules.step(down, client, self.x, local, self.g)
        with torch.no_grad():
            K = job.batches.steps
            state, up = rules.finish(down, client, local, self.x, K, job.tracked, self.workspace)
            named = dict(self.module.named_buffers())
            buffers = {name: named[name].detach().clone() for name in round.buffers}
        return Result(job, state, up, buffers, loss_sum / K)

    def _gradient(self, inputs: Any, targets: Any) -> Tensor:
        """Return the loss on a batch, and write its gradient to g."""
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        for parameter, view in self.copied:
            parameter.copy_(view)
        with torch.enable_grad():
            loss = self.functions.loss_function(self.functions.output_of(self.module, inputs), targets)
            gradients = torch.autograd.grad(loss, self.parameters, materialize_grads=True)
        for view, g in zip(self.g_views, gradients, strict=True):
            view.copy_(g)
        return loss.detach()

    def _switch_to(self, functions: TaskFunctions) -> None:
        """Take over the constants of another task with the same model."""
        if functions is self.functions:
            return
        self.functions = functions
        tensors = self._named_tensors()
        for name, value in functions.fixed.items():
            if tensors[name].data_ptr() != value.data_ptr():
                tensors[name].data = value.clone()

    @torch.no_grad()
    def _set_buffers(self, values: dict[str, Tensor]) -> None:
        tensors = self._named_tensors()
        for name, value in values.items():
            if tensors[name].shape == value.shape:
                tensors[name].copy_(value)
            else:
                parent, _, last = name.rpartition(".")
                setattr(self.module.get_submodule(parent), last, value.clone())

    def _named_tensors(self) -> dict[str, Tensor]:
        return {**dict(self.module.named_parameters()), **dict(self.module.named_buffers())}
