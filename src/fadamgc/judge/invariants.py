"""Which invariants hold? A sound method need not have all: SGD's steps scale with the loss, Adam's do not.

Every invariant compares two short runs by hand, in float64, on clients with different quadratics: client i
has the gradient a_i (x - b_i) in every coordinate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm, Cohort, add
from fadamgc.errors import first_line
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.tree import named_leaves

CLIENTS, DIM, ROUNDS, K = 4, 6, 4, 3
RTOL, ATOL = 1e-9, 1e-11
SCALE, SCALE_RTOL, SCALE_ATOL = 8.0, 1e-4, 1e-6  # of the loss; an eps in a denominator adds a small error

Gradient = Callable[[Tensor], Tensor]


class Invariant(NamedTuple):
    """Whether an invariant holds; None if it does not apply to the method."""

    name: str
    holds: bool | None
    detail: str = ""


class _Play(NamedTuple):
    x: Tensor
    server: Any
    clients: list[Any]


def invariants(algorithm: AnyAlgorithm) -> Iterator[Invariant]:
    """Yield which invariants a method has."""
    for name, check in INVARIANTS.items():
        try:
            holds, detail = check(algorithm)
        except Exception as error:
            holds, detail = False, f"{type(error).__name__}: {first_line(error)}"
        yield Invariant(name, holds, detail)


def _problem() -> tuple[Tensor, Tensor, Tensor]:
    """Return the curvatures and the minimisers of all clients, and the first model."""
    generator = torch.Generator().manual_seed(0)
    a = 0.5 + torch.rand(CLIENTS, DIM, dtype=torch.float64, generator=generator)
    b = torch.randn(CLIENTS, DIM, dtype=torch.float64, generator=generator)
    return a, b, torch.randn(DIM, dtype=torch.float64, generator=generator)


def _gradients(a: Tensor, b: Tensor) -> list[Gradient]:
    return [lambda x, a_i=a_i, b_i=b_i: a_i * (x - b_i) for a_i, b_i in zip(a, b, strict=True)]  # type: ignore[misc]


def _play(algorithm: AnyAlgorithm, gradients: Sequence[Gradient], x: Tensor, absent: bool = False) -> _Play:
    """Run some rounds; with ``absent``, each round lacks one client, and one other client is not tracked."""
    n = len(gradients)
    algo: Any = algorithm.for_groups([n]) if isinstance(algorithm, GroupedAlgorithm) else algorithm
    starts = [gradient(x) if algo.init_gradient else None for gradient in gradients]
    mean = torch.stack([g for g in starts if g is not None]).mean(0) if algo.init_gradient else None
    server = algo.init_server(x, mean)
    clients = [algo.init_client(x, g) for g in starts]
    for t in range(1, ROUNDS + 1):
        here = [i for i in range(n) if not absent or i != t % n]
        down, total = algo.broadcast(server), None
        for i in here:
            x_i = down.x
            local = algo.begin(down, clients[i], gradients[i](x_i) if algo.round_gradient else None)
            for _ in range(K):
                x_i, local = algo.step(down, clients[i], local, x_i, gradients[i](x_i))
            tracked = not absent or i != here[0]
            clients[i], up = algo.finish(down, clients[i], local, x_i, K, tracked)
            total = up if total is None else add(total, up)
        server = algo.aggregate(server, total, Cohort(n=n, S=len(here), K=K, t=t))
    return _Play(server.x, server, clients)


def _compared(x: Tensor, other: Tensor, rtol: float = RTOL, atol: float = ATOL) -> tuple[bool, str]:
    holds = torch.allclose(x, other, rtol=rtol, atol=atol)
    return holds, "" if holds else f"the models differ by {float((x - other).abs().max()):.2g}"


def check_shift(algorithm: AnyAlgorithm) -> tuple[bool, str]:
    """Check that the result does not depend on the origin; with weight decay, it does."""
    a, b, x = _problem()
    shifted = _play(algorithm, _gradients(a, b + 3.0), x + 3.0)
    return _compared(shifted.x - 3.0, _play(algorithm, _gradients(a, b), x).x)


def check_signs(algorithm: AnyAlgorithm) -> tuple[bool, str]:
    """Check that coordinates may change their signs."""
    a, b, x = _problem()
    signs = torch.tensor([1.0, -1.0], dtype=x.dtype).repeat(DIM // 2)
    flipped = _play(algorithm, _gradients(a, signs * b), signs * x)
    return _compared(signs * flipped.x, _play(algorithm, _gradients(a, b), x).x)


def check_coordinates(algorithm: AnyAlgorithm) -> tuple[bool, str]:
    """Check that the order of the coordinates does not matter."""
    a, b, x = _problem()
    backwards = _play(algorithm, _gradients(a.flip(1), b.flip(1)), x.flip(0))
    return _compared(backwards.x.flip(0), _play(algorithm, _gradients(a, b), x).x)


def check_scale(algorithm: AnyAlgorithm) -> tuple[bool, str]:
    """Check that the scale of the loss does not matter, as with Adam."""
    a, b, x = _problem()
    scaled = _play(algorithm, _gradients(SCALE * a, b), x)
    return _compared(scaled.x, _play(algorithm, _gradients(a, b), x).x, SCALE_RTOL, SCALE_ATOL)


def check_copies(algorithm: AnyAlgorithm) -> tuple[bool, str]:
    """Check that two copies of every client give the same model."""
    a, b, x = _problem()
    doubled = _play(algorithm, _gradients(torch.cat([a, a]), torch.cat([b, b])), x)
    return _compared(doubled.x, _play(algorithm, _gradients(a, b), x).x)


def check_means(algorithm: AnyAlgorithm) -> tuple[bool | None, str]:
    """Check that a field of the server is the mean of the clients' fields of its name, as y is of y_i."""
    a, b, x = _problem()
    play = _play(algorithm, _gradients(a, b), x, absent=not algorithm.full_participation)
    server, clients = named_leaves(play.server), [named_leaves(client) for client in play.clients]
    names = [name for name in server if name != "x" and name in clients[0]]
    names = [name for name in names if server[name].shape == clients[0][name].shape]
    if not names:
        return None, "server and clients have no field of the same name"
    for name in names:
        mean = torch.stack([client[name] for client in clients]).mean(0)
        if not torch.allclose(server[name], mean, rtol=RTOL, atol=ATOL):
            difference = float((server[name] - mean).abs().max())
            return False, f"{name} and the mean of the clients' {name} differ by {difference:.2g}"
    return True, ", ".join(names)


INVARIANTS: dict[str, Callable[[AnyAlgorithm], tuple[bool | None, str]]] = {
    "server's state is the clients' mean": check_means,
    "copies of clients": check_copies,
    "order of coordinates": check_coordinates,
    "signs of coordinates": check_signs,
    "origin of coordinates": check_shift,
    "scale of the loss": check_scale,
}
