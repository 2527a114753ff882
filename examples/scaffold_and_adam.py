"""Why SCAFFOLD fails with Adam: the correction after the moments stalls, before the moments it does not.

Ten clients have quadratic losses with different curvatures and minima, and exact gradients. Each line is the
distance of the model to the optimum of the mean loss.

python examples/scaffold_and_adam.py [FIGURE]
"""

import sys

import torch
from matplotlib.figure import Figure

import fadamgc
from fadamgc.data import synthetic

problem = synthetic.quadratics(clients=10, dim=5, seed=1)
model = torch.nn.Linear(5, 1, bias=False, dtype=torch.float64)
torch.nn.init.zeros_(model.weight)
task = fadamgc.Task(model, lambda out, y: 0.5 * (out - y).square().mean(), problem.clients)
adam = fadamgc.local.Adam(eta_l=0.05, amsgrad=True)
METHODS = {
    "no correction (LocalAdam)": fadamgc.compose(adam),
    "after the moments, d + y - y_i (FA-NT)": fadamgc.compose(adam, "post"),
    "before the moments, g + y - y_i (FAdamGC)": fadamgc.compose(adam, "pre"),
}

figure = Figure(figsize=(7, 4.2), layout="constrained")
panel = figure.subplots()
panel.set_prop_cycle(color=["#D55E00", "#009E73", "#0072B2"])
for name, algorithm in METHODS.items():
    distances: list[float] = []
    callback = lambda end, seen=distances: seen.append(float((end.server.x - problem.optimum).norm()))  # noqa: E731
    fadamgc.simulate(
        algorithm, task, rounds=250, sampled=3, local_steps=5, batch_size=None, executor="loop",
        eval_every=250, callbacks=[callback], progress=False,
    )  # fmt: skip
    panel.semilogy(range(1, len(distances) + 1), distances, label=name)
    print(f"{name}: {distances[-1]:.1e}")
panel.set(xlabel="round", ylabel="distance to the optimum")
panel.legend(frameon=False)
if sys.argv[1:]:
    figure.savefig(sys.argv[1], dpi=120)
