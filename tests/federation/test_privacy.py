"""Private clients: what one client can change, the noise, what stays equal, and what is refused."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import fadamgc
from fadamgc.errors import FadamgcError, InputError
from fadamgc.federation.privacy import Mechanism, Privacy, scaled_down
from fadamgc.federation.settings import Settings
from fadamgc.methods.fadamgc import Up
from fadamgc.methods.local_sgd import Up as LocalSGDUp
from problems import class_task

OPTIONS = {
    "rounds": 4,
    "sampled": 4,
    "tracked": 2,
    "local_steps": 3,
    "batch_size": 5,
    "seed": 2,
    "executor": "loop",
    "progress": False,
}
BOTH = Privacy(clip={"dx": 0.05, "dy": 0.1}, noise=0.5)
FAR = Privacy(clip={"dx": 1e9, "dy": 1e9}, noise=0)  # changes nothing


def run_with(privacy, algorithm=None, task=None, **options):
    algorithm = algorithm or fadamgc.FAdamGC(eta_l=0.05)
    return fadamgc.simulate(algorithm, task or class_task(), privacy=privacy, **OPTIONS | options)


# Clipping.


@given(
    st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1, max_size=8),
    st.floats(1e-6, 1e6),
)
def test_no_vector_is_longer_than_its_clip(numbers, norm):
    vector = torch.tensor(numbers)
    found = scaled_down(vector, norm)
    assert float(found.double().norm()) <= norm * (1 + 1e-6)
    if float(vector.double().norm()) <= norm:
        assert torch.equal(found, vector)
    else:
        direction = vector.double() / vector.double().norm()
        assert torch.allclose(found.double(), norm * direction, atol=1e-6 * norm)


@pytest.mark.parametrize("codec", [None, {"dx": "int4", "dy": "topk:0.3"}], ids=["plain", "codecs"])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_another_client_moves_the_sums_by_at_most_twice_the_clips(scale, codec):
    """One round with and without the data of client 4 replaced; FedAvg and FAdamGC add the sums."""
    task = class_task()
    x, y = task.clients[4]
    clients = [*task.clients]
    clients[4] = (x.flip(1) * scale, 2 - y)
    other = fadamgc.Task(task.model, task.loss, clients, task.test)
    privacy = Privacy(clip={"dx": 0.01, "dy": 0.02}, noise=0)
    options = {"rounds": 1, "sampled": 6, "tracked": 6, "codec": codec}
    one, two = (run_with(privacy, task=t, **options) for t in (task, other))
    assert 0 < float((one.x - two.x).norm()) * 6 <= 0.02 + 1e-6
    assert 0 < float((one.server.y - two.server.y).norm()) * 6 <= 0.04 + 1e-6


def test_large_clips_without_noise_change_nothing():
    plain, private = run_with(None), run_with(FAR)
    assert torch.equal(plain.x, private.x)
    for state, other in zip(plain.clients, private.clients, strict=True):
        assert all(map(torch.equal, state, other))
    assert plain.epsilon() == private.epsilon() == math.inf
    assert "privacy" not in plain.settings


# Noise.


def test_noise_has_the_stated_size_and_an_address():
    mechanism = Mechanism.of(Privacy({"dx": 0.5, "dy": 2.0}, 3.0), fadamgc.FAdamGC())
    zero = Up(torch.zeros(500), torch.zeros(500))
    draws = [mechanism.noised(zero, 7, t) for t in range(1, 101)]
    for field, std in (("dx", 1.5), ("dy", 6.0)):
        rows = torch.stack([getattr(draw, field) for draw in draws])
        assert float(rows.std()) == pytest.approx(std, rel=0.02)
        assert abs(float(rows.mean())) < 0.02 * std
        assert float(torch.corrcoef(rows).fill_diagonal_(0).abs().max()) < 0.25  # between rounds
        again = getattr(mechanism.noised(zero, 7, 100), field)
        assert torch.equal(rows[-1], again)
    dx, dy = draws[0]
    assert abs(float(torch.corrcoef(torch.stack([dx, dy]))[0, 1])) < 0.2
    assert not torch.equal(dx, mechanism.noised(zero, 8, 1).dx)


@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_y_is_the_mean_of_the_y_i_and_the_noise(noise):
    """Clients follow the clipped dy and not the noise: it adds up in y (ADR 12)."""
    privacy = dataclasses.replace(BOTH, noise=noise)
    mechanism = Mechanism.of(privacy, fadamgc.FAdamGC())
    off, added = [], 0.0

    def look(end):
        nonlocal added
        mean = torch.stack([client.y for client in end.clients]).mean(dim=0)
        zero = torch.zeros_like(mean)
        added = added + mechanism.noised(Up(zero, zero), OPTIONS["seed"], end.record.round).dy / 6
        off.append(float((end.server.y - mean - added).abs().max()))

    run = run_with(privacy, rounds=20, callbacks=[look])
    assert max(off) < 1e-6
    assert max(float(client.y.norm()) for client in run.clients) > 0.1  # several clipped changes
    assert bool(torch.as_tensor(added).any()) == (noise > 0)


def test_the_noise_is_in_the_model():
    """One round of FedAvg: the model moves by the mean of the clipped changes and the noise / S."""
    algo = fadamgc.FedAvg(eta_l=0.1)
    runs = [run_with(Privacy({"dx": 0.1}, noise), algo, rounds=1, tracked=None) for noise in (0, 2.0)]
    mechanism = Mechanism.of(Privacy({"dx": 0.1}, 2.0), algo)
    noise = mechanism.noised(LocalSGDUp(torch.zeros_like(runs[0].x)), OPTIONS["seed"], 1).dx
    assert torch.allclose(runs[1].x - runs[0].x, noise / 4, atol=1e-6)
    assert float(noise.std()) == pytest.approx(0.2, rel=0.2)


# What stays equal.


@pytest.mark.parametrize("executor", ["threads", "vectorized"])
def test_executors_agree(executor):
    found, loop = run_with(BOTH, executor=executor), run_with(BOTH, executor="loop")
    assert torch.allclose(found.x, loop.x, atol=1e-6)
    assert torch.allclose(found.server.y, loop.server.y, atol=1e-6)


def test_many_runs_at_once_are_the_runs_alone():
    options = OPTIONS | {"algorithm": fadamgc.FAdamGC(), "task": class_task(), "executor": "vectorized"}
    alone = [fadamgc.simulate(**options | {"seed": s}, privacy=BOTH) for s in (0, 1)]
    options.pop("progress")
    many = fadamgc.simulate_many(
        [{"seed": 0}, {"seed": 1, "privacy": BOTH}], progress=False, **{"privacy": BOTH} | options
    )
    for one, other in zip(alone, many, strict=True):
        assert torch.allclose(one.x, other.x, atol=1e-6)
        assert one.epsilon() == other.epsilon()
    assert not torch.equal(many[0].x, many[1].x)


def test_runs_resume_bit_for_bit_and_not_with_other_noise(tmp_path):
    whole = run_with(BOTH)
    options = {"checkpoint": tmp_path}
    part = run_with(BOTH, callbacks=[lambda end: end.record.round == 2], **options)
    resumed = run_with(BOTH, resume=True, **options)
    assert torch.equal(whole.x, resumed.x)
    assert 0 < part.epsilon() < whole.epsilon() == resumed.epsilon() == fadamgc.load_run(tmp_path).epsilon()
    with pytest.raises(FadamgcError, match="privacy"):
        run_with(dataclasses.replace(BOTH, noise=0.6), resume=True, rounds=9, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"codec": {"dx": "int8", "dy": "topk:0.5"}},
        {"codec": {"dx": "topk:0.5"}},
        {"local_parameters": "0"},
        {"dropout": 0.3, "stragglers": 0.5},
        {"clip_norm": 0.1, "weight_decay": 1e-3},
        {"eval_clients": True},
        {"sampled": None, "tracked": None},
    ],
    ids=lambda options: "-".join(options),
)
def test_privacy_with_other_settings(options):
    run, plain = run_with(BOTH, **options), run_with(FAR, **options)
    assert not torch.equal(run.x, plain.x)
    assert 0 < run.epsilon() < math.inf


def test_a_composed_method():
    composed = fadamgc.compose(local=fadamgc.local.Adam(eta_l=0.05, amsgrad=True), correction="pre")
    run, literal = run_with(BOTH, composed), run_with(BOTH)
    assert torch.allclose(run.x, literal.x, atol=1e-6)
    assert run.epsilon() == literal.epsilon()


# Epsilon of runs.


@pytest.mark.parametrize(
    ("algo", "options", "secret"),
    [
        (fadamgc.FedAvg(), {}, True),
        (fadamgc.FedAdam(), {}, True),
        (fadamgc.LocalAdam(), {}, False),  # keeps v
        (fadamgc.FedAvg(), {"codec": {"dx": "topk:0.5"}}, False),  # keeps what was not sent
        (fadamgc.FedAvg(), {"codec": {"dx": "int8"}}, True),
        (fadamgc.FedAvg(), {"local_parameters": "0"}, False),
    ],
    ids=["fedavg", "fedadam", "local_adam", "topk", "int8", "local"],
)
def test_clients_that_keep_something_gain_nothing_from_a_secret_draw(algo, options, secret):
    run = run_with(Privacy({"dx": 0.1}, 1.0), algo, tracked=None, rounds=2, **options)
    assert run.settings["accounting"]["secret"] is secret
    if not options:
        planned = Privacy({"dx": 0.1}, 1.0).epsilon(algo, rounds=2, clients=6, sampled=4)
        assert run.epsilon() == planned


def test_epsilon_of_a_run_is_that_of_its_plan(tmp_path):
    run, algo = run_with(BOTH), fadamgc.FAdamGC()
    plan = {"clients": 6, "sampled": 4, "tracked": 2}
    assert run.epsilon() == BOTH.epsilon(algo, rounds=4, **plan)
    assert run.epsilon(1e-3) < run.epsilon() < BOTH.epsilon(algo, rounds=5, **plan)
    run.save(tmp_path / "run", states=False)
    assert fadamgc.load_run(tmp_path / "run").epsilon() == run.epsilon()
    stopped = run_with(BOTH, target=0.01)
    assert len(stopped.history) < 4
    assert stopped.epsilon() == run.epsilon()  # when it stopped depended on the data


@pytest.mark.parametrize(
    "plan",
    [{"sampled": 0}, {"sampled": 7}, {"tracked": 5}, {"rounds": -1}, {"clients": 0}, {"delta": 0}],
    ids=lambda plan: next(iter(plan)),
)
def test_plans_that_cannot_be(plan):
    ((name, _),) = plan.items()
    with pytest.raises(InputError, match=name):
        BOTH.epsilon(fadamgc.FAdamGC(), **{"rounds": 4, "clients": 6, "sampled": 4} | plan)


# Refusals.


@pytest.mark.parametrize(
    ("algo", "options", "message"),
    [
        (None, {"weights": "size"}, "weights='size', but .*use weights='uniform'"),
        (None, {"aggregation": "median"}, "aggregation='median', but noise is added to a sum"),
        (None, {"schedule": [([0], [0])], "rounds": None, "sampled": None, "tracked": None}, "at random"),
        (None, {"local_epochs": 1, "local_steps": None}, "local_epochs=1, but .*use local_steps"),
        (None, {"deadline": 9.0}, "deadline=9.0, but who is late"),
        (None, {"on_nonfinite": "drop"}, "use 'error'"),
        (fadamgc.FAdamGC(init="gradient"), {}, "start with init='zero'"),
        (fadamgc.MTGC(), {"sampled": None, "tracked": None}, "MTGC has clients in groups"),
        (fadamgc.FedNova(), {}, "the field a that clients of FedNova send is a number"),
        (fadamgc.FedExP(), {}, "the field square that clients of FedExP send is a number"),
        (fadamgc.compose(local=fadamgc.local.Adam(v="share")), {}, "moments.v.v .* must not be negative"),
    ],
)
def test_refused_settings_and_methods(algo, options, message):
    fields = {"dx": 1.0, "dy": 1.0}
    if algo is not None and algo.title != "FAdamGC":
        fields = {"FedNova": {"d": 1.0, "a": 1.0}, "FedExP": {"dx": 1.0, "square": 1.0}}.get(
            algo.title, {"dx": 1.0, "v": 1.0}
        )
    with pytest.raises(InputError, match=message):
        run_with(Privacy(fields, 1.0), algo, **options)


def test_buffers_are_refused_except_where_they_stay():
    model = nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    task = class_task((8, 16, 8, 24, 40, 16), model)
    with pytest.raises(InputError, match="buffer 1.running_mean is averaged without noise; .*GroupNorm"):
        run_with(BOTH, task=task)
    assert run_with(BOTH, task=task, local_parameters="BatchNorm1d").epsilon() > 0


@pytest.mark.parametrize(
    ("privacy", "message"),
    [
        ({"clip": {"dx": 1.0}, "noise": 1.0}, "has no norm for dy; .*clients of FAdamGC send dx, dy"),
        ({"clip": {"dx": 1.0, "dz": 1.0}, "noise": 1.0}, "'dz', which is not sent; did you mean"),
        ({"clip": {"dx": 1.0, "dy": 0}, "noise": 1.0}, "clip of dy=0 is not accepted; .*a number > 0"),
        ({"clip": {"dx": 1.0, "dy": "1"}, "noise": 1.0}, "clip of dy='1' is not accepted"),
        ({"clip": {}, "noise": 1.0}, "clip=.* is not accepted"),
        ({"clip": 1.0, "noise": 1.0}, "clip=1.0 is not accepted"),
        ({"clip": {"dx": 1.0}, "noise": -1}, "noise=-1 is not accepted; .*a number >= 0"),
        ({"clip": {"dx": 1.0}, "noise": math.nan}, "noise=nan is not accepted"),
        ({"clip": {"dx": 1.0}}, "has no noise"),
        ({"clip": {"dx": 1.0}, "noise": 1.0, "delta": 1e-5}, "no key 'delta'"),
        (1.0, "privacy=1.0 is not accepted"),
    ],
)
def test_refused_values(privacy, message):
    with pytest.raises(InputError, match=message):
        run_with(privacy)


def test_a_table_is_as_good_and_an_empty_one_is_none():
    assert Settings(rounds=1, local_steps=1, privacy=BOTH.plain()).privacy == BOTH
    assert Settings(rounds=1, local_steps=1, privacy={}).privacy is None
    assert hash(BOTH) == hash(Privacy(dict(reversed(BOTH.clip.items())), 0.5))
    nested = Privacy({"dx": 1, "correction": {"dy": 2}}, 1)
    assert nested.clip == {"correction.dy": 2.0, "dx": 1.0}
