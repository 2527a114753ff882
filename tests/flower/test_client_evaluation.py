"""Evaluation at the clients on Flower: the simulator's numbers, clients that do not answer, bad replies."""

from __future__ import annotations

import math

import pytest
import torch

import fadamgc

flwr = pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import ConfigRecord, MetricRecord, RecordDict  # noqa: E402

from fadamgc.errors import InputError  # noqa: E402
from fadamgc.experiments.report.write import write_report  # noqa: E402
from fadamgc.flower import client_app  # noqa: E402
from fadamgc.flower.clientapp import client_number, client_task  # noqa: E402
from fadamgc.flower.coordinator import Coordinator  # noqa: E402
from fadamgc.flower.protocol import EvaluateReply, RefusedError, Stamp  # noqa: E402
from fadamgc.flower.serverapp import federate, server_task  # noqa: E402
from fadamgc.flower.wire import evaluate_content, evaluation_content, read_evaluate, read_evaluation  # noqa: E402
from in_process_grid import LOCAL, SIZES, Here, make  # noqa: E402
from in_process_link import linked  # noqa: E402
from problems import class_task, mlp  # noqa: E402

CONFIG = {"algorithm": "fedavg", "eta_l": 0.2, "rounds": 4, "local-steps": 3, "batch-size": 4, "seed": 5}
RUN = {"rounds": 4, "executor": "loop", "progress": False, "eval_clients": True, **LOCAL}


def some_samples(task, without=()):
    """Five samples of every client, None for some clients."""
    return [None if i in without else (x[:5], y[:5]) for i, (x, y) in enumerate(task.pairs)]


def app_with_tests(task, tests):
    def load(context):
        i = client_number(context)
        return task.model, task.loss, task.pairs[i], tests[i]

    return client_app(load)


def named(history):
    return [record.metrics for record in history]


def close_to(expected):
    return [pytest.approx(metrics, rel=1e-5) for metrics in expected]


@pytest.mark.parametrize("metric", ["accuracy", "loss"])
@pytest.mark.parametrize("without", [(), (1,), (0, 1, 2)])
def test_clients_evaluate_as_in_a_simulation(metric, without, tmp_path):
    """The server has no test data; with ``without`` = all, clients evaluate on what they train on."""
    full = class_task(sizes=SIZES, metric=metric, model=mlp(0, torch.nn.BatchNorm1d(8)))
    tests = some_samples(full, without)
    task = fadamgc.Task(full.model, full.loss, None, metric=metric)
    config = CONFIG | {
        "folder": str(tmp_path / "server"),
        "eval-clients": True,
        "eval-every": 3,
        "sampled": 2,
    }
    grid = Here(app_with_tests(full, tests), tmp_path, 3)
    coordinator = federate(grid, task, config)
    given = None if len(without) == 3 else tests
    same = fadamgc.Task(full.model, full.loss, full.pairs, None, metric=metric, client_tests=given)
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.2), same, **RUN, sampled=2, eval_every=3)
    assert torch.equal(coordinator.server.x, run.x)
    assert [bool(metrics) for metrics in named(coordinator.history)] == [False, False, True, True]
    assert named(coordinator.history) == close_to(named(run.history))
    assert [kind for kind, _ in grid.sent].count("evaluate") == 6
    assert [r.bytes_down for r in coordinator.history] == [r.bytes_down for r in run.history]


def test_evaluation_through_flowers_own_grid(tmp_path):
    """Every object as Flower sends it; client 1 stalls in the evaluation, and is simply absent."""
    task, grid, strategy = linked(tmp_path, eval_clients=True, rounds=2)
    seen = []

    def stall(record):
        grid._client.stalled = {("evaluate", 1)}
        seen.append(record.metrics)

    strategy.on_round = stall
    result = strategy.start(grid)
    history = strategy.coordinator.history
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, **RUN | {"rounds": 2})
    assert named(history[:1]) == close_to(named(run.history[:1]))
    assert seen == named(history)
    assert dict(result.evaluate_metrics_clientapp[1]) == history[0].metrics
    values = run.evaluate_clients()[[0, 2]]
    assert history[1].metrics["clients: mean"] == pytest.approx(values.mean())
    assert 1 not in strategy.nodes  # it is not asked again until it says hello


def test_a_custom_metric_is_that_of_the_client(tmp_path):
    metric = fadamgc.metrics.classification
    full = class_task(sizes=SIZES, metric=metric)

    def load(context):
        return fadamgc.Task(full.model, full.loss, [full.pairs[client_number(context)]], metric=metric)

    config = CONFIG | {"folder": str(tmp_path / "server"), "eval-clients": True, "rounds": 1}
    history = federate(Here(client_app(load), tmp_path, 3), full, config).history
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.2), full, **RUN | {"rounds": 1})
    assert named(history) == close_to(named(run.history))
    plain = Here(app_with_tests(full, [None] * 3), tmp_path / "other", 3)
    coordinator = federate(plain, full, config | {"folder": str(tmp_path / "other"), "experiment": "other"})
    assert not any(name.startswith("clients") for name in coordinator.history[0].metrics)
    assert "let the client's load return a Task with the same metric" in coordinator.refusals[-1]


BAD = {
    "a number that is not finite": ({"value": math.nan}, "not finite"),
    "an infinite number": ({"value": math.inf}, "not finite"),
    "an impossible accuracy": ({"value": 1.5}, "metric"),
    "another metric": ({"metric": "loss"}, "metric"),
    "a whole number": ({"value": 1}, "not finite"),
    "another client": ({"client": 2}, "another client"),
    "another round": ({"stamp": Stamp(2, 1)}, "another round"),
    "another experiment": ({"experiment": "other"}, "another round"),
}


@pytest.mark.parametrize(("change", "kind"), BAD.values(), ids=BAD.keys())
def test_bad_evaluations_are_refused_and_change_nothing(change, kind, tmp_path):
    _, grid, strategy = make(tmp_path, fadamgc.FedAvg(), rounds=1, eval_clients=True)
    app = grid.app

    def bad_app(message, context):
        reply = app(message, context)
        if message.metadata.message_type == "evaluate" and client_number(context) == 1:
            request = read_evaluate(message.content)
            answer = EvaluateReply(*request[:4], request.metric, 0.5, held_out=False)
            reply.content.clear()
            reply.content.update(evaluation_content(answer._replace(**change)))
        return reply

    grid.app = bad_app
    strategy.start(grid)
    c = strategy.coordinator
    task = class_task(sizes=SIZES)
    run = fadamgc.simulate(fadamgc.FedAvg(), task, **RUN | {"rounds": 1})
    assert c.history[0].metrics["clients: mean"] == pytest.approx(run.evaluate_clients()[[0, 2]].mean())
    assert len(c.refusals) == 1
    assert c.refusals[0].startswith("round 1: ")
    request = c.ask_evaluation([1])[0]
    reply = EvaluateReply(*request[:4], request.metric, 0.5, held_out=False)._replace(**change)
    with pytest.raises(RefusedError) as refused:
        c.checks.check_evaluation(reply, request)
    assert refused.value.kind == kind


def test_evaluations_are_read_with_care(tmp_path):
    _, _, strategy = make(tmp_path, fadamgc.FedAvg(), eval_clients=True)
    c = strategy.coordinator
    c.ask([])
    c.close()
    request = c.ask_evaluation([0])[0]
    assert read_evaluate(evaluate_content(request))[:7] == request[:7]
    reply = EvaluateReply(*request[:4], "accuracy", 0.5, held_out=True)
    assert read_evaluation(evaluation_content(reply), "accuracy") == reply
    for metrics in (MetricRecord({"accuracy": 0.5, "more": 1.0}), MetricRecord({}), ConfigRecord({})):
        content = evaluation_content(reply)
        content["metrics"] = metrics
        with pytest.raises(RefusedError, match=r"not \['accuracy'\]"):
            read_evaluation(content, "accuracy")
    with pytest.raises(RefusedError, match="there is no reply"):
        read_evaluation(RecordDict(), "accuracy")
    for change in ({"stamp": Stamp(0, 1)}, {"stamp": Stamp(1, -1)}, {"generation": -1}):
        with pytest.raises(RefusedError, match="is not possible"):
            read_evaluate(evaluate_content(request._replace(**change)))
    with pytest.raises(RefusedError, match="cannot be understood: seed=-1"):
        read_evaluate(evaluate_content(request._replace(seed=-1)))
    c.consider_evaluation(0, reply)
    for client, kind in ((0, "twice"), (1, "not asked")):
        with pytest.raises(RefusedError) as refused:
            c.consider_evaluation(client, reply)
        assert refused.value.kind == kind


@pytest.mark.slow
def test_an_interrupted_evaluation_is_repeated(tmp_path):
    """The server dies after it has written the round, and before it has the clients' metrics."""
    full = class_task(sizes=SIZES)
    config = CONFIG | {"folder": str(tmp_path / "server"), "eval-clients": True, "rounds": 2}
    grid = Here(app_with_tests(full, some_samples(full)), tmp_path, 3)
    close = Coordinator.close_evaluation

    def dies(coordinator):
        if coordinator.t == 2:
            raise KeyboardInterrupt
        return close(coordinator)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Coordinator, "close_evaluation", dies)
        with pytest.raises(KeyboardInterrupt):
            federate(grid, server_task((full.model, full.loss)), config)
    before = [kind for kind, _ in grid.sent].count("train")
    coordinator = federate(grid, server_task((full.model, full.loss)), config)
    assert [kind for kind, _ in grid.sent].count("train") == before
    same = fadamgc.Task(full.model, full.loss, full.pairs, client_tests=some_samples(full))
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=0.2), same, **RUN | {"rounds": 2})
    assert named(coordinator.history) == close_to(named(run.history))
    saved = write_report(tmp_path / "server").runs["FedAvg"][0].history
    assert named(saved) == named(coordinator.history)
    assert "clients: worst tenth" in (tmp_path / "server" / "report.html").read_text()
    again = federate(None, server_task((full.model, full.loss)), config)  # complete: no node is needed
    assert named(again.history) == named(coordinator.history)


def test_what_a_client_may_load(tmp_path):
    full = class_task(sizes=SIZES)
    part = full.model, full.loss, full.pairs[0]
    assert client_task((*part, None)).client_tests is None
    assert len(client_task((*part, full.pairs[1])).client_test_samples[0]) == 20
    with pytest.raises(InputError, match=r"(?s)load returned .*; it must return \(model, loss, data\)"):
        client_task(part[:2])
    with pytest.raises(InputError, match="eval_clients='epoch' is for fadamgc.simulate"):
        make(tmp_path, fadamgc.FedAvg(), eval_clients="epoch")
