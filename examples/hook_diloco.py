"""DiLoCo with gradient correction: two processes, AdamW inside, Nesterov momentum outside, no server.

Per round, each process runs 10 steps of AdamW; then one all-reduce averages the models and another one, which
is ``correction.sync()``, keeps y up to date. Without the correction, DiLoCo stops at a wrong model.

python examples/hook_diloco.py
"""

import socket
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fadamgc

RANKS, ROUNDS, STEPS = 2, 150, 10
# The loss of each rank: its own curvature and its own minimum.
CURVATURE = torch.tensor([[1.0, 4.0], [3.0, 0.5]])
MINIMUM = torch.tensor([[1.0, -1.0], [-1.0, 2.0]])


def train(rank: int, port: int, correct: bool, distances: dict[int, float]) -> None:
    """Train one rank, and store the distance of its model from the optimum of the mean loss."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=limit)
    x = torch.nn.Parameter(torch.zeros(2))  # the global model, the same on all ranks
    outer = torch.optim.SGD([x], lr=0.7, momentum=0.6, nesterov=True)
    w = torch.nn.Parameter(torch.zeros(2))  # the local model
    inner = torch.optim.AdamW([w], lr=0.01, weight_decay=0.0, eps=0.1)
    correction = fadamgc.Correction([w])
    correction.attach(inner)
    for _ in range(ROUNDS):
        w.data.copy_(x.data)
        correction.start_round(correction.y if correct else correction.y_i)  # y = y_i corrects nothing
        for _ in range(STEPS):
            inner.zero_grad()
            (0.5 * CURVATURE[rank] * (w - MINIMUM[rank]) ** 2).sum().backward()
            inner.step()
        correction.finish_round(tracked=True)
        if correct:
            correction.sync()  # y = y + mean of dy: the one all-reduce of the correction
        x.grad = x.data - w.data  # DiLoCo's outer gradient, averaged over the ranks
        dist.all_reduce(x.grad)
        x.grad /= RANKS
        outer.step()
    optimum = (CURVATURE * MINIMUM).sum(0) / CURVATURE.sum(0)
    distances[rank] = float((x.data - optimum).norm())
    dist.destroy_process_group()


def free_port() -> int:
    """Return a port of this machine that no program uses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    with mp.Manager() as manager:
        for correct in (False, True):
            distances = manager.dict()
            mp.spawn(train, args=(free_port(), correct, distances), nprocs=RANKS)
            name = "corrected" if correct else "DiLoCo"
            print(f"{name}, rank 0: distance from the optimum {distances[0]:.1e}")
