"""Every executor on a device that is not the CPU, and that refuses tensors of two devices."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import other_device_cases
from places import ROOT

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """Run all cases in one process, because the pretended device changes torch."""
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}"}
    script = Path(other_device_cases.__file__)
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=300, env=environment
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def test_the_device_refuses_tensors_of_the_cpu(found):
    assert "same device" in found["two devices"]["refused"]


@pytest.mark.parametrize("name", other_device_cases.cases())
def test_a_run_on_the_device_is_the_run_on_the_cpu(name, found):
    case = found[name]
    assert "error" not in case, case["error"]
    assert case["device"] == "pretend"
    # BatchNorm may add in another order, and "auto" may take another executor; else the bits are the same.
    rounding = 1e-6 if "auto" in name or "BatchNorm" in name or "local parameters" in name else 0
    rounding = 1e-3 if name == "autocast, vectorized" else rounding  # other roundings to bfloat16
    assert case["difference"] <= rounding
    assert case["losses"] <= rounding
    assert case["resumed"] <= rounding  # begun on the device, continued on the CPU


@pytest.mark.parametrize("device", ["cpu", "pretend:0", "pretend:1"])
def test_random_numbers_of_a_device_are_noticed_and_those_of_all_are_kept(device, found):
    case = found["random numbers"][device]
    assert case == {"device": device, "noticed": True, "kept": True, "difference": case["difference"]}
    assert case["difference"] <= 1e-6
