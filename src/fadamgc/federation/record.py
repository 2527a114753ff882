"""The record of a round, also as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fadamgc.errors import shown, whole
from fadamgc.federation.cost import WORK_COLUMNS, CostModel, Work

BY_CLIENT = "clients: "  # how the names of numbers over clients begin, see ``metrics.client_metrics``


@dataclass(frozen=True)
class Record:
    """One round. Values of an evaluation are None in rounds that were not evaluated."""

    round: int  # from 1
    train_loss: float | None  # mean over clients of the mean over local steps
    test_loss: float | None
    test_accuracy: float | None  # None unless it is the task's metric
    test_metric: float | None  # the task's metric
    bytes_down: int  # all clients together
    bytes_up: int
    simulated_seconds: float  # of this round, by the run's cost model
    wall_seconds: float = field(compare=False)  # of this round, as it ran here
    sampled: tuple[int, ...] = ()
    tracked: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()  # sampled, but their update was not finite
    absent: tuple[int, ...] = ()  # sampled, but they did not answer, or not in time
    metrics: dict[str, float] = field(default_factory=dict)  # all numbers of a metric that has several
    work: tuple[Work, ...] = field(default=(), repr=False)

    def priced(self, cost: CostModel) -> Record:
        """Return the same round with the seconds of another cost model."""
        return dataclasses.replace(self, simulated_seconds=sum(cost.seconds(w) for w in self.work))

    def to_json(self) -> dict[str, Any]:
        """Return plain data; a column of equal numbers becomes one number."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["work"] = [
            {key: _shorten(column) for key, column in w.columns().items()}
            | ({} if w.link == "client" else {"link": w.link})
            | ({} if w.deadline is None else {"deadline": w.deadline})
            for w in self.work
        ]
        return plain if self.metrics else {k: v for k, v in plain.items() if k != "metrics"}

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
        values["metrics"] = {str(name): float(v) for name, v in values.get("metrics", {}).items()}
        return cls(**values)


def _work(plain: Mapping[str, Any]) -> Work:
    columns: dict[str, Any] = {name: _lengthen(plain[name], len(plain["clients"])) for name in WORK_COLUMNS}
    link = plain.get("link", "client")
    if link not in ("client", "group"):
        raise ValueError(f"link {shown(link)}")
    deadline = plain.get("deadline")
    return Work(**columns, link=link, deadline=None if deadline is None else float(deadline))


def _numbers(values: Any) -> tuple[int, ...]:
    return tuple(whole("number", value, 0) for value in values)


def _shorten(column: tuple[int, ...]) -> Any:
    return column[0] if len(column) > 1 and len(set(column)) == 1 else list(column)


def _lengthen(column: Any, length: int) -> tuple[int, ...]:
    values = (whole("number", column, 0),) * length if isinstance(column, int) else _numbers(column)
    if len(values) != length:
        raise ValueError(f"{len(values)} entries for {length} clients")
    return values
