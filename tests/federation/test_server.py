"""The server's half of a round by itself: no executor, no network, no files."""

from __future__ import annotations

import pytest
import torch

import fadamgc
from fadamgc.federation.client_data import ClientTable
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.jobs import Job
from fadamgc.federation.server import Federation
from fadamgc.federation.settings import Settings
from fadamgc.sim.executors.loop import run_job
from problems import class_task

OPTIONS = {"rounds": 3, "sampled": 4, "tracked": 2, "local_steps": 3, "batch_size": 5, "seed": 2}


def federation_of(algo, task, **options):
    settings = Settings.of(**OPTIONS | options)
    functions = TaskFunctions(task, settings.dtype)
    federation = Federation(algo, functions, task.n, settings)
    federation.weights = settings.weight_of(ClientTable(task.samples, functions.dtype, functions.device).size)
    return federation


def play(federation, states):
    """One round in a dozen lines: what every runner does around the federation."""
    functions, s = federation.functions, federation.settings
    table = ClientTable(federation.task.samples, functions.dtype, functions.device)
    draw, round, sums = federation.who(), federation.open(), federation.new_sums()
    for i in draw.sampled:
        batches = s.batches(round.t, i, table[i].size)
        job = Job(round, i, table[i], lambda i=i: states[i], i in draw.tracked, batches)
        result = run_job(job)
        sums.add(i, batches.steps, result.up, result.buffers, result.loss)
        states[i] = result.state
    after = federation.aggregate(sums)
    steps = [
        federation.work_steps(s.steps(i, table[i].size, federation.t + 1), table[i].size)
        for i in draw.sampled
    ]
    return after, federation.record(draw, sums, federation.evaluate(after), steps, seconds=0.0)


@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("algo", [fadamgc.FAdamGC(), fadamgc.FedAvg(), fadamgc.Scaffold(option="I")])
def test_rounds_by_hand_are_the_simulators(algo, weights):
    task = class_task()
    federation = federation_of(algo, task, weights=weights)
    states = [algo.init_client(federation.functions.x0) for _ in range(task.n)]
    while not federation.over():
        federation.commit(*play(federation, states))
    run = fadamgc.simulate(algo, task, executor="loop", weights=weights, **OPTIONS)
    assert torch.equal(federation.state.server.x, run.x)
    assert federation.history == run.history
    for ours, theirs in zip(states, run.clients, strict=True):
        assert all(map(torch.equal, ours, theirs))
    saved = federation.run(run.clients, {"executor": "loop", "compiled": False})
    assert saved.settings == run.settings


def test_nothing_changes_before_the_commit():
    algo, task = fadamgc.FAdamGC(), class_task()
    federation = federation_of(algo, task)
    states = [algo.init_client(federation.functions.x0) for _ in range(task.n)]
    x, draw = federation.state.server.x.clone(), federation.who()
    after, record = play(federation, list(states))
    assert torch.equal(federation.state.server.x, x)
    assert (federation.t, federation.history, federation.who()) == (0, [], draw)
    again, record_again = play(federation, list(states))
    assert torch.equal(again.server.x, after.server.x)
    assert record_again == record


def test_a_round_without_anybody_leaves_the_state():
    federation = federation_of(fadamgc.FAdamGC(), class_task())
    after = federation.aggregate(federation.new_sums())
    assert all(map(torch.equal, after.server, federation.state.server))


def test_only_clients_that_are_available_take_part():
    federation = federation_of(fadamgc.FAdamGC(), class_task())
    assert federation.who() == federation.who(range(6)) == federation.settings.who(1, 6)
    assert set(federation.who([1, 4]).sampled) == {1, 4}
    assert federation.who([1, 4, 5]) == federation.who([5, 4, 1, 1])
    assert federation.who([]).sampled == ()


def test_clients_that_send_nothing_cost_nothing():
    federation = federation_of(fadamgc.FAdamGC(), class_task())
    draw, sums = federation.who(), federation.new_sums()
    full = federation.record(draw, sums, {}, [3] * 4, 0.0)
    less = federation.record(draw, sums, {}, [3, 0, 3, 3], 0.0, silent=[draw.sampled[1]])
    vector = 4 * federation.functions.flat.d
    tracked = draw.sampled[1] in draw.tracked
    assert full.bytes_up - less.bytes_up == vector * (2 if tracked else 1)
    assert full.bytes_down == less.bytes_down


def test_the_first_gradients_set_the_server_and_count_in_round_one():
    task = class_task()
    federation = federation_of(fadamgc.FAdamGC(init="gradient"), task)
    assert federation.state.server is None
    gradients = [torch.full_like(federation.functions.x0, float(i)) for i in range(task.n)]
    federation.begin_with(gradients, [1] * task.n)
    assert torch.equal(federation.state.server.y, torch.full_like(gradients[0], 2.5))
    record = federation.record(federation.who(), federation.new_sums(), {}, [3] * 4, 0.0)
    assert len(record.work) == 2
    with pytest.raises(fadamgc.NonFiniteError, match="gradients at the initial model is not finite"):
        federation.begin_with([g / 0 for g in gradients], [1] * task.n)


def test_a_state_that_is_not_finite_is_named():
    state = federation_of(fadamgc.FAdamGC(), class_task()).state
    assert state.nonfinite() is None
    bad = state.server._replace(y=state.server.y / 0)
    assert state._replace(server=bad).nonfinite() == "y"
