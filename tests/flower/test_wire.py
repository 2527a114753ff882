"""Messages on the wire: what is sent is what is read, and anything else is refused."""

from __future__ import annotations

import json

import pytest
import torch

import fadamgc

flwr = pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict  # noqa: E402

from fadamgc.algorithm import example  # noqa: E402
from fadamgc.federation.cost import traffic  # noqa: E402
from fadamgc.federation.settings import Settings  # noqa: E402
from fadamgc.flower.protocol import NEVER, RefusedError, Reply, Request, Stamp  # noqa: E402
from fadamgc.flower.wire import (  # noqa: E402
    ARRAY_ENCODING,
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
from in_process_grid import held  # noqa: E402
from problems import REPRESENTATIVES  # noqa: E402


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


@pytest.mark.parametrize("shape", [(2**62, 2**62, 0), (0, 2**63), (1,) * 20, (0, 2**50)])
def test_an_array_with_an_absurd_shape_is_refused(shape):
    with pytest.raises(RefusedError, match="a possible shape"):
        from_array_record(ArrayRecord({"dx": Array("float32", shape, ARRAY_ENCODING, b"")}))


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
    settings = Settings(rounds=1, local_steps=2, clip_norm=0.5, autocast="bf16", channels_last=True)
    return TrainRequest(REQUEST, True, algo, settings, down, {})


def test_a_request_survives_the_way():
    train = read_request(request_content(some_request()))
    assert (train.request, train.tracked, train.algorithm) == (REQUEST, True, fadamgc.FAdamGC())
    assert train.settings == some_request().settings


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
        ("autocast", "fp8", "autocast='fp8'"),
    ],
)
def test_a_request_that_cannot_be_understood_is_refused(key, value, said):
    content = request_content(some_request())
    content["request"][key] = value
    with pytest.raises(RefusedError, match=said):
        read_request(content)


def test_messages_that_are_not_replies_are_refused():
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
        read_hello(hello_content(1, 0), 3)
