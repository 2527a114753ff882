"""A run that is interrupted, and files that are not what they should be."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import fadamgc
from killed import ROUNDS, run
from problems import class_task, mlp

HERE = Path(__file__).parent
OPTIONS = {"rounds": 4, "sampled": 3, "tracked": 2, "local_steps": 2, "batch_size": 4, "seed": 0}


def simulate(folder, algo=None, task=None, resume=True, **options):
    return fadamgc.simulate(
        algo or fadamgc.FAdamGC(),
        task or class_task(),
        checkpoint=folder,
        resume=resume,
        **(OPTIONS | options),
    )


def assert_same_run(a: fadamgc.Run, b: fadamgc.Run) -> None:
    assert a.history == b.history
    for p, q in zip([a.server, *a.clients], [b.server, *b.clients], strict=True):
        assert all(torch.equal(u, v) for u, v in zip(p, q, strict=True))


def test_kill_at_random_moments_and_resume(tmp_path):
    """kill -9, again and again; the run that comes out is the one that was never stopped."""
    whole = run(None)
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    command = [sys.executable, str(HERE / "killed.py"), str(folder), str(out)]
    moments = random.Random(int(os.environ.get("FADAMGC_KILL_SEED", "0")))
    kills = 0
    for _ in range(4):
        process = subprocess.Popen(command, cwd=HERE, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            first = process.stdout.readline()  # the first round of this life is done
            if first and int(first) < ROUNDS:
                time.sleep(moments.uniform(0, 0.15))
                process.send_signal(signal.SIGKILL)
                kills += 1
        finally:
            process.wait(timeout=60)
            process.stdout.close()
        if out.exists():
            break
    assert kills >= 2
    assert not out.exists() or kills < 4
    subprocess.run(command, cwd=HERE, check=True, timeout=120, stdout=subprocess.DEVNULL)
    assert_same_run(fadamgc.load_run(out), whole)


def test_an_exception_in_the_middle_loses_nothing(tmp_path):
    class StopError(Exception):
        pass

    def stop(end):
        if end.record.round == 3:
            raise StopError

    whole = simulate(tmp_path / "whole", rounds=6)
    with pytest.raises(StopError):
        simulate(tmp_path / "c", rounds=6, callbacks=[stop])
    resumed = simulate(tmp_path / "c", rounds=6)
    assert_same_run(resumed, whole)


def test_a_finished_run_is_returned_as_it_is(tmp_path):
    one = simulate(tmp_path / "c")
    before = sorted(p.name for p in (tmp_path / "c").iterdir())
    two = simulate(tmp_path / "c")
    assert_same_run(one, two)
    assert [r.wall_seconds for r in one.history] == [r.wall_seconds for r in two.history]
    assert sorted(p.name for p in (tmp_path / "c").iterdir()) == before
    assert len(before) == 2


def test_buffers_resume(tmp_path):
    task = class_task(model=mlp(0, nn.BatchNorm1d(8)), sizes=(4, 8, 12))
    whole = simulate(None, task=task, resume=False)
    simulate(tmp_path / "c", task=task, rounds=2)
    resumed = simulate(tmp_path / "c", task=task)
    assert_same_run(resumed, whole)
    for name, value in whole.buffers.items():
        assert torch.equal(resumed.buffers[name], value)


def test_a_task_is_the_same_in_every_process():
    """Nothing in its fingerprint depends on the order of a set, which differs from process to process."""
    code = (
        "from problems import class_task, mlp; from torch import nn\n"
        "from fadamgc.sim.problem import Problem\n"
        "print(Problem(class_task(model=mlp(0, nn.BatchNorm1d(8)), sizes=(4, 8))).fingerprint)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=HERE,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(HERE)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2", "3")
    }
    assert len(seen) == 1


def test_checkpoint_every(tmp_path):
    def rounds_saved(end):
        file = tmp_path / "c" / "checkpoint.json"
        saved.append(len(json.loads(file.read_text())["history"]) if file.exists() else 0)

    saved: list[int] = []
    simulate(tmp_path / "c", rounds=7, checkpoint_every=3, callbacks=[rounds_saved])
    assert saved == [0, 0, 3, 3, 3, 6, 6]
    assert len(json.loads((tmp_path / "c" / "checkpoint.json").read_text())["history"]) == 7


def smoothed(output, target, smoothing=0.5):
    return nn.functional.cross_entropy(output, target, label_smoothing=smoothing)


def other(**changes):
    task = class_task()
    fields = {"model": task.model, "loss": task.loss, "clients": task.pairs, "test": task.test_pair}
    return fadamgc.Task(**(fields | changes))


OTHERS = [
    ({"task": other(metric="loss")}, "metric='accuracy, max' there, metric='loss, min' here"),
    ({"task": other(loss=smoothed)}, "loss='cross_entropy, .*' there, loss='smoothed, .*' here"),
    ({"seed": 1}, "seed=0 there, seed=1 here"),
    ({"sampled": 4}, "sampled=3 there, sampled=4 here"),
    ({"tracked": 1}, "tracked=2 there, tracked=1 here"),
    ({"local_steps": 3}, "local_steps=2 there, local_steps=3 here"),
    ({"batch_size": None}, "batch_size=4 there, batch_size=None here"),
    (
        {"algo": fadamgc.FAdamGC(eta_l=0.5)},
        "hyperparameters.eta_l=0.001 there, .*=0.5 here",
    ),
    ({"algo": fadamgc.LocalAdam()}, "algorithm='fadamgc' there, algorithm='local_adam' here"),
    ({"dtype": torch.float64}, "dtype='float32' there, dtype='float64' here"),
    ({"weights": "size"}, "weights='uniform' there, weights='size' here"),
    ({"task": class_task(seed=7)}, "another task: its data differs"),
    ({"task": class_task(model=mlp(7))}, "another task: its model differs"),
    ({"rounds": 2}, "is at round 4, beyond rounds=2"),
    ({"resume": False}, "already holds a checkpoint; pass resume=True"),
]


@pytest.mark.parametrize(("other", "message"), OTHERS, ids=[message[:30] for _, message in OTHERS])
def test_a_checkpoint_of_another_run_is_refused(tmp_path, other, message):
    simulate(tmp_path / "c")
    before = {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()}
    with pytest.raises(fadamgc.CheckpointError, match=message) as error:
        simulate(tmp_path / "c", **other)
    assert str(tmp_path / "c") in str(error.value)
    assert {p.name: p.read_bytes() for p in (tmp_path / "c").iterdir()} == before


def test_the_same_function_with_another_setting_is_another_loss(tmp_path):
    simulate(tmp_path / "c", task=other(loss=partial(smoothed, smoothing=0.1)))
    with pytest.raises(fadamgc.CheckpointError, match="loss='partial, "):
        simulate(tmp_path / "c", task=other(loss=partial(smoothed, smoothing=0.9)))


def test_a_run_that_goes_on_longer_is_evaluated_as_if_it_had_always_been_so_long(tmp_path):
    whole = simulate(None, resume=False, rounds=6, eval_every=4)
    simulate(tmp_path / "c", rounds=3, eval_every=4)
    longer = simulate(tmp_path / "c", rounds=6, eval_every=4)
    assert_same_run(longer, whole)
    assert [r.round for r in longer.history if r.test_loss is not None] == [4, 6]


def test_a_schedule_may_grow(tmp_path):
    schedule = [([0, 1], [0]), ([2], []), ([3, 4], [4])]
    free = {"sampled": None, "tracked": None, "rounds": None}
    simulate(tmp_path / "c", schedule=schedule[:2], **free)
    with pytest.raises(fadamgc.CheckpointError, match="schedule differs in a round that is done"):
        simulate(tmp_path / "c", schedule=[schedule[2], *schedule[1:]], **free)
    grown = simulate(tmp_path / "c", schedule=schedule, **free)
    assert_same_run(grown, simulate(None, resume=False, schedule=schedule, **free))


def test_what_is_resumed_has_one_price(tmp_path):
    dear = fadamgc.CostModel(0.001, 0.001)
    simulate(tmp_path / "c", rounds=2)
    resumed = simulate(tmp_path / "c", cost=dear)
    assert_same_run(resumed, simulate(None, resume=False, cost=dear))


@dataclass(frozen=True)
class Unregistered(fadamgc.FedAvg):
    """An algorithm that only its author knows."""


def test_an_unregistered_algorithm_resumes(tmp_path):
    simulate(tmp_path / "c", algo=Unregistered(), rounds=2)
    resumed = simulate(tmp_path / "c", algo=Unregistered())
    assert_same_run(resumed, simulate(None, resume=False, algo=Unregistered()))
    resumed.save(tmp_path / "run")
    with pytest.raises(fadamgc.InputError, match="'Unregistered' .* is not registered"):
        fadamgc.load_run(tmp_path / "run")


def test_a_resumed_run_keeps_its_executor(tmp_path):
    simulate(tmp_path / "c", rounds=2, executor="loop")
    assert simulate(tmp_path / "c").settings["executor"] == "loop"


def test_a_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(fadamgc.CheckpointError, match="file.* cannot be written: "):
            simulate(folder, callbacks=[lambda end: pytest.fail("work was done for nothing")])
        with pytest.raises(fadamgc.CheckpointError, match="file.* cannot be written: "):
            simulate(None, resume=False).save(folder)


def test_a_checkpoint_is_no_saved_run(tmp_path):
    simulate(tmp_path / "c")
    with pytest.raises(fadamgc.CheckpointError, match="run.json does not exist; .* holds checkpoint.json"):
        fadamgc.load_run(tmp_path / "c")


def edit_json(path: Path) -> None:
    body = json.loads(path.read_text())
    body["history"][1]["train_loss"] = 0.0
    path.write_text(json.dumps(body))


def other_format(path: Path) -> None:
    path.write_text(path.read_text().replace('"format": 1', '"format": 99'))


DAMAGE = [
    ("checkpoint.json", lambda p: p.write_bytes(p.read_bytes()[:-100]), "cannot be read.*truncated"),
    ("checkpoint.json", lambda p: p.write_text("{}"), "not a file of fadamgc"),
    ("checkpoint.json", lambda p: p.write_text("[1]"), "not a file of fadamgc"),
    ("checkpoint.json", edit_json, "was altered.*sha256"),
    (
        "checkpoint.json",
        lambda p: p.write_text(p.read_text().replace('"format": 1', '"format": 99')),
        "format 99",
    ),
    ("*.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-1]), "truncated or altered"),
    ("*.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\1"), "truncated or altered"),
    ("*.safetensors", lambda p: p.unlink(), "cannot be read: No such file"),
]


@pytest.mark.parametrize(("file", "damage", "message"), DAMAGE)
def test_damaged_files_are_refused(tmp_path, file, damage, message):
    simulate(tmp_path / "c")
    (path,) = (tmp_path / "c").glob(file)
    damage(path)
    with pytest.raises(fadamgc.CheckpointError, match=message) as error:
        simulate(tmp_path / "c", rounds=6)
    assert path.name in str(error.value)


def test_a_saved_run_that_is_not_there(tmp_path):
    with pytest.raises(fadamgc.CheckpointError, match="run.json does not exist"):
        fadamgc.load_run(tmp_path / "nothing")


def test_records_without_states(tmp_path):
    run = simulate(None, resume=False)
    run.save(tmp_path / "run", states=False)
    back = fadamgc.load_run(tmp_path / "run")
    assert back.history == run.history
    assert back.rounds_to(0.0) == 1
    with pytest.raises(fadamgc.FadamgcError, match="without its states"):
        _ = back.x
    with pytest.raises(fadamgc.FadamgcError, match="without its task"):
        _ = back.model


def test_resume_needs_a_folder():
    with pytest.raises(fadamgc.InputError, match="resume=True without checkpoint"):
        simulate(None)
