"""What a simulation leaves behind: states, history, and the questions one asks of them."""

from __future__ import annotations

import copy
import dataclasses
import math
import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.algorithms import algorithms, make_algorithm
from fadamgc.errors import FadamgcError, InputError
from fadamgc.files import read_bundle, write_bundle
from fadamgc.flat import Flat
from fadamgc.sim.cost import CostModel, Work
from fadamgc.sim.problem import Buffers
from fadamgc.sim.states import ClientStates, FileStates
from fadamgc.task import Task

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Record:
    """One round. Values of an evaluation are None in rounds that were not evaluated."""

    round: int  # from 1
    train_loss: float | None  # mean over clients of the mean over local steps
    test_loss: float | None
    test_accuracy: float | None  # None unless it is the task's metric
    test_metric: float | None  # the task's metric, whatever it is
    bytes_down: int  # all clients together
    bytes_up: int
    simulated_seconds: float  # of this round, by the run's cost model
    wall_seconds: float = field(compare=False)  # of this round, as it ran here
    sampled: tuple[int, ...] = ()
    tracked: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()  # sampled, but their update was not finite
    work: tuple[Work, ...] = field(default=(), repr=False)

    @classmethod
    def of(
        cls, t: int, evaluation: Mapping[str, float], work: tuple[Work, ...], cost: CostModel, **others: Any
    ) -> Record:
        """The record of round t from its evaluation (empty if there was none) and its priced work."""
        return cls(
            round=t,
            test_loss=evaluation.get("test_loss"),
            test_accuracy=evaluation.get("test_accuracy"),
            test_metric=evaluation.get("test_metric"),
            bytes_down=sum(sum(w.down) for w in work),
            bytes_up=sum(sum(w.up) for w in work),
            simulated_seconds=sum(cost.seconds(w) for w in work),
            work=work,
            **others,
        )

    def to_json(self) -> dict[str, Any]:
        """As plain data; a column of equal numbers becomes one number."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        plain["work"] = [{key: _shorten(column) for key, column in w._asdict().items()} for w in self.work]
        return plain

    @classmethod
    def from_json(cls, plain: Mapping[str, Any]) -> Record:
        """The inverse of ``to_json``."""
        values = dict(plain)
        for name in ("sampled", "tracked", "dropped"):
            values[name] = tuple(values[name])
        values["work"] = tuple(
            Work(*(_lengthen(w[key], len(w["clients"])) for key in Work._fields)) for w in values["work"]
        )
        return cls(**values)


def _shorten(column: tuple[int, ...]) -> Any:
    return column[0] if len(column) > 1 and len(set(column)) == 1 else list(column)


def _lengthen(column: Any, length: int) -> tuple[int, ...]:
    return (column,) * length if isinstance(column, int) else tuple(column)


@dataclass(eq=False, repr=False)
class Run:
    """A finished simulation.

    Attributes:
        algorithm: the algorithm; None if it was loaded and its class is not registered.
        server: the server's state.
        clients: the clients' states, ``clients[i].y`` and so on.
        buffers: the averaged buffers of the model.
        history: one Record a round.
        settings: everything that determines the run, as plain data.
        environment: versions and machine that made it.
        cost: the cost model behind ``simulated_seconds``.
        task: the task; None if the run was loaded without it.
    """

    algorithm: AnyAlgorithm | None
    server: Any
    clients: ClientStates
    buffers: Buffers
    history: list[Record]
    settings: dict[str, Any]
    environment: dict[str, str]
    cost: CostModel
    task: Task | None = None
    goal: str = "max"

    def __repr__(self) -> str:
        last = next((r.test_metric for r in reversed(self.history) if r.test_metric is not None), None)
        shown = "" if last is None else f", metric={last:.4g}"
        name = self.settings.get("algorithm")
        return f"Run({name!r} on {self.settings.get('task')!r}, rounds={len(self.history)}{shown})"

    @property
    def x(self) -> Tensor:
        """The global model as a flat vector, in the order of ``model.parameters()``."""
        if self.server is None:
            raise FadamgcError("this run was saved without its states; only its records are here")
        x: Tensor = self.server.x
        return x

    @cached_property
    def model(self) -> nn.Module:
        """A copy of the task's module with the trained parameters and buffers in it."""
        if self.task is None:
            raise FadamgcError("this run was loaded without its task; use load_run(path, task=...)")
        module = copy.deepcopy(self.task.model)
        Flat.of(module).load(module, self.x, self.buffers)
        return module

    def record_at(self, target: float) -> Record | None:
        """The first record whose metric reaches the target, or None."""
        for record in self.history:
            value = record.test_metric
            if value is None or not math.isfinite(value):
                continue
            if value <= target if self.goal == "min" else value >= target:
                return record
        return None

    def rounds_to(self, target: float) -> int | None:
        """Rounds until the task's metric first reached the target, or None if it never did."""
        record = self.record_at(target)
        return None if record is None else record.round

    def minutes_to(self, target: float, cost: CostModel | None = None) -> float | None:
        """Simulated minutes until then, by the run's cost model or by another."""
        rounds = self.rounds_to(target)
        if rounds is None:
            return None
        history = self.history if cost is None else self.reprice(cost).history
        return sum(record.simulated_seconds for record in history if record.round <= rounds) / 60

    def reprice(self, cost: CostModel) -> Run:
        """The same run under another cost model, without running it again."""
        if cost == self.cost:
            return self
        history = [
            dataclasses.replace(record, simulated_seconds=sum(cost.seconds(w) for w in record.work))
            for record in self.history
        ]
        return dataclasses.replace(self, history=history, cost=cost)

    def to_pandas(self) -> pd.DataFrame:
        """The history as a table, one row a round."""
        import pandas as pd

        names = [f.name for f in dataclasses.fields(Record) if f.name != "work"]
        return pd.DataFrame([{name: getattr(r, name) for name in names} for r in self.history], columns=names)

    def save(self, path: str | Path, *, states: bool = True) -> None:
        """Write the run into a folder, replacing a run that is there; ``load_run`` reads it back.

        Args:
            path: the folder.
            states: False leaves out the states, for records that are to stay small.
        """
        write_run(Path(path), "run", self, states=states)


def load_run(path: str | Path, task: Task | None = None) -> Run:
    """Read back what ``Run.save`` wrote."""
    return read_run(Path(path), "run", task)


def write_run(
    folder: Path, name: str, run: Run, *, states: bool = True, states_in: Path | None = None
) -> None:
    """Write a run, finished or not, as a bundle; clients' states in files of that folder stay there."""
    tensors: dict[str, Tensor] = {}
    apart = isinstance(run.clients, FileStates) and run.clients.folder == states_in
    if states:
        tensors |= _pack("server", run.server)
        tensors |= _pack("initial", run.clients.initial)
        for i in () if apart else run.clients.participants:
            tensors |= _pack(f"client.{i}", run.clients[i])
        tensors |= {f"buffer.{key}": value for key, value in run.buffers.items()}
    content = {
        "settings": run.settings,
        "environment": run.environment,
        "cost": dataclasses.asdict(run.cost),
        "goal": run.goal,
        "n": run.clients.n,
        "participants": run.clients.participants,
        "has_states": states,
        "slots": run.clients.table() if isinstance(run.clients, FileStates) and apart else None,
        "history": [record.to_json() for record in run.history],
    }
    write_bundle(folder, name, content, tensors)
    if isinstance(run.clients, FileStates) and apart:
        run.clients.saved()


def read_run(
    folder: Path,
    name: str,
    task: Task | None = None,
    algorithm: AnyAlgorithm | None = None,
    expected: str | None = None,
    states_in: Path | None = None,
) -> Run:
    """Read a run, finished or not, from a bundle.

    An algorithm of the caller's, known there by the ``expected`` name, stands in for a registered one.
    ``states_in`` is the folder of clients' states that were kept in files.
    """
    body, tensors = read_bundle(folder, name)
    settings = body["settings"]
    if algorithm is None or settings["algorithm"] != expected:
        algorithm = None
        if settings["algorithm"] in algorithms():
            algorithm = make_algorithm(settings["algorithm"], **settings["hyperparameters"])
    server: Any = None
    clients = ClientStates(body["n"], None)
    buffers: Buffers = {}
    if body["has_states"]:
        if algorithm is None:
            raise InputError(
                f"algorithm {settings['algorithm']!r} of {folder} is not registered here; "
                "call fadamgc.register before loading"
            )
        like = example(algorithm, torch.empty(0))
        server = _unpack("server", like.server, tensors)
        initial = _unpack("initial", like.client, tensors)
        if body.get("slots") is None:
            states = {i: _unpack(f"client.{i}", initial, tensors) for i in body["participants"]}
            clients = ClientStates(body["n"], initial, states)
        else:
            clients = FileStates(body["n"], initial, states_in, checked=True, slots=body["slots"])
        buffers = {k.removeprefix("buffer."): v for k, v in tensors.items() if k.startswith("buffer.")}
    return Run(
        algorithm=algorithm,
        server=server,
        clients=clients,
        buffers=buffers,
        history=[Record.from_json(plain) for plain in body["history"]],
        settings=settings,
        environment=body["environment"],
        cost=CostModel(**body["cost"]),
        task=task,
        goal=body["goal"],
    )


def _pack(prefix: str, state: Any) -> dict[str, Tensor]:
    return {f"{prefix}.{field}": value for field, value in state._asdict().items()}


def _unpack(prefix: str, like: Any, tensors: Mapping[str, Tensor]) -> Any:
    return type(like)(*(tensors[f"{prefix}.{field}"] for field in like._fields))


def environment() -> dict[str, str]:
    """Versions and machine, for the record."""
    return {
        "fadamgc": version("fadamgc"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
