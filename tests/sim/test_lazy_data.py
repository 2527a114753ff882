"""Data that is read per batch, and data that is in memory only once."""

from __future__ import annotations

import gc
import random
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset, IterableDataset, Subset, TensorDataset

import fadamgc
from problems import class_task, mlp

HOW = {"rounds": 3, "sampled": 3, "local_steps": 4, "batch_size": 4, "progress": False}


class Items(Dataset):
    """Counts how often its items are read."""

    def __init__(self, inputs, targets, change=None):
        self.inputs, self.targets, self.change, self.reads = inputs, targets, change, 0

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, i):
        self.reads += 1
        x = self.inputs[i]
        return (x if self.change is None else self.change(x)), self.targets[i]


def lazy_task(change=None, transform=None, **options):
    plain = class_task()
    data = [Items(x, y, change) for x, y in plain.pairs]
    test = Items(*plain.test_pair)
    return fadamgc.Task(plain.model, plain.loss, data, test, lazy=True, transform=transform, **options)


def equal(a, b):
    return torch.equal(a.x, b.x) and [r.test_loss for r in a.history] == [r.test_loss for r in b.history]


@pytest.mark.parametrize("executor", ["loop", "threads"])
@pytest.mark.parametrize("algorithm", [fadamgc.FAdamGC(), fadamgc.Scaffold(init="gradient")])
def test_lazy_data_trains_as_data_in_memory(executor, algorithm):
    lazy = fadamgc.simulate(algorithm, lazy_task(), executor=executor, **HOW)
    assert equal(lazy, fadamgc.simulate(algorithm, class_task(), executor=executor, **HOW))


def test_items_are_read_when_a_batch_needs_them():
    task = lazy_task()
    before = sum(data.reads for data in task.clients)
    assert before <= 2  # two samples to try the model
    fadamgc.simulate(fadamgc.FedAvg(), task, executor="loop", eval_every=99, **HOW)
    # In every round 3 clients take 4 steps with 4 samples each; clients may have fewer than 4.
    steps = sum(data.reads for data in task.clients) - before
    assert 3 * 3 * 4 <= steps <= 3 * 3 * 4 * 4 + 4
    assert "lazy" in repr(task)


def noisy(x):
    return x + random.random() + float(np.random.rand()) + torch.rand(())


def test_random_augmentation_in_a_dataset_changes_and_is_the_same_everywhere(tmp_path):
    runs = {
        e: fadamgc.simulate(fadamgc.FAdamGC(), lazy_task(noisy), executor=e, **HOW)
        for e in ("loop", "threads")
    }
    assert equal(runs["loop"], runs["threads"])
    assert not equal(runs["loop"], fadamgc.simulate(fadamgc.FAdamGC(), class_task(), executor="loop", **HOW))
    how = HOW | {"executor": "loop", "checkpoint": tmp_path}
    fadamgc.simulate(fadamgc.FAdamGC(), lazy_task(noisy), **how | {"rounds": 1})
    assert equal(runs["loop"], fadamgc.simulate(fadamgc.FAdamGC(), lazy_task(noisy), resume=True, **how))


def test_reading_leaves_the_global_random_numbers_alone():
    task = lazy_task(noisy)
    states = random.getstate(), np.random.get_state()[1].copy(), torch.get_rng_state()
    fadamgc.simulate(fadamgc.FedAvg(), task, executor="loop", **HOW)
    assert random.getstate() == states[0]
    assert np.array_equal(np.random.get_state()[1], states[1])
    assert torch.equal(torch.get_rng_state(), states[2])


def test_a_model_with_dropout_draws_the_same_on_loop_and_threads():
    plain = class_task()
    model = nn.Sequential(nn.Dropout(0.5), mlp())
    data = [Items(x, y, noisy) for x, y in plain.pairs]
    task = fadamgc.Task(model, plain.loss, data, plain.test_pair, lazy=True)
    runs = [fadamgc.simulate(fadamgc.FedAvg(), task, executor=e, **HOW) for e in ("loop", "threads")]
    assert equal(*runs)


def test_a_transform_sees_the_batches_of_lazy_data():
    plain = class_task()
    double = fadamgc.Task(plain.model, plain.loss, [(2 * x, y) for x, y in plain.pairs], plain.test_pair)
    lazy = lazy_task(transform=lambda x, y: (2 * x, y))
    how = HOW | {"executor": "loop"}
    assert equal(
        fadamgc.simulate(fadamgc.FedAvg(), lazy, **how), fadamgc.simulate(fadamgc.FedAvg(), double, **how)
    )


def test_auto_runs_lazy_data_and_vectorized_refuses_it():
    run = fadamgc.simulate(fadamgc.FedAvg(), lazy_task(), **HOW)
    assert run.settings["executor"] in ("loop", "threads")
    with pytest.raises(fadamgc.InputError, match="reads its items per batch"):
        fadamgc.simulate(fadamgc.FedAvg(), lazy_task(), executor="vectorized", **HOW)


def test_clients_are_evaluated_on_lazy_data():
    runs = [
        fadamgc.simulate(fadamgc.FedAvg(), task, executor="loop", eval_clients=True, **HOW)
        for task in (lazy_task(), class_task())
    ]
    assert runs[0].history[-1].metrics == runs[1].history[-1].metrics
    assert runs[0].evaluate_clients().tolist() == runs[1].evaluate_clients().tolist()


def test_a_dataset_that_is_read_now_is_said(caplog):
    plain = class_task()
    with caplog.at_level("INFO", logger="fadamgc"):
        fadamgc.Task(plain.model, plain.loss, [Items(x, y) for x, y in plain.pairs])
    total = sum(len(x) for x, _ in plain.pairs)
    assert f"{total} items of Datasets were read into memory" in caplog.text
    assert "lazy=True" in caplog.text
    with pytest.warns(UserWarning, match="random augmentation.*lazy=True"):
        fadamgc.Task(plain.model, plain.loss, [Items(x, y, noisy) for x, y in plain.pairs])


# Items that are dicts, tuples and sequences of different lengths.


class Tagger(nn.Module):
    """A sequence model: takes a dict with ids and a mask, gives one output per label."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(20, 4), nn.Linear(4, 3)

    def forward(self, batch):
        h = self.embed(batch["ids"]) * batch["mask"][..., None]
        return self.out(h.sum(1) / batch["mask"].sum(1, keepdim=True))


def sentences(n=12, seed=0):
    r = random.Random(seed)
    return [
        {"ids": [r.randrange(1, 20) for _ in range(r.randrange(2, 9))], "label": r.randrange(3)}
        for _ in range(n)
    ]


def padded(items):
    ids = pad_sequence([torch.tensor(item["ids"]) for item in items], batch_first=True)
    return {"ids": ids, "mask": (ids != 0).float()}, torch.tensor([item["label"] for item in items])


@pytest.mark.parametrize("executor", ["auto", "loop", "threads"])
def test_dicts_of_padded_sequences(executor):
    clients = [sentences(seed=i) for i in range(4)]
    task = fadamgc.Task(Tagger(), cross_entropy, clients, sentences(30, seed=9), collate=padded)
    run = fadamgc.simulate(fadamgc.FAdamGC(eta_l=0.05), task, executor=executor, **HOW | {"rounds": 8})
    assert run.history[-1].train_loss < run.history[0].train_loss
    assert 0 <= run.history[-1].test_accuracy <= 1
    whole, labels = padded(sentences(30, seed=9))
    with torch.no_grad():
        output = run.model(whole)
    assert run.history[-1].test_accuracy == float((output.argmax(1) == labels).double().mean())
    # The gradient at the start reads the whole data of a client in one batch.
    g = fadamgc.simulate(fadamgc.Scaffold(init="gradient"), task, executor="loop", **HOW)
    assert torch.isfinite(g.x).all()


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.out = nn.Linear(7, 3)

    def forward(self, inputs):
        a, b = inputs
        return self.out(torch.cat([a, b], dim=1))


def test_tuples_of_inputs_and_a_dataset_of_triples():
    plain = class_task()

    class Triples(Dataset):
        def __init__(self, x, y):
            self.x, self.y = x, y

        def __len__(self):
            return len(self.x)

        def __getitem__(self, i):
            return self.x[i], self.x[i][:2], self.y[i]

    def collate(items):
        a, b, y = (torch.stack(column) for column in zip(*items, strict=True))
        return (a, b), y

    task = fadamgc.Task(TwoInputs(), cross_entropy, [Triples(*p) for p in plain.pairs], collate=collate)
    runs = [fadamgc.simulate(fadamgc.FAdamGC(), task, executor=e, **HOW) for e in ("loop", "threads")]
    assert torch.allclose(runs[0].x, runs[1].x, atol=1e-6)
    wide = [(torch.cat([x, x[:, :2]], 1), y) for x, y in plain.pairs]
    model = nn.Linear(7, 3)
    model.load_state_dict(TwoInputs().out.state_dict())
    same = fadamgc.simulate(
        fadamgc.FAdamGC(), fadamgc.Task(model, cross_entropy, wide), executor="loop", **HOW
    )
    assert torch.equal(runs[0].x, same.x)


def ragged(x):
    return x[: 2 + int(abs(x[0]) * 10) % 3]


@pytest.mark.parametrize(
    ("clients", "options", "message"),
    [
        ([sentences()], {}, "not a pair"),
        ([sentences()], {"collate": lambda items: items[0]}, "collate returned a dict.*must be a pair"),
        ([sentences()], {"collate": 3}, "collate=3 is not a function"),
        ([[]], {"collate": padded}, "client 0 is empty"),
        ([sentences()], {"collate": lambda items: {}["no"]}, "cannot be read: KeyError|cannot be read"),
    ],
)
def test_bad_collate(clients, options, message):
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.Task(Tagger(), cross_entropy, clients, **options)


def test_items_of_different_shapes_name_the_remedy():
    plain = class_task()
    with pytest.raises(fadamgc.InputError, match="different shapes.*collate="):
        fadamgc.Task(mlp(), cross_entropy, [Items(x, y, ragged) for x, y in plain.pairs], lazy=True)


def test_iterable_datasets_are_refused():
    class Stream(IterableDataset):
        def __iter__(self):
            return iter([])

    with pytest.raises(fadamgc.InputError, match="client 0 is an IterableDataset"):
        fadamgc.Task(mlp(), cross_entropy, [Stream()])


# Data in memory once.


def storages():
    """Bytes of all CPU storages that are alive, each once."""
    gc.collect()
    sizes = {}
    for item in gc.get_objects():
        if type(item) is torch.Tensor and item.device.type == "cpu" and item.layout is torch.strided:
            storage = item.untyped_storage()
            sizes[storage.data_ptr()] = storage.nbytes()
    return sum(sizes.values())


@pytest.mark.slow
def test_subsets_of_one_dataset_share_its_tensors():
    X, y = torch.randn(4000, 64), torch.arange(4000) % 4
    data = TensorDataset(X, y)
    before = storages()
    clients = [Subset(data, range(i, 4000, 5)) for i in range(5)]
    model = nn.Linear(64, 4)
    task = fadamgc.Task(model, cross_entropy, clients, (X[:8], y[:8]))
    copies = fadamgc.Task(model, cross_entropy, [(X[i::5], y[i::5]) for i in range(5)], (X[:8], y[:8]))
    assert task.samples[0].inputs.data_ptr() == X.data_ptr()
    runs = [fadamgc.simulate(fadamgc.FedAvg(), t, **HOW) for t in (task, copies)]
    assert equal(*runs)
    del copies, runs
    assert storages() - before < 0.2 * X.nbytes


def test_split_does_not_copy_the_data():
    X, y = torch.randn(1000, 64), torch.arange(1000) % 4
    task = fadamgc.Task.split(nn.Linear(64, 4), cross_entropy, X, y, clients=5)
    assert all(rows.inputs.data_ptr() == X.data_ptr() for rows in task.samples)
    assert sum(len(rows) for rows in task.samples) == 800


@pytest.mark.slow
def test_pairs_are_in_memory_once_after_a_run():
    before = storages()
    pairs = [(torch.randn(500, 64), torch.arange(500) % 4) for _ in range(4)]
    size = sum(x.nbytes for x, _ in pairs)
    task = fadamgc.Task(nn.Linear(64, 4), cross_entropy, pairs)
    del pairs
    run = fadamgc.simulate(fadamgc.FedAvg(), task, **HOW)
    assert storages() - before < 1.2 * size
    assert run.task is task
    (x, _), (other, _) = task.clients[0], task.pairs[0]
    assert x.data_ptr() == other.data_ptr() == task.samples[0].inputs.data_ptr()


WORKERS = """
import fadamgc, torch, sys

def private():  # kilobytes of memory that belong to this process alone
    fields = dict(line.split(":") for line in open("/proc/self/smaps_rollup").read().splitlines()[1:])
    return sum(int(fields[key].split()[0]) for key in ("Private_Clean", "Private_Dirty"))

class Spy(torch.nn.Linear):
    pass

def record(end):
    with open(sys.argv[1], "a") as file:
        file.write(f"{private()}\\n")

if __name__ == "__main__":
    X, y = torch.randn(300_000, 100), torch.arange(300_000) % 4  # 120 MB
    task = fadamgc.Task.split(Spy(100, 4), torch.nn.functional.cross_entropy, X, y, clients=10)
    runs = [{"seed": s} for s in (0, 1)]
    common = dict(algorithm=fadamgc.FedAvg(), task=task, rounds=2, callbacks=[record], executor="loop")
    found = fadamgc.simulate_many(runs, workers=2, **common)
    alone = fadamgc.simulate_many(runs, **common)
    assert all(torch.equal(a.x, b.x) and a.task is task for a, b in zip(found, alone))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="memory is measured with /proc")
def test_several_workers_read_the_same_memory(tmp_path):
    (tmp_path / "script.py").write_text(WORKERS)
    log = tmp_path / "log"
    subprocess.run([sys.executable, tmp_path / "script.py", log], check=True, timeout=120)
    private = [int(line) for line in log.read_text().split()]
    assert len(private) == 8
    workers, parent = private[:4], private[4:]
    # The data is 120 MB; a worker that has a copy of it would need that much more than the parent without it.
    assert max(workers) < min(parent) + 60_000, private
