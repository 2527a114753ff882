"""TensorBoard, MLflow and Weights & Biases see what the records say."""

from __future__ import annotations

import json

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


def logged(path):
    """What a run of Weights & Biases has written to its file: the configuration, and the numbers by step."""
    import wandb
    from wandb.proto.wandb_internal_pb2 import Record
    from wandb.sdk.internal.datastore import DataStore

    assert wandb.__version__
    store, config, steps = DataStore(), {}, {}
    store.open_for_scan(str(path))
    while (data := store.scan_data()) is not None:
        record = Record()
        record.ParseFromString(data)
        config |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        items = {"".join(i.nested_key) or i.key: json.loads(i.value_json) for i in record.history.item}
        if items:
            steps[record.history.step.num] = items
    store.close()
    return config, steps


@pytest.mark.slow
def test_weights_and_biases_has_every_number_of_every_round(tmp_path):
    pytest.importorskip("wandb", reason="wandb is not installed")
    track = trackers.wandb("first", "tests", {"eta_l": 0.1}, tmp_path, mode="offline")
    done = run(track)
    track.finish()
    (path,) = tmp_path.rglob("run-*.wandb")
    config, steps = logged(path)
    assert config["eta_l"] == 0.1
    assert [(t, values["train_loss"]) for t, values in steps.items()] == [
        (r.round, r.train_loss) for r in done.history
    ]
    assert ["test_accuracy" in values for values in steps.values()] == [False, True, True]
    assert [values["bytes_up"] for values in steps.values()] == [r.bytes_up for r in done.history]


@pytest.mark.slow
def test_without_a_key_weights_and_biases_is_offline(tmp_path, monkeypatch):
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv(trackers.VARIABLE, "wandb")
    (track,) = trackers.trackers_of(tmp_path, "one", {"eta_l": 0.5})
    run(track)
    track.finish()
    assert len(list(tmp_path.glob("wandb/offline-run-*"))) == 1


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
