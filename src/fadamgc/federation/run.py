"""The result of a run: states, history, and questions about them."""

from __future__ import annotations

import dataclasses
import math
import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property, partial
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.bundle import LazyTensor, read_bundle, write_bundle
from fadamgc.errors import CheckpointError, FadamgcError, InputError, cut, not_accepted, shown, whole
from fadamgc.federation.accounting import Accounting
from fadamgc.federation.client_data import ClientTable
from fadamgc.federation.client_states import ClientStates, ForgottenStates
from fadamgc.federation.cost import CostModel
from fadamgc.federation.functions import Buffers, TaskFunctions
from fadamgc.federation.local_parameters import UNKNOWN, PartlyLocal, layout_of
from fadamgc.federation.messages import MessageCodecs
from fadamgc.federation.record import NAMED, Record
from fadamgc.federation.trained import Best, export_module, module_at, predicted_labels
from fadamgc.hyperparameters import with_schedules
from fadamgc.loading import untrusted
from fadamgc.methods import algorithms, make_algorithm
from fadamgc.schedules import first_number
from fadamgc.task import Task
from fadamgc.tree import from_names, leaves, named_leaves, other_types

if TYPE_CHECKING:
    import pandas as pd

NAME = "run"  # of the bundle of a saved run


@dataclass(eq=False, repr=False)
class Run:
    """A finished simulation.

    Attributes:
        algorithm: the algorithm; None if it was loaded and its class is not registered.
        server: the server's state.
        clients: the clients' states, ``clients[i].y`` and so on.
        buffers: the averaged buffers of the model.
        history: one Record per round.
        settings: everything that determines the run, as plain data.
        environment: versions and machine that made it.
        cost: the cost model behind ``simulated_seconds``.
        task: the task; None if the run was loaded without it.
        goal: "max" if larger values of the metric are better, "min" if smaller ones are.
        best: round, metric and model of the best round, with ``simulate(keep="best")``, or of an experiment
            with ``save_models="best"`` (then without the model, which is in a file); None otherwise.

    Example:
        >>> import fadamgc, torch
        >>> data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(4)]
        >>> task = fadamgc.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
        >>> run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=3, local_steps=5)
        >>> run
        Run('fadamgc' on 'task', rounds=3)
        >>> run.x.shape, len(run.to_pandas()), type(run.model).__name__
        (torch.Size([4]), 3, 'Linear')
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
    best: Best | None = None

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
        return self._module(self.x, self.buffers)

    @cached_property
    def best_model(self) -> nn.Module:
        """A copy of the task's module as it was after the best round, with ``simulate(keep="best")``."""
        if self.best is None:
            raise FadamgcError('this run did not keep its best model; run it with keep="best"')
        if self.best.x is None:
            raise FadamgcError(
                "this run was saved without its states; with save_models='best', or --save-models best, the "
                "model is model.safetensors in its folder"
            )
        return self._module(self.best.x, self.best.buffers or {})

    def model_of(self, client: int) -> nn.Module:
        """Return the trained model of one client, with the parameters that stay there (local_parameters)."""
        x, buffers = self._personal(whole("client", client, 0, self.clients.n - 1))
        return self._module(x, buffers)

    def _personal(self, client: int) -> tuple[Tensor, Buffers]:
        """Return the parameters and buffers of a client's model."""
        patterns = self.settings.get("local_parameters")
        if patterns is None or self.task is None:
            return self.x, self.buffers
        functions, state = TaskFunctions(self.task, self.x.dtype), self.clients[client]
        layout = layout_of(patterns, functions.module, functions.flat, functions.buffers0)
        x = layout.join(layout.split(self.x)[0], state.server.x)
        return x, self.buffers | layout.unpack(state.buffers)

    def _module(self, x: Tensor, buffers: Buffers) -> nn.Module:
        if self.task is None:
            raise FadamgcError("this run was loaded without its task; use load_run(path, task=...)")
        return module_at(self.task, x, buffers)

    def evaluate_clients(self) -> NDArray[np.float64]:
        """Return the metric of the trained model on the test data of each client.

        The value is nan for a client without test data. If no client has test data, the values are those on
        the clients' training data.

        With ``local_parameters``, each client is evaluated with its own local parameters.
        """
        if self.task is None:
            raise FadamgcError("this run was loaded without its task; use load_run(path, task=...)")
        functions = TaskFunctions(self.task, self.x.dtype)
        samples = self.task.client_test_samples or self.task.samples
        table = ClientTable(samples, functions.dtype, functions.device)
        models = None
        if self.settings.get("local_parameters") is not None:
            models = [self._personal(i) for i in range(self.clients.n)]
        return functions.evaluate_clients(
            self.x, self.buffers, table, self.settings["seed"], len(self.history), models
        )

    def predict(self, texts: Sequence[str | tuple[str, str]]) -> list[str | int]:
        """Return the label of each text (or pair of texts), by name if it has one; for tasks of texts."""
        return predicted_labels(self.model, texts)

    def export(self, path: str | Path, which: Literal["last", "best"] = "last") -> Path:
        """Write the trained model as a state_dict: ``.safetensors``, or ``.pt`` for ``torch.load``.

        Args:
            path: the file to write.
            which: the model after the last round, or of the best one (of a run with ``keep="best"``).

        Returns:
            The path.
        """
        if which not in ("last", "best"):
            raise not_accepted("which", which, "'last' or 'best'")
        return export_module(self.model if which == "last" else self.best_model, Path(path))

    def rounds_to(self, target: float) -> int | None:
        """Return the rounds until the task's metric first reached the target, or None if it never did."""
        sign = -1 if self.goal == "min" else 1
        for record in self.history:
            value = record.test_metric
            if value is not None and math.isfinite(value) and sign * value >= sign * target:
                return record.round
        return None

    def minutes_to(self, target: float, cost: CostModel | None = None) -> float | None:
        """Return the simulated minutes until ``rounds_to(target)``, by the run's cost model or by another."""
        rounds = self.rounds_to(target)
        if rounds is None:
            return None
        history = self.history if cost is None else self.reprice(cost).history
        return sum(record.simulated_seconds for record in history if record.round <= rounds) / 60

    def epsilon(self, delta: float = 1e-5) -> float:
        """Return epsilon of the run for this delta: how far it hides all the data of one client.

        It is for those who see all models and messages of the server, and infinite without ``privacy``. A run
        with a ``target`` counts with all its rounds: when it stops depends on what it has learned.

        Args:
            delta: the other number of (epsilon, delta)-privacy, less than 1 / clients.
        """
        accounting = self.settings.get("accounting")
        if accounting is None:
            return math.inf
        rounds = len(self.history) if self.settings.get("target") is None else int(self.settings["rounds"])
        return Accounting.of(accounting).epsilon(rounds, delta)

    def reprice(self, cost: CostModel) -> Run:
        """Return the same run under another cost model, without running it again."""
        if cost == self.cost:
            return self
        return dataclasses.replace(self, history=[r.priced(cost) for r in self.history], cost=cost)

    def to_pandas(self) -> pd.DataFrame:
        """Return the history as a table, one row per round."""
        import pandas as pd

        names = [f.name for f in dataclasses.fields(Record) if f.name not in ("work", *NAMED)]
        more = list(dict.fromkeys(name for r in self.history for name in r.metrics | r.replies))
        rows = [{name: getattr(r, name) for name in names} | r.metrics | r.replies for r in self.history]
        return pd.DataFrame(rows, columns=[*names, *more])

    def save(self, path: str | Path, *, states: bool = True) -> None:
        """Write the run into a folder, replacing an earlier run; ``load_run`` reads it back.

        Args:
            path: the folder.
            states: False omits the states, for small records.
        """
        if states and self.server is None:
            raise FadamgcError("this run was saved without its states; pass states=False to save its records")
        tensors: dict[str, Tensor | LazyTensor] = server_tensors(self) if states else {}
        forgotten = isinstance(self.clients, ForgottenStates)
        for i in self.clients.participants if states and not forgotten else ():
            for k, (name, like) in enumerate(named_leaves(self.clients.initial, f"client.{i}").items()):
                tensors[name] = LazyTensor(like, partial(_read_leaf, self.clients, i, k))
        content = described(self) | {
            "participants": self.clients.participants,
            "has_states": states,
            "forgotten": forgotten,
            "history": [record.to_json() for record in self.history],
        }
        write_bundle(Path(path), NAME, content, tensors)


# Runs as plain data and tensors, in the folder of a saved run and in that of a checkpoint.


def _read_leaf(clients: ClientStates, i: int, k: int) -> Tensor:
    return leaves(clients[i])[k]


def read_run(folder: Path, task: Task | None = None) -> Run:
    """Read back a run that ``Run.save`` wrote."""
    body, tensors = read_bundle(folder, NAME)
    algorithm = find_algorithm(folder, body)
    with sound(folder, NAME):
        history = [Record.from_json(plain) for plain in body["history"]]
        description = description_of(body)
        if not body["has_states"]:
            clients, best = ClientStates(body["n"], None), best_of(body, tensors)
            return Run(algorithm, None, clients, {}, history, task=task, best=best, **description)
        server, initial, buffers = unpack_server(algorithm, body["settings"], tensors)
        if body.get("forgotten", False):
            clients = ForgottenStates(body["n"], initial, body["participants"])
        else:
            clients = unpack_clients(body, initial, tensors)
        best = best_of(body, tensors)
        return Run(algorithm, server, clients, buffers, history, task=task, best=best, **description)


def described(run: Run) -> dict[str, Any]:
    """Return the description of a run, without its states and its history."""
    return {
        "settings": run.settings,
        "environment": run.environment,
        "cost": dataclasses.asdict(run.cost),
        "goal": run.goal,
        "n": run.clients.n,
    } | ({} if run.best is None else {"best": {"round": run.best.round, "metric": run.best.metric}})


def best_of(body: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Best | None:
    """Return the best round in a bundle, with its model if that is saved; None if there is no best round."""
    if "best" not in body:
        return None
    prefix = "best.buffer."
    buffers = {k.removeprefix(prefix): v for k, v in tensors.items() if k.startswith(prefix)}
    found = body["best"]
    round, x = whole("round", found["round"], 1), tensors.get("best.x")
    return Best(round, float(found["metric"]), x, None if x is None else buffers)


def description_of(body: Mapping[str, Any]) -> dict[str, Any]:
    """Check the description of a run in a bundle, and return it as arguments of ``Run``."""
    settings, environment, goal = body["settings"], body["environment"], body["goal"]
    for value in (goal, settings["executor"], settings["task"], *environment.values()):
        if not isinstance(value, str):
            raise ValueError(f"{shown(value)} is not a text")
    whole("seed", settings["seed"], 0)
    if goal not in ("max", "min"):
        raise ValueError(f"goal={shown(goal)} is neither 'max' nor 'min'")
    cost = CostModel(**body["cost"])
    cost.check(whole("n", body["n"], 1, 1 << 40))
    return {"settings": settings, "environment": environment, "cost": cost, "goal": goal}


def server_tensors(run: Run) -> dict[str, Tensor | LazyTensor]:
    """Return the tensors of a run except those of its clients."""
    return {
        **named_leaves(run.server, "server"),
        **named_leaves(run.clients.initial, "initial"),
        **{f"buffer.{key}": value for key, value in run.buffers.items()},
        **({} if run.best is None or run.best.x is None else {"best.x": run.best.x}),
        **({f"best.buffer.{key}": v for key, v in (run.best.buffers or {}).items()} if run.best else {}),
    }


def unpack_server(
    algorithm: AnyAlgorithm | None, settings: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> tuple[Any, Any, Buffers]:
    """Return server, initial client state and buffers from the tensors of a run."""
    assert algorithm is not None
    if settings.get("codec"):
        first = with_schedules(algorithm, first_number)
        table = tuple((str(field), str(codec)) for field, codec in settings["codec"])
        algorithm = MessageCodecs(table, first, 1, torch.float32).keeping_rest(algorithm)
    if settings.get("local_parameters") is not None:
        algorithm = PartlyLocal(algorithm, UNKNOWN)
    like = example(with_schedules(algorithm, first_number), torch.empty(0))
    buffers = {k.removeprefix("buffer."): v for k, v in tensors.items() if k.startswith("buffer.")}
    return from_names(like.server, tensors, "server"), from_names(like.client, tensors, "initial"), buffers


def unpack_clients(body: Mapping[str, Any], initial: Any, tensors: Mapping[str, Tensor]) -> ClientStates:
    """Return the clients' states from the tensors of a run; they must have the types of the initial state."""
    states = {}
    for i in body["participants"]:
        client = whole("client", i, 0, body["n"] - 1)
        states[client] = from_names(initial, tensors, f"client.{i}")
        for name, tensor, like in other_types(states[client], initial):
            raise ValueError(
                f"client.{i}.{name} is {tensor.dtype} {tuple(tensor.shape)}, not {like.dtype} "
                f"{tuple(like.shape)}"
            )
    return ClientStates(body["n"], initial, states)


def find_algorithm(folder: Path, body: Mapping[str, Any]) -> AnyAlgorithm | None:
    """Return the algorithm of a run; None if its class is not registered and the run has no states."""
    with sound(folder):
        name, values = str(body["settings"]["algorithm"]), body["settings"]["hyperparameters"]
        if name in algorithms():
            with untrusted():
                return make_algorithm(name, **values)
        if ":" in name:
            with suppress(InputError), untrusted():
                return make_algorithm(name, **values)
        if not body.get("has_states", True):
            return None
    remedy = (
        f"import {name.rpartition(':')[0]} first" if ":" in name else "call fadamgc.register before loading"
    )
    raise InputError(f"algorithm {shown(name)} of {folder} is not known here; {remedy}")


MALFORMED = (FadamgcError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RuntimeError)


@contextmanager
def sound(folder: Path, name: str | None = None) -> Iterator[None]:
    """Refuse content that no run can have written, although its digest is right."""
    where = folder if name is None else folder / f"{name}.json"
    try:
        yield
    except CheckpointError:
        raise
    except KeyError as error:
        raise CheckpointError(f"{where} is not a run of this version: it has no {error}") from None
    except MALFORMED as error:
        raise CheckpointError(f"{where} is not a run of this version: {cut(str(error))}") from None


def environment() -> dict[str, str]:
    """Return versions and machine, for the record."""
    return {
        "fadamgc": version("fadamgc"),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
        "machine": f"{platform.system()} {platform.machine()}",
    }
