"""Rounds and sweeps on Ray clusters of several nodes, whose network and processes are their own.

Ray opens ports beyond loopback, so all cases run in a namespace that has no other network, and in which no
process outlives the script; tests/ray_cases.py has the cases.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from filelock import FileLock

import fadamgc
import ray_cases
from fadamgc.cluster import pack, unpack
from places import ROOT

pytestmark = pytest.mark.slow
pytest.importorskip("ray", reason="Ray is not installed")

ISOLATED = ("unshare", "--map-root-user", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """The results of all cases, which run once, also where several processes run tests."""
    folder = tmp_path_factory.getbasetemp()  # of this process; its parent is that of all processes
    common = (folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "ray-cases"
    common.mkdir(exist_ok=True)
    with FileLock(common / "lock"):
        results = common / "found.json"
        if not results.exists():
            results.write_text(json.dumps(run_cases()))
        return json.loads(results.read_text())


def run_cases():
    if subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine allows no namespaces (unshare)")
    folder = Path(tempfile.mkdtemp(prefix="ray-", dir="/tmp"))  # sockets need short paths
    try:
        environment = os.environ | {
            "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT / 'tests'}",
            "HOME": str(folder),
            "RAY_TMPDIR": str(folder),
            "RAY_worker_niceness": "0",  # 15 by default: workers would wait for all other tests
            "FADAMGC_CACHE": str(folder / "cache"),
        }
        done = subprocess.run(
            [*ISOLATED, sys.executable, ray_cases.__file__, str(folder)],
            capture_output=True,
            text=True,
            timeout=900,
            env=environment,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return json.loads((folder / "found.json").read_text())
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def case(request, found):
    """The case of a test with the same name."""
    values = found[request.node.originalname.removeprefix("test_")]
    assert "error" not in values or "Traceback" not in values["error"], values["error"]
    return values


def test_every_algorithm(case):
    """Then one with a schedule, a transform, clipped gradients and clients that do not answer."""
    assert case["differences"] == dict.fromkeys(fadamgc.algorithms(), 0.0)
    assert (case["training"], case["absent"], case["partial"]) == (0.0, True, True)


def test_number_of_actors(case):
    assert case["equal"]
    assert case["history"]
    assert case["settings"] == "ray vectorized"


def test_convolutions(case):
    assert case["equal"]
    assert case["inner"] == "threads"


def test_local_parameters(case):
    assert case["difference"] < 1e-14
    assert case["metrics"]


def test_codecs(case):
    assert case["difference"] == 0
    assert case["rests"]


def test_resumed(case):
    assert case["with Ray"]
    assert case["without"]


def test_killed_actor(case):
    assert case["happened"]
    assert case["equal"]


def test_hanging_actor(case):
    assert case["happened"]
    assert case["difference"] < 1e-14


def test_always_killed(case):
    kind, message = case["message"]
    assert kind == "ClusterError"
    assert "were given to 2 actors of the Ray cluster, and none replied" in message
    assert "resume from the checkpoint" in message


def test_failing_model(case):
    assert case["message"] == [
        "ClientError",
        "model or loss failed for client 2 in round 1, at local step 1, on a batch of 8: no such luck",
    ]


def test_no_room(case):
    assert case["message"][1].startswith("a process needs cpus=1 and gpus=1, and the Ray cluster has 3 CPU")


def test_many_runs(case):
    assert case["equal"]
    assert case["task"]


def test_example(case):
    """``examples/ray_sweep.py``; each method has its best step size."""
    local_adam, corrected = (float(line.split()[-1]) for line in case["output"].splitlines())
    assert corrected > local_adam > 30
    assert case["figure"] > 10_000


@pytest.mark.parametrize("folder", ["seen", "not seen"])
def test_sweep(case, folder):
    assert case[folder] == {"failures": 0, "equal": True, "models": 4, "left": []}


def test_killed_tuning(case):
    assert case["killed"]
    assert all(case["killed"])  # before the run was saved
    assert case["equal"]
    assert case["chosen"]


def test_stopped_sweep(case):
    assert case["code"] == 130
    assert "--resume continues" in case["output"]
    assert case["checkpoints"] >= 1
    assert case["resumed"] == 0, case["error"]
    assert case["equal"]


def test_lost_node(case):
    assert case["equal"]
    assert case["rounds"] == 4


def test_lost_cluster(case):
    assert case["code"] != 0
    assert "the Ray cluster that it was connected to is gone" in case["output"]
    assert case["saved"] == 2
    assert case["equal"]


def test_a_cluster_is_started_where_there_is_none(found):
    assert found["own cluster"]["equal"]


def test_nothing_is_left_behind(found):
    assert found["left behind"]["processes"] == []


# Values on their way, and bad input; without a cluster.


def test_values_are_packed_and_unpacked():
    big, small = torch.randn(100, 1000), torch.arange(3)
    layer = torch.nn.Linear(2, 3)
    values = {"big": big, "small": small, "half": big.bfloat16(), "none": torch.empty(0, 4), "layer": layer}
    other = unpack(pack(values, shared=[big]))
    for name in ("big", "small", "half", "none"):
        assert torch.equal(other[name], values[name])
        assert other[name].dtype == values[name].dtype
    assert torch.equal(other["layer"].weight, layer.weight)
    assert other["layer"].weight.requires_grad
    other["small"][0] = 7  # what is not shared may be written
    assert small[0] == 0


def test_functions_of_a_script_are_packed():
    number = 3
    assert unpack(pack(lambda x: x + number))(1) == 4


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"cpus": 0}, "cpus=0 is not accepted"),
        ({"gpus": -1}, "gpus=-1 is not accepted"),
        ({"actors": 0}, "actors=0 is not accepted"),
        ({"inner": "ray"}, "inner='ray' is not accepted; it must be one of auto, loop, threads, vectorized"),
        ({"deadline": float("inf")}, "deadline=inf is not accepted"),
        ({"attempts": 0}, "attempts=0 is not accepted"),
        ({"address": 6379}, "address=6379 is not accepted"),
    ],
)
def test_bad_options_are_refused(options, message):
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.Ray(**options)


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    task = ray_cases.task()
    with pytest.raises(fadamgc.InputError, match=r"pip install 'fadamgc\[ray\]'"):
        fadamgc.simulate(ray_cases.ALGO, task, executor="ray", rounds=1)
