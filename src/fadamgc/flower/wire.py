"""Requests and replies as Flower's records, and back, with nothing taken on trust.

Vectors travel as their plain bytes: what an ArrayRecord holds is what the cost model counts.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.errors import InputError, shown
from fadamgc.escape import printable
from fadamgc.federation.settings import Settings
from fadamgc.files import as_json
from fadamgc.flower.protocol import MOST_GENERATION, NEVER, RefusedError, Reply, Request, Stamp, said
from fadamgc.methods import algorithm_name, make_algorithm

RAW = "fadamgc.little-endian"
DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float64, torch.int64)}
DTYPES |= {"bool": torch.bool, "int32": torch.int32, "uint8": torch.uint8, "float16": torch.float16}


MOST_DIMENSIONS = 8
MOST_SAID = 500  # letters of a client's reason
MOST_ROUNDS, MOST_STEPS, MOST_SAMPLES = 10**9, 10**6, 10**9


class Work(NamedTuple):
    """A request with all that a client needs for it."""

    request: Request
    tracked: bool
    algorithm: AnyAlgorithm
    settings: Settings
    down: dict[str, Tensor]
    buffers: dict[str, Tensor]


class Hello(NamedTuple):
    """Who a node says it is."""

    client: int
    samples: int


# Vectors.


def to_record(tensors: Mapping[str, Tensor]) -> ArrayRecord:
    """Tensors by name, as they travel."""
    return ArrayRecord({name: _array(value) for name, value in tensors.items()})


def _array(value: Tensor) -> Array:
    plain = value.detach().cpu().contiguous().numpy()
    if sys.byteorder == "big":
        plain = plain.byteswap()
    dtype = str(value.dtype).removeprefix("torch.")
    return Array(dtype, tuple(value.shape), RAW, plain.tobytes())


def from_record(record: object, names: Collection[str] | None = None) -> dict[str, Tensor]:
    """Tensors by name, from a record that came; every array must be what it says it is.

    Args:
        record: the record.
        names: the names that the record must have; None accepts any. Arrays of other names are not read.
    """
    if not isinstance(record, ArrayRecord):
        raise RefusedError("record", "there is no record of arrays where one was expected")
    if names is not None and set(record) != set(names):
        raise RefusedError("fields", f"it has {shown(sorted(record))}, not {shown(sorted(names))}")
    return {name: _tensor(name, array) for name, array in record.items()}


def _tensor(name: str, array: Array) -> Tensor:
    shape = array.shape
    sound = len(shape) <= MOST_DIMENSIONS and all(type(size) is int and 0 <= size < 2**40 for size in shape)
    if array.stype != RAW or array.dtype not in DTYPES or not sound:
        raise RefusedError(
            "record",
            f"{shown(name)} is {shown(array.dtype)} {shown(shape)} as {shown(array.stype)}; wanted is {RAW}",
        )
    dtype = DTYPES[array.dtype]
    if len(array.data) != math.prod(array.shape) * dtype.itemsize:
        raise RefusedError(
            "record", f"{shown(name)} says {array.dtype} {shape} and has {len(array.data)} bytes"
        )
    plain = np.frombuffer(bytearray(array.data), dtype=np.dtype(array.dtype).newbyteorder("<"))
    return torch.from_numpy(plain.astype(plain.dtype.newbyteorder("="), copy=False)).view(array.shape)


# The server's requests.


def request_content(work: Work) -> RecordDict:
    """A request as it travels."""
    r, s = work.request, work.settings
    config: dict[str, Any] = {
        "experiment": r.experiment,
        "client": r.client,
        "generation": r.generation,
        "round": r.stamp.round,
        "attempt": r.stamp.attempt,
        "counted-round": r.counted.round,
        "counted-attempt": r.counted.attempt,
        "tracked": work.tracked,
        "algorithm": algorithm_name(work.algorithm),
        "hyperparameters": json.dumps(as_json(_fields(work.algorithm))),
        "seed": s.seed,
    }
    for key in ("local_steps", "local_epochs", "batch_size"):
        if getattr(s, key) is not None:
            config[key] = getattr(s, key)
    return RecordDict(
        {
            "request": ConfigRecord(config),
            "down": to_record(work.down),
            "buffers": to_record(work.buffers),
        }
    )


def _fields(algorithm: AnyAlgorithm) -> dict[str, Any]:
    import dataclasses

    return {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)}


def read_request(content: RecordDict) -> Work:
    """The request in a message."""
    config = _config(content, "request")
    request = Request(
        experiment=_get(config, "experiment", str),
        client=_get(config, "client", int),
        generation=_get(config, "generation", int),
        stamp=Stamp(_get(config, "round", int), _get(config, "attempt", int)),
        counted=Stamp(_get(config, "counted-round", int), _get(config, "counted-attempt", int)),
    )
    _check_request(request)
    for key in ("local_steps", "local_epochs", "batch_size"):
        value = config.get(key)
        if value is not None and (type(value) is not int or not 1 <= value <= MOST_STEPS):
            raise RefusedError(
                "request", f"{key}={shown(value)} is not a whole number from 1 to {MOST_STEPS}"
            )
    try:
        hyperparameters = json.loads(_get(config, "hyperparameters", str))
        algorithm = make_algorithm(_get(config, "algorithm", str), **hyperparameters)
        settings = Settings(
            rounds=max(1, request.stamp.round),
            seed=_get(config, "seed", int),
            **{k: config.get(k) for k in ("local_steps", "local_epochs", "batch_size")},  # type: ignore[arg-type]
        )
    except (InputError, ValueError, TypeError, OverflowError, RecursionError) as error:
        raise RefusedError("request", f"the server's request cannot be understood: {error}") from None
    return Work(
        request,
        _get(config, "tracked", bool),
        algorithm,
        settings,
        from_record(content.get("down")),
        from_record(content.get("buffers")),
    )


def _check_request(request: Request) -> None:
    """Refuse numbers that no server of ours has: a client would work for ever, or never again."""
    stamp, counted = request.stamp, request.counted
    sound = (
        0 <= stamp.round <= MOST_ROUNDS
        and 1 <= stamp.attempt <= MOST_ROUNDS
        and NEVER <= counted <= stamp
        and counted.attempt >= 0
        and 0 <= request.generation <= MOST_GENERATION
    )
    if not sound:
        raise RefusedError(
            "request",
            f"{said(stamp)}, {said(counted)} counted, generation {request.generation} cannot be right",
        )


# The clients' replies.


def reply_content(reply: Reply) -> RecordDict:
    """A reply as it travels."""
    header: dict[str, Any] = {
        "experiment": reply.experiment,
        "client": reply.client,
        "generation": reply.generation,
        "round": reply.stamp.round,
        "attempt": reply.stamp.attempt,
    }
    return RecordDict(
        {
            "reply": ConfigRecord(header),
            "up": to_record(reply.up),
            "buffers": to_record(reply.buffers),
            "metrics": MetricRecord({"loss": reply.loss, "steps": reply.steps}),
        }
    )


def refusal_content(kind: str, message: str) -> RecordDict:
    """That a client does not do what it was asked, and why."""
    return RecordDict({"refusal": ConfigRecord({"kind": kind, "message": message})})


def read_reply(
    content: RecordDict, up: Collection[str] | None = None, buffers: Collection[str] | None = None
) -> Reply:
    """The reply in a message.

    Args:
        content: of the message.
        up: the names of the vectors that were asked for; None accepts any.
        buffers: the names of the buffers that were asked for; None accepts any.

    Raises:
        RefusedError: it is none, or the client refused.
    """
    if "refusal" in content:
        refusal = _config(content, "refusal")
        raise RefusedError(
            printable(refusal.get("kind", "refused"), 40),
            f"the client refuses: {printable(refusal.get('message'), MOST_SAID)}",
        )
    header = _config(content, "reply")
    metrics = content.get("metrics")
    if not isinstance(metrics, MetricRecord):
        raise RefusedError("record", "there are no metrics in the reply")
    return Reply(
        experiment=_get(header, "experiment", str),
        client=_get(header, "client", int),
        generation=_get(header, "generation", int),
        stamp=Stamp(_get(header, "round", int), _get(header, "attempt", int)),
        up=from_record(content.get("up"), up),
        buffers=from_record(content.get("buffers"), buffers),
        loss=_get(metrics, "loss", float),
        steps=_get(metrics, "steps", int),
    )


def hello_content(hello: Hello) -> RecordDict:
    """Who a node is, as it travels."""
    return RecordDict({"hello": ConfigRecord({"client": hello.client, "samples": hello.samples})})


def read_hello(content: RecordDict, clients: int) -> Hello:
    """Who a node says it is."""
    if "refusal" in content:
        read_reply(content)
    config = _config(content, "hello")
    hello = Hello(_get(config, "client", int), _get(config, "samples", int))
    if not 0 <= hello.client < clients:
        raise RefusedError(
            "client", f"a node says it is client {hello.client}; clients are 0 to {clients - 1}"
        )
    if not 1 <= hello.samples <= MOST_SAMPLES:
        raise RefusedError("client", f"client {hello.client} says it has {hello.samples} samples")
    return hello


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
