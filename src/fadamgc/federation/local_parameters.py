"""Parameters that stay at the clients (FedBN, personal layers), for every algorithm.

The shared parameters are trained by the algorithm, as always. The local parameters of each client are
trained by the same algorithm in a federation of one: the client is its own server, so local parameters
are not sent, averaged or corrected, and the client keeps the algorithm's state between rounds (moments,
server momentum). Buffers of local layers, BatchNorm's statistics, stay at the client as well.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fadamgc.algorithm import AnyAlgorithm, Cohort, Flag, Steps
from fadamgc.errors import InputError, cut, shown
from fadamgc.flat import Flat
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.wrapped import Wrapped


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which parameters and which buffers of a model are local."""

    sizes: tuple[int, ...]  # of the parameters, in the order of the flat vector
    is_local: tuple[bool, ...]
    buffers: tuple[tuple[str, torch.Size, torch.dtype], ...]  # local ones: name, shape and type

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the shared and the local part of a vector; a vector of another length is halved."""
        if len(x) != sum(self.sizes):
            return x[: len(x) // 2], x[len(x) // 2 :]
        pieces = list(zip(torch.split(x, list(self.sizes)), self.is_local, strict=True))
        shared, own = ([piece for piece, local in pieces if local == wanted] for wanted in (False, True))
        return torch.cat(shared), torch.cat(own or [x[:0]])

    def join(self, shared: Tensor, own: Tensor) -> Tensor:
        """Return the vector with these parts, the inverse of ``split``."""
        if len(shared) + len(own) != sum(self.sizes):
            return torch.cat([shared, own])
        parts = {False: shared, True: own}
        pieces = {local: iter(torch.split(part, self._sizes_of(local))) for local, part in parts.items()}
        return torch.cat([next(pieces[local]) for local in self.is_local])

    def _sizes_of(self, wanted: bool) -> list[int]:
        return [size for size, local in zip(self.sizes, self.is_local, strict=True) if local == wanted]

    @property
    def shared_size(self) -> int:
        """The length of the shared part."""
        return sum(self._sizes_of(False))

    def pack(self, buffers: Mapping[str, Tensor], like: Tensor) -> Tensor:
        """Return the local buffers as one vector of the type of ``like``."""
        return torch.cat([buffers[name].reshape(-1).to(like) for name, _, _ in self.buffers] or [like[:0]])

    def unpack(self, vector: Tensor) -> dict[str, Tensor]:
        """Return the local buffers by name, the inverse of ``pack``."""
        pieces = torch.split(vector, [shape.numel() for _, shape, _ in self.buffers]) if self.buffers else ()
        return {
            name: piece.reshape(shape).to(dtype)
            for (name, shape, dtype), piece in zip(self.buffers, pieces, strict=True)
        }

    def shared_buffers(self, buffers: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the buffers that are sent."""
        local = {name for name, _, _ in self.buffers}
        return {name: value for name, value in buffers.items() if name not in local}


def layout_of(patterns: Sequence[str], model: nn.Module, flat: Flat, buffers: Mapping[str, Tensor]) -> Layout:
    """Return the layout of a model whose local parameters are given by names.

    A pattern (with * as in file names) is the name of a parameter or of a layer, or the class of a layer.
    """
    matched: dict[str, set[str]] = {pattern: set() for pattern in patterns}
    for path, layer in model.named_modules():
        inside = [name for name, _ in [*layer.named_parameters(), *layer.named_buffers()]]
        for pattern, names in matched.items():
            if path and (fnmatchcase(path, pattern) or fnmatchcase(type(layer).__name__, pattern)):
                names.update(f"{path}.{name}" for name in inside)
    for name in (*flat.names, *buffers):
        for pattern, names in matched.items():
            if fnmatchcase(name, pattern):
                names.add(name)
    for pattern, names in matched.items():
        if not names & {*flat.names, *buffers}:
            raise InputError(
                f"local_parameters={shown(pattern)} matches no trainable parameter of "
                f"{type(model).__name__}; its parameters are {cut(', '.join(flat.names))}"
            )
    local = set().union(*matched.values())
    is_local = tuple(name in local for name in flat.names)
    if all(is_local):
        raise InputError(
            f"local_parameters={shown(list(patterns))} are all parameters; none is left to share"
        )
    kept = tuple((name, value.shape, value.dtype) for name, value in buffers.items() if name in local)
    return Layout(tuple(flat.sizes), is_local, kept)


class PartServer(NamedTuple):
    """The server's state."""

    x: Tensor  # the whole model; its local part is that of the initial model
    shared: Any  # the algorithm's server state for the shared part


class PartDown(NamedTuple):
    """The values from which a client starts."""

    x: Tensor  # the whole model, with the client's own part (see ``receive``)
    shared: Any  # the algorithm's message


class PartClient(NamedTuple):
    """A client's state."""

    shared: Any  # the algorithm's client state for the shared part
    server: Any  # server state of the federation of one, for the local part
    own: Any  # client state of the federation of one, for the local part
    rounds: Tensor  # number of rounds in which the client has taken part
    buffers: Tensor  # the local buffers as one vector


class PartLocal(NamedTuple):
    """The state of a client's local steps."""

    shared: Any
    own: Any


@dataclasses.dataclass(frozen=True)
class PartlyLocal(Wrapped[PartServer, PartDown, PartClient, PartLocal, Any]):
    """An algorithm for a model some of whose parameters stay at the clients."""

    layout: Layout
    first_buffers: tuple[float, ...] = ()  # the local buffers of the initial model

    def __post_init__(self) -> None:
        if isinstance(self.inner, GroupedAlgorithm):
            raise InputError(
                f"local_parameters are given, but {type(self.inner).__name__} has clients in groups; use "
                "another algorithm"
            )

    @property
    def tracked_only(self) -> tuple[str, ...]:  # type: ignore[override]
        """The inner algorithm's."""
        return tuple(self.inner.tracked_only)

    def _parts(self, x: Tensor, g: Tensor | None) -> Iterable[tuple[Tensor, Tensor | None]]:
        gradients = (None, None) if g is None else self.layout.split(g)
        return zip(self.layout.split(x), gradients, strict=True)

    def init_server(self, x: Tensor, g: Tensor | None = None) -> PartServer:
        """Return the server's first state."""
        (shared, g_shared), _ = self._parts(x, g)
        return PartServer(x, self.inner.init_server(shared, g_shared))

    def init_client(self, x: Tensor, g: Tensor | None = None) -> PartClient:
        """Return a client's first state; its own part begins at the initial model."""
        (shared, g_shared), (own, g_own) = self._parts(x, g)
        return PartClient(
            shared=self.inner.init_client(shared, g_shared),
            server=self.inner.init_server(own, g_own),
            own=self.inner.init_client(own, g_own),
            rounds=torch.zeros(1, dtype=x.dtype, device=x.device),
            buffers=torch.tensor(self.first_buffers, dtype=x.dtype, device=x.device),
        )

    def broadcast(self, server: PartServer) -> PartDown:
        """Return the message; only its field ``shared`` is sent."""
        return PartDown(server.x, self.inner.broadcast(server.shared))

    def receive(self, down: PartDown, client: PartClient) -> PartDown:
        """Return the message at a client, with the client's own part in x."""
        return down._replace(x=self.layout.join(down.shared.x, client.server.x))

    def begin(self, down: PartDown, client: PartClient, g: Tensor | None = None) -> PartLocal:
        """Return the local states before step 1."""
        g_shared, g_own = (None, None) if g is None else self.layout.split(g)
        own = self.inner.begin(self.inner.broadcast(client.server), client.own, g_own)
        return PartLocal(self.inner.begin(down.shared, client.shared, g_shared), own)

    def step(
        self, down: PartDown, client: PartClient, local: PartLocal, x: Tensor, g: Tensor
    ) -> tuple[Tensor, PartLocal]:
        """Take one step of the algorithm on each part."""
        (x_shared, x_own), (g_shared, g_own) = self.layout.split(x), self.layout.split(g)
        x_shared, shared = self.inner.step(down.shared, client.shared, local.shared, x_shared, g_shared)
        own_down = self.inner.broadcast(client.server)
        x_own, own = self.inner.step(own_down, client.own, local.own, x_own, g_own)
        return self.layout.join(x_shared, x_own), PartLocal(shared, own)

    def finish(
        self, down: PartDown, client: PartClient, local: PartLocal, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[PartClient, Any]:
        """Return the client's new state and the message, which has the shared part only."""
        x_shared, x_own = self.layout.split(x)
        shared, up = self.inner.finish(down.shared, client.shared, local.shared, x_shared, K, tracked)
        own_down = self.inner.broadcast(client.server)
        own, up_own = self.inner.finish(own_down, client.own, local.own, x_own, K, True)
        cohort = Cohort(n=1, S=1, K=K, t=client.rounds + 1)  # type: ignore[arg-type]
        server = self.inner.aggregate(client.server, up_own, cohort)
        return PartClient(shared, server, own, client.rounds + 1, client.buffers), up

    def aggregate(self, server: PartServer, total: Any, cohort: Cohort) -> PartServer:
        """Return the server's new state; the local part of x stays that of the initial model."""
        shared = self.inner.aggregate(server.shared, total, cohort)
        return PartServer(self.layout.join(shared.x, self.layout.split(server.x)[1]), shared)


UNKNOWN = Layout((1,), (False,), ())  # of a saved run without its model


def partly_local(
    algorithm: AnyAlgorithm,
    patterns: Sequence[str],
    model: nn.Module,
    flat: Flat,
    buffers: Mapping[str, Tensor],
) -> PartlyLocal:
    """Return an algorithm for a model whose local parameters are given by names."""
    layout = layout_of(patterns, model, flat, buffers)
    packed = layout.pack(buffers, torch.zeros(1, dtype=torch.float64))
    return PartlyLocal(algorithm, layout, tuple(packed.tolist()))
