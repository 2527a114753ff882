"""What any correct implementation has: reductions, fixed points, convergence, the order on digits."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fadamgc
from fadamgc.data import digits, partition, synthetic
from fadamgc.sim.executors import VectorizedExecutor
from problems import class_task, linear_task

EXECUTORS = pytest.mark.parametrize("executor", ["loop", "threads", "vectorized"])
NOT_COMPILED = partial(VectorizedExecutor, compile=False)


def simulate(algo, task, executor="loop", **options):
    options = {"rounds": 5, "sampled": 4, "local_steps": 6, "batch_size": 5, "seed": 1} | options
    return fadamgc.simulate(algo, task, executor=executor, **options)


def trajectory(algo, task, executor, **options):
    seen: list[torch.Tensor] = []
    simulate(algo, task, executor, callbacks=[lambda end: seen.append(end.server.x)], **options)
    return torch.stack(seen)


@pytest.mark.slow
@EXECUTORS
@pytest.mark.parametrize("options", [{}, {"beta2": 0.0}, {"v_hat": "restart"}])
def test_fadamgc_that_tracks_nobody_is_local_adam_to_the_bit(executor, options):
    task = class_task()
    gc = trajectory(fadamgc.FAdamGC(eta_l=0.01, **options), task, executor, tracked=0)
    local = trajectory(fadamgc.LocalAdam(eta_l=0.01, **options), task, executor, tracked=0)
    assert torch.equal(gc, local)
    tracked = trajectory(fadamgc.FAdamGC(eta_l=0.01, **options), task, executor, tracked=1)
    assert not torch.equal(gc, tracked)


@EXECUTORS
def test_fedavg_m_with_beta_1_is_fedavg_to_the_bit(executor):
    task = class_task()
    plain = trajectory(fadamgc.FedAvg(eta_l=0.1), task, executor)
    assert torch.equal(trajectory(fadamgc.FedAvgM(eta_l=0.1, beta=1.0), task, executor), plain)
    assert not torch.equal(trajectory(fadamgc.FedAvgM(eta_l=0.1, beta=0.5), task, executor), plain)


@EXECUTORS
def test_scaffold_m_with_beta_1_has_scaffolds_trajectory(executor):
    task = class_task()
    options = {"tracked": 2, "dtype": torch.float64}
    plain = trajectory(fadamgc.Scaffold(eta_l=0.1), task, executor, **options)
    momentum = trajectory(fadamgc.ScaffoldM(eta_l=0.1, beta=1.0), task, executor, **options)
    torch.testing.assert_close(momentum, plain, rtol=1e-12, atol=1e-13)


def test_scaffold_with_one_local_step_and_full_batches_is_gradient_descent():
    data = synthetic.quadratics(clients=4, dim=3)
    run = simulate(
        fadamgc.Scaffold(eta_l=0.05), linear_task(data), sampled=None, local_steps=1, batch_size=None
    )
    x = torch.zeros(3, dtype=torch.float64)
    for _ in run.history:
        x = x - 0.05 * torch.stack([X.T @ (X @ x[:, None] - y)[:, 0] / len(X) for X, y in data.clients]).mean(
            0
        )
    torch.testing.assert_close(run.x, x, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("eta_g", [1.0, 0.7, 1.5])
def test_both_forms_of_fa_nt_are_one_algorithm(eta_g):
    task = class_task()
    options = {"sampled": None, "rounds": 8, "dtype": torch.float64}
    plain = trajectory(fadamgc.FANT(eta_l=0.01, eta_g=eta_g), task, "loop", **options)
    local = trajectory(fadamgc.FANTLocal(eta_l=0.01, eta_g=eta_g), task, "loop", **options)
    torch.testing.assert_close(local, plain, rtol=1e-9, atol=1e-11)
    runs = [
        simulate(cls(eta_l=0.01, eta_g=eta_g), task, **options) for cls in (fadamgc.FANT, fadamgc.FANTLocal)
    ]
    for plain_record, local_record in zip(runs[0].history, runs[1].history, strict=True):
        assert (
            local_record.bytes_down + local_record.bytes_up
            == (plain_record.bytes_down + plain_record.bytes_up) / 2
        )


@pytest.mark.parametrize("options", [{"sampled": 10}, {"sampled": 3}, {"sampled": 4, "tracked": 2}])
@pytest.mark.parametrize("name", ["fadamgc", "scaffold", "scaffold_m", "fa_nt"])
def test_y_is_the_mean_of_all_y_i_after_every_round(name, options):
    task = linear_task(synthetic.quadratics())
    checked = []

    def check(end):
        mean = torch.stack([client.y for client in end.clients]).mean(0)
        torch.testing.assert_close(end.server.y, mean, rtol=1e-10, atol=1e-12)
        checked.append(float(mean.abs().max()))

    algo = fadamgc.make_algorithm(name, eta_l=0.01)
    simulate(algo, task, rounds=12, batch_size=None, callbacks=[check], **options)
    assert len(checked) == 12
    assert checked[-1] > 1e-3


# The fixed point. At x*, with y_i = grad f_i(x*) and so y = 0, FAdamGC does not move. The numbers are
# small powers of two, so that all of it is exact: while v_hat is still zero, Adam would blow up the
# slightest rounding (eta_l / eps is 1e6 here), which is no drift.


def balanced() -> synthetic.Synthetic:
    """Four clients with curvatures 1, 4, 1, 4 and minimisers 4, 1, 4, -3: the optimum is 0."""
    clients = []
    for curvature, minimiser in ((1, 4), (4, 1), (1, 4), (4, -3)):
        X = torch.eye(4, dtype=torch.float64) * (4 * curvature) ** 0.5
        clients.append((X, X @ torch.full((4, 1), minimiser, dtype=torch.float64)))
    return synthetic.Synthetic(clients, torch.zeros(4, dtype=torch.float64), 4)


@EXECUTORS
@pytest.mark.parametrize(
    "algo",
    [
        fadamgc.FAdamGC(eta_l=0.01, init="gradient"),
        fadamgc.FAdamGC(eta_l=0.01, init="gradient", beta2=0.0, eps=0.0),
        fadamgc.Scaffold(eta_l=0.01, init="gradient"),
        fadamgc.FedKeel(eta_l=0.01, init="gradient"),
        fadamgc.FedKeel(eta_l=0.01, init="gradient", alpha=1.0),
    ],
)
def test_the_optimum_is_a_fixed_point_of_what_corrects_the_gradient(algo, executor):
    data = balanced()
    run = simulate(
        algo, linear_task(data, data.optimum), executor, rounds=20, sampled=3, tracked=2, batch_size=None
    )
    assert torch.equal(run.x, data.optimum)


@pytest.mark.parametrize("algo", [fadamgc.FANT(eta_l=0.01), fadamgc.LocalAdam(eta_l=0.01), fadamgc.FedAvg()])
def test_the_optimum_is_not_a_fixed_point_of_the_others(algo):
    data = balanced()
    run = simulate(algo, linear_task(data, data.optimum), rounds=50, sampled=None, batch_size=None)
    assert float((run.x - data.optimum).abs().max()) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("sampled", "long"), [(10, 200), (3, 500)])
def test_fadamgc_converges_to_the_optimum_of_ten_quadratics(sampled, long):
    data = synthetic.quadratics(clients=10, dim=5)
    options = {"sampled": sampled, "local_steps": 5, "batch_size": None, "eval_every": 500}
    task = linear_task(data)

    def distance(algo, rounds=200):
        run = simulate(algo, task, executor=NOT_COMPILED, rounds=rounds, **options)
        return float((run.x - data.optimum).abs().max())

    assert distance(fadamgc.FAdamGC(eta_l=0.05)) < 1e-10
    assert distance(fadamgc.FAdamGC(eta_l=0.05, v_hat="restart"), rounds=long) > 1e-4  # it leaves slowly
    assert distance(fadamgc.LocalAdam(eta_l=0.05)) > 0.05
    assert distance(fadamgc.FANT(eta_l=0.05)) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize(("sampled", "tracked"), [(10, 10), (3, 3), (4, 2)])
def test_fedkeel_converges_to_the_optimum_of_ten_quadratics(sampled, tracked):
    data = synthetic.quadratics(clients=10, dim=5)

    def distance(algo):
        run = simulate(
            algo, linear_task(data), executor=NOT_COMPILED, rounds=300, sampled=sampled, tracked=tracked,
            local_steps=5, batch_size=None, eval_every=300,
        )  # fmt: skip
        return float((run.x - data.optimum).abs().max())

    assert distance(fadamgc.FedKeel(eta_l=0.05)) < 1e-10
    assert distance(fadamgc.FedLADA(eta_l=0.05)) > 1e-5


def test_fedkeel_is_the_composition_of_its_parts_to_the_bit():
    rule = fadamgc.local.Adam(eta_l=0.01, beta1=0.5, amsgrad=True, m="reset", v="share", eps=0.0, v0=1e-16)
    composed = fadamgc.compose(rule, "pre+direction", alpha=0.4)
    task = class_task()
    plain = trajectory(composed, task, "loop", tracked=2)
    assert torch.equal(trajectory(fadamgc.FedKeel(eta_l=0.01), task, "loop", tracked=2), plain)
    lada = trajectory(fadamgc.FedLADA(eta_l=0.01, alpha=0.4, beta1=0.5), task, "loop")
    assert torch.equal(trajectory(fadamgc.FedKeel(eta_l=0.01), task, "loop", tracked=0), lada)
    assert not torch.equal(plain, lada)


@pytest.mark.slow
def test_fadamgc_converges_on_linear_regression_with_clients_of_different_size():
    data = synthetic.linear_regression(clients=8, dim=4, samples=(5, 40))
    run = simulate(
        fadamgc.FAdamGC(eta_l=0.02), linear_task(data), executor=NOT_COMPILED, rounds=300, sampled=4,
        tracked=2, local_steps=5, batch_size=None, eval_every=300,
    )  # fmt: skip
    assert float((run.x - data.optimum).abs().max()) < 1e-8


@pytest.mark.slow
def test_weighted_runs_find_the_optimum_of_the_weighted_mean():
    data = synthetic.linear_regression(clients=6, dim=3, samples=(5, 60), heterogeneity=2.0)
    X, y = (torch.cat(column) for column in zip(*data.clients, strict=True))
    pooled = torch.linalg.lstsq(X, y).solution[:, 0]  # a client counts as its number of samples
    assert float((pooled - data.optimum).abs().max()) > 0.01
    seen: list[float] = []
    sizes = torch.tensor([len(pair[0]) for pair in data.clients], dtype=torch.float64)

    def check(end):
        y_i = torch.stack([client.y for client in end.clients])
        weighted = (sizes[:, None] * y_i).sum(0) / sizes.sum()
        seen.append(float((end.server.y - weighted).abs().max()))

    for algo in (fadamgc.FAdamGC(eta_l=0.1), fadamgc.Scaffold(eta_l=0.1)):
        run = simulate(
            algo, linear_task(data), executor=NOT_COMPILED, rounds=200, sampled=3, local_steps=5,
            batch_size=None, eval_every=200, weights="size", callbacks=[check],
        )  # fmt: skip
        assert float((run.x - pooled).abs().max()) < 1e-8
    assert max(seen) < 1e-9


def digits_task(seed: int) -> fadamgc.Task:
    data = digits.load()
    parts = partition.dirichlet(data.train_y, 50, alpha=0.1, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    clients = [(data.train_x[i], data.train_y[i]) for i in map(torch.from_numpy, parts.indices)]
    return fadamgc.Task(model, F.cross_entropy, clients, (data.test_x, data.test_y))


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_fadamgc_is_ahead_of_local_adam_on_digits(seed):
    task = digits_task(seed)
    options = {"rounds": 60, "sampled": 10, "local_steps": 20, "batch_size": 16, "seed": seed, "target": 0.9}

    def rounds(algo, tracked=None):
        run = fadamgc.simulate(algo, task, executor=NOT_COMPILED, tracked=tracked, **options)
        return run.rounds_to(0.9) or 61

    full = rounds(fadamgc.FAdamGC(eta_l=3e-3))
    half = rounds(fadamgc.FAdamGC(eta_l=3e-3), tracked=5)
    local = rounds(fadamgc.LocalAdam(eta_l=3e-3))
    assert full < local
    assert half < local


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "executor"),
    [("fadamgc", "loop"), ("fadamgc", "threads"), ("fadamgc", "vectorized"), ("scaffold", "loop")],
)
def test_in_16_bits_y_is_the_mean_of_the_y_i(dtype, executor, name):
    """Gradients are computed in 16 bits; what is kept, sent and added is float32."""
    algo, task = fadamgc.make_algorithm(name, eta_l=0.01), class_task()
    options = {
        "rounds": 30,
        "sampled": 3,
        "tracked": 2,
        "local_steps": 4,
        "batch_size": 8,
        "executor": executor,
    }
    run = fadamgc.simulate(algo, task, dtype=dtype, **options)
    mean = torch.stack([client.y for client in run.clients]).mean(0)
    assert run.x.dtype == run.server.y.dtype == mean.dtype == torch.float32
    assert (run.server.y - mean).abs().max() < 1e-5 * mean.abs().max()
    wide = fadamgc.simulate(algo, task, **options)
    assert run.history[-1].train_loss == pytest.approx(wide.history[-1].train_loss, rel=0.05)
    assert run.history[-1].bytes_up == wide.history[-1].bytes_up  # the messages are float32
