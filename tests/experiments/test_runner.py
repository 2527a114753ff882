"""The runner: what is saved, resumed, refused and removed."""

from __future__ import annotations

import dataclasses
import errno
import re
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from fadamgc import FedAvg, InputError, bundle, files, simulate
from fadamgc.errors import FadamgcError
from fadamgc.experiments.folder import FILES, ExperimentFolder
from fadamgc.experiments.report.tables import DASH, results_table
from fadamgc.experiments.report.write import write_report
from fadamgc.experiments.run import execution, runner, workers
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import load_spec, parse_spec
from fadamgc.tasks.build import build_task
from tiny_experiments import QUADRATICS, TINY, records, spec_of


def test_every_run_is_saved_with_the_spec_and_the_figure(done):
    spec = spec_of(TINY)
    assert load_spec(done / "spec.toml") == spec
    names = ["localadam-seed0", "localadam-seed1", "fadamgc-all-tracked-seed0", "fadamgc-all-tracked-seed1"]
    assert sorted(p.name for p in (done / "runs").iterdir()) == sorted(names)
    assert {p.name for p in done.iterdir()} == {*FILES, "runs"} - {"tuning.csv", "tuned.toml"}
    assert [len(r["tracked"]) for r in records(done / "runs" / names[0])] == [2, 2, 2]
    assert [len(r["tracked"]) for r in records(done / "runs" / names[2])] == [3, 3, 3]


@pytest.mark.parametrize("ending", [execution.execute, KeyboardInterrupt])
def test_the_partition_is_drawn_after_the_runs_also_if_they_are_interrupted(ending, tmp_path, monkeypatch):
    spec, drawn = spec_of(QUADRATICS), []
    labels = SimpleNamespace(counts=None, note="by hand")
    monkeypatch.setattr(runner, "label_counts", lambda *_: labels)

    def run_all(plan, *_):
        drawn.append("runs")
        if ending is KeyboardInterrupt:
            raise KeyboardInterrupt
        execution.execute(plan, lambda _: None)

    def draw(counts, path, title):
        drawn.append(title)
        path.write_bytes(b"figure")

    monkeypatch.setattr(runner, "run_all", run_all)
    monkeypatch.setattr("fadamgc.experiments.report.label_plot.save_label_plot", draw)
    for _ in range(2):  # again with --resume, which keeps the figure
        if ending is KeyboardInterrupt:
            with pytest.raises(runner.Interrupted):
                run_spec(spec, tmp_path, workers=1, quiet=True, resume=bool(drawn))
        else:
            run_spec(spec, tmp_path, workers=1, quiet=True, resume=bool(drawn))
    assert drawn == ["runs", f"by hand (seed {spec.run.seeds[0]})", "runs"]


@pytest.mark.slow
def test_two_workers_give_the_bits_of_one(done, tmp_path):
    before = torch.get_num_threads()
    run_spec(spec_of(TINY), tmp_path / "out", workers=2, quiet=True)
    assert torch.get_num_threads() == before
    for folder in (done / "runs").iterdir():
        assert records(tmp_path / "out" / "runs" / folder.name) == records(folder)


@pytest.mark.slow
def test_resume_keeps_what_is_finished_and_equal(done, tmp_path, monkeypatch):
    out = tmp_path / "out"
    short = spec_of(TINY).replace("run", rounds=1)
    run_spec(short, out, workers=1, quiet=True)
    made = []

    def execute(jobs, on_round, warn, tasks):
        made.extend(job.name for job in jobs)
        return [execution.RunEnd(1, 0.5)] * len(jobs)

    monkeypatch.setattr(workers, "execute", execute)
    run_spec(short, out, workers=1, quiet=True, resume=True)
    assert made == []
    (out / "runs" / "localadam-seed1" / "run.json").unlink()
    damaged = out / "runs" / "localadam-seed0" / "run.json"
    damaged.write_text(damaged.read_text()[:-40])
    run_spec(short, out, workers=1, quiet=True, resume=True)
    assert made == ["LocalAdam, seed 0", "LocalAdam, seed 1"]
    made.clear()
    with pytest.raises(InputError, match=r"other settings: \[run\] batch_size=8 there, 4 here; --overwrite"):
        run_spec(short.replace("run", batch_size=4), out, workers=1, quiet=True, resume=True)
    assert made == []
    assert load_spec(out / "spec.toml") == short
    run_spec(short.replace("run", batch_size=4), out, workers=1, quiet=True, overwrite=True)
    assert len(made) == 4


def test_resume_may_add_and_may_not_remove(tmp_path):
    spec = spec_of(TINY).replace("run", rounds=1)
    run_spec(spec, tmp_path, workers=1, quiet=True)
    for other, message in (
        (spec.replace("run", seeds=(1,)), r"\[run\] seeds=\[0, 1\] there, \[1\] here"),
        (spec.replace("run", rounds=2), r"\[run\] rounds=1 there, 2 here"),
        (spec.replace("task", alpha=2.0), r"\[task\] alpha=1.0 there, 2.0 here"),
        (spec.only(["fadamgc"]), "LocalAdam: algorithm='local_adam' there, None here"),
        (
            parse_spec(spec.to_toml().replace('algorithm = "local_adam"', 'algorithm = "fedavg"'), "x"),
            "LocalAdam: algorithm='local_adam' there, 'fedavg' here",
        ),
        (
            parse_spec(spec.to_toml().replace("eta_l = 1e-05", "eta_l = 1e-06"), "x"),
            "LocalAdam: eta_l=1e-05 there",
        ),
    ):
        with pytest.raises(InputError, match=message):
            run_spec(other, tmp_path, workers=1, quiet=True, resume=True)
    before = {p: p.read_bytes() for p in tmp_path.glob("runs/*/run.json")}
    more = spec.replace("run", seeds=(0, 1, 2)).replace("cost", latency=7.0)
    run_spec(more, tmp_path, workers=1, quiet=True, resume=True)
    assert len(list(tmp_path.glob("runs/*/run.json"))) == 6
    assert all(path.read_bytes() == data for path, data in before.items())


def test_other_links_or_another_target_need_no_new_run(done):
    spec = spec_of(TINY).replace("cost", latency=9.0).replace("run", target=0.3)
    assert all(job.saved() is not None for job in ExperimentFolder(done).plan(spec))
    for other in (spec.replace("run", rounds=4), spec.replace("task", alpha=2.0)):
        assert all(job.saved() is None for job in ExperimentFolder(done).plan(other))


@pytest.mark.slow
def test_a_folder_in_use_is_refused(done, tmp_path):
    with pytest.raises(InputError, match=r"already has an experiment; --resume .* --overwrite .* --out"):
        run_spec(spec_of(TINY), done, quiet=True)
    (tmp_path / "thesis.tex").write_text("mine")
    for flags in ((False, False), (True, False), (False, True)):
        with pytest.raises(InputError, match="has other files and no experiment"):
            ExperimentFolder(tmp_path).make_ready(*flags)
    with pytest.raises(InputError, match="is a file; give a folder"):
        ExperimentFolder(tmp_path / "thesis.tex").make_ready(False, False)
    with pytest.raises(InputError, match="cannot be written"):
        ExperimentFolder(tmp_path / "thesis.tex" / "below").make_ready(False, False)
    with pytest.raises(InputError, match="choose one"):
        ExperimentFolder(tmp_path).make_ready(True, True)


def test_overwrite_removes_what_an_experiment_writes_and_nothing_else(tmp_path):
    out = tmp_path / "out"
    (out / "runs" / "a-seed0").mkdir(parents=True)
    (out / "spec.toml").write_text("")
    (out / "report.html").write_text("")
    (out / "notes.txt").write_text("mine")
    ExperimentFolder(out).make_ready(resume=False, overwrite=True)
    assert [p.name for p in out.iterdir()] == ["notes.txt"]


def test_what_cannot_run_is_refused_before_any_work(tmp_path):
    for key, value, message in (
        ("sampled", 7, "sampled=7 exceeds clients=6"),
        ("tracked", 4, "tracked=4 exceeds sampled=3"),
    ):
        with pytest.raises(InputError, match=message):
            run_spec(spec_of(TINY).replace("run", **{key: value}), tmp_path / "out")
    with pytest.raises(InputError, match="workers=0"):
        run_spec(spec_of(TINY), tmp_path / "new", workers=0)
    assert not (tmp_path / "out").exists()


def test_too_little_disk_space_is_named_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda _: SimpleNamespace(total=10**9, free=20_000))
    with pytest.raises(
        InputError, match=r"is on a disk with 20\.0 kB free; the runs need about [\d.]+ kB .*to keep"
    ):
        run_spec(spec_of(TINY), tmp_path / "out", workers=1)
    assert not (tmp_path / "out").exists()


class Pair(NamedTuple):
    first: torch.Tensor
    rest: tuple


class Rest(NamedTuple):
    second: torch.Tensor


@dataclasses.dataclass(frozen=True)
class Nested(FedAvg):
    """FedAvg with a client state in which there is another one."""

    def init_client(self, x, g=None):
        return Pair(torch.zeros_like(x), Rest(torch.zeros_like(x)))

    def finish(self, down, client, local, x, K, tracked):
        return client, super().finish(down, client, local, x, K, tracked)[1]


def test_states_in_states_are_counted_and_saved(tmp_path):
    planned = ExperimentFolder(tmp_path).plan(spec_of(TINY))[0]
    planned = dataclasses.replace(planned, algorithm=Nested(eta_l=0.01))
    task = build_task(planned.task, planned.seed)
    d = sum(p.numel() for p in task.model.parameters())
    space = execution.dry_run(planned, task)
    assert space.checkpoint == 2 * 4 * d * (1 + 6 * 2)  # the server's x, and two vectors of six clients
    (end,) = execution.execute([planned], lambda i: False)
    assert end.rounds == 3


def test_a_disk_that_fills_up_loses_no_finished_run(tmp_path, monkeypatch):
    original, room = bundle.write_atomic, 2

    def write(path: Path, data: bytes, private: bool = False) -> None:
        nonlocal room
        if path.name == "run.json":
            if not room:
                raise OSError(errno.ENOSPC, "No space left on device")
            room -= 1
        original(path, data)

    monkeypatch.setattr(bundle, "write_atomic", write)
    with pytest.raises(FadamgcError, match="No space left on device; finished runs are saved: make room"):
        run_spec(spec_of(TINY), tmp_path, workers=1, quiet=True)
    assert sum(job.saved() is not None for job in ExperimentFolder(tmp_path).plan(spec_of(TINY))) == 2
    room = 2  # no more than what is missing
    assert run_spec(spec_of(TINY), tmp_path, workers=1, quiet=True, resume=True) == ()
    assert all(job.saved() for job in ExperimentFolder(tmp_path).plan(spec_of(TINY)))


def test_what_a_kill_left_behind_is_removed_by_the_next_start(tmp_path):
    """Killed between saving a record and removing the checkpoint, or while a figure was being written."""
    run_spec(spec_of(TINY), tmp_path, workers=1, quiet=True)
    job = ExperimentFolder(tmp_path).plan(spec_of(TINY))[0]
    (job.folder / "checkpoint").mkdir()
    (job.folder / "checkpoint" / "checkpoint.json").write_text("{}")
    figure = tmp_path / f".partition.png.999999999-{files.this_machine()}-0123abcd.tmp"
    figure.touch()
    before = {path for path in tmp_path.rglob("*") if path.is_file()}
    run_spec(spec_of(TINY), tmp_path, workers=1, quiet=True, resume=True)
    assert not (job.folder / "checkpoint").exists()
    assert not figure.exists()
    gone = before - {path for path in tmp_path.rglob("*") if path.is_file()}
    assert gone == {figure, job.folder / "checkpoint" / "checkpoint.json"}


def test_a_folder_in_which_a_killed_process_left_temporary_files_is_empty(tmp_path):
    for name in (".lock", ".writable", ".spec.toml.999999999-01234567-0123abcd.tmp"):
        (tmp_path / name).touch()
    run_spec(spec_of(TINY), tmp_path, workers=1, quiet=True)
    assert all(job.saved() for job in ExperimentFolder(tmp_path).plan(spec_of(TINY)))


def test_without_a_terminal_lines_show_the_remaining_time(tmp_path, capsys):
    run_spec(spec_of(TINY), tmp_path, workers=1)
    preparing, checking, *lines = capsys.readouterr().err.splitlines()
    assert (preparing, checking) == ("preparing digits ...", "checking 2 methods ...")
    assert len(lines) == 4
    assert all(re.search(r"; about \d+ s left$", line) for line in lines[:-1])
    assert "left" not in lines[-1]


@pytest.mark.slow
def test_a_run_that_diverges_does_not_stop_the_others(tmp_path):
    spec = spec_of(QUADRATICS + "eta_l = 1e300\n" + '[[method]]\nalgorithm = "fedavg"\neta_l = 0.05')
    failures = run_spec(spec.replace("run", rounds=3), tmp_path / "out", workers=1, quiet=True)
    assert [f.run for f in failures] == ["SCAFFOLD, seed 0", "SCAFFOLD, seed 1"]
    assert "non-finite" in failures[0].error
    results = write_report(tmp_path / "out")
    assert {label: len(runs) for label, runs in results.runs.items()} == {"SCAFFOLD": 0, "FedAvg": 2}
    assert [cell.text for cell in results_table(results).rows[0]] == ["SCAFFOLD", *["diverged"] * 3, DASH]
    assert results.missing == 0


# A run that is stopped in the middle.


@pytest.mark.slow
def test_a_stopped_run_resumes(tmp_path):
    spec = spec_of(TINY.replace("rounds = 3", "rounds = 60", 1))
    job = ExperimentFolder(tmp_path).plan(spec)[-1]
    whole = simulate(**execution.arguments(job, build_task(job.task, job.seed)), progress=False)

    def stop_after(rounds: int):
        done = 0

        def on_round(i: int) -> bool:
            nonlocal done
            done += 1
            return done == rounds

        return on_round

    with pytest.raises(execution.Stopped):
        execution.execute([job], stop_after(33))
    assert not job.saved()
    counted: list[int] = []
    (outcome,) = execution.execute([job], lambda i: bool(counted.append(1)))
    assert outcome.rounds == 60
    assert len(counted) == 60 - 25
    run = job.saved()
    assert run is not None
    assert run.history == whole.history
    assert [p.name for p in job.folder.iterdir()] == ["run.json"]


def test_a_checkpoint_of_other_settings_is_not_resumed(tmp_path):
    spec = spec_of(TINY.replace("rounds = 3", "rounds = 30", 1))
    job = ExperimentFolder(tmp_path).plan(spec)[-1]
    answers = iter([False] * 26 + [True])
    with pytest.raises(execution.Stopped):
        execution.execute([job], lambda i: next(answers))
    other = dataclasses.replace(job, algorithm=dataclasses.replace(job.algorithm, beta1=0.5))
    counted: list[int] = []
    execution.execute([other], lambda i: bool(counted.append(1)))
    assert len(counted) == 30
