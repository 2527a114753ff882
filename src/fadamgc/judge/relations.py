"""Relations between the server's state and the clients' states, with and without codecs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.federation.messages import RestClient
from fadamgc.tree import named_leaves

RTOL = 1e-9  # in float64
LOSSY = "int8:16"

Simulate = Callable[..., Any]


def relations(
    algorithm: AnyAlgorithm, simulate: Simulate, codec: Mapping[str, str] | None = None
) -> set[str]:
    """Return the relations that hold after every round in which all clients take part.

    They are "y" if the mean of the clients' y is the server's y, and "mean of local z = 0" if that of the
    clients' local states at the start of the next round is zero, while the clients' own values are not.

    Args:
        algorithm: the algorithm for the shapes of its model.
        simulate: runs it, with the arguments ``callbacks`` and ``codec``, in float64.
        codec: codecs of fields.
    """
    seen: list[set[str]] = []

    def look(end: Any) -> None:
        now = algorithm.at(end.record.round + 1)
        states = [state.inner if isinstance(state, RestClient) else state for state in end.clients]
        held = _equal_means([named_leaves(state) for state in states], named_leaves(end.server))
        if not now.round_gradient:
            down = now.broadcast(end.server)
            begun = [named_leaves(now.begin(down, state)) for state in states]
            zeros = {name: torch.zeros_like(leaf) for name, leaf in begun[0].items()}
            held |= {f"mean of local {name} = 0" for name in _equal_means(begun, zeros)}
        seen.append(held)

    simulate(callbacks=[look], codec=codec)
    return set.intersection(*seen)


def _equal_means(clients: list[dict[str, Tensor]], server: Mapping[str, Tensor]) -> set[str]:
    """Return the fields of the server that are the mean of the clients' fields of the same name."""
    held = set()
    for name, leaf in clients[0].items():
        if name not in server or server[name].shape != leaf.shape or leaf.numel() == 1:
            continue
        rows = torch.stack([client[name] for client in clients])
        largest = float(rows.abs().max())
        if largest and float((rows.mean(0) - server[name]).abs().max()) <= RTOL * largest:
            held.add(name)
    return held


def lossy_codecs(algorithm: AnyAlgorithm, d: int) -> dict[str, str]:
    """Return a lossy codec for every vector that clients send and the server does not."""
    sample = example(algorithm, torch.zeros(d, dtype=torch.float64))
    down = named_leaves(sample.down)
    sent = named_leaves(sample.up)
    return {name: LOSSY for name, leaf in sent.items() if leaf.numel() == d and name not in down}
