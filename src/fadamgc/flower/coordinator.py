"""The server's part of a federation, without the network: whom to ask, what to accept, when it counts.

Nothing of a round is in the state before the round is closed, and it is closed by writing the checkpoint. A
coordinator that is killed at any moment and opened again has the state of the last closed round.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.algorithms import algorithm_name
from fadamgc.errors import CheckpointError, FadamgcError, InputError
from fadamgc.files import as_json
from fadamgc.flower.protocol import NEVER, RefusedError, Reply, Request, Stamp, check_name, said
from fadamgc.flower.store import Store
from fadamgc.sim.aggregate import Sums
from fadamgc.sim.cost import CostModel, Work, traffic
from fadamgc.sim.problem import Buffers, Problem
from fadamgc.sim.run import Record, Run, environment
from fadamgc.sim.sampling import Draw, draw
from fadamgc.sim.settings import Settings
from fadamgc.sim.states import ClientStates
from fadamgc.task import Task

log = logging.getLogger("fadamgc")

REMEMBERED = 100  # refusals
LARGEST_LOSS = 1e30


class Asked(NamedTuple):
    """A request to one client."""

    request: Request
    tracked: bool


class Coordinator:
    """The state of a federation between rounds.

    Args:
        algorithm: what runs.
        task: model, loss, test data and metric. Of its clients' data only two samples are looked at, to see
            which buffers training changes: the server has no data of the clients.
        clients: how many there are, n; they are numbered from 0.
        settings: as of ``simulate``.
        experiment: its name; clients keep their states under it.
        store: folder for the checkpoint; None keeps none, and a server that is killed begins anew.
        max_norm: refuse a client whose message has a vector longer than this; None accepts any length.
        min_clients: a round with fewer answers does not count.
        reset_states: begin the states of all clients, and the server's but for the model, anew.
        facts: what else must be the same when the experiment goes on, as plain data.
    """

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        task: Task,
        clients: int,
        settings: Settings,
        experiment: str = "experiment",
        store: str | Path | None = None,
        *,
        cost: CostModel | None = None,
        max_norm: float | None = None,
        min_clients: int = 1,
        reset_states: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        if not 1 <= min_clients <= clients:
            raise InputError(
                f"min_clients={min_clients} is not accepted; it must be from 1 to clients={clients}"
            )
        if max_norm is not None and not max_norm > 0:
            raise InputError(f"max_norm={max_norm!r} is not accepted; it must be a number > 0")
        check_name(experiment)
        if settings.sampled is not None and min_clients > settings.sampled:
            raise InputError(
                f"min_clients={min_clients} is not accepted; a round asks only sampled={settings.sampled}"
            )
        if algorithm.full_participation and min_clients < clients:
            raise InputError(
                f"{type(algorithm).__name__} needs all clients in every round; give min_clients={clients}"
            )
        settings.check(clients, [1] * clients, algorithm)
        self.algorithm, self.task, self.n, self.settings = algorithm, task, clients, settings
        self.experiment, self.max_norm, self.min_clients = experiment, max_norm, min_clients
        self.facts = dict(facts or {})
        self.store = None if store is None else Store(store)
        self.cost = cost or CostModel()
        self.cost.check(clients)
        self.problem = Problem(task, settings.dtype)
        self.traffic = traffic(algorithm, self.problem.flat.d, self.problem.dtype, self.problem.buffers0)
        kinds = example(algorithm, torch.zeros(self.problem.flat.d, dtype=self.problem.dtype))
        self._up = kinds.up
        self.server: Any = None  # None: it begins with the clients' gradients, which have not been collected
        self.buffers = self.problem.buffers0
        self.t, self.generation = 0, 0
        self.counted: dict[int, Stamp] = {}
        self.samples: dict[int, int] = {}
        self.history: list[Record] = []
        self.setup: tuple[Work, ...] = ()
        self.refusals: list[str] = []  # the last of them, for people
        if not algorithm.init_gradient:
            self.server = algorithm.init_server(self.problem.x0)
        if self.store is not None:
            found = self.store.take_over()  # before anything is asked: no two starts have the same number
            if found is not None:
                self._restore(self.store, *found)
        self.attempt = 1 if self.store is None else self.store.attempt
        if reset_states:
            self._reset()
        self._write()
        self._asked: dict[int, Asked] = {}
        self._replies: dict[int, Reply] = {}
        self._began = time.perf_counter()

    # Whom to ask.

    def over(self) -> bool:
        """Whether the last round or the target has been reached."""
        value = self.history[-1].test_metric if self.history else None
        target = self.settings.target
        reached = target is not None and value is not None and self.task.reached(value, target)
        return self.t >= self.settings.rounds or reached

    @property
    def needs_all(self) -> bool:
        """Whether there can be no round before all clients have been there."""
        return self.needs_setup or (self.settings.weights == "size" and len(self.samples) < self.n)

    @property
    def needs_setup(self) -> bool:
        """Whether all clients have to send their gradient at the first model before there can be a round."""
        return self.server is None

    def who(self, available: Iterable[int]) -> Draw:
        """Who takes part in the next round; as in the simulator if all clients are there."""
        there, t = sorted(set(available)), self.t + 1
        if len(there) == self.n:
            return self.settings.who(t, self.n)
        if self.settings.schedule is not None:
            planned = self.settings.who(t, self.n)
            return Draw(*(tuple(i for i in ids if i in there) for ids in planned))
        S = min(self.settings.sampled or self.n, len(there))
        tracked = S if self.settings.tracked is None else min(self.settings.tracked, S)
        chosen = draw(self.settings.seed, t, len(there), S, tracked) if S else Draw((), ())
        return Draw(*(tuple(there[i] for i in ids) for ids in chosen))

    def ask(self, available: Iterable[int]) -> list[Asked]:
        """The requests of the next round; of the setup, all clients are asked."""
        if self.store is not None:
            self.store.check()
        if len(self.samples) == self.n:
            self.settings.check(self.n, [self.samples[i] for i in range(self.n)], self.algorithm)
        self._began = time.perf_counter()
        self._replies = {}
        if self.needs_setup:
            everyone = tuple(range(self.n))
            who, t = Draw(everyone, everyone), 0
        else:
            who, t = self.who(available), self.t + 1
        tracked = set(who.tracked)
        self._asked = {
            i: Asked(
                Request(
                    self.experiment, i, self.generation, Stamp(t, self.attempt), self.counted.get(i, NEVER)
                ),
                i in tracked,
            )
            for i in who.sampled
        }
        return list(self._asked.values())

    # What to accept.

    def consider(self, client: int, reply: Reply) -> None:
        """Take a reply in for this round, or refuse it; either way the state does not change yet.

        Args:
            client: who was asked with the message that this answers.
            reply: what came.

        Raises:
            RefusedError: it is not what was asked for.
        """
        try:
            self._check(client, reply)
        except RefusedError as error:
            self.refuse(error)
            raise
        self._replies[client] = reply

    def refuse(self, error: Exception) -> None:
        """Remember that something was refused; it goes into the next checkpoint."""
        self.refusals = [*self.refusals, f"round {self.t + 1}: {str(error)[:500]}"][-REMEMBERED:]

    def welcome(self, client: int, samples: int) -> None:
        """Take in who a client is.

        Raises:
            RefusedError: it has another number of samples than its weight was made of.
        """
        known = self.samples.get(client)
        if self.settings.weights == "size" and known not in (None, samples):
            error = RefusedError(
                "samples",
                f"client {client} has {samples} samples, and had {known}: with weights = 'size' that number "
                "stays, or y is no mean any more. Begin all states anew (reset-states = true)",
            )
            self.refuse(error)
            raise error
        self.samples[client] = samples

    def _check(self, client: int, reply: Reply) -> None:
        def refuse(kind: str, why: str) -> None:
            raise RefusedError(kind, f"the reply of client {client} is refused: {why}")

        asked = self._asked.get(client)
        if asked is None:
            refuse("not asked", "it was not asked in this round")
            return
        request = asked.request
        if reply.client != client:
            refuse("another client", f"it says that it is client {reply.client}")
        if (reply.experiment, reply.generation, reply.stamp) != (
            request.experiment,
            request.generation,
            request.stamp,
        ):
            refuse(
                "another round",
                f"it answers {said(reply.stamp)} of {reply.experiment!r}, asked was {said(request.stamp)} of "
                f"{request.experiment!r}",
            )
        if client in self._replies:
            refuse("twice", "it has already answered")
        self._check_numbers(client, reply, asked.tracked, refuse)

    def _check_numbers(self, client: int, reply: Reply, tracked: bool, refuse: Any) -> None:
        if not (isinstance(reply.steps, int) and 1 <= reply.steps <= 10**9):
            refuse("steps", f"{reply.steps!r} local steps")
        known = self.samples.get(client)
        if known is not None and reply.stamp.round and reply.steps != self.settings.steps(known):
            refuse("steps", f"{reply.steps} local steps, not {self.settings.steps(known)}")
        if not (isinstance(reply.loss, float) and abs(reply.loss) <= LARGEST_LOSS):
            refuse("not finite", f"its loss is {reply.loss!r}")
        vectors = self._fields(tracked) if reply.stamp.round else {"g": self.problem.x0}
        beside = self.buffers if reply.stamp.round else {}
        for kind, given, wanted in (("update", reply.up, vectors), ("buffers", reply.buffers, beside)):
            if set(given) != set(wanted):
                refuse("fields", f"its {kind} has {sorted(given)}, not {sorted(wanted)}")
            for name, value in given.items():
                like = wanted[name]
                if value.shape != like.shape or value.dtype != like.dtype:
                    refuse(
                        "shape",
                        f"{name} is {value.dtype} {tuple(value.shape)}, not {like.dtype} {tuple(like.shape)}",
                    )
                if value.is_floating_point() and not bool(torch.isfinite(value).all()):
                    refuse("not finite", f"{name} has numbers that are not finite")
        for name, value in reply.up.items():
            length = float(torch.linalg.vector_norm(value.double()))
            if self.max_norm is not None and length > self.max_norm:
                refuse("norm", f"{name} has norm {length:.4g}, more than max_norm={self.max_norm:g}")

    def _fields(self, tracked: bool) -> dict[str, Tensor]:
        """What a message has to hold."""
        rest = () if tracked else self.algorithm.tracked_only
        return {name: getattr(self._up, name) for name in self._up._fields if name not in rest}

    # When it counts.

    @property
    def answered(self) -> tuple[int, ...]:
        """Whose replies have been taken in."""
        return tuple(sorted(self._replies))

    @property
    def enough(self) -> bool:
        """Whether the round would count; a setup needs all clients."""
        return len(self._replies) >= (self.n if self.needs_setup else self.min_clients)

    def close(self) -> Record | None:
        """End the round: with the replies if they are enough, without any if not. A setup has no record."""
        if self.needs_setup:
            if self.enough:
                self._close_setup()
            return None
        replies = self._replies if self.enough else {}
        t = self.t + 1
        sums, server, buffers = self._sum(replies)
        if not _finite((*server, *buffers.values())):
            why = "what the replies sum up to is not finite; none of them counts"
            log.warning("round %d: %s", t, why)
            self.refuse(RefusedError("not finite", why))
            replies = {}
            sums, server, buffers = self._sum(replies)
        counted = self.counted | {i: self._asked[i].request.stamp for i in replies}
        record = self._record(t, server, buffers, sums, replies)
        before = self.server, self.buffers, self.t, self.counted, self.history
        self.server, self.buffers, self.t, self.counted = server, buffers, t, counted
        self.history = [*self.history, record]
        try:
            self._write()
        except BaseException:
            self.server, self.buffers, self.t, self.counted, self.history = before
            raise
        self._asked, self._replies = {}, {}
        return record

    def _sum(self, replies: Mapping[int, Reply]) -> tuple[Sums, Any, Buffers]:
        """The server's state and buffers after these replies."""
        sums = Sums(self.settings.weight_of(self._sizes()))
        for i in sorted(replies):
            reply = replies[i]
            up = type(self._up)(
                *(
                    reply.up[name] if name in reply.up else torch.zeros_like(getattr(self._up, name))
                    for name in self._up._fields
                )
            )
            buffers = {name: reply.buffers[name] for name in self.buffers}
            sums.add(i, reply.steps, up, buffers, torch.tensor(reply.loss, dtype=self.problem.dtype))
        return sums, sums.aggregate(self.algorithm, self.server, self.n), sums.mean_buffers(self.buffers)

    def _close_setup(self) -> None:
        weights = self.settings.weight_of(self._sizes())
        total = torch.zeros_like(self.problem.x0)
        for i in range(self.n):
            g = self._replies[i].up["g"]
            total = total + (g if weights is None else g * weights[i])
        if not _finite([total]):
            self._asked, self._replies = {}, {}
            raise FadamgcError("the clients' gradients at the first model sum up to what is not finite")
        vector = self.problem.x0.numel() * self.problem.x0.element_size()
        steps = tuple(self._replies[i].steps for i in range(self.n))
        beside = sum(b.numel() * b.element_size() for b in self.buffers.values())
        self.setup = (Work(tuple(range(self.n)), steps, (vector + beside,) * self.n, (vector,) * self.n),)
        self.server = self.algorithm.init_server(self.problem.x0, total / self.n)
        self.counted = {i: self._asked[i].request.stamp for i in range(self.n)}
        self._write()
        self._asked, self._replies = {}, {}

    def _sizes(self) -> Any:
        import numpy as np

        if self.settings.weights == "size" and len(self.samples) < self.n:
            raise InputError("weights='size' needs the sizes of all clients; wait until all have been there")
        return np.array([self.samples.get(i, 1) for i in range(self.n)])

    def _record(
        self, t: int, server: Any, buffers: Buffers, sums: Sums, replies: Mapping[int, Reply]
    ) -> Record:
        evaluation: dict[str, float] = {}
        if t % self.settings.eval_every == 0 or t == self.settings.rounds:
            evaluation = self.problem.evaluate(server.x, buffers, self.settings.seed, t)
        sampled = tuple(self._asked)
        tracked = tuple(i for i, asked in self._asked.items() if asked.tracked)
        steps = [self._steps(replies[i]) if i in replies else 0 for i in sampled]
        own = self.traffic.work(sampled, tracked, steps)
        own = own._replace(up=tuple(up if i in replies else 0 for i, up in zip(sampled, own.up, strict=True)))
        work = (*(self.setup if t == 1 else ()), own)
        return Record.of(
            *(t, evaluation, work, self.cost),
            train_loss=sums.mean_loss(),
            wall_seconds=time.perf_counter() - self._began,
            sampled=sampled,
            tracked=tracked,
            dropped=tuple(i for i in sampled if i not in replies),
        )

    def _steps(self, reply: Reply) -> int:
        """What a client's work costs, with the pass over its data that some algorithms make in each round."""
        samples = self.samples.get(reply.client, 1)
        return reply.steps + (self.settings.passes(samples) if self.algorithm.round_gradient else 0)

    # What lasts.

    def identity(self) -> dict[str, Any]:
        """What must be equal for one start to be the continuation of another."""
        return {
            "algorithm": algorithm_name(self.algorithm),
            "hyperparameters": dataclasses.asdict(self.algorithm),
            "clients": self.n,
            "dtype": str(self.problem.dtype).removeprefix("torch."),
            **self.settings.to_json(),
        }

    def _belongs(self) -> dict[str, Any]:
        """What must be equal for a checkpoint to be of this experiment."""
        layout = zip(self.problem.flat.names, self.problem.flat.shapes, strict=True)
        model = {
            "parameters": {name: list(shape) for name, shape in layout},
            "buffers": {name: list(value.shape) for name, value in self.problem.buffers0.items()},
        }
        return self.identity() | {"experiment": self.experiment, "model": model, "facts": self.facts}

    def run(self) -> Run:
        """The federation so far, as the simulator's runs; the clients' states are with the clients."""
        initial = self.algorithm.init_client(self.problem.x0)
        return Run(
            algorithm=self.algorithm,
            server=self.server,
            clients=ClientStates(self.n, initial),
            buffers=self.buffers,
            history=list(self.history),
            settings=self.identity()
            | {
                "rounds": self.settings.rounds,
                "target": self.settings.target,
                "task": self.task.name,
                "executor": "flower",
                "compiled": False,
            },
            environment=environment(),
            cost=self.cost,
            task=self.task,
            goal=str(self.task.goal),
        )

    def _write(self) -> None:
        if self.store is None:
            return
        tensors = {f"buffer.{name}": value for name, value in self.buffers.items()}
        if self.server is not None:
            tensors |= {f"server.{name}": getattr(self.server, name) for name in self.server._fields}
        content = {
            "identity": as_json(self._belongs()),
            "round": self.t,
            "generation": self.generation,
            "set_up": self.server is not None,
            "counted": {str(i): list(stamp) for i, stamp in self.counted.items()},
            "samples": {str(i): size for i, size in self.samples.items()},
            "setup": [w._asdict() for w in self.setup],
            "history": [record.to_json() for record in self.history],
            "refusals": self.refusals,
        }
        self.store.write(content, tensors)

    def _restore(self, store: Store, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        here, there = as_json(self._belongs()), content["identity"]
        for key in {**here, **there}:
            if here.get(key) != there.get(key):
                raise CheckpointError(
                    f"{store.folder} is the checkpoint of another experiment: "
                    f"{key}={_brief(there.get(key))} there, "
                    f"{_brief(here.get(key))} here; give another experiment, or the settings that it had"
                )
        self.t, self.generation = content["round"], content["generation"]
        if content["set_up"]:
            like = self.algorithm.init_server(self.problem.x0, self.problem.x0)
            self.server = type(like)(*(tensors[f"server.{name}"] for name in like._fields))
        else:
            self.server = None
        self.buffers = {name: tensors[f"buffer.{name}"] for name in self.buffers}
        self.counted = {int(i): Stamp(*stamp) for i, stamp in content["counted"].items()}
        self.samples = {int(i): int(size) for i, size in content["samples"].items()}
        self.setup = tuple(Work(**{k: tuple(v) for k, v in w.items()}) for w in content["setup"])
        self.history = [Record.from_json(record) for record in content["history"]]
        self.refusals = list(content["refusals"])

    def _reset(self) -> None:
        """New states for all clients. The model stays, as if the experiment began with it."""
        if self.algorithm.init_gradient and self.server is not None:
            raise InputError(
                f"{type(self.algorithm).__name__} begins with the clients' gradients at the first model; its "
                "states cannot begin anew with another"
            )
        # Larger than any that a client may have seen, also from a server whose checkpoint is gone.
        self.generation = max(self.generation + 1, int(time.time()))
        self.counted, self.samples = {}, {}
        if self.server is not None:
            self.server = self.algorithm.init_server(self.server.x)


def _finite(values: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in values if value.is_floating_point())


def _brief(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
