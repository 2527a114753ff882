"""Replies on their way to the server: no reply waits for another, and none is pulled beyond its size.

Flower's ``Grid.pull_messages`` waits until all arrays of a reply have been uploaded (for up to two hours),
and pulls whatever a node has announced. The client behind Flower's ``HttpGrid`` gives one object at a time,
and says at once if an object is not there yet, so ``ObjectInbox`` asks that client itself. That interface is
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

PATIENCE = 0.2  # seconds without any answer after which a call to a grid is left to its thread
ROOM = 1 << 16  # bytes that a reply may have in addition to its arrays
ROOM_PER_ARRAY = 1 << 11  # name, shape, type
SMALLEST_CHUNK = 1 << 16  # bytes; Flower cuts arrays into chunks of 5 MB

Arrived = list[tuple[str, Message | Exception]]


class TooLargeError(RefusedError):
    """A reply is larger than any reply to that message can be."""

    def __init__(self, why: str) -> None:
        super().__init__("too large", f"its reply is not pulled: {why}")


class SizeLimit:
    """How large a reply may be.

    Args:
        arrays: how many arrays the reply has.
        size: bytes of all these arrays.
    """

    def __init__(self, arrays: int = 0, size: int = 0) -> None:
        self.objects = 64 + 4 * arrays + size // SMALLEST_CHUNK
        self.bytes = size + size // 64 + ROOM + ROOM_PER_ARRAY * arrays

    def check(self, objects: int, size: int) -> None:
        """Refuse what is beyond the limit."""
        if objects > self.objects:
            raise TooLargeError(f"it has {objects} parts, more than {self.objects}")
        if size > self.bytes:
            raise TooLargeError(f"it has at least {size} bytes, more than {self.bytes}")


class Inbox(Protocol):
    """Where replies are collected."""

    def collect(self, limits: Mapping[str, SizeLimit]) -> Arrived:
        """Return the replies that have arrived to these messages; does not wait for the others.

        Args:
            limits: for the id of each message, how large its reply may be.

        Returns:
            The id of each message that was answered, with the reply or the reason why it cannot be read.
        """

    def forget(self, identities: Iterable[str]) -> None:
        """Discard the replies to these messages, those that have arrived and those to come."""

    def busy(self, identity: str) -> bool:
        """Whether a thread still waits for the reply to this message."""


def make_inbox(grid: Grid) -> Inbox:
    """Return the inbox that fits a grid."""
    with suppress(ImportError, AttributeError):
        from flwr.superlink.grid.http_grid import HttpGrid

        if isinstance(grid, HttpGrid):
            return ObjectInbox(grid)
    return ThreadInbox(grid)


class PartialReply:
    """A reply that is being pulled."""

    def __init__(self, message: str, limit: SizeLimit, objects: list[str]) -> None:
        self.message, self.limit = message, limit
        self.missing = objects
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

        self._requests = PullAppMessagesRequest, PullObjectRequest, ConfirmMessageReceivedRequest
        self._objects, self._utils, self._divider = inflatable_object, inflatable_utils, HEAD_BODY_DIVIDER
        self._client = grid._runtime_client
        self._whose = {"node": grid.node, "run_id": grid.run.run_id}
        self._parcels: dict[str, PartialReply] = {}
        self._room: int | None = None  # bytes that the next response may have
        with suppress(AttributeError):  # the size of a response is known before its body is read
            self._client._client.event_hooks["response"].append(self._look_at_size)

    def collect(self, limits: Mapping[str, SizeLimit]) -> Arrived:
        """Return the replies of which every object is there."""
        found: Arrived = []
        for identity, limit in limits.items():
            try:
                message = self._pull(identity, limit)
            except Exception as error:  # what a stranger sent cannot be made into a message
                self._confirm(self._parcels.pop(identity, None))
                found.append((identity, error))
            else:
                if message is not None:
                    self._parcels.pop(identity)
                    found.append((identity, message))
        return found

    def forget(self, identities: Iterable[str]) -> None:
        """Discard the parts of the replies to these messages; nobody asks for them again."""
        for identity in identities:
            self._confirm(self._parcels.pop(identity, None))

    def busy(self, identity: str) -> bool:
        """No: there are no threads."""
        del identity
        return False

    def _pull(self, identity: str, limit: SizeLimit) -> Message | None:
        """Pull the available parts of one reply; return the reply if it is complete."""
        parcel = self._parcels.get(identity) or self._open(identity, limit)
        if parcel is None:
            return None
        while parcel.missing:
            self._room = parcel.limit.bytes - parcel.size + ROOM
            try:
                response = self._client.PullObject(
                    self._requests[1](**self._whose, object_id=parcel.missing[-1])
                )
            finally:
                self._room = None
            if not response.object_found:
                raise RefusedError("lost", "its reply was never uploaded in full")
            if not response.object_available:
                return None  # on its way
            parcel.size += len(response.object_content)
            parcel.limit.check(0, parcel.size)
            parcel.contents[parcel.missing.pop()] = response.object_content
        self._check_arrays(parcel)
        self._confirm(parcel)
        message = self._utils.inflate_object_from_contents(parcel.message, parcel.contents)
        if not isinstance(message, Message):
            raise RefusedError("record", "its reply is not a message")
        message.metadata.__dict__["_message_id"] = parcel.message
        return message

    def _open(self, identity: str, limit: SizeLimit) -> PartialReply | None:
        """Ask for the reply to a message: which objects it has."""
        self._room = ROOM + 256 * limit.objects
        try:
            response = self._client.PullMessages(self._requests[0](message_ids=[identity]))
        finally:
            self._room = None
        for message, tree in zip(response.messages_list, response.message_object_trees, strict=True):
            parcel = PartialReply(message.metadata.message_id, limit, [])
            self._parcels[identity] = parcel  # also where it is refused: then the SuperLink may forget it
            names: dict[str, None] = {}
            for count, part in enumerate(self._objects.iterate_object_tree(tree), start=1):
                limit.check(count, 0)
                names[part.object_id] = None
            parcel.missing = list(names)  # the message itself is the last, and pulled first
            return parcel
        return None

    def _check_arrays(self, parcel: PartialReply) -> None:
        """Refuse arrays that name one chunk many times, and so become larger than what was pulled."""
        total = 0
        for content in parcel.contents.values():
            kind, children, _ = self._objects.get_object_head_values_from_object_content(content)
            if kind == "Array":
                body = json.loads(content.partition(self._divider)[2])
                total += sum(len(parcel.contents[children[i]]) for i in body["arraychunk_ids"])
        parcel.limit.check(0, total)

    def _confirm(self, parcel: PartialReply | None) -> None:
        """Let the SuperLink forget a reply."""
        if parcel is not None:
            with suppress(Exception):
                self._client.ConfirmMessageReceived(
                    self._requests[2](**self._whose, message_object_id=parcel.message)
                )

    def _look_at_size(self, response: Any) -> None:
        announced = response.headers.get("content-length", "")
        if self._room is not None and announced.isdigit() and int(announced) > self._room:
            raise TooLargeError(f"one of its parts has {announced} bytes")


class ThreadInbox:
    """Pulls replies with ``pull_messages``, one after the other; a call that waits is left to its thread.

    There are never more threads than messages whose reply is being waited for, and they end with the process.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._asking: set[str] = set()  # messages whose reply a thread asks for
        self._given_up: set[str] = set()  # those of them whose reply is no longer wanted
        self._early: dict[
            str, list[Message] | Exception
        ] = {}  # replies that came while others were collected
        self._answers: SimpleQueue[tuple[str, list[Message] | Exception]] = SimpleQueue()

    def collect(self, limits: Mapping[str, SizeLimit]) -> Arrived:
        """Return the replies that have arrived; a call that waits for one continues in its thread."""
        found: Arrived = []
        for identity in [identity for identity in limits if identity in self._early]:
            found += self._read(identity, self._early.pop(identity), limits[identity])
        done = {identity for identity, _ in found}
        todo = deque(identity for identity in limits if identity not in self._asking | done)
        fresh = set(todo)
        self._asking |= fresh
        if todo:
            self._start(todo)
        while True:
            try:
                identity, answer = self._answers.get(timeout=PATIENCE if fresh else 0.0001)
            except Empty:
                if not todo:
                    return found
                self._start(todo)
                continue
            self._asking.discard(identity)
            fresh.discard(identity)
            if identity in limits:
                found += self._read(identity, answer, limits[identity])
            elif identity not in self._given_up:
                self._early[identity] = answer
            self._given_up.discard(identity)

    def _read(self, identity: str, answer: list[Message] | Exception, limit: SizeLimit) -> Arrived:
        """The reply in what a grid has given, if there is one."""
        if isinstance(answer, Exception):
            return [(identity, answer)]
        for message in answer:
            try:
                limit.check(0, _size(message))
            except TooLargeError as error:
                return [(identity, error)]
            return [(identity, message)]
        return []

    def forget(self, identities: Iterable[str]) -> None:
        """Drop the replies to these messages; what a thread still waits for is dropped when it comes."""
        for identity in identities:
            self._early.pop(identity, None)
            if identity in self._asking:
                self._given_up.add(identity)

    def busy(self, identity: str) -> bool:
        """Whether a thread still waits for the reply to this message."""
        return identity in self._asking

    def _start(self, todo: deque[str]) -> None:
        def work() -> None:
            while True:
                try:
                    identity = todo.popleft()
                except IndexError:
                    return
                try:
                    self._answers.put((identity, list(self._grid.pull_messages([identity]))))
                except Exception as error:  # what a stranger sent cannot be made into a message
                    self._answers.put((identity, error))

        threading.Thread(target=work, daemon=True).start()


def _size(message: Message) -> int:
    """Bytes of a message's arrays."""
    if message.has_error():
        return 0
    records = message.content.array_records.values()
    return sum(len(array.data) for record in records for array in record.values())
