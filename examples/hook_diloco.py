"""DiLoCo with gradient correction: two processes, AdamW inside, Nesterov momentum outside, no server.

Per round, each process runs 10 steps of AdamW; then one all-reduce averages the models and another one, which
is ``correction.sync()``, keeps y up to date. Without the correction, DiLoCo stops at a wrong model.

python examples/hook_diloco.py
"""

import os
import socket
import sys
from datetime import timedelta

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import fadamgc

RANKS, ROUNDS, STEPS = 2, 150, 10
# The loss of each rank: its own curvature and its own minimum.
CURVATURE = torch.tensor([[1.0, 4.0], [3.0, 0.5]])
MINIMUM = torch.tensor([[1.0, -1.0], [-1.0, 2.0]])


def main(rank: int, port: int) -> None:
    """Train without and with correction in one of the processes."""
    torch.set_num_threads(1)
    address = f"tcp://127.0.0.1:{port}"
    limit = timedelta(seconds=60)
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=RANKS, timeout=limit)
    for name, correct in (("DiLoCo", False), ("corrected", True)):
        distance = train(rank, correct)
        if rank == 0:
            print(f"{name}, rank 0: distance from the optimum {distance:.1e}", flush=True)
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 sometimes aborts while it ends a process that used gloo and an optimizer


def train(rank: int, correct: bool) -> float:
    """Train one rank, and return the distance of its model from the optimum of the mean loss."""
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
    return float((x.data - optimum).norm())


def free_port() -> int:
    """Return a port of this machine that no program uses."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


if __name__ == "__main__":
    mp.spawn(main, args=(free_port(),), nprocs=RANKS)
