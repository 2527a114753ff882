"""Messages as they are sent: each field in its codec.

The client commits to what the server reads: where a field of its state moves by what it sends (y_i by dy), it
moves by what arrives. So the server's y stays the mean of the y_i, whatever the codec.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm, Cohort, Empty, Flag, Steps, example, stand_in
from fadamgc.codecs import Codec, CodecTable, check_table, codecs_of
from fadamgc.errors import InputError, nearest, shown
from fadamgc.federation.local_parameters import PartClient, PartlyLocal
from fadamgc.federation.privacy import Mechanism
from fadamgc.federation.sampling import CODEC, torch_seed
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.tree import from_names, named_leaves, names
from fadamgc.wrapped import Wrapped

Named = Mapping[str, Tensor]


class SentUp(NamedTuple):
    """A client's message on its way to the server."""

    state: Any  # the client's state after the round
    fields: dict[str, Tensor]  # the message as it is sent: by name, fields with a codec as bytes
    arrived: Any  # the message as the server reads it


class MessageCodecs:
    """The codecs of the messages of one algorithm; with ``privacy``, the server clips what it reads.

    Attributes:
        down, up: the codec of each field that has one.
        rest: the fields of ``up`` whose rest the client adds to the next message.
    """

    def __init__(
        self,
        table: CodecTable,
        algorithm: AnyAlgorithm,
        d: int,
        dtype: torch.dtype,
        privacy: Mechanism | None = None,
    ) -> None:
        if table and isinstance(algorithm, GroupedAlgorithm):
            raise InputError(
                f"codec={shown(dict(table))} is given, but {type(algorithm).__name__} has clients in groups; "
                "omit it, or use another algorithm"
            )
        self.privacy = privacy
        self.down: dict[str, Codec] = {}
        self.up: dict[str, Codec] = {}
        self._tracked_only = tuple(algorithm.tracked_only)
        if table:
            sample = example(algorithm, stand_in(d, dtype))
            down, up = names(sample.down), names(sample.up)
            check_table(table, tuple(dict.fromkeys([*down, *up])), algorithm.title)
            _check_changes(algorithm, up, names(sample.client))
            self.down, self.up = codecs_of(table, tuple(down)), codecs_of(table, tuple(up))
        self.rest = tuple(n for n, c in self.up.items() if c.keeps_rest and n not in algorithm.changes)

    @property
    def changes_up(self) -> bool:
        """Whether the server reads something else than clients meant to send."""
        return bool(self.up) or self.privacy is not None

    def keeping_rest(self, algorithm: AnyAlgorithm) -> AnyAlgorithm:
        """Return the algorithm whose clients keep what their codecs have not sent, if there is a rest."""
        return WithRest(algorithm, self.rest) if self.rest else algorithm

    def as_sent_down(self, down: Any, seed: int, t: int) -> dict[str, Tensor]:
        """Return the server's message of round t as it is sent: by name, fields with a codec as bytes."""
        return _encoded(named_leaves(down), self.down, (seed, CODEC, t, 0))

    def received_down(self, sent: Named, like: Any) -> Any:
        """Return the server's message as clients read it."""
        return from_names(like, decode(sent, self.down, named_leaves(like)))

    def send_up(
        self, algorithm: AnyAlgorithm, state: Any, up: Any, tracked: bool, address: tuple[int, int, int]
    ) -> SentUp:
        """Return a client's message as it is sent and as it arrives, and the client's state after that.

        ``address`` is (seed, round, client). Fields that only tracked clients send have no codec in the
        messages of others, where they are zero.
        """
        if isinstance(algorithm, PartlyLocal):
            assert isinstance(state, PartClient)
            result = self.send_up(algorithm.inner, state.shared, up, tracked, address)
            return result._replace(state=state._replace(shared=result.state))
        seed, t, client = address
        fields, coded = named_leaves(up), self.coded_up(tracked)
        rest = named_leaves(state.rest) if isinstance(algorithm, WithRest) else {}
        fields |= {name: fields[name] + rest[name] for name in rest if name in coded}
        sent = _encoded(fields, coded, (seed, CODEC, t, client + 1))
        read = decode(sent, coded, fields)
        arrived = from_names(up, read if self.privacy is None else self.privacy.clipped(read))
        if not isinstance(algorithm, WithRest):
            return SentUp(algorithm.received(state, up, arrived), sent, arrived)
        rest |= {name: fields[name] - read[name] for name in rest if name in coded}
        inner = algorithm.inner.received(state.inner, up, arrived)
        return SentUp(RestClient(inner, from_names(state.rest, rest)), sent, arrived)

    def coded_up(self, tracked: bool) -> dict[str, Codec]:
        """Return the codecs of the fields that a client sends."""
        skipped = () if tracked else self._tracked_only
        return {n: c for n, c in self.up.items() if n.partition(".")[0] not in skipped}

    def shapes_down(self, like: Any) -> dict[str, Tensor]:
        """Return tensors of the types and sizes of the server's message as it is sent."""
        return _shapes(named_leaves(like), self.down)

    def shapes_up(self, fields: Named) -> dict[str, Tensor]:
        """Return tensors of the types and sizes of these fields of a client's message as they are sent."""
        return _shapes(fields, self.up)


def _check_changes(algorithm: AnyAlgorithm, up: Sequence[str], client: Sequence[str]) -> None:
    for field, kept in algorithm.changes.items():
        for name, known, owner in ((field, up, "message"), (kept, client, "state of a client")):
            if name not in known:
                raise InputError(
                    f"{type(algorithm).__name__}.changes={dict(algorithm.changes)} is not accepted; the "
                    f"{owner} has no {name}{nearest(name, known)}; it has {', '.join(known) or 'no fields'}"
                )


def on_the_wire(algorithm: AnyAlgorithm) -> AnyAlgorithm:
    """Return the algorithm whose messages are sent, without those around it."""
    while isinstance(algorithm, Wrapped):
        algorithm = algorithm.inner
    return algorithm


def _encoded(fields: Named, codecs: Mapping[str, Codec], address: tuple[int, ...]) -> dict[str, Tensor]:
    sent = dict(fields)
    for number, (name, leaf) in enumerate(fields.items()):
        if name in codecs:
            generator = torch.Generator().manual_seed(torch_seed(*address, number))
            sent[name] = codecs[name].encode(leaf.detach().float(), generator)
    return sent


def decode(sent: Named, codecs: Mapping[str, Codec], like: Named) -> dict[str, Tensor]:
    """Read fields that were sent; an encoded one gets the type of the same field of ``like``.

    The tensors of ``like`` may be on the device "meta".

    Raises:
        InputError: a field has bytes that its codec has not written.
    """
    fields = dict(sent)
    for name in codecs:
        n, dtype = len(like[name]), like[name].dtype
        try:
            codecs[name].check(sent[name], n)
            fields[name] = codecs[name].decode(sent[name], n).to(dtype)
        except InputError as error:
            raise InputError(f"{name}: {error}") from None
    return fields


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
