"""Metrics with several numbers, and accuracies of outputs of all shapes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

import fadamgc
from fadamgc import metrics
from problems import class_task

RUN: dict[str, Any] = {"rounds": 4, "local_steps": 3, "batch_size": 8, "progress": False}


def test_macro_f1_is_that_of_scikit_learn() -> None:
    random = torch.Generator().manual_seed(0)
    for classes in (2, 5):
        output = torch.randn(200, classes, generator=random)
        target = torch.randint(0, classes, (200,), generator=random)
        expected = f1_score(target.numpy(), output.argmax(1).numpy(), average="macro")
        assert metrics.macro_f1(output, target) == pytest.approx(expected)
    output, target = torch.randn(30, 6, generator=random), torch.zeros(30, dtype=torch.int64)
    expected = f1_score(target.numpy(), output.argmax(1).numpy(), average="macro")
    assert metrics.macro_f1(output, target) == pytest.approx(expected)


def test_accuracy_of_all_shapes() -> None:
    labels = torch.tensor([[0, 1, 2], [2, -100, 0]])
    last = torch.nn.functional.one_hot(torch.tensor([[0, 1, 1], [2, 0, 0]]), 4).float()
    assert metrics.accuracy(last, labels) == pytest.approx(4 / 5)  # (B, T, V); -100 has no label
    logits = torch.tensor([0.5, -1.0, 2.0, 3.0])
    for target in (torch.tensor([1, 0, 0, 1]), torch.tensor([1.0, 0, 0, 1])):
        assert metrics.accuracy(logits, target) == metrics.accuracy(logits[:, None], target) == 0.75
        assert metrics.accuracy(logits[:, None], target[:, None]) == 0.75
    images = torch.randn(4, 3, 5, 5)
    assert metrics.accuracy(images, images.argmax(1)) == 1


def test_each_class() -> None:
    output = torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0], [1.0, 2.0]])
    found = metrics.classification(output, torch.tensor([0, 1, 1, 1]))
    assert found == {
        "accuracy": 0.75,
        "macro-F1": pytest.approx((2 / 3 + 4 / 5) / 2),
        "worst class": pytest.approx(2 / 3),
        "accuracy of 0": 1.0,
        "accuracy of 1": pytest.approx(2 / 3),
    }


def test_a_metric_with_several_numbers_is_in_the_records(tmp_path) -> None:
    run = fadamgc.simulate(fadamgc.FedAvg(), class_task(metric=metrics.classification), eval_every=2, **RUN)
    plain = fadamgc.simulate(fadamgc.FedAvg(), class_task(), eval_every=2, **RUN)
    assert [r.test_metric for r in run.history] == [r.test_metric for r in plain.history]
    assert run.history[0].metrics == {}
    last = run.history[-1].metrics
    assert list(last)[:3] == ["accuracy", "macro-F1", "worst class"]
    assert last["accuracy"] == run.history[-1].test_metric == run.history[-1].test_accuracy
    run.save(tmp_path)
    assert fadamgc.load_run(tmp_path).history == run.history
    frame = run.to_pandas()
    assert frame["macro-F1"].iloc[-1] == last["macro-F1"]
    assert np.isnan(frame["macro-F1"].iloc[0])


def test_token_level_and_one_logit_tasks_have_an_accuracy() -> None:
    tokens = [(torch.randint(0, 7, (12, 5)), torch.randint(0, 7, (12, 5))) for _ in range(3)]

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.cross_entropy(output.reshape(-1, 7), target.reshape(-1))

    model = torch.nn.Embedding(7, 7)
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.5), fadamgc.Task(model, loss, tokens, tokens[0]), **RUN)
    assert 0 <= run.history[-1].test_accuracy <= 1
    x = torch.randn(60, 3)
    y = (x[:, :1] > 0).float()
    bce = torch.nn.functional.binary_cross_entropy_with_logits
    task = fadamgc.Task(torch.nn.Linear(3, 1), bce, [(x[:30], y[:30]), (x[30:], y[30:])], (x, y))
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=1.0), task, **RUN | {"rounds": 20})
    assert run.history[-1].test_accuracy > 0.9


def test_a_metric_that_returns_no_numbers_is_refused() -> None:
    for value in ({}, {"a": "b"}, "x"):
        with pytest.raises(fadamgc.InputError, match="a number, or a dict of named numbers"):
            fadamgc.simulate(fadamgc.FedAvg(), class_task(metric=lambda o, t, v=value: v), **RUN)
