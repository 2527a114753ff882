"""Collecting replies: stalled uploads, replies of any size, reasons of any length."""

from __future__ import annotations

import logging
import threading

import pytest
import torch

import fadamgc
from problems import class_task

flwr = pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Array, Error, Message, RecordDict  # noqa: E402

from fadamgc.flower.inbox import ObjectInbox, SizeLimit, TooLargeError, make_inbox  # noqa: E402
from fadamgc.flower.strategy import BARRED_ROUNDS  # noqa: E402
from fadamgc.flower.wire import ARRAY_ENCODING  # noqa: E402
from in_process_grid import LOCAL, make  # noqa: E402
from in_process_link import linked  # noqa: E402
from world import SIZES  # noqa: E402


def simulated(task, rounds, **more):
    return fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=rounds, executor="loop", **LOCAL, **more)


def test_a_federation_on_flowers_own_grid_gives_the_simulators_numbers(tmp_path):
    task, grid, strategy = linked(tmp_path)
    assert isinstance(make_inbox(grid), ObjectInbox)
    strategy.start(grid)
    run = simulated(task, 3)
    assert torch.equal(strategy.coordinator.server.x, run.x)
    assert all(not record.dropped for record in strategy.coordinator.history)


# One stalled upload.


def test_a_stalled_answer_that_comes_at_last_is_not_used(tmp_path):
    _, grid, strategy = linked(tmp_path, rounds=6, wait_timeout=0.05)
    link = grid._client
    link.stalled = {("train", 0)}

    def free(record):
        if record.round == 2:
            link.stalled = set()
            link.objects |= link.late

    strategy.on_round = free
    strategy.start(grid)
    history = strategy.coordinator.history
    assert history[0].dropped == (0,)
    assert history[-1].sampled == (0, 1, 2)  # it takes part again, and its state fits the server's
    assert [record.round for record in history if record.dropped] in ([1], [1, 2])
    took = [([i for i in r.sampled if i not in r.dropped],) * 2 for r in history]
    run = fadamgc.simulate(
        fadamgc.FAdamGC(), class_task(sizes=SIZES), schedule=took, executor="loop", **LOCAL
    )
    assert torch.equal(strategy.coordinator.server.x, run.x)


@pytest.mark.slow
def test_on_flowers_own_grid_a_stalled_client_needs_no_thread(tmp_path):
    _, grid, strategy = linked(tmp_path, clients=10, rounds=4, min_clients=9)
    grid._client.stalled = {("train", 0)}
    before = set(threading.enumerate())
    strategy.start(grid)
    for record in strategy.coordinator.history:
        assert record.dropped in ((), (0,))
        assert set(record.sampled) | {0} == set(range(10))
    assert strategy.coordinator.history[0].dropped == (0,)
    left = {thread.name.split("-")[0] for thread in set(threading.enumerate()) - before}
    assert left <= {"ThreadPoolExecutor"}  # with which Flower sends


# Replies of any size.


def large(app, client, size):
    """The app of a client that answers with far more than it was asked for."""

    def answer(message, context):
        reply = app(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == client:
            reply.content["up"]["dx"] = Array("uint8", (size,), ARRAY_ENCODING, bytes(size))
        return reply

    return answer


@pytest.mark.slow
def test_a_reply_that_is_too_large_is_not_pulled(tmp_path, caplog):
    rounds = BARRED_ROUNDS + 3
    _, grid, strategy = linked(tmp_path, rounds=rounds, min_clients=2)
    size = 8 << 20
    grid._client.app = large(grid._client.app, 0, size)
    strategy.start(grid)
    assert grid._client.pulled < size / 4
    history = strategy.coordinator.history
    assert history[0].dropped == (0,)
    assert all(record.sampled == (1, 2) for record in history[1:BARRED_ROUNDS])  # it is not asked for a while
    assert any(0 in record.dropped for record in history[BARRED_ROUNDS:])  # and then again
    assert "its reply is not pulled: one of its parts has" in caplog.text
    assert "it is not asked before round 11" in caplog.text
    assert any("not pulled" in said for said in strategy.coordinator.refusals)
    assert len(grid._client.confirmed) == grid._client.answered  # the SuperLink need not keep any


def test_on_another_grid_too_large_a_reply_bars_its_node(tmp_path):
    _, grid, strategy = make(tmp_path, rounds=4, min_clients=2)
    grid.app = large(grid.app, 0, 1 << 20)
    strategy.start(grid)
    assert [record.sampled for record in strategy.coordinator.history] == [(0, 1, 2), *[(1, 2)] * 3]
    assert grid.sent.count(("train", 0)) == 1
    assert grid.sent.count(("query", 0)) == 1


def test_an_array_that_names_one_chunk_many_times_is_too_large(tmp_path):
    _, grid, strategy = linked(tmp_path, rounds=1, min_clients=2)
    link, app = grid._client, grid._client.app

    def bomb(message, context):
        reply = app(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 0:
            array = reply.content["up"]["dx"]
            chunk = array.slice_array()[0]
            array.__dict__["_chunks"] = [chunk] * 10_000
        return reply

    link.app = bomb
    strategy.start(grid)
    assert strategy.coordinator.history[0].dropped == (0,)
    assert "its reply is not pulled: it has at least" in strategy.coordinator.refusals[0]


def test_without_a_limit_on_responses_no_run_starts(tmp_path):
    _, grid, strategy = linked(tmp_path)
    del grid._client._client  # as if another version of Flower had another client
    with pytest.raises(AttributeError, match="_client"):
        strategy.start(grid)
    assert strategy.coordinator.history == []


def test_limits_leave_room_for_what_is_asked_for():
    limit = SizeLimit(2, 1 << 20)
    limit.check(20, (1 << 20) + 4000)
    with pytest.raises(TooLargeError, match="it has 2000 parts"):
        limit.check(2000, 0)
    with pytest.raises(TooLargeError, match="it has at least 2097152 bytes"):
        limit.check(1, 2 << 20)


def test_arrays_that_were_not_asked_for_are_not_read(tmp_path, monkeypatch):
    _, grid, strategy = make(tmp_path, rounds=1, min_clients=2)
    app, read = grid.app, []
    monkeypatch.setattr("fadamgc.flower.wire._tensor", spy(read))

    def more(message, context):
        reply = app(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 0:
            reply.content["up"]["another"] = reply.content["up"]["dx"]
        return reply

    grid.app = more
    strategy.start(grid)
    assert strategy.coordinator.history[0].dropped == (0,)
    assert "it has ['another', 'dx', 'dy'], not ['dx', 'dy']" in strategy.coordinator.refusals[0]
    assert "another" not in read


def spy(read):
    from fadamgc.flower import wire as records

    real = records._tensor

    def tensor(name, array):
        read.append(name)
        return real(name, array)

    return tensor


def test_reasons_of_clients_are_short_and_on_one_line(tmp_path, caplog):
    _, grid, strategy = make(tmp_path, rounds=2, min_clients=1)
    honest = grid.app
    reason = "\x1b[2J broken\nround 7 of 7, all is well " + 10**6 * "x"

    def app(message, context):
        client = context.node_config["partition-id"]
        if message.metadata.message_type == "query" or client == 2:
            return honest(message, context)
        if client == 0:
            reply = Message(Error(1, reason), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1
            return reply
        reply = honest(message, context)
        reply.content = fadamgc.flower.wire.refusal_content("kind", reason)
        return reply

    grid.app = app
    with caplog.at_level(logging.WARNING, logger="fadamgc"):
        strategy.start(grid)
    assert any("broken" in record.getMessage() for record in caplog.records)
    for record in caplog.records:
        assert len(record.getMessage()) < 700
        assert record.getMessage().isprintable()
    assert all(text.isprintable() and len(text) < 700 for text in strategy.coordinator.refusals)


def test_a_reply_to_another_nodes_message_is_refused(tmp_path):
    _, grid, strategy = make(tmp_path, rounds=1, min_clients=1)
    honest, sent = grid.app, {}

    def app(message, context):
        reply = honest(message, context)
        client = context.node_config["partition-id"]
        if message.metadata.message_type == "train":
            sent[client] = message.metadata.message_id
            if client == 1:  # a message that was sent to client 0
                reply.metadata.__dict__["_reply_to_message_id"] = sent[0]
                reply.content["reply"]["client"] = 0
                reply.content["up"]["dx"] = Array("float32", (75,), ARRAY_ENCODING, bytes(300))
        if message.metadata.message_type == "train" and client == 0:
            grid.deaf = {0}
            return reply
        return reply

    grid.app = app
    strategy.start(grid)
    (record,) = strategy.coordinator.history
    assert record.dropped == (1,)
    assert "is not to the message it was sent" in strategy.coordinator.refusals[0]


def test_replies_that_come_while_others_are_collected_are_not_lost(tmp_path):
    messages = [
        Message(RecordDict(), dst_node_id=100 + i, message_type="query", ttl=9.0, group_id="1")
        for i in range(2)
    ]
    _, grid, _ = linked(tmp_path)
    objects, link = make_inbox(grid), grid._client
    link.stalled = {("query", 0)}
    late, other = grid.push_messages(messages)
    assert objects.collect({late: SizeLimit()}) == []
    assert len(objects.collect({other: SizeLimit()})) == 1
    name = next(name for name, content in link.objects.items() if content is None)
    link.objects[name] = link.late[name]
    ((identity, reply),) = objects.collect({late: SizeLimit()})
    assert (identity, reply.content["hello"]["client"]) == (late, 0)
