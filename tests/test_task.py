"""Bad tasks: each is refused with a message that names what is wrong with model, loss or data."""

from __future__ import annotations

import math
import random
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import fadamgc
from problems import class_task, half_squared_error, mlp
from short_runs import GOOD


def pairs(*sizes: int):
    return [(torch.ones(k, 5), torch.zeros(k, dtype=torch.long)) for k in sizes]


def changed(i: int, x=None, y=None):
    data = pairs(4, 4, 4)
    data[i] = (data[i][0] if x is None else x, data[i][1] if y is None else y)
    return data


def at(tensor: torch.Tensor, index: tuple[int, ...] | int, value: float) -> torch.Tensor:
    tensor = tensor.clone()
    tensor[index] = value
    return tensor


NARROW, WIDE = torch.ones(3, 5), torch.ones(4, 6)
X, Y = torch.ones(4, 5), torch.zeros(4, dtype=torch.long)
ONES = torch.ones(4, 1)
FROZEN = nn.Linear(5, 3).requires_grad_(False)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # the first are a prototype, the second are deprecated
    NESTED = torch.nested.nested_tensor([torch.ones(5), torch.ones(4)])
    QUANTIZED = torch.quantize_per_tensor(X, 0.1, 0, torch.quint8)


class Summed(nn.Module):
    """A model that forgets which sample is which."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)

    def forward(self, x):
        return self.linear(x).sum()


BAD_TASKS = [
    ({"clients": []}, r"clients=\[\] is empty"),
    ({"clients": [*pairs(4, 4), (torch.ones(0, 5), torch.zeros(0, dtype=torch.long))]}, "client 2 is empty"),
    ({"clients": changed(1, y=at(Y, 2, 3))}, r"client 1 has label 3 at sample 2; .* 3 outputs.* 0\.\.2"),
    ({"clients": changed(1, y=at(Y, 0, -1))}, "client 1 has label -1 at sample 0"),
    ({"test": (X, at(Y, 1, 9))}, "test data has label 9 at sample 1"),
    (
        {"clients": changed(2, x=WIDE)},
        r"client 2 has inputs of shape \(6,\).*client 0 has \(5,\)",
    ),
    ({"clients": changed(2, y=torch.zeros(4, 1).long())}, r"client 2 has targets of shape \(1,\)"),
    (
        {"clients": changed(2, y=torch.zeros(4))},
        "client 2 has targets of torch.float32, client 0 has torch.int64",
    ),
    ({"test": (torch.ones(4, 6), Y)}, r"the test data has inputs of shape \(6,\)"),
    (
        {"clients": changed(1, x=NARROW)},
        r"client 1 has inputs of shape \(3, 5\) and targets",
    ),
    ({"clients": changed(2, x=at(X, (3, 1), math.nan))}, "client 2 has non-finite inputs: nan at sample 3"),
    ({"clients": changed(0, x=at(X, (1, 1), math.inf))}, "client 0 has non-finite inputs: inf at sample 1"),
    ({"test": (at(X, (0, 0), -math.inf), Y)}, "the test data has non-finite inputs: -inf at sample 0"),
    ({"clients": [1, 2]}, "client 0 is not a pair"),
    ({"model": FROZEN}, "Linear has no trainable parameters"),
    ({"model": nn.Flatten()}, "Flatten has no trainable parameters"),
    ({"model": "mlp"}, "model='mlp' is not a torch.nn.Module"),
    ({"model": nn.Linear(7, 3)}, r"Linear failed on inputs of shape \(2, 5\)"),
    (
        {"loss": lambda o, y: F.cross_entropy(o, y, reduction="none")},
        r"loss must return a scalar.*shape \(2,\)",
    ),
    ({"loss": lambda o, y: 1.0}, "loss must return a scalar.*float"),
    ({"loss": F.mse_loss}, r"loss failed on output of shape \(2, 3\) and targets of shape \(2,\)"),
    ({"metric": "acuracy"}, "metric='acuracy' is not known; did you mean 'accuracy'"),
    ({"goal": "up"}, "goal='up'"),
    ({"clients": 3}, "clients of type int"),
    ({"clients": {0: (X, Y)}}, "clients of type dict"),
    ({"clients": ["ab", "cd"]}, "client 0 is not a pair"),
    ({"clients": [(X, ["a", "b", "c", "d"])]}, "client 0 is not a pair"),
    ({"loss": None}, "loss=None is not a function"),
    ({"loss": lambda o, y: F.cross_entropy(o.detach(), y)}, "loss does not depend on"),
    ({"model": nn.LazyLinear(3)}, "LazyLinear has lazy parameters"),
    ({"model": nn.ParameterList([torch.ones(2), torch.ones(2).double()])}, "trainable parameters of types"),
    ({"model": nn.GRU(5, 3)}, "GRU returns a tuple; it must return a tensor"),
    ({"clients": changed(1, x=X.to_sparse())}, r"client 1 has inputs in a tensor of layout .*to_dense\(\)"),
    ({"clients": changed(1, y=Y.to("meta"))}, "client 1 has targets on the device 'meta'"),
    (
        {"clients": changed(2, x=X.to(torch.float8_e5m2))},
        r"client 2 has inputs of torch.float8_e5m2, .*float\(\)",
    ),
    (
        {"test": (QUANTIZED, Y)},
        r"the test data has inputs in a quantized tensor .*dequantize\(\)",
    ),
    ({"clients": changed(0, x=NESTED)}, "client 0 has inputs in a nested tensor; pad them"),
    (
        {"clients": changed(0, y=Y.to(torch.uint16))},
        "client 1 has targets of torch.int64, client 0 has torch.uint16",
    ),
    ({"model": nn.Linear(5, 3, device="meta")}, "Linear has parameters on the device 'meta'"),
    ({"model": nn.Linear(5, 3, dtype=torch.complex64)}, "of type torch.complex64; use a real type"),
    ({"metric": "y" * 10**6}, "^.{1,400}$"),
    ({"clients": np.array(3)}, "clients of type ndarray"),
    (
        {"model": Summed(), "loss": lambda o, y: o.reshape(1)},
        r"loss must return a scalar.* outputs of shape \(\)",
    ),
]


@pytest.mark.filterwarnings("ignore:Using a target size")
@pytest.mark.parametrize(("bad", "message"), BAD_TASKS, ids=[m[:40] for _, m in BAD_TASKS])
def test_tasks(bad, message):
    good = {"model": mlp(), "loss": F.cross_entropy, "clients": pairs(4, 4, 4), "test": (X, Y)}
    fadamgc.Task(**good)
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.Task(**(good | bad))


def squared(output, target):
    return ((output - target) ** 2).mean()


@pytest.mark.parametrize(
    "loss", [F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, nn.MSELoss(), squared, half_squared_error]
)
@pytest.mark.parametrize("swap", [False, True], ids=["targets without a column", "outputs without one"])
def test_a_loss_that_would_broadcast_is_refused(loss, swap):
    x, y = torch.randn(6, 5), torch.randn(6)
    model = nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)) if swap else nn.Linear(5, 1)
    wrong, right = (y[:, None], y) if swap else (y, y[:, None])
    remedy = r"y\.reshape\(-1,\)" if swap else r"y\.reshape\(-1, 1\)"
    with pytest.raises(fadamgc.InputError, match=f"loss would broadcast: outputs .*{remedy}, or squeeze"):
        fadamgc.Task(model, loss, [(x, wrong)])
    fadamgc.Task(model, loss, [(x, right)])


@pytest.mark.parametrize(
    "loss",
    [
        lambda o, y: F.mse_loss(o[:, 0], y),
        lambda o, y: F.mse_loss(o, y[:, None]),
        lambda o, y: o.square().mean(),  # targets that are not used
        lambda o, y: (o.squeeze(1) * y).mean().exp(),
    ],
)
def test_a_loss_that_reshapes_its_arguments_is_accepted(loss):
    fadamgc.Task(nn.Linear(5, 1), loss, [(torch.randn(6, 5), torch.randn(6))])


class Augmented(Dataset):
    """Items that are other ones each time they are read, by Python's, numpy's or torch's random numbers."""

    def __init__(self, kind, count=6):
        self.kind, self.count = kind, count

    def __len__(self):
        return self.count

    def __getitem__(self, i):
        noise = {
            "python": lambda: random.random(),
            "numpy": lambda: float(np.random.rand()),
            "torch": lambda: float(torch.rand(())),
            "none": lambda: 0.0,
        }[self.kind]()
        return torch.full((5,), float(i)) + noise, i % 3


@pytest.mark.parametrize("kind", ["python", "numpy", "torch"])
def test_random_augmentation_in_a_dataset_causes_a_warning(kind):
    with pytest.warns(UserWarning, match="a Task reads each item once.*transform=") as caught:
        fadamgc.Task(mlp(), F.cross_entropy, [Augmented(kind), Augmented(kind)], Augmented("none"))
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_reading_a_dataset_again_does_not_change_random_numbers():
    def drawn():
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def states():
        return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()

    drawn()
    before = states()
    fadamgc.Task(mlp(), F.cross_entropy, [Augmented("none")], Augmented("none"))  # and no warning
    assert states() == before
    with pytest.warns(UserWarning, match="a Task reads each item once"):
        task = fadamgc.Task(mlp(), F.cross_entropy, [Augmented("torch", 3)])
    again = torch.Generator()
    again.set_state(torch.tensor(before[2], dtype=torch.uint8))
    noise = torch.stack([torch.rand((), generator=again) for _ in range(3)])  # as read once, no more
    assert torch.equal(task.pairs[0][0][:, 0], torch.arange(3.0) + noise)
    assert torch.equal(torch.get_rng_state(), again.get_state())


def test_sequences_of_different_lengths_are_refused():
    class Sequences(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.ones(2 + i // 2, 3), 0

    with pytest.raises(
        fadamgc.InputError, match=r"client 0 .* sample 2 has shape \(3, 3\), .* that pads the"
    ):
        fadamgc.Task(mlp(), F.cross_entropy, [Sequences()])


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_batch_norm_with_one_sample_has_a_remedy(executor):
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    task = fadamgc.Task(model, F.cross_entropy, pairs(4, 1))
    with pytest.raises(fadamgc.FadamgcError, match="client 1 in round 1.*batch of 1.*min_size=2.*GroupNorm"):
        fadamgc.simulate(fadamgc.FedAvg(), task, rounds=1, executor=executor)
    with pytest.raises(fadamgc.InputError, match="failed on inputs .*min_size=2.*GroupNorm"):
        fadamgc.Task(model, F.cross_entropy, pairs(1, 1))


@pytest.mark.slow
def test_parts_of_the_package_can_be_used_without_importing_them():
    code = (
        "import fadamgc; fadamgc.data.natural([1, 2]); fadamgc.models.mlp; fadamgc.trackers.tensorboard; "
        "fadamgc.tasks.text"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_accuracy_needs_classes():
    for model, loss, y in (
        (nn.Linear(5, 1), half_squared_error, 0.5 * ONES),
        (nn.Linear(5, 1), lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.float()), Y + 2),
        (nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), half_squared_error, 0.5 * ONES[:, 0]),
    ):
        fadamgc.Task(model, loss, [(X, y)])  # nothing to evaluate, nothing to refuse
        fadamgc.Task(model, loss, [(X, y)], (X, y), metric="loss")
        with pytest.raises(fadamgc.InputError, match="metric='accuracy' needs .*give metric='loss'"):
            fadamgc.Task(model, loss, [(X, y)], (X, y))


def test_labels_of_sequences_are_checked_too():
    x, y = torch.ones(4, 5, 6), torch.zeros(4, 6, dtype=torch.long)
    fadamgc.Task(nn.Conv1d(5, 3, 1), F.cross_entropy, [(x, at(y, (1, 2), -100))])
    with pytest.raises(fadamgc.InputError, match="client 0 has label 3 at sample 1"):
        fadamgc.Task(nn.Conv1d(5, 3, 1), F.cross_entropy, [(x, at(y, (1, 2), 3))])


@pytest.mark.parametrize("answer", [None, torch.ones(3), "good"])
def test_a_metric_that_is_not_a_number_is_refused_before_any_work(answer):
    task = class_task(metric=lambda output, target: answer)
    with pytest.raises(fadamgc.InputError, match="metric=.* must return a number"):
        fadamgc.simulate(fadamgc.FedAvg(), task, **GOOD, callbacks=[lambda end: pytest.fail("too late")])


@pytest.mark.parametrize("executor", ["loop", "threads", "vectorized"])
def test_a_failure_on_one_clients_data_names_it(executor):
    task = class_task(sizes=(4, 4, 1, 4), model=mlp(0, nn.BatchNorm1d(8)))
    with pytest.raises(fadamgc.FadamgcError, match="client 2 in round 1, at local step 1, on a batch of 1"):
        fadamgc.simulate(fadamgc.FedAvg(), task, rounds=1, local_steps=2, executor=executor)
    for algo in (fadamgc.Scaffold(option="I"), fadamgc.Scaffold(init="gradient")):
        with pytest.raises(fadamgc.FadamgcError, match="client 2, round ., on its whole data: Expected"):
            fadamgc.simulate(algo, task, rounds=1, local_steps=2, executor=executor)
    words = [(torch.tensor([[0, 1]]), torch.tensor([0])), (torch.tensor([[9, 1]]), torch.tensor([0]))]
    model = nn.Sequential(nn.Embedding(5, 2), nn.Flatten(), nn.Linear(4, 2))
    with pytest.raises(fadamgc.FadamgcError, match="client 1 in round 1, at local step 1"):
        fadamgc.simulate(
            fadamgc.FedAvg(),
            fadamgc.Task(model, F.cross_entropy, words),
            rounds=1,
            local_steps=1,
            executor=executor,
        )


def test_non_finite_targets():
    with pytest.raises(fadamgc.InputError, match="client 1 has non-finite targets: nan at sample 0"):
        fadamgc.Task(
            nn.Linear(5, 1),
            half_squared_error,
            [(X, torch.ones(4, 1)), (X, at(torch.ones(4, 1), (0, 0), math.nan))],
        )
