"""Files of a federation are for their owner alone."""

from __future__ import annotations

import os

import pytest
import torch

import fadamgc
from fadamgc.algorithm import example
from fadamgc.errors import CheckpointError
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.protocol import Stamp, StoredState
from fadamgc.flower.server_store import ServerStore
from private_files import check_private, mode


@pytest.fixture
def everybody_may():
    before = os.umask(0)
    yield
    os.umask(before)


def kept():
    state = example(fadamgc.FAdamGC(), torch.arange(3.0)).client
    return StoredState(generation=1, seen=Stamp(1, 1), committed=Stamp(1, 1), committed_state=state)


@pytest.mark.usefixtures("everybody_may")
def test_a_clients_states_are_for_its_owner_alone(tmp_path):
    keeper = ClientStore(tmp_path / "states", "exp", 0)
    with keeper.locked():
        keeper.save(kept())
    check_private(tmp_path / "states" / "exp")
    assert torch.equal(keeper.load(kept().committed_state).committed_state.y, kept().committed_state.y)


@pytest.mark.usefixtures("everybody_may")
def test_a_servers_checkpoint_is_for_its_owner_alone(tmp_path):
    store = ServerStore(tmp_path / "server")
    store.take_over()
    store.write({"round": 1}, {"x": torch.ones(2)})
    check_private(tmp_path / "server")


def test_folders_of_an_earlier_version_are_tightened_when_opened(tmp_path):
    keeper, store = ClientStore(tmp_path / "states", "exp", 0), ServerStore(tmp_path / "server")
    for folder in (keeper.folder.parent, keeper.folder, store.folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
    with keeper.locked():
        pass
    store.take_over()
    assert [mode(f) for f in (keeper.folder.parent, keeper.folder, store.folder)] == [0o700] * 3


@pytest.mark.usefixtures("everybody_may")
def test_a_private_file_is_never_readable_by_others(tmp_path):
    from fadamgc.files import write_atomic

    path, modes = tmp_path / "key", []
    path.write_bytes(b"old")
    assert mode(path) == 0o666
    write_atomic(path, lambda file: modes.append(mode(file.fileno())), private=True)
    assert [*modes, mode(path)] == [0o600, 0o600]
    write_atomic(path, b"new")
    assert mode(path) == 0o666  # as before, where nobody asks for it


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs a second user")
def test_somebody_elses_folder_is_left_alone(tmp_path):
    from fadamgc.files import private_folder

    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    (tmp_path / "theirs").chmod(0o755)
    private_folder(tmp_path / "theirs")
    assert mode(tmp_path / "theirs") == 0o755


def test_a_folder_that_cannot_be_made_private_is_an_error(tmp_path):
    from fadamgc.files import private_folder

    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file.* cannot be (made private|written)"):
        private_folder(tmp_path / "file" / "folder")
