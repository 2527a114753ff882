"""The record of a round, also as plain data."""

from __future__ import annotations

import copy
import dataclasses
from array import array
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from fadamgc.errors import shown, whole
from fadamgc.federation.cost import WORK_COLUMNS, CostModel, Work

NAMED = ("metrics", "replies")  # fields of a record that have numbers by name
BY_CLIENT = "clients: "  # prefix of the names of numbers over clients, see ``metrics.client_metrics``

Packed: TypeAlias = "array[int] | tuple[int, ...] | Repeated"


class Repeated(NamedTuple):
    """A column of equal numbers, in memory."""

    number: int
    times: int


class _Columns:
    """A field of a Record with columns of whole numbers, which are tuples for readers and small in memory.

    A run with many clients per round has a history of many such numbers: they are arrays, and equal columns
    of a record are one array.
    """

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, record: Any, owner: type) -> Any:
        if record is None:
            return ()  # the default of the field
        return self.unpacked(record.__dict__[self.name])

    def __set__(self, record: Any, value: Any) -> None:
        value = () if value is self else value  # dataclasses give the descriptor for a missing argument
        record.__dict__[self.name] = self.packed(value, list(_arrays(record)))

    def packed(self, value: Any, known: Sequence[array[int]]) -> Any:
        """Return the form in memory; ``known`` are arrays of the record, one of which may be equal."""
        return _pack(value, known)

    def unpacked(self, stored: Any) -> Any:
        """Return the form for readers."""
        return _unpack(stored)


class _WorkColumns(_Columns):
    """The work of a record."""

    def packed(self, value: Any, known: Sequence[array[int]]) -> Any:
        return tuple(
            work._replace(**{name: _pack(column, known) for name, column in work.columns().items()})
            for work in value
        )

    def unpacked(self, stored: Any) -> Any:
        return tuple(
            work._replace(**{name: _unpack(column) for name, column in work.columns().items()})
            for work in stored
        )


def _pack(column: Sequence[int], known: Sequence[array[int]]) -> Packed:
    if len(column) < 2:
        return tuple(column)
    if min(column) == max(column):
        return Repeated(column[0], len(column))
    try:
        numbers = array("I" if max(column) < 1 << 32 else "Q", column)
    except OverflowError:  # larger numbers, in a file
        return tuple(column)
    return next((other for other in known if other == numbers), numbers)


def _unpack(column: Packed) -> tuple[int, ...]:
    return (column.number,) * column.times if isinstance(column, Repeated) else tuple(column)


def _arrays(record: Any) -> Iterator[array[int]]:
    return (value for value in record.__dict__.values() if isinstance(value, array))


def _columns() -> Any:
    return _Columns()


def _work_columns() -> Any:
    return _WorkColumns()


@dataclass(frozen=True)
class Record:
    """One round. Values of an evaluation are None in rounds that were not evaluated.

    >>> import fadamgc, torch
    >>> data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(4)]
    >>> task = fadamgc.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
    >>> record = fadamgc.simulate(fadamgc.FedAvg(), task, rounds=2, sampled=3).history[-1]
    >>> record.round, len(record.sampled), record.bytes_down  # 3 models of 4 numbers, 4 bytes each
    (2, 3, 48)
    """

    round: int  # from 1
    train_loss: float | None  # mean over clients of the mean over local steps
    test_loss: float | None
    test_accuracy: float | None  # None unless it is the task's metric
    test_metric: float | None  # the task's metric
    bytes_down: int  # all clients together
    bytes_up: int
    simulated_seconds: float  # of this round, by the run's cost model
    wall_seconds: float = field(compare=False)  # of this round, as it ran here
    sampled: tuple[int, ...] = _columns()
    tracked: tuple[int, ...] = _columns()
    dropped: tuple[int, ...] = _columns()  # sampled, but their update was not finite
    absent: tuple[int, ...] = _columns()  # sampled, but they did not answer, or not in time
    metrics: dict[str, float] = field(default_factory=dict)  # all numbers of a metric that has several
    replies: dict[str, float] = field(default_factory=dict, compare=False)  # on Flower: norms, refusals
    work: tuple[Work, ...] = field(default=_work_columns(), repr=False)

    def priced(self, cost: CostModel) -> Record:
        """Return the same round with the seconds of another cost model."""
        twin = copy.copy(self)  # with the same columns, which ``dataclasses.replace`` would pack again
        object.__setattr__(twin, "simulated_seconds", sum(cost.seconds(w) for w in self.work))
        return twin

    def to_json(self) -> dict[str, Any]:
        """Return plain data; a column of equal numbers becomes one number."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["work"] = [
            {key: _shorten(column) for key, column in w.columns().items()}
            | ({} if w.link == "client" else {"link": w.link})
            | ({} if w.deadline is None else {"deadline": w.deadline})
            for w in self.work
        ]
        return {k: v for k, v in plain.items() if k not in NAMED or v}

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Record:
        """Return the record of plain data; the inverse of ``to_json``."""
        values = dict(plain)
        for name in ("sampled", "tracked", "dropped", "absent"):
            values[name] = _numbers(values.get(name, ()) if name == "absent" else values[name])
        values["work"] = tuple(map(_work, values["work"]))
        for name in ("round", "bytes_down", "bytes_up"):
            whole(name, values[name], 0)
        for name in ("train_loss", "test_loss", "test_accuracy", "test_metric"):
            if values[name] is not None:
                values[name] = float(values[name])
        for name in ("simulated_seconds", "wall_seconds"):
            values[name] = float(values[name])
        for key in NAMED:
            values[key] = {str(name): float(v) for name, v in values.get(key, {}).items()}
        return cls(**values)


def _work(plain: Mapping[str, Any]) -> Work:
    columns: dict[str, Any] = {name: _lengthen(plain[name], len(plain["clients"])) for name in WORK_COLUMNS}
    link = plain.get("link", "client")
    if link not in ("client", "group"):
        raise ValueError(f"link {shown(link)}")
    deadline = plain.get("deadline")
    return Work(**columns, link=link, deadline=None if deadline is None else float(deadline))


def _numbers(values: Any) -> tuple[int, ...]:
    if isinstance(values, list) and set(map(type, values)) == {int} and min(values) >= 0:
        return tuple(values)  # a record has very many numbers: they are checked at once
    return tuple(whole("number", value, 0) for value in values)


def _shorten(column: tuple[int, ...]) -> Any:
    return column[0] if len(column) > 1 and len(set(column)) == 1 else list(column)


def _lengthen(column: Any, length: int) -> tuple[int, ...]:
    values = (whole("number", column, 0),) * length if isinstance(column, int) else _numbers(column)
    if len(values) != length:
        raise ValueError(f"{len(values)} entries for {length} clients")
    return values
