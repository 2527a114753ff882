"""FAdamGC against LocalAdam on the digits: the mean of five seeds, and the paired difference.

Each of 50 clients has mostly one or two digits, and 10 of them take part in a round. Runs with the same seed
have the same clients in each round and the same batches, so that they can be compared in pairs.

python examples/fadamgc_and_local_adam.py [FIGURE]
"""

import sys

import torch
from matplotlib.figure import Figure
from torch import nn

import fadamgc
from fadamgc.data import digits, partition

SEEDS, ROUNDS = 5, 24
T = 2.776  # the 97.5 % quantile of Student's t with SEEDS - 1 degrees of freedom

data = digits.load()
parts = partition.dirichlet(data.train_y, 50, alpha=0.1, seed=0)
clients = [(data.train_x[part], data.train_y[part]) for part in map(torch.from_numpy, parts.indices)]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
task = fadamgc.Task(model, nn.functional.cross_entropy, clients, (data.test_x, data.test_y))

# The step sizes that tuning on held-out train data has chosen: results/digits/tuning.csv.
METHODS = {fadamgc.LocalAdam(eta_l=1e-2): "#D55E00", fadamgc.FAdamGC(eta_l=3e-3): "#0072B2"}
grid = [{"algorithm": algorithm, "seed": seed} for algorithm in METHODS for seed in range(SEEDS)]
runs = fadamgc.simulate_many(
    grid, task=task, rounds=ROUNDS, sampled=10, local_steps=20, batch_size=16, progress=False,
    executor="vectorized",
)  # fmt: skip
accuracy = torch.tensor([[record.test_accuracy for record in run.history] for run in runs])
accuracy = 100 * accuracy.view(len(METHODS), SEEDS, ROUNDS)


def draw(panel, values: torch.Tensor, spread: torch.Tensor, colour: str, label: str) -> None:
    """Draw the mean of values over seeds, in a band."""
    rounds, mean = range(1, ROUNDS + 1), values.mean(0)
    panel.plot(rounds, mean, color=colour, label=label)
    panel.fill_between(rounds, mean - spread, mean + spread, color=colour, alpha=0.2, linewidth=0)
    panel.set(xlabel="round", xticks=range(0, ROUNDS + 1, 4))


figure = Figure(figsize=(9, 4), layout="constrained")
left, right = figure.subplots(1, 2)
for (algorithm, colour), values in zip(METHODS.items(), accuracy, strict=True):
    draw(left, values, values.std(0), colour, algorithm.title)
    print(f"{algorithm.title}, mean over all rounds: {values.mean():.1f}")
left.set(ylabel="test accuracy in %", title=f"mean ± standard deviation of {SEEDS} seeds")
left.legend(frameon=False, loc="lower right")
difference = accuracy[1] - accuracy[0]
draw(right, difference, T * difference.std(0) / SEEDS**0.5, "#000000", "")
right.axhline(0, color="0.5", linewidth=1)
right.set(ylabel="percentage points", title="FAdamGC - LocalAdam, with 95 % interval")
if sys.argv[1:]:
    figure.savefig(sys.argv[1], dpi=120)
