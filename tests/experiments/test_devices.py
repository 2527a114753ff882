"""Devices in specs and commands. There is no GPU here: what torch says of accelerators is replaced."""

from __future__ import annotations

import pytest
import torch

import fadamgc
from command import fadamgc as command
from fadamgc import runtime
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.run import execution
from fadamgc.experiments.run.workers import free_number
from fadamgc.runtime import device_of
from problems import class_task
from tiny_experiments import TINY, spec_of


@pytest.fixture
def gpus(monkeypatch):
    """A machine with three GPUs."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 3)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))


def test_auto_is_the_cpu_without_a_gpu():
    assert device_of("auto") == torch.device("cpu")
    assert device_of("cuda:1") == torch.device("cuda:1")
    assert device_of(torch.device("cpu")) == torch.device("cpu")


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_workers_take_turns_on_the_gpus(name, gpus):
    assert [device_of(name, worker).index for worker in range(5)] == [0, 1, 2, 0, 1]
    assert device_of("cuda:2", 1) == torch.device("cuda:2")
    assert device_of("cpu", 1) == torch.device("cpu")


def test_workers_have_different_numbers(tmp_path):
    assert [free_number(tmp_path) for _ in range(4)] == [0, 1, 2, 3]


def test_a_run_of_a_worker_gets_its_gpu(tmp_path, gpus, monkeypatch):
    plan = ExperimentFolder(tmp_path).plan(spec_of(TINY))
    monkeypatch.setattr(execution, "_worker", 4)
    assert execution.arguments(plan[0], class_task())["device"] == torch.device("cuda:1")


def test_threads_stay_on_the_cpu(tmp_path, gpus):
    plan = ExperimentFolder(tmp_path).plan(spec_of(TINY.replace('"loop"', '"threads"')))
    assert execution.arguments(plan[0], class_task())["device"] == torch.device("cpu")


@pytest.mark.parametrize(
    ("processes", "gpus_", "part"), [(1, 1, 1), (4, 1, 4), (4, 2, 2), (5, 2, 3), (2, 8, 1)]
)
def test_workers_share_the_free_memory_of_a_gpu(processes, gpus_, part, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (6000 + device.index, 9000))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: gpus_)
    monkeypatch.setattr(runtime, "_processes", 1)
    runtime.share_gpus(processes)
    assert runtime.memory(torch.device("cuda:3")) == 6003 // part


def test_the_device_does_not_belong_to_the_identity_of_a_run(tmp_path):
    text = TINY.replace('executor = "loop"', 'executor = "loop"\ndevice = "cpu"')
    one, other = (ExperimentFolder(tmp_path).plan(spec_of(t))[0] for t in (TINY, text))
    assert one.run.device == "auto"
    assert other.run.device == "cpu"
    assert one.identity() == other.identity()


@pytest.mark.slow
def test_commands_have_a_device(tmp_path):
    spec = tmp_path / "spec.toml"
    spec.write_text(TINY)
    done = command("run", spec, "--device", "cpu", "--out", tmp_path / "out", "--workers", 2)
    assert done.exit_code == 0, done.output
    assert 'device = "cpu"' in (tmp_path / "out" / "spec.toml").read_text()
    for name in ("compare", "reproduce", "tune"):
        assert "--device" in command(name, "--help").output
    refused = command("run", spec, "--device", "gpu", "--out", tmp_path / "other")
    assert refused.exit_code == 2
    assert "device='gpu' is not accepted" in refused.output
    assert not (tmp_path / "other").exists()
    missing = command("run", spec, "--device", "cuda", "--out", tmp_path / "other")
    assert missing.exit_code == 2
    assert "cannot be used here" in missing.output


@pytest.mark.slow
def test_simulate_with_auto():
    run = fadamgc.simulate(fadamgc.FedAvg(), class_task(), rounds=1, device="auto", progress=False)
    assert run.x.device.type == "cpu"
