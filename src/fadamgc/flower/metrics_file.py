"""The progress of a federation in Prometheus' text format, for node_exporter's textfile collector.

The metrics are those of the last closed round and sums over all closed rounds, and are in ``METRICS``.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import NamedTuple

from fadamgc.errors import FadamgcError, cut
from fadamgc.federation.record import Record
from fadamgc.files import make_folder, unwritable, write_atomic
from fadamgc.flower.coordinator import Coordinator
from fadamgc.flower.logs import log
from fadamgc.flower.reply_checks import STATISTICS, norm_name

METRICS_FILE = "metrics.prom"  # in the server's folder, which is private
PREFIX = "fadamgc_"
METRICS = {  # name: type and description
    "round": ("gauge", "Number of the last closed round."),
    "rounds_planned": ("gauge", "Number of the last round of this run, unless a target is reached before."),
    "complete": ("gauge", "1 if the last round or the target has been reached, else 0."),
    "last_progress_timestamp_seconds": (
        "gauge",
        "Unix time when the last round was closed, or when the server was started after it.",
    ),
    "clients": ("gauge", "Number of clients in the federation."),
    "round_duration_seconds": ("gauge", "Duration of the last round."),
    "round_clients_asked": ("gauge", "Clients that were asked in the last round."),
    "round_replies_counted": ("gauge", "Replies that count in the last round."),
    "round_replies_missing": (
        "gauge",
        "Clients whose reply was asked for in the last round and does not count: missing or refused.",
    ),
    "round_refusals": ("gauge", "Replies and nodes that were refused in the last round (at most 100)."),
    "replies_counted_total": ("counter", "Replies that count, in all rounds."),
    "replies_missing_total": ("counter", "Replies that were asked for and do not count, in all rounds."),
    "bytes_up_total": ("counter", "Bytes that clients sent, in all rounds, by the cost model."),
    "bytes_down_total": ("counter", "Bytes that clients received, in all rounds, by the cost model."),
    "train_loss": ("gauge", "Mean training loss of the clients, in the last round that has one."),
    "test_loss": ("gauge", "Loss on the server's test data, in the last round that was evaluated."),
    "test_metric": ("gauge", "Metric on the server's test data, in the last round that was evaluated."),
    "update_norm": ("gauge", "Norm of a field of the replies that count in the last round."),
    "test_metrics": ("gauge", "All numbers of a metric that has several, in the last evaluated round."),
}


class Sample(NamedTuple):
    """One number of a metric; ``labels`` are in addition to the name of the experiment."""

    metric: str
    value: float
    labels: Mapping[str, str] = {}


def start_metrics(coordinator: Coordinator, file: Path) -> None:
    """Write the file before the first round; fail if it cannot be written."""
    make_folder(file.parent)
    try:
        _write(coordinator, file)
    except OSError as error:
        raise unwritable(file, error) from error


def update_metrics(coordinator: Coordinator, file: Path) -> None:
    """Write the file after a round; a failure is logged, and the run continues."""
    try:
        _write(coordinator, file)
    except (OSError, FadamgcError) as error:
        log.warning("metrics-file %s cannot be written: %s", cut(str(file)), error)


def metrics_text(coordinator: Coordinator, now: float) -> str:
    """Return the content of the file.

    ``now`` is the Unix time when the last round was closed, or the server was started.
    """
    samples: dict[str, list[Sample]] = {}
    for sample in _samples(coordinator, now):
        samples.setdefault(sample.metric, []).append(sample)
    lines = []
    for name, (kind, description) in METRICS.items():
        if name in samples:
            lines += [f"# HELP {PREFIX}{name} {description}", f"# TYPE {PREFIX}{name} {kind}"]
        for sample in samples.get(name, []):
            labels = {"experiment": coordinator.experiment, **sample.labels}
            words = ",".join(f'{key}="{_escaped(value)}"' for key, value in labels.items())
            lines.append(f"{PREFIX}{name}{{{words}}} {_number(sample.value)}")
    return "\n".join(lines) + "\n"


def _write(coordinator: Coordinator, file: Path) -> None:
    # Prometheus' exporter is another user: the file is not private, but the server's folder is.
    write_atomic(file, metrics_text(coordinator, time.time()).encode())


def _samples(c: Coordinator, now: float) -> Iterator[Sample]:
    yield Sample("round", c.t)
    yield Sample("rounds_planned", c.settings.rounds)
    yield Sample("complete", c.over())
    yield Sample("last_progress_timestamp_seconds", now)
    yield Sample("clients", c.n)
    history = c.history
    missing = [len(record.dropped) + len(record.absent) for record in history]
    counted = [len(record.sampled) - count for record, count in zip(history, missing, strict=True)]
    yield Sample("replies_counted_total", sum(counted))
    yield Sample("replies_missing_total", sum(missing))
    yield Sample("bytes_up_total", sum(record.bytes_up for record in history))
    yield Sample("bytes_down_total", sum(record.bytes_down for record in history))
    if not history:
        return
    yield Sample("round_duration_seconds", history[-1].wall_seconds)
    yield Sample("round_clients_asked", len(history[-1].sampled))
    yield Sample("round_replies_counted", counted[-1])
    yield Sample("round_replies_missing", missing[-1])
    yield Sample("round_refusals", len(c.refusals_in(c.t)))
    for name in ("train_loss", "test_loss", "test_metric"):
        if (value := _last(history, name)) is not None:
            yield Sample(name, value)
    numbers = next((record.metrics for record in reversed(history) if record.metrics), {})
    for number, value in numbers.items():
        yield Sample("test_metrics", value, {"name": number})
    for field, statistic in product(c.sent_fields, STATISTICS):
        if (value := history[-1].replies.get(norm_name(field, statistic))) is not None:
            yield Sample("update_norm", value, {"field": field, "of": statistic})


def _last(history: list[Record], name: str) -> float | None:
    """Return the value in the last round that has one."""
    values = (getattr(record, name) for record in reversed(history))
    return next((value for value in values if value is not None), None)


def _number(value: float) -> str:
    """Return a number as Prometheus reads it: ``repr`` for finite numbers, without loss.

    >>> [_number(value) for value in (3, 0.1, float("nan"), float("-inf"), True)]
    ['3.0', '0.1', 'NaN', '-Inf', '1.0']
    """
    if math.isfinite(value):
        return repr(float(value))
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"


def _escaped(text: str) -> str:
    r"""Return the value of a label with backslashes, quotes and line ends escaped.

    >>> print(_escaped('a "b"\n'))
    a \"b\"\n
    """
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
