"""Collecting replies at the server: no reply waits for another, and none is pulled beyond its size limit.

Flower's ``HttpGrid.pull_messages`` waits until all arrays of a reply have been uploaded (for up to two
hours), and pulls whatever a node has announced. The client behind an ``HttpGrid`` pulls one object at a time,
and says at once if an object has not arrived yet, so ``ObjectInbox`` uses that client. Its interface is
private to Flower (the same in 1.41 and 1.42); this file is the only one that uses it. The grid of Flower's
simulation has all replies in memory, so ``DirectInbox`` calls its ``pull_messages``, which does not wait.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from flwr.app import Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.constant import HEAD_BODY_DIVIDER
from flwr.supercore.inflatable.inflatable_object import (
    get_object_head_values_from_object_content,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

from fadamgc.flower.protocol import RefusedError

OVERHEAD = 1 << 16  # bytes that a reply may have in addition to its arrays
OVERHEAD_PER_ARRAY = 1 << 11  # bytes for the name, shape and type of an array
SMALLEST_CHUNK = 1 << 16  # bytes; Flower cuts arrays into chunks of 5 MB


class TooLargeError(RefusedError):
    """A reply is larger than a correct reply can be."""

    def __init__(self, reason: str) -> None:
        super().__init__("too large", f"its reply is not pulled: {reason}")


class SizeLimit:
    """The largest size of a reply whose arrays have ``size`` bytes together."""

    def __init__(self, arrays: int = 0, size: int = 0) -> None:
        self.objects = 64 + 4 * arrays + size // SMALLEST_CHUNK
        self.bytes = size + size // 64 + OVERHEAD + OVERHEAD_PER_ARRAY * arrays

    def check(self, objects: int, size: int) -> None:
        """Raise an error for a reply that exceeds the limit."""
        if objects > self.objects:
            raise TooLargeError(f"it has {objects} parts, more than {self.objects}")
        if size > self.bytes:
            raise TooLargeError(f"it has at least {size} bytes, more than {self.bytes}")


@dataclass
class PartialReply:
    """A reply that is being pulled."""

    reply_id: str
    missing: list[str] = field(default_factory=list)  # ids of the objects that have not been pulled
    contents: dict[str, bytes] = field(default_factory=dict)
    size: int = 0


class Inbox(ABC):
    """Collects the replies that have arrived at a grid."""

    def collect(self, limits: Mapping[str, SizeLimit]) -> list[tuple[str, Message | Exception]]:
        """Return the messages that have been answered in full, each with its reply or the reply's error.

        ``limits`` are the ids of the messages to collect replies for, each with the reply's size limit.
        """
        arrived: list[tuple[str, Message | Exception]] = []
        for message_id, limit in limits.items():
            result: Message | Exception | None
            try:
                result = self._pull(message_id, limit)
            except Exception as error:  # an untrusted node may have sent anything
                result = error
            if result is not None:
                arrived.append((message_id, result))
                self.forget([message_id])
        return arrived

    @abstractmethod
    def forget(self, message_ids: Iterable[str]) -> None:
        """Discard what has arrived of the replies to these messages."""

    @abstractmethod
    def _pull(self, message_id: str, limit: SizeLimit) -> Message | None:
        """Return the reply to a message, or None if it has not arrived in full."""


class DirectInbox(Inbox):
    """Pulls replies with ``pull_messages``, from a grid on which this call does not wait."""

    def __init__(self, grid: Grid) -> None:
        self._grid = grid

    def forget(self, message_ids: Iterable[str]) -> None:
        """Do nothing: replies arrive in one part."""

    def _pull(self, message_id: str, limit: SizeLimit) -> Message | None:
        reply = next(iter(self._grid.pull_messages([message_id])), None)
        if reply is not None and not reply.has_error():
            records = reply.content.array_records.values()
            limit.check(0, sum(len(array.data) for record in records for array in record.values()))
        return reply


class ObjectInbox(Inbox):
    """Pulls replies object by object from a SuperLink, through Flower's ``HttpGrid``."""

    def __init__(self, grid: Any) -> None:
        self._client = grid._runtime_client
        self._sender: dict[str, Any] = {"node": grid.node, "run_id": grid.run.run_id}
        self._partial: dict[str, PartialReply] = {}
        self._response_limit: int | None = None  # bytes that the next response may have
        # The size of a response is known before its body is read.
        self._client._client.event_hooks["response"].append(self._check_response)

    def forget(self, message_ids: Iterable[str]) -> None:
        """Discard the parts of the replies to these messages, and let the SuperLink discard the replies."""
        for message_id in message_ids:
            if (partial := self._partial.pop(message_id, None)) is not None:
                request = ConfirmMessageReceivedRequest(**self._sender, message_object_id=partial.reply_id)
                with suppress(Exception):
                    self._client.ConfirmMessageReceived(request)

    def _pull(self, message_id: str, limit: SizeLimit) -> Message | None:
        """Pull the available parts of one reply; return the reply if it is complete."""
        partial = self._partial.get(message_id) or self._open(message_id, limit)
        if partial is None:
            return None
        while partial.missing:
            request = PullObjectRequest(**self._sender, object_id=partial.missing[-1])
            response = self._call(self._client.PullObject, request, limit.bytes - partial.size + OVERHEAD)
            if not response.object_found:
                raise RefusedError("lost", "its reply was never uploaded in full")
            if not response.object_available:
                return None  # not uploaded yet
            partial.size += len(response.object_content)
            limit.check(0, partial.size)
            partial.contents[partial.missing.pop()] = response.object_content
        self._check_arrays(partial.contents, limit)
        message = inflate_object_from_contents(partial.reply_id, partial.contents)
        if not isinstance(message, Message):
            raise RefusedError("record", "its reply is not a message")
        message.metadata.__dict__["_message_id"] = partial.reply_id
        return message

    def _open(self, message_id: str, limit: SizeLimit) -> PartialReply | None:
        """Ask which objects the reply to a message has; return None if there is no reply yet."""
        request = PullAppMessagesRequest(message_ids=[message_id])
        response = self._call(self._client.PullMessages, request, OVERHEAD + 256 * limit.objects)
        for reply, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            partial = PartialReply(reply.metadata.message_id)
            self._partial[message_id] = partial  # also if it is refused below, so that ``forget`` finds it
            object_ids: dict[str, None] = {}
            for count, part in enumerate(iterate_object_tree(tree), start=1):
                limit.check(count, 0)
                object_ids[part.object_id] = None
            partial.missing = list(object_ids)  # the message itself is the last, and pulled first
            return partial
        return None

    def _check_arrays(self, contents: Mapping[str, bytes], limit: SizeLimit) -> None:
        """Refuse arrays that name one chunk many times, and so become larger than what was pulled."""
        total = 0
        for content in contents.values():
            kind, children, _ = get_object_head_values_from_object_content(content)
            if kind == "Array":
                body = json.loads(content.partition(HEAD_BODY_DIVIDER)[2])
                total += sum(len(contents[children[i]]) for i in body["arraychunk_ids"])
        limit.check(0, total)

    def _call(self, method: Callable[[Any], Any], request: Any, limit: int) -> Any:
        """Send a request whose response may have ``limit`` bytes."""
        self._response_limit = limit
        try:
            return method(request)
        finally:
            self._response_limit = None

    def _check_response(self, response: Any) -> None:
        """Refuse a response that announces too many bytes, before its body is read."""
        announced, limit = response.headers.get("content-length", ""), self._response_limit
        if limit is not None and announced.isdigit() and int(announced) > limit:
            raise TooLargeError(f"one of its parts has {announced} bytes")


def make_inbox(grid: Grid) -> Inbox:
    """Return the inbox that fits a grid."""
    from flwr.superlink.grid.http_grid import HttpGrid  # slow to import, and no node needs it

    return ObjectInbox(grid) if isinstance(grid, HttpGrid) else DirectInbox(grid)
