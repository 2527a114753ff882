"""Who is drawn, and on which batches: functions of seed, round and client."""

from __future__ import annotations

import numpy as np
import pytest

from fadamgc.federation import sampling
from fadamgc.federation.sampling import draw, generator
from fadamgc.federation.settings import Settings


def batches(seed, t, client, samples, **settings):
    return Settings(rounds=1, seed=seed, **settings).batches(t, client, samples)


def rows_of(plan):
    """All batches at once, (K, B): step k uses the first ``sizes_of(plan)[k]`` of row k."""
    return plan.reader()(plan.steps)


def sizes_of(plan):
    return plan.size_of(0, plan.steps).tolist()


def test_batches_walk_through_the_data():
    plan = batches(seed=0, t=1, client=0, samples=10, batch_size=4, local_steps=5)
    assert rows_of(plan).shape == (5, 4)
    walk = rows_of(plan).reshape(-1)
    assert sorted(walk[:10]) == list(range(10))
    assert sorted(walk[10:]) == list(range(10))
    assert list(walk[:10]) != list(walk[10:])


def test_a_client_with_less_than_a_batch_uses_all_of_it():
    plan = batches(seed=0, t=1, client=0, samples=3, batch_size=4, local_steps=2)
    assert rows_of(plan).tolist() == [[0, 1, 2], [0, 1, 2]]
    plan = batches(seed=0, t=1, client=0, samples=3, batch_size=None, local_steps=1)
    assert rows_of(plan).tolist() == [[0, 1, 2]]


def test_epochs_end_with_a_smaller_batch():
    plan = batches(seed=0, t=1, client=0, samples=10, batch_size=4, local_steps=None, local_epochs=2)
    assert sizes_of(plan) == [4, 4, 2, 4, 4, 2]
    for epoch in (0, 3):
        rows = [row for k in range(epoch, epoch + 3) for row in rows_of(plan)[k, : sizes_of(plan)[k]]]
        assert sorted(rows) == list(range(10))
    exact = batches(seed=0, t=1, client=0, samples=8, batch_size=4, local_steps=None, local_epochs=1)
    assert sizes_of(exact) == [4, 4]


def eager(seed, t, client, samples, batch_size, local_steps, local_epochs=None):
    """All batches at once, by the rule as docs tell it."""
    random = generator(seed, 1, t, client)
    if batch_size is None or samples <= batch_size:
        return [np.arange(samples)] * (local_steps or local_epochs)
    if local_epochs is None:
        walk = np.concatenate(
            [random.permutation(samples) for _ in range(local_steps * batch_size // samples + 1)]
        )
        return list(walk[: local_steps * batch_size].reshape(local_steps, batch_size))
    orders = [random.permutation(samples) for _ in range(local_epochs)]
    return [order[k : k + batch_size] for order in orders for k in range(0, samples, batch_size)]


@pytest.mark.parametrize("positions", [1, 7, 100])
def test_batches_are_the_same_however_many_are_drawn_at_once(positions, monkeypatch):
    monkeypatch.setattr(sampling, "POSITIONS", positions)
    random = np.random.default_rng(0)
    for _ in range(100):
        samples, size = (int(n) for n in random.integers(1, 30, 2))
        work = {"local_steps": int(random.integers(1, 20))}
        if random.random() < 0.5:
            work = {"local_steps": None, "local_epochs": int(random.integers(1, 5))}
        address = {"seed": 3, "t": 2, "client": int(random.integers(5)), "samples": samples}
        plan = batches(**address, batch_size=None if size > 28 else size, **work)
        wanted = eager(**address, batch_size=None if size > 28 else size, **work)
        found = list(plan)
        assert [rows.tolist() for rows in found] == [rows.tolist() for rows in wanted]
        assert sizes_of(plan) == [len(rows) for rows in wanted]
        assert plan.total == sum(map(len, wanted))
        assert (plan.period == 1) == (len(set(map(len, wanted))) == 1)


def test_draws_are_addressed():
    first = draw(seed=3, t=7, n=30, S=10, tracked=4)
    assert draw(seed=3, t=7, n=30, S=10, tracked=4) == first
    assert len({draw(seed=3, t=t, n=30, S=10, tracked=4) for t in range(1, 20)}) == 19
    assert draw(seed=4, t=7, n=30, S=10, tracked=4) != first
    one = rows_of(batches(seed=3, t=7, client=2, samples=50, batch_size=5, local_steps=4))
    for other in ({"seed": 4}, {"t": 8}, {"client": 3}):
        address = {"seed": 3, "t": 7, "client": 2} | other
        assert not np.array_equal(rows_of(batches(**address, samples=50, batch_size=5, local_steps=4)), one)


def test_sampling_is_uniform():
    counts = np.zeros(6)
    tracked = np.zeros(6)
    for t in range(1, 1201):
        who = draw(seed=0, t=t, n=6, S=3, tracked=1)
        counts[list(who.sampled)] += 1
        tracked[list(who.tracked)] += 1
    assert abs(counts / 1200 - 1 / 2).max() < 0.06
    assert abs(tracked / 1200 - 1 / 6).max() < 0.05
