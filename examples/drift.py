"""Client drift in 40 lines: on two clients, LocalAdam ends at a wrong point, and FAdamGC at the optimum.

python examples/drift.py [FIGURE]
"""

import sys

import torch
from matplotlib.figure import Figure

import fadamgc

CURVATURE = torch.tensor([[1.0, 0.2], [0.2, 1.0]])  # of the two clients' losses
MINIMUM = torch.tensor([[-2.0, 0.0], [1.0, 2.0]])
OPTIMUM = (CURVATURE * MINIMUM).sum(0) / CURVATURE.sum(0)  # of the mean of the two losses


def loss(x: torch.Tensor, client: torch.Tensor) -> torch.Tensor:
    """Return the loss of a client at the point x, which is the bias of the model."""
    return 0.5 * (CURVATURE[client] * (x - MINIMUM[client]) ** 2).sum()


model = torch.nn.Linear(1, 2)
torch.nn.utils.vector_to_parameters(torch.tensor([0.0, 0.0, 0.4, -1.0]), model.parameters())
task = fadamgc.Task(model, loss, [(torch.zeros(1, 1), torch.tensor([i])) for i in range(2)])

figure = Figure(figsize=(7, 4.5), layout="constrained")
panel = figure.subplots()
panel.set(xlabel="first coordinate of the model", ylabel="second coordinate")
for algorithm, colour in (fadamgc.LocalAdam(eta_l=0.05), "#D55E00"), (fadamgc.FAdamGC(eta_l=0.05), "#0072B2"):
    path = [model.bias.detach().clone()]
    callback = lambda end, path=path: path.append(end.server.x[2:].clone())  # noqa: E731
    fadamgc.simulate(algorithm, task, rounds=60, local_steps=20, batch_size=None, callbacks=[callback])
    panel.plot(*torch.stack(path).T, "o-", color=colour, markersize=4, label=algorithm.title)
    print(f"{algorithm.title}: distance to the optimum {(path[-1] - OPTIMUM).norm():.1e}")
panel.plot(*MINIMUM.T, "ks", label="minima of the clients")
panel.plot(*OPTIMUM, "k*", markersize=14, zorder=0, label="optimum of the mean")
panel.legend(frameon=False, loc="lower left")
if sys.argv[1:]:
    figure.savefig(sys.argv[1], dpi=120)
