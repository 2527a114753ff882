"""The apps: who a node is, the digits example, the history that a server leaves."""

from __future__ import annotations

import logging
import shutil
import subprocess
import sys

import pytest
import torch

import fadamgc

flwr = pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Context, RecordDict  # noqa: E402

from fadamgc.cli.main import app as cli  # noqa: E402
from fadamgc.errors import InputError  # noqa: E402
from fadamgc.experiments.report.numbers import read_results  # noqa: E402
from fadamgc.experiments.report.write import write_report  # noqa: E402
from fadamgc.flower.clientapp import client_number, state_folder  # noqa: E402
from fadamgc.flower.logs import without_traceback  # noqa: E402
from fadamgc.flower.serverapp import federate, server_task, write_history  # noqa: E402
from fadamgc.tasks.build import build_task  # noqa: E402
from fadamgc.tasks.sections import DigitsTask  # noqa: E402
from in_process_grid import SIZES, Here, app_of  # noqa: E402
from problems import class_task, mlp  # noqa: E402


@pytest.mark.parametrize("given", [None, "0", -1, True])
def test_a_node_must_know_who_it_is(given, monkeypatch, tmp_path):
    context = Context(1, 1, {} if given is None else {"partition-id": given}, RecordDict(), {})
    with pytest.raises(InputError, match="partition-id.*is not accepted; start the node with"):
        client_number(context)
    monkeypatch.setenv("FADAMGC_STATES", str(tmp_path))
    assert state_folder(context) == tmp_path


# The digits, as the example has them.


@pytest.mark.slow
def test_the_digits_app_gives_the_simulators_numbers_and_a_report(tmp_path, caplog):
    from fadamgc.flower import dataset_apps as digits

    config = {
        "algorithm": "fadamgc",
        "eta_l": 0.003,
        "experiment": "digits",
        "clients": 3,
        "rounds": 3,
        "tracked": 2,
        "local-steps": 4,
        "batch-size": 16,
        "data.alpha": 0.5,
        "folder": str(tmp_path / "server"),
        "wait-timeout": 5.0,
    }
    grid = Here(digits.client, tmp_path, 3)
    plain = grid.context
    grid.context = lambda client: Context(1, 1, plain(client).node_config, RecordDict(), config)
    coordinator = federate(grid, digits.task(grid.context(0)), config)
    task = build_task(DigitsTask(data="digits", clients=3, alpha=0.5), 0)
    run = fadamgc.simulate(
        fadamgc.FAdamGC(eta_l=0.003), task, rounds=3, tracked=2, local_steps=4, batch_size=16, executor="loop"
    )
    assert torch.equal(coordinator.server.x, run.x)
    results = write_report(tmp_path / "server")
    assert results.runs["FAdamGC"][0].history == run.history
    assert (tmp_path / "server" / "report.html").stat().st_size > 10_000

    shutil.rmtree(tmp_path / "server" / "runs")  # as if killed after the last checkpoint
    with caplog.at_level("INFO", logger="fadamgc"):
        again = federate(None, digits.task(grid.context(0)), config)  # nobody has to be there for it
    assert "digits: already complete after round 3" in caplog.text
    assert torch.equal(again.server.x, run.x)
    assert read_results(tmp_path / "server").runs["FAdamGC"][0].history == run.history


def batch_norm_mlp():
    return mlp(0, torch.nn.BatchNorm1d(8))


@pytest.mark.parametrize("model", [mlp, batch_norm_mlp])
def test_a_server_needs_no_test_data(model, tmp_path):
    full = class_task(sizes=SIZES, model=model())
    task = server_task((full.model, full.loss))
    config = {"folder": str(tmp_path / "server"), "rounds": 2, "local-steps": 2, "batch-size": 4}
    coordinator = federate(Here(app_of(full), tmp_path, 3), task, config)
    run = fadamgc.simulate(
        fadamgc.FAdamGC(), full, rounds=2, local_steps=2, batch_size=4, executor="loop", progress=False
    )
    assert torch.equal(coordinator.server.x, run.x)
    for name, value in run.buffers.items():
        torch.testing.assert_close(coordinator.buffers[name], value)
    assert [r.train_loss for r in coordinator.history] == [r.train_loss for r in run.history]
    assert [r.test_loss for r in coordinator.history] == [r.test_metric for r in coordinator.history]
    assert coordinator.history[-1].test_loss is None
    results = write_report(tmp_path / "server")
    assert results.runs["FAdamGC"][0].history == coordinator.history
    with pytest.raises(
        InputError, match=r"target=0.5 without test data at the server; let the server's load"
    ):
        federate(None, task, config | {"target": 0.5, "experiment": "other"})


def test_what_a_server_may_load():
    full = class_task(sizes=SIZES)
    assert server_task(full) is full
    with_test = server_task((full.model, full.loss, full.test_pair))
    assert (with_test.n, len(with_test.test_samples)) == (0, 50)
    with pytest.raises(InputError, match="the server's load returned 3; it must return \\(model, loss\\)"):
        server_task(3)
    with pytest.raises(InputError, match="clients=None, which is for the server of a federation"):
        fadamgc.simulate(fadamgc.FedAvg(), with_test, rounds=1)


class Steepest(fadamgc.FedAvg):
    """An algorithm that only the server's process has registered."""

    title = "Steepest\nof all"


@pytest.mark.slow
def test_a_history_of_a_custom_algorithm_and_metric_is_reported(tmp_path, monkeypatch):
    from fadamgc.methods import _REGISTRY

    with monkeypatch.context() as patched:
        patched.setitem(_REGISTRY, "steepest", Steepest)
        task = class_task(sizes=SIZES, metric=lambda output, _: float(output.abs().max()), goal="min")
        config = {
            **{
                "algorithm": "steepest",
                "eta_l": 0.2,
                "experiment": "mine",
                "folder": str(tmp_path / "server"),
            },
            **{"rounds": 2, "local-steps": 2, "sampled": 2, "target": 0.001, "seed": 7, "wait-timeout": 5.0},
        }
        (tmp_path / "server").mkdir()
        (tmp_path / "server" / "spec.toml").write_text("of the version before, with other settings")
        coordinator = federate(Here(app_of(task), tmp_path, 3), task, config)
    results = write_report(tmp_path / "server")
    assert results.spec.name == "mine"
    assert results.spec.title == "Steepest\\nof all on task, 3 clients, on Flower"
    assert (results.spec.task.metric, results.spec.run.target, results.spec.run.seeds) == (
        "metric",
        0.001,
        (7,),
    )
    assert (results.spec.run.rounds, results.spec.run.sampled) == (2, 2)
    (method,) = results.spec.methods
    assert method.label == "Steepest\\nof all"
    assert method.hyperparameters["eta_l"] == 0.2
    assert results.runs[method.label][0].history == coordinator.history
    assert results.runs[method.label][0].goal == "min"
    assert (tmp_path / "server" / "runs" / "steepest-nof-all-seed7" / "run.json").exists()


@pytest.mark.slow
def test_the_median_of_the_replies_and_the_refused_ones_are_reported(tmp_path):
    task = class_task(sizes=SIZES)
    config = {"folder": str(tmp_path / "server"), "rounds": 2, "local-steps": 2, "aggregation": "median"}
    coordinator = federate(Here(app_of(task), tmp_path, 3), task, config)
    options = {"rounds": 2, "local_steps": 2, "executor": "loop", "progress": False}
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, aggregation="median", **options)
    assert torch.equal(coordinator.server.x, run.x)
    assert not torch.equal(run.x, fadamgc.simulate(fadamgc.FAdamGC(), task, **options).x)
    page = tmp_path / "server" / "report.html"
    write_report(tmp_path / "server")
    assert "norm of dy, largest</option>" in page.read_text()
    assert "Refused replies" not in page.read_text()
    coordinator.refuse(InputError("client <3> is not one of ours"), 2)
    write_history(coordinator, tmp_path / "server")
    write_report(tmp_path / "server")
    assert "<li>round 2: client &lt;3&gt; is not one of ours</li>" in page.read_text()


@pytest.mark.slow
def test_flower_apps_load_no_experiments():
    code = (
        "import sys, fadamgc.flower.dataset_apps\n"
        "loaded = [m for m in sys.modules if m.startswith(('matplotlib', 'fadamgc.experiments'))]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_says_what_runs(tmp_path):
    from typer.testing import CliRunner

    shown = CliRunner().invoke(cli, ["federation", "status", "--folder", str(tmp_path)])
    assert shown.exit_code == 0
    assert "no federation in" in shown.output


def test_an_error_of_ours_is_one_sentence_in_flowers_log():
    ours, other = InputError("sampled=3 exceeds clients=2"), ValueError("of somebody else")
    for error in (ours, other):
        info = (type(error), error, None)
        record = logging.LogRecord("flwr", logging.ERROR, "", 0, "%s raised it", ("ServerApp",), info)
        assert without_traceback(record)
        if error is ours:
            assert record.getMessage() == "ServerApp raised it: sampled=3 exceeds clients=2"
            assert record.exc_info is None
        else:
            assert (record.getMessage(), record.exc_info) == ("ServerApp raised it", info)
