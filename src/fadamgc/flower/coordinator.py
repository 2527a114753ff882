"""The server of a federation, without the network: whom to ask, what to accept, when it counts.

Nothing of a round is in the state before the round is closed, and writing the checkpoint closes the round. A
coordinator that is killed at any moment and opened again has the state of the last closed round.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.errors import CheckpointError, InputError, shown, whole
from fadamgc.escape import printable
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.cost import CostModel, Work
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.run import Record, Run
from fadamgc.federation.sampling import Draw
from fadamgc.federation.server import Federation, ServerState
from fadamgc.federation.settings import Settings
from fadamgc.federation.sums import Sums
from fadamgc.files import as_json
from fadamgc.flower.client_store import check_experiment_name
from fadamgc.flower.members import Members
from fadamgc.flower.protocol import MAX_GENERATION, NEVER, RefusedError, Reply, Request, Stamp
from fadamgc.flower.reply_checks import Norms, ReplyChecks, Scale, refusal
from fadamgc.flower.server_store import ServerStore
from fadamgc.task import Task
from fadamgc.tree import from_names, named_leaves

log = logging.getLogger("fadamgc")

REMEMBERED_REFUSALS = 100
QUICK_TEST = 256  # test samples that are looked at in a round without an evaluation


class Asked(NamedTuple):
    """A request to one client."""

    request: Request
    tracked: bool


class Coordinator:
    """The server of a federation: the shared round, plus stamps, checks of replies and a store.

    Args:
        algorithm: the algorithm.
        task: model, loss, test data and metric. Of its clients' data only two samples are looked at, to see
            which buffers training changes: the server has no data of the clients.
        clients: number of clients, n; they are numbered from 0.
        settings: how the run proceeds.
        experiment: name of the experiment, under which clients store their states.
        store: folder for the checkpoint; None for none: a server that is killed then restarts from round 1.
        max_norm: refuse a client whose message has a vector longer than this; None accepts any length.
        max_norm_ratio: refuse a client whose message has a vector, or a change of buffers, that is longer
            than this many times what is typical: the larger of the median of this round and of the largest
            median of earlier rounds. A client with more local steps than is typical may go further, in
            proportion, up to this many times. None accepts any length.
        max_samples: refuse a client that says that it has more samples; None accepts any number.
        max_size_ratio: with weights="size", refuse a client that says that it has more than this many times
            the median number of samples; None accepts any number.
        min_clients: a round with fewer replies does not count.
        checkpoints: how many checkpoints are kept, the newest included.
        restore_round: return to the checkpoint of this round, and reset all states; None resumes from the
            newest checkpoint.
        unbind: clients that are no longer bound to the key of their node; they are bound to the next key.
        reset_states: reset the states of all clients, and the server's state except for the model.
        facts: what else must be equal when the experiment is resumed, as plain data.
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
        max_norm_ratio: float | None = 100.0,
        max_samples: int | None = None,
        max_size_ratio: float | None = 100.0,
        min_clients: int = 1,
        checkpoints: int = 3,
        restore_round: int | None = None,
        unbind: Iterable[int] = (),
        reset_states: bool = False,
        facts: Mapping[str, Any] | None = None,
    ) -> None:
        if not 1 <= min_clients <= clients:
            raise InputError(
                f"min_clients={min_clients} is not accepted; it must be from 1 to clients={clients}"
            )
        if max_norm is not None and not max_norm > 0:
            raise InputError(f"max_norm={max_norm!r} is not accepted; it must be a number > 0")
        for name, ratio in (("max_norm_ratio", max_norm_ratio), ("max_size_ratio", max_size_ratio)):
            if ratio is not None and not ratio > 1:
                raise InputError(f"{name}={ratio!r} is not accepted; it must be a number > 1")
        if max_samples is not None:
            whole("max_samples", max_samples, 1)
        check_experiment_name(experiment)
        if settings.sampled is not None and min_clients > settings.sampled:
            raise InputError(
                f"min_clients={min_clients} is not accepted; a round asks only sampled={settings.sampled}"
            )
        if algorithm.full_participation and min_clients < clients:
            raise InputError(
                f"{type(algorithm).__name__} needs all clients in every round; give min_clients={clients}"
            )
        settings.check(clients, [1] * clients, algorithm)
        self.settings, self.experiment, self.min_clients = settings, experiment, min_clients
        self.members = Members(clients, settings.weights == "size", max_samples, max_size_ratio)
        self.facts = dict(facts or {})
        self.store = None if store is None else ServerStore(store, whole("checkpoints", checkpoints, 1))
        functions = TaskFunctions(task, settings.dtype)
        self.federation = Federation(algorithm, functions, clients, settings, cost)
        self.functions, self.algorithm, self.task, self.n = functions, algorithm, task, clients
        self.checks = ReplyChecks(functions.module, max_norm, max_norm_ratio)
        self._up = example(algorithm, torch.zeros(functions.flat.d, dtype=functions.x0.dtype)).up
        self.generation = 0
        self.counted: dict[int, Stamp] = {}
        self.refusals: list[str] = []  # the last of them, for people
        if self.store is not None:
            # Before any client is asked: no two starts have the same number.
            checkpoint = self.store.take_over(needed=restore_round is None)
            if checkpoint is not None:
                self._restore(self.store, *checkpoint)
        self.attempt = 1 if self.store is None else self.store.attempt
        if restore_round is not None:
            self._return_to(restore_round)
        elif reset_states:
            self._reset()
        for client in unbind:
            self.members.keys.pop(client, None)
        self._write()
        self._clear_round()
        self._began = time.perf_counter()

    @property
    def t(self) -> int:
        """Number of the last closed round."""
        return self.federation.t

    @property
    def server(self) -> Any:
        """The algorithm's server state; None before the clients' first gradients were collected."""
        return self.federation.state.server

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The averaged buffers of the model."""
        return self.federation.state.buffers

    @property
    def history(self) -> list[Record]:
        """One record per closed round."""
        return self.federation.history

    # Whom to ask.

    def over(self) -> bool:
        """Whether the last round or the target has been reached."""
        return self.federation.over()

    @property
    def needs_all(self) -> bool:
        """Whether there can be no round before all clients have connected."""
        return self.needs_setup or (self.settings.weights == "size" and len(self.members.samples) < self.n)

    @property
    def needs_setup(self) -> bool:
        """Whether all clients have to send their gradient at the first model before there can be a round."""
        return self.server is None

    def ask(self, available: Iterable[int]) -> list[Asked]:
        """Return the requests of the next round; in the setup, all clients are asked."""
        if self.store is not None:
            self.store.check()
        if len(self.members.samples) == self.n:
            self.settings.check(self.n, [self.members.samples[i] for i in range(self.n)], self.algorithm)
        self._began = time.perf_counter()
        self._clear_round()
        if self.needs_setup:
            everyone = tuple(range(self.n))
            draw, t = Draw(everyone, everyone), 0
        else:
            draw, t = self.federation.who(available), self.t + 1
        stamp, tracked = Stamp(t, self.attempt), set(draw.tracked)
        for i in draw.sampled:
            request = Request(self.experiment, i, self.generation, stamp, self.counted.get(i, NEVER))
            self._asked[i] = Asked(request, i in tracked)
        return list(self._asked.values())

    def message(self) -> dict[str, Tensor]:
        """Return the vectors that the server sends to every client of the round, by name."""
        if self.needs_setup:
            return {"x": self.functions.x0}
        return named_leaves(self.federation.open().down)

    def wanted(self, client: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what a client's reply must contain: vectors and buffers, as tensors of the same shape."""
        asked = self._asked.get(client)
        if asked is None:
            return {}, {}
        if not asked.request.stamp.round:
            return {"g": self.functions.x0}, {}
        left_out = () if asked.tracked else self.algorithm.tracked_only
        vectors = {
            name: tensor
            for name, tensor in named_leaves(self._up).items()
            if name.partition(".")[0] not in left_out
        }
        return vectors, dict(self.buffers)

    def _clear_round(self) -> None:
        self._asked: dict[int, Asked] = {}
        self._replies: dict[int, Reply] = {}
        self._norms: dict[int, Norms] = {}  # of the replies
        self._screened = False

    # What to accept.

    def consider(self, client: int, reply: Reply) -> None:
        """Take in a reply for this round, or refuse it; either way the state does not change yet.

        Args:
            client: the client that was asked with the message that this reply answers.
            reply: the reply.

        Raises:
            RefusedError: the reply is not what was asked for.
        """
        with self._remembering_refusals():
            norms = self._check(client, reply)
        self._replies[client], self._norms[client], self._screened = reply, norms, False

    def _check(self, client: int, reply: Reply) -> Norms:
        asked = self._asked.get(client)
        if asked is None:
            raise refusal(client, "not asked", "it was not asked in this round")
        self.checks.check_header(client, reply, asked.request)
        if client in self._replies:
            raise refusal(client, "twice", "it has already answered")
        samples = self.members.samples.get(client)
        steps = self.settings.steps(samples) if samples is not None and reply.stamp.round else None
        return self.checks.check_numbers(client, reply, *self.wanted(client), steps)

    def screen(self) -> tuple[int, ...]:
        """Refuse the replies of this round that are out of proportion; to be called when all have arrived.

        Returns:
            The clients whose replies were refused.
        """
        if self._screened:
            return ()
        self._screened = True
        refused = self.checks.out_of_proportion(self._norms, self.federation.state)
        for i, error in refused.items():
            log.warning("client %d: %s", i, error)
            self.refuse(error)
            del self._replies[i], self._norms[i]
        return tuple(refused)

    def refuse(self, error: Exception) -> None:
        """Remember that something was refused; it goes into the next checkpoint."""
        self.refusals = [*self.refusals, f"round {self.t + 1}: {printable(error, 500)}"][
            -REMEMBERED_REFUSALS:
        ]

    def admit(self, client: int, samples: int) -> None:
        """Take in the size of a client's data; see ``Members.admit``."""
        with self._remembering_refusals():
            self.members.admit(client, samples, started=bool(self.counted))

    def check_key(self, client: int, key: str) -> None:
        """Refuse a node that speaks for a client with another key; see ``Members.check_key``."""
        with self._remembering_refusals():
            self.members.check_key(client, key)

    @contextmanager
    def _remembering_refusals(self) -> Iterator[None]:
        try:
            yield
        except RefusedError as error:
            self.refuse(error)
            raise

    # When it counts.

    @property
    def answered(self) -> tuple[int, ...]:
        """The clients whose replies have been taken in."""
        return tuple(sorted(self._replies))

    @property
    def enough(self) -> bool:
        """Whether the round would count; a setup needs all clients."""
        return len(self._replies) >= (self.n if self.needs_setup else self.min_clients)

    def close(self) -> Record | None:
        """End the round: with the replies if they are enough, without any if not. A setup has no record.

        A round whose model is not finite, or has no finite test loss, does not count: the state does not
        change, and the clients discard theirs when they are asked again.
        """
        self.screen()
        if self.needs_setup:
            if self.enough:
                self._close_setup()
            return None
        replies = self._replies if self.enough else {}
        sums, after = self._sum(replies)
        evaluation: dict[str, float] = {}
        why: str | None
        if after.nonfinite() is not None:
            why = "the sum of the replies is not finite"
        else:
            evaluation, why = self._evaluate(after)
            if why is not None and self._evaluate(self.federation.state)[1] is not None:
                why = None  # the replies are not the cause
        if why is not None:
            why = f"{why}; none of them counts"
            log.warning("round %d is refused: %s", self.t + 1, why)
            self.refuse(RefusedError("not finite", why))
            replies = {}
            sums, after = self._sum(replies)
            evaluation, _ = self._evaluate(after)
        self._commit(after, self._record(sums, evaluation, replies), replies)
        self._clear_round()
        return self.history[-1]

    def _commit(self, after: ServerState, record: Record, replies: Mapping[int, Reply]) -> None:
        """Take over the round and write the checkpoint; if that fails, the state is as before."""
        federation, checks = self.federation, self.checks
        before = federation.state, federation.t, self.counted, checks.scales
        self.counted = self.counted | {i: self._asked[i].request.stamp for i in replies}
        checks.scales = checks.scales_after({i: self._norms[i] for i in replies})
        federation.commit(after, record)
        try:
            self._write()
        except BaseException:
            federation.state, federation.t, self.counted, checks.scales = before
            federation.history.pop()
            raise

    def _evaluate(self, state: ServerState) -> tuple[dict[str, float], str | None]:
        """Return the evaluation of the next round, {} if it has none, and what is wrong with the model."""
        x, buffers = state.server.x, state.buffers
        try:
            evaluation = self.federation.evaluate(state)
        except InputError as error:  # such as a custom metric that fails on numbers that are not finite
            if math.isfinite(self.functions.quick_test_loss(x, buffers, QUICK_TEST) or 0.0):
                raise
            return {}, str(error)
        if self.settings.evaluates(self.t + 1):
            loss = evaluation.get("test_loss", 0.0)
        else:
            loss = self.functions.quick_test_loss(x, buffers, QUICK_TEST) or 0.0
        if math.isfinite(loss):
            return evaluation, None
        return evaluation, f"with the replies, the loss on the test data is {loss}"

    def _sum(self, replies: Mapping[int, Reply]) -> tuple[Sums, ServerState]:
        """Return the sums over these replies, and the server after them."""
        self.federation.weights = self._weights()
        sums = self.federation.new_sums()
        like = named_leaves(self._up)
        for i in sorted(replies):
            reply = replies[i]
            vectors = {n: reply.up[n] if n in reply.up else torch.zeros_like(t) for n, t in like.items()}
            buffers = {name: reply.buffers[name] for name in self.buffers}
            loss = torch.tensor(reply.loss, dtype=self.functions.x0.dtype)
            sums.add(i, reply.steps, from_names(self._up, vectors), buffers, loss)
        return sums, self.federation.aggregate(sums)

    def _close_setup(self) -> None:
        replies = [self._replies[i] for i in range(self.n)]
        self.federation.weights = self._weights()
        try:
            self.federation.begin_with((r.up["g"] for r in replies), [r.steps for r in replies])
            self.counted = {i: self._asked[i].request.stamp for i in range(self.n)}
            self._write()
        finally:
            self._clear_round()

    def _weights(self) -> list[float] | None:
        if self.settings.weights == "size" and len(self.members.samples) < self.n:
            raise InputError("weights='size' needs the sizes of all clients; wait until all have connected")
        return self.settings.weight_of(np.array([self.members.samples.get(i, 1) for i in range(self.n)]))

    def _record(self, sums: Sums, evaluation: Mapping[str, float], replies: Mapping[int, Reply]) -> Record:
        sampled = tuple(self._asked)
        draw = Draw(sampled, tuple(i for i, asked in self._asked.items() if asked.tracked))
        missing = tuple(i for i in sampled if i not in replies)
        steps = [
            self.federation.work_steps(replies[i].steps, self.members.samples.get(i, 1))
            if i in replies
            else 0
            for i in sampled
        ]
        seconds = time.perf_counter() - self._began
        return self.federation.record(draw, sums, evaluation, steps, seconds, missing, silent=missing)

    # What is stored.

    def identity(self) -> dict[str, Any]:
        """Return what must be equal for one start to be the continuation of another."""
        return self.federation.identity()

    def _experiment_identity(self) -> dict[str, Any]:
        """Return what must be equal for a checkpoint to belong to this experiment."""
        layout = zip(self.functions.flat.names, self.functions.flat.shapes, strict=True)
        model = {
            "parameters": {name: list(shape) for name, shape in layout},
            "buffers": {name: list(value.shape) for name, value in self.functions.buffers0.items()},
        }
        return self.identity() | {"experiment": self.experiment, "model": model, "facts": self.facts}

    def run(self) -> Run:
        """Return the run so far, as the simulator does; the clients' states are with the clients."""
        clients = ClientStates(self.n, self.algorithm.init_client(self.functions.x0))
        return self.federation.run(clients, {"executor": "flower", "compiled": False})

    def _write(self) -> None:
        if self.store is None:
            return
        tensors = {f"buffer.{name}": value for name, value in self.buffers.items()}
        if self.server is not None:
            tensors |= named_leaves(self.server, "server")
        content = {
            "identity": as_json(self._experiment_identity()),
            "round": self.t,
            "generation": self.generation,
            "set_up": self.server is not None,
            "counted": {str(i): list(stamp) for i, stamp in self.counted.items()},
            "samples": {str(i): size for i, size in self.members.samples.items()},
            "setup": [work._asdict() for work in self.federation.setup],
            "history": [record.to_json() for record in self.history],
            "refusals": self.refusals,
            "scales": {name: list(scale) for name, scale in self.checks.scales.items()},
            "keys": {str(i): key for i, key in self.members.keys.items()},
        }
        self.store.write(content, tensors)

    def _restore(self, store: ServerStore, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Take over the state of a checkpoint."""
        here, saved = as_json(self._experiment_identity()), content["identity"]
        for key in {**here, **saved}:
            if here.get(key) != saved.get(key):
                raise CheckpointError(
                    f"{store.folder} is the checkpoint of another experiment: "
                    f"{key}={shown(saved.get(key))} there, "
                    f"{shown(here.get(key))} here; give another experiment, or the settings that it had"
                )
        federation, x0 = self.federation, self.functions.x0
        server = None
        if content["set_up"]:
            server = from_names(self.algorithm.init_server(x0, x0), tensors, "server")
        federation.state = ServerState(server, {name: tensors[f"buffer.{name}"] for name in self.buffers})
        federation.t = content["round"]
        federation.setup = tuple(Work(**{k: tuple(v) for k, v in w.items()}) for w in content["setup"])
        federation.history = [Record.from_json(record) for record in content["history"]]
        self.generation = content["generation"]
        self.counted = {int(i): Stamp(*stamp) for i, stamp in content["counted"].items()}
        self.members.samples = {int(i): int(size) for i, size in content["samples"].items()}
        self.refusals = list(content["refusals"])
        scales = content.get("scales", {})  # missing in the checkpoints of 0.1
        self.checks.scales = {n: Scale(largest, tuple(recent)) for n, (largest, recent) in scales.items()}
        self.members.keys = {int(i): key for i, key in content.get("keys", {}).items()}

    def _return_to(self, t: int) -> None:
        """Take the model of an earlier round, and reset the clients' states, which are of later rounds."""
        if self.store is None:
            raise InputError(f"restore_round={t} is not accepted; there is no folder with checkpoints")
        generation, keys, refusals = self.generation, self.members.keys, self.refusals
        self._restore(self.store, *self.store.read(t))
        self.generation = max(generation, self.generation)
        self.members.keys, self.refusals = keys or self.members.keys, refusals
        self._reset()
        log.info("back at round %d; the states of all clients are reset", t)

    def _reset(self) -> None:
        """Reset the states of all clients. The model stays, as if the experiment started with it."""
        if self.algorithm.init_gradient and self.server is not None:
            raise InputError(
                f"{type(self.algorithm).__name__} starts from the clients' gradients at the first model; its "
                "states cannot be reset with another model"
            )
        # Larger than any earlier number of this server. The time is for a server that has lost its
        # checkpoint: the number is then likely larger than any that clients have seen, unless the clock is
        # wrong.
        self.generation = max(self.generation + 1, min(int(time.time()), MAX_GENERATION // 2))
        self.counted, self.members.samples = {}, {}
        if self.server is not None:
            state = self.federation.state
            self.federation.state = state._replace(server=self.algorithm.init_server(state.server.x))
