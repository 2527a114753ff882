"""Rounds whose length a coin decides: the same for all clients, a function of seed and round."""

from __future__ import annotations

import pytest
import torch

import fadamgc
from fadamgc.federation.sampling import draw_steps
from problems import class_task


def lengths(run):
    return [record.work[0].steps for record in run.history]


def test_a_coin_gives_all_clients_the_same_steps_on_every_executor(tmp_path):
    task, options = class_task(), {"rounds": 6, "batch_size": 4, "seed": 3, "dtype": torch.float64}
    algorithm = fadamgc.Scaffnew(eta_l=0.05, p=0.3)
    run = fadamgc.simulate(algorithm, task, executor="loop", **options)
    K = [draw_steps(3, t, 0.3) for t in range(1, 7)]
    assert lengths(run) == [(k,) * task.n for k in K]
    assert len(set(K)) > 2
    for executor in ("vectorized", "threads"):
        other = fadamgc.simulate(algorithm, task, executor=executor, **options)
        assert lengths(other) == lengths(run)
        torch.testing.assert_close(other.x, run.x, rtol=1e-11, atol=1e-12)
    fadamgc.simulate(algorithm, task, executor="loop", checkpoint=tmp_path, **options | {"rounds": 2})
    resumed = fadamgc.simulate(algorithm, task, executor="loop", checkpoint=tmp_path, resume=True, **options)
    assert torch.equal(resumed.x, run.x)


def test_the_mean_of_the_lengths_is_one_over_p():
    mean = sum(draw_steps(0, t, 0.2) for t in range(1, 2001)) / 2000
    assert mean == pytest.approx(5, rel=0.05)


def test_epochs_and_a_coin_are_refused():
    with pytest.raises(fadamgc.InputError, match="local_epochs=1 is given, but Scaffnew draws the number"):
        fadamgc.simulate(fadamgc.Scaffnew(p=0.5), class_task(), rounds=1, local_epochs=1)


def test_a_federation_draws_the_simulators_coin(tmp_path):
    pytest.importorskip("flwr")
    from world import World

    algorithm = fadamgc.Scaffnew(eta_l=0.05, p=0.4)
    world = World(tmp_path, algorithm, rounds=3, sampled=3, tracked=3, min_clients=3)
    for _ in range(3):
        world.round()
    settings = {"rounds": 3, "batch_size": 4, "seed": 5, "dtype": torch.float64, "executor": "loop"}
    run = fadamgc.simulate(algorithm, world.task, **settings)
    assert torch.equal(world.server.federation.state.server.x, run.x)
