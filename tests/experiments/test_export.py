"""The trained model out again: from Python, from the command line, and from a server's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fadamgc
from command import fadamgc as command
from problems import class_task, mlp

RUN: dict[str, Any] = {"rounds": 8, "local_steps": 3, "batch_size": 8, "progress": False}
SPEC = """
name = "small"
[task]
data = "digits"
clients = 4
[run]
rounds = 3
local_steps = 2
seeds = [0]
executor = "loop"
[[method]]
algorithm = "fedavg"
"""


def same(state: dict[str, torch.Tensor], module: nn.Module) -> bool:
    expected = module.state_dict()
    return state.keys() == expected.keys() and all(torch.equal(state[k], expected[k]) for k in expected)


@pytest.mark.parametrize("name", ["model.safetensors", "model.pt", "inner/model.pth"])
def test_a_run_is_exported_as_a_state_dict(name: str, tmp_path: Path) -> None:
    task = class_task(model=mlp(0, nn.BatchNorm1d(8)), sizes=(8, 16, 24, 8, 16, 8))
    run = fadamgc.simulate(fadamgc.FedAvg(), task, **RUN)
    path = run.export(tmp_path / name)
    state = load_file(path) if path.suffix == ".safetensors" else torch.load(path, weights_only=True)
    assert same(state, run.model)
    fresh = mlp(1, nn.BatchNorm1d(8))
    fresh.load_state_dict(state)
    x = task.test_pair[0]
    assert torch.equal(fresh.eval()(x), run.model.eval()(x))


def test_parameters_that_share_memory(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
    model[2].weight = model[0].weight
    run = fadamgc.simulate(fadamgc.FedAvg(), class_task(model=model), **RUN | {"rounds": 1})
    state = load_file(run.export(tmp_path / "model.safetensors"))
    assert torch.equal(state["0.weight"], run.model[0].weight)


def test_the_best_model_is_kept(tmp_path: Path) -> None:
    """A step size that is too large, so that the best round is not the last."""
    seen: list[Any] = []
    algorithm, task = fadamgc.FedAvg(eta_l=lambda t: 0.3 if t < 5 else 8.0), class_task()
    options = {**RUN, "keep": "best", "callbacks": [lambda end: seen.append((end.record, end.model))]}
    run = fadamgc.simulate(algorithm, task, **options)
    metrics = [record.test_metric for record, _ in seen]
    first = metrics.index(max(metrics))
    assert run.best.round == first + 1 < 8
    assert run.best.metric == max(metrics)
    assert same(run.best_model.state_dict(), seen[first][1])
    assert same(run.model.state_dict(), seen[-1][1])
    state = load_file(run.export(tmp_path / "best.safetensors", "best"))
    assert same(state, seen[first][1])
    run.save(tmp_path / "saved")
    again = fadamgc.load_run(tmp_path / "saved", task)
    assert (again.best.round, again.best.metric) == (run.best.round, run.best.metric)
    assert torch.equal(again.best.x, run.best.x)
    run.save(tmp_path / "records", states=False)
    records = fadamgc.load_run(tmp_path / "records", task)
    assert (records.best.round, records.best.metric) == (run.best.round, run.best.metric)
    with pytest.raises(fadamgc.FadamgcError, match=r"is model\.safetensors in its folder"):
        records.export(tmp_path / "best.pt", "best")
    records.save(tmp_path / "again", states=False)
    assert fadamgc.load_run(tmp_path / "again").best.round == records.best.round


def test_the_best_model_survives_a_stop(tmp_path: Path) -> None:
    algorithm, task = fadamgc.FedAvg(eta_l=lambda t: 0.3 if t < 4 else 1e-9), class_task()
    options: dict[str, Any] = {"keep": "best", "checkpoint": tmp_path, "resume": True}
    fadamgc.simulate(algorithm, task, **RUN | {"rounds": 4} | options)
    resumed = fadamgc.simulate(algorithm, task, **RUN | options)
    whole = fadamgc.simulate(algorithm, task, keep="best", **RUN)
    assert resumed.best.round == whole.best.round < 4
    assert torch.equal(resumed.best.x, whole.best.x)


def test_low_is_good_where_the_goal_is_low() -> None:
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.3), class_task(metric="loss"), keep="best", **RUN)
    losses = [record.test_loss for record in run.history]
    assert run.best.metric == min(losses)


def test_what_cannot_be_exported_says_why(tmp_path: Path) -> None:
    run = fadamgc.simulate(fadamgc.FedAvg(), class_task(), **RUN)
    with pytest.raises(fadamgc.FadamgcError, match='run it with keep="best"'):
        run.export(tmp_path / "model.pt", "best")
    with pytest.raises(fadamgc.InputError, match=r"ends with \.safetensors or \.pt"):
        run.export(tmp_path / "model.onnx")
    with pytest.raises(fadamgc.InputError, match="which='first' is not accepted"):
        run.export(tmp_path / "model.pt", "first")  # type: ignore[arg-type]
    with pytest.raises(fadamgc.InputError, match="keep='first' is not accepted"):
        fadamgc.simulate(fadamgc.FedAvg(), class_task(), keep="first", **RUN)  # type: ignore[arg-type]
    task = fadamgc.Task(mlp(), nn.functional.cross_entropy, class_task().pairs)
    with pytest.raises(fadamgc.InputError, match="keep='best' without test data"):
        fadamgc.simulate(fadamgc.FedAvg(), task, keep="best", **RUN)
    assert list(tmp_path.iterdir()) == []


# The commands.


@pytest.mark.slow
@pytest.mark.parametrize("which", ["last", "best"])
def test_save_models(which: str, tmp_path: Path) -> None:
    spec, out = tmp_path / "spec.toml", tmp_path / "out"
    spec.write_text(SPEC)
    assert command("run", spec, "--out", out, "--workers", 1).exit_code == 0
    folder = out / "runs" / "fedavg-seed0"
    refused = command("export", folder, "--to", tmp_path / "m.pt")
    assert refused.exit_code == 2
    assert "run it again with --save-models" in refused.stderr
    again = command("run", spec, "--out", out, "--workers", 1, "--resume", "--save-models", which)
    assert again.exit_code == 0, again.output
    state = load_file(folder / "model.safetensors")
    run = fadamgc.load_run(folder)
    if which == "best":
        metrics = [record.test_metric for record in run.history]
        assert (run.best.round, run.best.metric) == (metrics.index(max(metrics)) + 1, max(metrics))
    assert (run.best is None) == (which == "last")
    assert {tuple(t.shape) for t in state.values()} >= {(64, 64), (10, 64)}
    exported = command("export", folder, "--to", tmp_path / "m.pt")
    assert exported.exit_code == 0, exported.output
    read = torch.load(tmp_path / "m.pt", weights_only=True)
    assert all(torch.equal(read[name], state[name]) for name in state)


TASK = """
import torch, fadamgc
def make_task(seed=0):
    model = torch.nn.Sequential(torch.nn.Linear(5, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    data = [(torch.ones(4, 5), torch.zeros(4, dtype=torch.int64))]
    return fadamgc.Task(model, torch.nn.functional.cross_entropy, data)
"""


def test_a_checkpoint_and_a_server_are_exported(tmp_path: Path) -> None:
    name = f"their_task_{abs(hash(str(tmp_path)))}"
    (tmp_path / f"{name}.py").write_text(TASK)
    reference = f"{tmp_path / name}.py:make_task"
    run = fadamgc.simulate(fadamgc.FAdamGC(), class_task(), checkpoint=tmp_path / "c", **RUN)
    refused = command("export", tmp_path / "c", "--to", tmp_path / "m.pt")
    assert "name a function that returns its task" in refused.stderr
    exported = command("export", tmp_path / "c", "--to", tmp_path / "m.safetensors", "--task", reference)
    assert exported.exit_code == 0, exported.output
    assert same(load_file(tmp_path / "m.safetensors"), run.model)
    assert "there is no folder" in command("export", tmp_path / "none", "--to", "m.pt").stderr
    pytest.importorskip("flwr", reason="Flower is not installed")
    from in_process_grid import make

    _, grid, strategy = make(tmp_path, fadamgc.FAdamGC())
    strategy.start(grid)
    exported = command("export", tmp_path / "server", "--to", tmp_path / "s.safetensors", "--task", reference)
    assert exported.exit_code == 0, exported.output
    flat = torch.cat([t.reshape(-1) for t in load_file(tmp_path / "s.safetensors").values()])
    assert torch.equal(flat.sort().values, strategy.coordinator.server.x.sort().values)
