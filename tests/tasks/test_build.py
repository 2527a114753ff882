"""Tasks of a spec: models, partitions, metrics."""

from __future__ import annotations

import pytest
import torch

from fadamgc import InputError
from fadamgc.models import mlp
from fadamgc.tasks.build import build_task, label_counts
from tiny_experiments import TINY, spec_of


@pytest.mark.parametrize(
    ("task", "message"),
    [
        (
            'data = "linear_regression"\nsamples = 9223372036854775807',
            "clients=10 with samples=9223372036854775807 needs",
        ),
        (
            'data = "linear_regression"\ndim = 4000000000',
            "dim=4000000000 needs 1.28e\\+11 GB, this machine has",
        ),
        (
            'data = "linear_regression"\nclients = 1000000000000',
            "clients=1000000000000 with samples=40 needs",
        ),
        ('data = "quadratics"\nclients = 100000000\ndim = 100000', "clients=100000000 with dim=100000 needs"),
        ('data = "digits"\nhidden = [9007199254740992]', "hidden=.9007199254740992. is too large"),
    ],
)
def test_a_task_that_needs_too_much_memory_is_refused(task, message):
    spec = spec_of(f'[task]\n{task}\n[run]\nrounds = 1\nlocal_steps = 1\n[[method]]\nalgorithm = "fedavg"')
    with pytest.raises(InputError, match=message):
        build_task(spec.task, seed=0)


def test_a_model_is_made_from_its_own_seed():
    before = torch.get_rng_state()
    a, b, other = mlp(4, [3], 2, seed=5), mlp(4, [3], 2, seed=5), mlp(4, [3], 2, seed=6)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert not torch.equal(next(a.parameters()), next(other.parameters()))
    assert a(torch.zeros(5, 2, 2)).shape == (5, 2)


@pytest.mark.parametrize("settings", [{"hidden": [0]}, {"inputs": 0}, {"outputs": 0}, {"seed": -1}])
def test_bad_sizes_of_a_model_are_refused(settings):
    (name,) = settings
    with pytest.raises(InputError, match=name):
        mlp(**{"inputs": 4, "hidden": [3], "outputs": 2, "seed": 0} | settings)


def test_partition_and_weights_depend_on_the_seed():
    spec = spec_of(TINY).task
    one, same, other = build_task(spec, 0), build_task(spec, 0), build_task(spec, 1)
    assert torch.equal(one.pairs[0][0], same.pairs[0][0])
    assert [len(x) for x, _ in one.pairs] != [len(x) for x, _ in other.pairs]
    assert not torch.equal(next(one.model.parameters()), next(other.model.parameters()))
    assert torch.equal(one.test_pair[0], other.test_pair[0])


@pytest.mark.parametrize(
    "more", ['partition = "iid"', 'partition = "shards"\nshards_per_client = 3', "alpha = 100"]
)
def test_a_spec_can_use_every_partition(more):
    text = TINY.replace("alpha = 1.0", more).replace("min_size = 4", "")
    labels = label_counts(spec_of(text).task, 0)
    assert labels.counts.shape == (6, 10)
    assert labels.counts.sum() == 1437


@pytest.mark.parametrize(
    "task", ['data = "quadratics"\nclients = 4\ndim = 3', 'data = "linear_regression"\nsamples = [12, 40]']
)
def test_the_metric_of_a_synthetic_task_is_the_distance_to_the_optimum(task):
    spec = spec_of(f'[task]\n{task}\n[run]\nrounds = 1\nlocal_steps = 1\n[[method]]\nalgorithm = "fedavg"')
    built = build_task(spec.task, 3)
    X, Y = built.test_pair
    W = torch.randn(X.shape[1], 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))

    def f(w):
        return sum(0.5 * (x @ w - y).square().mean() for x, y in built.pairs) / len(built.pairs)

    w = W.clone().requires_grad_()
    best = torch.linalg.lstsq(X, Y).solution
    assert built.goal == "min"
    assert float(built.metric(X @ W, Y)) == pytest.approx(float(f(W) - f(best)), rel=1e-9)
    assert float(built.metric(X @ best, Y)) < 1e-25
    (g,) = torch.autograd.grad(f(w), w)
    assert g.abs().max() > 1e-3  # the point above was not the optimum by accident
