"""The upper bound for large models: only the gradients of a round, one thread per client.

There is no optimizer, no federated algorithm and no server. A simulator with these convolutions cannot be
faster than this.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn.functional import cross_entropy

from workers.protocol import Gate, parser
from workloads import WORKLOADS, Workload

THREADS = 2


def train(workload: Workload, number: int) -> None:
    """Compute this thread's share of a round's gradients, with the module of that number."""
    torch.set_num_threads(1)
    module, inputs, targets = PLACES[number]
    for _ in range(workload.sampled * workload.steps // THREADS):
        torch.autograd.grad(cross_entropy(module(inputs), targets), list(module.parameters()))


def main() -> None:
    """Run rounds when the orchestrator asks for them."""
    options = parser(__doc__).parse_args()
    workload = WORKLOADS[options.workload]
    inputs, targets = (t[0, : workload.batch] for t in workload.data())
    inputs = inputs.contiguous(memory_format=torch.channels_last)
    for _ in range(THREADS):
        module = workload.make_model(0).train().to(memory_format=torch.channels_last)
        PLACES.append((module, inputs, targets))
    gate = Gate(workload, options.warmup)
    gate.info["threads"] = THREADS
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(train, [workload] * THREADS, range(THREADS)))
        while gate.round_done():
            list(pool.map(train, [workload] * THREADS, range(THREADS)))


PLACES: list[tuple[torch.nn.Module, torch.Tensor, torch.Tensor]] = []

if __name__ == "__main__":
    main()
