"""A Flower ClientApp for every algorithm: the user brings a model and data, nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp
from torch import nn

from fadamgc.errors import FadamgcError, InputError, shown
from fadamgc.files import user_folder
from fadamgc.flower.client_round import LocalClient, evaluate, handle_request
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.logs import log, log_to_stdout
from fadamgc.flower.protocol import RefusedError
from fadamgc.flower.wire import (
    evaluation_content,
    hello_content,
    read_evaluate,
    read_request,
    refusal_content,
    reply_content,
)
from fadamgc.task import Loss, Task

# A task with one client; or model, loss and data; or model, loss, data and test data.
ClientPart = Task | tuple[nn.Module, Loss, Any] | tuple[nn.Module, Loss, Any, Any]


def client_app(load: Callable[[Context], ClientPart]) -> ClientApp:
    """Return a ClientApp that takes part with whatever algorithm the server runs.

    The node-config says which client a node is: ``partition-id`` is the number of the client, from 0;
    ``state-folder`` is the folder of its states (default: see ``state_folder``).

    Args:
        load: function of Flower's context that returns model, loss and this client's (inputs, targets); or
            model, loss, data and this client's test data (None: it has none), for ``eval-clients``; or a
            ``Task`` whose only client this is (with ``transform``, ``lazy`` or ``collate``, for example).

    Example:
        >>> import fadamgc.flower, torch
        >>> def load(context):  # model, loss and the data of the client whose number is in the node's config
        ...     number = int(context.node_config["partition-id"])
        ...     data = torch.full((8, 3), float(number)), torch.zeros(8, 1)
        ...     return torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data
        >>> app = fadamgc.flower.client_app(load)
        >>> type(app).__name__
        'ClientApp'
    """
    app = ClientApp()

    def local_client(context: Context) -> LocalClient:
        log_to_stdout()
        return LocalClient(client_task(load(context)), client_number(context))

    @app.query()
    @_replying
    def hello(_: Message, context: Context) -> RecordDict:
        client = local_client(context)
        return hello_content(client.client, client.data.size)

    @app.train()
    @_replying
    def train(message: Message, context: Context) -> RecordDict:
        received = read_request(message.content)
        client, request = local_client(context), received.request
        _check_client(client, request.client)
        store = ClientStore(state_folder(context), request.experiment, client.client)
        return reply_content(handle_request(client, store, received))

    @app.evaluate()
    @_replying
    def evaluate_model(message: Message, context: Context) -> RecordDict:
        request = read_evaluate(message.content)
        client = local_client(context)
        _check_client(client, request.client)
        return evaluation_content(evaluate(client, request))

    return app


def client_task(part: ClientPart) -> Task:
    """Return the task of a client: what its ``load`` function has returned, as a task."""
    if isinstance(part, Task):
        return part
    if not isinstance(part, (tuple, list)) or len(part) not in (3, 4):
        raise InputError(
            f"load returned {shown(part)}; it must return (model, loss, data), "
            "(model, loss, data, test data) or a Task"
        )
    model, loss, data, test = part if len(part) == 4 else (*part, None)
    return Task(model, loss, [data], client_tests=None if test is None else [test])


def _check_client(client: LocalClient, number: int) -> None:
    if number != client.client:
        raise RefusedError("another client", f"this is client {client.client}, not client {number}")


def _replying(answer: Callable[[Message, Context], RecordDict]) -> Callable[[Message, Context], Message]:
    """Reply with the answer, or with the reason why there is none, so that the server can log it."""

    def reply(message: Message, context: Context) -> Message:
        try:
            content = answer(message, context)
        except FadamgcError as error:
            log.warning("%s", error)
            kind = error.kind if isinstance(error, RefusedError) else type(error).__name__
            content = refusal_content(kind, str(error))
        return Message(content, reply_to=message)

    return reply


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
    return Path(str(folder)).expanduser() if folder else user_folder("state")
