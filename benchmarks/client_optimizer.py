"""Time one step of ClientOptimizer next to one step of torch's Adam(amsgrad=True, foreach=True).

python benchmarks/client_optimizer.py [--numbers 2600000] [--turns 41] [--threads 1] [--algorithms fadamgc]

All optimizers take turns, so that all see the same machine; the table has medians, and the median of the
ratios of each turn. There is no model: the gradients are random numbers.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from statistics import median
from time import perf_counter

import torch

import fadamgc


def parameters(numbers: int) -> list[torch.nn.Parameter]:
    """Return parameters as in a network: large matrices, and small vectors between them."""
    side = int((numbers / 5) ** 0.5)
    shapes = [(side, side), (side,)] * 4
    shapes.append((numbers - sum(torch.Size(shape).numel() for shape in shapes),))
    result = [torch.nn.Parameter(torch.randn(shape)) for shape in shapes]
    for p in result:
        p.grad = torch.randn_like(p)
    return result


def client_step(name: str, numbers: int) -> Callable[[], object]:
    """Return the step of an algorithm's client, inside a round."""
    params = parameters(numbers)
    algo = fadamgc.make_algorithm(name)
    optimizer = fadamgc.ClientOptimizer(params, algo)
    x = torch.nn.utils.parameters_to_vector(params).detach()
    optimizer.start_round(algo.broadcast(algo.init_server(x)), x if algo.round_gradient else None)
    return optimizer.step


def hooked_step(numbers: int) -> Callable[[], object]:
    """Return the step of torch's Adam with the correction as a hook."""
    params = parameters(numbers)
    optimizer = torch.optim.Adam(params, amsgrad=True, foreach=True)
    correction = fadamgc.Correction(params)
    correction.attach(optimizer)
    correction.start_round(torch.ones(numbers))
    return optimizer.step


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--numbers", type=int, default=2_600_000)
    parser.add_argument("--turns", type=int, default=41)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--algorithms", default="fadamgc,fedavg")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    adam = torch.optim.Adam(parameters(args.numbers), amsgrad=True, foreach=True)
    steps: dict[str, Callable[[], object]] = {"torch Adam": adam.step}
    steps["torch Adam with the hook"] = hooked_step(args.numbers)
    for name in args.algorithms.split(","):
        steps[name] = client_step(name, args.numbers)
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for turn in range(args.turns + 2):
        for name, step in steps.items():
            start = perf_counter()
            step()
            if turn >= 2:
                seconds[name].append(perf_counter() - start)
    for name, times in seconds.items():
        ratios = [a / b for a, b in zip(times, seconds["torch Adam"], strict=True)]
        print(f"{name:26} {1000 * median(times):7.2f} ms per step, {median(ratios):5.2f} x torch Adam")


if __name__ == "__main__":
    main()
