"""An algorithm of your own: FAdamGC's correction with a step that is limited in every coordinate.

python examples/own_algorithm.py [FIGURE]
"""

import sys
from dataclasses import dataclass

import torch
from matplotlib.figure import Figure
from torch import nn

import fadamgc
from fadamgc.data import digits, partition
from fadamgc.fields import choice, positive


@dataclass(frozen=True)
class Softsign(fadamgc.local.LocalRule):
    """d = m / (|m| + width): as the sign for large m, as m / width for small m."""

    eta_l: float = positive(1e-2)
    width: float = positive(1e-2)
    m: str = choice("reset", "keep", "share")  # where the moment m lives between rounds

    def start(self, x):
        """Return the moment before the first step."""
        return fadamgc.local.Momentum().start(x)

    def direction(self, moments, x, g):  # noqa: ARG002
        """Return the direction and the new moment."""
        m = 0.9 * moments.m + 0.1 * g
        return m / (m.abs() + self.width), moments._replace(m=m)


data = digits.load()
parts = partition.dirichlet(data.train_y, 20, alpha=0.1, seed=0)
clients = [(data.train_x[part], data.train_y[part]) for part in map(torch.from_numpy, parts.indices)]
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
task = fadamgc.Task(model, nn.functional.cross_entropy, clients, (data.test_x, data.test_y))

figure = Figure(figsize=(7, 4), layout="constrained")
panel = figure.subplots()
panel.set_prop_cycle(color=["#D55E00", "#0072B2"])
for correction in ("none", "pre"):
    algorithm = fadamgc.compose(Softsign(), correction)
    run = fadamgc.simulate(
        algorithm, task, rounds=25, sampled=5, local_steps=10, batch_size=16, progress=False
    )
    panel.plot([r.round for r in run.history], [r.test_accuracy for r in run.history], label=algorithm.title)
    print(f"{algorithm.title}: {run.history[-1].test_accuracy:.3f}")
panel.set(xlabel="round", ylabel="test accuracy")
panel.legend(frameon=False)
if sys.argv[1:]:
    figure.savefig(sys.argv[1], dpi=120)
