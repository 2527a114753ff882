"""A Flower ClientApp for every algorithm: the user brings a model and data, nothing else."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fadamgc.errors import FadamgcError, InputError
from fadamgc.files import user_folder
from fadamgc.flower.client_round import Party, answer
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.logs import log_to_stdout
from fadamgc.flower.protocol import RefusedError
from fadamgc.flower.wire import Hello, hello_content, read_request, refusal_content, reply_content
from fadamgc.task import Loss, Pair

log = logging.getLogger("fadamgc")


class Local(NamedTuple):
    """What a client has."""

    model: nn.Module
    loss: Loss
    data: Pair  # inputs and targets of this client alone


def client_app(load: Callable[[Context], Local | tuple[nn.Module, Loss, Pair]]) -> ClientApp:
    """A ClientApp that takes part with whatever algorithm the server runs.

    A node is told who it is by its node-config: ``partition-id`` is the number of the client, from 0;
    ``state-folder`` is where its states are kept (default: see ``state_folder``).

    Args:
        load: gives model, loss and this client's (inputs, targets), from Flower's context.
    """
    app = ClientApp()

    def party(context: Context) -> Party:
        log_to_stdout()
        return Party(*load(context), number(context))

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        def do() -> RecordDict:
            one = party(context)
            return hello_content(Hello(one.client, one.samples))

        return _reply(message, do)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        def do() -> RecordDict:
            work = read_request(message.content)
            one = party(context)
            if work.request.client != one.client:
                raise RefusedError(
                    "another client", f"this is client {one.client}, asked is client {work.request.client}"
                )
            keeper = ClientStore(state_folder(context), work.request.experiment, one.client)
            reply = answer(
                one,
                keeper,
                work.algorithm,
                work.settings,
                work.request,
                work.tracked,
                work.down,
                work.buffers,
            )
            return reply_content(reply)

        return _reply(message, do)

    return app


def _reply(message: Message, do: Callable[[], RecordDict]) -> Message:
    """What was done, or why not, so that the server can say so."""
    try:
        content = do()
    except RefusedError as error:
        log.warning("%s", error)
        content = refusal_content(error.kind, str(error))
    except FadamgcError as error:
        log.warning("%s", error)
        content = refusal_content(type(error).__name__, str(error))
    return Message(content, reply_to=message)


def number(context: Context) -> int:
    """The number of the client, from its node's config."""
    given = context.node_config.get("partition-id")
    if not isinstance(given, int) or isinstance(given, bool) or given < 0:
        raise InputError(
            f"node-config partition-id={given!r} is not accepted; start the node with "
            '--node-config "partition-id=0" (1, 2, ... for the others)'
        )
    return given


def state_folder(context: Context) -> Path:
    """Where a node keeps its clients' states: node-config ``state-folder``, else $FADAMGC_STATES, else the
    user's folder for states."""
    given = context.node_config.get("state-folder") or os.environ.get("FADAMGC_STATES")
    if given:
        return Path(str(given)).expanduser()
    return user_folder("state")
