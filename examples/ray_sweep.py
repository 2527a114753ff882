"""A sweep on Ray: 24 runs on all CPUs of the cluster, or of this machine, to see how step sizes matter.

python examples/ray_sweep.py [FIGURE]      (pip install 'fadamgc[ray]')
"""

import sys

import torch
from matplotlib.figure import Figure
from torch import nn

import fadamgc
from fadamgc.data import digits, partition

STEP_SIZES, SEEDS = (3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 1e-1), (0, 1)

data = digits.load()
parts = partition.dirichlet(data.train_y, 20, alpha=0.1, seed=0)
clients = [(data.train_x[part], data.train_y[part]) for part in map(torch.from_numpy, parts.indices)]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
task = fadamgc.Task(model, nn.functional.cross_entropy, clients, (data.test_x, data.test_y))

METHODS = {fadamgc.LocalAdam: "#D55E00", fadamgc.FAdamGC: "#0072B2"}
grid = [
    {"algorithm": method(eta_l=eta_l), "seed": seed}
    for method in METHODS
    for eta_l in STEP_SIZES
    for seed in SEEDS
]
runs = fadamgc.simulate_many(
    grid, task=task, rounds=20, sampled=5, local_steps=10, batch_size=16, eval_every=20,
    executor="vectorized", progress=False, workers="ray",  # workers=1: the same numbers, without Ray
)  # fmt: skip
accuracy = torch.tensor([100 * run.history[-1].test_accuracy for run in runs])
accuracy = accuracy.view(len(METHODS), len(STEP_SIZES), len(SEEDS))

figure = Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
for (method, colour), values in zip(METHODS.items(), accuracy, strict=True):
    panel.plot(STEP_SIZES, values.mean(1), color=colour, label=method.__name__)
    panel.plot(STEP_SIZES, values, "o", color=colour, markersize=4)
    best = STEP_SIZES[values.mean(1).argmax()]
    print(f"{method.__name__}, best step size {best:g}: {values.mean(1).max():.1f}")
panel.set(xscale="log", xlabel="local step size eta_l", ylabel="test accuracy after 20 rounds in %")
panel.legend(frameon=False, title="means, and runs")
if sys.argv[1:]:
    figure.savefig(sys.argv[1], dpi=120)
