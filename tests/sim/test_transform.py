"""A transform of every training batch: new random numbers in each step, and the same on every executor."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fadamgc
from problems import EVEN, class_task, mlp

RUN: dict[str, Any] = {"rounds": 4, "local_steps": 3, "batch_size": 8, "progress": False}


def noisy(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return x + 0.5 * torch.randn_like(x), y


def task_with(
    transform: Any, sizes: Any = (3, 20, 7, 16, 40, 9), model: nn.Module | None = None
) -> fadamgc.Task:
    plain = class_task(sizes)
    return fadamgc.Task(model or mlp(), plain.loss, plain.pairs, plain.test, transform=transform)


@pytest.mark.parametrize("sizes", [EVEN, (3, 20, 7, 16, 40, 9)], ids=["even", "padded"])
@pytest.mark.parametrize("executor", ["vectorized", "threads"])
def test_executors_agree(sizes: Any, executor: Any) -> None:
    task = task_with(noisy, sizes)
    options: dict[str, Any] = {"dtype": torch.float64, **RUN}
    loop = fadamgc.simulate(fadamgc.FAdamGC(), task, executor="loop", **options)
    fast = fadamgc.simulate(fadamgc.FAdamGC(), task, executor=executor, **options)
    torch.testing.assert_close(fast.x, loop.x, rtol=1e-11, atol=1e-13)
    plain = fadamgc.simulate(fadamgc.FAdamGC(), class_task(sizes), executor="loop", **options)
    assert not torch.allclose(plain.x, loop.x)


@pytest.mark.parametrize("executor", ["vectorized", "threads", "loop"])
def test_epochs_and_batch_norm(executor: Any) -> None:
    model = mlp(0, nn.BatchNorm1d(8))
    options: dict[str, Any] = {"rounds": 3, "local_epochs": 2, "batch_size": 8, "dtype": torch.float64}
    task = task_with(noisy, (16, 24, 8, 20, 12, 10), model)
    runs = [
        fadamgc.simulate(fadamgc.FedAvg(), task, executor=e, progress=False, **options)
        for e in ("loop", executor)
    ]
    torch.testing.assert_close(runs[1].x, runs[0].x, rtol=1e-9, atol=1e-11)


def test_each_step_draws_new_numbers_and_the_test_data_stay() -> None:
    seen: list[Tensor] = []

    def remember(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        noise = torch.rand(())
        seen.append(noise)
        return x + noise, y

    task = task_with(remember)
    seen.clear()
    run = fadamgc.simulate(fadamgc.FedAvg(), task, executor="loop", **RUN)
    assert len(seen) == 4 * 6 * 3
    assert len({float(v) for v in seen}) == len(seen)
    first = [float(v) for v in seen]
    seen.clear()
    again = fadamgc.simulate(fadamgc.FedAvg(), task, executor="loop", **RUN)
    assert [float(v) for v in seen] == first
    assert torch.equal(again.x, run.x)


def test_labels_may_change_too() -> None:
    def flipped(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return -x, 2 - y

    pairs = [(-x, 2 - y) for x, y in class_task().pairs]
    expected = fadamgc.simulate(
        fadamgc.FedAvg(), fadamgc.Task(mlp(), nn.functional.cross_entropy, pairs), executor="loop", **RUN
    )
    run = fadamgc.simulate(fadamgc.FedAvg(), task_with(flipped), executor="loop", **RUN)
    assert torch.equal(run.x, expected.x)


def test_a_stopped_run_resumes_to_the_same_bits(tmp_path) -> None:
    task = task_with(noisy)
    whole = fadamgc.simulate(fadamgc.FAdamGC(), task, **RUN)
    fadamgc.simulate(fadamgc.FAdamGC(), task, checkpoint=tmp_path, **RUN | {"rounds": 2})
    resumed = fadamgc.simulate(fadamgc.FAdamGC(), task, checkpoint=tmp_path, resume=True, **RUN)
    assert torch.equal(resumed.x, whole.x)
    with pytest.raises(fadamgc.OtherRunError, match="transform"):
        fadamgc.simulate(fadamgc.FAdamGC(), class_task(), checkpoint=tmp_path, resume=True, **RUN)


def test_many_runs_at_once_are_each_as_alone() -> None:
    task = task_with(noisy, EVEN)
    runs = [{"algorithm": fadamgc.FAdamGC(), "seed": seed} for seed in (0, 1)]
    together = fadamgc.simulate_many(runs, task=task, executor="vectorized", **RUN)
    for arguments, run in zip(runs, together, strict=True):
        alone = fadamgc.simulate(task=task, executor="vectorized", **arguments, **RUN)
        assert torch.equal(run.x, alone.x)


@pytest.mark.parametrize(
    ("transform", "message"),
    [
        (3, "is not a function of"),
        (lambda x: x, "it must return"),
        (lambda x, y: x, "must return"),
        (lambda x, y: (x[:, :2], y), "of the same shapes and types"),
        (lambda x, y: (x[:1], y[:1]), "of the same shapes and types"),
    ],
)
def test_bad_transforms_are_refused(transform: Any, message: str) -> None:
    with pytest.raises(fadamgc.InputError, match=message):
        task_with(transform)
