"""Processes that are forked with their imports done, one per message; and Flower's own command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fadamgc.flower import preloaded

APP = """
import json, os, sys, time
time.sleep(0.3)  # a slow import
messages = []

def run():
    messages.append(sys.argv[1:])
    path = sys.argv[1]
    with open(path + ".part", "w") as file:
        json.dump([sys.argv, messages, os.getpid(), os.getppid()], file)
    os.rename(path + ".part", path)
    raise SystemExit(3)
"""
PARENT = """
import os, subprocess, sys
subprocess.Popen(sys.argv[1:])
sys.stdin.read()
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="servers that fork are for Linux")


def result_of(file):
    until = time.monotonic() + 30
    while not file.exists():
        assert time.monotonic() < until
        time.sleep(0.02)
    return json.loads(file.read_text())


@pytest.fixture
def server(tmp_path):
    """A server whose parent ends when its input does; its folder, and the parent."""
    (tmp_path / "some_app.py").write_text(APP)
    folder = tmp_path / "commands"
    folder.mkdir()
    words = [sys.executable, "-P", preloaded.__file__, "serve", str(folder), "json", "some_app:run"]
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, *words],
        env=os.environ | {"PYTHONPATH": str(tmp_path)},
        stdin=subprocess.PIPE,
    )
    until = time.monotonic() + 30
    while not (folder / "socket").exists():
        assert time.monotonic() < until
        time.sleep(0.01)
    yield folder, parent
    parent.stdin.close()
    parent.wait()


def test_each_message_has_a_process_of_its_own(server, tmp_path):
    folder, parent = server
    files = [tmp_path / f"message-{i}" for i in range(3)]
    for file in files:  # the first asks before the imports are done
        assert preloaded.ask(folder, [str(file), "--token", "a b"])
    results = [result_of(file) for file in files]
    for file, (argv, messages, _, _) in zip(files, results, strict=True):
        assert argv == ["flwr-clientapp", str(file), "--token", "a b"]
        assert messages == [argv[1:]]  # nothing of an earlier message is left
    assert len({pid for _, _, pid, _ in results}) == 3
    assert len({server_pid for *_, server_pid in results}) == 1
    parent.stdin.close()
    until = time.monotonic() + 30
    while folder.exists():  # the server has seen the end of its parent
        assert time.monotonic() < until
        time.sleep(0.05)
    assert not preloaded.ask(folder, ["late"])


def test_without_a_server_flowers_own_command_starts(tmp_path, monkeypatch):
    monkeypatch.setenv(preloaded.VARIABLE, "")
    assert preloaded.start() is None
    real = tmp_path / "bin"
    real.mkdir()
    (real / "flwr-clientapp").write_text(f'#!/bin/sh\necho "$@" > {tmp_path}/options\n')
    (real / "flwr-clientapp").chmod(0o700)
    monkeypatch.setenv("PATH", f"{real}{os.pathsep}{os.environ['PATH']}")
    folder = tmp_path / "commands"
    folder.mkdir()
    preloaded.write_command(folder)
    command = [str(folder / "flwr-clientapp"), "--token", "secret", "--insecure"]
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    subprocess.run(command, check=True, env=os.environ | {"PATH": path}, timeout=60)
    assert (tmp_path / "options").read_text() == "--token secret --insecure\n"


def test_a_server_that_is_stopped_removes_its_folder(server):
    folder, parent = server
    (pid,) = map(int, Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split())
    time.sleep(0.1)
    until = time.monotonic() + 30
    while folder.exists():
        assert time.monotonic() < until
        os.kill(pid, signal.SIGTERM)
        time.sleep(0.05)
