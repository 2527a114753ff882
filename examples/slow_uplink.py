"""What a slow uplink changes: the same rounds, priced for other links, with and without codecs.

python examples/slow_uplink.py [FIGURE]
"""

import sys

import torch
from matplotlib.figure import Figure
from torch import nn

import fadamgc
from fadamgc.data import digits, partition

data = digits.load()
parts = partition.dirichlet(data.train_y, 50, alpha=0.1, seed=0)
clients = [(data.train_x[part], data.train_y[part]) for part in map(torch.from_numpy, parts.indices)]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
task = fadamgc.Task(model, nn.functional.cross_entropy, clients, (data.test_x, data.test_y))

LEAN = {"dx": "int8", "dy": "int8", "y": "int8"}
RUNS = {
    "FedAvg-M": (fadamgc.FedAvgM(eta_l=1.0), None),
    "FAdamGC": (fadamgc.FAdamGC(eta_l=3e-3), None),
    "FAdamGC, int8": (fadamgc.FAdamGC(eta_l=3e-3), LEAN),
}
UPLINKS = (0.01, 0.03, 0.1, 0.3, 1.0)  # Mbps; down is always 1

figure = Figure(figsize=(6, 4), layout="constrained")
panel = figure.subplots()
for name, (algorithm, codec) in RUNS.items():
    run = fadamgc.simulate(
        algorithm, task, rounds=30, sampled=10, tracked=5, local_steps=20, batch_size=16, codec=codec,
        target=0.9, progress=False,
    )  # fmt: skip
    costs = [fadamgc.CostModel(down_mbps=1, up_mbps=up, seconds_per_step=1e-3) for up in UPLINKS]
    minutes = [run.reprice(cost).minutes_to(0.9) for cost in costs]
    panel.loglog(UPLINKS, minutes, "o-", label=f"{name}, {run.rounds_to(0.9)} rounds")
    print(name, [f"{m:.2f}" for m in minutes])
panel.set_xlabel("Mbps from a client to the server")
panel.set_ylabel("minutes to 90 %")
panel.legend(frameon=False)
if sys.argv[1:]:
    figure.savefig(sys.argv[1], dpi=120)
