"""Clipping, weight decay, different local steps, and clients that do not answer."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

import fadamgc
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from fadamgc.federation.sampling import draw_part, draw_silent
from problems import EVEN, class_task, mlp

RUN: dict[str, Any] = {"rounds": 5, "local_steps": 4, "batch_size": 8, "progress": False}
EXECUTORS = ["loop", "vectorized", "threads"]


def quadratic(*minima: float) -> fadamgc.Task:
    """Client i has f(w) = (w - b_i)^2 / 2; the model starts at w = 4."""
    model = torch.nn.Linear(1, 1, bias=False, dtype=torch.float64)
    torch.nn.init.constant_(model.weight, 4.0)
    one = torch.ones(1, 1, dtype=torch.float64)
    return fadamgc.Task(model, lambda o, y: 0.5 * ((o - y) ** 2).mean(), [(one, b * one) for b in minima])


# Gradients.


@pytest.mark.parametrize("executor", EXECUTORS)
def test_one_step_by_hand(executor: Any) -> None:
    """g = 4 and 3, clipped to 2 ; plus 0.5 * 4 = 4 ; x = 4 - 0.1 * 4, for both clients."""
    options: dict[str, Any] = {"rounds": 1, "local_steps": 1, "executor": executor, "progress": False}
    run = fadamgc.simulate(
        fadamgc.FedAvg(eta_l=0.1), quadratic(0, 1), clip_norm=2.0, weight_decay=0.5, **options
    )
    assert run.x.item() == pytest.approx(3.6, abs=1e-15)
    only_one = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.1), quadratic(0, 1), clip_norm=3.5, **options)
    assert only_one.x.item() == pytest.approx(4 - 0.1 * (3.5 + 3) / 2, abs=1e-15)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", [fadamgc.FAdamGC(), fadamgc.Scaffold(option="I"), fadamgc.MTGC()])
@pytest.mark.parametrize("executor", ["vectorized", "threads"])
def test_executors_agree(algorithm: Any, executor: Any) -> None:
    options: dict[str, Any] = {"clip_norm": 0.3, "weight_decay": 0.01, "dtype": torch.float64, **RUN}
    loop = fadamgc.simulate(algorithm, class_task(EVEN), executor="loop", **options)
    fast = fadamgc.simulate(algorithm, class_task(EVEN), executor=executor, **options)
    torch.testing.assert_close(fast.x, loop.x, rtol=1e-11, atol=1e-13)
    plain = fadamgc.simulate(algorithm, class_task(EVEN), executor=executor, dtype=torch.float64, **RUN)
    assert (plain.x - fast.x).abs().max() > 1e-6


def test_weight_decay_is_an_l2_penalty_in_the_loss() -> None:
    """The same run with the penalty in the loss: also where an algorithm needs other gradients."""
    task = class_task(EVEN)

    class Penalised(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = mlp()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            penalty = sum((p**2).sum() for p in self.inner.parameters()) / 2
            return torch.cat([self.inner(x), penalty.expand(len(x), 1)], dim=1)

    def loss(output: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output[:, :3], y) + 0.05 * output[:, 3].mean()

    penalised = fadamgc.Task(Penalised(), loss, task.pairs)
    for algorithm in (fadamgc.FAdamGC(init="gradient"), fadamgc.Scaffold(option="I"), fadamgc.MimeLite()):
        options: dict[str, Any] = {"executor": "loop", "dtype": torch.float64, **RUN}
        run = fadamgc.simulate(algorithm, task, weight_decay=0.05, **options)
        expected = fadamgc.simulate(algorithm, penalised, **options)
        torch.testing.assert_close(run.x, expected.x, rtol=1e-11, atol=1e-13)


def test_a_federation_clips_and_decays(tmp_path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed")
    from in_process_grid import LOCAL, make

    options = {"clip_norm": 0.3, "weight_decay": 0.01}
    task, grid, strategy = make(tmp_path, fadamgc.FAdamGC(), **options)
    strategy.start(grid)
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=3, executor="loop", **LOCAL, **options)
    assert torch.equal(strategy.coordinator.server.x, run.x)
    other = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=3, executor="loop", **LOCAL)
    assert not torch.equal(other.x, run.x)


# Local steps.


def steps_of(client: int, t: int) -> int:
    return 1 + (client + t) % 4


@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("local_steps", [[1, 2, 3, 4, 5, 6], steps_of])
def test_each_client_has_its_own_steps(executor: Any, local_steps: Any) -> None:
    options = {**RUN, "local_steps": local_steps, "dtype": torch.float64}
    run = fadamgc.simulate(fadamgc.FAdamGC(), class_task(EVEN), executor=executor, **options)
    for record in run.history:
        expected = [steps_of(i, record.round) if callable(local_steps) else local_steps[i] for i in range(6)]
        assert list(record.work[0].steps) == expected
    loop = fadamgc.simulate(fadamgc.FAdamGC(), class_task(EVEN), executor="loop", **options)
    torch.testing.assert_close(run.x, loop.x, rtol=1e-11, atol=1e-13)
    y_i = torch.stack([run.clients[i].y for i in range(6)])
    torch.testing.assert_close(run.server.y, y_i.mean(dim=0), rtol=1e-9, atol=1e-12)


def test_stragglers_do_a_part_of_their_steps() -> None:
    run = fadamgc.simulate(
        fadamgc.FAdamGC(), class_task(EVEN), stragglers=0.5, **RUN | {"rounds": 20, "local_steps": 10}
    )
    steps = np.array([record.work[0].steps for record in run.history])
    assert 0.35 < (steps < 10).mean() < 0.65
    assert steps.min() >= 1
    assert [draw_part(0, t, i, 10, 0.5) for t in range(1, 21) for i in range(6)] == steps.ravel().tolist()
    y_i = torch.stack([run.clients[i].y for i in range(6)])
    torch.testing.assert_close(run.server.y, y_i.mean(dim=0), rtol=1e-4, atol=1e-6)


def test_stragglers_do_a_part_of_their_epochs() -> None:
    options = {"rounds": 10, "local_epochs": 3, "batch_size": 8, "progress": False}
    run = fadamgc.simulate(fadamgc.FedProx(), class_task(), stragglers=0.9, executor="loop", **options)
    whole = fadamgc.simulate(fadamgc.FedProx(), class_task(), executor="loop", **options).history[0].work[0]
    assert any(record.work[0].steps != whole.steps for record in run.history)
    assert all((np.array(r.work[0].steps) <= whole.steps).all() for r in run.history)


# Clients that do not answer.


@pytest.mark.slow
@pytest.mark.parametrize("executor", EXECUTORS)
def test_clients_that_do_not_answer_change_nothing(executor: Any) -> None:
    """As if they had not been sampled: the same run by a schedule of those that answer."""
    options = {**RUN, "rounds": 12, "executor": executor}
    run = fadamgc.simulate(fadamgc.FAdamGC(), class_task(EVEN), sampled=4, tracked=2, dropout=0.4, **options)
    absent = [record.absent for record in run.history]
    assert absent == [draw_silent(0, t, r.sampled, 0.4) for t, r in enumerate(run.history, start=1)]
    assert any(absent)
    assert run.rounds_to(2.0) is None
    schedule = [
        tuple([i for i in ids if i not in r.absent] for ids in (r.sampled, r.tracked)) for r in run.history
    ]
    assert all(sampled for sampled, _ in schedule)
    expected = fadamgc.simulate(fadamgc.FAdamGC(), class_task(EVEN), schedule=schedule, **options)
    assert torch.equal(run.x, expected.x)
    y_i = torch.stack([run.clients[i].y for i in range(6)])
    torch.testing.assert_close(run.server.y, y_i.mean(dim=0), rtol=1e-4, atol=1e-6)
    for record in run.history:
        work, gone = record.work[0], set(record.absent)
        assert work.clients == record.sampled
        assert all(down > 0 for down in work.down)
        assert [up == 0 and k == 0 for up, k in zip(work.up, work.steps, strict=True)] == [
            i in gone for i in work.clients
        ]


def test_a_round_without_an_answer_leaves_the_server_as_it_was() -> None:
    states: list[Any] = []
    run = fadamgc.simulate(
        fadamgc.FAdamGC(),
        class_task(EVEN),
        sampled=1,
        dropout=0.8,
        callbacks=[lambda end: states.append(end.server.x)],
        **RUN | {"rounds": 10},
    )
    silent = [t for t, record in enumerate(run.history) if record.absent]
    assert len(silent) > 3
    assert all(torch.equal(states[t], states[t - 1]) for t in silent if t)
    assert run.history[silent[0]].train_loss is None


def test_who_is_late_is_left_out() -> None:
    cost = fadamgc.CostModel(
        seconds_per_step=(1, 1, 5, 1, 1, 5), per_round="slowest", down_mbps=1e9, up_mbps=1e9
    )
    options = {**RUN, "local_steps": 4, "cost": cost}
    run = fadamgc.simulate(fadamgc.FAdamGC(), class_task(EVEN), deadline=10.0, **options)
    assert {record.absent for record in run.history} == {(2, 5)}
    assert [record.simulated_seconds for record in run.history] == pytest.approx([10.0] * 5)
    schedule = [([0, 1, 3, 4],) * 2] * 5
    expected = fadamgc.simulate(fadamgc.FAdamGC(), class_task(EVEN), schedule=schedule, **options)
    assert torch.equal(run.x, expected.x)
    assert [record.simulated_seconds for record in expected.history] == pytest.approx([4.0] * 5, rel=1e-5)


def test_y_is_the_mean_of_the_y_i_with_a_deadline() -> None:
    """Also where clients do a part of their steps, so that not always the same are late, or do not answer."""
    cost = fadamgc.CostModel(seconds_per_step=(1, 2, 3, 1, 2, 3), down_mbps=1e9, up_mbps=1e9)
    options = {**RUN, "rounds": 8, "executor": "loop", "local_steps": 8, "dtype": torch.float64, "cost": cost}
    late = {"deadline": 15.5, "stragglers": 0.5, "dropout": 0.2}
    run = fadamgc.simulate(fadamgc.FAdamGC(), class_task(EVEN), sampled=5, tracked=3, **late, **options)
    assert len({record.absent for record in run.history}) > 3
    y_i = torch.stack([run.clients[i].y for i in range(6)])
    assert y_i.abs().max() > 1e-4
    torch.testing.assert_close(run.server.y, y_i.mean(dim=0), rtol=1e-9, atol=1e-12)


def test_the_deadline_is_saved_and_priced_again(tmp_path) -> None:
    cost = fadamgc.CostModel(
        seconds_per_step=(1, 1, 5, 1, 1, 5), per_round="slowest", down_mbps=1e9, up_mbps=1e9
    )
    run = fadamgc.simulate(fadamgc.FAdamGC(), class_task(EVEN), deadline=10.0, cost=cost, **RUN)
    run.save(tmp_path)
    read = fadamgc.load_run(tmp_path)
    assert read.history == run.history
    again = read.reprice(fadamgc.CostModel(seconds_per_step=100.0, down_mbps=1e9, up_mbps=1e9))
    assert [record.simulated_seconds for record in again.history] == pytest.approx([10.0] * 5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"dropout": 0.4, "stragglers": 0.3, "clip_norm": 0.3, "weight_decay": 0.01},
        {"local_steps": [1, 2, 3, 4, 5, 6]},
        {"local_steps": steps_of},
        {"deadline": 3.0, "cost": fadamgc.CostModel(seconds_per_step=(1, 1, 1, 0.1, 0.2, 0.3))},
    ],
)
def test_a_stopped_run_resumes_to_the_same_bits(options: Any, tmp_path) -> None:
    options = {**RUN, **options}
    whole = fadamgc.simulate(fadamgc.FAdamGC(), class_task(), **options)
    fadamgc.simulate(fadamgc.FAdamGC(), class_task(), checkpoint=tmp_path, **options | {"rounds": 2})
    resumed = fadamgc.simulate(fadamgc.FAdamGC(), class_task(), checkpoint=tmp_path, resume=True, **options)
    assert torch.equal(resumed.x, whole.x)
    assert resumed.history == whole.history


def test_a_run_with_another_cost_does_not_continue_one_with_a_deadline(tmp_path) -> None:
    options = {**RUN, "deadline": 3.0, "cost": fadamgc.CostModel(seconds_per_step=1.0)}
    fadamgc.simulate(fadamgc.FAdamGC(), class_task(), checkpoint=tmp_path, **options | {"rounds": 2})
    other = {"cost": fadamgc.CostModel(seconds_per_step=2.0), "resume": True}
    with pytest.raises(fadamgc.OtherRunError, match="cost"):
        fadamgc.simulate(fadamgc.FAdamGC(), class_task(), checkpoint=tmp_path, **options | other)


def test_a_spec_has_all_of_them(tmp_path) -> None:
    text = """
        name = "work"
        [task]
        data = "digits"
        clients = 4
        [run]
        rounds = 4
        local_steps = [1, 2, 3, 4]
        seeds = [0]
        dropout = 0.3
        stragglers = 0.2
        deadline = 3.5
        clip_norm = 1.0
        weight_decay = 1e-4
        executor = "loop"
        [cost]
        seconds_per_step = 1.0
        [[method]]
        algorithm = "fadamgc"
    """
    spec = parse_spec(text, "spec.toml")
    assert parse_spec(spec.to_toml(), "again.toml") == spec
    run_spec(spec, tmp_path, workers=1, quiet=True)
    run = fadamgc.load_run(tmp_path / "runs" / "fadamgc-seed0")
    assert any(3 in record.absent for record in run.history)
    assert {run.settings[key] for key in ("dropout", "stragglers", "deadline", "clip_norm")} == {
        0.3,
        0.2,
        3.5,
        1.0,
    }
    assert "cost" in json.loads((tmp_path / "runs" / "fadamgc-seed0" / "run.json").read_text())["settings"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip_norm": 0}, "clip_norm=0 is not accepted; it must be None or a number > 0"),
        ({"clip_norm": float("nan")}, "clip_norm=nan"),
        ({"weight_decay": -1}, "weight_decay=-1 is not accepted; it must be None or a number >= 0"),
        ({"dropout": 1}, "dropout=1 is not accepted; it must be None or 0 <= probability < 1"),
        ({"stragglers": -0.1}, r"stragglers=-0\.1"),
        ({"deadline": 0}, "deadline=0"),
        ({"local_steps": [1, 2]}, "local_steps has 2 entries for clients=6"),
        ({"local_steps": [1, 2, 0, 1, 1, 1]}, r"local_steps\[2\]=0"),
        ({"local_steps": lambda i, t: 0}, "failed for client 0 in round 1"),
        ({"local_steps": lambda i: 1}, "failed for client 0 in round 1"),
        ({"local_steps": "many"}, "local_steps='many'"),
    ],
)
def test_bad_settings_are_refused(options: Any, message: str) -> None:
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.simulate(fadamgc.FAdamGC(), class_task(), **RUN | options)


@pytest.mark.parametrize(
    "options", [{"dropout": 0.1}, {"stragglers": 0.1}, {"deadline": 1.0}, {"local_steps": [1, 2, 3, 4, 5, 6]}]
)
def test_methods_that_need_all_clients_refuse_absences(options: Any) -> None:
    with pytest.raises(fadamgc.InputError, match="FANTLocal needs"):
        fadamgc.simulate(fadamgc.FANTLocal(), class_task(), **RUN | options)


@pytest.mark.slow
def test_an_exact_method_reaches_the_penalised_optimum() -> None:
    """The mean of (w - 0)^2 / 2, (w - 3)^2 / 2 and 0.5 w^2 / 2 for each has its minimum at 1."""
    options: dict[str, Any] = {"local_steps": 5, "weight_decay": 0.5, "progress": False}
    run = fadamgc.simulate(fadamgc.ScaffoldLocal(eta_l=0.1), quadratic(0, 3), rounds=400, **options)
    assert run.x.item() == pytest.approx(1.0, abs=1e-9)
