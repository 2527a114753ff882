"""Messages as they are sent: each field in its codec.

The client commits to what the server reads: where a field of its state moves by what it sends (y_i by dy), it
moves by what arrives. So the server's y stays the mean of the y_i, whatever the codec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm, Cohort, Empty, Flag, Steps, example, stand_in
from fadamgc.codecs import Codec, check_table, codecs_of
from fadamgc.errors import InputError, shown
from fadamgc.federation.local_parameters import PartClient, PartlyLocal
from fadamgc.federation.sampling import CODEC, torch_seed
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.tree import from_names, named_leaves, names
from fadamgc.wrapped import Wrapped

CodecTable = tuple[tuple[str, str], ...]  # pairs of a field and the name of its codec
Named = Mapping[str, Tensor]


class MessageCodecs:
    """The codecs of the messages of one algorithm.

    Attributes:
        down, up: the codec of each field that has one.
        rest: the fields of ``up`` whose rest the client adds to the next message.
    """

    def __init__(self, table: CodecTable, algorithm: AnyAlgorithm, d: int, dtype: torch.dtype) -> None:
        if table and isinstance(algorithm, GroupedAlgorithm):
            raise InputError(
                f"codec={shown(dict(table))} is given, but {type(algorithm).__name__} has clients in groups; "
                "omit it, or use another algorithm"
            )
        sample = example(algorithm, stand_in(d, dtype))
        down, up = names(sample.down), names(sample.up)
        if table:
            check_table(table, tuple(dict.fromkeys([*down, *up])), algorithm.title)
        self.down, self.up = codecs_of(table, tuple(down)), codecs_of(table, tuple(up))
        self.rest = tuple(n for n, c in self.up.items() if c.keeps_rest and n not in algorithm.changes)
        self._tracked_only = tuple(algorithm.tracked_only)

    def keeping_rest(self, algorithm: AnyAlgorithm) -> AnyAlgorithm:
        """Return the algorithm whose clients keep what their codecs have not sent, if there is a rest."""
        return WithRest(algorithm, self.rest) if self.rest else algorithm

    def as_sent_down(self, down: Any, seed: int, t: int) -> dict[str, Tensor]:
        """Return the server's message of round t as it is sent: by name, fields with a codec as bytes."""
        return _encoded(named_leaves(down), self.down, (seed, CODEC, t, 0))

    def received_down(self, sent: Named, like: Any) -> Any:
        """Return the server's message as clients read it."""
        return from_names(like, _decoded(sent, self.down, named_leaves(like)))

    def as_sent_up(
        self, algorithm: AnyAlgorithm, state: Any, up: Any, tracked: bool, address: tuple[int, int, int]
    ) -> tuple[Any, dict[str, Tensor]]:
        """Return a client's state that belongs to what arrives, and its message as it is sent.

        ``address`` is (seed, round, client). Fields that only tracked clients send are skipped for others.
        """
        if isinstance(algorithm, PartlyLocal):
            assert isinstance(state, PartClient)
            shared, sent = self.as_sent_up(algorithm.inner, state.shared, up, tracked, address)
            return state._replace(shared=shared), sent
        seed, t, client = address
        skipped = () if tracked else self._tracked_only
        fields = named_leaves(up)
        coded = {n: c for n, c in self.up.items() if n.partition(".")[0] not in skipped}
        if isinstance(algorithm, WithRest):
            rest = named_leaves(state.rest)
            fields |= {name: fields[name] + rest[name] for name in rest if name in coded}
        sent = _encoded(fields, coded, (seed, CODEC, t, client + 1))
        received = _decoded(sent, coded, fields)
        if isinstance(algorithm, WithRest):
            rest |= {name: fields[name] - received[name] for name in rest if name in coded}
            inner = algorithm.inner.received(state.inner, up, from_names(up, received))
            return RestClient(inner, from_names(state.rest, rest)), sent
        return algorithm.received(state, up, from_names(up, received)), sent

    def received_up(self, sent: Named, like: Any, tracked: bool) -> Any:
        """Return a client's message as the server reads it; fields that were not sent are zero."""
        fields = named_leaves(like)
        present = {n: c for n, c in self.up.items() if n in sent and not self._is_skipped(n, tracked)}
        missing = {name: torch.zeros_like(leaf) for name, leaf in fields.items() if name not in sent}
        return from_names(like, {**_decoded(sent, present, fields), **missing})

    def _is_skipped(self, name: str, tracked: bool) -> bool:
        return not tracked and name.partition(".")[0] in self._tracked_only

    def shapes_down(self, like: Any) -> dict[str, Tensor]:
        """Return tensors of the types and sizes of the server's message as it is sent."""
        return _shapes(named_leaves(like), self.down)

    def shapes_up(self, fields: Named) -> dict[str, Tensor]:
        """Return tensors of the types and sizes of these fields of a client's message as they are sent."""
        return _shapes(fields, self.up)


def _encoded(fields: Named, codecs: Mapping[str, Codec], address: tuple[int, ...]) -> dict[str, Tensor]:
    sent = dict(fields)
    for number, (name, leaf) in enumerate(fields.items()):
        if name in codecs:
            generator = torch.Generator().manual_seed(torch_seed(*address, number))
            sent[name] = codecs[name].encode(leaf.detach().float(), generator)
    return sent


def _decoded(sent: Named, codecs: Mapping[str, Codec], like: Named) -> dict[str, Tensor]:
    return {
        name: codecs[name].decode(value, len(like[name])).to(like[name]) if name in codecs else value
        for name, value in sent.items()
    }


def _shapes(fields: Named, codecs: Mapping[str, Codec]) -> dict[str, Tensor]:
    return {
        name: torch.empty(codecs[name].size(leaf.numel()), dtype=torch.uint8, device="meta")
        if name in codecs
        else leaf
        for name, leaf in fields.items()
    }


class RestClient(NamedTuple):
    """A client's state, and what its codecs have not sent."""

    inner: Any
    rest: Any  # the fields of ``up`` that have a rest; the others are empty


@dataclasses.dataclass(frozen=True)
class WithRest(Wrapped[Any, Any, RestClient, Any, Any]):
    """An algorithm whose clients keep what their codecs have not sent."""

    fields: tuple[str, ...]

    @property
    def tracked_only(self) -> tuple[str, ...]:  # type: ignore[override]
        """The inner algorithm's."""
        return tuple(self.inner.tracked_only)

    def init_server(self, x: Tensor, g: Tensor | None = None) -> Any:
        """Return the server's first state."""
        return self.inner.init_server(x, g)

    def init_client(self, x: Tensor, g: Tensor | None = None) -> RestClient:
        """Return a client's first state, without a rest."""
        up = example(self.inner, torch.zeros_like(x)).up
        return RestClient(self.inner.init_client(x, g), _only(up, self.fields))

    def broadcast(self, server: Any) -> Any:
        """Return the message to every sampled client."""
        return self.inner.broadcast(server)

    def begin(self, down: Any, client: RestClient, g: Tensor | None = None) -> Any:
        """Return the local state before step 1."""
        return self.inner.begin(down, client.inner, g)

    def step(self, down: Any, client: RestClient, local: Any, x: Tensor, g: Tensor) -> tuple[Tensor, Any]:
        """Take one local step."""
        return self.inner.step(down, client.inner, local, x, g)  # type: ignore[no-any-return]

    def finish(
        self, down: Any, client: RestClient, local: Any, x: Tensor, K: Steps, tracked: Flag
    ) -> tuple[RestClient, Any]:
        """Return the client's new state and its message; the rest changes when the message is sent."""
        state, up = self.inner.finish(down, client.inner, local, x, K, tracked)
        return RestClient(state, client.rest), up

    def aggregate(self, server: Any, total: Any, cohort: Cohort) -> Any:
        """Return the server's new state."""
        return self.inner.aggregate(server, total, cohort)


def _only(state: Any, fields: tuple[str, ...], prefix: str = "") -> Any:
    """Return zeros in the place of these fields of a state, and nothing in the place of the others."""
    parts: list[Any] = []
    for field, value in zip(state._fields, state, strict=True):
        name = f"{prefix}.{field}" if prefix else field
        if isinstance(value, tuple):
            parts.append(_only(value, fields, name))
        else:
            parts.append(torch.zeros_like(value) if name in fields else Empty())
    return type(state)(*parts)
