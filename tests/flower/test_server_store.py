"""The server's checkpoints: going back to an earlier one, resets, clocks."""

from __future__ import annotations

import math
import time

import pytest
import torch

import fadamgc
from fadamgc.errors import CheckpointError, InputError
from fadamgc.flower.protocol import RefusedError, Request, Stamp, StoredState, resolve_pending
from fadamgc.flower.server_store import ServerStore
from problems import class_task

flwr = pytest.importorskip("flwr", reason="Flower is not installed")


from fadamgc.flower.config import read_config  # noqa: E402
from fadamgc.flower.coordinator import Coordinator  # noqa: E402
from fadamgc.flower.wire import TrainRequest, read_request, request_content  # noqa: E402
from world import SIZES, World  # noqa: E402


def test_what_a_killed_server_left_while_it_read_a_checkpoint_is_removed(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3)
    left = tmp_path / "server" / ".round-killed"
    left.mkdir()
    world.start()
    assert not left.exists()


# Going back.


@pytest.mark.slow
def test_the_last_checkpoints_are_kept_and_can_be_restored(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3, rounds=9)
    x = {}
    for t in range(1, 6):
        world.round()
        x[t] = world.server.server.x
        if t == 4:
            world.start()  # a restart in between costs none of them
    store = ServerStore(tmp_path / "server", 3)
    assert store.rounds() == [3, 4, 5]
    assert len(list((tmp_path / "server").glob("round-*"))) == 6
    with pytest.raises(CheckpointError, match=r"restore-round=1 is not accepted; .* of rounds: 3, 4, 5"):
        world.start(restore_round=1)
    generation = world.server.generation
    world.start(restore_round=3)
    assert (world.server.t, len(world.server.history)) == (3, 3)
    assert torch.equal(world.server.server.x, x[3])
    assert not world.server.server.y.any()
    assert world.server.generation > generation
    for t in range(4, 7):  # clients that have counted rounds 4 and 5 take part, with new states
        assert world.round().dropped == ()
        mean = torch.stack([state.y for state in world.states()]).mean(0)
        torch.testing.assert_close(world.server.server.y, mean, rtol=1e-10, atol=1e-12)
        assert world.server.t == t
    x[6] = world.server.server.x
    world.start()  # the newest is that of after going back
    assert world.server.t == 6
    assert torch.equal(world.server.server.x, x[6])
    assert store.rounds() == [4, 5, 6]
    world.start(restore_round=5)
    assert not torch.equal(world.server.server.x, x[5])  # the round 5 of after going back
    world.round()


def test_the_config_sets_bounds_and_the_round_to_restore(tmp_path):
    task = class_task(sizes=SIZES)
    config = {"experiment": "test", "local-steps": 3, "rounds": 4, "checkpoints": 2}

    def started(**more):
        more = {key.replace("_", "-"): value for key, value in more.items()}
        return Coordinator(task, read_config(config | more), tmp_path)

    server = started()
    limits = server.checks.max_norm_ratio, server.members.max_samples, server.members.max_size_ratio
    assert limits == (100, math.inf, 100)
    for _ in range(3):
        server.ask([])
        server.close()
    assert started(restore_round=2).t == 2
    assert started().t == 2
    free = started(max_norm_ratio=0.0, max_size_ratio=0.0, max_samples=50, unbind_clients="all")
    limits = free.checks.max_norm_ratio, free.members.max_samples, free.members.max_size_ratio
    assert limits == (math.inf, 50, math.inf)


def test_a_federation_with_a_damaged_checkpoint_can_be_restored(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3, rounds=9)
    for _ in range(3):
        world.round()
    newest = tmp_path / "server" / "federation.json"
    text = newest.read_text()
    newest.unlink()  # the kept one is another name of the same file
    newest.write_text(text[:100])
    with pytest.raises(CheckpointError, match="truncated"):
        world.start()
    world.start(restore_round=2)
    assert world.server.t == 2
    world.round()
    mean = torch.stack([state.y for state in world.states()]).mean(0)
    torch.testing.assert_close(world.server.server.y, mean, rtol=1e-10, atol=1e-12)


def test_a_server_killed_while_it_keeps_a_checkpoint_resumes(tmp_path, monkeypatch):
    world = World(tmp_path, sampled=3, tracked=3, rounds=9)
    world.round()
    with monkeypatch.context() as patched:
        patched.setattr(
            "fadamgc.flower.server_store._link", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            world.round()
    world.start()
    assert world.server.t == 2
    world.check()
    world.round()
    world.check()
    assert ServerStore(tmp_path / "server", 3).rounds() == [1, 2, 3]


def test_one_checkpoint_is_enough_for_those_who_want_no_more(tmp_path):
    world = World(tmp_path, checkpoints=1)
    world.round()
    assert not list((tmp_path / "server").glob("round-*"))
    with pytest.raises(CheckpointError, match="of rounds: none"):
        world.start(restore_round=0)
    with pytest.raises(InputError, match="checkpoints=0 is not accepted"):
        world.start(checkpoints=0)


def test_an_algorithm_that_begins_with_gradients_cannot_be_restored(tmp_path):
    world = World(tmp_path, fadamgc.FAdamGC(init="gradient"))
    world.setup()
    world.round()
    with pytest.raises(InputError, match="cannot be reset with another model"):
        world.start(restore_round=1)


# Clocks.


def test_a_reset_with_a_clock_that_is_days_ahead_blocks_nobody(tmp_path, monkeypatch):
    world = World(tmp_path, sampled=3, tracked=3, rounds=9)
    world.round()
    now = time.time()
    with monkeypatch.context() as patched:
        patched.setattr("fadamgc.flower.coordinator.time.time", lambda: now + 400 * 24 * 3600)
        world.start(reset_states=True)
    ahead = world.server.generation
    for message in world.messages():
        train = TrainRequest(message[0].request, True, world.algo, world.settings, *message[1:])
        assert read_request(request_content(train)).request == message[0].request  # as a client sees it
    world.round()
    world.start(reset_states=True)  # with the right clock
    assert world.server.generation == ahead + 1
    world.round()
    mean = torch.stack([state.y for state in world.states()]).mean(0)
    torch.testing.assert_close(world.server.server.y, mean, rtol=1e-10, atol=1e-12)


def test_states_of_an_earlier_generation_are_accepted():
    before = StoredState(1_700_000_000, Stamp(3, 1), Stamp(3, 1), "state")  # as 0.1 wrote them
    same = resolve_pending(before, Request("test", 0, 1_700_000_000, Stamp(4, 1), Stamp(3, 1)))
    assert same.committed_state == "state"
    reset = resolve_pending(before, Request("test", 0, 1_700_000_001, Stamp(4, 2), Stamp(0, 0)))
    assert reset.committed_state is None
    with pytest.raises(RefusedError, match=r"generation 1700000000.*its clock was ahead"):
        resolve_pending(before, Request("test", 0, 5, Stamp(4, 1), Stamp(3, 1)))


def test_a_checkpoint_of_the_version_before_is_read(tmp_path, monkeypatch):
    world = World(tmp_path, sampled=3, tracked=3)
    real = ServerStore.write

    def write(store, content, tensors):
        real(store, {k: v for k, v in content.items() if k not in ("scales", "keys")}, tensors)

    with monkeypatch.context() as patched:
        patched.setattr(ServerStore, "write", write)
        world.round()
    world.start()
    assert world.server.checks.scales == {}
    world.round()
    world.check()
