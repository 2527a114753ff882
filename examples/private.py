"""What privacy costs: accuracy against epsilon, when clients' messages are clipped and noise is added.

python examples/private.py [FIGURE]
"""

import sys

import torch
from matplotlib.figure import Figure
from torch import nn

import fadamgc
from fadamgc.data import digits, partition

data = digits.load()
parts = partition.dirichlet(data.train_y, 400, alpha=0.1, seed=0)
clients = [(data.train_x[part], data.train_y[part]) for part in map(torch.from_numpy, parts.indices)]
torch.manual_seed(0)
model = nn.Linear(64, 10)
task = fadamgc.Task(model, nn.functional.cross_entropy, clients, (data.test_x, data.test_y))

METHODS = {  # with the largest norm of each field that clients send
    "FedAvg": (fadamgc.FedAvg(eta_l=0.5), {"dx": 1.0}),
    "FAdamGC": (fadamgc.FAdamGC(eta_l=0.01), {"dx": 1.0, "dy": 0.1}),
}
NOISE = (1.0, 4.0, 16.0)

figure = Figure(figsize=(6, 4), layout="constrained")
panel = figure.subplots()
for name, (algorithm, clip) in METHODS.items():
    privacy = [None, *(fadamgc.Privacy(clip, noise) for noise in NOISE)]
    plain, *runs = fadamgc.simulate_many(
        [{"privacy": one} for one in privacy], algorithm=algorithm, task=task, rounds=20, sampled=100,
        local_steps=5, batch_size=4, eval_every=20, executor="vectorized", progress=False,
    )  # fmt: skip
    epsilon = [run.epsilon(delta=1e-5) for run in runs]
    accuracy = [run.history[-1].test_accuracy for run in runs]
    (line,) = panel.semilogx(epsilon, accuracy, "o-", label=name)
    panel.axhline(plain.history[-1].test_accuracy, color=line.get_color(), linestyle=":")
    print(f"{name}, not private: {plain.history[-1].test_accuracy:.3f}")
    for e, a in zip(epsilon, accuracy, strict=True):
        print(f"{name}, epsilon {e:.1f}: {a:.3f}")
panel.set_xlabel("epsilon, for delta = 1e-5")
panel.set_ylabel("test accuracy (dotted: not private)")
panel.legend(frameon=False)
if sys.argv[1:]:
    figure.savefig(sys.argv[1], dpi=120)
