"""What keeps a client's state and the server in step, whatever is lost, late, repeated or killed on the way.

The server counts a client's message in the moment its checkpoint is written. Until the client knows that,
it keeps two states: the *committed* one, from before its last round, and the *pending* one, from after it.
With every request the server says which of the client's rounds it has counted last. If that is the pending
one, it becomes the committed one; if not, it is dropped, for the server knows nothing of it. So the
server's y and the clients' y_i always belong together, and nothing is counted twice.

Each request has a stamp: the round, and the number of the server's start that asked for it. Stamps only grow,
because a server never asks for a round before the checkpoint of the last one is written. A request that is
older than another that was seen is refused; the same request again gives the same answer.
"""

from __future__ import annotations

import logging
import re
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor

from fadamgc.errors import FadamgcError, InputError

log = logging.getLogger("fadamgc")


def show_log() -> None:
    """Let this package's messages be seen in the log of a Flower app."""
    if not log.handlers:
        handler = logging.StreamHandler(sys.stdout)
        handler.setFormatter(logging.Formatter("fadamgc: %(message)s"))
        log.addHandler(handler)
        log.setLevel(logging.INFO)


class Stamp(NamedTuple):
    """When something was asked for."""

    round: int
    attempt: int  # starts of the server, from 1


NEVER = Stamp(0, 0)
MOST_GENERATION = 10**11  # a generation may be a time in seconds, of a clock that is years ahead


class Request(NamedTuple):
    """What the server says to one client beside the model."""

    experiment: str
    client: int
    generation: int  # all clients' states begin anew when it grows
    stamp: Stamp
    counted: Stamp  # the last of this client's rounds that is in the server's state


class Reply(NamedTuple):
    """What a client sends back."""

    experiment: str
    client: int
    generation: int
    stamp: Stamp
    up: Mapping[str, Tensor]  # fields of the algorithm's Up; without those that only tracked clients send
    buffers: Mapping[str, Tensor]
    loss: float
    steps: int


class Kept(NamedTuple):
    """What a client keeps between rounds."""

    generation: int = 0
    seen: Stamp = NEVER  # the newest request
    committed: Stamp = NEVER
    state: Any = None  # of the committed round; None is the initial one
    pending: Stamp | None = None
    next: Any = None  # the state after the pending round


class RefusedError(FadamgcError):
    """A client does not do what it was asked; the kind is for programs, the message for people."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def check_name(experiment: str) -> None:
    """Refuse the name of an experiment that cannot be that of a folder."""
    if not re.fullmatch(r"\w[\w.-]{0,99}", experiment):
        raise InputError(
            f"experiment={experiment[:120]!r} is not accepted; it names a folder: at most 100 letters, "
            "digits, dots and dashes, a letter or digit first"
        )


def reconcile(kept: Kept, request: Request) -> Kept:
    """What the client has when it begins the request's round: pending rounds committed or dropped.

    Raises:
        RefusedError: "stale", a newer request was seen; "lost", the states of client and server do not belong
            together.
    """
    if request.generation < kept.generation:
        raise RefusedError(
            "stale",
            f"client {request.client} has states of generation {kept.generation}, and the server asks with "
            f"generation {request.generation}, which is older; reset all states (reset-states = true). If "
            "that does not help, the server has lost its checkpoint, and its clock was ahead when states "
            "were reset before: use another experiment",
        )
    if request.generation == kept.generation and request.stamp < kept.seen:
        raise RefusedError(
            "stale",
            f"client {request.client} was asked for round {request.stamp.round} after it was asked for round "
            f"{kept.seen.round}; an old message, or a server whose checkpoint was put back",
        )
    if request.generation > kept.generation:
        kept = Kept(request.generation)
    if kept.pending is not None and kept.pending == request.counted:
        kept = kept._replace(committed=kept.pending, state=kept.next)
    kept = kept._replace(pending=None, next=None)
    if kept.committed != request.counted:
        raise RefusedError(
            "lost",
            f"client {request.client} has the state of {said(kept.committed)}, but the server has counted "
            f"{said(request.counted)}; put back the state folder, or begin all states anew "
            "(reset-states = true)",
        )
    return kept


def after(kept: Kept, request: Request, state: Any) -> Kept:
    """What the client keeps after the request's round, until it hears whether the server counted it."""
    return kept._replace(seen=request.stamp, pending=request.stamp, next=state)


def said(stamp: Stamp) -> str:
    """A stamp in words."""
    return "no round" if stamp == NEVER else f"round {stamp.round} (start {stamp.attempt} of the server)"
