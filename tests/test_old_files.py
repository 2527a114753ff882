"""Runs, checkpoints and federations that version 0.1.0 saved are still read and continued.

``tests/old_files`` was written by ``python tests/test_old_files.py tests/old_files`` in a checkout of 0.1.0.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fadamgc
from places import TESTS
from world import World

OLD = TESTS / "old_files"
COMMON = {"sampled": 3, "tracked": 2, "local_steps": 3, "batch_size": 4, "seed": 5, "progress": False}
ALGORITHM = fadamgc.FAdamGC(eta_l=0.05)


def exact_task() -> fadamgc.Task:
    """A task whose numbers are the same on every machine: nothing is drawn."""

    def numbers(*shape: int, start: int) -> torch.Tensor:
        count = torch.Size(shape).numel()
        return ((torch.arange(start, start + count) * 7919) % 13 - 6).view(shape) / 4

    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
    with torch.no_grad():
        for start, parameter in enumerate(model.parameters()):
            parameter.copy_(numbers(*parameter.shape, start=start))
    clients = [
        (numbers(size, 3, start=17 * i), torch.arange(size) % 2) for i, size in enumerate((6, 20, 11, 8))
    ]
    return fadamgc.Task(model, F.cross_entropy, clients, clients[1])


def simulate(**options):
    return fadamgc.simulate(ALGORITHM, exact_task(), executor="loop", **COMMON | options)


def make(folder: Path) -> None:
    """Write the files; to be called with version 0.1.0."""
    simulate(rounds=4).save(folder / "run")
    for states in ("memory", "files"):
        simulate(rounds=2, states=states, checkpoint=folder / f"checkpoint-{states}")
    world = World(folder / "federation", dtype=torch.float64)
    for _ in range(2):
        world.round()
    for lock in folder.rglob(".lock"):
        lock.unlink()


@pytest.fixture
def old(tmp_path):
    return shutil.copytree(OLD, tmp_path / "old")


def test_a_saved_run_is_read(old):
    run, now = fadamgc.load_run(old / "run", exact_task()), simulate(rounds=4)
    torch.testing.assert_close(run.x, now.x)
    for ours, theirs in zip(now.clients, run.clients, strict=True):
        torch.testing.assert_close(tuple(theirs), tuple(ours))
    assert [record.round for record in run.history] == [1, 2, 3, 4]
    assert [record.bytes_up for record in run.history] == [record.bytes_up for record in now.history]
    assert run.settings["hyperparameters"] == now.settings["hyperparameters"]
    assert not any(p.isnan().any() for p in run.model.parameters())


@pytest.mark.parametrize("states", ["memory", "files"])
def test_a_checkpoint_is_resumed(old, states):
    folder = old / f"checkpoint-{states}"
    assert len(fadamgc.load_run(folder).history) == 2
    resumed = simulate(rounds=4, checkpoint=folder, resume=True, states=states)
    torch.testing.assert_close(resumed.x, simulate(rounds=4).x)
    assert len(resumed.history) == 4


def test_a_federation_is_resumed(old, tmp_path):
    world = World(old / "federation", dtype=torch.float64)
    assert world.server.t == 2
    assert any(state.v.abs().sum() > 0 for state in world.states())
    again = World(tmp_path / "again", dtype=torch.float64)
    for _ in range(2):
        again.round()
    for _ in range(2):
        world.round()
        again.round()
    world.check()
    torch.testing.assert_close(world.server.server.x, again.server.server.x)


if __name__ == "__main__":
    make(Path(sys.argv[1]))
