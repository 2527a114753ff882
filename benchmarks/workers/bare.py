"""The yardstick: federated averaging as a plain loop over clients, written only for speed."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from workers.protocol import Gate, parser
from workloads import ETA_L, WORKLOADS, Workload

THREADS = 2


def make_optimizer(name: str, module: nn.Module) -> torch.optim.Optimizer:
    """Make the local optimizer, with a fused kernel."""
    kind = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[name]
    return kind([p for p in module.parameters() if p.requires_grad], lr=ETA_L[name], fused=True)


class Bare:
    """One module that all clients train, one after the other, and the running mean of the results.

    Args:
        workload: what to train.
        optimizer: "sgd" or "adam".
        channels_last: keep images and filters in that memory format.
    """

    def __init__(self, workload: Workload, optimizer: str, channels_last: bool = False) -> None:
        self.workload = workload
        self.module = workload.make_model(0).train()
        self.inputs, self.targets = workload.data()
        if channels_last:
            self.module = self.module.to(memory_format=torch.channels_last)
            flat = self.inputs.flatten(0, 1).contiguous(memory_format=torch.channels_last)
            self.inputs = flat.unflatten(0, self.targets.shape)
        self.optimizer = make_optimizer(optimizer, self.module)
        # Clients start from these tensors, and they are averaged: parameters, and BatchNorm's statistics.
        buffers = [b for b in self.module.buffers() if b.is_floating_point()]
        trained = [p.data for p in self.module.parameters() if p.requires_grad]
        self.local: list[Tensor] = [*trained, *buffers]
        self.server = [t.clone() for t in self.local]
        self.mean = [t.clone() for t in self.local]

    def round(self) -> None:
        """Run one round: S clients with K steps each, and their mean."""
        sampled = torch.randperm(self.workload.clients)[: self.workload.sampled].tolist()
        torch._foreach_zero_(self.mean)
        for client in sampled:
            torch._foreach_copy_(self.local, self.server)
            self._train(client)
            torch._foreach_add_(self.mean, self.local, alpha=1 / len(sampled))
        self.server, self.mean = self.mean, self.server

    def _train(self, client: int) -> None:
        self.optimizer.state.clear()
        inputs, targets = self.inputs[client], self.targets[client]
        for rows in torch.randperm(len(targets)).split(self.workload.batch):
            self.optimizer.zero_grad(set_to_none=True)
            cross_entropy(self.module(inputs[rows]), targets[rows]).backward()
            self.optimizer.step()


def main() -> None:
    """Run rounds when the orchestrator asks for them."""
    arguments = parser(__doc__)
    arguments.add_argument("--channels-last", action="store_true")
    arguments.add_argument("--threads", type=int, default=THREADS)
    options = arguments.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    workload = WORKLOADS[options.workload]
    system = Bare(workload, options.optimizer, options.channels_last)
    gate = Gate(workload, options.warmup)
    gate.info["threads"] = torch.get_num_threads()
    system.round()
    while gate.round_done():
        system.round()


if __name__ == "__main__":
    main()
