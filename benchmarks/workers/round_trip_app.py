"""The digits app of Flower, which notes when each part of a round begins: see ``round_trip.py``.

Every line of the file $ROUND_TRIP_EVENTS is one event with the machine's time in seconds.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

IMPORTING = time.time()


def process_start() -> float:
    """Return when this process started; Linux only."""
    ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
    age = float(Path("/proc/uptime").read_text().split()[0]) - ticks / os.sysconf("SC_CLK_TCK")
    return time.time() - age


def note(**event: Any) -> None:
    """Append an event to the file."""
    line = json.dumps(event) + "\n"
    with open(os.environ["ROUND_TRIP_EVENTS"], "ab", buffering=0) as file:
        file.write(line.encode())


WARM = "torch" in sys.modules  # imported before this process began

from flwr.superlink.grid.http_grid import HttpGrid  # noqa: E402

from fadamgc.flower import client_app, dataset_apps, server_app  # noqa: E402
from fadamgc.flower.inbox import Inbox  # noqa: E402
from fadamgc.flower.strategy import Strategy  # noqa: E402

IMPORTED = time.time()

push, collect, close = HttpGrid.push_messages, Inbox.collect, Strategy.aggregate_train


def _push(grid: Any, messages: Any) -> Any:
    messages = list(messages)
    result = push(grid, messages)
    for kind in {message.metadata.message_type for message in messages}:
        note(event="pushed", kind=kind, time=time.time())
    return result


def _collect(inbox: Any, limits: Any) -> Any:
    arrived = collect(inbox, limits)
    for _, message in arrived:
        reply = getattr(message, "content", {}).get("reply", {})
        note(event="arrived", client=reply.get("client", -1), time=time.time())
    return arrived


def _close(strategy: Any, server_round: int, replies: Any) -> Any:
    replies = list(replies)
    note(event="complete", round=server_round, time=time.time())
    result = close(strategy, server_round, replies)
    note(event="closed", round=server_round, time=time.time())
    return result


HttpGrid.push_messages = _push  # type: ignore[method-assign]
Inbox.collect = _collect  # type: ignore[method-assign]
Strategy.aggregate_train = _close  # type: ignore[method-assign]

times: dict[str, float] = {}


def load(context: Any) -> Any:
    """Return what the digits app loads."""
    times["loading"] = time.time()
    part = dataset_apps.local(context)
    times["loaded"] = time.time()
    return part


client = client_app(load)
server = server_app(dataset_apps.task)


def handled(message: Any, context: Any) -> Any:
    """Handle a message as the digits app does."""
    times["called"] = time.time()
    reply = client(message, context)
    note(
        event="handled",
        kind=message.metadata.message_type,
        client=context.node_config["partition-id"],
        started=process_start(),
        importing=IMPORTING,
        imported=IMPORTED,
        warm=WARM,
        cpu=time.process_time(),
        time=time.time(),
        **times,
    )
    return reply


class Timed(type(client)):  # type: ignore[misc]
    """A ClientApp that notes its times."""

    def __call__(self, message: Any, context: Any) -> Any:
        """Handle a message."""
        return handled(message, context)


timed = Timed()
