"""Which replies a server accepts: those with the right header, finite numbers and norms in proportion."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import median, median_low
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fadamgc.errors import InputError
from fadamgc.federation.server import Federation, ServerState
from fadamgc.federation.traits import NORM_LAYERS
from fadamgc.flower.members import check_above
from fadamgc.flower.protocol import (
    EvaluateReply,
    EvaluateRequest,
    RefusedError,
    Reply,
    Request,
    check_tensors,
    describe,
)
from fadamgc.tree import named_leaves

LARGEST_LOSS = 1e30
REMEMBERED_ROUNDS = 5  # rounds whose median norms are remembered
QUICK_TEST = 256  # test samples that are evaluated in a round without an evaluation
STEPS = "local steps"  # the typical number of steps is remembered like a norm

Norms = dict[str, float]
STATISTICS: dict[str, Callable[[Sequence[float]], float]] = {"median": median, "largest": max}  # of norms
Tensors = Mapping[str, Tensor]


class Scale(NamedTuple):
    """The typical norm of one vector in the clients' messages."""

    largest: float = 0.0  # the largest value that the median of ``recent`` has had
    recent: tuple[float, ...] = ()  # the median norm of each of the last rounds

    def after(self, norms: Iterable[float]) -> Scale:
        """Return the scale after a round in which these norms were accepted; norms of 0 do not count."""
        lengths = [norm for norm in norms if norm > 0]
        if not lengths:
            return self
        recent = (*self.recent, median_low(lengths))[-REMEMBERED_ROUNDS:]
        return Scale(max(self.largest, median_low(recent)), recent)

    def reference(self, norms: Iterable[float]) -> float:
        """Return the typical norm for a round with these norms; 0 if there is nothing to compare with.

        The median of two norms is the lower one, so that one of two clients cannot raise it.
        """
        lengths = [norm for norm in norms if norm > 0]
        return max(self.largest, median_low(lengths) if len(lengths) > 1 else 0.0)


class ReplyChecks:
    """Checks single replies, and all replies of a round against each other.

    Args:
        module: the model, for the names of its running variances.
        max_norm: the longest vector that is accepted.
        max_norm_ratio: the largest accepted ratio of the norm of a vector, or of a change of buffers, to the
            typical norm, which is the median of this round or the largest median of earlier rounds, whichever
            is larger. For a client with more local steps than is typical, the limit grows in proportion, by
            at most this factor.

    Attributes:
        scales: the typical norm of each vector and buffer.
    """

    def __init__(self, module: nn.Module, max_norm: float, max_norm_ratio: float) -> None:
        check_above("max_norm", max_norm, 0)
        check_above("max_norm_ratio", max_norm_ratio, 1)
        self.max_norm, self.max_norm_ratio = max_norm, max_norm_ratio
        self.scales: dict[str, Scale] = {}
        self._variances = {
            f"{name}.running_var" if name else "running_var"
            for name, layer in module.named_modules()
            if isinstance(layer, NORM_LAYERS)
        }

    def check(
        self, reply: Reply, request: Request, vectors: Tensors, buffers: Tensors, steps: int | None
    ) -> Norms:
        """Refuse a reply that does not answer the request, or has fields or numbers that cannot be right.

        ``vectors``, ``buffers`` and the number of local ``steps`` (None if unknown) are those that the server
        has requested. Return the norms of the reply's vectors and of its changes to the buffers.
        """
        client = request.client
        self.check_header(reply, request, steps)
        owner = f"the reply of client {client} is refused: its"
        check_tensors(owner, "update", reply.up, vectors)
        check_tensors(owner, "buffers", reply.buffers, buffers)
        for name in self._variances & set(reply.buffers):
            if bool((reply.buffers[name] < 0).any()):
                raise refusal(client, "variance", f"{name} has variances below 0")
        norms = {name: _norm(value) for name, value in reply.up.items()}
        for name, length in norms.items():
            if length > self.max_norm:
                why = f"{name} has norm {length:.4g}, more than max_norm={self.max_norm:g}"
                raise refusal(client, "norm", why)
        norms |= {name: self._distance(name, b, buffers[name]) for name, b in reply.buffers.items()}
        for name, length in norms.items():
            if not math.isfinite(length):
                raise refusal(client, "not finite", f"the norm of {name} is not finite")
        return norms | {STEPS: float(reply.steps)}

    def check_header(self, reply: Reply, request: Request, steps: int | None) -> None:
        """Refuse a reply that does not answer the request, or has numbers that cannot be right."""
        client = request.client
        self._check_address(reply, request)
        if not (isinstance(reply.steps, int) and 1 <= reply.steps <= 10**9):
            raise refusal(client, "steps", f"it has {reply.steps!r} local steps")
        if steps is not None and reply.steps != steps:
            raise refusal(client, "steps", f"it has {reply.steps} local steps, not {steps}")
        if not (isinstance(reply.loss, float) and abs(reply.loss) <= LARGEST_LOSS):
            raise refusal(client, "not finite", f"its loss is {reply.loss!r}")

    def check_evaluation(self, reply: EvaluateReply, request: EvaluateRequest) -> None:
        """Refuse the value of a metric that does not answer the request, or that cannot be right."""
        client = request.client
        self._check_address(reply, request)
        if reply.metric != request.metric:
            raise refusal(client, "metric", f"it has {reply.metric!r}, not {request.metric!r}")
        if not (isinstance(reply.value, float) and abs(reply.value) <= LARGEST_LOSS):
            raise refusal(client, "not finite", f"its {reply.metric} is {reply.value!r}")
        if reply.metric == "accuracy" and not 0 <= reply.value <= 1:
            raise refusal(client, "metric", f"its accuracy is {reply.value!r}, not from 0 to 1")

    def _check_address(self, reply: Reply | EvaluateReply, request: Request | EvaluateRequest) -> None:
        client = request.client
        if reply.client != client:
            raise refusal(client, "another client", f"it says that it is client {reply.client}")
        if reply[:4] != request[:4]:
            answered, asked = (f"{describe(m.stamp)} of {m.experiment!r}" for m in (reply, request))
            raise refusal(client, "another round", f"it answers {answered}, not {asked}")

    def out_of_proportion(self, norms: Mapping[int, Norms], state: ServerState) -> dict[int, RefusedError]:
        """Return the clients whose norms are far larger than is typical, each with the reason."""
        ratio = self.max_norm_ratio
        steps = {i: client_norms[STEPS] for i, client_norms in norms.items()}
        typical_steps = self.scales.get(STEPS, Scale()).reference(steps.values())
        refused: dict[int, RefusedError] = {}
        for name in sorted({name for client_norms in norms.values() for name in client_norms} - {STEPS}):
            lengths = {i: client_norms[name] for i, client_norms in norms.items() if name in client_norms}
            typical = self.scales.get(name, Scale()).reference(lengths.values())
            if not typical:
                continue  # there is nothing to compare with
            for i, length in lengths.items():
                # For a client with more local steps than is typical, the limit grows in proportion.
                growth = min(max(steps[i] / typical_steps, 1.0), ratio) if typical_steps else 1.0
                if length > ratio * growth * typical and length > self._size_at_server(name, state):
                    why = f"more than max_norm_ratio={ratio:g} times the typical norm {typical:.4g}"
                    refused.setdefault(i, refusal(i, "norm", f"{name} has norm {length:.4g}, {why}"))
        return dict(sorted(refused.items()))

    def scales_after(self, norms: Mapping[int, Norms]) -> dict[str, Scale]:
        """Return the scales after a round in which these clients' norms were accepted."""
        scales = dict(self.scales)
        for name in {name for client_norms in norms.values() for name in client_norms}:
            accepted = [norms[i][name] for i in sorted(norms) if name in norms[i]]
            scales[name] = scales.get(name, Scale()).after(accepted)
        return scales

    def _size_at_server(self, name: str, state: ServerState) -> float:
        """Return the norm of the server's tensor that a vector or buffer is added to; 0 if there is none."""
        if name in state.buffers:
            return self._distance(name, state.buffers[name], torch.zeros_like(state.buffers[name]))
        value = named_leaves(state.server).get(name.removeprefix("d")) if name.startswith("d") else None
        return 0.0 if value is None else _norm(value)

    def _distance(self, name: str, value: Tensor, other: Tensor) -> float:
        """Return the distance of two buffers, or of the square roots of two variances."""
        pair = value.double(), other.double()
        first, second = (t.clamp(min=0).sqrt() for t in pair) if name in self._variances else pair
        return _norm(first - second)


def norm_name(field: str, statistic: str) -> str:
    """Return the name of a norm in ``Record.replies``; ``statistic`` is one of ``STATISTICS``."""
    return f"norm of {field}, {statistic}"


def norm_statistics(norms: Sequence[Norms], fields: Iterable[str]) -> dict[str, float]:
    """Return the statistics of the norms of these fields, over the replies that have the field."""
    numbers: dict[str, float] = {}
    for field in fields:
        if lengths := [of_reply[field] for of_reply in norms if field in of_reply]:
            numbers |= {norm_name(field, name): compute(lengths) for name, compute in STATISTICS.items()}
    return numbers


def evaluate(federation: Federation, state: ServerState) -> tuple[dict[str, float], str | None]:
    """Return the evaluation of the next round, {} if it has none, and the model's flaw if it has one."""
    if state.nonfinite() is not None:
        return {}, "the sum of the replies is not finite"

    def quick_loss() -> float:
        return federation.functions.quick_test_loss(state.server.x, state.buffers, QUICK_TEST) or 0.0

    try:
        evaluation = federation.evaluate(state)
    except InputError as error:  # such as a custom metric that fails on numbers that are not finite
        if math.isfinite(quick_loss()):
            raise
        return {}, str(error)
    loss = evaluation.get("test_loss", 0.0) if evaluation else quick_loss()
    flaw = None if math.isfinite(loss) else f"with the replies, the loss on the test data is {loss}"
    return evaluation, flaw


def refusal(client: int, kind: str, why: str) -> RefusedError:
    """Return the error for a client's reply that is refused."""
    return RefusedError(kind, f"the reply of client {client} is refused: {why}")


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))
