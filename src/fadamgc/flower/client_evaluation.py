"""Evaluation of the server's model at the clients, after a round is closed."""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

import numpy as np

from fadamgc.flower.protocol import EvaluateReply, EvaluateRequest
from fadamgc.flower.reply_checks import ReplyChecks, refusal
from fadamgc.metrics import client_metrics


class ClientEvaluation:
    """The requests to evaluate one model, and the replies that were accepted."""

    def __init__(self, requests: Sequence[EvaluateRequest], checks: ReplyChecks) -> None:
        self._requests = {request.client: request for request in requests}
        self._checks, self._began = checks, time.perf_counter()
        self._replies: dict[int, EvaluateReply] = {}

    def consider(self, client: int, reply: EvaluateReply) -> None:
        """Accept a client's reply.

        Raises:
            RefusedError: the reply is not as requested.
        """
        request = self._requests.get(client)
        if request is None:
            raise refusal(client, "not asked", "it was not asked to evaluate")
        if client in self._replies:
            raise refusal(client, "twice", "it has already answered")
        self._checks.check_evaluation(reply, request)
        self._replies[client] = reply

    def metrics(self, trained: Collection[int], goal: str) -> dict[str, float]:
        """Return the numbers over clients; {} without any reply. ``trained``: the clients that have trained.

        If some clients have test data, the others do not count, as in a simulation.
        """
        replies = sorted(self._replies.items())
        if any(reply.held_out for _, reply in replies):
            replies = [(i, reply) for i, reply in replies if reply.held_out]
        if not replies:
            return {}
        values = np.array([reply.value for _, reply in replies])
        seen = [position for position, (i, _) in enumerate(replies) if i in trained]
        return client_metrics(values, seen, goal)

    @property
    def seconds(self) -> float:
        """The time since the clients were asked."""
        return time.perf_counter() - self._began
