"""A run that is interrupted, and files that are not what they should be."""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import tracemalloc
import zlib
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

import fadamgc
from fadamgc import bundle, files
from fadamgc.bundle import Journal, write_bundle
from fadamgc.errors import CheckpointError
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.run import described, server_tensors
from killed import ROUNDS, run
from places import TESTS
from problems import class_task, mlp

OPTIONS = {"rounds": 4, "sampled": 3, "tracked": 2, "local_steps": 2, "batch_size": 4, "seed": 0}
OPTIONS |= {
    "executor": "loop"
}  # a checkpoint does not know the executor; tests/methods/test_battery.py has others


def simulate(folder, algo=None, task=None, resume=True, **options):
    return fadamgc.simulate(
        algo or fadamgc.FAdamGC(),
        task or class_task(),
        checkpoint=folder,
        resume=resume,
        **(OPTIONS | options),
    )


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def assert_same_run(a: fadamgc.Run, b: fadamgc.Run) -> None:
    assert a.history == b.history
    for p, q in zip([a.server, *a.clients], [b.server, *b.clients], strict=True):
        assert all(torch.equal(u, v) for u, v in zip(p, q, strict=True))


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A finished run: its checkpoint, and the run saved."""
    folder = tmp_path_factory.mktemp("finished")
    simulate(folder / "c").save(folder / "run")
    return folder


@pytest.fixture
def copy(finished, tmp_path):
    """A copy of the finished run, to be spoilt."""
    return Path(shutil.copytree(finished, tmp_path / "copy"))


@pytest.mark.slow
def test_kill_at_random_moments_and_resume(tmp_path):
    """kill -9, again and again; the run that comes out is the one that was never stopped."""
    whole = run(None)
    folder, out = tmp_path / "checkpoint", tmp_path / "out"
    command = [sys.executable, str(TESTS / "killed.py"), str(folder), str(out)]
    moments = random.Random(int(os.environ.get("FADAMGC_KILL_SEED", "0")))
    kills = 0
    for _ in range(4):
        process = subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True)
        try:
            assert process.stdout is not None
            rounds = moments.randint(1, 8)  # of this life
            last = [process.stdout.readline() for _ in range(rounds)][-1]
            if last and int(last) < ROUNDS:
                time.sleep(moments.uniform(0, 0.01))
                process.send_signal(signal.SIGKILL)
        finally:
            process.wait(timeout=60)
            process.stdout.close()
        if out.exists():  # the run ended before the signal arrived
            break
        kills += 1
    assert kills >= 2
    subprocess.run(command, cwd=TESTS, check=True, timeout=120, stdout=subprocess.DEVNULL)
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
    before = contents(tmp_path / "c")
    two = simulate(tmp_path / "c")
    assert_same_run(one, two)
    assert [r.wall_seconds for r in one.history] == [r.wall_seconds for r in two.history]
    assert contents(tmp_path / "c") == before


def test_buffers_resume(tmp_path):
    task = class_task(model=mlp(0, nn.BatchNorm1d(8)), sizes=(4, 8, 12))
    whole = simulate(None, task=task, resume=False, executor="auto")
    simulate(tmp_path / "c", task=task, rounds=2, executor="auto")
    resumed = simulate(tmp_path / "c", task=task, executor="auto")
    assert_same_run(resumed, whole)
    for name, value in whole.buffers.items():
        assert torch.equal(resumed.buffers[name], value)


@pytest.mark.slow
def test_a_task_is_the_same_in_every_process():
    """Nothing in its fingerprint depends on the order of a set, which differs from process to process."""
    code = (
        "from problems import class_task, mlp; from torch import nn\n"
        "from fadamgc.sim.resources import Resources\n"
        "task = class_task(model=mlp(0, nn.BatchNorm1d(8)), sizes=(4, 8))\n"
        "print(Resources().task_parts(task, None, None).fingerprint)"
    )
    seen = {
        subprocess.run(
            [sys.executable, "-c", code],
            cwd=TESTS,
            env=os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": str(TESTS)},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(seen) == 1


def test_checkpoint_every(tmp_path):
    def rounds_saved(end):
        file = tmp_path / "c" / "checkpoint.jsonl"
        saved.append(file.read_text().count('"record"') if file.exists() else 0)

    saved: list[int] = []
    simulate(tmp_path / "c", rounds=7, checkpoint_every=3, callbacks=[rounds_saved])
    assert saved == [0, 0, 3, 3, 3, 6, 6]
    assert len(fadamgc.load_run(tmp_path / "c").history) == 7


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
    ({"resume": False}, "already has a checkpoint; pass resume=True"),
]


@pytest.mark.parametrize(("other", "message"), OTHERS, ids=[message[:30] for _, message in OTHERS])
def test_a_checkpoint_of_another_run_is_refused(copy, other, message):
    before = contents(copy / "c")
    with pytest.raises(fadamgc.CheckpointError, match=message) as error:
        simulate(copy / "c", **other)
    assert str(copy / "c") in str(error.value)
    assert contents(copy / "c") == before


def test_the_same_function_with_another_setting_is_another_loss(tmp_path):
    simulate(tmp_path / "c", task=other(loss=partial(smoothed, smoothing=0.1)))
    with pytest.raises(fadamgc.CheckpointError, match="loss='partial, "):
        simulate(tmp_path / "c", task=other(loss=partial(smoothed, smoothing=0.9)))


def test_an_extended_run_is_evaluated_like_one_of_that_length(tmp_path):
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


@pytest.mark.slow
def test_a_resumed_run_has_one_cost_model(tmp_path):
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
    with pytest.raises(
        fadamgc.InputError, match="'Unregistered' .* is not known here; call fadamgc.register"
    ):
        fadamgc.load_run(tmp_path / "run")


def test_a_checkpoint_of_an_unregistered_algorithm_is_one_of_another_run(tmp_path):
    simulate(tmp_path / "c", algo=Unregistered())
    with pytest.raises(fadamgc.OtherRunError, match="algorithm='Unregistered' there"):
        simulate(tmp_path / "c", algo=fadamgc.FedAvg())


def test_a_resumed_run_keeps_its_executor(tmp_path):
    simulate(tmp_path / "c", rounds=2, executor="loop")
    assert simulate(tmp_path / "c", executor="auto").settings["executor"] == "loop"


def test_a_folder_that_cannot_be_one(tmp_path):
    (tmp_path / "file").write_text("")
    for folder in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(fadamgc.CheckpointError, match="file.* cannot be written: "):
            simulate(folder, callbacks=[lambda end: pytest.fail("work was done for nothing")])
        with pytest.raises(fadamgc.CheckpointError, match="file.* cannot be written: "):
            simulate(None, resume=False).save(folder)


@pytest.mark.parametrize("states", ["memory", "files"])
def test_a_checkpoint_folder_is_loaded_as_a_run(tmp_path, states):
    task = class_task()
    run = simulate(tmp_path / "c", task=task, states=states)
    loaded = fadamgc.load_run(tmp_path / "c", task=task)
    assert_same_run(loaded, run)
    assert loaded.settings == json.loads(json.dumps(run.settings))
    for name, value in run.model.state_dict().items():
        assert torch.equal(loaded.model.state_dict()[name], value)


def edit_json(path: Path) -> None:
    body = json.loads(path.read_text())
    body["n"] = 4
    path.write_text(json.dumps(body))


DAMAGE = [
    (
        "checkpoint.json",
        lambda p: p.write_bytes(p.read_bytes()[:-100]),
        "cannot be read.*truncated",
    ),
    ("checkpoint.json", lambda p: p.write_text("{}"), "not a file of fadamgc"),
    ("checkpoint.json", lambda p: p.write_text("[1]"), "not a file of fadamgc"),
    ("checkpoint.json", edit_json, "was altered.*sha256"),
    (
        "checkpoint.json",
        lambda p: p.write_text(p.read_text().replace('"format": 3', '"format": 99')),
        "format 99",
    ),
    ("checkpoint.json", lambda p: p.write_text("[" * 100_000), "nested too deeply"),
    ("checkpoint.jsonl", lambda p: p.write_bytes(p.read_bytes()[:-9]), "truncated or altered"),
    ("checkpoint.jsonl", lambda p: p.write_bytes(b" " + p.read_bytes()[1:]), "truncated or altered"),
    ("checkpoint.jsonl", lambda p: p.unlink(), "cannot be read: No such file"),
    ("states/states.bin", lambda p: p.unlink(), "does not exist"),
    ("*.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-1]), "truncated or altered"),
    ("*.safetensors", lambda p: p.write_bytes(p.read_bytes()[:-1] + b"\1"), "truncated or altered"),
    ("*.safetensors", lambda p: p.unlink(), "cannot be read: No such file"),
]


@pytest.mark.parametrize(("file", "damage", "message"), DAMAGE)
def test_damaged_files_are_refused(copy, file, damage, message):
    (path,) = (copy / "c").glob(file)
    damage(path)
    with pytest.raises(fadamgc.CheckpointError, match=message) as error:
        simulate(copy / "c", rounds=6)
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
    with pytest.raises(fadamgc.FadamgcError, match="without its states; pass states=False"):
        back.save(tmp_path / "again")
    back.save(tmp_path / "again", states=False)
    with pytest.raises(fadamgc.FadamgcError, match="without its states"):
        _ = back.model


def test_resume_needs_a_folder():
    with pytest.raises(fadamgc.InputError, match="resume=True without checkpoint"):
        simulate(None)


# One folder, more than one user.


@pytest.mark.slow
def test_a_folder_in_use_is_refused(tmp_path):
    def again(end):
        if end.record.round == 2:
            with pytest.raises(fadamgc.CheckpointInUseError, match="is in use by another run"):
                simulate(tmp_path / "c", states=states)
            with pytest.raises(fadamgc.CheckpointInUseError, match="is in use by another run"):
                fadamgc.load_run(tmp_path / "c")
            refused.append(states)

    refused: list[str] = []
    for states in ("memory", "files"):
        run = simulate(tmp_path / "c", states=states, rounds=4, callbacks=[again])
        assert_same_run(run, simulate(None, resume=False, rounds=4))
        for path in sorted((tmp_path / "c").rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
    assert refused == ["memory", "files"]


@pytest.mark.slow
def test_a_folder_that_another_process_uses_is_refused(tmp_path):
    folder = tmp_path / "checkpoint"
    command = [sys.executable, str(TESTS / "killed.py"), str(folder), str(tmp_path / "out")]
    process = subprocess.Popen(command, cwd=TESTS, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        process.stdout.readline()
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(fadamgc.CheckpointInUseError, match="is in use by another run"):
            run(folder)
    finally:
        process.kill()
        process.wait(timeout=60)
        process.stdout.close()
    assert_same_run(run(folder), run(None))  # what was killed holds nothing


def test_an_error_unlocks_the_folder(tmp_path):
    simulate(tmp_path / "c", rounds=2)
    with pytest.raises(fadamgc.OtherRunError, match="seed=0 there"):
        simulate(tmp_path / "c", seed=5)
    with pytest.raises(ZeroDivisionError):
        simulate(tmp_path / "c", rounds=4, callbacks=[lambda end: 1 / 0])
    assert len(simulate(tmp_path / "c", rounds=4).history) == 4


@pytest.mark.slow
@pytest.mark.parametrize(("states", "workers"), [("memory", 1), ("files", 2)])
def test_many_runs_have_a_folder_each(tmp_path, states, workers):
    task = class_task()
    grid = [{"algorithm": fadamgc.FAdamGC(eta_l=e), "seed": s} for e in (0.1, 0.01) for s in (0, 1)]
    options = OPTIONS | {"task": task, "states": states}
    del options["seed"]
    many = fadamgc.simulate_many(grid, checkpoint=tmp_path / "c", workers=workers, **options)
    for i, (own, made) in enumerate(zip(grid, many, strict=True)):
        assert_same_run(made, fadamgc.simulate(**own, **options))
        assert_same_run(fadamgc.load_run(tmp_path / "c" / f"run-{i}"), made)
    again = fadamgc.simulate_many(grid, checkpoint=tmp_path / "c", resume=True, **options | {"rounds": 6})
    assert_same_run(again[3], fadamgc.simulate(**grid[3], **options | {"rounds": 6}))


def test_many_runs_may_not_share_a_folder(tmp_path):
    grid = [{"seed": 0, "checkpoint": tmp_path / "c"}, {"seed": 1, "checkpoint": tmp_path / "x" / ".." / "c"}]
    with pytest.raises(fadamgc.InputError, match=r"runs\[0\] and runs\[1\] have the same checkpoint="):
        fadamgc.simulate_many(grid, algorithm=fadamgc.FAdamGC(), task=class_task(), rounds=1)
    assert not (tmp_path / "c").exists()


def test_temporary_files_of_a_living_process_stay(tmp_path):
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        (tmp_path / "c").mkdir()
        here = files.this_machine()
        living = tmp_path / "c" / f".checkpoint.json.{sleeper.pid}-{here}-0123abcd.tmp"
        gone = tmp_path / "c" / f".checkpoint.json.999999999-{here}-0123abcd.tmp"
        mine = tmp_path / "c" / f".checkpoint.{os.getpid()}-{here}-0123abcd.tmp"  # of one with this number
        elsewhere = tmp_path / "c" / ".checkpoint.json.999999999-00000000-0123abcd.tmp"  # a shared disk
        old = tmp_path / "c" / ".checkpoint.json.999999999-0123abcd.tmp"  # as the first version named it
        for path in (living, gone, mine, elsewhere, old):
            path.touch()
        os.utime(old, (1e9, 1e9))
        simulate(tmp_path / "c")
        assert living.exists()
        assert elsewhere.exists()
        assert not gone.exists()
        assert not mine.exists()
        assert not old.exists()
    finally:
        sleeper.communicate(b"\n", timeout=60)


def test_the_states_of_a_run_that_was_extended_are_not_given(tmp_path):
    first = simulate(tmp_path / "c", rounds=3, states="files")
    expected = [client.y.clone() for client in first.clients]
    as_it_is = simulate(tmp_path / "c", rounds=3, states="files")  # nothing is written
    assert all(torch.equal(a, client.y) for a, client in zip(expected, first.clients, strict=True))
    first.save(tmp_path / "saved")
    simulate(tmp_path / "c", rounds=6, states="files")
    for early in (first, as_it_is):
        with pytest.raises(fadamgc.CheckpointError, match="no longer has the states of this run"):
            list(early.clients)
        with pytest.raises(fadamgc.CheckpointError, match="no longer has the states of this run"):
            early.save(tmp_path / "saved")
    saved = fadamgc.load_run(tmp_path / "saved")  # what was there before the attempt
    assert all(torch.equal(a, client.y) for a, client in zip(expected, saved.clients, strict=True))


@pytest.mark.parametrize("way", ["renamed", "linked", "damaged", "cut"])
def test_states_that_another_process_changed_are_not_returned(tmp_path, way):
    """However the file of the states was reached: by another name of the folder, or of the file."""
    first = simulate(tmp_path / "c", rounds=3, states="files")
    file = tmp_path / "c" / "states" / "states.bin"
    if way == "renamed":
        (tmp_path / "c").rename(tmp_path / "d")
        simulate(tmp_path / "d", rounds=8, states="files")
    elif way == "linked":
        shutil.copytree(tmp_path / "c", tmp_path / "d", copy_function=os.link)
        simulate(tmp_path / "d", rounds=8, states="files")
    else:
        data = bytearray(file.read_bytes())
        with open(file, "r+b") as opened:
            opened.truncate(10) if way == "cut" else opened.write(bytes(b ^ 1 for b in data))
    with pytest.raises(fadamgc.CheckpointError, match="no longer has the states|has been cut"):
        list(first.clients)
    with pytest.raises(fadamgc.CheckpointError, match="no longer has the states|has been cut"):
        first.save(tmp_path / "saved")


def test_a_lock_that_was_removed_stops_the_run(tmp_path):
    """Or two runs would write to one file of states."""

    def remove(end):
        if end.record.round == 2:
            (tmp_path / "c" / ".lock").unlink()
            second.append(simulate(tmp_path / "c", rounds=6, states="files"))

    second: list[fadamgc.Run] = []
    with pytest.raises(fadamgc.CheckpointInUseError, match="was removed while a run was writing"):
        simulate(tmp_path / "c", rounds=6, states="files", callbacks=[remove])
    whole = simulate(None, resume=False, rounds=6)
    assert_same_run(second[0], whole)
    assert_same_run(simulate(tmp_path / "c", rounds=6, states="files"), whole)


def test_the_working_directory_may_change(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = simulate(Path("c"), rounds=4, states="files", callbacks=[lambda end: os.chdir(TESTS)])
    assert_same_run(fadamgc.load_run(tmp_path / "c"), run)


def test_a_journal_is_not_written_through_a_link(tmp_path):
    (tmp_path / "c").mkdir()
    (tmp_path / "mine.txt").write_text("mine")
    (tmp_path / "c" / "checkpoint.jsonl").symlink_to(tmp_path / "mine.txt")
    with pytest.raises(fadamgc.CheckpointError, match="cannot be written"):
        simulate(tmp_path / "c")
    assert (tmp_path / "mine.txt").read_text() == "mine"


def test_a_finished_run_is_cleaned_up_when_it_is_opened(tmp_path):
    """Killed between replacing the last checkpoint and removing the one before."""
    simulate(tmp_path / "c")
    before = contents(tmp_path / "c")
    (tmp_path / "c" / "checkpoint-0123.safetensors").touch()
    (tmp_path / "c" / f".checkpoint.json.999999999-{files.this_machine()}-0123abcd.tmp").touch()
    simulate(tmp_path / "c")
    assert contents(tmp_path / "c") == before


def test_names_that_no_file_can_have(tmp_path):
    for name in ("a\0b", "\ud800"):
        with pytest.raises(fadamgc.CheckpointError, match="cannot be written"):
            simulate(tmp_path / name)
    with pytest.raises(fadamgc.CheckpointError, match="cannot be read|does not exist"):
        fadamgc.load_run(tmp_path / ("x" * 300))
    with pytest.raises(fadamgc.CheckpointError, match="cannot be written: File name too long") as error:
        simulate(tmp_path / ("x" * 5_000))
    assert len(str(error.value)) < 400


def test_a_hyperparameter_without_a_value_may_be_absent(tmp_path):
    algo = fadamgc.FedAdam(eta_l=0.01)
    simulate(tmp_path / "c", algo=algo, rounds=2)
    path = tmp_path / "c" / "checkpoint.json"
    body = json.loads(path.read_text())
    assert body["settings"]["hyperparameters"].pop("v0") is None
    del body["sha256"]
    path.write_text(json.dumps({"sha256": bundle._digest(body), **body}))
    assert_same_run(simulate(tmp_path / "c", algo=algo), simulate(None, resume=False, algo=algo))


def test_a_checkpoint_of_other_shapes_is_refused(tmp_path):
    simulate(tmp_path / "c")
    path = tmp_path / "c" / "checkpoint.json"
    body = json.loads(path.read_text())
    tensors = load_file(tmp_path / "c" / body["tensors"])
    tensors["server.y"] = torch.zeros(3)
    content = {k: v for k, v in body.items() if k not in ("sha256", "format", "tensors", "tensors_sha256")}
    write_bundle(tmp_path / "c", "checkpoint", content, tensors, format=2)
    with pytest.raises(fadamgc.CheckpointError, match="a server's y of torch.float32"):
        simulate(tmp_path / "c", rounds=6)


def test_a_new_run_in_the_same_place_leaves_an_old_one_its_states(tmp_path):
    first = simulate(tmp_path / "c", rounds=3, states="files")
    expected = [client.y.clone() for client in first.clients]
    for path in (tmp_path / "c").glob("checkpoint*"):
        path.unlink()
    simulate(tmp_path / "c", rounds=3, states="files", seed=1)
    assert all(torch.equal(a, client.y) for a, client in zip(expected, first.clients, strict=True))


# What a checkpoint costs, and what it leaves behind.


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/io").exists(), reason="needs Linux to count written bytes")
@pytest.mark.parametrize("states", ["memory", "files"])
def test_a_checkpoint_costs_what_has_changed(tmp_path, states):
    """Late rounds write no more than early ones, though the history is long and all clients have a state."""

    def count(end):
        counters = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
        written.append(int(counters["wchar"]))

    written: list[int] = []
    task = class_task(sizes=(4,) * 40)
    simulate(tmp_path / "c", task=task, rounds=150, sampled=2, tracked=1, states=states, callbacks=[count])
    each = [b - a for a, b in pairwise(written)]
    assert sum(each[-10:]) < 1.2 * sum(each[:10])


@pytest.mark.slow
def test_a_checkpoint_needs_no_copy_of_the_states():
    """Writing 240 MB of states takes far less memory than that."""
    code = """
import resource, tempfile
import fadamgc, torch
data = [(torch.zeros(1, 500), torch.zeros(1, dtype=torch.long))] * 20
task = fadamgc.Task(torch.nn.Linear(500, 2000), torch.nn.functional.cross_entropy, data)
options = dict(rounds=1, local_steps=1, batch_size=1, executor="loop", states="memory")
peaks = []
with tempfile.TemporaryDirectory() as folder:
    for checkpoint in (None, folder + "/c"):
        run = fadamgc.simulate(fadamgc.FAdamGC(), task, checkpoint=checkpoint, **options)
        if checkpoint:
            run.save(folder + "/run")
        del run
        peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)
print(peaks[1] - peaks[0])
"""
    command = [sys.executable, "-c", code]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300).stdout
    assert int(out) < 100e6


def test_states_and_checkpoints_are_the_users_alone(tmp_path):
    umask = os.umask(0)
    try:
        run = simulate(tmp_path / "c")
        run.save(tmp_path / "run")
    finally:
        os.umask(umask)
    assert (tmp_path / "c").stat().st_mode & 0o777 == 0o700
    for path in (tmp_path / "c").rglob("checkpoint*"):
        assert path.stat().st_mode & 0o777 == 0o600, path
    assert (tmp_path / "c" / "states").stat().st_mode & 0o777 == 0o700
    assert (tmp_path / "c" / "states" / "states.bin").stat().st_mode & 0o777 == 0o600
    (tensors,) = (tmp_path / "run").glob("*.safetensors")
    assert tensors.stat().st_mode & 0o777 == 0o600


OPERATIONS = ("fsync", "replace", "pwrite", "open")


@pytest.mark.slow
@pytest.mark.parametrize("states", ["memory", "files"])
def test_a_failure_at_every_file_operation_loses_nothing(tmp_path, monkeypatch, states):
    """Whatever operation fails, the folder resumes to the same bits, and the error is one of ours."""
    whole = simulate(None, resume=False, rounds=3, executor="loop")
    real = {name: getattr(os, name) for name in OPERATIONS}

    def failing(name):
        def operation(*arguments, **named):
            nonlocal left
            if armed and str(arguments[0]).startswith(("/proc", "/sys", "/dev")) is False:
                left -= 1
                if left == 0:
                    raise OSError(28, "No space left on device")
            return real[name](*arguments, **named)

        return operation

    armed, left = False, 0
    messages: list[str] = []
    for name in real:
        monkeypatch.setattr(os, name, failing(name))
    for at in range(1, 200):
        folder = tmp_path / str(at)
        armed, left = True, at
        try:
            simulate(folder, rounds=3, states=states, executor="loop")
            done = True
        except fadamgc.CheckpointError as error:
            messages.append(str(error))
            done = False
        finally:
            armed = False
        assert_same_run(simulate(folder, rounds=3, states=states, executor="loop"), whole)
        if done and left > 0:
            break
    assert len(messages) > 20
    assert all("No space left" in message for message in messages)
    assert not list(tmp_path.rglob("*.tmp"))


# Files of the version before, and forged ones.


def as_format_1(folder: Path, in_files: bool) -> None:
    """Rewrite a checkpoint as the first version wrote it."""
    run = fadamgc.load_run(folder)
    slots = None
    tensors = server_tensors(run)
    if in_files:
        slots = {
            str(i): [s, run.clients.slots.crc[s]]
            for i in run.clients.participants
            for s in [run.clients.slot(i)]
        }
    else:
        for i in run.clients.participants:
            tensors |= {f"client.{i}.{key}": value for key, value in run.clients[i]._asdict().items()}
    content = described(run) | {
        "participants": run.clients.participants,
        "has_states": True,
        "slots": slots,
        "history": [record.to_json() for record in run.history],
    }
    write_bundle(folder, "checkpoint", content, tensors)
    (folder / "checkpoint.jsonl").unlink()
    if not in_files:
        (folder / "states" / "states.bin").unlink()


@pytest.mark.slow
@pytest.mark.parametrize("before", ["memory", "files"])
@pytest.mark.parametrize("after", ["memory", "files"])
def test_a_checkpoint_of_the_first_format_resumes(tmp_path, before, after):
    whole = simulate(None, resume=False, rounds=6)
    simulate(tmp_path / "c", rounds=3)
    as_format_1(tmp_path / "c", in_files=before == "files")
    assert_same_run(fadamgc.load_run(tmp_path / "c"), simulate(None, resume=False, rounds=3))
    simulate(tmp_path / "c", rounds=4, states=after)
    assert_same_run(simulate(tmp_path / "c", rounds=6, states=after), whole)


FORGED = [
    {"n": "many"},
    {"n": 3},
    {"n": 10**400},
    {"settings": []},
    {"settings": {"algorithm": "fadamgc", "hyperparameters": None}},
    {"settings": {"algorithm": "fadamgc", "hyperparameters": {"eta_l": "big"}}},
    {"settings": {"algorithm": "fadamgc", "hyperparameters": {"eta_x": 1.0}}},
    {"cost": {"up_mbps": [1, 2]}},
    {"cost": None},
    {"goal": "up"},
    {"environment": None},
    {"environment": {"torch": {}}},
    {"settings": {"algorithm": "fadamgc", "hyperparameters": {}, "task": "t", "executor": {}, "seed": 0}},
    {"settings": {"algorithm": "fadamgc", "hyperparameters": {}, "task": "t", "executor": "x", "seed": "0"}},
    {"participants": [99]},
    {"participants": ["0"]},
    {"participants": None},
    {"history": [{"round": 1}]},
    {"history": "none"},
    {"tensors": "../evil.safetensors"},
    {"tensors": 5},
]


@pytest.mark.parametrize("forged", FORGED, ids=str)
def test_forged_runs_are_refused(copy, forged):
    path = copy / "run" / "run.json"
    body = json.loads(path.read_text()) | forged
    del body["sha256"]
    path.write_text(json.dumps({"sha256": bundle._digest(body), **body}))
    with pytest.raises(
        fadamgc.CheckpointError, match="run.* (is not a run of this version|names no tensor file)"
    ):
        fadamgc.load_run(copy / "run")


@pytest.mark.parametrize(
    "line",
    [
        {},
        [],
        {"record": {}},
        {"record": None},
        {"slots": {"99": [0, 0]}},
        {"slots": {"x": [0, 0]}},
        {"slots": {"0": [10**9, 0]}},
        {"slots": {"0": [1, 0], "1": [1, 0]}},
        {"slots": {"0": "ab"}},
    ],
    ids=str,
)
def test_forged_journals_are_refused(copy, line):
    path = copy / "c" / "checkpoint.json"
    body = json.loads(path.read_text())
    journal = Journal(copy / "c" / "checkpoint.jsonl")
    list(journal.read(body["journal"], path))
    journal.append([line])
    body["journal"] = journal.mark()
    del body["sha256"]
    path.write_text(json.dumps({"sha256": bundle._digest(body), **body}))
    with pytest.raises(fadamgc.CheckpointError, match="not a run of this version|is damaged"):
        simulate(copy / "c", rounds=6)


@pytest.mark.slow
def test_a_packed_record_is_not_unpacked_without_a_limit(tmp_path):
    (tmp_path / "run.json.gz").write_bytes(gzip.compress(b" " * 300_000_000, compresslevel=9))
    with pytest.raises(fadamgc.CheckpointError, match="not a record"):
        fadamgc.load_run(tmp_path)


def test_states_in_files_travel_to_another_process():
    run = simulate(None, resume=False, states="files")
    there = pickle.loads(pickle.dumps(run.clients))
    assert type(there) is ClientStates
    assert [c.y.tolist() for c in there] == [c.y.tolist() for c in run.clients]


def test_long_lines_of_a_journal_are_compressed(tmp_path):
    short, long = {"record": 1}, {"slots": {str(i): [i, 0] for i in range(1000)}}
    journal = Journal(tmp_path / "j.jsonl")
    journal.append([short, long])
    journal.append([long])
    assert journal.size < len(json.dumps(long))
    assert list(Journal(journal.path).read(journal.mark(), tmp_path)) == [short, long, long]


@pytest.mark.parametrize("line", [b"zlib ", b"zlib {}", b"zlib " + base64.b64encode(b"{}")])
def test_lines_that_are_said_to_be_compressed_are_refused(line, tmp_path):
    path = tmp_path / "j.jsonl"
    path.write_bytes(line + b"\n")
    mark = {"bytes": len(line) + 1, "sha256": hashlib.sha256(line + b"\n").hexdigest()}
    with pytest.raises(CheckpointError, match="a line that is not JSON"):
        list(Journal(path).read(mark, tmp_path))


def test_a_compressed_line_cannot_fill_the_memory(tmp_path):
    path, bomb = tmp_path / "j.jsonl", base64.b64encode(zlib.compress(b" " * (1 << 26)))
    path.write_bytes(b"zlib " + bomb + b"\n")
    mark = {"bytes": len(bomb) + 6, "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
    tracemalloc.start()
    with pytest.raises(CheckpointError, match="a line that is not JSON"):
        list(Journal(path).read(mark, tmp_path))
    assert tracemalloc.get_traced_memory()[1] < 1 << 26
    tracemalloc.stop()
