"""A real SuperLink and SuperNodes on loopback: `make test-e2e`. Minutes; it stops every process it starts."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch

import fadamgc

pytest.importorskip("flwr", reason="Flower is not installed")

from fadamgc.algorithm import example
from fadamgc.bundle import has_bundle, read_bundle
from fadamgc.errors import FadamgcError
from fadamgc.experiments.report.write import write_report
from fadamgc.flower.access import ACQUIRE_TASK, check_refusals
from fadamgc.flower.certificates import ensure_node_keys
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.loopback import (
    FEDERATION_NAME,
    HOST,
    FederationState,
    LoopbackFederation,
    _wait_until_registered,
    flower_command,
    free_ports,
)
from fadamgc.flower.protocol import NEVER, Stamp
from fadamgc.tasks.build import build_task
from fadamgc.tasks.sections import DigitsTask, task_spec

APP = Path(__file__).parents[2] / "examples" / "flower-digits"
LIMIT = 300  # seconds for anything to happen


@pytest.fixture
def federation(tmp_path):
    one = LoopbackFederation(tmp_path / "federation")
    try:
        yield one
    finally:
        one.down()
    assert one.leftover_processes() == []


def listening(federation):
    """Addresses that processes of the federation listen on, as the system writes them."""
    sockets = set()
    for pid in federation.leftover_processes():
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with suppress(OSError):
                sockets.add(os.readlink(link))
    lines = [
        line.split()
        for table in ("tcp", "tcp6")
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]
    ]
    return [
        words[1].split(":")[0] for words in lines if words[3] == "0A" and f"socket:[{words[9]}]" in sockets
    ]


def config(folder, algorithm="fadamgc", **more):
    values = {
        "algorithm": algorithm,
        "eta_l": 0.003 if "adam" in algorithm else 0.1,
        "folder": str(folder),
        "rounds": 2,
        **({} if "local-epochs" in more else {"local-steps": 5}),
        "round-timeout": 60.0,
        "wait-timeout": 60.0,
    } | more
    return " ".join(
        f"{k}={json.dumps(v) if not isinstance(v, bool) else str(v).lower()}" for k, v in values.items()
    )


def command_of(pid):
    return Path(f"/proc/{pid}/cmdline").read_bytes()


def simulated(algorithm, rounds, codec=None, eval_clients=False):
    task = build_task(DigitsTask(data="digits", clients=3, alpha=0.5), 0)
    algo = fadamgc.make_algorithm(algorithm, eta_l=0.003 if "adam" in algorithm else 0.1, eta_g=1.0)
    settings = {"tracked": 2, "local_steps": 5, "batch_size": 16, "codec": codec}
    settings["eval_clients"] = eval_clients
    return fadamgc.simulate(algo, task, rounds=rounds, executor="loop", progress=False, **settings)


def server_of(folder):
    content, tensors = read_bundle(folder, "federation")
    return content, tensors


def check_in_step(federation, folder, algo):
    """y is the mean of the y_i that the server has counted."""
    content, tensors = server_of(folder)
    kind = example(algo, torch.zeros(1)).client
    found = []
    for i in range(3):
        kept = ClientStore(federation.folder / "states" / f"node-{i}", "flower-digits", i).load(kind)
        counted = Stamp(*content["counted"][str(i)]) if str(i) in content["counted"] else NEVER
        state = kept.pending_state if kept.pending == counted else kept.committed_state
        assert (kept.pending if kept.pending == counted else kept.committed) == counted
        found.append(torch.zeros_like(tensors["server.y"]) if state is None else state.y)
    torch.testing.assert_close(tensors["server.y"], torch.stack(found).mean(0), rtol=1e-4, atol=1e-7)


def check_numbers(folder, algorithm, codec=None, eval_clients=False):
    """Two rounds over the network are those of the simulator, and make a report."""
    content, tensors = server_of(folder)
    run = simulated(algorithm, 2, codec, eval_clients)
    torch.testing.assert_close(tensors["server.x"], run.x, rtol=1e-5, atol=1e-7)
    assert [r["test_accuracy"] for r in content["history"]] == [r.test_accuracy for r in run.history]
    assert [r["dropped"] for r in content["history"]] == [[], []]
    assert [r.get("metrics", {}) for r in content["history"]] == [
        pytest.approx(r.metrics, rel=1e-5) for r in run.history
    ]
    assert [r["bytes_up"] for r in content["history"]] == [r.bytes_up for r in run.history]
    write_report(folder)


def test_scaffold_has_the_simulators_numbers(federation, tmp_path):
    federation.up(3, wait=LIMIT)
    if Path("/proc/net/tcp").exists():
        addresses = listening(federation)
        assert len(addresses) >= 4
        assert set(addresses) == {"0100007F"}  # 127.0.0.1, and nothing beyond
    stranger = LoopbackFederation(tmp_path / "stranger")
    ensure_node_keys(stranger.keys, ["node-0"])
    check_stranger(federation, stranger, tmp_path)  # also without TLS
    preloaded = [pid for pid in federation.leftover_processes() if b"preloaded.py" in command_of(pid)]
    federation.run(APP, config(tmp_path / "server", "scaffold", **{"eval-clients": True}))
    check_numbers(tmp_path / "server", "scaffold", eval_clients=True)
    assert len(preloaded) == 3  # one per node, and all are still there
    assert all(b"preloaded.py" in command_of(pid) for pid in preloaded)

    lean = tmp_path / "lean-app"  # the same with codecs: fewer bytes, and again the simulator's numbers
    shutil.copytree(APP, lean)
    text = (
        (lean / "pyproject.toml").read_text().replace('experiment = "flower-digits"', 'experiment = "lean"')
    )
    (lean / "pyproject.toml").write_text(
        text + '\n[tool.flwr.app.config.codec]\ny = "int8"\ndy = "topk:0.1"\n'
    )
    federation.run(lean, config(tmp_path / "lean", "scaffold"))
    check_numbers(tmp_path / "lean", "scaffold", {"y": "int8", "dy": "topk:0.1"})


def wait_for(condition, what):
    until = time.monotonic() + LIMIT
    while not condition():
        assert time.monotonic() < until, f"{what} did not happen in {LIMIT} s"
        time.sleep(0.2)


def kill(federation, name):
    process = next(p for p in federation.read().processes if p.name == name)
    os.killpg(process.pid, signal.SIGKILL)
    wait_for(lambda: not process.alive, f"the end of {name}")


def start_again(federation, name):
    """Start a node again that has died; its state is in its files.

    A SuperLink accepts a node with a key again only when it has missed the dead one for a minute or so, and a
    node that is too early ends at once.
    """
    state = federation.read()
    i, link = int(name.removeprefix("node ")), state.processes[0].port
    others = FederationState(state.secure, [process for process in state.processes if process.name != name])
    until = time.monotonic() + 180
    while True:
        (port,) = free_ports(1)
        command = federation._node_command(i, len(others.processes), link, port, state.secure)
        process = federation._start(others, name, port, command).processes[-1]
        try:
            return _wait_until_registered(process, until - time.monotonic())
        except FadamgcError:
            process.signal(signal.SIGKILL)  # what it has started does not end by itself
            if time.monotonic() + 5 > until:
                raise
            time.sleep(5)


def rounds_done(folder):
    return server_of(folder)[0]["round"] if has_bundle(folder, "federation") else 0


def test_kills_lose_nothing_and_count_nothing_twice(federation, tmp_path):
    folder, algo = tmp_path / "server", fadamgc.FAdamGC()
    federation.up(3, wait=LIMIT)
    words = config(folder, rounds=4, **{"round-timeout": 30.0})
    going = threading.Thread(target=lambda: quietly(federation, words), daemon=True)
    going.start()
    wait_for(lambda: rounds_done(folder) >= 1, "the first round")
    kill(federation, "node 1")
    wait_for(lambda: rounds_done(folder) >= 2, "a round without node 1")
    start_again(federation, "node 1")
    wait_for(lambda: rounds_done(folder) >= 3, "a round after that")
    kill(federation, "superlink")
    going.join(LIMIT)
    federation.down()
    federation.up(3, wait=LIMIT)  # the nodes find their states in their files
    federation.run(APP, words)
    assert rounds_done(folder) == 4
    check_in_step(federation, folder, algo)
    content, _ = server_of(folder)
    assert content["attempt"] >= 2
    assert [r["round"] for r in content["history"]] == [1, 2, 3, 4]


def quietly(federation, words):
    try:
        federation.run(APP, words)
    except Exception as error:
        print(error, file=sys.stderr)


def check_stranger(federation, stranger, tmp_path):
    """With ca.crt and the address, but without the token: no key is registered, no app is run."""
    link, *nodes = federation.read().processes
    (stranger.folder / "flwr").mkdir(parents=True, exist_ok=True)
    shutil.copy(federation.folder / "flwr" / "config.toml", stranger.folder / "flwr")
    evil = f'folder="{tmp_path / "evil"}"'
    for words in (
        ["supernode", "register", str(stranger.keys / "node-0.pub"), FEDERATION_NAME],
        ["run", str(APP), FEDERATION_NAME, "--run-config", evil],
        ["supernode", "list", FEDERATION_NAME],
        ["ls", FEDERATION_NAME],
    ):
        with pytest.raises(FadamgcError, match="Authentication failed"):
            stranger.flwr(*words, timeout=LIMIT)
    root = federation.keys / "ca.crt" if federation.read().secure else None
    check_refusals(HOST, link.port, root)
    for node in nodes:
        check_refusals(HOST, node.port, None, [ACQUIRE_TASK])
    assert json.loads(federation.flwr("ls", FEDERATION_NAME, "--format", "json"))["runs"] == []
    listed = json.loads(federation.flwr("supernode", "list", FEDERATION_NAME, "--format", "json"))["nodes"]
    assert len(listed) == len(nodes)
    assert not (tmp_path / "evil").exists()


def check_private(folder):
    assert {stat.S_IMODE(path.stat().st_mode) for path in (folder, *folder.glob("*/"))} == {0o700}
    for part in ("", "keys", "logs", "states/node-0"):
        for path in (folder / part).glob("**/*" if part.startswith("states") else "*"):
            if path.is_file() and path.name != ".lock":
                assert stat.S_IMODE(path.stat().st_mode) == 0o600, path


def test_fadamgc_with_keys_has_the_simulators_numbers_and_no_strangers(federation, tmp_path):
    federation.up(3, secure=True, wait=LIMIT)
    link = federation.read().processes[0].port
    stranger = LoopbackFederation(tmp_path / "stranger")
    ensure_node_keys(stranger.keys, ["node-0"])
    check_stranger(federation, stranger, tmp_path)
    keys = stranger.keys
    (port,) = free_ports(1)
    command = [
        *(
            flower_command("flower-supernode"),
            "--superlink",
            f"{HOST}:{link}",
            "--host",
            HOST,
            "--port",
            str(port),
        ),
        *("--root-certificates", str(federation.folder / "keys" / "ca.crt")),
        *("--auth-supernode-private-key", str(keys / "node-0")),
    ]
    log = tmp_path / "stranger.log"
    with open(log, "wb") as file:
        child = subprocess.Popen(
            command, env=stranger.environment, stdout=file, stderr=file, start_new_session=True
        )
    try:
        assert child.wait(60) != 0, log.read_text()
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)  # and what it has started
        child.wait(10)
    federation.run(APP, config(tmp_path / "server", rounds=1))
    assert rounds_done(tmp_path / "server") == 1
    check_private(federation.folder)

    kill(federation, "node 1")
    start_again(federation, "node 1")  # with its key: it is the client it was, with its state
    federation.run(APP, config(tmp_path / "server", rounds=2))
    check_numbers(tmp_path / "server", "fadamgc")


def test_texts_over_two_nodes_send_adapters_only(federation, tmp_path, monkeypatch):
    pytest.importorskip("transformers", reason="transformers is not installed")
    sys.path.insert(0, str(Path(__file__).parents[1]))
    import sets
    import tiny

    monkeypatch.setenv("FADAMGC_DATA", str(sets.texts(tmp_path / "data")))
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path / "cache"))
    base = tiny.bert(tmp_path / "base")
    federation.up(2, wait=LIMIT)
    federation.run(
        APP.with_name("flower-sst2"),
        config(
            tmp_path / "server", rounds=2, **{"data.model": base, "data.train_samples": 40, "local-epochs": 1}
        ),
    )
    content, tensors = server_of(tmp_path / "server")
    spec = task_spec(
        data="glue/sst2", clients=2, alpha=0.5, model=base, upper_layers=1, length=32, train_samples=40
    )
    task = build_task(spec, 0)
    d = tensors["server.x"].numel()
    assert d == 2 * 2 * 8 * 16 + 2 * 16 + 2
    assert [r["bytes_down"] for r in content["history"]] == [2 * 2 * 4 * d] * 2
    assert [r["bytes_up"] for r in content["history"]] == [2 * 2 * 4 * d] * 2
    run = fadamgc.simulate(
        fadamgc.FAdamGC(eta_l=0.003),
        task,
        rounds=2,
        tracked=2,
        local_epochs=1,
        batch_size=16,
        executor="loop",
        progress=False,
    )
    torch.testing.assert_close(tensors["server.x"], run.x, rtol=1e-4, atol=1e-6)


def test_the_example_of_the_gallery_has_the_simulators_numbers(tmp_path):
    """``examples/federation.py``, which starts and stops a federation with the command."""
    figure = tmp_path / "figure.png"
    command = [sys.executable, APP.with_name("federation.py"), figure]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    (difference,) = re.findall(r"largest difference of the train losses: (\S+)", done.stdout)
    assert float(difference) < 1e-5
    assert figure.read_bytes().startswith(b"\x89PNG")
