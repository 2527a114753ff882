"""Bad settings: each is refused with a message that names the field and the value."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import nn

import fadamgc
from fadamgc.federation.settings import Settings
from problems import class_task
from short_runs import GOOD

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


@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["400", "-400", "5000"])
def test_integers_too_large_for_a_float_are_refused(value):
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


@pytest.mark.parametrize(
    ("steps", "coin", "planned"),
    [
        ({"local_steps": 3}, None, {3}),
        ({"local_steps": 3}, 0.25, {4}),
        ({"local_steps": [2, 3] * 500}, None, {2, 3}),
        ({"local_epochs": 2, "batch_size": 10}, None, {2, 6}),
        ({"local_epochs": 2**53, "batch_size": 1}, None, {5 * 2**53, 21 * 2**53}),
        ({"local_steps": lambda client, t: 1 + client % 4}, None, {1, 2, 3, 4}),
    ],
)
def test_the_numbers_of_steps_that_occur(steps, coin, planned):
    assert Settings.of(rounds=1, **steps).planned_steps(np.array([5, 21] * 500), coin) == planned


@pytest.mark.parametrize("steps", [{"local_steps": 3}, {"local_epochs": 2, "batch_size": 10}])
def test_a_million_clients_are_not_asked_one_by_one_for_their_steps(steps, monkeypatch):
    asked = []
    monkeypatch.setattr(Settings, "passes", lambda _, samples: asked.append(samples) or 1)
    Settings.of(rounds=1, **steps).check(10**6, np.full(10**6, 40), fadamgc.FedAvg())
    assert len(asked) <= 1
