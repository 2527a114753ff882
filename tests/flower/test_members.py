"""Who a client is: its weight by size, and the key that it is bound to."""

from __future__ import annotations

import hashlib
import logging

import pytest

from fadamgc.errors import InputError
from fadamgc.flower.protocol import RefusedError

flwr = pytest.importorskip("flwr", reason="Flower is not installed")


from fadamgc.flower.config import read_config  # noqa: E402
from fadamgc.flower.strategy import TooFewClientsError  # noqa: E402
from in_process_grid import make  # noqa: E402
from in_process_link import linked  # noqa: E402
from world import World  # noqa: E402

# Weights by size.


def test_a_client_cannot_give_itself_all_the_weight(tmp_path):
    for name, order in (("last", (0, 1, 2)), ("first", (2, 0, 1))):
        world = World(tmp_path / name, weights="size")
        says = dict(enumerate((6, 20, 10**9)))
        refused = []
        for i in order:
            try:
                world.server.admit(i, says[i])
            except RefusedError as error:
                refused.append(str(error))
        assert world.server.members.samples == {0: 6, 1: 20}
        assert world.server.needs_all
        with pytest.raises(
            RefusedError, match="client 2 has 1000000000 samples, more than 100 times the median"
        ):
            world.server.admit(2, 10**9)
        world.server.admit(2, 11)
        assert not world.server.needs_all
    known = World(tmp_path / "known", max_samples=100)
    with pytest.raises(RefusedError, match="client 1 has 101 samples, more than max_samples=100"):
        known.server.admit(1, 101)
    free = World(tmp_path / "free", weights="size", max_size_ratio=0.0)
    for i, size in enumerate((6, 20, 10**9)):
        free.server.admit(i, size)
    assert not free.server.needs_all


@pytest.mark.slow
@pytest.mark.parametrize("liar", [0, 2])
def test_a_node_with_too_many_samples_is_turned_away(liar, tmp_path, caplog):
    _, grid, strategy = make(tmp_path, weights="size", wait_timeout=0.5)
    honest = grid.app

    def app(message, context):
        reply = honest(message, context)
        if message.metadata.message_type == "query" and context.node_config["partition-id"] == liar:
            reply.content["hello"]["samples"] = 10**9
        return reply

    grid.app = app
    with pytest.raises(TooFewClientsError, match=r"2 of 3 clients are connected.*samples"):
        strategy.start(grid)
    assert strategy.available == sorted({0, 1, 2} - {liar})


# Keys.


@pytest.mark.slow
def test_a_client_is_bound_to_the_key_that_first_spoke_for_it(tmp_path, caplog):
    _, grid, first = linked(tmp_path, rounds=4, min_clients=2)
    first.bind_clients = True
    link = grid._client
    link.nodes[999], link.keys[999] = 0, b"stranger"  # it also says that it is client 0

    def gone(record):
        if record.round == 2:  # the honest node is away, and the stranger is alone
            del link.nodes[100]

    first.on_round = gone
    with caplog.at_level(logging.WARNING, logger="fadamgc"):
        first.start(grid)
    assert [r.sampled for r in first.coordinator.history] == [(0, 1, 2)] * 2 + [(1, 2)] * 2
    digest = hashlib.sha256(b"key 100").hexdigest()
    assert f"that client is bound to key {digest[:16]}" in caplog.text
    assert "unbind-clients = '0'" in caplog.text

    def again(clients, **options):
        _, other, strategy = linked(tmp_path, **options)
        strategy.bind_clients = True
        other._client.nodes, other._client.keys = clients, link.keys | dict.fromkeys(clients, b"new")
        return other, strategy

    # After a restart of the server, and under another node id, the stranger is still refused.
    other, strategy = again({555: 0, 101: 1, 102: 2}, rounds=5, min_clients=2)
    other._client.keys |= {555: b"stranger", 101: b"key 101", 102: b"key 102"}
    strategy.start(other)
    assert strategy.coordinator.history[-1].sampled == (1, 2)
    # The honest node comes back under another id, with its key.
    other, strategy = again({777: 0, 101: 1, 102: 2}, rounds=6, min_clients=2)
    other._client.keys |= {777: b"key 100", 101: b"key 101", 102: b"key 102"}
    strategy.start(other)
    assert strategy.coordinator.history[-1].sampled == (0, 1, 2)
    # A registered node cannot change its number.
    strategy.coordinator.members.keys.pop(2)
    with pytest.raises(RefusedError, match="is bound to client 0.*unbind-clients = '0'"):
        strategy.coordinator.check_key(2, hashlib.sha256(b"key 100").hexdigest())


def test_an_operator_can_replace_a_node(tmp_path):
    world = World(tmp_path)
    server = world.server
    server.members.bind(0, "old")
    world.round()
    world.start()
    with pytest.raises(RefusedError, match="that client is bound to key old, not new"):
        world.server.check_key(0, "new")
    with pytest.raises(RefusedError, match="it shows no key"):
        world.server.check_key(1, "")
    world.start(reset_states=True)  # a reset of states opens no door
    with pytest.raises(RefusedError, match="unbind-clients = '0'"):
        world.server.check_key(0, "new")
    world.start(unbind_clients="0")
    world.server.check_key(0, "new")
    world.server.members.bind(0, "new")
    world.server.check_key(0, "new")


def test_whether_clients_are_bound(monkeypatch):
    def binds(choice):
        return read_config({"bind-clients": choice}).binds_clients

    def unbound(clients):
        return read_config({"unbind-clients": clients}).unbound_clients

    assert (binds("on"), binds("off"), binds("auto")) == (True, False, False)
    monkeypatch.setenv("FADAMGC_BIND_CLIENTS", "on")
    assert (binds("off"), binds("auto")) == (False, True)
    with pytest.raises(InputError, match="config bind-clients='yes' is not accepted"):
        binds("yes")
    assert unbound("0, 2") == [0, 2]
    assert unbound(1) == [1]
    assert unbound("all") == [0, 1, 2]
    assert unbound("") == []
    with pytest.raises(InputError, match="config unbind-clients='3' is not accepted"):
        unbound("3")
    assert read_config({}).options.bind_clients == "auto"
