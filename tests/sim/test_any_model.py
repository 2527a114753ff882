"""Models and losses of every kind: frozen, tied and assigned parts, buffers, noise, sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fadamgc
from problems import class_task, mlp
from short_runs import simulate


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


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_loss_that_is_not_a_plain_mean_is_not_padded():
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


@pytest.mark.slow
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


@pytest.mark.slow
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
