"""Client drift in forty lines: where LocalAdam ends on two clients, and where FAdamGC does.

Two clients have losses with different minima and curvatures. The optimum of their mean is the cross.
LocalAdam ends somewhere else, FAdamGC at the cross.

python examples/drift.py [FIGURE]
"""

import sys

import torch
from matplotlib.figure import Figure

import fadamgc

CURVATURE = torch.tensor([[1.0, 0.2], [0.2, 1.0]])
MINIMUM = torch.tensor([[-2.0, -1.0], [1.0, 2.0]])
OPTIMUM = (CURVATURE * MINIMUM).sum(0) / CURVATURE.sum(0)


class Point(torch.nn.Module):
    """A model that is a point in the plane."""

    def __init__(self) -> None:
        super().__init__()
        self.at = torch.nn.Parameter(torch.tensor([-1.5, 2.5]))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """Return the loss of the clients whose numbers are in the rows."""
        client = rows[:, 0].long()
        return (0.5 * CURVATURE[client] * (self.at - MINIMUM[client]) ** 2).sum(1)


clients = [(torch.full((1, 1), float(i)), torch.zeros(1)) for i in range(2)]
task = fadamgc.Task(Point(), lambda loss, _: loss.mean(), clients)

figure = Figure(figsize=(6, 4.5), layout="constrained")
panel = figure.subplots()
for algorithm in (fadamgc.LocalAdam(eta_l=0.05), fadamgc.FAdamGC(eta_l=0.05)):
    path = [Point().at.detach()]
    callback = lambda end, path=path: path.append(end.server.x.clone())  # noqa: E731
    fadamgc.simulate(algorithm, task, rounds=60, local_steps=20, batch_size=None, callbacks=[callback])
    x, y = torch.stack(path).T
    panel.plot(x, y, ".-", label=algorithm.title)
    print(f"{algorithm.title}: distance to the optimum {(path[-1] - OPTIMUM).norm():.1e}")
panel.plot(*MINIMUM.T, "ks", label="minima of the clients")
panel.plot(*OPTIMUM, "kx", markersize=12, label="optimum")
panel.legend(frameon=False)
if sys.argv[1:]:
    figure.savefig(sys.argv[1], dpi=120)
