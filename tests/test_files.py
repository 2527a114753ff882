"""Locks on folders, and the user's folders."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from fadamgc.errors import CheckpointInUseError, UnwritableError
from fadamgc.files import lock, user_folder


def test_a_locked_folder_is_refused_by_name_after_the_wait(tmp_path):
    with lock(tmp_path):
        start = time.monotonic()
        with pytest.raises(CheckpointInUseError, match=r"is in use by another run.*waited 0\.2 s") as error:
            lock(tmp_path, seconds=0.2)
        assert 0.2 <= time.monotonic() - start < 10
        assert str(tmp_path) in str(error.value)
        with pytest.raises(CheckpointInUseError, match="in this process or another; wait for it"):
            lock(tmp_path)
    lock(tmp_path).close()


def test_a_lock_ends_with_its_block_and_with_close(tmp_path):
    with pytest.raises(ZeroDivisionError), lock(tmp_path):
        raise ZeroDivisionError
    first = lock(tmp_path)
    first.close()
    with lock(tmp_path):
        pass


@pytest.mark.slow
def test_a_killed_process_releases_its_lock(tmp_path):
    code = (
        "import pathlib, sys, time; from fadamgc.files import lock\n"
        "held = lock(pathlib.Path(sys.argv[1])); print('locked', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"locked\n"
        with pytest.raises(CheckpointInUseError):
            lock(tmp_path)
        process.kill()
    with lock(tmp_path, seconds=10):
        pass


def test_a_lock_file_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(UnwritableError, match="file cannot be written"):
        lock(tmp_path / "file")


def test_the_users_folders_follow_the_environment(monkeypatch):
    for kind, default in (("cache", ".cache"), ("config", ".config"), ("state", ".local/state")):
        variable = f"XDG_{kind.upper()}_HOME"
        monkeypatch.setenv(variable, "/somewhere")
        assert user_folder(kind) == Path("/somewhere/fadamgc")
        monkeypatch.setenv(variable, "")
        assert user_folder(kind) == Path.home() / default / "fadamgc"
