"""Collecting replies at the server: no reply waits for another, and none is pulled beyond its size limit.

Flower's ``Grid.pull_messages`` waits until all arrays of a reply have been uploaded (for up to two hours),
and pulls whatever a node has announced. The client behind Flower's ``HttpGrid`` pulls one object at a time,
and says at once if an object has not arrived yet, so ``ObjectInbox`` uses that client. Its interface is
private to Flower; this file is the only one that uses it. For any other grid, ``ThreadInbox`` calls
``pull_messages`` and leaves a call that waits to its thread.
"""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterable, Mapping
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Protocol

from flwr.app import Message
from flwr.serverapp import Grid

from fadamgc.flower.protocol import RefusedError

PATIENCE = 0.2  # seconds without a result after which a call to a grid is left to its thread
OVERHEAD = 1 << 16  # bytes that a reply may have in addition to its arrays
OVERHEAD_PER_ARRAY = 1 << 11  # bytes for the name, shape and type of an array
SMALLEST_CHUNK = 1 << 16  # bytes; Flower cuts arrays into chunks of 5 MB

Arrived = list[tuple[str, Message | Exception]]


class TooLargeError(RefusedError):
    """A reply is larger than any reply to that message can be."""

    def __init__(self, reason: str) -> None:
        super().__init__("too large", f"its reply is not pulled: {reason}")


class SizeLimit:
    """How large a reply may be.

    Args:
        arrays: how many arrays the reply has.
        size: bytes of all these arrays.
    """

    def __init__(self, arrays: int = 0, size: int = 0) -> None:
        self.objects = 64 + 4 * arrays + size // SMALLEST_CHUNK
        self.bytes = size + size // 64 + OVERHEAD + OVERHEAD_PER_ARRAY * arrays

    def check(self, objects: int, size: int) -> None:
        """Raise an error for a reply that exceeds the limit."""
        if objects > self.objects:
            raise TooLargeError(f"it has {objects} parts, more than {self.objects}")
        if size > self.bytes:
            raise TooLargeError(f"it has at least {size} bytes, more than {self.bytes}")


class Inbox(Protocol):
    """Collects replies."""

    def collect(self, limits: Mapping[str, SizeLimit]) -> Arrived:
        """Return the replies to these messages that have arrived, without waiting for the others.

        Args:
            limits: the size limit of each reply, by the id of the message.

        Returns:
            The id of each answered message, with the reply or the reason why the reply cannot be read.
        """

    def forget(self, message_ids: Iterable[str]) -> None:
        """Discard the replies to these messages, including those that arrive later."""

    def busy(self, message_id: str) -> bool:
        """Return whether a thread still waits for the reply to this message."""


def make_inbox(grid: Grid) -> Inbox:
    """Return the inbox that fits a grid."""
    with suppress(ImportError, AttributeError):
        from flwr.superlink.grid.http_grid import HttpGrid

        if isinstance(grid, HttpGrid):
            return ObjectInbox(grid)
    return ThreadInbox(grid)


class PartialReply:
    """A reply that is being pulled."""

    def __init__(self, reply_id: str, limit: SizeLimit) -> None:
        self.reply_id, self.limit = reply_id, limit
        self.missing: list[str] = []  # ids of the objects that have not been pulled
        self.contents: dict[str, bytes] = {}
        self.size = 0


class ObjectInbox:
    """Pulls replies object by object from a SuperLink.

    Args:
        grid: Flower's ``HttpGrid``.
    """

    def __init__(self, grid: Any) -> None:
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, PullObjectRequest
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest
        from flwr.supercore.constant import HEAD_BODY_DIVIDER
        from flwr.supercore.inflatable import inflatable_object, inflatable_utils

        self._pull_messages, self._pull_object = PullAppMessagesRequest, PullObjectRequest
        self._confirm_received = ConfirmMessageReceivedRequest
        self._objects, self._utils, self._divider = inflatable_object, inflatable_utils, HEAD_BODY_DIVIDER
        self._client = grid._runtime_client
        self._sender = {"node": grid.node, "run_id": grid.run.run_id}
        self._partial: dict[str, PartialReply] = {}
        self._response_limit: int | None = None  # bytes that the next response may have
        with suppress(AttributeError):  # the size of a response is known before its body is read
            self._client._client.event_hooks["response"].append(self._check_response)

    def collect(self, limits: Mapping[str, SizeLimit]) -> Arrived:
        """Return the replies that have arrived in full."""
        arrived: Arrived = []
        for message_id, limit in limits.items():
            try:
                message = self._pull(message_id, limit)
            except Exception as error:  # an untrusted node may have sent anything
                self._confirm(self._partial.pop(message_id, None))
                arrived.append((message_id, error))
            else:
                if message is not None:
                    self._partial.pop(message_id)
                    arrived.append((message_id, message))
        return arrived

    def forget(self, message_ids: Iterable[str]) -> None:
        """Discard the parts of the replies to these messages, and do not pull the rest."""
        for message_id in message_ids:
            self._confirm(self._partial.pop(message_id, None))

    def busy(self, message_id: str) -> bool:
        """Return False: there are no threads."""
        del message_id
        return False

    def _pull(self, message_id: str, limit: SizeLimit) -> Message | None:
        """Pull the available parts of one reply; return the reply if it is complete."""
        partial = self._partial.get(message_id) or self._open(message_id, limit)
        if partial is None:
            return None
        while partial.missing:
            self._response_limit = partial.limit.bytes - partial.size + OVERHEAD
            try:
                response = self._client.PullObject(
                    self._pull_object(**self._sender, object_id=partial.missing[-1])
                )
            finally:
                self._response_limit = None
            if not response.object_found:
                raise RefusedError("lost", "its reply was never uploaded in full")
            if not response.object_available:
                return None  # not uploaded yet
            partial.size += len(response.object_content)
            partial.limit.check(0, partial.size)
            partial.contents[partial.missing.pop()] = response.object_content
        self._check_arrays(partial)
        self._confirm(partial)
        message = self._utils.inflate_object_from_contents(partial.reply_id, partial.contents)
        if not isinstance(message, Message):
            raise RefusedError("record", "its reply is not a message")
        message.metadata.__dict__["_message_id"] = partial.reply_id
        return message

    def _open(self, message_id: str, limit: SizeLimit) -> PartialReply | None:
        """Ask which objects the reply to a message has; return None if there is no reply yet."""
        self._response_limit = OVERHEAD + 256 * limit.objects
        try:
            response = self._client.PullMessages(self._pull_messages(message_ids=[message_id]))
        finally:
            self._response_limit = None
        for reply, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            partial = PartialReply(reply.metadata.message_id, limit)
            self._partial[message_id] = partial  # even if it is refused: then the SuperLink may forget it
            object_ids: dict[str, None] = {}
            for count, part in enumerate(self._objects.iterate_object_tree(tree), start=1):
                limit.check(count, 0)
                object_ids[part.object_id] = None
            partial.missing = list(object_ids)  # the message itself is the last, and pulled first
            return partial
        return None

    def _check_arrays(self, partial: PartialReply) -> None:
        """Refuse arrays that name one chunk many times, and so become larger than what was pulled."""
        total = 0
        for content in partial.contents.values():
            kind, children, _ = self._objects.get_object_head_values_from_object_content(content)
            if kind == "Array":
                body = json.loads(content.partition(self._divider)[2])
                total += sum(len(partial.contents[children[i]]) for i in body["arraychunk_ids"])
        partial.limit.check(0, total)

    def _confirm(self, partial: PartialReply | None) -> None:
        """Let the SuperLink forget a reply."""
        if partial is not None:
            with suppress(Exception):
                self._client.ConfirmMessageReceived(
                    self._confirm_received(**self._sender, message_object_id=partial.reply_id)
                )

    def _check_response(self, response: Any) -> None:
        """Refuse a response that announces more bytes than are left, before its body is read."""
        announced = response.headers.get("content-length", "")
        limit = self._response_limit
        if limit is not None and announced.isdigit() and int(announced) > limit:
            raise TooLargeError(f"one of its parts has {announced} bytes")


class ThreadInbox:
    """Pulls replies with ``pull_messages``, one after the other; a call that waits is left to its thread.

    There are never more threads than messages whose reply is being waited for, and they end with the process.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._asking: set[str] = set()  # messages whose reply a thread asks for
        self._given_up: set[str] = set()  # those of them whose reply is no longer wanted
        self._results: SimpleQueue[tuple[str, list[Message] | Exception]] = SimpleQueue()
        # Results that arrived while the replies to other messages were collected.
        self._early: dict[str, list[Message] | Exception] = {}

    def collect(self, limits: Mapping[str, SizeLimit]) -> Arrived:
        """Return the replies that have arrived; a call that waits for one continues in its thread."""
        arrived: Arrived = []
        for message_id in [message_id for message_id in limits if message_id in self._early]:
            arrived += self._read(message_id, self._early.pop(message_id), limits[message_id])
        done = {message_id for message_id, _ in arrived}
        todo = deque(message_id for message_id in limits if message_id not in self._asking | done)
        unanswered = set(todo)
        self._asking |= unanswered
        if todo:
            self._start(todo)
        while True:
            try:
                message_id, result = self._results.get(timeout=PATIENCE if unanswered else 0.0001)
            except Empty:
                if not todo:
                    return arrived
                self._start(todo)
                continue
            self._asking.discard(message_id)
            unanswered.discard(message_id)
            if message_id in limits:
                arrived += self._read(message_id, result, limits[message_id])
            elif message_id not in self._given_up:
                self._early[message_id] = result
            self._given_up.discard(message_id)

    def _read(self, message_id: str, result: list[Message] | Exception, limit: SizeLimit) -> Arrived:
        """Return the reply in the result of a call, if there is one."""
        if isinstance(result, Exception):
            return [(message_id, result)]
        for message in result:
            try:
                limit.check(0, _array_bytes(message))
            except TooLargeError as error:
                return [(message_id, error)]
            return [(message_id, message)]
        return []

    def forget(self, message_ids: Iterable[str]) -> None:
        """Discard the replies to these messages, including those that a thread still waits for."""
        for message_id in message_ids:
            self._early.pop(message_id, None)
            if message_id in self._asking:
                self._given_up.add(message_id)

    def busy(self, message_id: str) -> bool:
        """Return whether a thread still waits for the reply to this message."""
        return message_id in self._asking

    def _start(self, todo: deque[str]) -> None:
        """Start a thread that pulls the replies to the messages in ``todo``, one after the other."""

        def work() -> None:
            while True:
                try:
                    message_id = todo.popleft()
                except IndexError:
                    return
                try:
                    self._results.put((message_id, list(self._grid.pull_messages([message_id]))))
                except Exception as error:  # an untrusted node may have sent anything
                    self._results.put((message_id, error))

        threading.Thread(target=work, daemon=True).start()


def _array_bytes(message: Message) -> int:
    """Return how many bytes the arrays of a message have."""
    if message.has_error():
        return 0
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())
