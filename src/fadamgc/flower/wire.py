"""The wire format: converts requests and replies to Flower's records and back, and checks every field.

Vectors are sent as their plain bytes, so the arrays of a message have the size that the cost model counts.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fadamgc.errors import InputError, shown, whole
from fadamgc.escape import printable
from fadamgc.federation.computing import Computing
from fadamgc.federation.gradients import GradientOptions
from fadamgc.federation.settings import Settings
from fadamgc.files import as_json
from fadamgc.flower.protocol import (
    EvaluateReply,
    EvaluateRequest,
    RefusedError,
    Reply,
    Request,
    Stamp,
    TrainRequest,
    describe,
)
from fadamgc.loading import untrusted
from fadamgc.methods import algorithm_name, make_algorithm

ARRAY_ENCODING = "fadamgc.little-endian"
DTYPE_NAMES = ("float64", "float32", "float16", "int64", "int32", "uint8", "bool")
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_NAMES}
HEADER = {"experiment": str, "client": int, "generation": int, "round": int, "attempt": int}
LOCAL_SETTINGS = ("local_steps", "local_epochs", "batch_size")

MAX_DIMENSIONS = 8
MAX_REASON = 500  # characters of a client's reason that are shown
MAX_STEPS, MAX_SAMPLES = 10**6, 10**9


# Vectors.


def to_array_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Convert tensors by name to a record."""
    arrays = {}
    for name, value in tensors.items():
        numbers = value.detach().cpu().contiguous().numpy()
        data = (numbers.byteswap() if sys.byteorder == "big" else numbers).tobytes()
        arrays[name] = Array(
            str(value.dtype).removeprefix("torch."), tuple(value.shape), ARRAY_ENCODING, data
        )
    return ArrayRecord(arrays)


def from_array_record(record: object, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Convert a received record to tensors by name; check that every array has the size that it states.

    A record with other names than ``names`` is refused before any array is read; None accepts any names.
    """
    if not isinstance(record, ArrayRecord):
        raise RefusedError("record", "the message has no record of arrays")
    if names is not None and set(record) != set(names):
        raise RefusedError("fields", f"it has {shown(sorted(record))}, not {shown(sorted(names))}")
    return {name: _tensor(name, array) for name, array in record.items()}


def _tensor(name: str, array: Array) -> Tensor:
    shape = array.shape
    possible = len(shape) <= MAX_DIMENSIONS and all(type(k) is int and 0 <= k < 2**40 for k in shape)
    if array.stype != ARRAY_ENCODING or array.dtype not in DTYPES or not possible:
        raise RefusedError(
            "record",
            f"{shown(name)} is not accepted: {shown(array.dtype)} {shown(shape)} encoded as "
            f"{shown(array.stype)}; it must have a known type and a possible shape, encoded as "
            f"{ARRAY_ENCODING}",
        )
    dtype = DTYPES[array.dtype]
    if len(array.data) != math.prod(array.shape) * dtype.itemsize:
        raise RefusedError(
            "record", f"{shown(name)} is described as {array.dtype} {shape} and has {len(array.data)} bytes"
        )
    numbers = np.frombuffer(bytearray(array.data), dtype=np.dtype(array.dtype).newbyteorder("<"))
    return torch.from_numpy(numbers.astype(numbers.dtype.newbyteorder("="), copy=False)).view(array.shape)


# Requests of the server.


def request_content(train: TrainRequest) -> RecordDict:
    """Convert a request to the content of a message."""
    request, tracked, algorithm, settings, down, buffers = train
    local = {key: getattr(settings, key) for key in LOCAL_SETTINGS}
    config: dict[str, Any] = {
        **_header(request),
        "counted-round": request.counted.round,
        "counted-attempt": request.counted.attempt,
        "tracked": tracked,
        "algorithm": algorithm_name(algorithm),
        "hyperparameters": json.dumps(as_json(algorithm.plain())),
        "seed": settings.seed,
        **{key: value for key, value in local.items() if value is not None},
        **{key: value for key, value in settings.gradients._asdict().items() if value is not None},
        **{key: value for key, value in settings.computing._asdict().items() if value is not None},
        **({} if settings.codec is None else {"codec": json.dumps(dict(settings.codec))}),
    }
    arrays = {"down": to_array_record(down), "buffers": to_array_record(buffers)}
    return RecordDict({"request": ConfigRecord(config), **arrays})


def read_request(content: RecordDict) -> TrainRequest:
    """Read the request in a message; refuse any other message, and values that no server sends."""
    config = _config(content, "request")
    counted = Stamp(_get(config, "counted-round", int), _get(config, "counted-attempt", int))
    request = Request(*_read_header(config), counted)
    if not request.is_possible():
        raise RefusedError(
            "request",
            f"a request for {describe(request.stamp)} with {describe(counted)} counted and generation "
            f"{request.generation} is not possible",
        )
    try:
        local: Any = {key: whole(key, config[key], 1, MAX_STEPS) for key in LOCAL_SETTINGS if key in config}
        local |= {key: config[key] for key in (*GradientOptions._fields, *Computing._fields) if key in config}
        if "codec" in config:
            local["codec"] = json.loads(_get(config, "codec", str))
        hyperparameters = json.loads(_get(config, "hyperparameters", str))
        with untrusted():
            algorithm = make_algorithm(_get(config, "algorithm", str), **hyperparameters)
        settings = Settings(rounds=max(1, request.stamp.round), seed=_get(config, "seed", int), **local)
    except (InputError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RefusedError("request", f"the server's request cannot be understood: {error}") from None
    tracked = _get(config, "tracked", bool)
    down, buffers = (from_array_record(content.get(part)) for part in ("down", "buffers"))
    return TrainRequest(request, tracked, algorithm, settings, down, buffers)


# Replies of the clients.


def reply_content(reply: Reply) -> RecordDict:
    """Convert a reply to the content of a message."""
    metrics = MetricRecord({"loss": reply.loss, "steps": reply.steps})
    arrays = {"up": to_array_record(reply.up), "buffers": to_array_record(reply.buffers)}
    return RecordDict({"reply": ConfigRecord(_header(reply)), **arrays, "metrics": metrics})


def refusal_content(kind: str, message: str) -> RecordDict:
    """Convert a client's refusal to the content of a message."""
    return RecordDict({"refusal": ConfigRecord({"kind": kind, "message": message})})


def read_reply(
    content: RecordDict, up: Collection[str] | None = None, buffers: Collection[str] | None = None
) -> Reply:
    """Read the reply in a message; raise an error if the client refuses, or if the message is not a reply.

    ``up`` and ``buffers`` are the names of vectors and buffers that the reply must have; None accepts any.
    """
    _raise_refusal(content)
    header = _config(content, "reply")
    metrics = content.get("metrics")
    if not isinstance(metrics, MetricRecord):
        raise RefusedError("record", "there are no metrics in the reply")
    return Reply(
        *_read_header(header),
        up=from_array_record(content.get("up"), up),
        buffers=from_array_record(content.get("buffers"), buffers),
        loss=_get(metrics, "loss", float),
        steps=_get(metrics, "steps", int),
    )


def hello_content(client: int, samples: int) -> RecordDict:
    """Return the content of a hello, in which a node says which client it is and how many samples it has."""
    return RecordDict({"hello": ConfigRecord({"client": client, "samples": samples})})


def read_hello(content: RecordDict, clients: int) -> tuple[int, int]:
    """Read client and samples in the hello of a node, which is one of ``clients`` clients."""
    _raise_refusal(content)
    config = _config(content, "hello")
    client, samples = _get(config, "client", int), _get(config, "samples", int)
    if not 0 <= client < clients:
        raise RefusedError("client", f"a node says it is client {client}; clients are 0 to {clients - 1}")
    if not 1 <= samples <= MAX_SAMPLES:
        raise RefusedError("client", f"client {client} says it has {samples} samples")
    return client, samples


# Evaluation at the clients.


def evaluate_content(request: EvaluateRequest) -> RecordDict:
    """Convert a request to evaluate to the content of a message."""
    computing = {key: value for key, value in request.computing._asdict().items() if value is not None}
    config = {**_header(request), "metric": request.metric, "seed": request.seed, **computing}
    arrays = {"down": to_array_record({"x": request.x}), "buffers": to_array_record(request.buffers)}
    return RecordDict({"request": ConfigRecord(config), **arrays})


def read_evaluate(content: RecordDict) -> EvaluateRequest:
    """Read the request to evaluate in a message; refuse any other message."""
    config = _config(content, "request")
    computing: Any = {key: config[key] for key in Computing._fields if key in config}
    try:
        settings = Settings.of(rounds=1, seed=_get(config, "seed", int), **computing)
    except (InputError, ValueError, TypeError) as error:
        raise RefusedError("request", f"the server's request cannot be understood: {error}") from None
    request = EvaluateRequest(
        *_read_header(config),
        metric=_get(config, "metric", str),
        seed=settings.seed,
        computing=settings.computing,
        x=from_array_record(content.get("down"), ["x"])["x"],
        buffers=from_array_record(content.get("buffers")),
    )
    if not request.is_possible():
        raise RefusedError(
            "request", f"a request to evaluate after {describe(request.stamp)} is not possible"
        )
    return request


def evaluation_content(reply: EvaluateReply) -> RecordDict:
    """Convert the reply to a request to evaluate to the content of a message."""
    config = ConfigRecord({**_header(reply), "held-out": reply.held_out})
    return RecordDict({"reply": config, "metrics": MetricRecord({reply.metric: reply.value})})


def read_evaluation(content: RecordDict, metric: str) -> EvaluateReply:
    """Read the value of a metric in a message; refuse any other message, and other metrics."""
    _raise_refusal(content)
    header, metrics = _config(content, "reply"), content.get("metrics")
    if not isinstance(metrics, MetricRecord) or set(metrics) != {metric}:
        names = sorted(metrics) if isinstance(metrics, MetricRecord) else "no metrics"
        raise RefusedError("metric", f"it has {shown(names)}, not [{metric!r}]")
    value, held_out = _get(metrics, metric, float), _get(header, "held-out", bool)
    return EvaluateReply(*_read_header(header), metric, value, held_out)


# Parts of messages.


def _header(message: Request | Reply | EvaluateRequest | EvaluateReply) -> dict[str, Any]:
    return dict(zip(HEADER, (*message[:3], *message.stamp), strict=True))


def _read_header(config: ConfigRecord) -> tuple[str, int, int, Stamp]:
    experiment, client, generation, *stamp = (_get(config, key, kind) for key, kind in HEADER.items())
    return experiment, client, generation, Stamp(*stamp)


def _raise_refusal(content: RecordDict) -> None:
    """Raise the refusal in a message, if there is one."""
    if "refusal" in content:
        refusal = _config(content, "refusal")
        raise RefusedError(
            printable(refusal.get("kind", "refused"), 40),
            f"the client refuses: {printable(refusal.get('message'), MAX_REASON)}",
        )


def _config(content: RecordDict, name: str) -> ConfigRecord:
    record = content.get(name)
    if not isinstance(record, ConfigRecord):
        raise RefusedError("record", f"there is no {name} in the message")
    return record


def _get(record: Mapping[str, Any], key: str, kind: type) -> Any:
    value = record.get(key)
    if type(value) is not kind:
        raise RefusedError("record", f"{key}={shown(value)} is not of type {kind.__name__}")
    return value
