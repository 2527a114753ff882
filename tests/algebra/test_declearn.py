"""A third-party implementation: declearn's modules "scaffold-client" and "adam" give the same numbers."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fadamgc import compose, local
from fadamgc.data import synthetic
from problems import linear_task
from short_runs import simulate

ETA, K, ROUNDS = 0.03, 5, 8
ADAM = {"beta_1": 0.8, "beta_2": 0.95, "eps": 1e-3}


def by_declearn(data: synthetic.Synthetic, x: np.ndarray, amsgrad: bool) -> np.ndarray:
    """All clients take part in every round; the server averages their models."""
    # Imported here: it takes seconds, and every process that runs tests reads this file.
    pytest.importorskip("declearn")
    from declearn.model.sklearn import NumpyVector
    from declearn.optimizer import Optimizer
    from declearn.optimizer.modules import ScaffoldServerModule

    modules = ["scaffold-client", ("adam", ADAM | {"amsgrad": amsgrad})]
    optimizers = [Optimizer(lrate=1.0, modules=modules) for _ in data.clients]
    server = ScaffoldServerModule()
    for _ in range(ROUNDS):
        ends, deltas = [], []
        for (X, Y), optimizer in zip(data.clients, optimizers, strict=True):
            optimizer.process_aux_var({"scaffold": server.collect_aux_var()})
            w = x.copy()
            for _k in range(K):
                gradient = X.numpy().T @ (X.numpy() @ w - Y.numpy()[:, 0]) / len(X)
                vector = NumpyVector({"w": gradient})
                for module in optimizer.modules:
                    vector = module.run(vector)
                w = w - ETA * vector.coefs["w"]
            ends.append(w)
            deltas.append(optimizer.collect_aux_var()["scaffold"])
        server.process_aux_var(sum(deltas[1:], start=deltas[0]))
        x = np.mean(ends, axis=0)
    return x


@pytest.mark.parametrize("amsgrad", [False, True])
def test_gradient_correction_before_adam_is_declearns(amsgrad):
    data = synthetic.quadratics(clients=4, dim=3, seed=2)
    start = torch.linspace(-1, 1, 3, dtype=torch.float64)
    rule = local.Adam(
        ETA, beta1=0.8, beta2=0.95, eps=1e-3, amsgrad=amsgrad, bias_correction=True, m="keep", v="keep"
    )
    run = simulate(
        compose(rule, "pre"),
        linear_task(data, start),
        rounds=ROUNDS,
        local_steps=K,
        batch_size=None,
        sampled=None,
        tracked=None,
        dtype=torch.float64,
        executor="loop",
    )
    expected = by_declearn(data, start.numpy(), amsgrad)
    np.testing.assert_allclose(run.x.numpy(), expected, rtol=1e-12, atol=1e-13)
