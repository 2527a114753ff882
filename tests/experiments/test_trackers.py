"""TensorBoard and MLflow see what the records say."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import fadamgc
from fadamgc import trackers
from fadamgc.cli.main import app
from fadamgc.errors import InputError
from problems import class_task

SPEC = """
name = "watched"
[task]
data = "quadratics"
clients = 3
[run]
rounds = 3
local_steps = 1
seeds = [0, 1]
[[method]]
algorithm = "fadamgc"
eta_l = 0.02
"""


def run(*callbacks):
    return fadamgc.simulate(
        fadamgc.FAdamGC(), class_task(), rounds=3, eval_every=2, callbacks=callbacks, progress=False
    )


def events(folder):
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is not installed"
    )
    reader = accumulator.EventAccumulator(str(folder))
    reader.Reload()
    return {tag: [(e.step, e.value) for e in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@pytest.mark.slow
def test_tensorboard_has_every_number_of_every_round(tmp_path):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    done = run(trackers.tensorboard(tmp_path / "logs"))
    shown = events(tmp_path / "logs")
    assert shown["train_loss"] == [(r.round, pytest.approx(r.train_loss)) for r in done.history]
    assert shown["test_accuracy"] == [
        (r.round, pytest.approx(r.test_accuracy)) for r in done.history if r.test_accuracy is not None
    ]
    assert [step for step, _ in shown["test_loss"]] == [2, 3]
    assert shown["bytes_up"] == [(r.round, r.bytes_up) for r in done.history]


@pytest.mark.slow
def test_mlflow_has_every_number_of_every_round(tmp_path):
    client_of = pytest.importorskip("mlflow", reason="mlflow is not installed").MlflowClient
    uri = (tmp_path / "mlruns").as_uri()
    done = run(trackers.mlflow("first", "tests", {"eta_l": 0.1}, uri))
    client = client_of(tracking_uri=uri)
    (found,) = client.search_runs([client.get_experiment_by_name("tests").experiment_id])
    assert found.info.run_name == "first"
    assert found.data.params == {"eta_l": "0.1"}
    history = client.get_metric_history(found.info.run_id, "train_loss")
    assert [(m.step, m.value) for m in history] == [(r.round, r.train_loss) for r in done.history]


@pytest.mark.slow
def test_the_command_line_tracks_every_run(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    monkeypatch.setenv(trackers.VARIABLE, "")
    (tmp_path / "spec.toml").write_text(SPEC)
    words = ["run", str(tmp_path / "spec.toml"), "--out", str(tmp_path / "out"), "--workers", "2", "--quiet"]
    shown = CliRunner().invoke(app, [*words, "--track", "tensorboard"])
    assert shown.exit_code == 0, shown.output
    folders = sorted((tmp_path / "out" / "tensorboard").iterdir())
    assert [folder.name for folder in folders] == ["fadamgc-seed0", "fadamgc-seed1"]
    assert len(events(folders[0])["test_metric"]) == 3


def test_an_unknown_tracker_is_refused(monkeypatch):
    monkeypatch.setenv(trackers.VARIABLE, "")
    with pytest.raises(InputError, match="track='tensorbord' is not known; did you mean 'tensorboard'"):
        trackers.track_with("tensorbord")
