"""Bad input: each a message that names the field and the value, and nothing is changed by it."""

from __future__ import annotations

import math
import pickle
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

GOOD = {"rounds": 2, "sampled": 3, "tracked": 2, "local_steps": 2, "batch_size": 4, "seed": 0}

BAD_SETTINGS = [
    ({"tracked": 4}, "tracked=4 exceeds sampled=3"),
    ({"sampled": 7}, "sampled=7 exceeds clients=6"),
    ({"sampled": None, "tracked": 7}, "tracked=7 exceeds sampled=6"),
    ({"sampled": 0, "tracked": None}, "sampled=0 .* >= 1"),
    ({"tracked": -1}, "tracked=-1 .* >= 0"),
    ({"local_steps": 0}, "local_steps=0 .* >= 1"),
    ({"local_steps": 2.5}, "local_steps=2.5 .* whole number"),
    ({"local_steps": None, "local_epochs": 0}, "local_epochs=0 .* >= 1"),
    ({"local_epochs": 1}, "local_steps=2 and local_epochs=1 are both given"),
    ({"batch_size": 0}, "batch_size=0 .* >= 1"),
    ({"batch_size": True}, "batch_size=True"),
    ({"rounds": -1}, "rounds=-1 .* >= 0"),
    ({"rounds": None}, "rounds=None"),
    ({"seed": -3}, "seed=-3 .* >= 0"),
    ({"eval_every": 0}, "eval_every=0 .* >= 1"),
    ({"target": math.nan}, "target=nan"),
    ({"on_nonfinite": "ignore"}, "on_nonfinite='ignore' .* 'error' or 'drop'"),
    ({"weights": "sizes"}, "weights='sizes'"),
    ({"weights": [1, 2]}, "weights .* 6 numbers > 0.* got 2 numbers"),
    ({"weights": [1, 1, 1, 1, 1, 0]}, "weights .* among them 0"),
    ({"executor": "vectorised"}, "executor='vectorised' is not known; did you mean 'vectorized'"),
    ({"target": "0.9"}, "target='0.9'"),
    ({"dtype": torch.int32}, "dtype=torch.int32 .* floating-point"),
    ({"dtype": "float32"}, "dtype='float32' .* floating-point"),
    ({"device": "nowhere"}, "device='nowhere' cannot be used here"),
    ({"weights": None}, "weights=None"),
    ({"weights": ["a"] * 6}, "weights=.'a'"),
    ({"callbacks": [5]}, "callbacks=.5. are not functions"),
    ({"cost": "cheap"}, "cost='cheap' is not a cost model"),
    ({"cost": fadamgc.CostModel(up_mbps=(1, 2))}, "up_mbps has 2 entries for clients=6"),
    ({"schedule": [([0], [0])] * 2}, "schedule is given together with sampled=3"),
    ({"weights": [1e-320] * 6}, "weights from 1e-320 to 1e-320 cannot be scaled to a mean of 1"),
    ({"weights": [1, 1, 1, 1, 1, 1e-320]}, "weights from 1e-320 to 1.0 cannot be scaled"),
    ({"weights": [10**400] * 6}, "weights=.1000.* is not accepted"),
    ({"local_steps": 10**400}, "local_steps=1000.*000 is not accepted; .* <= 9007199254740992"),
    ({"local_steps": None, "local_epochs": 2**53}, "is 90071992547409920 local steps of a client; at most"),
    ({"rounds": 10**5000}, "rounds=<an integer of 16610 bits> is not accepted"),
    ({"target": 10**400}, "target=1000.* finite number"),
    ({"dtype": torch.float8_e4m3fn}, "dtype=torch.float8_e4m3fn .* at least 16 bits"),
    ({"device": "meta"}, "device='meta' cannot be used here"),
    ({"device": {0}}, "device={.} cannot be used here"),
    ({"executor": {}}, "executor={} is not known"),
    ({"checkpoint": {}}, "checkpoint={} is not accepted; it must be the path of a folder"),
    ({"schedule": 3, "sampled": None, "tracked": None}, "schedule=3 is not a list of pairs"),
]
BAD_SCHEDULES = [
    ([([], [])] * 2, "round 1 samples no client"),
    ([([0, 1], [2])] * 2, "round 1: client 2 is tracked but not sampled"),
    ([([0], [0]), ([6], [])], "round 2: sampled client 6 is not in 0..5"),
    ([([0, 0], [])] * 2, "round 1: a client is sampled twice"),
    ([([0.5], []), ([0], [])], "schedule of round 1 is .*not a pair"),
    ([([0], []), (["0"], [])], "schedule of round 2 is .*not a pair"),
    ([([0], [])], "rounds=2 exceeds the schedule's 1"),
    ([[1, 2], [3, 4]], "schedule of round 1 is .*not a pair"),
]


@pytest.mark.parametrize(("bad", "message"), BAD_SETTINGS, ids=[m for _, m in BAD_SETTINGS])
def test_settings(bad, message):
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.simulate(fadamgc.FAdamGC(), class_task(), **(GOOD | bad))


@pytest.mark.parametrize(("schedule", "message"), BAD_SCHEDULES, ids=[m for _, m in BAD_SCHEDULES])
def test_schedules(schedule, message):
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.simulate(
            fadamgc.FAdamGC(),
            class_task(),
            **(GOOD | {"schedule": schedule, "sampled": None, "tracked": None}),
        )


def test_something_that_is_not_an_algorithm():
    with pytest.raises(fadamgc.InputError, match="algorithm='fadamgc' is not an algorithm"):
        fadamgc.simulate("fadamgc", class_task(), rounds=1)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sampled": 3}, "FANTLocal needs all 6 clients sampled and tracked.*sampled=3, tracked=3"),
        ({"tracked": 5}, "FANTLocal needs all 6 clients.*sampled=6, tracked=5"),
        ({"schedule": [(range(6), range(6)), (range(6), range(5))]}, "round 2 has sampled=6, tracked=5"),
        ({"local_steps": None, "local_epochs": 1}, "same number of local steps"),
        ({"weights": "size"}, "weights='uniform'; got weights='size'"),
        ({"on_nonfinite": "drop"}, "cannot continue without a client"),
    ],
)
def test_the_local_form_needs_everybody(options, message):
    base = {"rounds": 2, "local_steps": 2, "batch_size": 4}
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.simulate(fadamgc.FANTLocal(), class_task(), **(base | options))


# Tasks


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
    ({"clients": None}, "clients of type NoneType"),
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
def test_a_loss_that_brings_shapes_together_itself_is_accepted(loss):
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
def test_random_augmentation_in_a_dataset_is_warned_of(kind):
    with pytest.warns(UserWarning, match="a Task reads each item once.*into the model") as caught:
        fadamgc.Task(mlp(), F.cross_entropy, [Augmented(kind), Augmented(kind)], Augmented("none"))
    assert len(caught) == 1
    assert caught[0].filename == __file__


def test_reading_a_dataset_again_leaves_random_numbers_alone():
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


def test_sequences_of_different_lengths_are_to_be_padded():
    class Sequences(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, i):
            return torch.ones(2 + i // 2, 3), 0

    with pytest.raises(fadamgc.InputError, match=r"client 0 .* sample 2 has shape \(3, 3\), .* pad them"):
        fadamgc.Task(mlp(), F.cross_entropy, [Sequences()])


@pytest.mark.parametrize("executor", ["loop", "threads"])
def test_batch_norm_with_one_sample_has_a_remedy(executor):
    model = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3))
    task = fadamgc.Task(model, F.cross_entropy, pairs(4, 1))
    with pytest.raises(fadamgc.FadamgcError, match="client 1 in round 1.*batch of 1.*min_size=2.*GroupNorm"):
        fadamgc.simulate(fadamgc.FedAvg(), task, rounds=1, executor=executor)
    with pytest.raises(fadamgc.InputError, match="failed on inputs .*min_size=2.*GroupNorm"):
        fadamgc.Task(model, F.cross_entropy, pairs(1, 1))


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["400", "-400", "5000"])
def test_integers_that_are_no_floats_are_refused(value):
    for make in (
        lambda: fadamgc.FAdamGC(eta_l=value),
        lambda: fadamgc.CostModel(up_mbps=value),
        lambda: fadamgc.CostModel(latency=[0.0, value]),
        lambda: fadamgc.data.dirichlet([0, 1], 1, value, 0),
        lambda: fadamgc.data.iid(10, value, 0),
    ):
        with pytest.raises(fadamgc.InputError, match="^.{1,400}$"):
            make()


@pytest.mark.parametrize("bad", [{"tau": 1e300}, {"v0": 1e300}])
def test_a_hyperparameter_beyond_the_models_numbers_is_refused(bad):
    with pytest.raises(
        fadamgc.InputError, match="FedAdam.* has a number that is too large for torch.float32"
    ):
        fadamgc.simulate(fadamgc.FedAdam(**bad), class_task(), rounds=1)


def test_a_large_integer_is_a_step_size_like_any_other():
    assert fadamgc.FedAvg(eta_l=10**30).eta_l == 1e30
    assert isinstance(fadamgc.FedAvg(eta_l=10**30).eta_l, float)
    with pytest.raises(fadamgc.NonFiniteError):
        fadamgc.simulate(fadamgc.FedAvg(eta_l=10**300), class_task(), rounds=2)


def test_parts_of_the_package_can_be_used_without_importing_them():
    code = (
        "import fadamgc; fadamgc.data.natural([1, 2]); fadamgc.models.mlp; fadamgc.trackers.tensorboard; "
        "fadamgc.tasks.text"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_accuracy_needs_classes():
    for model, loss, y in (
        (nn.Linear(5, 1), half_squared_error, ONES),
        (nn.Linear(5, 1), lambda o, y: F.binary_cross_entropy_with_logits(o[:, 0], y.float()), Y),
        (nn.Sequential(nn.Linear(5, 1), nn.Flatten(0)), half_squared_error, ONES[:, 0]),
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


def test_other_arguments():
    with pytest.raises(fadamgc.InputError, match="task=Linear is not a task"):
        fadamgc.simulate(fadamgc.FedAvg(), nn.Linear(2, 2), rounds=1)  # type: ignore[arg-type]
    task = class_task()
    with pytest.raises(fadamgc.InputError, match="target=0.5 without test data"):
        fadamgc.simulate(
            fadamgc.FedAvg(), fadamgc.Task(task.model, task.loss, task.pairs), rounds=1, target=0.5
        )
    with pytest.raises(fadamgc.InputError, match="cls=.*int.* is not a class of algorithms"):
        fadamgc.register("mine", int)  # type: ignore[arg-type]
    with pytest.raises(fadamgc.InputError, match="FAdamGC.eta_l=tensor"):
        fadamgc.FAdamGC(eta_l=torch.tensor(0.1))  # type: ignore[arg-type]


def test_errors_cross_process_boundaries():
    error = pickle.loads(pickle.dumps(fadamgc.NonFiniteError(3, 7, 2, "update")))
    assert (error.client, error.round, error.step) == (3, 7, 2)
    assert "client 3" in str(error)


def test_non_finite_targets():
    with pytest.raises(fadamgc.InputError, match="client 1 has non-finite targets: nan at sample 0"):
        fadamgc.Task(
            nn.Linear(5, 1),
            half_squared_error,
            [(X, torch.ones(4, 1)), (X, at(torch.ones(4, 1), (0, 0), math.nan))],
        )


# Updates that are not finite


class Poisoned(nn.Module):
    """A model whose output is not finite for one client's data once its weights have moved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("origin", self.linear.weight.detach().clone())

    def forward(self, x):
        poison = (self.linear.weight - self.origin).abs().sum().detach()
        for _ in range(12):
            poison = poison * 1e30  # 0 stays 0, all else overflows
        return self.linear(x) + torch.where(x[:, :1] > 50, poison, 0.0)


def poisoned_task():
    task = class_task(sizes=(6, 6, 6, 6))
    clients = list(task.pairs)
    clients[2] = (clients[2][0] + 100.0, clients[2][1])
    return fadamgc.Task(Poisoned(), F.cross_entropy, clients, task.test_pair)


@pytest.mark.parametrize("executor", ["loop", "threads", "vectorized"])
@pytest.mark.parametrize(
    "algo", [fadamgc.FAdamGC(), fadamgc.Scaffold(eta_l=1e-3), fadamgc.FedAvg(eta_l=1e-3)]
)
def test_a_non_finite_update_is_named(algo, executor):
    with pytest.raises(fadamgc.NonFiniteError, match="client 2 .* round 1, at local step 2") as error:
        fadamgc.simulate(algo, poisoned_task(), rounds=3, local_steps=4, executor=executor)
    assert (error.value.client, error.value.round, error.value.step) == (2, 1, 2)


@pytest.mark.parametrize("executor", ["loop", "threads", "vectorized"])
@pytest.mark.parametrize("name", ["fadamgc", "scaffold", "scaffold_m", "fa_nt", "local_adam", "fedadam"])
def test_a_dropped_client_is_left_as_it_was(name, executor):
    algo = fadamgc.make_algorithm(name, eta_l=1e-3)
    task = poisoned_task()
    options = {"local_steps": 4, "dtype": torch.float64, "executor": executor}
    everybody = [(range(4), range(4))] * 3
    run = fadamgc.simulate(algo, task, schedule=everybody, on_nonfinite="drop", **options)
    assert [r.dropped for r in run.history] == [(2,)] * 3
    assert [r.sampled for r in run.history] == [(0, 1, 2, 3)] * 3
    assert all(torch.equal(a, b) for a, b in zip(run.clients[2], run.clients.initial, strict=True))
    assert torch.isfinite(run.x).all()
    # The rest is what it would have been without the client; n is still 4.
    rest = fadamgc.simulate(algo, task, schedule=[([0, 1, 3], [0, 1, 3])] * 3, **options)
    torch.testing.assert_close(run.x, rest.x, rtol=1e-12, atol=1e-13)
    if "y" in type(run.server)._fields:
        mean = torch.stack([client.y for client in run.clients]).mean(0)
        torch.testing.assert_close(run.server.y, mean, rtol=1e-10, atol=1e-13)
        assert run.server.y.abs().max() > 0


def test_if_all_are_dropped_the_server_stands_still():
    algo, task = fadamgc.FedAdam(eta_l=1e-3), poisoned_task()
    schedule = [([0], []), ([2], []), ([0], [])]
    run = fadamgc.simulate(algo, task, schedule=schedule, local_steps=3, on_nonfinite="drop")
    alone = fadamgc.simulate(algo, task, schedule=[([0], [])], local_steps=3)
    assert run.history[1].dropped == (2,)
    assert run.history[1].train_loss is None
    assert run.history[1].test_loss == run.history[0].test_loss == alone.history[0].test_loss


@pytest.mark.parametrize("on_nonfinite", ["error", "drop"])
def test_a_server_that_is_not_finite_is_named(on_nonfinite):
    """All updates are finite, and the step of the server is too large: no client is to blame."""
    task = class_task()
    with pytest.raises(fadamgc.NonFiniteError, match="the server's x is not finite after round 1") as error:
        fadamgc.simulate(fadamgc.FedAvg(eta_l=1e3, eta_g=1e37), task, rounds=3, on_nonfinite=on_nonfinite)
    assert error.value.client is None
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_an_initial_model_that_is_not_finite_is_refused():
    task = class_task()
    with torch.no_grad():
        next(task.model.parameters()).view(-1)[0] = float("nan")
    for on_nonfinite in ("error", "drop"):
        with pytest.raises(fadamgc.InputError, match="model has parameters or buffers that are not finite"):
            fadamgc.simulate(fadamgc.FedAvg(), task, rounds=1, on_nonfinite=on_nonfinite)


def test_a_gradient_at_the_start_that_is_not_finite_is_named():
    task = class_task(sizes=(4, 4, 4))
    task.pairs[1][0][0] = float("inf")
    with pytest.raises(fadamgc.NonFiniteError, match="gradient of client 1 at the initial model"):
        fadamgc.simulate(fadamgc.FAdamGC(init="gradient"), task, rounds=1)


def test_a_run_that_has_lost_its_clients_ends_with_an_error(tmp_path):
    """Once the updates of most clients were dropped in a row, there is nothing to wait for."""
    task, algo = class_task(sizes=(6,) * 8), fadamgc.FedAvg(eta_l=1e39)
    options = {"rounds": 20, "sampled": 2, "local_steps": 3, "on_nonfinite": "drop", "executor": "loop"}
    with pytest.raises(fadamgc.NonFiniteError, match="no client is left in round .* 8 clients") as whole:
        fadamgc.simulate(algo, task, **options)
    assert whole.value.round >= 3
    options |= {"checkpoint": tmp_path / "c"}
    fadamgc.simulate(algo, task, **options | {"rounds": 2})
    with pytest.raises(fadamgc.NonFiniteError) as resumed:
        fadamgc.simulate(algo, task, resume=True, **options)
    assert str(resumed.value) == str(whole.value)


def test_overflow_of_a_second_moment_is_seen():
    """A gradient whose square overflows leaves x finite and v infinite: the client would never move again."""
    task = fadamgc.Task(
        nn.Linear(5, 1), half_squared_error, [(torch.full((2, 5), 1e15), torch.full((2, 1), 1e15))]
    )
    with pytest.raises(fadamgc.NonFiniteError, match="client 0 .* round 1, at local step 1"):
        fadamgc.simulate(fadamgc.LocalAdam(), task, rounds=1, local_steps=2)


def test_an_error_changes_no_state():
    task = class_task()
    before = [p.clone() for p in task.model.parameters()]
    with pytest.raises(fadamgc.InputError):
        fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=1, sampled=99)
    assert all(torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True))
