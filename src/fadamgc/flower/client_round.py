"""One client's part of a federation: its data, and the algorithm's rules as in the simulator."""

from __future__ import annotations

from collections.abc import Iterable
from typing import cast

import torch
from torch import Tensor

from fadamgc.algorithm import example, stand_in
from fadamgc.errors import InputError
from fadamgc.federation.client_data import ClientTable
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.jobs import Job, Result, Round
from fadamgc.federation.messages import MessageCodecs
from fadamgc.federation.settings import Settings
from fadamgc.federation.sums import all_finite
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.protocol import (
    EvaluateReply,
    EvaluateRequest,
    RefusedError,
    Reply,
    TrainRequest,
    check_tensors,
    decoded,
    metric_name,
    resolve_pending,
)
from fadamgc.sim.executors.trainer import train
from fadamgc.task import METRICS, Metric, Task
from fadamgc.tree import from_names, leaves, named_leaves


class LocalClient:
    """A client with the server's model, whose weights are replaced by those that the server sends.

    ``task`` has the data of this client only. Random draws depend on the number ``client``.
    """

    def __init__(self, task: Task, client: int) -> None:
        if task.n != 1:
            raise InputError(f"the task of client {client} has {task.n} clients; a node has the data of one")
        self.client = client
        self.functions = TaskFunctions(task)
        self.data = self.functions.data_of(task.samples[0])
        self.held_out = task.client_test_samples is not None
        tests = task.client_test_samples or task.samples
        self.tests = ClientTable(tests, self.functions.dtype, self.functions.device)

    def train(self, round: Round, settings: Settings, state: object, tracked: bool) -> Result:
        """Run the client's part of a round."""
        batches = settings.batches(round.t, self.client, self.data.size, round.algorithm.coin)
        with torch.inference_mode(False):
            return train(Job(round, self.client, self.data, lambda: state, tracked, batches))


def evaluate(client: LocalClient, request: EvaluateRequest) -> EvaluateReply:
    """Evaluate the server's model on the client's test data, or on what it trains on if it has none.

    Raises:
        RefusedError: the request cannot be carried out.
    """
    functions, number = client.functions, client.client
    metric: Metric = functions.task.metric
    if request.metric in METRICS:
        metric = cast(Metric, request.metric)
    elif request.metric != metric_name(metric):
        raise RefusedError(
            "metric",
            f"client {number}: the server's task has a custom metric, and this client's has "
            f"{metric!r}; let the client's load return a Task with the same metric",
        )
    owner = f"client {number}: the server's"
    check_tensors(owner, "message", {"x": request.x}, {"x": functions.x0})
    check_tensors(owner, "buffers", request.buffers, functions.buffers0)
    functions.compute_with(request.computing)
    where = (request.x, dict(request.buffers), client.tests, request.seed, request.stamp.round)
    try:
        (value,) = functions.evaluate_clients(*where, metric=metric)
    except InputError as error:
        raise RefusedError("metric", f"client {number} cannot evaluate the model: {error}") from None
    return EvaluateReply(*request[:4], request.metric, float(value), client.held_out)


def handle_request(client: LocalClient, store: ClientStore, train: TrainRequest) -> Reply:
    """Carry out a request, and store the new state as pending until the server says whether it counted.

    Raises:
        RefusedError: the request cannot be carried out; nothing has changed.
    """
    request, tracked, algorithm, settings, vectors, buffers = train
    functions = client.functions
    functions.compute_with(settings.computing)
    algorithm = algorithm.for_model(functions.flat.shapes)
    d, dtype = functions.flat.d, functions.x0.dtype
    try:
        codecs = MessageCodecs(settings.codec or (), algorithm, d, dtype)
    except InputError as error:
        raise RefusedError("request", f"the server's request cannot be understood: {error}") from None
    algorithm = codecs.keeping_rest(algorithm)
    like = example(algorithm, stand_in(d, dtype))
    is_setup = request.stamp.round == 0  # the server wants the gradient at the initial model
    owner = f"client {client.client}: the server's"
    wanted = {"x": functions.x0} if is_setup else codecs.shapes_down(like.down)
    check_tensors(owner, "message", vectors, wanted)
    check_tensors(owner, "buffers", buffers, functions.buffers0)
    if not is_setup:
        vectors = decoded(owner, "message", vectors, codecs.down, named_leaves(like.down))
    with store.locked():
        stored = resolve_pending(store.load(like.client), request)
        if is_setup:
            g = functions.whole_gradient(vectors["x"], buffers, client.client, client.data, settings.seed, 0)
            g = settings.gradients.adjust(vectors["x"], g)
            _check_finite(client, [g])
            store.save(stored.with_pending(request, algorithm.init_client(vectors["x"], g)))
            return Reply(*request[:4], {"g": g}, {}, 0.0, settings.passes(client.data.size))
        down = from_names(like.down, vectors)
        state = stored.committed_state
        if state is None:
            state = algorithm.init_client(down.x)
        round = Round(
            functions, algorithm, settings.seed, request.stamp.round, down, buffers, settings.gradients
        )
        result = client.train(round, settings, state, tracked)
        _check_finite(client, leaves([result.state, result.up, result.buffers, result.loss]))
        address = (settings.seed, request.stamp.round, client.client)
        sent = codecs.send_up(algorithm, result.state, result.up, tracked, address)
        if settings.codec:
            _check_finite(client, leaves([sent.state, sent.arrived]))
        store.save(stored.with_pending(request, sent.state))
    up = train.only_sent(sent.fields)
    return Reply(*request[:4], up, result.buffers, float(result.loss), result.job.batches.steps)


def _check_finite(client: LocalClient, values: Iterable[Tensor]) -> None:
    if not all(map(all_finite, values)):
        raise RefusedError(
            "not finite",
            f"client {client.client}: its round gave numbers that are not finite, so it does not count. "
            "Smaller step sizes may help",
        )
