"""Parameters that stay at the clients, with every algorithm and executor, and models of single clients."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from torch import nn

import fadamgc
from fadamgc.federation.local_parameters import Layout, layout_of
from fadamgc.flat import Flat
from problems import REPRESENTATIVES, class_task

HOW = {"rounds": 4, "local_steps": 3, "batch_size": 8, "progress": False, "dtype": torch.float64}
SIZES = (16, 24, 8, 20, 12, 10)


def net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def plain_net():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))


def task_of(model, **options):
    plain = class_task(SIZES)
    return fadamgc.Task(model, plain.loss, plain.pairs, plain.test_pair, **options)


def test_a_layout_splits_and_joins():
    layout = Layout((2, 3, 1), (False, True, False), ())
    x = torch.arange(6.0)
    shared, own = layout.split(x)
    assert shared.tolist() == [0, 1, 5]
    assert own.tolist() == [2, 3, 4]
    assert torch.equal(layout.join(shared, own), x)


@pytest.mark.parametrize(
    ("patterns", "names", "buffers"),
    [
        (["1"], ["1.weight", "1.bias"], 3),
        (["BatchNorm1d"], ["1.weight", "1.bias"], 3),
        (["*Norm*"], ["1.weight", "1.bias"], 3),
        (["3.bias"], ["3.bias"], 0),
        (["*.bias"], ["0.bias", "1.bias", "3.bias"], 0),
        (["0", "3.weight"], ["0.weight", "0.bias", "3.weight"], 0),
    ],
)
def test_patterns(patterns, names, buffers):
    model = net()
    flat = Flat.of(model)
    layout = layout_of(patterns, model, flat, dict(model.named_buffers()))
    assert [name for name, local in zip(flat.names, layout.is_local, strict=True) if local] == names
    assert len(layout.buffers) == buffers


def test_fedavg_by_hand():
    """SGD with the head of each client kept, written again without the library."""
    task = task_of(plain_net())
    run = fadamgc.simulate(
        fadamgc.FedAvg(eta_l=0.1, eta_g=1.0), task, local_parameters="2", **HOW | {"batch_size": None}
    )
    shared = {n: p.detach().double() for n, p in task.model.named_parameters() if n.startswith("0")}
    heads = [
        {n: p.detach().double() for n, p in task.model.named_parameters() if n.startswith("2")}
        for _ in range(task.n)
    ]
    for _ in range(4):
        arrived = []
        for i, (x, y) in enumerate(task.pairs):
            model = copy.deepcopy(task.model).double()
            model.load_state_dict(shared | heads[i])
            for _ in range(3):
                model.zero_grad()
                task.loss(model(x.double()), y).backward()
                with torch.no_grad():
                    for p in model.parameters():
                        p -= 0.1 * p.grad
            state = {n: v.clone() for n, v in model.state_dict().items()}
            heads[i] = {n: v for n, v in state.items() if n.startswith("2")}
            arrived.append(state)
        shared = {n: torch.stack([state[n] for state in arrived]).mean(0) for n in shared}
    for i in range(task.n):
        for name, value in (shared | heads[i]).items():
            torch.testing.assert_close(
                run.model_of(i).double().state_dict()[name], value, rtol=1e-6, atol=1e-7
            )


@pytest.mark.parametrize("name", REPRESENTATIVES)
@pytest.mark.parametrize("executor", ["vectorized", "threads"])
def test_executors_agree_and_local_parts_stay(name, executor):
    algorithm = fadamgc.make_algorithm(name)
    task = task_of(net())
    who = {} if algorithm.full_participation else {"sampled": 4, "tracked": 2}
    runs = [
        fadamgc.simulate(algorithm, task, local_parameters="BatchNorm1d", executor=e, **who, **HOW)
        for e in ("loop", executor)
    ]
    torch.testing.assert_close(runs[1].x, runs[0].x, rtol=1e-9, atol=1e-11)
    for i in range(task.n):
        one, other = (run.model_of(i).state_dict() for run in runs)
        for key in one:
            torch.testing.assert_close(one[key], other[key], rtol=1e-5, atol=1e-6)
    first, last = task.model.state_dict(), runs[0].model.state_dict()
    assert all(torch.equal(first[key], last[key]) for key in first if key.startswith("1."))
    assert not torch.equal(first["0.weight"], last["0.weight"])
    taken = [i for i in range(task.n) if i in runs[0].clients.participants]
    stats = [runs[0].model_of(i).state_dict()["1.running_mean"] for i in taken]
    assert not torch.equal(stats[0], stats[1])


def test_y_is_the_mean_of_the_shared_parts():
    task = task_of(net())
    run = fadamgc.simulate(
        fadamgc.FAdamGC(), task, local_parameters="3", sampled=4, tracked=2, **HOW | {"rounds": 12}
    )
    mean = torch.stack([run.clients[i].shared.y for i in range(task.n)]).mean(0)
    torch.testing.assert_close(run.server.shared.y, mean, rtol=1e-10, atol=1e-14)


def test_only_the_shared_part_is_sent():
    task, plain = task_of(net()), {"executor": "loop", **HOW | {"dtype": torch.float32}}
    whole = fadamgc.simulate(fadamgc.FAdamGC(), task, **plain).history[0]
    part = fadamgc.simulate(fadamgc.FAdamGC(), task, local_parameters="1", **plain).history[0]
    buffers, local = 2 * 8 * 4 + 8, 16 * 4  # running mean, variance and count; weight and bias
    assert whole.bytes_up - part.bytes_up == task.n * (2 * local + buffers)  # dx and dy
    assert whole.bytes_down - part.bytes_down == task.n * (2 * local + buffers)


@pytest.mark.slow
def test_a_local_part_is_trained_as_in_a_federation_of_one():
    task, algorithm = task_of(plain_net()), fadamgc.FAdamGC(eta_l=0.01)
    how = HOW | {"rounds": 1}
    run = fadamgc.simulate(algorithm, task, local_parameters=["0", "2.weight"], **how)
    # Batches are drawn at the address of client 0 in both runs, and round 1 begins at the same model.
    alone = fadamgc.simulate(algorithm, fadamgc.Task(task.model, task.loss, [task.pairs[0]]), **how)
    one, other = run.model_of(0).state_dict(), alone.model.state_dict()
    assert all(torch.allclose(one[key], other[key], atol=1e-7) for key in ("0.weight", "0.bias", "2.weight"))
    assert not torch.allclose(one["2.bias"], other["2.bias"], atol=1e-7)


@pytest.mark.parametrize("states", ["memory", "files"])
def test_resume_is_exact(tmp_path, states):
    task = task_of(net())
    how = HOW | {"local_parameters": "1", "sampled": 3, "executor": "loop", "states": states}
    whole = fadamgc.simulate(fadamgc.FAdamGC(), task, **how)
    folder = tmp_path / "checkpoint"
    fadamgc.simulate(fadamgc.FAdamGC(), task, checkpoint=folder, **how | {"rounds": 2})
    again = fadamgc.simulate(fadamgc.FAdamGC(), task, checkpoint=folder, resume=True, **how)
    assert torch.equal(whole.x, again.x)
    for i in range(task.n):
        one, other = whole.model_of(i).state_dict(), again.model_of(i).state_dict()
        assert all(torch.equal(one[key], other[key]) for key in one)
    with pytest.raises(fadamgc.CheckpointError):
        fadamgc.simulate(
            fadamgc.FAdamGC(), task, checkpoint=folder, resume=True, **how | {"local_parameters": "3"}
        )
    again.save(tmp_path / "run")
    back = fadamgc.load_run(tmp_path / "run", task=task)
    assert torch.equal(
        back.model_of(2).state_dict()["1.running_mean"], again.model_of(2).state_dict()["1.running_mean"]
    )
    assert fadamgc.load_run(tmp_path / "run").algorithm == fadamgc.FAdamGC()


def test_clients_are_evaluated_with_their_own_parameters():
    task = task_of(net())
    run = fadamgc.simulate(
        fadamgc.FedAvg(eta_l=0.1), task, local_parameters="BatchNorm1d", eval_clients=True, **HOW
    )
    by_hand = []
    for i, (x, y) in enumerate(task.pairs):
        model = run.model_of(i).double().eval()
        with torch.no_grad():
            by_hand.append(float((model(x.double()).argmax(1) == y).double().mean()))
    assert run.evaluate_clients().tolist() == pytest.approx(by_hand)
    assert run.history[-1].metrics["clients: mean"] == pytest.approx(np.mean(by_hand))


@pytest.mark.slow
def test_schedules_and_a_sweep():
    task = task_of(plain_net())
    algorithm = fadamgc.FAdamGC(eta_l=fadamgc.schedules.cosine(0.05))
    alone = [
        fadamgc.simulate(algorithm, task, local_parameters="2", seed=s, executor="vectorized", **HOW)
        for s in (0, 1)
    ]
    many = fadamgc.simulate_many(
        [{"seed": 0}, {"seed": 1}],
        algorithm=algorithm,
        task=task,
        local_parameters="2",
        executor="vectorized",
        **{k: v for k, v in HOW.items() if k != "progress"},
        progress=False,
    )
    assert all(torch.equal(a.x, b.x) for a, b in zip(alone, many, strict=True))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("head", "matches no trainable parameter of Sequential; its parameters are 0.weight"),
        ("*", "all parameters; none is left to share"),
        (3, "local_parameters=3 is not accepted"),
        ([], "local_parameters"),
    ],
)
def test_bad_patterns(value, message):
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.simulate(fadamgc.FedAvg(), task_of(net()), local_parameters=value, **HOW)


def test_groups_are_refused():
    with pytest.raises(fadamgc.InputError, match="clients in groups"):
        fadamgc.simulate(fadamgc.MTGC(), task_of(plain_net()), local_parameters="2", groups=2, **HOW)


# Before and after one local epoch.


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["loop", "threads", "vectorized"])
@pytest.mark.parametrize("local_parameters", [None, "2"])
def test_clients_after_one_local_epoch(executor, local_parameters):
    task = task_of(plain_net(), metric="loss")
    how = {"eval_clients": "epoch", "local_parameters": local_parameters, "executor": executor}
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.3), task, **HOW, **how)
    named = run.history[-1].metrics
    assert named["clients: mean after an epoch"] < named["clients: mean"]
    assert {"clients: worst tenth after an epoch", "clients: spread after an epoch"} <= named.keys()
    # The evaluation changes nothing.
    plain = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.3), task, **HOW, **how | {"eval_clients": False})
    assert torch.equal(run.x, plain.x)


@pytest.mark.slow
def test_one_epoch_by_hand():
    task = task_of(plain_net(), metric="loss")
    run = fadamgc.simulate(
        fadamgc.FedAvg(eta_l=0.3), task, eval_clients="epoch", **HOW | {"batch_size": None, "rounds": 2}
    )
    values = []
    for x, y in task.pairs:
        model = copy.deepcopy(run.model).double()
        task.loss(model(x.double()), y).backward()
        with torch.no_grad():
            for p in model.parameters():
                p -= 0.3 * p.grad
            values.append(float(task.loss(model(x.double()), y)))
    assert run.history[-1].metrics["clients: mean after an epoch"] == pytest.approx(np.mean(values), rel=1e-6)
