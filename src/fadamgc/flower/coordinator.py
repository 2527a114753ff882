"""The server of a federation, without the network: which clients to ask, replies to accept, rounds to count.

Nothing of a round is in the state before the round is closed, and writing the checkpoint closes the round. A
coordinator that is killed at any moment and opened again has the state of the last closed round.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.errors import InputError, whole
from fadamgc.escape import printable
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.cost import Work
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.messages import on_the_wire
from fadamgc.federation.record import BY_CLIENT, Record
from fadamgc.federation.run import Run
from fadamgc.federation.sampling import Draw
from fadamgc.federation.server import Federation, ServerState
from fadamgc.federation.sums import Sums
from fadamgc.files import as_json
from fadamgc.flower.client_evaluation import ClientEvaluation
from fadamgc.flower.config import NO_PRIVACY, ServerConfig
from fadamgc.flower.logs import log
from fadamgc.flower.members import Members
from fadamgc.flower.protocol import (
    MAX_GENERATION,
    NEVER,
    EvaluateReply,
    EvaluateRequest,
    RefusedError,
    Reply,
    Request,
    Stamp,
    TrainRequest,
    check_tensors,
    decoded,
    metric_name,
)
from fadamgc.flower.reply_checks import Norms, ReplyChecks, Scale, evaluate, norm_statistics, refusal
from fadamgc.flower.server_store import Checkpoint, ServerStore
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.task import Task
from fadamgc.tree import from_names, named_leaves

REMEMBERED_REFUSALS = 100


class Coordinator:
    """The server of a federation: the shared round, plus stamps, checks of replies and a store.

    Args:
        task: model, loss, metric and perhaps test data. Of its clients' data, if it has any, only two samples
            are used, to find out which buffers training changes: the server has no data of the clients.
        config: algorithm, settings and options. An experiment can be resumed only with the same ``app`` keys.
        folder: folder of the checkpoint.
    """

    def __init__(self, task: Task, config: ServerConfig, folder: str | Path) -> None:
        algorithm, settings, options, self.facts = config
        unbound_clients = config.unbound_clients
        self.n, self.experiment, self.min_clients = options.clients, options.experiment, options.min_clients
        refused = f"min_clients={self.min_clients} is not accepted;"
        if not 1 <= self.min_clients <= self.n:
            raise InputError(f"{refused} it must be from 1 to clients={self.n}")
        if settings.sampled is not None and self.min_clients > settings.sampled:
            raise InputError(f"{refused} a round asks only sampled={settings.sampled}")
        if algorithm.full_participation and self.min_clients < self.n:
            name = type(algorithm).__name__
            raise InputError(f"{refused} it must be {self.n}: {name} needs all clients in every round")
        if isinstance(algorithm, GroupedAlgorithm):
            raise InputError(
                f"{type(algorithm).__name__} needs clients in groups, and a Flower federation has one level: "
                "a server and its nodes; use fadamgc.simulate, or another algorithm"
            )
        if settings.privacy is not None:
            raise InputError(NO_PRIVACY)
        if settings.eval_clients == "epoch":
            raise InputError("eval_clients='epoch' is for fadamgc.simulate; use eval-clients = true")
        settings.check(self.n, [1] * self.n, algorithm.at(1))
        if settings.target is not None and task.test_samples is None:
            raise InputError(
                f"target={settings.target} without test data at the server; let the server's load return "
                "test data, or omit target"
            )
        self.functions = TaskFunctions(task, settings.dtype, computing=settings.computing)
        self.task, self.settings = task, settings
        self.federation = Federation(algorithm, self.functions, self.n, settings)
        max_samples = whole("max_samples", options.max_samples, 0) or math.inf
        max_size_ratio = options.max_size_ratio or math.inf
        self.members = Members(self.n, settings, max_samples, max_size_ratio)
        max_norm, max_norm_ratio = options.max_update_norm or math.inf, options.max_norm_ratio or math.inf
        self.checks = ReplyChecks(self.functions.module, max_norm, max_norm_ratio)
        self._up_state = example(self.algorithm, torch.zeros_like(self.functions.x0)).up
        self._up = named_leaves(self._up_state)
        self.generation = 0
        self.counted: dict[int, Stamp] = {}
        self.refusals: list[str] = []  # the last ones, for people to read
        self.store = ServerStore(folder, whole("checkpoints", options.checkpoints, 1))
        # This comes before any client is asked, so that no two starts have the same number.
        checkpoint = self.store.take_over(needed=options.restore_round < 0)
        if checkpoint is not None:
            self._restore(checkpoint)
        if options.restore_round >= 0:
            self._return_to(options.restore_round)
        elif options.reset_states:
            self._reset()
        for client in unbound_clients:
            self.members.keys.pop(client, None)
        self._write()
        self._clear_round()
        self._evaluation = ClientEvaluation((), self.checks)

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

    @property
    def sent_fields(self) -> tuple[str, ...]:
        """The names of the fields that clients send."""
        return tuple(self._up)

    # Asking clients.

    def over(self) -> bool:
        """Whether the last round or the target has been reached."""
        return self.federation.over()

    @property
    def needs_setup(self) -> bool:
        """Whether all clients have to send their gradient at the initial model before round 1."""
        return self.server is None

    @property
    def needs_all(self) -> bool:
        """Whether there can be no round before all clients have connected."""
        return self.needs_setup or (self.settings.weights == "size" and len(self.members.samples) < self.n)

    @property
    def algorithm(self) -> AnyAlgorithm:
        """The algorithm of the next round."""
        return self.federation.algorithm

    @property
    def needed(self) -> int:
        """How many clients the next round needs."""
        return self.n if self.needs_all else self.min_clients

    def ask(self, available: Iterable[int]) -> list[TrainRequest]:
        """Return the requests of the next round; in the setup, all clients are asked."""
        self.store.check()
        if len(self.members.samples) == self.n:
            self.settings.check(self.n, [self.members.samples[i] for i in range(self.n)], self.algorithm)
        self._clear_round()
        if self.needs_setup:
            everyone = tuple(range(self.n))
            t, draw, down = 0, Draw(everyone, everyone), {"x": self.functions.x0}
        else:
            t, draw = self.t + 1, self.federation.who(available)
            self.federation.open()  # refuses numbers that its codecs cannot send
            down = self.federation.message()
        algorithm = on_the_wire(self.algorithm)
        stamp, shared = Stamp(t, self.store.attempt), (algorithm, self.settings, down, self.buffers)
        for i in draw.sampled:
            request = Request(self.experiment, i, self.generation, stamp, self.counted.get(i, NEVER))
            self._asked[i] = TrainRequest(request, i in draw.tracked, *shared)
        return list(self._asked.values())

    def wanted(self, client: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return what a client's reply must contain: vectors and buffers, as tensors of the same shape.

        Vectors with a codec are those of their bytes.
        """
        asked = self._asked[client]
        if not asked.request.stamp.round:
            return {"g": self.functions.x0}, {}
        return self.federation.codecs.shapes_up(asked.only_sent(self._up)), self.buffers

    def _clear_round(self) -> None:
        self._began = time.perf_counter()
        self._asked: dict[int, TrainRequest] = {}
        self._replies: dict[int, Reply] = {}
        self._norms: dict[int, Norms] = {}  # of the replies
        self._screened = False

    # Accepting replies.

    def consider(self, client: int, reply: Reply) -> None:
        """Accept the reply to the message that was sent to this client; the state does not change yet.

        Raises:
            RefusedError: the reply is not as requested.
        """
        with self.noting_refusals():
            asked = self._asked.get(client)
            if asked is None:
                raise refusal(client, "not asked", "it was not asked in this round")
            if client in self._replies:
                raise refusal(client, "twice", "it has already answered")
            samples, t = self.members.samples.get(client), asked.request.stamp.round  # 0: the setup
            known = samples is not None and t > 0
            steps = self.settings.steps(client, samples or 0, t, self.algorithm.coin) if known else None
            norms, reply = self._checked(reply, asked, steps)
        self._replies[client], self._norms[client], self._screened = reply, norms, False

    def _checked(self, reply: Reply, asked: TrainRequest, steps: int | None) -> tuple[Norms, Reply]:
        """Return the norms of a reply and the reply as the server reads it, or refuse it."""
        client, (vectors, buffers) = asked.request.client, self.wanted(asked.request.client)
        codecs = self.federation.codecs.coded_up(asked.tracked) if asked.request.stamp.round else {}
        self.checks.check_header(reply, asked.request, steps)
        if codecs:
            owner = f"the reply of client {client} is refused: its"
            check_tensors(owner, "update", reply.up, vectors)
            reply = reply._replace(up=decoded(owner, "update", reply.up, codecs, self._up))
            vectors = asked.only_sent(self._up)
        return self.checks.check(reply, asked.request, vectors, buffers, steps), reply

    def screen(self) -> None:
        """Refuse the replies that are out of proportion to the others; call this when all have arrived."""
        if self._screened:
            return
        self._screened = True
        for i, error in self.checks.out_of_proportion(self._norms, self.federation.state).items():
            log.warning("client %d: %s", i, error)
            self.refuse(error)
            del self._replies[i], self._norms[i]

    def refuse(self, error: Exception, t: int | None = None) -> None:
        """Note a refusal in round t, by default the next one; it is saved with the next checkpoint."""
        refusals = [*self.refusals, f"round {self.t + 1 if t is None else t}: {printable(error, 500)}"]
        self.refusals = refusals[-REMEMBERED_REFUSALS:]

    @contextmanager
    def noting_refusals(self, t: int | None = None) -> Iterator[None]:
        """Note any error in a ``with`` block as a refusal in round t, by default the next one."""
        try:
            yield
        except Exception as error:
            self.refuse(error, t)
            raise

    def admit(self, client: int, samples: int) -> None:
        """Accept the size of a client's data, or refuse it; see ``Members.admit``."""
        with self.noting_refusals():
            self.members.admit(client, samples, started=bool(self.counted))

    def check_key(self, client: int, key: str) -> None:
        """Refuse a node whose key is not that of the client; see ``Members.check_key``."""
        with self.noting_refusals():
            self.members.check_key(client, key)

    # Ending a round.

    @property
    def answered(self) -> tuple[int, ...]:
        """The clients whose replies have been accepted."""
        return tuple(sorted(self._replies))

    @property
    def enough(self) -> bool:
        """Whether the round would count; a setup needs all clients."""
        return len(self._replies) >= (self.n if self.needs_setup else self.min_clients)

    def close(self) -> Record | None:
        """End the round: with all its replies if they are enough, without any if not.

        A round whose model is not finite, or has no finite test loss, does not count: the state does not
        change, and the clients discard theirs when they are asked again. A setup has no record.
        """
        self.screen()
        if self.needs_setup:
            if self.enough:
                self._close_setup()
            return None
        replies = self._replies if self.enough else {}
        sums, after = self._sum(replies)
        evaluation, flaw = evaluate(self.federation, after)
        if flaw is not None:
            evaluation_before, flaw_before = evaluate(self.federation, self.federation.state)
            if flaw_before is None or after.nonfinite() is not None:  # else the replies are not the cause
                log.warning("round %d is refused: %s; none of the replies counts", self.t + 1, flaw)
                self.refuse(RefusedError("not finite", f"{flaw}; none of the replies counts"))
                replies, evaluation = {}, evaluation_before
                sums, after = self._sum(replies)
        self._commit(after, self._record(sums, evaluation, replies), replies)
        self._clear_round()
        return self.history[-1]

    def _close_setup(self) -> None:
        replies = [self._replies[i] for i in range(self.n)]
        self.federation.weights = self.members.weights()
        try:
            self.federation.begin_with((r.up["g"] for r in replies), [r.steps for r in replies])
            self.counted = {i: asked.request.stamp for i, asked in self._asked.items()}
            self._write()
        finally:
            self._clear_round()

    def _commit(self, after: ServerState, record: Record, replies: Mapping[int, Reply]) -> None:
        """Replace the state and write the checkpoint; if writing fails, the state is as before."""
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

    def _sum(self, replies: Mapping[int, Reply]) -> tuple[Sums, ServerState]:
        """Return the sums over these replies, and the server's state after a round with them."""
        self.federation.weights = self.members.weights()
        sums = self.federation.new_sums()
        for i in sorted(replies):
            reply = replies[i]
            vectors = {n: reply.up[n] if n in reply.up else torch.zeros_like(t) for n, t in self._up.items()}
            buffers = {name: reply.buffers[name] for name in self.buffers}
            loss = torch.tensor(reply.loss, dtype=self.functions.x0.dtype)
            sums.add(i, reply.steps, from_names(self._up_state, vectors), buffers, loss)
        return sums, self.federation.aggregate(sums)

    def _record(self, sums: Sums, evaluation: Mapping[str, float], replies: Mapping[int, Reply]) -> Record:
        draw = Draw(tuple(self._asked), tuple(i for i, asked in self._asked.items() if asked.tracked))
        federation, sizes = self.federation, self.members.samples
        steps = [
            federation.work_steps(replies[i].steps, sizes.get(i, 1)) if i in replies else 0
            for i in draw.sampled
        ]
        missing = tuple(i for i in draw.sampled if i not in replies)
        seconds = time.perf_counter() - self._began
        record = federation.record(draw, sums, evaluation, steps, seconds, missing, silent=missing)
        refused = {"refused replies": float(len(self.refusals_in(self.t + 1)))}
        norms = norm_statistics([self._norms[i] for i in sorted(replies)], self.sent_fields)
        return replace(record, replies=refused | norms)

    def refusals_in(self, t: int) -> list[str]:
        """Return what was refused in round t, of the last refusals."""
        return [line for line in self.refusals if line.startswith(f"round {t}: ")]

    # Evaluation at the clients, after a round is closed.

    @property
    def awaits_evaluation(self) -> bool:
        """Whether the clients should evaluate the model: the last record is due to have their metric."""
        if not (self.settings.eval_clients and self.history and self.federation.evaluated_after(self.t)):
            return False
        return not any(name.startswith(BY_CLIENT) for name in self.history[-1].metrics)

    def ask_evaluation(self, available: Iterable[int]) -> list[EvaluateRequest]:
        """Return the requests to evaluate the model on the data of the clients that are available."""
        self.store.check()
        (server, buffers), s = self.federation.state, self.settings
        stamp, metric = Stamp(self.t, self.store.attempt), metric_name(self.task.metric)
        model = (metric, s.seed, s.computing, server.x, buffers)
        requests = [
            EvaluateRequest(self.experiment, i, self.generation, stamp, *model) for i in sorted(available)
        ]
        self._evaluation = ClientEvaluation(requests, self.checks)
        return requests

    def consider_evaluation(self, client: int, reply: EvaluateReply) -> None:
        """Accept a client's evaluation; the record does not change yet.

        Raises:
            RefusedError: the reply is not as requested.
        """
        with self.noting_refusals(self.t):
            self._evaluation.consider(client, reply)

    def close_evaluation(self) -> Record:
        """Add the clients' evaluations to the last record, and write the checkpoint.

        Without any reply, the record stays as it is.
        """
        last, evaluation = self.history[-1], self._evaluation
        self._evaluation = ClientEvaluation((), self.checks)
        trained = {i for r in self.history for i in r.sampled if i not in r.dropped and i not in r.absent}
        if not (metrics := evaluation.metrics(trained, str(self.task.goal))):
            return last
        seconds = last.wall_seconds + evaluation.seconds
        self.history[-1] = replace(last, metrics=last.metrics | metrics, wall_seconds=seconds)
        try:
            self._write()
        except BaseException:
            self.history[-1] = last
            raise
        return self.history[-1]

    def run(self) -> Run:
        """Return the run so far, as the simulator does; the clients' states are with the clients."""
        clients = ClientStates(self.n, self.algorithm.init_client(self.functions.x0))
        more = {"executor": "flower", "compiled": False, "refusals": list(self.refusals)}
        return self.federation.run(clients, more)

    # The checkpoint.

    def _identity(self) -> dict[str, Any]:
        """Return what must be equal for a checkpoint to belong to this experiment."""
        flat = self.functions.flat
        model = {
            "parameters": dict(zip(flat.names, flat.shapes, strict=True)),
            "buffers": {name: tuple(value.shape) for name, value in self.functions.buffers0.items()},
        }
        experiment = {"experiment": self.experiment, "model": model, "facts": self.facts}
        return dict(as_json(self.federation.identity() | experiment))

    def _write(self) -> None:
        federation = self.federation
        server, buffers = federation.state
        tensors = {f"buffer.{name}": value for name, value in buffers.items()}
        content = {
            "identity": self._identity(),
            "round": federation.t,
            "set_up": server is not None,
            "setup": [work.columns() for work in federation.setup],
            "history": [record.to_json() for record in federation.history],
            "generation": self.generation,
            "counted": {str(i): list(stamp) for i, stamp in self.counted.items()},
            "samples": {str(i): size for i, size in self.members.samples.items()},
            "refusals": self.refusals,
            "scales": {name: list(scale) for name, scale in self.checks.scales.items()},
            "keys": {str(i): key for i, key in self.members.keys.items()},
        }
        self.store.write(content, tensors | ({} if server is None else named_leaves(server, "server")))

    def _restore(self, checkpoint: Checkpoint) -> None:
        """Take over the state of a checkpoint."""
        content, tensors = checkpoint
        self.store.check_identity(self._identity(), content["identity"])
        federation, x0, server = self.federation, self.functions.x0, None
        if content["set_up"]:
            server = from_names(self.algorithm.init_server(x0, x0), tensors, "server")
        buffers = {name: tensors[f"buffer.{name}"] for name in self.buffers}
        federation.state, federation.t = ServerState(server, buffers), content["round"]
        setup: list[dict[str, Any]] = [{k: tuple(v) for k, v in w.items()} for w in content["setup"]]
        federation.setup = tuple(Work(**columns) for columns in setup)
        federation.history = [Record.from_json(record) for record in content["history"]]
        self.generation = content["generation"]
        self.counted = {int(i): Stamp(*stamp) for i, stamp in content["counted"].items()}
        self.members.samples = {int(i): int(size) for i, size in content["samples"].items()}
        self.refusals = list(content["refusals"])
        scales = content.get("scales", {})  # missing in the checkpoints of 0.1
        self.checks.scales = {n: Scale(largest, tuple(recent)) for n, (largest, recent) in scales.items()}
        self.members.keys = {int(i): key for i, key in content.get("keys", {}).items()}

    def _return_to(self, t: int) -> None:
        """Return to the model of round t, and reset the clients' states, which are of later rounds."""
        generation, keys, refusals = self.generation, self.members.keys, self.refusals
        self._restore(self.store.read(t))
        self.generation = max(generation, self.generation)
        self.members.keys, self.refusals = keys or self.members.keys, refusals
        self._reset()
        log.info("back at round %d; the states of all clients are reset", t)

    def _reset(self) -> None:
        """Reset the states of all clients. The model stays, as if the experiment started with it."""
        state = self.federation.state
        if self.algorithm.init_gradient and state.server is not None:
            raise InputError(
                f"{type(self.algorithm).__name__} starts from the clients' gradients at the initial model; "
                "its states cannot be reset with another model"
            )
        # The generation must grow. A server that has lost its checkpoint does not know the last generation:
        # the time in seconds is then likely larger than any generation that clients have seen.
        self.generation = max(self.generation + 1, min(int(time.time()), MAX_GENERATION // 2))
        self.counted, self.members.samples = {}, {}
        if state.server is not None:
            self.federation.state = state._replace(server=self.algorithm.init_server(state.server.x))
