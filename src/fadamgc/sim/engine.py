"""A simulation between rounds: the federation, the clients' states, an executor and a checkpoint."""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, Literal, NamedTuple

import numpy as np
import torch

from fadamgc.algorithm import AnyAlgorithm, stand_in
from fadamgc.errors import CheckpointError, InputError, NonFiniteError, listed, not_accepted, shown
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.cost import CostModel, state_bytes
from fadamgc.federation.functions import Buffers
from fadamgc.federation.group_rounds import GroupRounds
from fadamgc.federation.jobs import Job, Result
from fadamgc.federation.record import Record
from fadamgc.federation.run import Run
from fadamgc.federation.sampling import Draw
from fadamgc.federation.server import Federation, ServerState
from fadamgc.federation.settings import Settings
from fadamgc.federation.sums import all_finite
from fadamgc.federation.trained import Best, module_at
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.metrics import client_metrics
from fadamgc.runtime import memory
from fadamgc.sim.checkpoint import Checkpoint
from fadamgc.sim.executors.auto import EXECUTORS, ExecutorChoice
from fadamgc.sim.executors.base import Workload
from fadamgc.sim.executors.loop import first_nonfinite_step
from fadamgc.sim.executors.ray_actors import INNER, Ray, RayExecutor
from fadamgc.sim.file_states import FileStates, Slots
from fadamgc.sim.personal import PersonalModels
from fadamgc.sim.resources import Resources
from fadamgc.task import Task
from fadamgc.tree import leaves, map_leaves, other_types

log = logging.getLogger("fadamgc")


class RoundEnd(NamedTuple):
    """The argument of a callback after each round; later rounds change ``clients``, so copy what you keep.

    >>> import fadamgc, torch
    >>> data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(4)]
    >>> task = fadamgc.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
    >>> rounds = []
    >>> def keep(end):
    ...     rounds.append((end.record.round, end.server.x.clone()))
    >>> run = fadamgc.simulate(fadamgc.FedAvg(), task, rounds=2, callbacks=[keep])
    >>> [t for t, x in rounds], torch.equal(rounds[-1][1], run.x)
    ([1, 2], True)
    """

    record: Record
    server: Any
    clients: ClientStates
    buffers: Buffers
    task: Task

    @property
    def model(self) -> torch.nn.Module:
        """A copy of the task's module with the parameters and buffers after this round."""
        return module_at(self.task, self.server.x, self.buffers)


Callback = Callable[[RoundEnd], object]


@dataclass(frozen=True)
class Options:
    """How a run is executed, priced, watched and stored; see ``simulate`` for the meaning of each."""

    cost: CostModel | None = None
    device: str | torch.device | None = None
    executor: ExecutorChoice = "auto"
    states: Literal["auto", "memory", "files"] = "auto"
    callbacks: Sequence[Callback] = ()
    checkpoint: str | Path | None = None
    resume: bool = False
    keep: Literal["last", "best"] = "last"

    def __post_init__(self) -> None:
        if self.cost is not None and not isinstance(self.cost, CostModel):
            raise InputError(f"cost={shown(self.cost)} is not a cost model; give a fadamgc.CostModel")
        if not isinstance(self.states, str) or self.states not in ("auto", "memory", "files"):
            raise not_accepted("states", self.states, "'auto', 'memory' or 'files'")
        if not isinstance(self.keep, str) or self.keep not in ("last", "best"):
            raise not_accepted("keep", self.keep, "'last' or 'best'")
        listed_callbacks = listed(self.callbacks)
        callbacks = [self.callbacks] if listed_callbacks is None else listed_callbacks  # or a single function
        if not all(map(callable, callbacks)):
            raise InputError(f"callbacks={shown(self.callbacks)} are not functions of a RoundEnd")
        object.__setattr__(self, "callbacks", tuple(callbacks))
        check_flag("resume", self.resume)
        if self.resume and self.checkpoint is None:
            raise InputError("resume=True without checkpoint; name the folder to resume from")
        if self.checkpoint is not None and not isinstance(self.checkpoint, (str, os.PathLike)):
            raise not_accepted("checkpoint", self.checkpoint, "the path of a folder")


def check_flag(name: str, value: object) -> None:
    """Refuse a value that is neither true nor false."""
    if not isinstance(value, (bool, int, np.bool_, NoneType)):
        raise not_accepted(name, value, "True or False")


class Engine:
    """The state of a simulation between rounds, and the methods that run the next round."""

    def __init__(
        self, algorithm: AnyAlgorithm, task: Task, settings: Settings, options: Options, resources: Resources
    ) -> None:
        self.settings, self.options = settings, options
        self._task_parts = resources.task_parts(task, settings.dtype, options.device, settings.computing)
        self.functions, self.data = self._task_parts.functions, self._task_parts.clients
        functions = self.functions
        if not all(map(all_finite, (functions.x0, *functions.buffers0.values()))):
            raise InputError(
                "model has parameters or buffers that are not finite before round 1; initialise it"
            )
        self.federation = Federation(algorithm, functions, len(self.data), settings, options.cost)
        self.federation.weights = settings.weight_of(self.data.size)
        self.workload = Workload.of(functions, self.data, self.federation.scheduled, settings)
        self._in_memory = options.states == "memory" or (options.states == "auto" and self._fits_memory())
        self.checkpoint = None if options.checkpoint is None else Checkpoint(Path(options.checkpoint))
        self._saved_round = -1
        self.best: Best | None = None
        self._draw, self._steps = Draw((), ()), list[int]()  # of the current round
        self._silent: tuple[int, ...] = ()  # clients that do not answer in the current round
        self._absent: tuple[int, ...] = ()  # the silent clients, and the clients that miss the deadline
        self._staged: dict[int, Any] = {}  # the clients' new states, until the end of the round
        self._group_rounds: GroupRounds | None = None  # of the current round
        self._personal: PersonalModels | None = None  # to evaluate single clients
        try:
            self._open(resources)
        except BaseException:
            self.close()
            raise

    # The state before the first round, or that of the checkpoint.

    def _open(self, resources: Resources) -> None:
        saved, compiled, executor = None, None, self.options.executor
        if self.checkpoint is not None:
            resume = bool(self.options.resume)
            saved = self.checkpoint.resume(resume, self.identity(), self.federation.method, self.settings)
        if saved is not None:
            self._resume(saved)
            before = saved.settings.get("inner") or saved.settings["executor"]
            if executor == "auto" and before in EXECUTORS:
                executor = before  # another executor might differ in the last bit
            elif executor == "ray" or isinstance(executor, Ray):
                executor = _same_inner(executor, before)
            compiled = saved.settings.get("compiled")  # other compiled code might differ as well
        else:
            self.clients = self._client_states(self.algorithm.init_client(self.functions.x0))
            if self.algorithm.init_gradient:
                passes = [self.settings.passes(int(size)) for size in self.data.size]
                self.federation.begin_with(self._first_gradients(), passes)
        self.executor = resources.executor(executor, self.workload, compiled)
        if self.settings.eval_clients:
            self._personal = PersonalModels(self.federation, self.data, self.executor)
        if callable(self.federation.task.metric):  # a failing metric should fail before the first round
            server, buffers = self.federation.state
            self.functions.evaluate(server.x, buffers, self.settings.seed, 0)

    def _first_gradients(self) -> Iterator[torch.Tensor]:
        """Yield every client's gradient at the initial model, and set the client's state from it."""
        f, algo = self.functions, self.algorithm
        for i in range(len(self.data)):
            g = f.whole_gradient(f.x0, f.buffers0, i, self.data[i], self.settings.seed, 0)
            g = self.settings.gradients.adjust(f.x0, g)
            if not all_finite(g):
                message = f"the gradient of client {i} at the initial model is not finite; look at its data"
                raise NonFiniteError(None, 0, None, message)
            self.clients.update({i: self.clients.stage(algo.init_client(f.x0, g))})
            yield g

    def _resume(self, saved: Run) -> None:
        """Take over the state of a saved run."""
        device, clients, federation = self.functions.device, saved.clients, self.federation
        x0, algo = self.functions.x0, self.algorithm
        server, initial = _to(saved.server, device), _to(clients.initial, device)
        g = x0 if algo.init_gradient else None
        servers, initials = (server, algo.init_server(x0, g)), (initial, algo.init_client(x0, g))
        for owner, pair in {"server": servers, "client": initials}.items():
            for name, tensor, other in other_types(*pair):
                raise CheckpointError(
                    f"the checkpoint has a {owner}'s {name} of {tensor.dtype} {tuple(tensor.shape)}, "
                    f"this version {other.dtype} {tuple(other.shape)}; start again in another folder"
                )
        if clients.n != len(self.data):
            raise CheckpointError(f"the checkpoint has n={clients.n} clients, the task has {len(self.data)}")
        if isinstance(clients, FileStates) and not self._in_memory:
            clients.initial = clients.slots.like = initial
            self.clients = clients
        else:
            self.clients = self._client_states(initial)
            for i in clients.participants:
                self.clients.update({i: self.clients.stage(_to(clients[i], device))})
            self.clients.changed = set(clients.changed)
        self.best = saved.best if self.options.keep == "best" else None
        federation.state = ServerState(server, {n: v.to(device) for n, v in saved.buffers.items()})
        federation.history = saved.reprice(federation.cost).history
        federation.t = self._saved_round = len(saved.history)

    def _fits_memory(self) -> bool:
        """Whether the clients' states would take at most half of the memory."""
        load, algo, n = self.workload, self.algorithm, len(self.data)
        x = stand_in(self.functions.flat.d, self.functions.x0.dtype)
        participants = n if algo.init_gradient else min(n, load.rounds * load.sampled)
        needed, available = participants * state_bytes(algo.init_client(x)), memory(self.functions.device)
        if available is None or needed <= available / 2:
            return True
        log.info("states auto: files, because the states of %d clients would not fit in memory", participants)
        return False

    def _client_states(self, initial: Any) -> ClientStates:
        if self._in_memory:
            return ClientStates(len(self.data), initial)
        slots = Slots(initial) if self.checkpoint is None else self.checkpoint.open_slots(initial)
        return FileStates(len(self.data), initial, slots)

    # A round.

    @property
    def t(self) -> int:
        """Number of the last round that is done."""
        return self.federation.t

    @property
    def algorithm(self) -> AnyAlgorithm:
        """The algorithm of the next round."""
        return self.federation.algorithm

    def over(self) -> bool:
        """Whether the last round or the target has been reached."""
        return self.federation.over()

    def stops_after(self, end: RoundEnd) -> bool:
        """Call all callbacks, and return whether one of them ends the run."""
        answers = [callback(end) for callback in self.options.callbacks]
        return any(isinstance(answer, (bool, np.bool_)) and bool(answer) for answer in answers)

    def begin(self) -> list[Job]:
        """Return the jobs of the next round; with groups, those of the next group round."""
        draw, s, t = self.federation.who(), self.settings, self.t + 1
        if self._group_rounds is None:
            self._began = time.perf_counter()
            if t < s.rounds and isinstance(self.clients, FileStates):
                self.clients.expect(s.who(t + 1, len(self.data)).sampled)
            if isinstance(self.algorithm, GroupedAlgorithm):
                self._group_rounds = self.federation.open_groups()
        if self._group_rounds is None:
            rounds = dict.fromkeys(draw.sampled, self.federation.open())
        else:
            rounds = self._group_rounds.open()
        tracked, coin = set(draw.tracked), self.algorithm.coin
        jobs = []
        for i in draw.sampled:
            data, round, load = self.data[i], rounds[i], partial(self._state_of, i)
            if s.local_parameters is not None:
                state = load()
                round, load = self.federation.at_client(round, state), partial(_same, state)
            batches = s.batches(round.t, i, data.size, coin)
            jobs.append(Job(round, i, data, load, i in tracked, batches))
        self._draw, self._steps = draw, list(map(self._work_steps, jobs))
        self._silent = s.silent(t, draw.sampled)
        absent = {*self._silent, *self.federation.late(draw, self._steps)}
        self._absent = tuple(i for i in draw.sampled if i in absent)
        return [job for job in jobs if job.client not in absent]

    def _work_steps(self, job: Job) -> int:
        return self.federation.work_steps(job.batches.steps, job.data.size)

    def _state_of(self, client: int) -> Any:
        """Return the state of a client, after the group rounds that are done."""
        if client in self._staged:
            return self.clients.staged_state(self._staged[client])
        return self.clients[client]

    def end(self, jobs: Sequence[Job], results: Iterable[Result]) -> RoundEnd | None:
        """Process the results of the jobs; return None if more group rounds of this round follow.

        After an error, the state is as it was before the round.
        """
        try:
            conclusion = self._conclude(jobs, results)
        except BaseException:
            self.clients.discard(self._staged.values())
            self._staged, self._group_rounds = {}, None
            raise
        if conclusion is None:
            return None
        state, record = conclusion
        self.clients.update(self._staged)
        self._staged, self._group_rounds = {}, None
        self.federation.commit(state, record)
        self._keep_best(state, record)
        if self.t % self.settings.checkpoint_every == 0:
            self.write()
        return RoundEnd(record, state.server, self.clients, state.buffers, self.federation.task)

    def _keep_best(self, state: ServerState, record: Record) -> None:
        """Keep a copy of the model if its metric is better than that of all earlier rounds."""
        value, task = record.test_metric, self.federation.task
        if self.options.keep != "best" or value is None or not math.isfinite(value):
            return
        if self.best is None or (value != self.best.metric and task.reached(value, self.best.metric)):
            buffers = {name: buffer.clone() for name, buffer in state.buffers.items()}
            self.best = Best(record.round, value, state.server.x.clone(), buffers)

    def _conclude(self, jobs: Sequence[Job], results: Iterable[Result]) -> tuple[ServerState, Record] | None:
        """Return the server after the round and its record; None after a group round that is not the last.

        The clients' new states are staged.
        """
        federation, t = self.federation, self.t + 1
        group_rounds = self._group_rounds
        total = federation.new_sums()
        sums_of = {id(job.round): federation.new_sums() if group_rounds else total for job in jobs}
        dropped: list[int] = []
        for result in _in_order(results, jobs):
            job = result.job
            if finite := _is_finite(result):
                result = federation.from_client(result)
                finite = not federation.codecs.up or _is_finite(result)  # float64 may exceed a codec
            if not finite:
                if self.settings.on_nonfinite == "error":
                    raise NonFiniteError(job.client, t, first_nonfinite_step(job), "update")
                dropped.append(job.client)
                continue
            sums = sums_of[id(job.round)]
            sums.add(job.client, job.batches.steps, result.up, result.buffers, result.loss)
            staged = self.clients.stage(result.state)
            if job.client in self._staged:
                self.clients.discard([self._staged[job.client]])
            self._staged[job.client] = staged
        self._check_left(t, jobs, dropped)
        draw, work = self._draw, None
        steps = [0 if i in self._silent else k for i, k in zip(draw.sampled, self._steps, strict=True)]
        if group_rounds is None:
            sums = total
            after = federation.aggregate(sums)
        else:
            in_order = [sums_of[id(round)] for round in group_rounds.rounds]
            group_rounds.close(in_order, federation.traffic.work(draw, steps))
            if group_rounds.done < group_rounds.count:
                return None
            server, buffers, sums = group_rounds.end(in_order)
            after, work = ServerState(server, buffers), group_rounds.work
        if (name := after.nonfinite()) is not None:
            message = (
                f"the server's {name} is not finite after round {t}, although all updates were; "
                "lower eta_g or eta_l"
            )
            raise NonFiniteError(None, t, None, message)
        evaluation = federation.evaluate(after)
        if self.settings.eval_clients and federation.is_evaluated:
            named = evaluation.get("metrics", {}) | self._client_metrics(after)
            evaluation = evaluation | {"metrics": named}
        seconds = time.perf_counter() - self._began
        absences = {"silent": self._silent, "absent": self._absent}
        return after, federation.record(
            draw, sums, evaluation, steps, seconds, dropped, **absences, work=work
        )

    def _client_metrics(self, state: ServerState) -> dict[str, float]:
        """Return how the metric on the clients' data is distributed after this round."""
        tests, s, personal = self._task_parts.client_tests, self.settings, self._personal
        assert personal is not None
        task = self.federation.task
        models = None if s.local_parameters is None else personal.before(state, self._state_of)
        where = (state.server.x, state.buffers, tests, s.seed, self.t + 1)
        values = self.functions.evaluate_clients(*where, models)[task.evaluated]
        records = [(r.sampled, r.absent) for r in self.federation.history]
        records.append((self._draw.sampled, self._absent))
        trained = {i for sampled, absent in records for i in sampled if i not in absent}
        seen = [position for position, i in enumerate(task.evaluated) if i in trained]
        goal = str(task.goal)
        named = client_metrics(values, seen, goal)
        if s.eval_clients == "epoch":
            models = personal.after_epoch(state, self._state_of)
            values = self.functions.evaluate_clients(*where, models)[task.evaluated]
            after = client_metrics(values, seen, goal)
            named |= {f"{name} after an epoch": value for name, value in after.items()}
        return named

    def _check_left(self, t: int, jobs: Sequence[Job], dropped: Sequence[int]) -> None:
        """Refuse to continue if no update is left and more than half of all clients have been dropped.

        Only clients that were dropped since the last round with a finite update count. If they are more than
        half of all clients, the model has diverged, not just a single client.
        """
        if len(dropped) < len(jobs) or not jobs:
            return
        gone, n = set(dropped), len(self.data)
        for record in reversed(self.federation.history):
            if len(record.dropped) < len(record.sampled) - len(record.absent):
                break
            gone.update(record.dropped)
        log.warning("round %d: no update was finite; all %d clients were dropped", t, len(jobs))
        if 2 * len(gone) > n:
            message = (
                f"no client is left in round {t}: since the last finite update, those of {len(gone)} of "
                f"{n} clients were not finite and were dropped; lower eta_l or eta_g"
            )
            raise NonFiniteError(None, t, None, message)

    # The run so far.

    def identity(self) -> dict[str, Any]:
        """Return the values that must be equal for one run to continue another."""
        if self.checkpoint is None:
            return self.federation.identity()
        return self.federation.identity() | {"fingerprint": self._task_parts.fingerprint}

    def result(self) -> Run:
        """Return the run so far."""
        compiled = bool(getattr(self.executor, "compiled", False))
        described = {"executor": self.executor.name, "compiled": compiled}
        if isinstance(self.executor, RayExecutor):
            described["inner"] = self.executor.inner
        run = self.federation.run(self.clients, self.identity() | described)
        run.best = self.best
        return run

    def write(self) -> None:
        """Write a checkpoint, if there is a folder for it and the last one is older than this round."""
        if self.checkpoint is not None and self._saved_round != self.t:
            self.checkpoint.write(self.result())
            self._saved_round = self.t

    def close(self) -> None:
        """Unlock the checkpoint folder; the run so far can still be read."""
        if self.checkpoint is not None:
            self.checkpoint.close()


def _in_order(results: Iterable[Result], jobs: Sequence[Job]) -> Iterator[Result]:
    """Yield results in the order of the jobs, so that sums do not depend on which job ended first."""
    early: dict[int, Result] = {}
    position = 0
    for result in results:
        early[id(result.job)] = result
        while position < len(jobs) and id(jobs[position]) in early:
            yield early.pop(id(jobs[position]))
            position += 1


def _is_finite(result: Result) -> bool:
    """Whether a client's new state, its message and its buffers are finite."""
    unchecked = [] if result.finite else [*leaves(result.up), *leaves(result.state)]
    tensors = [*unchecked, *result.buffers.values()]
    if tensors and tensors[0].device.type != "cpu":  # wait for the device once, not for every tensor
        sums = torch.stack([tensor.sum().float() for tensor in tensors])
        if bool(sums.isfinite().all()):
            return True
    return all(map(all_finite, tensors))


def _same(value: Any) -> Any:
    return value


def _same_inner(executor: str | Ray, before: str) -> Ray:
    """Let actors use the executor of the saved run, unless ``executor`` names another one."""
    ray = executor if isinstance(executor, Ray) else Ray()
    return replace(ray, inner=before) if ray.inner == "auto" and before in INNER else ray


def _to(state: Any, device: torch.device) -> Any:
    return map_leaves(lambda tensor: tensor.to(device, copy=True), state)
