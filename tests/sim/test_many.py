"""Many runs at once: each is what it would be alone."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from torch import nn

import fadamgc
from compiling import needs_compiler
from fadamgc.sim.executors import VectorizedExecutor
from problems import REPRESENTATIVES, class_task, mlp, settings_for

SHORT = {"rounds": 3, "sampled": 4, "tracked": 2, "local_steps": 4, "batch_size": 8}


def grid(tasks):
    return [
        {"algorithm": fadamgc.FAdamGC(eta_l=eta_l, beta1=beta1), "task": task, "seed": seed}
        for eta_l, beta1 in ((0.1, 0.9), (0.01, 0.9), (0.001, 0.5))
        for seed, task in enumerate(tasks)
    ]


def assert_same(many, alone):
    assert len(many) == len(alone)
    for a, b in zip(many, alone, strict=True):
        assert a.history == b.history
        assert torch.equal(a.x, b.x)
        for left, right in zip(a.clients, b.clients, strict=True):
            assert all(torch.equal(p, q) for p, q in zip(left, right, strict=True))
        same = {k: v for k, v in a.settings.items() if k != "executor"}
        assert same == {k: v for k, v in b.settings.items() if k != "executor"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"local_steps": None, "local_epochs": 1},
        {"batch_size": None},
        {"batch_size": 3},
        {"weights": "size", "eval_every": 2},
        {"target": 0.6, "rounds": 8},
    ],
)
def test_each_run_equals_the_same_run_alone(options):
    tasks = [class_task(seed=seed) for seed in (0, 1)]
    common = SHORT | options
    runs = grid(tasks)[::3] if options else grid(tasks)  # of two step sizes and tasks, or of all
    alone = [fadamgc.simulate(**run, **common) for run in runs]
    assert_same(fadamgc.simulate_many(runs, **common), alone)


@pytest.mark.slow
@pytest.mark.parametrize("algo", REPRESENTATIVES.values(), ids=REPRESENTATIVES)
def test_states_of_any_shape_can_be_run_many_at_once(algo):
    task = class_task()
    runs = [{"algorithm": dataclasses.replace(algo, eta_l=0.01 / k), "seed": k} for k in (1, 2)]
    common = SHORT | settings_for(runs[0]["algorithm"], task.n) | {"task": task}
    alone = [fadamgc.simulate(**own, **common) for own in runs]
    assert_same(fadamgc.simulate_many(runs, **common), alone)


@needs_compiler
def test_compiled_runs_equal_the_same_runs_alone(monkeypatch):
    monkeypatch.setattr("fadamgc.sim.executors.vectorized.LONG_RUN", 1)
    tasks = [class_task(seed=seed) for seed in (0, 1)]
    runs = grid(tasks)[::5]
    alone = [fadamgc.simulate(**run, **SHORT) for run in runs]
    assert all(run.settings["compiled"] for run in alone)
    assert_same(fadamgc.simulate_many(runs, **SHORT), alone)


@pytest.mark.parametrize("model", [mlp(0, nn.BatchNorm1d(8)), mlp(0, nn.Dropout(0.3))])
def test_models_that_are_not_for_blocks(model):
    task = class_task(sizes=(4, 8, 12, 8), model=model)
    runs = [{"algorithm": fadamgc.FedAvg(eta_l=0.01), "seed": seed} for seed in (0, 1)]
    common = SHORT | {"task": task}
    alone = [fadamgc.simulate(**own, **common) for own in runs]
    assert_same(fadamgc.simulate_many(runs, **common), alone)


@pytest.mark.slow
def test_runs_of_different_kinds_may_be_mixed():
    task = class_task()
    runs = [
        {"algorithm": fadamgc.FedAvg()},
        {"algorithm": fadamgc.FAdamGC(), "executor": "loop"},
        {"algorithm": fadamgc.FAdamGC(v_hat="restart"), "rounds": 2},
        {"algorithm": fadamgc.FAdamGC(eps=0.0)},
        {"algorithm": fadamgc.FAdamGC(), "dtype": torch.float64},
        {"algorithm": fadamgc.FAdamGC(), "task": class_task(model=nn.Linear(5, 3))},
    ]
    alone = [fadamgc.simulate(**{"task": task} | SHORT | own) for own in runs]
    assert_same(fadamgc.simulate_many(runs, task=task, **SHORT), alone)


@pytest.mark.slow
def test_runs_share_blocks():
    blocks = []

    class Watched(VectorizedExecutor):
        def _run_block(self, jobs, part, threads):
            blocks.append(len(jobs))
            return super()._run_block(jobs, part, threads)

    make = partial(Watched, compile=False)
    runs = [{"algorithm": fadamgc.FedAvg(eta_l=eta)} for eta in (0.1, 0.2, 0.3)]
    common = SHORT | {"rounds": 1, "batch_size": 3}
    fadamgc.simulate_many(runs, task=class_task(), executor=make, **common)
    assert blocks == [12]


@pytest.mark.slow
def test_processes_give_the_bits_of_one():
    runs = [{"algorithm": fadamgc.FAdamGC(eta_l=eta), "seed": 1} for eta in (0.1, 0.01, 0.001)]
    task = class_task()
    one = fadamgc.simulate_many(runs, task=task, **SHORT)
    two = fadamgc.simulate_many(runs, task=task, workers=2, **SHORT)
    assert_same(two, one)


def test_a_run_that_diverges_does_not_take_the_others_with_it():
    runs = [{"algorithm": fadamgc.FedAvg(eta_l=eta)} for eta in (0.1, 1e38, 0.01)]
    task = class_task(model=nn.Linear(5, 3))
    good, bad, other = fadamgc.simulate_many(runs, task=task, errors="return", **SHORT)
    assert isinstance(bad, fadamgc.NonFiniteError)
    assert len(good.history) == len(other.history) == SHORT["rounds"]
    with pytest.raises(fadamgc.NonFiniteError):
        fadamgc.simulate_many(runs, task=task, **SHORT)


@pytest.mark.slow
def test_each_run_has_its_own_callbacks_and_checkpoint(tmp_path):
    task = class_task()
    runs = [
        {"algorithm": fadamgc.FAdamGC(), "seed": seed, "checkpoint": tmp_path / str(seed)} for seed in (0, 1)
    ]
    runs[0]["callbacks"] = [lambda end: end.record.round == 2]
    stopped, whole = fadamgc.simulate_many(runs, task=task, **SHORT)
    assert (len(stopped.history), len(whole.history)) == (2, 3)
    resumed = [run | {"resume": True, "callbacks": []} for run in runs]
    alone = [fadamgc.simulate(fadamgc.FAdamGC(), task, seed=seed, **SHORT) for seed in (0, 1)]
    again = fadamgc.simulate_many(resumed, task=task, **SHORT)
    for a, b in zip(again, alone, strict=True):
        assert a.history == b.history
        assert torch.equal(a.x, b.x)


@pytest.mark.parametrize(
    ("runs", "options", "said"),
    [
        ([{"seed": 1}], {}, r"runs\[0\] has no algorithm; give it there, or to all runs"),
        ([{"algorithm": fadamgc.FedAvg(), "sede": 1}], {}, r"runs\[0\]: 'sede' is not an argument.*'seed'"),
        ([fadamgc.FedAvg()], {}, r"runs\[0\]=FedAvg.*give a dict of arguments of simulate"),
        ([], {"workers": 0}, "workers=0 is not accepted"),
        ([], {"errors": "ignore"}, "errors='ignore' is not accepted; it must be 'raise' or 'return'"),
        ([{"algorithm": fadamgc.FedAvg(), "sampled": 99}], {}, "sampled=99 exceeds clients=6"),
    ],
)
def test_bad_input(runs, options, said):
    with pytest.raises(fadamgc.InputError, match=said):
        fadamgc.simulate_many(runs, task=class_task(), rounds=1, **options)


def test_runs_that_cannot_be_pickled_are_refused():
    task = class_task()
    task.loss = lambda output, target: nn.functional.cross_entropy(output, target)
    runs = [{"algorithm": fadamgc.FedAvg(), "seed": seed} for seed in (0, 1)]
    with pytest.raises(fadamgc.InputError, match="workers=2 needs runs that can be pickled; use workers=1"):
        fadamgc.simulate_many(runs, task=task, workers=2, rounds=1)


def test_an_empty_list_of_runs_gives_an_empty_list():
    assert fadamgc.simulate_many([], task=class_task(), rounds=1) == []


def test_many_runs_are_in_memory_in_parts_and_equal_the_same_runs_alone(monkeypatch):
    monkeypatch.setattr("fadamgc.sim.many.IN_MEMORY", 2)
    task = class_task()
    runs = [{"algorithm": fadamgc.FAdamGC(eta_l=0.01), "seed": seed} for seed in range(5)]
    alone = [fadamgc.simulate(**run, task=task, executor="loop", **SHORT) for run in runs]
    common = SHORT | {"task": task, "executor": "loop"}
    assert_same(fadamgc.simulate_many(runs, client_states=True, **common), alone)
    for many, one in zip(fadamgc.simulate_many(runs, **common), alone, strict=True):
        assert many.history == one.history
        assert torch.equal(many.x, one.x)
        assert many.clients.participants == one.clients.participants
        with pytest.raises(fadamgc.FadamgcError, match="client_states=True"):
            many.clients[many.clients.participants[0]]


def test_few_runs_keep_the_states_of_their_clients():
    task = class_task()
    runs = [{"algorithm": fadamgc.FAdamGC(eta_l=0.01), "seed": seed} for seed in range(2)]
    common = SHORT | {"task": task, "executor": "loop"}
    kept, forgotten = (
        fadamgc.simulate_many(runs, client_states=states, **common)[0] for states in (None, False)
    )
    assert all(kept.clients[i].v.abs().sum() > 0 for i in kept.clients.participants)
    with pytest.raises(fadamgc.FadamgcError, match="were not kept"):
        forgotten.clients[forgotten.clients.participants[0]]


def test_a_run_without_the_states_of_its_clients_can_be_saved(tmp_path):
    run = fadamgc.simulate_many(
        [{"algorithm": fadamgc.FAdamGC(eta_l=0.01)}],
        task=class_task(),
        client_states=False,
        executor="loop",
        **SHORT,
    )[0]
    run.save(tmp_path / "run")
    loaded = fadamgc.load_run(tmp_path / "run")
    assert torch.equal(loaded.x, run.x)
    assert loaded.clients.participants == run.clients.participants
    with pytest.raises(fadamgc.FadamgcError, match="were not kept"):
        loaded.clients[loaded.clients.participants[0]]
