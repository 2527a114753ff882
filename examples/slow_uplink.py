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

# The step sizes that tuning on held-out train data has chosen: results/digits/tuning.csv.
FEDAVG_M, FADAMGC = fadamgc.FedAvgM(eta_l=3.0), fadamgc.FAdamGC(eta_l=3e-3)
RUNS = {
    "FedAvg-M": (FEDAVG_M, None, "s-", "#009E73"),
    "FedAvg-M, int8": (FEDAVG_M, {"dx": "int8"}, "s--", "#009E73"),
    "FAdamGC": (FADAMGC, None, "o-", "#0072B2"),
    "FAdamGC, int8": (FADAMGC, {"dx": "int8", "dy": "int8", "y": "int8"}, "o--", "#0072B2"),
}
UPLINKS = (0.01, 0.03, 0.1, 0.3, 1.0)  # Mbps; down is always 1

figure = Figure(figsize=(7, 4.2), layout="constrained")
panel = figure.subplots()
for name, (algorithm, codec, style, colour) in RUNS.items():
    run = fadamgc.simulate(
        algorithm, task, rounds=30, sampled=10, tracked=5, local_steps=20, batch_size=16, codec=codec,
        target=0.9, executor="vectorized", progress=False,
    )  # fmt: skip
    costs = [fadamgc.CostModel(down_mbps=1, up_mbps=up, seconds_per_step=1e-3) for up in UPLINKS]
    minutes = [run.reprice(cost).minutes_to(0.9) for cost in costs]
    panel.loglog(UPLINKS, minutes, style, color=colour, label=f"{name}: {run.rounds_to(0.9)} rounds")
    print(name, [f"{m:.2f}" for m in minutes])
panel.set(xlabel="Mbps from a client to the server", ylabel="simulated minutes to 90 % accuracy")
panel.set(xticks=UPLINKS, xticklabels=UPLINKS, yticks=(ticks := (0.05, 0.1, 0.3, 1, 3)), yticklabels=ticks)
panel.minorticks_off()
panel.legend(frameon=False)
if sys.argv[1:]:
    figure.savefig(sys.argv[1], dpi=120)
