"""The engine: who takes part, in which order, with which weights; evaluation, stopping, callbacks."""

from __future__ import annotations

import re
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import fadamgc
from fadamgc.data import synthetic
from fadamgc.errors import ClientError
from fadamgc.sim.executors import LoopExecutor, VectorizedExecutor, block
from fadamgc.sim.executors.block import _series
from problems import class_task, linear_task, mlp
from short_runs import simulate


def test_runs_of_steps_are_cut_where_they_must_be():
    random = np.random.default_rng(0)
    for _ in range(200):
        K, chunk, least, period = (int(n) for n in random.integers(1, 40, 4))
        least = min(least, K)
        ends = {k for k in range(1, K) if period > 1 and (k % period == 0 or (k + 1) % period == 0)}
        wanted = sorted({*range(0, K, chunk), K, least, *ends})
        assert [first for first, _ in _series(K, chunk, least, period)] + [K] == wanted
        assert all(a[1] == b[0] for a, b in pairwise(_series(K, chunk, least, period)))


@pytest.mark.parametrize("batch_size", [None, 4])
@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_a_trillion_steps_need_no_memory(executor, batch_size):
    calls = 0

    def loss(output, target):
        nonlocal calls
        calls += 1
        if calls > 40:
            raise RuntimeError("enough")
        return F.cross_entropy(output, target)

    task = fadamgc.Task(mlp(), loss, [(torch.randn(9, 5), torch.zeros(9).long())])
    with pytest.raises(ClientError, match=r"client 0 in round 1, at local step \d+, .*enough"):
        simulate(fadamgc.FedAvg(), task, sampled=1, tracked=1, local_steps=10**12, batch_size=batch_size,
                 executor=executor)  # fmt: skip
    assert calls == 41


@pytest.mark.slow
@pytest.mark.parametrize("work", [{"local_steps": 6}, {"local_steps": None, "local_epochs": 2}])
@pytest.mark.parametrize("norm", [False, True])
def test_blocks_gather_batches_in_chunks_to_the_same_bits(work, norm, monkeypatch):
    def run():
        model = mlp(0, nn.BatchNorm1d(8)) if norm else mlp()
        return simulate(
            fadamgc.FAdamGC(), class_task((7, 22, 8, 17, 40, 9), model), executor="vectorized", **work
        ).x

    at_once = run()
    monkeypatch.setattr(block, "GATHERED_BYTES", 1)
    assert torch.equal(run(), at_once)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["loop", "threads", "vectorized"])
def test_another_seed_is_another_run(executor):
    task = class_task()
    runs = [simulate(fadamgc.FedAvg(), task, executor=executor, seed=seed) for seed in (0, 1)]
    assert not torch.equal(runs[0].x, runs[1].x)


class Backwards:
    """Does the clients in reverse, as a pool of workers might."""

    name = "backwards"

    def __init__(self, problem):
        self.loop = LoopExecutor(problem)

    def run(self, jobs):
        return self.loop.run(jobs[::-1])


def test_results_do_not_depend_on_the_order_of_execution():
    task = class_task()
    forwards = simulate(fadamgc.FAdamGC(), task, executor="loop")
    backwards = simulate(fadamgc.FAdamGC(), task, executor=Backwards)
    assert torch.equal(forwards.x, backwards.x)
    assert forwards.history == backwards.history


@pytest.mark.slow
def test_results_do_not_depend_on_the_size_of_blocks():
    task = class_task()
    runs = [
        simulate(
            fadamgc.FAdamGC(), task, executor=partial(VectorizedExecutor, block=block), dtype=torch.float64
        )
        for block in (1, 2, 3, None)
    ]
    for run in runs[1:]:
        assert torch.equal(run.x, runs[0].x)


def test_dropout_is_addressed_and_refused_where_it_cannot_be():
    task = class_task(model=mlp(0, nn.Dropout(0.5)))
    one, *others = (simulate(fadamgc.FedAvg(), task, executor=e) for e in ("loop", Backwards, "threads"))
    for other in others:
        assert torch.equal(one.x, other.x)
    assert simulate(fadamgc.FedAvg(), task).settings["executor"] == "loop"
    with pytest.raises(fadamgc.InputError, match="vectorized.*Sequential.*random.*use executor='loop'"):
        simulate(fadamgc.FedAvg(), task, executor="vectorized")


# Who takes part


def test_schedule_says_who_takes_part():
    task = class_task()
    schedule = [([2, 0], [0]), ([5, 1, 3], []), ([4], [4])]
    options = {"local_steps": 3, "batch_size": 4}
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, schedule=schedule, **options)
    assert [(r.sampled, r.tracked) for r in run.history] == [((0, 2), (0,)), ((1, 3, 5), ()), ((4,), (4,))]
    assert run.clients.participants == (0, 1, 2, 3, 4, 5)
    zero = torch.zeros_like(run.x)
    assert [bool((client.y == zero).all()) for client in run.clients] == [
        False,
        True,
        True,
        True,
        False,
        True,
    ]
    assert all((client.v > 0).any() for client in run.clients)


def test_the_run_follows_the_schedule_that_another_drew():
    task = class_task()
    drawn = simulate(fadamgc.FAdamGC(), task)
    schedule = [(r.sampled, r.tracked) for r in drawn.history]
    given = simulate(fadamgc.FAdamGC(), task, schedule=schedule, sampled=None, tracked=None)
    assert torch.equal(given.x, drawn.x)


def test_defaults_are_all_clients_and_all_tracked():
    run = simulate(fadamgc.FAdamGC(), class_task(), sampled=None, tracked=None)
    assert all(r.sampled == r.tracked == tuple(range(6)) for r in run.history)


def test_numbers_of_numpy_are_numbers(tmp_path):
    options = {"rounds": np.int64(2), "sampled": np.int32(3), "tracked": np.int64(1), "seed": np.int64(4)}
    run = simulate(fadamgc.FAdamGC(eta_l=np.float32(0.5)), class_task(), target=np.float32(2), **options)
    run.save(tmp_path / "run")
    plain = simulate(fadamgc.FAdamGC(eta_l=0.5), class_task(), rounds=2, sampled=3, tracked=1, seed=4)
    assert torch.equal(run.x, plain.x)
    assert fadamgc.load_run(tmp_path / "run").algorithm == plain.algorithm


def test_short_names():
    task = class_task()
    assert repr(task) == "Task('task', model=Sequential, clients=6, samples=95)"
    assert repr(simulate(fadamgc.FedAvg(), task)).startswith("Run('fedavg' on 'task', rounds=3, metric=")


@pytest.mark.slow
def test_graphs_of_many_shapes_are_not_all_kept(monkeypatch):
    monkeypatch.setattr("fadamgc.sim.executors.vectorized.CACHED_GRAPHS", 3)
    task = class_task(sizes=range(2, 8), model=mlp(0, nn.BatchNorm1d(8)))
    made = []

    def factory(problem):
        made.append(VectorizedExecutor(problem))
        return made[0]

    simulate(fadamgc.FedAvg(), task, sampled=6, rounds=1, local_steps=1, batch_size=None, executor=factory)
    assert len(made[0]._graphs) == 3


# Weights, evaluation, stopping, callbacks


@pytest.mark.slow
def test_weights_weigh_the_mean():
    task = class_task(sizes=(2, 6, 4))
    options = {"local_steps": 2, "batch_size": None, "dtype": torch.float64, "rounds": 1}
    alone = [fadamgc.simulate(fadamgc.FedAvg(), task, schedule=[([i], [])], **options).x for i in range(3)]
    by_size = fadamgc.simulate(fadamgc.FedAvg(), task, weights="size", **options)
    torch.testing.assert_close(by_size.x, (2 * alone[0] + 6 * alone[1] + 4 * alone[2]) / 12)
    given = fadamgc.simulate(fadamgc.FedAvg(), task, weights=[1, 1, 2], **options)
    torch.testing.assert_close(given.x, (alone[0] + alone[1] + 2 * alone[2]) / 4)
    uniform = fadamgc.simulate(fadamgc.FedAvg(), task, **options)
    torch.testing.assert_close(uniform.x, (alone[0] + alone[1] + alone[2]) / 3)


@pytest.mark.slow
def test_weights_of_one_change_nothing():
    task = class_task()
    one, two = (simulate(fadamgc.FAdamGC(), task, weights=w) for w in ("uniform", [2.0] * 6))
    torch.testing.assert_close(one.x, two.x)


def test_evaluation_every_n_rounds_and_after_the_last():
    run = simulate(fadamgc.FedAvg(), class_task(), rounds=7, eval_every=3)
    assert [r.round for r in run.history if r.test_loss is not None] == [3, 6, 7]
    assert [r.round for r in run.history] == list(range(1, 8))
    assert all(r.train_loss is not None for r in run.history)


def test_the_numbers_of_an_evaluation():
    task = class_task()
    run = simulate(fadamgc.FedAvg(), task)
    x, y = task.test_pair
    with torch.no_grad():
        output = run.model.eval()(x)
    last = run.history[-1]
    assert last.test_loss == pytest.approx(float(F.cross_entropy(output, y)), rel=1e-6)
    assert last.test_accuracy == float((output.argmax(1) == y).double().mean())
    assert last.test_metric == last.test_accuracy


def test_train_loss_by_hand():
    data = synthetic.quadratics(clients=2, dim=3)
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.1), linear_task(data), rounds=1, local_steps=2)
    losses = []
    for X, y in data.clients:
        w = torch.zeros(3, 1, dtype=torch.float64)
        for _ in range(2):
            losses.append(float(0.5 * ((X @ w - y) ** 2).mean()))
            w = w - 0.1 * X.T @ (X @ w - y) / len(X)
    assert run.history[0].train_loss == pytest.approx(sum(losses) / 4, rel=1e-12)


def test_other_metrics_and_goals():
    task = class_task(metric="loss")
    run = simulate(fadamgc.FedAvg(eta_l=0.5), task, rounds=6)
    losses = [r.test_loss for r in run.history]
    assert [r.test_metric for r in run.history] == losses
    assert run.history[0].test_accuracy is None
    target = losses[3]
    assert run.rounds_to(target) == 1 + next(i for i, loss in enumerate(losses) if loss <= target)
    assert run.rounds_to(-1.0) is None
    assert run.minutes_to(-1.0) is None
    error = class_task(metric=lambda output, target: (output.argmax(1) != target).double().mean(), goal="min")
    run = simulate(fadamgc.FedAvg(eta_l=0.5), error, rounds=2)
    assert 0 <= run.history[-1].test_metric <= 1
    assert run.rounds_to(1.0) == 1


def test_no_test_data():
    task = class_task()
    run = simulate(fadamgc.FedAvg(), fadamgc.Task(task.model, task.loss, task.pairs))
    assert run.history[-1].test_loss is None
    assert run.rounds_to(0.0) is None


def test_stop_at_target():
    task = class_task()
    whole = simulate(fadamgc.FedAvg(eta_l=0.5), task, rounds=20)
    target = max(r.test_accuracy for r in whole.history[:8])
    reached = whole.rounds_to(target)
    run = simulate(fadamgc.FedAvg(eta_l=0.5), task, rounds=20, target=target)
    assert len(run.history) == reached < 20
    assert run.history == whole.history[:reached]
    assert whole.minutes_to(target) == pytest.approx(
        sum(r.simulated_seconds for r in whole.history[:reached]) / 60
    )


@pytest.mark.slow
def test_only_true_stops():
    for answer, rounds in ((1, 3), (torch.ones(2), 3), ("yes", 3), (True, 1), (np.True_, 1)):
        run = simulate(fadamgc.FedAvg(), class_task(), callbacks=[lambda end, answer=answer: answer])
        assert len(run.history) == rounds


def test_callbacks_see_each_round_and_can_stop():
    seen = []

    def stop_at_4(end: fadamgc.RoundEnd) -> bool:
        seen.append((end.record.round, end.server.x.clone()))
        return end.record.round == 4

    run = simulate(fadamgc.FedAvg(), class_task(), rounds=9, callbacks=[stop_at_4])
    assert [t for t, _ in seen] == [1, 2, 3, 4]
    assert torch.equal(seen[-1][1], run.x)
    assert len(run.history) == 4


def test_to_pandas():
    run = simulate(fadamgc.FedAvg(), class_task(), rounds=3, eval_every=2)
    table = run.to_pandas()
    assert list(table["round"]) == [1, 2, 3]
    assert table["test_accuracy"].isna().tolist() == [True, False, False]
    assert (table["bytes_up"] > 0).all()


# Data


class Pairs(Dataset):
    def __init__(self, x, y):
        self.x, self.y = x, y

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        return self.x[i], int(self.y[i])


@pytest.mark.slow
def test_datasets_are_as_good_as_tensors():
    task = class_task()
    runs = [
        simulate(
            fadamgc.FedAvg(), fadamgc.Task(task.model, task.loss, [kind(*p) for p in task.pairs], task.test)
        )
        for kind in (lambda x, y: (x, y), TensorDataset, Pairs)
    ]
    assert torch.equal(runs[0].x, runs[1].x)
    assert torch.equal(runs[0].x, runs[2].x)


def test_dtype_is_of_model_and_data():
    run = simulate(fadamgc.FAdamGC(), class_task(), dtype=torch.float64)
    assert run.x.dtype == run.clients[run.history[0].sampled[0]].v.dtype == torch.float64
    assert simulate(fadamgc.FAdamGC(), class_task()).x.dtype == torch.float32


def test_gradient_start_is_counted():
    """init="gradient" asks every client once, before round 1; that traffic and work belong to round 1."""
    task = class_task()
    zero, gradient = (
        simulate(fadamgc.FAdamGC(init=init), task, rounds=2, cost=fadamgc.CostModel(1.0, 1.0, 0.5))
        for init in ("zero", "gradient")
    )
    vector = 4 * zero.x.numel()
    assert gradient.history[0].bytes_down - zero.history[0].bytes_down == 6 * vector
    assert gradient.history[0].bytes_up - zero.history[0].bytes_up == 6 * vector
    passes = [-(-len(x) // 5) for x, _ in task.pairs]
    extra = gradient.history[0].simulated_seconds - zero.history[0].simulated_seconds
    assert extra == pytest.approx(2 * 8e-6 * vector + 0.5 * sum(passes) / 6)
    assert gradient.history[1].bytes_up == zero.history[1].bytes_up


def test_option_one_is_counted():
    task = class_task(sizes=(10,) * 6)
    cost = fadamgc.CostModel(seconds_per_step=1.0, down_mbps=float("inf"), up_mbps=float("inf"))
    two, one = (simulate(fadamgc.Scaffold(option=o), task, cost=cost).history[0] for o in ("II", "I"))
    assert two.simulated_seconds == 4
    assert one.simulated_seconds == 4 + 2


def test_public_names():
    for name in fadamgc.__all__:
        assert getattr(fadamgc, name).__doc__, name
    assert sorted(fadamgc.__all__, key=lambda s: s) == sorted(set(fadamgc.__all__))


@pytest.mark.slow
def test_without_a_terminal_there_is_a_line_now_and_then(monkeypatch, capsys):
    from fadamgc.sim import progress

    clock = iter(range(0, 10_000, 20))
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(clock))
    fadamgc.simulate(fadamgc.FedAvg(), class_task(), rounds=8, local_steps=1)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 3
    assert re.fullmatch(r"FedAvg on task: round 1 of 8, 0\.\d+; about 2 min left", lines[0])
    assert lines[1].startswith("FedAvg on task: round 4 of 8")
    fadamgc.simulate(fadamgc.FedAvg(), class_task(), rounds=8, local_steps=1, progress=False)
    assert capsys.readouterr().err == ""
