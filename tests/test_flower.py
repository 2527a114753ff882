"""The Flower apps in this process: no network, no other process, every message as Flower carries it."""

from __future__ import annotations

import dataclasses
import json
import shutil
import subprocess
import sys
import time

import pytest
import torch

import fadamgc

flwr = pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict  # noqa: E402

from fadamgc.algorithm import example  # noqa: E402
from fadamgc.cli.main import app as cli  # noqa: E402
from fadamgc.errors import CheckpointError, InputError  # noqa: E402
from fadamgc.experiments.report.numbers import read_results  # noqa: E402
from fadamgc.experiments.report.write import write_report  # noqa: E402
from fadamgc.federation.cost import traffic  # noqa: E402
from fadamgc.federation.settings import Settings  # noqa: E402
from fadamgc.flower.clientapp import client_number, state_folder  # noqa: E402
from fadamgc.flower.config import NOT_IN_CONFIG, ServerOptions, config_keys, read_config  # noqa: E402
from fadamgc.flower.protocol import NEVER, RefusedError, Reply, Request, Stamp  # noqa: E402
from fadamgc.flower.serverapp import federate  # noqa: E402
from fadamgc.flower.strategy import TooFewClientsError  # noqa: E402
from fadamgc.flower.wire import (  # noqa: E402
    ARRAY_ENCODING,
    Hello,
    TrainRequest,
    from_array_record,
    hello_content,
    read_hello,
    read_reply,
    read_request,
    refusal_content,
    reply_content,
    request_content,
    to_array_record,
)
from fadamgc.tasks.build import build_task  # noqa: E402
from fadamgc.tasks.sections import DigitsTask  # noqa: E402
from in_process_grid import LOCAL, SIZES, Here, app_of, held, make  # noqa: E402
from places import ROOT  # noqa: E402
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


# Bytes.


@pytest.mark.parametrize("tracked", [True, False])
@pytest.mark.parametrize("algo", REPRESENTATIVES.values(), ids=REPRESENTATIVES)
def test_arrays_hold_the_bytes_that_the_cost_model_counts(algo, tracked, tmp_path):
    d = 7
    kinds = example(algo, torch.zeros(d))
    cost = traffic(algo, d)
    request = Request("test", 0, 0, Stamp(1, 1), NEVER)
    train = TrainRequest(request, tracked, algo, Settings(rounds=1, local_steps=1), kinds.down._asdict(), {})
    assert held(request_content(train)) == cost.down
    up = {k: v for k, v in kinds.up._asdict().items() if tracked or k not in algo.tracked_only}
    reply = Reply(*request[:4], up, {}, 0.5, 3)
    assert held(reply_content(reply)) == cost.up + tracked * cost.up_tracked


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


def test_a_node_that_comes_back_under_another_number_goes_on(tmp_path):
    task, grid, strategy = make(tmp_path, rounds=4)

    def renumber(record):
        if record.round == 2:
            grid.nodes = {node + 50: client for node, client in grid.nodes.items()}

    strategy.on_round = renumber
    strategy.start(grid)
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=4, executor="loop", **LOCAL)
    assert torch.equal(strategy.coordinator.server.x, run.x)


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


def test_a_server_that_is_started_again_goes_on(tmp_path):
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
    """A grid that cannot read what some nodes sent, or waits for the rest of it."""

    unreadable, slow = frozenset(), frozenset()

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
            if self.to.get(i) in self.slow:
                time.sleep(3)
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


def test_a_reply_that_is_still_under_way_is_not_waited_for(tmp_path):
    _, grid, strategy = make(tmp_path, min_clients=1, rounds=1)
    grid = Broken(grid.app, tmp_path, 3)
    grid.slow = {("train", 2)}
    began = time.monotonic()
    strategy.start(grid)
    assert time.monotonic() - began < 2.5
    assert 2 in strategy.coordinator.history[0].dropped


@pytest.mark.parametrize("shape", [(2**62, 2**62, 0), (0, 2**63), (1,) * 20, (0, 2**50)])
def test_an_array_with_an_absurd_shape_is_refused(shape):
    with pytest.raises(RefusedError, match="a possible shape"):
        from_array_record(ArrayRecord({"dx": Array("float32", shape, ARRAY_ENCODING, b"")}))


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


def test_a_node_that_cannot_start_is_told_of_once_and_not_asked_all_the_time(tmp_path, caplog):
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


def good_request(**changes):
    algo = fadamgc.FAdamGC()
    kinds = example(algo, torch.zeros(3))
    request = Request("test", 0, 0, Stamp(1, 1), NEVER)
    settings = Settings(rounds=1, local_steps=1)
    content = request_content(TrainRequest(request, True, algo, settings, kinds.down._asdict(), {}))
    for key, value in changes.items():
        content["request"][key.replace("_of_", "-")] = value
    return content


@pytest.mark.parametrize(
    "changes",
    [
        {"local_steps": 10**15},
        {"local_steps": 0},
        {"batch_size": 10**15},
        {"round": 2**62},
        {"round": -3},
        {"attempt": -1},
        {"generation": 2**62},
        {"counted_of_round": 5},
        {"hyperparameters": '{"eta_l": 1' + "0" * 400 + "}"},
        {"hyperparameters": "[" * 100_000},
        {"hyperparameters": '{"beta1": 7}'},
        {"algorithm": "os.system"},
    ],
)
def test_a_client_refuses_a_request_that_no_server_makes(changes):
    read_request(good_request())
    with pytest.raises(RefusedError):
        read_request(good_request(**changes))


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


@pytest.mark.parametrize(
    ("array", "said"),
    [
        (Array("float32", (2,), "numpy.ndarray", b"12345678"), "encoded as fadamgc.little-endian"),
        (Array("object", (2,), ARRAY_ENCODING, b"12345678"), "a possible shape"),
        (Array("float32", (3,), ARRAY_ENCODING, b"12345678"), "has 8 bytes"),
        (Array("float32", (-2, -1), ARRAY_ENCODING, b"12345678"), "a possible shape"),
    ],
)
def test_an_array_that_is_not_what_it_says_is_refused(array, said):
    with pytest.raises(RefusedError, match=said):
        from_array_record(ArrayRecord({"dx": array}))


def test_arrays_survive_the_way():
    tensors = {
        "a": torch.randn(3, 2),
        "b": torch.randn(4, dtype=torch.float64),
        "c": torch.tensor(5),
        "d": torch.zeros(0),
        "e": torch.randn(4, 4).T,
    }
    back = from_array_record(to_array_record(tensors))
    for name, value in tensors.items():
        assert torch.equal(back[name], value)
        assert back[name].dtype == value.dtype
        back[name] += 1  # it can be written to


REQUEST = Request("test", 0, 0, Stamp(1, 1), NEVER)


def some_request():
    algo = fadamgc.FAdamGC()
    down = example(algo, torch.zeros(3)).down._asdict()
    return TrainRequest(REQUEST, True, algo, Settings(rounds=1, local_steps=2), down, {})


def test_a_request_survives_the_way():
    train = read_request(request_content(some_request()))
    assert (train.request, train.tracked, train.algorithm) == (REQUEST, True, fadamgc.FAdamGC())
    assert train.settings.local_steps == 2


@pytest.mark.parametrize(
    ("key", "value", "said"),
    [
        ("round", "1", "round='1' is not of type int"),
        ("round", 1.0, "is not of type int"),
        ("algorithm", "fadamg", "cannot be understood: .*fadamgc"),
        ("hyperparameters", "{", "cannot be understood"),
        ("hyperparameters", json.dumps({"eta_l": -1}), "eta_l=-1"),
        ("hyperparameters", json.dumps({"eta": 1}), "cannot be understood"),
        ("local_steps", 0, "local_steps=0"),
        ("tracked", 1, "not of type bool"),
    ],
)
def test_a_request_that_cannot_be_understood_is_refused(key, value, said):
    content = request_content(some_request())
    content["request"][key] = value
    with pytest.raises(RefusedError, match=said):
        read_request(content)


def test_replies_that_are_none_are_refused():
    with pytest.raises(RefusedError, match="there is no reply in the message"):
        read_reply(RecordDict())
    good = reply_content(Reply(*REQUEST[:4], {}, {}, 0.5, 3))
    assert read_reply(good).steps == 3
    good["metrics"] = MetricRecord({"loss": 1, "steps": 3})
    with pytest.raises(RefusedError, match="loss=1 is not of type float"):
        read_reply(good)
    with pytest.raises(RefusedError, match="the client refuses: no data"):
        read_reply(refusal_content("data", "no data"))
    with pytest.raises(RefusedError, match="has 0 samples"):
        read_hello(hello_content(Hello(1, 0)), 3)


def test_what_goes_wrong_at_a_client_is_said_at_the_server(tmp_path, caplog):
    _, grid, strategy = make(tmp_path)
    strategy._wait(grid, 3)
    for path in (tmp_path / "node-1" / "test" / "client-1").glob("*"):
        path.unlink()
    messages = strategy.configure_train(1, ArrayRecord(), ConfigRecord(), grid)
    messages[1].content["down"]["x"] = to_array_record({"x": torch.zeros(2)})["x"]
    strategy.aggregate_train(1, strategy._exchange(grid, messages))
    assert "client 1: the client refuses: client 1: the server's x is torch.float32 (2,)" in caplog.text
    assert strategy.coordinator.history[0].dropped == (1,)


# Config.


def test_the_config_is_read_and_what_is_not_known_refused():
    config = read_config({"algorithm": "scaffold", "eta_l": 0.1, "data.alpha": 0.3, "eval-every": 2})
    assert config.algorithm == fadamgc.Scaffold(eta_l=0.1)
    assert config.settings == Settings(rounds=10, local_steps=10, eval_every=2)
    assert config.options == ServerOptions(algorithm="scaffold")
    assert config.app == {"data.alpha": 0.3}
    assert read_config({"local-epochs": 2}).settings == Settings(rounds=10, local_epochs=2)
    with pytest.raises(InputError, match=r"config localsteps=3 is not known.*local-steps"):
        read_config({"localsteps": 3})
    with pytest.raises(InputError, match="config beta2=0.9 is not known"):
        read_config({"algorithm": "fedavg", "beta2": 0.9})


@pytest.mark.parametrize(
    ("key", "value", "accepted"),
    [
        ("reset-states", "true", "true or false"),
        ("round-timeout", "long", "a number"),
        ("clients", [], "a n"),
    ],
)
def test_values_of_a_wrong_kind_are_refused(key, value, accepted):
    with pytest.raises(InputError, match=f"config {key}=.* is not accepted; it must be {accepted}"):
        read_config({key: value})


def test_every_setting_of_a_run_is_a_key_or_cannot_be_one():
    """The accepted keys: a new setting or option must be added here, and to the documentation."""
    assert set(config_keys()) == {
        *("rounds", "sampled", "tracked", "local-steps", "local-epochs", "batch-size", "seed", "weights"),
        *("eval-every", "target"),
        *("algorithm", "clients", "experiment", "folder", "min-clients", "round-timeout", "wait-timeout"),
        *("below-minimum", "max-update-norm", "max-norm-ratio", "max-samples", "max-size-ratio"),
        *("reset-states", "checkpoints", "restore-round", "bind-clients", "unbind-clients"),
    }
    names = {field.name for field in dataclasses.fields(Settings)}
    assert set(NOT_IN_CONFIG) <= names
    text = (ROOT / "docs" / "flower.md").read_text()
    assert all(f"`{key}`" in text for key in config_keys())


@pytest.mark.parametrize("given", [None, "0", -1, True])
def test_a_node_must_know_who_it_is(given, monkeypatch, tmp_path):
    context = Context(1, 1, {} if given is None else {"partition-id": given}, RecordDict(), {})
    with pytest.raises(InputError, match="partition-id.*is not accepted; start the node with"):
        client_number(context)
    monkeypatch.setenv("FADAMGC_STATES", str(tmp_path))
    assert state_folder(context) == tmp_path


@pytest.mark.parametrize("name", ["round_timeout", "wait_timeout", "poll"])
def test_waiting_for_no_time_is_refused(name, tmp_path):
    with pytest.raises(InputError, match=f"{name}=0 is not accepted"):
        make(tmp_path, **{name: 0})


# The digits, as the example has them.


def test_the_digits_app_gives_the_simulators_numbers_and_a_report(tmp_path, caplog):
    from fadamgc.flower import dataset_apps as digits

    config = {
        "algorithm": "fadamgc",
        "eta_l": 0.003,
        "experiment": "digits",
        "clients": 3,
        "rounds": 3,
        "tracked": 2,
        "local-steps": 4,
        "batch-size": 16,
        "data.alpha": 0.5,
        "folder": str(tmp_path / "server"),
        "wait-timeout": 5.0,
    }
    grid = Here(digits.client, tmp_path, 3)
    plain = grid.context
    grid.context = lambda client: Context(1, 1, plain(client).node_config, RecordDict(), config)
    coordinator = federate(grid, digits.task(grid.context(0)), config)
    task = build_task(DigitsTask(data="digits", clients=3, alpha=0.5), 0)
    run = fadamgc.simulate(
        fadamgc.FAdamGC(eta_l=0.003), task, rounds=3, tracked=2, local_steps=4, batch_size=16, executor="loop"
    )
    assert torch.equal(coordinator.server.x, run.x)
    results = write_report(tmp_path / "server")
    assert results.runs["FAdamGC"][0].history == run.history
    assert (tmp_path / "server" / "report.html").stat().st_size > 10_000

    shutil.rmtree(tmp_path / "server" / "runs")  # as if killed after the last checkpoint
    with caplog.at_level("INFO", logger="fadamgc"):
        again = federate(None, digits.task(grid.context(0)), config)  # nobody has to be there for it
    assert "digits: already complete after round 3" in caplog.text
    assert torch.equal(again.server.x, run.x)
    assert read_results(tmp_path / "server").runs["FAdamGC"][0].history == run.history


class Steepest(fadamgc.FedAvg):
    """An algorithm that only the server's process has registered."""

    title = "Steepest\nof all"


def test_a_history_of_a_custom_algorithm_and_metric_is_reported(tmp_path, monkeypatch):
    from fadamgc.methods import _REGISTRY

    with monkeypatch.context() as patched:
        patched.setitem(_REGISTRY, "steepest", Steepest)
        task = class_task(sizes=SIZES, metric=lambda output, _: float(output.abs().max()), goal="min")
        config = {
            **{
                "algorithm": "steepest",
                "eta_l": 0.2,
                "experiment": "mine",
                "folder": str(tmp_path / "server"),
            },
            **{"rounds": 2, "local-steps": 2, "sampled": 2, "target": 0.001, "seed": 7, "wait-timeout": 5.0},
        }
        (tmp_path / "server").mkdir()
        (tmp_path / "server" / "spec.toml").write_text("of the version before, with other settings")
        coordinator = federate(Here(app_of(task), tmp_path, 3), task, config)
    results = write_report(tmp_path / "server")
    assert results.spec.name == "mine"
    assert results.spec.title == "Steepest\\nof all on task, 3 clients, on Flower"
    assert (results.spec.task.metric, results.spec.run.target, results.spec.run.seeds) == (
        "metric",
        0.001,
        (7,),
    )
    assert (results.spec.run.rounds, results.spec.run.sampled) == (2, 2)
    (method,) = results.spec.methods
    assert method.label == "Steepest\\nof all"
    assert method.hyperparameters["eta_l"] == 0.2
    assert results.runs[method.label][0].history == coordinator.history
    assert results.runs[method.label][0].goal == "min"
    assert (tmp_path / "server" / "runs" / "steepest-nof-all-seed7" / "run.json").exists()


def test_flower_apps_load_no_experiments():
    code = (
        "import sys, fadamgc.flower.dataset_apps\n"
        "loaded = [m for m in sys.modules if m.startswith(('matplotlib', 'plotly', 'fadamgc.experiments'))]\n"
        "assert not loaded, loaded"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_command_says_what_runs(tmp_path):
    from typer.testing import CliRunner

    shown = CliRunner().invoke(cli, ["federation", "status", "--folder", str(tmp_path)])
    assert shown.exit_code == 0
    assert "no federation in" in shown.output
