"""What bounds large models: the gradients of a round and nothing else, one client a thread.

No optimizer, no federated algorithm, no server. A simulator with these convolutions can come close to this
speed, and not beyond it.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch
from torch.nn.functional import cross_entropy

from workers.protocol import Gate, parser
from workloads import WORKLOADS, Workload

THREADS = 2


def train(workload: Workload, number: int) -> None:
    """This thread's share of a round's gradients, by the module with that number."""
    torch.set_num_threads(1)
    module, inputs, targets = PLACES[number]
    for _ in range(workload.sampled * workload.steps // THREADS):
        torch.autograd.grad(cross_entropy(module(inputs), targets), list(module.parameters()))


def main() -> None:
    """Run rounds as told."""
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
