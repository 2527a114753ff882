"""Checkpoints and records that cannot be read."""

from __future__ import annotations

import errno
import json
import threading
from multiprocessing import Pipe

import pytest

from command import fadamgc
from fadamgc import errors
from fadamgc.errors import CheckpointError, InputError
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.report.numbers import (
    read_results,
)
from fadamgc.experiments.run import execution, workers
from reported import contents, spec_of

pytestmark = pytest.mark.usefixtures("quick")


def stopped(tmp_path, rounds=30):
    """A job that was stopped after its first checkpoint."""
    job = ExperimentFolder(tmp_path).plan(spec_of(rounds=rounds))[0]
    answers = iter([False] * 26 + [True])
    with pytest.raises(execution.Stopped):
        execution.execute([job], lambda i: next(answers))
    return job


def newer_format(job):
    path = job.folder / "checkpoint" / "checkpoint.json"
    path.write_text(path.read_text().replace('"format": 3', '"format": 99', 1))
    return path.read_bytes()


def test_a_checkpoint_that_cannot_be_read_is_moved_aside_and_named(tmp_path):
    warnings = []
    for number in (1, 2):
        job = stopped(tmp_path)
        data = newer_format(job)
        execution.execute([job], lambda i: False, warnings.append)
        aside = job.folder / f"checkpoint.unreadable-{number}"
        assert (aside / "checkpoint.json").read_bytes() == data
        assert len(warnings) == number
        assert "has format 99" in warnings[-1]
        assert f"moved to {aside}, and FedAvg, seed 0 starts from round 1" in warnings[-1]
        assert len(job.saved().history) == 30
        (job.folder / "run.json").unlink()
    assert (job.folder / "checkpoint.unreadable-1" / "checkpoint.json").exists()


def test_a_warning_of_a_worker_reaches_the_user(tmp_path, monkeypatch):
    job = stopped(tmp_path)
    newer_format(job)
    messages, sender = Pipe(duplex=False)
    stop, stopper = Pipe(duplex=False)
    rounds, said, stages = [], [], []
    monkeypatch.setattr(workers, "_sender", sender)
    monkeypatch.setattr(workers, "_stop", stop)
    hears = workers.Listener(rounds.append, lambda i, end: None, said.append, stages.append)
    listener = threading.Thread(target=workers._listen, args=(messages, hears))
    listener.start()
    workers._work([7], [job])
    sender.send_bytes(workers.END)
    listener.join(timeout=60)
    assert len(said) == 1
    assert "moved to" in said[0]
    assert rounds == [7] * job.run.rounds
    assert stages == ["loading quadratics, seed 0", None]
    stopper.send_bytes(b"stop")
    (job.folder / "run.json").unlink()
    for _ in range(2):  # what says stop stays there for every worker
        with pytest.raises(execution.Stopped):
            workers._work([7], [job])
    for end in (messages, sender, stop, stopper):
        end.close()


@pytest.mark.parametrize("number", [errno.EACCES, errno.EIO, errno.ENOSPC])
def test_an_error_of_the_system_removes_no_checkpoint(tmp_path, monkeypatch, number):
    job = stopped(tmp_path)
    before = contents(job.folder)

    def fails(*_, **__):
        error = OSError(number, "the system says no")
        raise CheckpointError("checkpoint.json cannot be read") from error

    monkeypatch.setattr(execution, "start_from", fails)
    with pytest.raises(CheckpointError, match="cannot be read"):
        execution.execute([job], lambda i: False)
    assert contents(job.folder) == before


def test_a_checkpoint_in_use_is_left_alone(tmp_path, monkeypatch):
    job = stopped(tmp_path)
    before = contents(job.folder)

    def fails(*_, **__):
        raise errors.CheckpointInUseError("used by another process")

    monkeypatch.setattr(execution, "start_from", fails)
    with pytest.raises(errors.CheckpointInUseError):
        execution.execute([job], lambda i: False)
    assert contents(job.folder) == before


def test_a_damaged_record_is_named_by_the_report_and_made_again(copy):
    path = copy / "runs" / "fedavg-seed0" / "run.json"
    whole = path.read_text()
    path.write_text(whole[: len(whole) // 2])
    shown = fadamgc("report", copy)
    assert shown.exit_code == 0
    assert f"warning: FedAvg, seed 0: {path} cannot be read" in shown.stderr
    assert "(1 of 2 runs, 1 damaged)" in shown.stdout
    assert "(1 of 2 runs, 1 damaged)" in (copy / "results.md").read_text()
    again = fadamgc("run", copy / "spec.toml", "--out", copy, "--resume", "--workers", 1, "--quiet")
    assert again.exit_code == 0
    assert f"warning: {path} cannot be read" in again.stderr
    assert "run.json.unreadable-1, and FedAvg, seed 0 is run again" in again.stderr
    assert "1 damaged" not in again.stdout
    histories = [json.loads(text)["history"] for text in (whole, path.read_text())]
    before, after = [[record["test_metric"] for record in history] for history in histories]
    assert before == after


def test_records_that_are_all_damaged_are_named(copy):
    for path in (copy / "runs").glob("*/run.json"):
        path.write_text("{")
    with pytest.raises(InputError, match=r"no finished run of its spec\nFedAvg, seed 0: .*run\.json"):
        read_results(copy)
