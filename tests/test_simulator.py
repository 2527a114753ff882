"""The engine and its executors: who takes part, on which batches, in which order, with which buffers."""

from __future__ import annotations

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
from fadamgc.federation import sampling
from fadamgc.federation.sampling import batches, draw, generator
from fadamgc.sim.executors import LoopExecutor, VectorizedExecutor, block_batches
from fadamgc.sim.executors.block_batches import _series
from problems import class_task, linear_task, mlp

OPTIONS = {"rounds": 3, "sampled": 4, "tracked": 2, "local_steps": 4, "batch_size": 5, "seed": 1}


def simulate(algo, task, **options):
    return fadamgc.simulate(algo, task, **(OPTIONS | options))


# Randomness


def test_batches_walk_through_the_data():
    plan = batches(seed=0, t=1, client=0, samples=10, batch_size=4, local_steps=5)
    assert plan.rows.shape == (5, 4)
    walk = plan.rows.reshape(-1)
    assert sorted(walk[:10]) == list(range(10))
    assert sorted(walk[10:]) == list(range(10))
    assert list(walk[:10]) != list(walk[10:])


def test_a_client_with_less_than_a_batch_uses_all_of_it():
    plan = batches(seed=0, t=1, client=0, samples=3, batch_size=4, local_steps=2)
    assert plan.rows.tolist() == [[0, 1, 2], [0, 1, 2]]
    plan = batches(seed=0, t=1, client=0, samples=3, batch_size=None, local_steps=1)
    assert plan.rows.tolist() == [[0, 1, 2]]


def test_epochs_end_with_a_smaller_batch():
    plan = batches(seed=0, t=1, client=0, samples=10, batch_size=4, local_steps=None, local_epochs=2)
    assert plan.size.tolist() == [4, 4, 2, 4, 4, 2]
    for epoch in (0, 3):
        rows = [row for k in range(epoch, epoch + 3) for row in plan.rows[k, : plan.size[k]]]
        assert sorted(rows) == list(range(10))
    exact = batches(seed=0, t=1, client=0, samples=8, batch_size=4, local_steps=None, local_epochs=1)
    assert exact.size.tolist() == [4, 4]


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
        assert plan.size.tolist() == [len(rows) for rows in wanted]
        assert plan.total == sum(map(len, wanted))
        assert plan.even == (len(set(map(len, wanted))) == 1)


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
def test_steps_without_number_need_no_memory(executor, batch_size):
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


@pytest.mark.parametrize("work", [{"local_steps": 6}, {"local_steps": None, "local_epochs": 2}])
@pytest.mark.parametrize("norm", [False, True])
def test_blocks_gather_batches_in_chunks_to_the_same_bits(work, norm, monkeypatch):
    def run():
        model = mlp(0, nn.BatchNorm1d(8)) if norm else mlp()
        return simulate(
            fadamgc.FAdamGC(), class_task((7, 22, 8, 17, 40, 9), model), executor="vectorized", **work
        ).x

    at_once = run()
    monkeypatch.setattr(block_batches, "GATHERED_BYTES", 1)
    assert torch.equal(run(), at_once)


def test_draws_are_addressed():
    first = draw(seed=3, t=7, n=30, S=10, tracked=4)
    assert draw(seed=3, t=7, n=30, S=10, tracked=4) == first
    assert len({draw(seed=3, t=t, n=30, S=10, tracked=4) for t in range(1, 20)}) == 19
    assert draw(seed=4, t=7, n=30, S=10, tracked=4) != first
    one = batches(seed=3, t=7, client=2, samples=50, batch_size=5, local_steps=4).rows
    for other in ({"seed": 4}, {"t": 8}, {"client": 3}):
        address = {"seed": 3, "t": 7, "client": 2} | other
        assert not np.array_equal(batches(**address, samples=50, batch_size=5, local_steps=4).rows, one)


def test_sampling_is_uniform():
    counts = np.zeros(6)
    tracked = np.zeros(6)
    for t in range(1, 1201):
        who = draw(seed=0, t=t, n=6, S=3, tracked=1)
        counts[list(who.sampled)] += 1
        tracked[list(who.tracked)] += 1
    assert abs(counts / 1200 - 1 / 2).max() < 0.06
    assert abs(tracked / 1200 - 1 / 6).max() < 0.05


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


# The model


def test_x_is_in_the_order_of_the_parameters():
    task = class_task()
    run = simulate(fadamgc.FedAvg(), task, rounds=0)
    assert torch.equal(run.x, torch.nn.utils.parameters_to_vector(task.model.parameters()))
    run = simulate(fadamgc.FedAvg(), task)
    assert torch.equal(run.x, torch.nn.utils.parameters_to_vector(run.model.parameters()))
    assert not torch.equal(run.x, torch.nn.utils.parameters_to_vector(task.model.parameters()))


@pytest.mark.parametrize("executor", ["loop", "threads", "vectorized"])
def test_frozen_parameters_are_neither_trained_nor_sent(executor):
    model = mlp()
    model[0].weight.requires_grad_(False)
    task = class_task(model=model)
    run = simulate(fadamgc.FAdamGC(), task, executor=executor)
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert run.x.shape == (trainable,)
    assert torch.equal(run.model[0].weight, model[0].weight)
    assert not torch.equal(run.model[0].bias, model[0].bias)
    assert run.history[0].bytes_down == 4 * 2 * trainable * 4
    assert run.history[0].bytes_up == (4 + 2) * trainable * 4


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 5, bias=False)
        self.last = nn.Linear(5, 5, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x):
        return self.last(torch.tanh(self.first(x)))


@pytest.mark.parametrize("executor", ["loop", "threads", "vectorized"])
def test_tied_parameters_stay_tied(executor):
    task = class_task(model=Tied())
    run = simulate(fadamgc.FedAvg(), task, executor=executor, dtype=torch.float64)
    assert run.x.shape == (25,)
    assert run.model.last.weight is run.model.first.weight
    # By autograd on the module itself: one client, one step.
    module = Tied().double()
    module.load_state_dict(task.model.state_dict())
    x, y = task.pairs[0]
    F.cross_entropy(module(x.double()), y).backward()
    one = fadamgc.simulate(
        fadamgc.FedAvg(eta_l=1.0),
        task,
        schedule=[([0], [])],
        local_steps=1,
        dtype=torch.float64,
        executor=executor,
    )
    torch.testing.assert_close(one.x, (module.first.weight - module.first.weight.grad).detach().reshape(-1))


def batchnorm_task():
    # A constant buffer beside BatchNorm's: it must not travel.
    model = mlp(0, nn.BatchNorm1d(8))
    model.register_buffer("scale", torch.ones(1000))
    return class_task(model=model, sizes=(4, 20, 7, 16))


@pytest.mark.parametrize("algo", [fadamgc.FAdamGC(), fadamgc.Scaffold(), fadamgc.FedAvgM()])
def test_batchnorm_buffers_are_averaged_and_never_corrected(algo):
    task = batchnorm_task()
    options = {"rounds": 2, "sampled": 3, "tracked": 2, "dtype": torch.float64}
    runs = [
        simulate(algo, task, executor=executor, **options) for executor in ("loop", "vectorized", "threads")
    ]
    assert set(runs[0].buffers) == {"1.running_mean", "1.running_var", "1.num_batches_tracked"}
    for run in runs[1:]:
        for name, value in runs[0].buffers.items():
            torch.testing.assert_close(run.buffers[name], value, rtol=1e-10, atol=1e-11)
        torch.testing.assert_close(run.x, runs[0].x, rtol=1e-10, atol=1e-11)
    assert int(runs[0].buffers["1.num_batches_tracked"]) == 8
    d = runs[0].x.numel()
    vectors = fadamgc.simulate(algo, class_task(), rounds=1, sampled=3, tracked=2, local_steps=1).history[0]
    extra = 3 * (8 + 8) * 8 + 3 * 8  # two vectors of 8 and one count, to and from each of 3 clients
    small = sum(p.numel() for p in class_task().model.parameters())
    assert runs[0].history[0].bytes_down == vectors.bytes_down // 4 // small * d * 8 + extra


def test_batchnorm_buffers_by_hand():
    """One round of one step: the mean over clients of what the module itself would have."""
    task = batchnorm_task()
    run = fadamgc.simulate(
        fadamgc.FAdamGC(),
        task,
        schedule=[([0, 2, 3], [0])],
        local_steps=1,
        batch_size=None,
        dtype=torch.float64,
    )
    means = []
    for i in (0, 2, 3):
        module = mlp(0, nn.BatchNorm1d(8)).double().train()
        module(task.pairs[i][0].double())
        means.append(module[1].running_mean)
    torch.testing.assert_close(
        run.buffers["1.running_mean"], torch.stack(means).mean(0), rtol=1e-12, atol=1e-13
    )
    assert torch.equal(run.model[1].running_mean.double(), run.buffers["1.running_mean"].float().double())


class WeightedLoss(nn.Module):
    def forward(self, output, target):
        return F.cross_entropy(output, target, weight=torch.tensor([0.1, 1.0, 5.0], dtype=output.dtype))


def test_a_loss_that_is_no_plain_mean_is_not_padded():
    """Class weights make the loss a quotient; padding would change it, grouping by size does not."""
    task = class_task(sizes=(3, 20, 7, 16))
    task = fadamgc.Task(task.model, WeightedLoss(), task.pairs, task.test_pair)
    for plan in ({"local_steps": 3}, {"local_steps": None, "local_epochs": 1}):
        runs = [
            simulate(fadamgc.FAdamGC(), task, executor=executor, dtype=torch.float64, **plan)
            for executor in ("loop", "vectorized", "threads")
        ]
        for run in runs[1:]:
            torch.testing.assert_close(run.x, runs[0].x, rtol=1e-12, atol=1e-13)


def agree(task, **options):
    """All executors give the same, in float64."""
    options = {"dtype": torch.float64, "rounds": 3, "sampled": None, "tracked": None} | options
    runs = [
        simulate(fadamgc.FedAvg(), task, executor=e, **options) for e in ("loop", "vectorized", "threads")
    ]
    for run in runs[1:]:
        torch.testing.assert_close(run.x, runs[0].x, rtol=1e-10, atol=1e-12)
        for name, value in runs[0].buffers.items():
            torch.testing.assert_close(run.buffers[name], value, rtol=1e-9, atol=1e-11)
    start = simulate(fadamgc.FedAvg(), task, **(options | {"rounds": 0})).x
    assert not torch.equal(runs[0].x, start)


def zeroed(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        list(model.modules())[-1].weight.zero_()
        list(model.modules())[-1].bias.zero_()
    return model


def test_class_weights_are_not_lost_where_the_initial_model_hides_them():
    """All outputs zero: every sample has the same loss, so the weighted mean is the plain one, there."""
    task = class_task(sizes=(3, 20, 7, 16))
    agree(fadamgc.Task(zeroed(nn.Linear(5, 3)), WeightedLoss(), task.pairs, task.test_pair), batch_size=8)


@pytest.mark.parametrize("seed", range(4))
def test_the_weight_of_a_rare_class_is_not_lost(seed):
    task = class_task(sizes=(3, 60, 7, 60), seed=seed)
    pairs = [(x, y.clamp(max=1)) for x, y in task.pairs]
    pairs[3][1][17] = 2  # the only one of its class
    agree(fadamgc.Task(task.model, WeightedLoss(), pairs, task.test_pair), batch_size=8)


def test_labels_that_the_loss_ignores_are_ignored():
    """A mean over tokens is no mean over samples when some tokens do not count."""
    random = torch.Generator().manual_seed(0)
    clients = []
    for samples in (3, 9, 6):
        x, y = torch.randn(samples, 4, 5, generator=random), torch.randint(3, (samples, 4), generator=random)
        y[torch.rand(samples, 4, generator=random) < 0.4] = -100
        y[:, 0] = 1
        clients.append((x, y))

    def loss(output, target):
        return F.cross_entropy(output.reshape(-1, 3), target.reshape(-1))

    agree(fadamgc.Task(zeroed(nn.Linear(5, 3)), loss, clients), batch_size=4)


@pytest.mark.parametrize("inner", [nn.BatchNorm1d(8), nn.LayerNorm(8), nn.GroupNorm(2, 8)])
def test_norms(inner):
    agree(class_task(model=zeroed(mlp(0, inner)), sizes=(4, 20, 7, 16)), batch_size=6)


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        x /= 2.0
        return self.linear(x)


def test_a_model_that_works_in_place_spoils_no_data():
    task = class_task()
    before = [x.clone() for x, _ in [*task.pairs, task.test_pair]]
    task = fadamgc.Task(InPlace(), F.cross_entropy, task.pairs, task.test_pair)
    for executor in ("loop", "vectorized", "threads"):
        simulate(fadamgc.Scaffold(option="I", init="gradient"), task, executor=executor)
    for (x, _), was in zip([*task.pairs, task.test_pair], before, strict=True):
        assert torch.equal(x, was)


class RunningMean(nn.Module):
    """Keeps a statistic by assignment, not in place."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("ema", torch.zeros(3))

    def forward(self, x):
        output = self.linear(x)
        if self.training:
            self.ema = 0.5 * self.ema + 0.5 * output.mean(0)
        return output


def test_buffers_that_are_assigned():
    task = class_task(model=RunningMean())
    agree(task)
    run = simulate(fadamgc.FedAvg(), task, executor="loop")
    assert (run.buffers["ema"] != 0).all()
    assert (task.model.ema == 0).all()


def test_batchnorm_on_data_that_leaves_its_mean_at_zero():
    task = class_task(sizes=(8, 4))
    pairs = [(x.clone(), y) for x, y in task.pairs]
    pairs[0][0][:2] = 0.0
    model = nn.Sequential(nn.BatchNorm1d(5), nn.Linear(5, 3))
    run = simulate(fadamgc.FedAvg(), fadamgc.Task(model, F.cross_entropy, pairs), sampled=2)
    assert (run.buffers["0.running_mean"] != 0).all()


def test_the_type_of_the_trained_parameters_counts():
    class Backbone(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen = nn.Linear(5, 8).half().requires_grad_(False)
            self.head = nn.Linear(8, 3)

        def forward(self, x):
            return self.head(self.frozen(x.half()).float())

    run = simulate(fadamgc.FedAvg(), class_task(model=Backbone()), executor="loop")
    assert run.x.dtype == torch.float32
    assert run.model.frozen.weight.dtype == torch.float16


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        return self.linear(F.dropout(x, 0.5))  # also in evaluation


def test_randomness_of_an_evaluation_is_addressed():
    task = class_task(model=Noisy())
    before = torch.get_rng_state()
    one, two = (simulate(fadamgc.FedAvg(), task) for _ in range(2))
    assert one.history == two.history
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("executor", ["loop", "threads", "vectorized"])
def test_inside_no_grad_and_inference_mode(executor):
    plain = simulate(fadamgc.FAdamGC(), class_task(), executor=executor)
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert torch.equal(simulate(fadamgc.FAdamGC(), class_task(), executor=executor).x, plain.x)


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
