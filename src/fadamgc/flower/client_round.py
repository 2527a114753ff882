"""One client's part of a federation: its data, and the algorithm's rules as in the simulator."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fadamgc.algorithm import AnyAlgorithm, example, stand_in
from fadamgc.errors import InputError
from fadamgc.federation.client_data import ClientTable
from fadamgc.federation.functions import Buffers, TaskFunctions
from fadamgc.federation.jobs import Job, Result, Round
from fadamgc.federation.settings import Settings
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.protocol import RefusedError, Reply, Request, resolve_pending, with_pending
from fadamgc.sim.executors.trainer import train
from fadamgc.task import Loss, Pair, Task
from fadamgc.tree import from_names, leaves, named_leaves


class LocalClient:
    """A client with its model and data.

    Args:
        model: the same model as the server's; its weights are replaced by what the server sends.
        loss: as in ``fadamgc.Task``.
        data: inputs and targets of this client only.
        client: number of the client among all clients, from 0; random draws depend on it.
    """

    def __init__(self, model: nn.Module, loss: Loss, data: Pair, client: int) -> None:
        if client < 0:
            raise InputError(f"client={client} is not accepted; clients are numbered from 0")
        self.client = client
        task = Task(model, loss, [data])
        self.functions = TaskFunctions(task)
        self.data = ClientTable(task, self.functions.dtype, self.functions.device)[0]

    @property
    def samples(self) -> int:
        """Number of samples of the client."""
        return self.data.size

    def first_gradient(self, x: Tensor, buffers: Buffers, seed: int) -> Tensor:
        """Return the gradient of the client's whole data at x, before the first round."""
        return self.functions.whole_gradient(x, buffers, self.client, self.data, seed, 0)

    def train(self, round: Round, settings: Settings, state: object, tracked: bool) -> Result:
        """Run the client's part of a round."""
        batches = settings.batches(round.t, self.client, self.samples)
        with torch.inference_mode(False):
            return train(Job(round, self.client, self.data, lambda: state, tracked, batches))


def handle_request(
    client: LocalClient,
    store: ClientStore,
    algorithm: AnyAlgorithm,
    settings: Settings,
    request: Request,
    tracked: bool,
    vectors: Mapping[str, Tensor],
    buffers: Buffers,
) -> Reply:
    """Do what the server asks, and store the new state as pending until the server says that it counted.

    Args:
        client: the client.
        store: where the client's state is stored.
        algorithm: the algorithm.
        settings: seed, local steps and batch size of the run.
        request: which round is asked for, and which one has counted last.
        tracked: whether the client sends tracking updates.
        vectors: the server's message, by name.
        buffers: the model's averaged buffers.

    Raises:
        RefusedError: the request cannot be fulfilled; nothing has changed.
    """
    functions = client.functions
    like = example(algorithm, stand_in(functions.flat.d, functions.x0.dtype))
    is_setup = request.stamp.round == 0  # the server wants the gradient at the first model
    _check_message(client, {"x": functions.x0} if is_setup else named_leaves(like.down), vectors, buffers)
    with store.locked():
        stored = resolve_pending(store.load(like.client), request)
        if is_setup:
            g = client.first_gradient(vectors["x"], buffers, settings.seed)
            _check_finite(client, [g])
            store.save(with_pending(stored, request, algorithm.init_client(vectors["x"], g)))
            return Reply(*request[:4], {"g": g}, {}, 0.0, settings.passes(client.samples))
        down = from_names(like.down, vectors)
        state = stored.committed_state
        if state is None:
            state = algorithm.init_client(down.x)
        round = Round(functions, algorithm, settings.seed, request.stamp.round, down, buffers)
        result = client.train(round, settings, state, tracked)
        _check_finite(
            client, [*leaves(result.state), *leaves(result.up), *result.buffers.values(), result.loss]
        )
        store.save(with_pending(stored, request, result.state))
    up = {
        name: value
        for name, value in named_leaves(result.up).items()
        if tracked or name.partition(".")[0] not in algorithm.tracked_only
    }
    return Reply(*request[:4], up, result.buffers, float(result.loss), result.job.batches.steps)


def _check_finite(client: LocalClient, values: Sequence[Tensor]) -> None:
    if not all(bool(torch.isfinite(value).all()) for value in values if value.is_floating_point()):
        raise RefusedError(
            "not finite",
            f"client {client.client}: its round gave numbers that are not finite, so it does not count. "
            "Smaller step sizes may help",
        )


def _check_message(
    client: LocalClient, expected: Mapping[str, Tensor], vectors: Mapping[str, Tensor], buffers: Buffers
) -> None:
    """Refuse a model that is not this client's, or numbers that are not finite."""
    parts = (("message", vectors, expected), ("buffers", buffers, client.functions.buffers0))
    for part, tensors, like in parts:
        if set(tensors) != set(like):
            raise RefusedError(
                "fields",
                f"client {client.client}: the server's {part} has {sorted(tensors)}, this model needs "
                f"{sorted(like)}",
            )
        for name, value in tensors.items():
            if value.shape != like[name].shape or value.dtype != like[name].dtype:
                raise RefusedError(
                    "shape",
                    f"client {client.client}: the server's {name} is {value.dtype} {tuple(value.shape)}, "
                    f"this model needs {like[name].dtype} {tuple(like[name].shape)}; do both have the same "
                    "model?",
                )
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise RefusedError("not finite", f"client {client.client}: the server's {name} is not finite")
