"""DiLoCo stops at a wrong model if data differ, and with gradient correction it does not.

Two processes without a server: AdamW inside, Nesterov momentum outside.

python examples/corrected_diloco.py [FIGURE]
"""

import os
import sys
import tempfile

import torch
import torch.distributed as dist
from matplotlib.figure import Figure

import fadamgc

ROUNDS = 80
CURVATURE = torch.tensor([[1.0, 4.0], [3.0, 0.5]])  # of the loss of each process
MINIMUM = torch.tensor([[1.0, -1.0], [-1.0, 2.0]])
OPTIMUM = (CURVATURE * MINIMUM).sum(0) / CURVATURE.sum(0)  # of the mean of the two losses


def main(rank: int, folder: str) -> None:
    """Train without and with the correction in one of the processes; rank 0 saves the figure."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
    panel = Figure(figsize=(7, 4), layout="constrained").subplots()
    for label, correct, colour in ("DiLoCo", False, "#D55E00"), ("corrected DiLoCo", True, "#0072B2"):
        x, w = torch.zeros(2, requires_grad=True), torch.zeros(2, requires_grad=True)  # global, local
        outer = torch.optim.SGD([x], lr=0.7, momentum=0.6, nesterov=True)
        inner = torch.optim.AdamW([w], lr=0.01, weight_decay=0.0, eps=0.1)
        correction, distances = fadamgc.Correction([w]), []
        correction.attach(inner)
        for _ in range(ROUNDS):
            w.data.copy_(x.data)
            correction.start_round(correction.y if correct else correction.y_i)  # y = y_i corrects nothing
            for _ in range(10):
                w.grad = CURVATURE[rank] * (w.data - MINIMUM[rank])
                inner.step()
            correction.finish_round()
            correction.sync()  # y = y + mean of dy: the one all-reduce of the correction
            x.grad = (x.data - w.data) / dist.get_world_size()
            dist.all_reduce(x.grad)  # DiLoCo's own all-reduce: the outer gradient is the mean of x - w
            outer.step()
            distances.append(float((x.data - OPTIMUM).norm()))
        panel.semilogy(range(1, ROUNDS + 1), distances, color=colour, label=label)
        if rank == 0:
            print(f"{label}: distance to the optimum {distances[-1]:.1e}", flush=True)
    panel.set(xlabel="round", ylabel="distance to the optimum")
    panel.legend(frameon=False)
    if rank == 0 and sys.argv[1:]:
        panel.figure.savefig(sys.argv[1], dpi=120)
    dist.barrier()
    os._exit(0)  # torch 2.13 sometimes aborts while it ends a process that used gloo and an optimizer


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(main, args=(folder,), nprocs=2)
