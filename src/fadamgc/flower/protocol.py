"""How the states of server and clients stay consistent when messages are lost, late or repeated.

The server counts a client's reply at the moment it writes its checkpoint. Until the client knows whether its
last reply was counted, it stores two states: the *committed* state, from before its last round, and the
*pending* state, from after that round. Every request names the last round of the client that the server has
counted. If that is the pending round, the pending state becomes the committed one; otherwise the client drops
the pending state. So the server's y and the clients' y_i always belong together, and nothing is counted
twice, even if a process is killed at any moment.

Every request has a stamp: the round, and which start of the server sent it. Stamps only grow, because a
server requests a round only after the checkpoint of the previous round is written. A client refuses a request
that is older than one it has seen, and answers a repeated request with the same reply.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.codecs import Codec
from fadamgc.errors import FadamgcError, InputError
from fadamgc.federation.computing import Computing
from fadamgc.federation.messages import decode
from fadamgc.federation.settings import Settings
from fadamgc.task import Metric


class Stamp(NamedTuple):
    """The round of a request, and which start of the server sent it."""

    round: int
    attempt: int  # starts of the server, counted from 1


NEVER = Stamp(0, 0)
MAX_ROUNDS = 10**9  # also for starts of the server
MAX_GENERATION = 10**11  # a generation may be a time in seconds, from a clock that is years ahead


class Request(NamedTuple):
    """The header of a request."""

    experiment: str
    client: int
    generation: int  # the states of all clients restart when this number grows
    stamp: Stamp
    counted: Stamp  # the last round of this client that the server has counted

    def is_possible(self) -> bool:
        """Whether a server can send this; other numbers could make a client refuse all later requests."""
        return (
            0 <= self.stamp.round <= MAX_ROUNDS
            and 1 <= self.stamp.attempt <= MAX_ROUNDS
            and NEVER <= self.counted <= self.stamp
            and self.counted.attempt >= 0
            and 0 <= self.generation <= MAX_GENERATION
        )


class TrainRequest(NamedTuple):
    """A request with everything that a client needs to carry it out."""

    request: Request
    tracked: bool  # whether the client sends tracking updates
    algorithm: AnyAlgorithm
    settings: Settings  # seed, local steps, batch size and codecs
    down: dict[str, Tensor]  # the server's message as it is sent: fields with a codec as bytes
    buffers: dict[str, Tensor]  # the model's averaged buffers

    def only_sent(self, up: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the fields that the client sends, without those that only tracked clients send."""
        skipped = () if self.tracked else self.algorithm.tracked_only
        return {name: t for name, t in up.items() if name.partition(".")[0] not in skipped}


class Reply(NamedTuple):
    """A client's reply to a request; the header repeats that of the request."""

    experiment: str
    client: int
    generation: int
    stamp: Stamp
    up: Mapping[str, Tensor]  # fields of the algorithm's Up as they are sent; see ``TrainRequest.only_sent``
    buffers: Mapping[str, Tensor]
    loss: float
    steps: int


class EvaluateRequest(NamedTuple):
    """A request to evaluate the model after a round on the client's own data; it changes nothing there."""

    experiment: str
    client: int
    generation: int
    stamp: Stamp
    metric: str  # see ``metric_name``
    seed: int
    computing: Computing
    x: Tensor
    buffers: Mapping[str, Tensor]

    def is_possible(self) -> bool:
        """Whether a server can send this."""
        return Request(*self[:4], NEVER).is_possible() and self.stamp.round >= 1


class EvaluateReply(NamedTuple):
    """A client's reply to a request to evaluate; the header repeats that of the request."""

    experiment: str
    client: int
    generation: int
    stamp: Stamp
    metric: str
    value: float
    held_out: bool  # whether the data is test data, and not what the client trains on


def metric_name(metric: Metric) -> str:
    """Return the name of a metric in messages and reports: "metric" if it is a function."""
    return metric if isinstance(metric, str) else "metric"


class StoredState(NamedTuple):
    """What a client stores between rounds."""

    generation: int = 0
    seen: Stamp = NEVER  # the newest request
    committed: Stamp = NEVER
    committed_state: Any = None  # after the committed round; None is the initial state
    pending: Stamp | None = None
    pending_state: Any = None  # after the pending round

    def with_pending(self, request: Request, state: Any) -> StoredState:
        """Store the state after a request's round as pending, until the server says whether it counted."""
        return self._replace(seen=request.stamp, pending=request.stamp, pending_state=state)


class RefusedError(FadamgcError):
    """A request or a reply is refused: ``kind`` is the reason as a keyword, the message explains it."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def resolve_pending(stored: StoredState, request: Request) -> StoredState:
    """Commit or drop the pending state, as the request says, before its round begins.

    Raises:
        RefusedError: "stale", the client has seen a newer request; "lost", the states of client and server do
            not belong together.
    """
    if request.generation < stored.generation:
        raise RefusedError(
            "stale",
            f"client {request.client} has states of generation {stored.generation}, but the server sent the "
            f"older generation {request.generation}; reset all states (reset-states = true). If that does "
            "not help, the server has lost its checkpoint, and its clock was ahead when states were last "
            "reset: use another experiment",
        )
    if request.generation == stored.generation and request.stamp < stored.seen:
        raise RefusedError(
            "stale",
            f"client {request.client} received a request for round {request.stamp.round} after one for round "
            f"{stored.seen.round}: an old message, or a server whose checkpoint was replaced by an older one",
        )
    if request.generation > stored.generation:
        stored = StoredState(request.generation)
    if stored.pending is not None and stored.pending == request.counted:
        stored = stored._replace(committed=stored.pending, committed_state=stored.pending_state)
    stored = stored._replace(pending=None, pending_state=None)
    if stored.committed != request.counted:
        raise RefusedError(
            "lost",
            f"client {request.client} has the state of {describe(stored.committed)}, but the server has "
            f"counted {describe(request.counted)}; restore the state folder, or reset all states "
            "(reset-states = true)",
        )
    return stored


def describe(stamp: Stamp) -> str:
    """Describe a stamp in words."""
    return "no round" if stamp == NEVER else f"round {stamp.round} (start {stamp.attempt} of the server)"


def check_tensors(owner: str, part: str, tensors: Mapping[str, Tensor], like: Mapping[str, Tensor]) -> None:
    """Refuse tensors with other names, shapes or types than ``like``, or with numbers that are not finite.

    Error messages begin with ``owner`` and ``part``, such as "the server's" and "buffers".
    """
    if set(tensors) != set(like):
        raise RefusedError("fields", f"{owner} {part} has {sorted(tensors)}, this model needs {sorted(like)}")
    for name, value in tensors.items():
        if value.shape != like[name].shape or value.dtype != like[name].dtype:
            raise RefusedError(
                "shape",
                f"{owner} {name} is {value.dtype} {tuple(value.shape)}, this model needs {like[name].dtype} "
                f"{tuple(like[name].shape)}; do server and client have the same model?",
            )
        _check_finite(owner, name, value)


def _check_finite(owner: str, name: str, value: Tensor) -> None:
    if not bool(torch.isfinite(value).all()):
        raise RefusedError("not finite", f"{owner} {name} has numbers that are not finite")


def decoded(
    owner: str, part: str, sent: Mapping[str, Tensor], codecs: Mapping[str, Codec], like: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Read the fields of a message that was sent with codecs; refuse those that no codec has written.

    ``like`` has the fields' types and lengths. Error messages begin with ``owner`` and ``part``.
    """
    try:
        vectors = decode(sent, codecs, like)
    except InputError as error:
        raise RefusedError("codec", f"{owner} {part} cannot be read: {error}") from None
    for name in codecs:
        _check_finite(owner, name, vectors[name])
    return vectors
