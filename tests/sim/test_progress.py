"""What users see before and between rounds."""

from __future__ import annotations

import io
import time

import pytest
import rich.console
from rich.console import Console

import fadamgc
from fadamgc import stages
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.run import progress as study_progress
from fadamgc.experiments.run.execution import RunEnd
from fadamgc.experiments.run.runner import Runner, run_spec
from fadamgc.sim import progress
from problems import EVEN, class_task
from tiny_experiments import TINY, spec_of

HOW = {"rounds": 3, "local_steps": 2, "batch_size": 8}


@pytest.fixture
def terminal(monkeypatch):
    """Let stderr be a terminal whose text is kept."""
    out = io.StringIO()

    def console(**_):
        return Console(file=out, force_terminal=True, width=160)

    monkeypatch.setattr(rich.console, "Console", console)
    monkeypatch.setattr(study_progress, "Console", console)
    return out


def test_stages_are_heard_in_their_order():
    heard = []
    with stages.listening(heard.append):
        with stages.stage("loading"):
            heard.append("inside")
        with pytest.raises(ValueError, match="no"), stages.stage("compiling"):
            raise ValueError("no")
    with stages.stage("not heard"):
        pass
    assert heard == ["loading", "inside", None, "compiling", None]


def test_only_slow_stages_are_said():
    said = []
    slow = stages.SlowStages(said.append, seconds=0.05)
    slow("quick")
    slow(None)
    time.sleep(0.1)
    slow("slow")
    time.sleep(0.2)
    slow(None)
    assert said == ["slow"]


def test_the_bar_says_what_happens_before_the_first_round(terminal):
    class Slow(fadamgc.sim.executors.LoopExecutor):
        def __init__(self, workload):
            with stages.stage("trying something"):
                time.sleep(0.3)
            super().__init__(workload)

    fadamgc.simulate(fadamgc.FedAvg(), class_task(), executor=Slow, **HOW)
    assert "FedAvg on task: trying something" in terminal.getvalue()


def test_compiling_is_said(monkeypatch):
    from fadamgc.sim.executors import machine_code

    if machine_code.compiler() is None:
        pytest.skip("there is no compiler")
    heard = []
    monkeypatch.setattr(machine_code, "_codes", {})
    monkeypatch.setattr(machine_code, "_kept", lambda *_: None)
    monkeypatch.setattr(machine_code, "_compile", lambda *_: None)
    with stages.listening(heard.append):
        fadamgc.simulate(
            fadamgc.FedAvg(), class_task(EVEN), executor="vectorized", local_steps=500, batch_size=4, rounds=2
        )
    assert any(what and "compiling" in what for what in heard)


def test_lines_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(progress, "FIRST_LINE", 0.0)
    monkeypatch.setattr(progress, "NEXT_LINES", 0.0)
    fadamgc.simulate(fadamgc.FedAvg(), class_task(), executor="loop", **HOW)
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("FedAvg on task: round 3 of 3, 0.")
    assert "left" in lines[0]


def test_the_time_left_is_that_of_the_whole_command(tmp_path, capsys, monkeypatch):
    plan = ExperimentFolder(tmp_path).plan(spec_of(TINY))[:2]
    rounds = plan[0].run.rounds
    clock = iter([0.0, 10.0, 20.0])
    monkeypatch.setattr(study_progress.time, "monotonic", lambda: next(clock))
    with study_progress.display(plan, quiet=False, done=0, later=100 * rounds) as shown:
        shown.on_end(0, RunEnd(rounds, 0.5))
        shown.on_end(1, RunEnd(rounds, 0.5))
    first, second = capsys.readouterr().err.splitlines()
    assert "about 17 min left" in first  # 10 s per run, and 1 + 100 runs to go
    assert "about 17 min left" in second


def test_a_runner_knows_what_comes_later(tmp_path):
    plan = ExperimentFolder(tmp_path).plan(spec_of(TINY))
    runner = Runner(1)
    with runner.before(plan):
        assert runner.later == sum(planned.run.rounds for planned in plan) > 0
    assert runner.later == 0


@pytest.mark.slow
def test_loading_is_said_by_the_workers(tmp_path, monkeypatch):
    heard = []
    show = study_progress.display

    class Kept:
        def __init__(self, *arguments):
            self.shown = show(*arguments)

        def __enter__(self):
            return self.shown.__enter__()._replace(on_stage=heard.append)

        def __exit__(self, *error):
            return self.shown.__exit__(*error)

    monkeypatch.setattr("fadamgc.experiments.run.runner.display", Kept)
    run_spec(spec_of(TINY), tmp_path / "out", workers=2)
    assert any(what and what.startswith("loading") for what in heard)
