"""Clients whose data is made when they take part."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import fadamgc
from problems import REPRESENTATIVES, class_task

HOW = {"rounds": 3, "local_steps": 2, "batch_size": 4, "progress": False}


def on_demand(plain, made=None):
    def make(i):
        if made is not None:
            made.append(i)
        return plain.pairs[i]

    clients = fadamgc.LazyClients(plain.n, make, samples=[len(x) for x, _ in plain.pairs])
    return fadamgc.Task(plain.model, plain.loss, clients, plain.test_pair)


@pytest.mark.parametrize("name", REPRESENTATIVES)
@pytest.mark.parametrize("executor", ["loop", "threads", "vectorized", "auto"])
def test_the_same_numbers_as_with_data_in_memory(name, executor):
    algorithm, plain = fadamgc.make_algorithm(name), class_task()
    who = {} if algorithm.full_participation else {"sampled": 3, "tracked": 2}
    how = HOW | who | {"executor": executor, "dtype": torch.float64}
    if executor == "auto":
        how |= {"executor": "auto", "eval_clients": True, "weights": "size" if who else "uniform"}
    runs = [fadamgc.simulate(algorithm, task, **how) for task in (plain, on_demand(plain))]
    torch.testing.assert_close(runs[1].x, runs[0].x, rtol=1e-12, atol=1e-14)
    assert runs[0].history[-1].metrics == pytest.approx(runs[1].history[-1].metrics)


def test_only_clients_that_take_part_are_made():
    made = []
    task = on_demand(class_task(), made)
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, sampled=1, executor="loop", **HOW | {"rounds": 2})
    taken = {i for record in run.history for i in record.sampled}
    assert set(made) <= taken | {0, int(task.sizes.argmax())}
    assert len(made) == len(set(made))


def test_resume_and_another_task(tmp_path):
    plain = class_task()
    how = HOW | {"sampled": 3, "checkpoint": tmp_path, "executor": "loop"}
    whole = fadamgc.simulate(fadamgc.FAdamGC(), on_demand(plain), **how | {"checkpoint": None})
    fadamgc.simulate(fadamgc.FAdamGC(), on_demand(plain), **how | {"rounds": 2})
    again = fadamgc.simulate(fadamgc.FAdamGC(), on_demand(plain), resume=True, **how)
    assert torch.equal(whole.x, again.x)
    with pytest.raises(fadamgc.OtherRunError, match="data differs"):
        fadamgc.simulate(fadamgc.FAdamGC(), on_demand(class_task((9, 9, 9, 9, 9, 9))), resume=True, **how)


def make_points(i):
    g = torch.Generator().manual_seed(i)
    return torch.randn(8, 3, generator=g), torch.randint(2, (8,), generator=g)


def test_of_a_million_clients_few_are_made_and_kept():
    made = []

    def make(i):
        made.append(i)
        return make_points(i)

    clients = fadamgc.LazyClients(1_000_000, make, samples=8)
    task = fadamgc.Task(nn.Linear(3, 2), cross_entropy, clients)
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, sampled=20, **HOW)
    assert len(made) < 100
    assert len(run.clients.participants) <= 60
    assert len(task.samples._kept) < 200
    assert "clients=1000000, samples=8000000, made on demand" in repr(task)


def test_workers_make_their_own():
    clients = fadamgc.LazyClients(50, make_points, samples=8)
    assert clients[3] is clients[3]
    twin = pickle.loads(pickle.dumps(clients))
    assert not twin._kept
    assert torch.equal(twin[3].inputs, clients[3].inputs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((0, make_points, 8), "n=0"),
        ((3, None, 8), "make=None is not a function"),
        ((3, make_points, [8, 8]), "one for each of 3 clients"),
        ((3, make_points, 0), "samples"),
        ((3, make_points, [8, 8, 0.5]), "one whole number"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.LazyClients(*arguments)


def test_bad_data_names_the_client():
    def other_shape(i):
        return (torch.ones(8, 3 + (i == 2)), torch.zeros(8).long())

    def fails(i):
        raise OSError("no such disk")

    model = nn.Linear(3, 2)
    task = fadamgc.Task(model, cross_entropy, fadamgc.LazyClients(3, other_shape, 8))
    with pytest.raises(fadamgc.InputError, match="client 2 has inputs of shape"):
        fadamgc.simulate(fadamgc.FedAvg(), task, executor="loop", **HOW)
    with pytest.raises(fadamgc.InputError, match="failed for client 0: no such disk"):
        fadamgc.Task(model, cross_entropy, fadamgc.LazyClients(3, fails, 8))
    with pytest.raises(fadamgc.InputError, match="client 0 has 8 samples, and samples= says 7"):
        fadamgc.Task(model, cross_entropy, fadamgc.LazyClients(3, make_points, 7))
    with pytest.raises(fadamgc.InputError, match="lazy and collate are for Datasets"):
        fadamgc.Task(model, cross_entropy, fadamgc.LazyClients(3, make_points, 8), lazy=True)
