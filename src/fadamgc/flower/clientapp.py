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
from fadamgc.flower.client_round import LocalClient, handle_request
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.logs import log_to_stdout
from fadamgc.flower.protocol import RefusedError
from fadamgc.flower.wire import Hello, hello_content, read_request, refusal_content, reply_content
from fadamgc.task import Loss, Pair

log = logging.getLogger("fadamgc")


class ClientSide(NamedTuple):
    """What a client has."""

    model: nn.Module
    loss: Loss
    data: Pair  # inputs and targets of this client alone


def client_app(load: Callable[[Context], ClientSide | tuple[nn.Module, Loss, Pair]]) -> ClientApp:
    """Return a ClientApp that takes part with whatever algorithm the server runs.

    A node is told who it is by its node-config: ``partition-id`` is the number of the client, from 0;
    ``state-folder`` is the folder of its states (default: see ``state_folder``).

    Args:
        load: returns model, loss and this client's (inputs, targets), from Flower's context.
    """
    app = ClientApp()

    def local_client(context: Context) -> LocalClient:
        log_to_stdout()
        return LocalClient(*load(context), client_number(context))

    @app.query()
    def hello(message: Message, context: Context) -> Message:
        def answer() -> RecordDict:
            client = local_client(context)
            return hello_content(Hello(client.client, client.samples))

        return _reply(message, answer)

    @app.train()
    def train(message: Message, context: Context) -> Message:
        def answer() -> RecordDict:
            r = read_request(message.content)
            client = local_client(context)
            if r.request.client != client.client:
                raise RefusedError(
                    "another client", f"this is client {client.client}, asked is client {r.request.client}"
                )
            store = ClientStore(state_folder(context), r.request.experiment, client.client)
            reply = handle_request(
                client, store, r.algorithm, r.settings, r.request, r.tracked, r.down, r.buffers
            )
            return reply_content(reply)

        return _reply(message, answer)

    return app


def _reply(message: Message, answer: Callable[[], RecordDict]) -> Message:
    """Reply with the answer, or with the reason why there is none, so that the server can log it."""
    try:
        content = answer()
    except RefusedError as error:
        log.warning("%s", error)
        content = refusal_content(error.kind, str(error))
    except FadamgcError as error:
        log.warning("%s", error)
        content = refusal_content(type(error).__name__, str(error))
    return Message(content, reply_to=message)


def client_number(context: Context) -> int:
    """Return the number of the client, from its node's config."""
    number = context.node_config.get("partition-id")
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise InputError(
            f"node-config partition-id={number!r} is not accepted; start the node with "
            '--node-config "partition-id=0" (1, 2, ... for the others)'
        )
    return number


def state_folder(context: Context) -> Path:
    """Return the folder of a node's client states: node-config ``state-folder``, else $FADAMGC_STATES, else
    the user's folder for states."""
    folder = context.node_config.get("state-folder") or os.environ.get("FADAMGC_STATES")
    if folder:
        return Path(str(folder)).expanduser()
    return user_folder("state")
