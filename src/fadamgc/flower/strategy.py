"""A Flower Strategy for every algorithm, with waiting that ends."""

from __future__ import annotations

import hashlib
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fadamgc.errors import FadamgcError, InputError
from fadamgc.escape import printable
from fadamgc.federation.run import Record
from fadamgc.flower.coordinator import Coordinator
from fadamgc.flower.inbox import Inbox, SizeLimit, TooLargeError, make_inbox
from fadamgc.flower.protocol import RefusedError
from fadamgc.flower.wire import (
    MAX_REASON,
    TrainRequest,
    read_hello,
    read_reply,
    request_content,
    to_array_record,
)

log = logging.getLogger("fadamgc")

PAUSES = 20  # polls after which a node is asked again whose hello was no good; then twice as many
BARRED_ROUNDS = 10  # rounds in which a node is not asked whose answer was too large


class TooFewClientsError(FadamgcError):
    """There were not enough clients in time."""


class RejectedNode(NamedTuple):
    """A node that is not taken in."""

    why: str
    pause: float  # seconds before it is asked again
    again: float


def brief(error: Exception) -> str:
    """What an error says, on one line and not at any length."""
    text = str(error) if isinstance(error, FadamgcError) else f"{type(error).__name__}: {error}"
    return printable(text, MAX_REASON)


class Strategy(FlowerStrategy):
    """Runs a federation's rounds over Flower; what a round is, the coordinator knows.

    Args:
        coordinator: the state of the federation.
        round_timeout: seconds that a round waits for replies.
        wait_timeout: seconds to wait for clients: for all of them before the first round, for as many as a
            round needs before each.
        below_minimum: what to do when there are fewer than the coordinator's ``min_clients`` after that:
            "skip" the round, or "fail".
        on_round: called with each round's record.
        poll: seconds between two looks for replies.
        bind_clients: accept a client only from the node key that spoke for it first. Without it, any node can
            say that it is any client that no other node speaks for.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        round_timeout: float = 600.0,
        wait_timeout: float = 300.0,
        below_minimum: Literal["skip", "fail"] = "fail",
        on_round: Callable[[Record], object] | None = None,
        poll: float = 0.5,
        bind_clients: bool = False,
    ) -> None:
        for name, value in (("round_timeout", round_timeout), ("wait_timeout", wait_timeout), ("poll", poll)):
            if not value > 0:
                raise InputError(f"{name}={value!r} is not accepted; it must be a number of seconds > 0")
        if below_minimum not in ("skip", "fail"):
            raise InputError(f"below_minimum={below_minimum!r} is not accepted; it must be 'skip' or 'fail'")
        self.coordinator = coordinator
        self.round_timeout, self.wait_timeout, self.poll = round_timeout, wait_timeout, poll
        self.below_minimum, self.on_round = below_minimum, on_round
        self.bind_clients = bind_clients
        self.nodes: dict[int, int] = {}  # the node of each client that has said hello
        self.silent: set[int] = set()  # clients that owe an answer; not asked until they give one
        self._hellos: dict[str, tuple[int, float]] = {}  # messages under way: to which node, until when
        self._strangers: dict[int, RejectedNode] = {}  # nodes whose hello was no good
        self._asked: dict[str, int] = {}  # messages of this round, and the clients they went to
        self._barred: dict[int, int] = {}  # nodes that are not asked, and the round in which they are again
        self._stuck: dict[str, int] = {}  # messages given up whose reply a thread still waits for: which node
        self._keys: dict[int, str] = {}  # digests of the keys of the nodes that are there
        self._inbox: tuple[Grid, Inbox] | None = None

    # What Flower calls.

    def summary(self) -> None:
        """Log what runs."""
        c = self.coordinator
        log.info(
            "%s: %d clients, %s sampled, round %d of %d",
            *(c.algorithm, c.n, c.settings.sampled or "all", c.t + 1, c.settings.rounds),
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """The requests of the next round. The coordinator has the model, so ``arrays`` are not looked at."""
        del server_round, arrays, config, grid
        c = self.coordinator
        asked = c.ask(self.available)
        first = c.needs_setup
        down = {"x": c.problem.x0} if first else c.algorithm.broadcast(c.server)._asdict()
        return [
            Message(
                request_content(
                    TrainRequest(a.request, a.tracked, c.algorithm, c.settings, down, dict(c.buffers))
                ),
                dst_node_id=self.nodes[a.request.client],
                message_type="train",
                ttl=self.round_timeout,
                group_id=str(a.request.stamp.round),
            )
            for a in asked
            if a.request.client in self.nodes
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Take in the replies, and close the round."""
        del server_round
        c = self.coordinator
        owing = set(self._asked.values())
        for message in replies:
            client = self._asked.get(message.metadata.reply_to_message_id)
            if client is None:
                log.warning("a reply to a message that was not sent in this round is not looked at")
                continue
            if message.has_error():
                log.warning("client %d: %s", client, printable(message.error.reason, MAX_REASON))
                continue
            owing.discard(client)
            try:
                reply = read_reply(message.content, *c.wanted(client))
            except Exception as error:  # whatever a stranger can send must not end the run
                log.warning("client %d: %s", client, brief(error))
                c.refuse(error)
                continue
            try:
                c.consider(client, reply)
            except RefusedError as error:
                log.warning("client %d: %s", client, brief(error))
        c.screen()
        for client in sorted(owing):
            log.warning("client %d has not answered; it is not asked again until it does", client)
        self.silent |= owing
        self._asked = {}
        if not c.enough:
            self._too_few(len(c.answered), "have answered")
        record = c.close()
        if record is None:
            return None, None
        if self.on_round is not None:
            self.on_round(record)
        metrics = {
            k: v for k in ("train_loss", "test_loss", "test_metric") if (v := getattr(record, k)) is not None
        }
        return to_array_record({"x": c.server.x}), MetricRecord(metrics)

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """None: the server evaluates on its own test data."""
        del server_round, arrays, config, grid
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Nothing to aggregate."""
        del server_round, replies
        return None

    def start(self, grid: Grid, *_: Any, **__: Any) -> Result:
        """Run the rounds that are left. What Flower's own strategies take here comes from the coordinator."""
        c, result = self.coordinator, Result()
        self.summary()
        self._wait(grid, c.n)  # all of them, if they come in time
        while not c.over():
            needed = c.n if c.needs_all else c.min_clients
            self._wait(grid, needed)
            t = c.t + 1
            messages: list[Message] = []
            if len(self.available) < needed:
                self._too_few(len(self.available), "are there")
                c.ask([])
            else:
                messages = list(self.configure_train(t, result.arrays, ConfigRecord(), grid))
            arrays, metrics = self.aggregate_train(t, self._exchange(grid, messages))
            if arrays is not None:
                result.arrays = arrays
            if metrics is not None:
                result.train_metrics_clientapp[t] = metrics
        return result

    # Who is there.

    @property
    def available(self) -> list[int]:
        """Clients that can be asked."""
        return sorted(set(self.nodes) - self.silent)

    def look(self, grid: Grid) -> None:
        """Learn who has come, gone, or answered at last. Does not wait."""
        there = self._who_is_there(grid)
        for client, node in list(self.nodes.items()):
            if node not in there:
                log.info("client %d has gone", client)
                del self.nodes[client]
                self.silent.discard(client)
        known = set(self.nodes.values()) - {self.nodes[c] for c in self.silent if c in self.nodes}
        now, box = time.monotonic(), self._box(grid)
        for identity, (node, end) in list(self._hellos.items()):
            if node not in there or now >= end:
                del self._hellos[identity]
                box.forget([identity])
                self._stuck[identity] = node
        self._stuck = {identity: node for identity, node in self._stuck.items() if box.busy(identity)}
        self._strangers = {node: s for node, s in self._strangers.items() if node in there}
        self._barred = {node: t for node, t in self._barred.items() if node in there}
        waiting = {node for node, _ in self._hellos.values()} | set(self._stuck.values())
        waiting |= {node for node, s in self._strangers.items() if now < s.again}
        waiting |= {node for node, t in self._barred.items() if self.coordinator.t + 1 < t}
        asks = [
            Message(RecordDict(), dst_node_id=node, message_type="query", ttl=self.wait_timeout)
            for node in sorted(there - known - waiting)
        ]
        if asks:
            nodes = [message.metadata.dst_node_id for message in asks]
            for identity, node in zip(grid.push_messages(asks), nodes, strict=True):
                if identity:
                    self._hellos[identity] = node, now + self.wait_timeout
        for identity, message in box.collect(dict.fromkeys(self._hellos, SizeLimit())):
            node, _ = self._hellos.pop(identity)
            try:
                self._welcome(node, message)
            except TooLargeError as error:
                self._bar(node, error)
            except Exception as error:  # whatever a stranger can send must not end the run
                self._turn_away(node, brief(error))
        for client in set(self.nodes) - set(self.coordinator.samples):  # its number of samples is refused now
            self._turn_away(self.nodes.pop(client), f"client {client} has far more samples than the others")

    def _box(self, grid: Grid) -> Inbox:
        """The inbox of a grid."""
        if self._inbox is None or self._inbox[0] is not grid:
            self._inbox = grid, make_inbox(grid)
        return self._inbox[1]

    def _who_is_there(self, grid: Grid) -> set[int]:
        """The nodes that are there; where clients are bound to keys, their keys are noted."""
        if not self.bind_clients:
            return set(grid.get_node_ids())
        self._keys = {
            node.node_id: hashlib.sha256(node.public_key).hexdigest() if node.public_key else ""
            for node in grid.get_nodes()
        }
        return set(self._keys)

    def _welcome(self, node: int, message: Message | Exception) -> None:
        """Take in what a node says of itself."""
        if isinstance(message, Exception):
            raise message
        if message.has_error():
            raise RefusedError("error", message.error.reason or "it failed, and did not say why")
        hello = read_hello(message.content, self.coordinator.n)
        if self.bind_clients:
            self.coordinator.check_key(hello.client, self._keys.get(node, ""))
        other = self.nodes.get(hello.client)
        if other not in (None, node) and hello.client not in self.silent:
            raise RefusedError(
                "two nodes",
                f"it says that it is client {hello.client}, and so does node {other}, which was here before; "
                "each needs a partition-id of its own",
            )
        self.coordinator.welcome(hello.client, hello.samples)
        if self.bind_clients:
            self.coordinator.bind(hello.client, self._keys[node])
        if other != node:
            log.info("client %d is node %d, with %d samples", hello.client, node, hello.samples)
        for client in [client for client, its in self.nodes.items() if its == node]:
            del self.nodes[client]
        self.nodes[hello.client] = node
        self.silent.discard(hello.client)
        self._strangers.pop(node, None)

    def _turn_away(self, node: int, why: str) -> None:
        """Say once why a node cannot take part, and do not ask it again too soon."""
        known = self._strangers.get(node)
        pause = PAUSES * self.poll if known is None else 2 * known.pause
        if known is None or known.why != why:
            log.warning("node %d: %s", node, why)
        self._strangers[node] = RejectedNode(why, pause, time.monotonic() + pause)

    def _bar(self, node: int, error: Exception) -> None:
        """Do not ask a node for some rounds, not even who it is."""
        until = self.coordinator.t + 1 + BARRED_ROUNDS
        log.warning("node %d: %s; it is not asked before round %d", node, brief(error), until)
        self._barred[node] = until
        for client in [client for client, its in self.nodes.items() if its == node]:
            del self.nodes[client]

    def _wait(self, grid: Grid, count: int) -> None:
        """Until so many clients are there, but not for ever."""
        until = time.monotonic() + self.wait_timeout
        self.look(grid)
        while len(self.available) < count and time.monotonic() < until:
            time.sleep(self.poll)
            self.look(grid)

    def _exchange(self, grid: Grid, messages: list[Message]) -> list[Message]:
        """Send, and collect the replies that come in time."""
        self._asked, replies = {}, []
        if not messages:
            return []
        clients = [int(message.content.config_records["request"]["client"]) for message in messages]  # type: ignore[arg-type]
        for identity, client in zip(grid.push_messages(messages), clients, strict=True):
            if identity:
                self._asked[identity] = client
        nodes = {identity: self.nodes[client] for identity, client in self._asked.items()}
        limits = {identity: self._limit(client) for identity, client in sorted(self._asked.items())}
        until, box = time.monotonic() + self.round_timeout, self._box(grid)
        while limits and time.monotonic() < until:
            for identity, message in box.collect(limits):
                del limits[identity]
                if isinstance(message, Message) and message.metadata.reply_to_message_id != identity:
                    message = RefusedError("another client", "its reply is not to the message it was sent")
                if isinstance(message, Message):
                    replies.append(message)
                    continue
                log.warning("client %d: %s", self._asked[identity], brief(message))
                self.coordinator.refuse(message)
                if isinstance(message, TooLargeError):
                    self._bar(nodes[identity], message)
            if limits:
                time.sleep(self.poll)
        box.forget(limits)
        self._stuck |= {identity: nodes[identity] for identity in limits}
        return replies

    def _limit(self, client: int) -> SizeLimit:
        """How large a client's reply may be."""
        arrays = [value for part in self.coordinator.wanted(client) for value in part.values()]
        return SizeLimit(len(arrays), sum(value.numel() * value.element_size() for value in arrays))

    def _too_few(self, count: int, what: str) -> None:
        """Say that the round is skipped, or fail."""
        c = self.coordinator
        needed = c.n if c.needs_all else c.min_clients
        text = f"{count} of {c.n} clients {what}, {needed} are needed for round {c.t + 1}"
        if what == "have answered" and c.refusals:
            text += f"; the last refusal: {c.refusals[-1]}"
        if self._strangers:
            text += "; " + "; ".join(f"node {node}: {s.why}" for node, s in self._strangers.items())
        if self.below_minimum == "fail" or c.needs_all:
            raise TooFewClientsError(
                f"{text}; start more nodes and run again: it goes on with this round. Or set min-clients "
                "lower, wait-timeout longer, or below-minimum = 'skip'"
            )
        log.warning("%s; the round is skipped", text)
