"""The loop over rounds on Flower: the simulator's numbers, waiting, and nodes that cannot be trusted."""

from __future__ import annotations

import time

import pytest
import torch
from torch.utils.data import ConcatDataset, TensorDataset

import fadamgc

flwr = pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message  # noqa: E402

from fadamgc.errors import CheckpointError, InputError  # noqa: E402
from fadamgc.flower.client_round import LocalClient  # noqa: E402
from fadamgc.flower.clientapp import client_app, client_number  # noqa: E402
from fadamgc.flower.strategy import TooFewClientsError  # noqa: E402
from fadamgc.flower.wire import (  # noqa: E402
    ARRAY_ENCODING,
    from_array_record,
    to_array_record,
)
from in_process_grid import LOCAL, SIZES, Here, app_of, held, make  # noqa: E402
from in_process_link import linked  # noqa: E402
from problems import REPRESENTATIVES, class_task  # noqa: E402

# The same numbers.


@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_a_federation_gives_the_simulators_numbers(name, tmp_path):
    algo = fadamgc.make_algorithm(name)  # gradients to start from: see the next test
    few = {} if algo.full_participation else {"sampled": 2, "tracked": 1}
    task, grid, strategy = make(tmp_path, algo, min_clients=3 if algo.full_participation else 1, **few)
    result = strategy.start(grid)
    run = fadamgc.simulate(algo, task, rounds=3, executor="loop", **LOCAL, **few)
    c = strategy.coordinator
    assert torch.equal(c.server.x, run.x)
    assert [(r.test_accuracy, r.sampled, r.work) for r in c.history] == [
        (r.test_accuracy, r.sampled, r.work) for r in run.history
    ]
    assert torch.equal(from_array_record(result.arrays)["x"], run.x)
    assert list(result.train_metrics_clientapp) == [1, 2, 3]


def test_nodes_compute_the_model_as_the_server_says(tmp_path):
    task, grid, strategy = make(tmp_path, fadamgc.FedAvg(), autocast="bf16")
    strategy.start(grid)
    run, plain = (
        fadamgc.simulate(fadamgc.FedAvg(), task, rounds=3, executor="loop", autocast=autocast, **LOCAL)
        for autocast in ("bf16", None)
    )
    x = strategy.coordinator.server.x
    assert float((x - run.x).norm()) < 0.1 * float((x - plain.x).norm())


def jitter(x, y):
    return x + torch.randn_like(x), y


@pytest.mark.parametrize("lazy", [False, True])
def test_a_node_may_load_a_task_with_a_transform(tmp_path, lazy):
    def app(task):
        def load(context):
            data = TensorDataset(*task.pairs[client_number(context)])
            data = ConcatDataset([data]) if lazy else data  # not a TensorDataset, so read per batch
            return fadamgc.Task(task.model, task.loss, [data], transform=jitter, lazy=lazy)

        return client_app(load)

    task, grid, strategy = make(tmp_path, fadamgc.FAdamGC(), app=app)
    strategy.start(grid)
    same = fadamgc.Task(task.model, task.loss, task.pairs, task.test_pair, transform=jitter)
    run = fadamgc.simulate(fadamgc.FAdamGC(), same, rounds=3, executor="loop", **LOCAL)
    assert torch.equal(strategy.coordinator.server.x, run.x)
    plain = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=3, executor="loop", **LOCAL)
    assert not torch.equal(run.x, plain.x)


def test_a_node_has_the_data_of_one_client(tmp_path):
    _, grid, strategy = make(tmp_path, app=lambda task: client_app(lambda context: task), wait_timeout=0.1)
    with pytest.raises(TooFewClientsError):
        strategy.start(grid)
    with pytest.raises(fadamgc.InputError, match="has 3 clients; a node has the data of one"):
        LocalClient(strategy.coordinator.task, 0)


def test_an_algorithm_that_begins_with_gradients_waits_for_all(tmp_path):
    algo = fadamgc.FAdamGC(init="gradient")
    task, grid, strategy = make(tmp_path, algo, sampled=2)
    strategy.start(grid)
    run = fadamgc.simulate(algo, task, rounds=3, executor="loop", sampled=2, **LOCAL)
    torch.testing.assert_close(strategy.coordinator.server.x, run.x)
    _, grid, strategy = make(tmp_path / "other", algo, sampled=2, below_minimum="skip")
    grid.deaf = {1}
    with pytest.raises(TooFewClientsError, match="2 of 3 clients are connected, but round 1 needs 3"):
        strategy.start(grid)


def test_what_is_sent_in_a_run_is_what_its_history_says(tmp_path):
    _, grid, strategy = make(tmp_path, sampled=2, tracked=1)
    up, down = [], []
    push, pull = grid.push_messages, grid.pull_messages

    def counted_push(messages):
        down.extend(held(m.content) for m in messages)
        return push(messages)

    def counted_pull(ids):
        replies = pull(ids)
        up.extend(held(m.content) for m in replies)
        return replies

    grid.push_messages, grid.pull_messages = counted_push, counted_pull
    strategy.start(grid)
    history = strategy.coordinator.history
    assert (sum(down), sum(up)) == (sum(r.bytes_down for r in history), sum(r.bytes_up for r in history))


# Waiting ends.


def test_a_silent_client_is_not_asked_again_until_it_answers(tmp_path):
    _, grid, strategy = make(tmp_path, rounds=6, wait_timeout=0.05)

    def between(record):
        grid.deaf = {1} if record.round in (1, 2) else set()
        time.sleep(0.06)  # what was sent in vain is given up

    strategy.on_round = between
    strategy.start(grid)
    records = strategy.coordinator.history
    assert [r.dropped for r in records[:2]] == [(), (1,)]
    assert records[2].sampled == (0, 2)
    assert records[5].sampled == (0, 1, 2)  # it had said hello again
    assert all(1 not in r.dropped for r in records[2:])


def test_a_client_that_fails_does_not_stop_the_others(tmp_path):
    _, grid, strategy = make(tmp_path)
    grid.failing = {2}
    strategy.start(grid)
    records = strategy.coordinator.history
    assert records[0].dropped == (2,)
    assert len(records) == 3


@pytest.mark.slow
def test_a_node_that_returns_under_another_number_continues(tmp_path):
    task, grid, strategy = make(tmp_path, rounds=4)

    def renumber(record):
        if record.round == 2:
            grid.nodes = {node + 50: client for node, client in grid.nodes.items()}

    strategy.on_round = renumber
    strategy.start(grid)
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=4, executor="loop", **LOCAL)
    assert torch.equal(strategy.coordinator.server.x, run.x)


@pytest.mark.slow
def test_too_few_clients_end_the_run_or_skip_the_round(tmp_path):
    _, grid, strategy = make(tmp_path, min_clients=2)
    grid.deaf = {0, 1}
    with pytest.raises(
        TooFewClientsError, match="1 of 3 clients are connected, but round 1 needs 2; start more"
    ):
        strategy.start(grid)
    assert strategy.coordinator.t == 0
    _, grid, strategy = make(tmp_path / "other", min_clients=2, below_minimum="skip", wait_timeout=0.1)
    grid.deaf = {0, 1}
    strategy.start(grid)
    assert [r.dropped for r in strategy.coordinator.history] == [()] * 3
    assert [r.sampled for r in strategy.coordinator.history] == [()] * 3


def test_too_few_answers_change_nothing(tmp_path):
    _, grid, strategy = make(tmp_path, min_clients=3)
    strategy._wait(grid, 3)
    grid.failing = {0}
    before = strategy.coordinator.server
    with pytest.raises(TooFewClientsError, match="2 of 3 clients have answered"):
        strategy.start(grid)
    assert strategy.coordinator.server is before
    grid.failing = set()
    _, grid, again = make(tmp_path, min_clients=3)  # the run is started again
    again.start(grid)
    task = class_task(sizes=SIZES)
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=3, executor="loop", **LOCAL)
    assert torch.equal(again.coordinator.server.x, run.x)


def test_a_restarted_server_resumes(tmp_path):
    task, grid, strategy = make(tmp_path, rounds=5, sampled=2, tracked=1)

    def killed(record):
        if record.round == 3:
            raise KeyboardInterrupt

    strategy.on_round = killed
    with pytest.raises(KeyboardInterrupt):
        strategy.start(grid)
    _, _, again = make(tmp_path, rounds=5, sampled=2, tracked=1)
    again.start(Here(grid.app, tmp_path, 3, first=500))
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=5, sampled=2, tracked=1, executor="loop", **LOCAL)
    assert torch.equal(again.coordinator.server.x, run.x)
    assert len(again.coordinator.history) == 5


# Nobody is trusted.


class Broken(Here):
    """A grid that cannot read what some nodes sent."""

    unreadable = frozenset()

    def push_messages(self, messages):
        identities = super().push_messages(messages)
        self.to = getattr(self, "to", {}) | {
            i: (m.metadata.message_type, self.nodes.get(m.metadata.dst_node_id))
            for i, m in zip(identities, messages, strict=True)
        }
        return identities

    def pull_messages(self, message_ids):
        for i in message_ids:
            if self.to.get(i) in self.unreadable:
                self.replies.pop(i, None)
                raise AttributeError("what a stranger sent is no message")
        return super().pull_messages(message_ids)


def test_what_cannot_be_read_ends_no_run(tmp_path):
    _, grid, strategy = make(tmp_path, min_clients=2)
    grid = Broken(grid.app, tmp_path, 3)
    grid.unreadable = {("train", 1)}
    strategy.start(grid)
    c = strategy.coordinator
    assert len(c.history) == 3
    assert c.history[0].dropped == (1,)
    assert any("AttributeError" in said or "no message" in said for said in c.refusals)
    _, _, strategy = make(tmp_path / "hello", min_clients=2)
    grid = Broken(grid.app, tmp_path / "hello", 3)
    grid.unreadable = {("query", 1)}
    strategy.start(grid)
    assert {i for r in strategy.coordinator.history for i in r.sampled} == {0, 2}


def test_a_reply_that_is_still_arriving_is_not_waited_for(tmp_path):
    _, grid, strategy = linked(tmp_path, min_clients=1, rounds=1)
    grid._client.stalled = {("train", 2)}
    began = time.monotonic()
    strategy.start(grid)
    assert time.monotonic() - began < 2.5
    assert strategy.coordinator.history[0].dropped == (2,)


def test_an_array_that_cannot_be_is_a_refusal_in_a_run(tmp_path):
    _, grid, strategy = make(tmp_path, min_clients=2, rounds=2)
    honest = grid.app

    def app(message, context):
        reply = honest(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 0:
            reply.content["up"]["dx"] = Array("float32", (2**62, 2**62, 0), ARRAY_ENCODING, b"")
        return reply

    grid.app = app
    strategy.start(grid)
    assert [r.dropped for r in strategy.coordinator.history] == [(0,), (0,)]
    assert "a possible shape" in strategy.coordinator.refusals[0]


def test_two_nodes_that_say_they_are_one_client(tmp_path, caplog):
    task, grid, strategy = make(tmp_path, rounds=4)
    grid.nodes[999] = 0  # after the right one
    with caplog.at_level("WARNING", logger="fadamgc"):
        strategy.start(grid)
    assert caplog.text.count("give each node its own partition-id") == 1
    assert "node 100 has connected as that client" in caplog.text
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=4, executor="loop", **LOCAL)
    assert torch.equal(strategy.coordinator.server.x, run.x)


@pytest.mark.slow
def test_a_node_that_cannot_start_is_reported_once_and_not_asked_all_the_time(tmp_path, caplog):
    _, grid, strategy = make(tmp_path, min_clients=3, wait_timeout=1.0)
    honest = grid.app

    def app(message, context):
        if context.node_config["partition-id"] == 2:
            raise_error = Message(Error(1, "FileNotFoundError: no data here"), reply_to=message)
            raise_error.metadata.__dict__["_src_node_id"] = 1
            return raise_error
        return honest(message, context)

    grid.app = app
    with (
        caplog.at_level("WARNING", logger="fadamgc"),
        pytest.raises(TooFewClientsError, match=r"2 of 3 clients.*node 102: FileNotFoundError: no data here"),
    ):
        strategy.start(grid)
    assert caplog.text.count("no data here") == 1
    assert grid.sent.count(("query", 2)) < 8


def test_weights_by_size_wait_for_all_sizes(tmp_path):
    _, grid, strategy = make(tmp_path, weights="size", below_minimum="skip")
    grid.deaf = {1}
    with pytest.raises(TooFewClientsError, match="round 1 needs 3"):
        strategy.start(grid)
    _, grid, strategy = make(tmp_path / "all", weights="size")
    strategy.start(grid)
    task = class_task(sizes=SIZES)
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=3, weights="size", executor="loop", **LOCAL)
    assert torch.equal(strategy.coordinator.server.x, run.x)


def test_a_newer_server_takes_over(tmp_path):
    task, grid, first = make(tmp_path, rounds=4)
    started = []

    def another(record):
        if record.round == 2:  # the first was only thought to be dead
            _, _, second = make(tmp_path, rounds=4)
            second.start(Here(grid.app, tmp_path, 3, first=500))
            started.append(second)

    first.on_round = another
    with pytest.raises(CheckpointError, match=r"another server \(start 2\) has taken over"):
        first.start(grid)
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=4, executor="loop", **LOCAL)
    assert torch.equal(started[0].coordinator.server.x, run.x)
    _, _, third = make(tmp_path, rounds=4)
    assert third.coordinator.t == 4
    assert torch.equal(third.coordinator.server.x, run.x)


def in_order(replies):
    return sorted(replies, key=lambda message: message.content["reply"]["client"])


def test_a_reply_to_nothing_is_not_looked_at(tmp_path):
    _, grid, strategy = make(tmp_path)
    strategy._wait(grid, 3)
    messages = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    replies = in_order(strategy._exchange(grid, messages))
    replies[0].metadata.__dict__["_reply_to_message_id"] = "another"
    strategy.aggregate_train(1, replies)
    assert strategy.coordinator.history[0].dropped == (0,)


def test_a_node_cannot_answer_for_another(tmp_path):
    _, grid, strategy = make(tmp_path)
    strategy._wait(grid, 3)
    messages = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    replies = in_order(strategy._exchange(grid, messages))
    replies[0].content["reply"]["client"] = 1
    strategy.aggregate_train(1, replies)
    assert strategy.coordinator.history[0].dropped == (0,)
    assert "it says that it is client 1" in strategy.coordinator.refusals[0]


def test_a_node_that_is_nobody_is_not_asked(tmp_path, caplog):
    _, grid, strategy = make(tmp_path)
    grid.nodes |= {7: 9}  # there are clients 0 to 2
    task = class_task(sizes=(4,) * 10)
    grid.app = app_of(task)
    strategy.update_nodes(grid)
    strategy.update_nodes(grid)
    assert strategy.available == [0, 1, 2]
    assert "a node says it is client 9; clients are 0 to 2" in caplog.text


def test_an_error_of_a_client_is_logged_at_the_server(tmp_path, caplog):
    _, grid, strategy = make(tmp_path)
    strategy._wait(grid, 3)
    for path in (tmp_path / "node-1" / "test" / "client-1").glob("*"):
        path.unlink()
    messages = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    messages[1].content["down"]["x"] = to_array_record({"x": torch.zeros(2)})["x"]
    strategy.aggregate_train(1, strategy._exchange(grid, messages))
    assert "client 1: the client refuses: client 1: the server's x is torch.float32 (2,)" in caplog.text
    assert strategy.coordinator.history[0].dropped == (1,)


@pytest.mark.parametrize("name", ["round_timeout", "wait_timeout", "poll"])
def test_waiting_for_no_time_is_refused(name, tmp_path):
    with pytest.raises(InputError, match=f"{name}=0 is not accepted"):
        make(tmp_path, **{name: 0})
