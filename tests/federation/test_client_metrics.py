"""Evaluation on the data of single clients."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import fadamgc
from fadamgc import escape
from fadamgc.metrics import client_metrics
from problems import class_task, mlp

RUN: dict[str, Any] = {"rounds": 5, "local_steps": 3, "batch_size": 8, "progress": False}
NAMES = ["clients: mean", "clients: worst tenth", "clients: spread"]


def by_hand(run: fadamgc.Run, pairs: Any) -> list[float]:
    with torch.no_grad():
        return [float((run.model.eval()(x).argmax(1) == y).double().mean()) for x, y in pairs]


@pytest.mark.parametrize("executor", ["loop", "vectorized"])
def test_the_metric_on_the_data_of_each_client(executor: Any) -> None:
    task = class_task()
    options: dict[str, Any] = {"sampled": 2, "eval_every": 2, "executor": executor, **RUN}
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.1), task, eval_clients=True, **options)
    values = by_hand(run, task.pairs)
    assert run.evaluate_clients().tolist() == pytest.approx(values)
    last = run.history[-1].metrics
    assert last["clients: mean"] == pytest.approx(np.mean(values))
    assert last["clients: worst tenth"] == pytest.approx(min(values))
    assert last["clients: spread"] == pytest.approx(np.std(values))
    seen = {i for record in run.history for i in record.sampled}
    unseen = [value for i, value in enumerate(values) if i not in seen]
    assert ("clients: not yet seen" in last) == bool(unseen)
    if unseen:
        assert last["clients: not yet seen"] == pytest.approx(np.mean(unseen))
    assert [bool(record.metrics) for record in run.history] == [False, True, False, True, True]
    plain = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.1), task, **options)
    assert torch.equal(plain.x, run.x)


def test_test_data_of_the_clients() -> None:
    plain = class_task()
    tests = [(x[:2], y[:2]) for x, y in plain.pairs]
    task = fadamgc.Task(mlp(), plain.loss, plain.pairs, client_tests=tests)
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.1), task, eval_clients=True, **RUN)
    assert run.evaluate_clients().tolist() == pytest.approx(by_hand(run, tests))
    assert list(run.history[-1].metrics) == NAMES
    assert run.history[-1].test_metric is None


@pytest.mark.parametrize("executor", ["loop", "vectorized"])
@pytest.mark.parametrize("how", [True, "epoch"])
def test_clients_without_test_data_do_not_count(executor: Any, how: Any) -> None:
    plain = class_task()
    tests = [None if i in (1, 4) else (x[:2], y[:2]) for i, (x, y) in enumerate(plain.pairs)]
    task = fadamgc.Task(mlp(), plain.loss, plain.pairs, client_tests=iter(tests))
    options: dict[str, Any] = {"eval_clients": how, "executor": executor, "sampled": 3, **RUN}
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.1), task, **options | {"rounds": 1})
    values = by_hand(run, [pair for pair in tests if pair is not None])
    found = run.evaluate_clients()
    assert np.isnan(found).tolist() == [data is None for data in tests]
    assert found[[0, 2, 3, 5]].tolist() == pytest.approx(values)
    metrics = run.history[0].metrics
    assert metrics["clients: mean"] == pytest.approx(np.mean(values))
    unseen = [v for i, v in zip([0, 2, 3, 5], values, strict=True) if i not in run.history[0].sampled]
    assert metrics["clients: not yet seen"] == pytest.approx(np.mean(unseen))
    assert ("clients: mean after an epoch" in metrics) == (how == "epoch")
    twin = dataclasses.replace(task, name="twin")
    assert twin.evaluated == task.evaluated == [0, 2, 3, 5]


def test_held_out_samples_are_the_test_data_of_their_clients() -> None:
    """A client with too few samples to hold one out has no test data of its own."""
    owner = np.repeat(["eve", "ann", "bob"], [20, 10, 2])
    X, y = torch.arange(32.0)[:, None], torch.arange(32) % 2
    loss = torch.nn.functional.cross_entropy
    task = fadamgc.Task.split(torch.nn.Linear(1, 2), loss, X, y, clients=owner, test=0.2)
    tests = [None if data is None else data[:][0].flatten().tolist() for data in task.client_tests]
    assert [None if rows is None else len(rows) for rows in tests] == [2, None, 4]
    assert sorted(row for rows in tests if rows for row in rows) == task.test_pair[0].flatten().tolist()
    assert all(20 <= row < 30 for row in tests[0])
    trained = {row for x, _ in task.pairs for row in x.flatten().tolist()}
    assert not trained & {row for rows in tests if rows for row in rows}
    assert task.client_test_samples[0].inputs.data_ptr() == X.data_ptr()
    own = fadamgc.Task.split(torch.nn.Linear(1, 2), loss, X, y, clients=owner, client_tests=None)
    given = fadamgc.Task.split(torch.nn.Linear(1, 2), loss, X, y, clients=owner, test=(X, y))
    assert own.client_tests is None
    assert given.client_tests is None


def test_where_low_is_good_the_worst_are_high() -> None:
    values = np.arange(20.0)
    assert client_metrics(values, range(20), "min")["clients: worst tenth"] == 18.5
    assert client_metrics(values, range(20), "max")["clients: worst tenth"] == 0.5
    assert client_metrics(values, range(19))["clients: not yet seen"] == 19


@pytest.mark.slow
def test_a_resumed_run_may_evaluate_clients(tmp_path) -> None:
    options: dict[str, Any] = {"checkpoint": tmp_path, "resume": True, "eval_clients": True}
    fadamgc.simulate(fadamgc.FedAvg(), class_task(), **RUN | {"rounds": 2}, **options)
    resumed = fadamgc.simulate(fadamgc.FedAvg(), class_task(), **RUN, **options)
    whole = fadamgc.simulate(fadamgc.FedAvg(), class_task(), eval_clients=True, **RUN)
    assert resumed.history == whole.history


@pytest.mark.slow
def test_tables_and_page_have_all_metrics(tmp_path) -> None:
    runs = fadamgc.simulate_many(
        [{"algorithm": fadamgc.FedAvg(), "seed": seed} for seed in (0, 1)],
        task=class_task(metric=fadamgc.metrics.classification),
        eval_clients=True,
        **RUN,
    )
    fadamgc.report(runs, tmp_path)
    for name in ("results.md", "report.html"):
        text = (tmp_path / name).read_text()
        assert "Further metrics at the end" in text
        assert all(wanted in text for wanted in ("macro-F1", "accuracy of 2", *NAMES))
    assert "Final accuracy" in (tmp_path / "results.md").read_text()
    row = pd.read_csv(tmp_path / "results.csv").iloc[0]
    tex = (tmp_path / "results.tex").read_text()
    assert tex.count("ccuracy at the end") == 1
    for name in ("macro-F1", "accuracy of 2", *NAMES):
        values = [run.history[-1].metrics[name] for run in runs]
        assert row[f"{name}_mean"] == pytest.approx(np.mean(values))
        assert row[f"{name}_std"] == pytest.approx(np.std(values, ddof=1))
        assert f"{name} & {escape.latex(tmp_path.name)} & ${np.mean(values):.3g} " in tex
    assert "accuracy_mean" not in row


@pytest.mark.parametrize(
    ("tests", "message"),
    [
        (
            [(torch.ones(2, 5), torch.zeros(2).long())],
            "client_tests has 1 entries; give one pair for each of 6",
        ),
        (3, "client_tests has 3"),
        ([None] * 6, "client_tests has None for all clients"),
        ([(torch.ones(2, 4), torch.zeros(2).long())] * 6, "the test data of client 0 has inputs of shape"),
    ],
)
def test_bad_test_data_are_refused(tests: Any, message: str) -> None:
    plain = class_task()
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.Task(mlp(), plain.loss, plain.pairs, client_tests=tests)


def test_eval_clients_is_a_flag() -> None:
    with pytest.raises(fadamgc.InputError, match="eval_clients=3 is not accepted"):
        fadamgc.simulate(fadamgc.FedAvg(), class_task(), eval_clients=3, **RUN)  # type: ignore[arg-type]
