"""A Flower Strategy for every algorithm; every wait has a time limit."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable
from typing import Any, Literal, NamedTuple

from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from flwr.serverapp.strategy import Strategy as FlowerStrategy

from fadamgc.errors import FadamgcError, not_accepted
from fadamgc.escape import printable
from fadamgc.federation.record import BY_CLIENT, Record
from fadamgc.flower.coordinator import Coordinator
from fadamgc.flower.inbox import Inbox, SizeLimit, TooLargeError, make_inbox
from fadamgc.flower.logs import log
from fadamgc.flower.protocol import RefusedError, metric_name
from fadamgc.flower.wire import (
    MAX_REASON,
    evaluate_content,
    read_evaluation,
    read_hello,
    read_reply,
    request_content,
    to_array_record,
)

POLL_PER_MESSAGE = 0.05  # seconds of pause per open message: every check costs a request per message
BACKOFF_POLLS = 20  # polls before a rejected node is queried again; doubled after every rejection
BARRED_ROUNDS = 10  # rounds in which a node whose reply was too large is not asked


class TooFewClientsError(FadamgcError):
    """Not enough clients were connected, or answered, in time."""


class RejectedNode(NamedTuple):
    """A node whose hello or reply was rejected; it is queried again at ``next_query`` and ``next_round``."""

    reason: str
    pause: float = 0.0  # seconds from the rejection to the next query
    next_query: float = 0.0  # time of the monotonic clock
    next_round: int = 0


def short_reason(error: Exception) -> str:
    """Return an error's message on one line, shortened."""
    text = str(error) if isinstance(error, FadamgcError) else f"{type(error).__name__}: {error}"
    return printable(text, MAX_REASON)


class Strategy(FlowerStrategy):
    """Runs the rounds of a federation over Flower; the coordinator decides what a round is.

    Args:
        coordinator: the state of the federation.
        round_timeout: seconds that a round waits for replies.
        wait_timeout: seconds to wait for all clients before the first round, and before every round for as
            many clients as it needs.
        below_minimum: "skip" the round, or "fail", if fewer clients than ``min_clients`` are available then.
        on_round: called with the record of every round.
        poll: longest pause, in seconds, between two checks for replies; it is shorter with few clients.
        bind_clients: accept a client only from the node key that it first used. Otherwise any node can act as
            any client that has no other node.

    Example:
        >>> import fadamgc, tempfile, torch
        >>> from fadamgc.flower.config import read_config
        >>> data = [(torch.randn(8, 3), torch.randn(8, 1))]
        >>> task = fadamgc.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
        >>> config = read_config({"experiment": "first", "clients": 4, "algorithm": "fadamgc"})
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     strategy = Strategy(Coordinator(task, config, folder), round_timeout=60.0)
        >>> strategy.coordinator.n
        4
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
                raise not_accepted(name, value, "a number of seconds > 0")
        if below_minimum not in ("skip", "fail"):
            raise not_accepted("below_minimum", below_minimum, "'skip' or 'fail'")
        self.coordinator, self.on_round = coordinator, on_round
        self.round_timeout, self.wait_timeout, self.poll = round_timeout, wait_timeout, poll
        self.below_minimum, self.bind_clients = below_minimum, bind_clients
        self.nodes: dict[int, int] = {}  # the nodes of the clients that can be asked
        self._hellos: dict[str, tuple[int, float]] = {}  # node and deadline of each unanswered query
        self._rejected: dict[int, RejectedNode] = {}
        self._asked: dict[str, int] = {}  # the client of each message of this round
        self._keys: dict[int, str] = {}  # digests of the keys of the connected nodes
        self._inbox: tuple[Grid, Inbox] | None = None

    # What Flower calls.

    def summary(self) -> None:
        """Log the algorithm, the number of clients and the next round."""
        c = self.coordinator
        log.info(
            "%s: %d clients, %s sampled, round %d of %d",
            *(c.algorithm, c.n, c.settings.sampled or "all", c.t + 1, c.settings.rounds),
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests of the next round. The coordinator has the model, so ``arrays`` is not used."""
        del server_round, arrays, config, grid
        return [
            Message(
                request_content(train),
                dst_node_id=self.nodes[train.request.client],
                message_type="train",
                ttl=self.round_timeout,
                group_id=str(train.request.stamp.round),
            )
            for train in self.coordinator.ask(self.available)
            if train.request.client in self.nodes
        ]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        """Check the replies, and close the round."""
        del server_round
        c = self.coordinator

        def accept(client: int, content: RecordDict) -> None:
            with c.noting_refusals():
                reply = read_reply(content, *c.wanted(client))
            c.consider(client, reply)

        self._read(replies, accept)
        c.screen()
        if not c.enough:
            self._too_few(len(c.answered), "have answered")
        record = c.close()
        if record is None:
            return None, None
        metrics = {
            k: v for k in ("train_loss", "test_loss", "test_metric") if (v := getattr(record, k)) is not None
        }
        return to_array_record({"x": c.server.x}), MetricRecord(metrics)

    def _read(self, replies: Iterable[Message], accept: Callable[[int, RecordDict], object]) -> None:
        """Let ``accept`` read the replies of this exchange; log refusals, and clients without a reply."""
        unanswered = set(self._asked.values())
        for message in replies:
            client = self._asked.get(message.metadata.reply_to_message_id)
            if client is None:
                log.warning("ignored a reply to a message that was not sent in this round")
                continue
            if message.has_error():
                log.warning("client %d: %s", client, printable(message.error.reason, MAX_REASON))
                continue
            unanswered.discard(client)
            try:
                accept(client, message.content)
            except Exception as error:  # nothing that an untrusted node sends may end the run
                log.warning("client %d: %s", client, short_reason(error))
        for client in sorted(unanswered):
            log.warning("client %d has not answered; it is not asked again until it says hello", client)
            self.nodes.pop(client, None)
        self._asked = {}

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the requests to evaluate the model at all connected clients; none if that is not due."""
        del server_round, arrays, config, grid
        c = self.coordinator
        if not c.awaits_evaluation:
            return []
        return [
            Message(
                evaluate_content(request),
                dst_node_id=self.nodes[request.client],
                message_type="evaluate",
                ttl=self.round_timeout,
                group_id=str(request.stamp.round),
            )
            for request in c.ask_evaluation(self.available)
        ]

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> MetricRecord | None:
        """Check the clients' evaluations, and add them to the record of the round; return their metrics."""
        del server_round
        c = self.coordinator
        metric = metric_name(c.task.metric)

        def accept(client: int, content: RecordDict) -> None:
            with c.noting_refusals(c.t):
                reply = read_evaluation(content, metric)
            c.consider_evaluation(client, reply)

        self._read(replies, accept)
        metrics = c.close_evaluation().metrics
        return MetricRecord({k: v for k, v in metrics.items() if k.startswith(BY_CLIENT)})

    def start(self, grid: Grid, *_: Any, **__: Any) -> Result:
        """Run the remaining rounds; the coordinator replaces the other arguments of Flower's strategies."""
        c, result = self.coordinator, Result()
        self.summary()
        self._wait(grid, c.n)  # for all clients, if they connect in time
        if c.awaits_evaluation:  # the server was stopped while clients evaluated its last round
            self._end_round(grid, result)
        while not c.over():
            self._wait(grid, c.needed)
            t = c.t + 1
            messages: list[Message] = []
            if len(self.available) < c.needed:
                self._too_few(len(self.available), "are connected")
                c.ask([])
            else:
                messages = list(self.configure_train(t, result.arrays, ConfigRecord(), grid))
            arrays, metrics = self.aggregate_train(t, self._exchange(grid, messages))
            if arrays is not None and metrics is not None:
                result.arrays, result.train_metrics_clientapp[t] = arrays, metrics
                self._end_round(grid, result)
        return result

    def _end_round(self, grid: Grid, result: Result) -> None:
        """Let the clients evaluate the model of the last round, if that is due, and report the round."""
        c = self.coordinator
        if c.awaits_evaluation:
            self.update_nodes(grid)
            messages = list(self.configure_evaluate(c.t, result.arrays, ConfigRecord(), grid))
            replies = self._exchange(grid, messages, lambda _: SizeLimit())
            if metrics := self.aggregate_evaluate(c.t, replies):
                result.evaluate_metrics_clientapp[c.t] = metrics
        if self.on_round is not None:
            self.on_round(c.history[-1])

    # Which clients are connected.

    @property
    def available(self) -> list[int]:
        """The clients that can be asked."""
        return sorted(self.nodes)

    def update_nodes(self, grid: Grid) -> None:
        """Find out, without waiting, which nodes have connected, left, or answered late."""
        connected, now, inbox = self._connected_nodes(grid), time.monotonic(), self._inbox_of(grid)
        for client, node in list(self.nodes.items()):
            if node not in connected:
                log.info("client %d has disconnected", client)
                del self.nodes[client]
        for message_id, (node, end) in list(self._hellos.items()):
            if node not in connected or now >= end:
                del self._hellos[message_id]
                inbox.forget([message_id])
        self._query(grid, connected, now)
        for message_id, message in inbox.collect(dict.fromkeys(self._hellos, SizeLimit())):
            node, _ = self._hellos.pop(message_id)
            try:
                self._admit(node, message)
            except TooLargeError as error:
                self._bar(node, error)
            except Exception as error:  # nothing that an untrusted node sends may end the run
                self._reject(node, short_reason(error))
        for client in set(self.nodes) - set(self.coordinator.members.samples):  # whose size was refused
            self._reject(self.nodes.pop(client), f"client {client} has far more samples than the others")

    def _connected_nodes(self, grid: Grid) -> set[int]:
        """Return the connected nodes; if clients are bound to keys, note the keys of the nodes."""
        if not self.bind_clients:
            return set(grid.get_node_ids())
        self._keys = {
            node.node_id: hashlib.sha256(node.public_key).hexdigest() if node.public_key else ""
            for node in grid.get_nodes()
        }
        return set(self._keys)

    def _query(self, grid: Grid, connected: set[int], now: float) -> None:
        """Ask new nodes, and those that have not answered, which client they are."""
        self._rejected = {node: r for node, r in self._rejected.items() if node in connected}
        waiting, t = {node for node, _ in self._hellos.values()}, self.coordinator.t + 1
        pausing = {n for n, r in self._rejected.items() if now < r.next_query or t < r.next_round}
        nodes = sorted(connected - set(self.nodes.values()) - waiting - pausing)
        queries = [
            Message(RecordDict(), dst_node_id=node, message_type="query", ttl=self.wait_timeout)
            for node in nodes
        ]
        message_ids = grid.push_messages(queries) if queries else []
        for message_id, node in zip(message_ids, nodes, strict=True):
            if message_id:
                self._hellos[message_id] = node, now + self.wait_timeout

    def _inbox_of(self, grid: Grid) -> Inbox:
        if self._inbox is None or self._inbox[0] is not grid:
            self._inbox = grid, make_inbox(grid)
        return self._inbox[1]

    def _admit(self, node: int, message: Message | Exception) -> None:
        """Accept a node as the client that it says it is, or raise an error with the reason why not."""
        if isinstance(message, Exception):
            raise message
        if message.has_error():
            raise RefusedError("error", message.error.reason or "it failed without a reason")
        client, samples = read_hello(message.content, self.coordinator.n)
        if self.bind_clients:
            self.coordinator.check_key(client, self._keys.get(node, ""))
        if (other := self.nodes.get(client)) is not None:
            raise RefusedError(
                "two nodes",
                f"it says that it is client {client}, but node {other} has connected as that client; "
                "give each node its own partition-id",
            )
        self.coordinator.admit(client, samples)
        if self.bind_clients:
            self.coordinator.members.bind(client, self._keys[node])
        log.info("client %d is node %d, with %d samples", client, node, samples)
        self.nodes[client] = node
        self._rejected.pop(node, None)

    def _reject(self, node: int, reason: str) -> None:
        """Log once why a node cannot take part, and pause before it is queried again."""
        previous = self._rejected.get(node, RejectedNode(""))
        pause = 2 * previous.pause or BACKOFF_POLLS * self.poll
        if previous.reason != reason:
            log.warning("node %d: %s", node, reason)
        self._rejected[node] = RejectedNode(reason, pause, time.monotonic() + pause)

    def _bar(self, node: int, error: Exception) -> None:
        """Send nothing to a node for some rounds."""
        reason, next_round = short_reason(error), self.coordinator.t + 1 + BARRED_ROUNDS
        log.warning("node %d: %s; it is not asked before round %d", node, reason, next_round)
        self._rejected[node] = RejectedNode(reason, next_round=next_round)
        self.nodes = {client: other for client, other in self.nodes.items() if other != node}

    def _wait(self, grid: Grid, count: int) -> None:
        """Wait until ``count`` clients are available, but no longer than ``wait_timeout``."""
        until = time.monotonic() + self.wait_timeout
        self.update_nodes(grid)
        while len(self.available) < count and time.monotonic() < until:
            time.sleep(self.poll)
            self.update_nodes(grid)

    # Messages of a round.

    def _exchange(
        self, grid: Grid, messages: list[Message], limit: Callable[[int], SizeLimit] | None = None
    ) -> list[Message]:
        """Send the messages of a round, and collect the replies that arrive in time.

        ``limit`` returns the size limit of a client's reply; by default, that of a reply of training.
        """
        clients, replies = {node: client for client, node in self.nodes.items()}, []
        pushed = zip(grid.push_messages(messages) if messages else [], messages, strict=True)
        nodes = {message_id: message.metadata.dst_node_id for message_id, message in pushed if message_id}
        self._asked = {message_id: clients[node] for message_id, node in nodes.items()}
        limit = limit or self._limit
        limits = {message_id: limit(client) for message_id, client in sorted(self._asked.items())}
        until, inbox = time.monotonic() + self.round_timeout, self._inbox_of(grid)
        while limits and time.monotonic() < until:
            for message_id, message in inbox.collect(limits):
                del limits[message_id]
                if isinstance(message, Message) and message.metadata.reply_to_message_id != message_id:
                    message = RefusedError("another client", "its reply is not to the message it was sent")
                if isinstance(message, Message):
                    replies.append(message)
                    continue
                log.warning("client %d: %s", self._asked[message_id], short_reason(message))
                self.coordinator.refuse(message)
                if isinstance(message, TooLargeError):
                    self._bar(nodes[message_id], message)
            if limits:
                time.sleep(min(self.poll, POLL_PER_MESSAGE * len(limits)))
        inbox.forget(limits)
        return replies

    def _limit(self, client: int) -> SizeLimit:
        """Return the size limit of a client's reply."""
        arrays = [value for part in self.coordinator.wanted(client) for value in part.values()]
        return SizeLimit(len(arrays), sum(value.numel() * value.element_size() for value in arrays))

    def _too_few(self, count: int, verb: str) -> None:
        """Log that the round is skipped, or fail."""
        c = self.coordinator
        text = f"{count} of {c.n} clients {verb}, but round {c.t + 1} needs {c.needed}"
        if verb == "have answered" and c.refusals:
            text += f"; the last refusal: {c.refusals[-1]}"
        if self._rejected:
            text += "; " + "; ".join(f"node {node}: {r.reason}" for node, r in self._rejected.items())
        if self.below_minimum == "fail" or c.needs_all:
            raise TooFewClientsError(
                f"{text}; start more nodes and run again, which resumes with this round; or set min-clients "
                "lower, wait-timeout longer, or below-minimum = 'skip'"
            )
        log.warning("%s; the round is skipped", text)
