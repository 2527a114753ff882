"""The metrics file of a federation: its numbers, its form, and what happens when it cannot be written."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="Flower is not installed")

from fadamgc.errors import UnwritableError
from fadamgc.flower import metrics_file, serverapp
from fadamgc.flower.metrics_file import METRICS, PREFIX
from in_process_grid import SIZES, Here, app_of
from problems import class_task

NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\\\|\\"|\\n)*"'
SAMPLE = re.compile(rf"({NAME})\{{({LABEL}(?:,{LABEL})*)\}} (\S+)")


def parsed(text):
    """Return {name and labels: number} of a text in Prometheus' format; be as strict as its parser."""
    assert text.endswith("\n")
    samples, described, current = {}, {}, None
    for line in text.splitlines():
        if match := re.fullmatch(rf"# HELP ({NAME}) ([^\\]+)", line):
            current = match[1]
            assert current not in described, f"{current} is described twice"
            described[current] = None
        elif match := re.fullmatch(rf"# TYPE ({NAME}) (gauge|counter)", line):
            assert match[1] == current
            assert described[current] is None, f"{current} has two types"
            described[current] = match[2]
            assert (match[2] == "counter") == current.endswith("_total")
        else:
            match = SAMPLE.fullmatch(line)
            assert match, line
            assert match[1] == current, f"{line} is not below its description"
            assert described[current], f"{current} has no type"
            assert f"{match[1]}{{{match[2]}}}" not in samples, f"{line}: twice"
            samples[f"{match[1]}{{{match[2]}}}"] = float(match[3])
    return samples


def numbers(file, experiment="exp"):
    """Return the numbers by short name and other labels."""
    first = f'experiment="{experiment}"'
    return {
        key.removeprefix(PREFIX).replace(first, "").replace("{}", "").replace("{,", "{"): value
        for key, value in parsed(file.read_text()).items()
    }


def federate(folder, rounds, metric="accuracy", deaf_from=math.inf, **more):
    """Run a federation in which client 2 does not answer in the rounds from ``deaf_from``."""
    task = class_task(sizes=SIZES, metric=metric, goal="max")
    grid = Here(app_of(task), folder, 3)
    push = grid.push_messages

    def push_messages(messages):
        training = [m for m in messages if m.metadata.message_type == "train"]
        grid.deaf = {2} if training and int(training[0].metadata.group_id) >= deaf_from else set()
        return push(messages)

    grid.push_messages = push_messages
    config = {
        **{"algorithm": "fedavg", "eta_l": 0.1, "experiment": "exp", "folder": str(folder / "server")},
        **{"rounds": rounds, "local-steps": 2, "wait-timeout": 0.5, "round-timeout": 0.2, "eval-every": 2},
    }
    return serverapp.federate(grid, task, config | more)


@pytest.mark.slow
def test_the_file_has_the_numbers_of_the_history(tmp_path, monkeypatch):
    monkeypatch.setattr(metrics_file, "time", SimpleNamespace(time=lambda: 1234.5))
    coordinator = federate(tmp_path, 3, deaf_from=3, **{"max-samples": 15})  # client 1 has 20 samples
    found = numbers(tmp_path / "server" / "metrics.prom")
    records = coordinator.history
    assert found.pop("last_progress_timestamp_seconds") == 1234.5
    assert found.pop("round_duration_seconds") == records[-1].wall_seconds > 0
    assert records[0].test_loss is None
    evaluated = [record for record in records if record.test_loss is not None][-1]
    assert found == {
        **{"round": 3, "rounds_planned": 3, "complete": 1, "clients": 3},
        **{"round_clients_asked": 2, "round_replies_counted": 1, "round_replies_missing": 1},
        **{"round_refusals": 0, "replies_counted_total": 5, "replies_missing_total": 1},
        "bytes_up_total": sum(record.bytes_up for record in records),
        "bytes_down_total": sum(record.bytes_down for record in records),
        "train_loss": records[-1].train_loss,
        "test_loss": evaluated.test_loss,
        "test_metric": evaluated.test_metric,
        'update_norm{field="dx",of="largest"}': records[-1].replies["norm of dx, largest"],
        'update_norm{field="dx",of="median"}': records[-1].replies["norm of dx, median"],
    }

    federate(tmp_path, 4, **{"max-samples": 15})  # more rounds: the sums grow
    again = numbers(tmp_path / "server" / "metrics.prom")
    assert again["replies_counted_total"] == 7
    assert (again["round"], again["complete"]) == (4, 1)


@pytest.mark.slow
def test_refusals_and_several_numbers_are_in_the_file(tmp_path):
    names = ['a "quoted" \\ name', "lines\nof it"]
    metric = {"metric": lambda output, _: dict(zip(names, (0.25, 0.5), strict=True))}
    federate(tmp_path, 1, **metric, **{"max-samples": 15, "eval-every": 1})
    found = numbers(tmp_path / "server" / "metrics.prom")
    assert found["round_refusals"] == 1
    assert found[r'test_metrics{name="a \"quoted\" \\ name"}'] == 0.25
    assert found[r'test_metrics{name="lines\nof it"}'] == 0.5


def test_every_metric_has_a_name_and_a_description_that_prometheus_accepts():
    assert all(re.fullmatch(NAME, PREFIX + name) for name in METRICS)
    assert all(text.endswith(".") and "\n" not in text and "\\" not in text for _, text in METRICS.values())


@pytest.mark.slow
def test_a_file_that_cannot_be_written_is_an_error_at_the_start_and_a_warning_later(
    tmp_path, monkeypatch, caplog
):
    (tmp_path / "file").write_text("not a folder")
    with pytest.raises(UnwritableError, match="file"):
        federate(tmp_path, 1, **{"metrics-file": str(tmp_path / "file" / "digits.prom")})

    elsewhere = tmp_path / "textfile" / "digits.prom"
    write = metrics_file.write_atomic

    def full(path, data):
        if b'fadamgc_round{experiment="exp"} 1' in data:
            raise OSError(28, "No space left on device")
        write(path, data)

    monkeypatch.setattr(metrics_file, "write_atomic", full)
    assert federate(tmp_path, 2, **{"metrics-file": str(elsewhere)}).t == 2
    assert "digits.prom cannot be written: [Errno 28] No space left on device" in caplog.text
    assert numbers(elsewhere)["round"] == 2
    assert list(elsewhere.parent.iterdir()) == [elsewhere]
    assert elsewhere.stat().st_mode & 0o044, "Prometheus' exporter is another user"
