"""One client's part of a federation: its own data, and the rules of the algorithm, as in the simulator."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.errors import InputError
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.problem import Buffers, Problem
from fadamgc.federation.sampling import batches
from fadamgc.federation.settings import Settings
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.protocol import RefusedError, Reply, Request, resolve_pending, with_pending
from fadamgc.sim.executors.base import Job, Round
from fadamgc.sim.executors.loop import one
from fadamgc.task import Loss, Pair, Task


class Answer(NamedTuple):
    """What came of a client's round."""

    state: Any  # for the client to keep
    up: Any  # for the server
    buffers: Buffers
    loss: float
    steps: int


class Party:
    """A client with its model and data.

    Args:
        model: as the server's; its weights are replaced by what the server sends.
        loss: as in ``fadamgc.Task``.
        data: inputs and targets of this client alone.
        client: its number among all clients, from 0; random draws depend on it.
    """

    def __init__(self, model: nn.Module, loss: Loss, data: Pair, client: int) -> None:
        if client < 0:
            raise InputError(f"client={client} is not accepted; clients are numbered from 0")
        self.client = client
        self.problem = Problem(Task(model, loss, [data]))
        # The simulator finds a client's data by its number. Here all but one have theirs elsewhere.
        size = len(self.problem.inputs)
        self.problem.start = np.zeros(client + 1, dtype=np.int64)
        self.problem.size = np.zeros(client + 1, dtype=np.int64)
        self.problem.size[client] = size

    @property
    def samples(self) -> int:
        """How many samples the client has."""
        return len(self.problem.inputs)

    def gradient(self, x: Tensor, buffers: Buffers, seed: int) -> Tensor:
        """The gradient of the client's whole data at x, before the first round."""
        return self.problem.whole_gradient(x, buffers, self.client, seed, 0)

    def round(
        self,
        algorithm: AnyAlgorithm,
        settings: Settings,
        t: int,
        down: Any,
        buffers: Buffers,
        state: Any,
        tracked: bool,
    ) -> Answer:
        """The client's part of round t."""
        s = settings
        chosen = batches(s.seed, t, self.client, self.samples, s.batch_size, s.local_steps, s.local_epochs)
        round = Round(self.problem, algorithm, s.seed, t, down, buffers)
        states = ClientStates(self.client + 1, state)
        with torch.inference_mode(False):
            result = one(Job(round, self.client, states, tracked, chosen))
        return Answer(result.state, result.up, result.buffers, float(result.loss), chosen.steps)


def answer(
    party: Party,
    keeper: ClientStore,
    algorithm: AnyAlgorithm,
    settings: Settings,
    request: Request,
    tracked: bool,
    down: dict[str, Tensor],
    buffers: Buffers,
) -> Reply:
    """Do what the server asks, and keep what comes of it until the server says that it counted.

    Raises:
        RefusedError: the request cannot be met; nothing has changed.
    """
    kinds = example(algorithm, torch.zeros(1))
    first = request.stamp.round == 0  # the server wants the gradient at the first model
    _check(party, {"x": party.problem.x0} if first else _like(kinds.down, party), down, buffers)
    with keeper.locked():
        kept = resolve_pending(keeper.load(kinds.client), request)
        if first:
            g = party.gradient(down["x"], buffers, settings.seed)
            _check_finite(party, [g])
            keeper.save(with_pending(kept, request, algorithm.init_client(down["x"], g)))
            return Reply(*request[:4], {"g": g}, {}, 0.0, settings.passes(party.samples))
        message = type(kinds.down)(**down)
        state = algorithm.init_client(message.x) if kept.committed_state is None else kept.committed_state
        result = party.round(algorithm, settings, request.stamp.round, message, buffers, state, tracked)
        _check_finite(party, [*result.state, *result.up, *result.buffers.values(), torch.tensor(result.loss)])
        keeper.save(with_pending(kept, request, result.state))
    up = {
        name: value
        for name, value in result.up._asdict().items()
        if tracked or name not in algorithm.tracked_only
    }
    return Reply(*request[:4], up, result.buffers, result.loss, result.steps)


def _check_finite(party: Party, values: Sequence[Tensor]) -> None:
    if not all(bool(torch.isfinite(value).all()) for value in values if value.is_floating_point()):
        raise RefusedError(
            "not finite",
            f"client {party.client}: its round gave numbers that are not finite; it is as if it had "
            "not taken part. Smaller step sizes may help",
        )


def _like(kind: Any, party: Party) -> dict[str, Tensor]:
    """What a message looks like for the party's model."""
    return dict.fromkeys(kind._fields, party.problem.x0)


def _check(party: Party, wanted: dict[str, Tensor], down: dict[str, Tensor], buffers: Buffers) -> None:
    """Refuse a model that is not this client's, or numbers that cannot be worked with."""
    for what, given, like in (("message", down, wanted), ("buffers", buffers, party.problem.buffers0)):
        if set(given) != set(like):
            raise RefusedError(
                "fields",
                f"client {party.client}: the server's {what} has {sorted(given)}, this model wants "
                f"{sorted(like)}",
            )
        for name, value in given.items():
            if value.shape != like[name].shape or value.dtype != like[name].dtype:
                raise RefusedError(
                    "shape",
                    f"client {party.client}: the server's {name} is {value.dtype} {tuple(value.shape)}, this "
                    f"model wants {like[name].dtype} {tuple(like[name].shape)}; do both have the same model?",
                )
            if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise RefusedError("not finite", f"client {party.client}: the server's {name} is not finite")
