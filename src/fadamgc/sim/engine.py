"""The only loop over rounds."""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from operator import index
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
import torch

from fadamgc.algorithm import Algorithm, AnyAlgorithm, stand_in
from fadamgc.errors import CheckpointError, InputError, NonFiniteError, listed, shown
from fadamgc.federation.client_states import ClientStates, FileStates, Slots, too_large
from fadamgc.federation.cost import CostModel, Work, traffic
from fadamgc.federation.problem import Buffers, Problem
from fadamgc.federation.run import Record, Run, environment
from fadamgc.federation.sampling import Draw, batches
from fadamgc.federation.settings import Settings
from fadamgc.federation.sums import Sums, all_finite, finite, in_order
from fadamgc.methods import algorithm_name
from fadamgc.sim.checkpoint import Checkpoint
from fadamgc.sim.executors import EXECUTORS, Executor, ExecutorChoice, Job, Plan, Result, Round, make_executor
from fadamgc.sim.executors.loop import first_nonfinite_step
from fadamgc.sim.progress import progress_bar
from fadamgc.task import Task

log = logging.getLogger("fadamgc")


class RoundEnd(NamedTuple):
    """What a callback sees after each round; ``clients`` is live, so copy what is to be kept."""

    record: Record
    server: Any
    clients: ClientStates
    buffers: Buffers


Callback = Callable[[RoundEnd], object]


def simulate(
    algorithm: AnyAlgorithm,
    task: Task,
    rounds: int | None = None,
    sampled: int | None = None,
    tracked: int | None = None,
    local_steps: int | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    *,
    local_epochs: int | None = None,
    schedule: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
    weights: Literal["uniform", "size"] | Sequence[float] = "uniform",
    eval_every: int = 1,
    target: float | None = None,
    on_nonfinite: Literal["error", "drop"] = "error",
    cost: CostModel | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    executor: ExecutorChoice = "auto",
    states: Literal["auto", "memory", "files"] = "auto",
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 1,
    resume: bool = False,
) -> Run:
    """Run a federated algorithm on a task, on this machine. The task is left as it was.

    Args:
        algorithm: what to run, e.g. ``fadamgc.FAdamGC(eta_l=1e-3)``.
        task: what to learn.
        rounds: global rounds; None is the length of the schedule.
        sampled: clients drawn in each round; None is all.
        tracked: how many of those send tracking updates; None is all of them.
        local_steps: local steps K of every client in a round (default 10 unless ``local_epochs``).
        batch_size: samples in a mini-batch; None is a client's whole data in every step.
        seed: of everything random; the same seed gives the same result, bit for bit.
        local_epochs: passes over the client's data, instead of ``local_steps``; K then differs.
        schedule: who takes part, ``[([sampled ids], [tracked ids]), ...]``, instead of a draw.
        weights: "uniform", "size" (a client counts as its share of the data), or one number per client.
            A weighted run minimises the weighted mean of the clients' losses, and y is the weighted
            mean of the y_i.
        eval_every: evaluate after every so many rounds, and after the last.
        target: stop as soon as the metric reaches it.
        on_nonfinite: "error", or "drop" to skip a client whose update is not finite; its state stays as it
            was and the record names it. A NonFiniteError ends the run in both cases if the server's state is
            not finite, and with "drop" if more than half of all clients were dropped and none was left.
        cost: how rounds are priced; a finished run can be priced again.
        dtype: of model and data; None is the model's. With a 16-bit type, gradients are computed in that
            type, and x, the clients' states and all that is sent and added are float32.
        device: where to compute; None is the model's.
        executor: "loop" (one client at a time: the reference), "threads" (one thread per client),
            "vectorized" (a block of clients at once, compiled in long runs), or "auto" (the fastest of
            them by a rule and, in long runs, by timing; ``run.settings["executor"]`` says which).
        states: where the clients' states are between rounds: "memory", "files" (in the checkpoint's
            folder, or in a temporary file), or "auto" (files if they would take over half of the memory).
        progress: show a progress bar, where there is a terminal to show it on.
        callbacks: functions of a RoundEnd, called after each round; one that returns True ends the run.
        checkpoint: a folder for the state of the run; it is locked until the run ends, and a second run
            gets a CheckpointInUseError.
        checkpoint_every: rounds between two checkpoints; the last round always has one.
        resume: resume from the checkpoint if there is one; start from round 1 if there is none.

    Returns:
        The run: ``run.x``, ``run.history``, ``run.rounds_to(0.9)`` and so on.

    Example:
        >>> import fadamgc, torch
        >>> data = [(torch.randn(8, 3), torch.randint(2, (8,))) for _ in range(4)]
        >>> task = fadamgc.Task(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, data)
        >>> run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=3, sampled=2, local_steps=5)
        >>> len(run.history)
        3
    """
    arguments = dict(locals())
    with torch.inference_mode(False), ExitStack() as stack:
        engine, hooks = prepare(**arguments)
        stack.callback(engine.close)
        label = f"{algorithm.title} on {task.name}"
        with progress_bar(progress, label, engine.settings.rounds, engine.t) as advance:
            while not engine.over():
                jobs = engine.begin()
                end = engine.end(jobs, engine.executor.run(jobs))
                advance(end.record)
                if stops(hooks, end):
                    break
        engine.write()
        return engine.result()


Hooks: TypeAlias = list[Callback]


def prepare(*arguments: Any, make: Makers | None = None, **named: Any) -> tuple[Engine, Hooks]:
    """What ``simulate`` starts from, checked, given its arguments: the engine before its first round, and
    the callbacks."""
    given = inspect.signature(simulate).bind(*arguments, **named)
    given.apply_defaults()
    a = SimpleNamespace(**given.arguments)
    if not isinstance(a.algorithm, Algorithm):
        raise InputError(
            f"algorithm={shown(a.algorithm)} is not an algorithm; give one such as fadamgc.FAdamGC()"
        )
    if not isinstance(a.task, Task):
        raise InputError(f"task={type(a.task).__name__} is not a task; give a fadamgc.Task")
    if a.cost is not None and not isinstance(a.cost, CostModel):
        raise InputError(f"cost={shown(a.cost)} is not a cost model; give a fadamgc.CostModel")
    hooks = [a.callbacks] if (several := listed(a.callbacks)) is None else several
    if not all(map(callable, hooks)):
        raise InputError(f"callbacks={shown(a.callbacks)} are not functions of a RoundEnd")
    if a.target is not None and a.task.test is None:
        raise InputError(f"target={shown(a.target)} without test data; give the task a test set")
    for name in ("resume", "progress"):
        if not isinstance(getattr(a, name), (bool, int, np.bool_, NoneType)):
            raise InputError(f"{name}={shown(getattr(a, name))} is not accepted; it must be True or False")
    if a.resume and a.checkpoint is None:
        raise InputError("resume=True without checkpoint; say which folder to go on from")
    draws = None if a.schedule is None else _draws(a.schedule)
    weights: Any = a.weights if isinstance(a.weights, str) else _numbers("weights", a.weights)
    if a.rounds is None and draws is None:
        raise InputError("rounds=None; say how many rounds to run")
    settings = Settings(
        rounds=len(draws or ()) if a.rounds is None else a.rounds,
        sampled=a.sampled,
        tracked=a.tracked,
        local_steps=10 if a.local_steps is None and a.local_epochs is None else a.local_steps,
        local_epochs=a.local_epochs,
        batch_size=a.batch_size,
        seed=a.seed,
        schedule=draws,
        weights=weights,
        eval_every=a.eval_every,
        target=a.target,
        on_nonfinite=a.on_nonfinite,
        checkpoint_every=a.checkpoint_every,
        dtype=a.dtype,
    )
    settings.check(a.task.n, [len(x) for x, _ in a.task.pairs], a.algorithm)
    cost = a.cost or CostModel()
    cost.check(a.task.n)
    if a.checkpoint is not None and not isinstance(a.checkpoint, (str, os.PathLike)):
        raise InputError(f"checkpoint={shown(a.checkpoint)} is not accepted; it must be the path of a folder")
    store = None if a.checkpoint is None else Path(a.checkpoint)
    engine = Engine(
        a.algorithm,
        a.task,
        settings,
        cost,
        a.device,
        a.executor,
        store,
        bool(a.resume),
        a.states,
        make or Makers(),
    )
    return engine, hooks


def stops(hooks: Hooks, end: RoundEnd) -> bool:
    """Call all callbacks, and tell whether one of them wants the run to end."""
    answers = [hook(end) for hook in hooks]
    return any(isinstance(answer, (bool, np.bool_)) and bool(answer) for answer in answers)


class Makers(NamedTuple):
    """Where an engine gets its problem and its executor from; several engines may share them."""

    problem: Callable[[Task, torch.dtype | None, str | torch.device | None], Problem] = Problem
    executor: Callable[[ExecutorChoice, Problem, Plan, bool | None], Executor] = make_executor


class Engine:
    """The state of a simulation between rounds, and how it goes from one round to the next."""

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        task: Task,
        settings: Settings,
        cost: CostModel,
        device: str | torch.device | None,
        executor: ExecutorChoice,
        store: Path | None,
        resume: bool,
        states: str,
        make: Makers,
    ) -> None:
        self.algorithm, self.task, self.settings, self.cost = algorithm, task, settings, cost
        self.checkpoint: Checkpoint | None = None
        self.stored = -1  # the round of the last checkpoint
        self.problem = make.problem(task, settings.dtype, device)
        self.weights = settings.weight_of(self.problem.size)
        self.traffic = traffic(algorithm, self.problem.flat.d, self.problem.x0.dtype, self.problem.buffers0)
        if not all(map(all_finite, (self.problem.x0, *self.problem.buffers0.values()))):
            raise InputError(
                "model has parameters or buffers that are not finite before round 1; initialise it"
            )
        self.t = 0
        self.history: list[Record] = []
        self.buffers = self.problem.buffers0
        self.setup: tuple[Work, ...] = ()
        self.states = self._where(states)
        if store is not None:
            self.checkpoint = Checkpoint(store)
        try:
            self._open(resume, executor, make)
        except BaseException:
            self.close()
            raise

    def _open(self, resume: bool, executor: ExecutorChoice, make: Makers) -> None:
        """The state before the next round, from the checkpoint if there is one."""
        saved, compiled = None, None
        if self.checkpoint is not None:
            saved = self.checkpoint.resume(resume, self.identity(), self.algorithm, self.settings)
        if saved is not None:
            self._resume(saved)
            if executor == "auto" and saved.settings["executor"] in EXECUTORS:
                executor = saved.settings["executor"]  # another might differ in the last bit
            compiled = saved.settings.get("compiled")  # so might this one
        else:
            self._start()
        self.executor = make.executor(executor, self.problem, self.plan(), compiled)
        if callable(self.task.metric):
            self.problem.evaluate(self.server.x, self.buffers, self.settings.seed, 0)  # or fail now

    def close(self) -> None:
        """Unlock the checkpoint folder; the run so far can still be read."""
        if self.checkpoint is not None:
            self.checkpoint.close()

    def plan(self) -> Plan:
        """How large the run is."""
        s, size = self.settings, self.problem.size
        largest = int(size.max())
        batch = largest if s.batch_size is None else min(s.batch_size, largest)
        rest = s.local_epochs is not None and s.batch_size is not None and bool((size % batch).any())
        return Plan(
            algorithm=self.algorithm,
            rounds=s.rounds,
            sampled=len(s.who(1, self.problem.n).sampled) if s.rounds else 1,
            steps=s.steps(largest),
            batch=batch,
            ragged=rest or bool((size < batch).any()),
            whole=s.batch_size is None,
        )

    def _resume(self, saved: Run) -> None:
        """Start where another run was."""
        device, clients = self.problem.device, saved.clients
        self.server = _to(saved.server, device)
        g = self.problem.x0 if self.algorithm.init_gradient else None
        expected = {
            "server": (self.server, self.algorithm.init_server(self.problem.x0, g)),
            "client": (clients.initial, self.algorithm.init_client(self.problem.x0, g)),
        }
        for whose, (states, likes) in expected.items():
            for name, state, like in zip(likes._fields, states, likes, strict=True):
                if (state.dtype, state.shape) != (like.dtype, like.shape):
                    raise CheckpointError(
                        f"the checkpoint has a {whose}'s {name} of {state.dtype} {tuple(state.shape)}, this "
                        f"version keeps {like.dtype} {tuple(like.shape)}; start again in another folder"
                    )
        if clients.n != self.problem.n:
            raise CheckpointError(f"the checkpoint has n={clients.n} clients, the task has {self.problem.n}")
        if isinstance(clients, FileStates):
            clients.initial = clients.slots.like = _to(clients.initial, device)
            self.clients = clients.in_memory() if self.states == "memory" else clients
        else:  # of the first format, which had all states in one file of tensors
            states = {i: _to(clients[i], device) for i in clients.participants}
            self.clients = self._client_states(_to(clients.initial, device), states)
        self.buffers = {name: value.to(device) for name, value in saved.buffers.items()}
        self.history = saved.reprice(self.cost).history
        self.t = self.stored = len(saved.history)

    def _start(self) -> None:
        """Server and clients before round 1."""
        algo, problem, n = self.algorithm, self.problem, self.problem.n
        if not algo.init_gradient:
            self.server = algo.init_server(problem.x0)
            self.clients = self._client_states(algo.init_client(problem.x0))
            return
        total = torch.zeros_like(problem.x0)
        self.clients = self._client_states(algo.init_client(problem.x0))
        for i in range(n):
            g = problem.whole_gradient(problem.x0, self.buffers, i, self.settings.seed, 0)
            if not all_finite(g):
                message = f"the gradient of client {i} at the initial model is not finite; look at its data"
                raise NonFiniteError(None, 0, None, message)
            self.clients.update({i: self.clients.stage(algo.init_client(problem.x0, g))})
            total = total + (g if self.weights is None else g * self.weights[i])
        self.server = algo.init_server(problem.x0, total / n)
        vector = problem.x0.numel() * problem.x0.element_size()
        beside = sum(b.numel() * b.element_size() for b in problem.buffers0.values())
        passes = tuple(map(self._pass, range(n)))
        self.setup = (Work(tuple(range(n)), passes, (vector + beside,) * n, (vector,) * n),)

    def _where(self, states: str) -> str:
        """Where the clients' states are to be."""
        if not isinstance(states, str) or states not in ("auto", "memory", "files"):
            raise InputError(
                f"states={shown(states)} is not accepted; it must be 'auto', 'memory' or 'files'"
            )
        if states != "auto":
            return states
        plan, algo, x = self.plan(), self.algorithm, stand_in(self.problem.flat.d, self.problem.x0.dtype)
        most = self.problem.n if algo.init_gradient else min(self.problem.n, plan.rounds * plan.sampled)
        if not too_large(algo.init_client(x), most):
            return "memory"
        log.info("states auto: files, because the states of %d clients would not fit in memory", most)
        return "files"

    def _client_states(self, initial: Any, states: Mapping[int, Any] | None = None) -> ClientStates:
        if self.states == "memory":
            return ClientStates(self.problem.n, initial, states)
        slots = Slots(initial) if self.checkpoint is None else self.checkpoint.new_slots(initial)
        made = FileStates(self.problem.n, initial, slots)
        for i, state in (states or {}).items():
            made.update({i: made.stage(state)})
        return made

    def _pass(self, client: int) -> int:
        """How many steps one pass over a client's data costs."""
        return self.settings.passes(int(self.problem.size[client]))

    def over(self) -> bool:
        """Whether the last round or the target has been reached."""
        return self.t >= self.settings.rounds or self._at_target()

    def _at_target(self) -> bool:
        value = self.history[-1].test_metric if self.history else None
        target = self.settings.target
        return target is not None and value is not None and self.task.reached(value, target)

    def begin(self) -> list[Job]:
        """The jobs of the next round."""
        self._began = time.perf_counter()
        t, settings, problem, algo = self.t + 1, self.settings, self.problem, self.algorithm
        who = settings.who(t, problem.n)
        tracked = set(who.tracked)
        if t < settings.rounds and isinstance(self.clients, FileStates):
            self.clients.expect(settings.who(t + 1, problem.n).sampled)
        round = Round(problem, algo, settings.seed, t, algo.broadcast(self.server), self.buffers)
        return [self._job(round, i, i in tracked) for i in who.sampled]

    def end(self, jobs: Sequence[Job], results: Iterable[Result]) -> RoundEnd:
        """Take in what came of the jobs. If that fails, the state is that before the round."""
        staged: dict[int, Any] = {}
        try:
            record = self._end(jobs, results, staged)
        except BaseException:
            self.clients.drop(staged.values())
            raise
        self.clients.update(staged)
        self.history.append(record)
        if self.t % self.settings.checkpoint_every == 0:
            self.write()
        return RoundEnd(record, self.server, self.clients, self.buffers)

    def _end(self, jobs: Sequence[Job], results: Iterable[Result], staged: dict[int, Any]) -> Record:
        t, settings, problem, algo = self.t + 1, self.settings, self.problem, self.algorithm
        sums = Sums(self.weights)
        dropped: list[int] = []
        for result in in_order(results, jobs):
            job = result.job
            if not finite(result):
                if settings.on_nonfinite == "error":
                    raise NonFiniteError(job.client, t, first_nonfinite_step(job), "update")
                dropped.append(job.client)
                continue
            sums.add(job.client, job.batches.steps, result.up, result.buffers, result.loss)
            staged[job.client] = self.clients.stage(result.state)
        self._check_left(t, jobs, dropped)
        server = sums.aggregate(algo, self.server, problem.n, t)
        buffers = sums.mean_buffers(self.buffers)
        self._check_server(t, server, buffers)
        evaluation: dict[str, float] = {}
        if t % settings.eval_every == 0 or t == settings.rounds:
            evaluation = problem.evaluate(server.x, buffers, settings.seed, t)
        who = Draw(tuple(job.client for job in jobs), tuple(job.client for job in jobs if job.tracked))
        work = self._work(t, who, jobs)
        record = Record.of(
            *(t, evaluation, work, self.cost),
            train_loss=sums.mean_loss(),
            wall_seconds=time.perf_counter() - self._began,
            sampled=who.sampled,
            tracked=who.tracked,
            dropped=tuple(dropped),
        )
        self.server, self.buffers, self.t = server, buffers, t
        return record

    def _check_left(self, t: int, jobs: Sequence[Job], dropped: Sequence[int]) -> None:
        """Refuse to continue if no update is left and more than half of all clients have been dropped.

        Rounds count since the last one with a finite update. So many clients at once show that the model has
        diverged, and not a client.
        """
        if len(dropped) < len(jobs):
            return
        gone = set(dropped)
        for record in reversed(self.history):
            if len(record.dropped) < len(record.sampled):
                break
            gone.update(record.dropped)
        log.warning("round %d: no update was finite; all %d clients were dropped", t, len(jobs))
        if 2 * len(gone) > self.problem.n:
            raise NonFiniteError(
                None,
                t,
                None,
                f"no client is left in round {t}: since the last finite update, those of {len(gone)} of "
                f"{self.problem.n} clients were not finite and were dropped; lower eta_l or eta_g",
            )

    def _check_server(self, t: int, server: Any, buffers: Buffers) -> None:
        """Refuse a server that is not finite although every update was."""
        named = {**server._asdict(), **buffers}
        bad = [name for name, tensor in named.items() if not all_finite(tensor)]
        if bad:
            raise NonFiniteError(
                None,
                t,
                None,
                f"the server's {bad[0]} is not finite after round {t}, although all updates were; "
                "lower eta_g or eta_l",
            )

    def _job(self, round: Round, client: int, tracked: bool) -> Job:
        s = self.settings
        size = int(self.problem.size[client])
        chosen = batches(s.seed, round.t, client, size, s.batch_size, s.local_steps, s.local_epochs)
        return Job(round, client, self.clients, tracked, chosen)

    def _work(self, t: int, who: Draw, jobs: Sequence[Job]) -> tuple[Work, ...]:
        extra = self.algorithm.round_gradient
        steps = [job.batches.steps + (self._pass(job.client) if extra else 0) for job in jobs]
        return (*(self.setup if t == 1 else ()), self.traffic.work(who.sampled, who.tracked, steps))

    def identity(self) -> dict[str, Any]:
        """What must be equal for one run to be the continuation of another."""
        return {
            "algorithm": algorithm_name(self.algorithm),
            "hyperparameters": dataclasses.asdict(self.algorithm),
            "clients": self.problem.n,
            "dtype": str(self.problem.dtype).removeprefix("torch."),
            **self.settings.to_json(),
            **({} if self.checkpoint is None else {"fingerprint": self.problem.fingerprint}),
        }

    def result(self) -> Run:
        """The run so far."""
        settings = self.identity() | {
            "rounds": self.settings.rounds,
            "target": self.settings.target,
            "task": self.task.name,
            "executor": self.executor.name,
            "compiled": bool(getattr(self.executor, "compiled", False)),
        }
        return Run(
            algorithm=self.algorithm,
            server=self.server,
            clients=self.clients,
            buffers=self.buffers,
            history=list(self.history),
            settings=settings,
            environment=environment(),
            cost=self.cost,
            task=self.task,
            goal=str(self.task.goal),
        )

    def write(self) -> None:
        """Write a checkpoint, if there is a folder for it and something new to write."""
        if self.checkpoint is not None and self.stored != self.t:
            self.checkpoint.write(self.result())
            self.stored = self.t


def _draws(schedule: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Draw, ...]:
    draws = []
    if (entries := listed(schedule)) is None:
        raise InputError(f"schedule={shown(schedule)} is not a list of pairs ([sampled ids], [tracked ids])")
    for t, entry in enumerate(entries, start=1):
        try:
            sampled, tracked = (tuple(sorted(index(i) for i in ids)) for ids in entry)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"schedule of round {t} is {shown(entry)}, not a pair ([sampled ids], [tracked ids]): {error}"
            ) from None
        draws.append(Draw(sampled, tracked))
    return tuple(draws)


def _numbers(name: str, values: Any) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        raise InputError(
            f"{name}={shown(values)} is not accepted; it must be 'uniform', 'size' or one number per client"
        ) from None


def _to(state: Any, device: torch.device) -> Any:
    return type(state)(*(value.to(device) for value in state))
