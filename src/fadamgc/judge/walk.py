"""Run two rounds by hand, and check everything that the methods of an algorithm return."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm, Cohort, add
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.tree import leaves


def walk(algorithm: AnyAlgorithm, dtype: torch.dtype, twice: bool = False) -> list[tuple[Any, Any]]:
    """Play two rounds by hand, and check every result; return the messages of the clients: down and up."""
    x = torch.linspace(1, 2, 5, dtype=dtype)
    generator = torch.Generator().manual_seed(0)
    algo: Any = algorithm.for_groups([2, 2]) if isinstance(algorithm, GroupedAlgorithm) else algorithm
    grouped = algo is not algorithm
    messages = []

    def call(method: str, *arguments: Any, like: Any = None, **options: Any) -> Any:
        before = [tensor.clone() for tensor in _tensors(arguments)]
        result = getattr(algo, method)(*arguments, **options)
        kept = [torch.equal(a, b) for a, b in zip(before, _tensors(arguments), strict=True)]
        assert all(kept), f"{method} changes its arguments; return new tensors instead"
        if twice:
            again = getattr(algo, method)(*arguments, **options)
            same = all(map(torch.equal, leaves(result), leaves(again)))
            assert same, f"{method} gives another result if it is called again"
        if like is not None:
            assert len(leaves(result)) == len(leaves(like)), f"{method} returns other fields than before"
            for i, (mine, other) in enumerate(zip(leaves(result), leaves(like), strict=True)):
                wanted = f"{tuple(other.shape)} of {other.dtype}"
                got = f"{tuple(mine.shape)} of {mine.dtype}"
                assert got == wanted, f"{method} returns a tensor ({i + 1}) of shape {got}, not {wanted}"
        return result

    def g() -> Tensor:
        return torch.randn(5, dtype=dtype, generator=generator)

    start = g() if algo.init_gradient else None
    server = call("init_server", x, start)
    clients = [call("init_client", x, start) for _ in range(4)]
    for t in (1, 2):
        if grouped:
            server = call("start_round", server, like=server)
        for j, members in enumerate(((0, 1), (2, 3)) if grouped else ((0, 1, 2),)):
            down = call("broadcast_to", server, j) if grouped else call("broadcast", server)
            total = None
            for i in members:
                x_i = down.x
                assert x_i.shape == x.shape, f"down.x has the shape {tuple(x_i.shape)}, not {tuple(x.shape)}"
                local = call("begin", down, clients[i], g() if algo.round_gradient else None)
                for _ in range(3):
                    x_i, local = call("step", down, clients[i], local, x_i, g(), like=(x_i, local))
                state = clients[i]
                clients[i], up = call("finish", down, state, local, x_i, 3, i != 1)
                likeness = zip(leaves(state), leaves(clients[i]), strict=True)
                assert all(a.shape == b.shape and a.dtype == b.dtype for a, b in likeness), (
                    "finish returns a client's state with other shapes or types than init_client"
                )
                messages.append((down, up))
                total = up if total is None else add(total, up)
            cohort = Cohort(n=4, S=len(members), K=3, t=t)
            if grouped:
                server = call("aggregate_group", server, j, total, cohort, like=server)
            else:
                server = call("aggregate", server, total, cohort, like=server)
        if grouped:
            server = call("end_round", server, Cohort(n=4, S=4, K=3, t=t), like=server)
    return messages


def _tensors(arguments: Any) -> list[Tensor]:
    return [value for value in leaves(arguments) if isinstance(value, Tensor)]
