"""The only loop over rounds."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, AnyAlgorithm, Cohort, add
from fadamgc.algorithms import algorithm_name
from fadamgc.errors import CheckpointError, InputError, NonFiniteError
from fadamgc.files import has_bundle
from fadamgc.sim.cost import CostModel, Work, traffic
from fadamgc.sim.executors import ExecutorChoice, Job, LoopExecutor, Result, Round, make_executor
from fadamgc.sim.problem import Buffers, Problem
from fadamgc.sim.progress import progress_bar
from fadamgc.sim.run import ClientStates, Record, Run, environment, read_run, write_run
from fadamgc.sim.sampling import Draw, batches
from fadamgc.sim.settings import Settings
from fadamgc.task import Task


class RoundEnd(NamedTuple):
    """What a callback sees after each round."""

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
        weights: "uniform", "size" (a client counts as its share of the data), or a number a client.
            A weighted run minimises the weighted mean of the clients' losses, and y is the weighted
            mean of the y_i.
        eval_every: evaluate after every so many rounds, and after the last.
        target: stop as soon as the metric reaches it.
        on_nonfinite: "error", or "drop" to leave out a client whose update is not finite; its state
            stays as it was and the record names it.
        cost: how rounds are priced; a finished run can be priced again.
        dtype: of model and data; None is the model's.
        device: where to compute; None is the model's.
        executor: "auto", "loop" or "vectorized".
        progress: show a progress bar, where there is a terminal to show it on.
        callbacks: functions of a RoundEnd, called after each round; one that returns True ends the run.
        checkpoint: a folder to keep the state of the run in.
        checkpoint_every: write it after every so many rounds, and after the last.
        resume: go on from the checkpoint if there is one; start anew if there is none.

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
    if not isinstance(algorithm, Algorithm):
        raise InputError(f"algorithm={algorithm!r} is not an algorithm; give one such as fadamgc.FAdamGC()")
    draws = None if schedule is None else _draws(schedule)
    if rounds is None:
        if draws is None:
            raise InputError("rounds=None; say how many rounds to run")
        rounds = len(draws)
    settings = Settings(
        rounds=rounds,
        sampled=sampled,
        tracked=tracked,
        local_steps=10 if local_steps is None and local_epochs is None else local_steps,
        local_epochs=local_epochs,
        batch_size=batch_size,
        seed=seed,
        schedule=draws,
        weights=weights if isinstance(weights, str) else tuple(float(w) for w in weights),
        eval_every=eval_every,
        target=target,
        on_nonfinite=on_nonfinite,
        checkpoint_every=checkpoint_every,
        dtype=dtype,
    )
    settings.check(task.n, [len(x) for x, _ in task.pairs], algorithm)
    if resume and checkpoint is None:
        raise InputError("resume=True without checkpoint; say which folder to go on from")
    engine = Engine(algorithm, task, settings, cost or CostModel(), device, executor)
    store = None if checkpoint is None else Path(checkpoint)
    if store is not None:
        engine.open(store, resume)
    with progress_bar(progress, f"{type(algorithm).title} on {task.name}", rounds, engine.t) as advance:
        for end in engine.rounds(store):
            advance(end.record)
            answers = [callback(end) for callback in callbacks]
            if True in answers:
                break
    if store is not None:
        engine.write(store)
    return engine.result()


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
    ) -> None:
        self.algorithm, self.task, self.settings, self.cost = algorithm, task, settings, cost
        self.problem = Problem(task, settings.dtype, device)
        self.executor = make_executor(executor, self.problem)
        self.weights = settings.weight_of(self.problem.size)
        self.traffic = traffic(algorithm, self.problem.flat.d, self.problem.dtype, self.problem.buffers0)
        self.t = 0
        self.history: list[Record] = []
        self.buffers = self.problem.buffers0
        self.setup: tuple[Work, ...] = ()
        self._start()

    def _start(self) -> None:
        """Server and clients before round 1."""
        algo, problem, n = self.algorithm, self.problem, self.problem.n
        if not algo.init_gradient:
            self.server = algo.init_server(problem.x0)
            self.clients = ClientStates(n, algo.init_client(problem.x0))
            return
        total, states = torch.zeros_like(problem.x0), {}
        for i in range(n):
            g = problem.whole_gradient(problem.x0, self.buffers, i, self.settings.seed, 0)
            states[i] = algo.init_client(problem.x0, g)
            total = total + (g if self.weights is None else g * self.weights[i])
        self.server = algo.init_server(problem.x0, total / n)
        self.clients = ClientStates(n, algo.init_client(problem.x0), states)
        vector = problem.x0.numel() * problem.x0.element_size()
        self.setup = (Work(tuple(range(n)), tuple(map(self._pass, range(n))), (vector,) * n, (vector,) * n),)

    def _pass(self, client: int) -> int:
        """How many steps one pass over a client's data costs."""
        size, batch = int(self.problem.size[client]), self.settings.batch_size
        return 1 if batch is None else -(-size // batch)

    def rounds(self, store: Path | None = None) -> Iterator[RoundEnd]:
        """Go on until the last round or the target."""
        while self.t < self.settings.rounds and not self._at_target():
            record = self.step()
            if store is not None and self.t % self.settings.checkpoint_every == 0:
                self.write(store)
            yield RoundEnd(record, self.server, self.clients, self.buffers)

    def _at_target(self) -> bool:
        value = self.history[-1].test_metric if self.history else None
        target = self.settings.target
        return target is not None and value is not None and self.task.reached(value, target)

    def step(self) -> Record:
        """One round. If it fails, the state is that before it."""
        began = time.perf_counter()
        t = self.t + 1
        settings, problem, algo = self.settings, self.problem, self.algorithm
        who = settings.who(t, problem.n)
        jobs = [self._job(t, i, i in who.tracked) for i in who.sampled]
        round = Round(algo, settings.seed, t, algo.broadcast(self.server), self.buffers)
        total: Any = None
        sums = Sums()
        states: dict[int, Any] = {}
        dropped: list[int] = []
        for job, result in zip(jobs, in_order(self.executor.run(round, jobs), who.sampled), strict=True):
            if not _finite(result):
                if settings.on_nonfinite == "error":
                    step = LoopExecutor(problem).first_nonfinite_step(round, job)
                    raise NonFiniteError(job.client, t, step, "update")
                dropped.append(job.client)
                continue
            weight = 1.0 if self.weights is None else self.weights[job.client]
            up = result.up if self.weights is None else type(result.up)(*(weight * f for f in result.up))
            total = up if total is None else add(total, up)
            sums.add(weight, len(job.batches.size), result)
            states[job.client] = result.state
        server, buffers = self.server, self.buffers
        if states:
            cohort = Cohort(n=problem.n, S=sums.S, K=sums.steps / sums.S)
            server = algo.aggregate(server, total, cohort)
            buffers = sums.mean_buffers(self.buffers)
        evaluation: dict[str, float] = {}
        if t % settings.eval_every == 0 or t == settings.rounds:
            evaluation = problem.evaluate(server.x, buffers)
        work = self._work(t, who, jobs)
        record = Record(
            round=t,
            train_loss=sums.mean_loss(),
            test_loss=evaluation.get("test_loss"),
            test_accuracy=evaluation.get("test_accuracy"),
            test_metric=evaluation.get("test_metric"),
            bytes_down=sum(sum(w.down) for w in work),
            bytes_up=sum(sum(w.up) for w in work),
            simulated_seconds=sum(self.cost.seconds(w) for w in work),
            wall_seconds=time.perf_counter() - began,
            sampled=who.sampled,
            tracked=who.tracked,
            dropped=tuple(dropped),
            work=work,
        )
        self.server, self.buffers, self.t = server, buffers, t
        self.clients.update(states)
        self.history.append(record)
        return record

    def _job(self, t: int, client: int, tracked: bool) -> Job:
        s = self.settings
        size = int(self.problem.size[client])
        chosen = batches(s.seed, t, client, size, s.batch_size, s.local_steps, s.local_epochs)
        return Job(client, self.clients[client], tracked, chosen)

    def _work(self, t: int, who: Draw, jobs: list[Job]) -> tuple[Work, ...]:
        extra = self.algorithm.round_gradient
        steps = [len(job.batches.size) + (self._pass(job.client) if extra else 0) for job in jobs]
        return (*(self.setup if t == 1 else ()), self.traffic.work(who.sampled, who.tracked, steps))

    def identity(self) -> dict[str, Any]:
        """What must be equal for one run to be the continuation of another."""
        return {
            "algorithm": algorithm_name(self.algorithm),
            "hyperparameters": dataclasses.asdict(self.algorithm),
            "clients": self.problem.n,
            "dtype": str(self.problem.dtype).removeprefix("torch."),
            **self.settings.to_json(),
        }

    def result(self, fingerprint: bool = False) -> Run:
        """The run so far."""
        settings = self.identity() | {"rounds": self.settings.rounds, "target": self.settings.target}
        settings |= {"task": self.task.name, "executor": self.executor.name}
        if fingerprint:
            settings["fingerprint"] = self.problem.fingerprint
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

    def write(self, store: Path) -> None:
        """Write a checkpoint."""
        write_run(store, "checkpoint", self.result(fingerprint=True))

    def open(self, store: Path, resume: bool) -> None:
        """Take up the run where a checkpoint left it."""
        if not has_bundle(store, "checkpoint"):
            return
        if not resume:
            raise CheckpointError(
                f"{store} already holds a checkpoint; pass resume=True to go on from it, "
                "or give another folder"
            )
        saved = read_run(store, "checkpoint", self.task)
        wanted = self.identity() | {"fingerprint": self.problem.fingerprint}
        for key, value in wanted.items():
            got = saved.settings.get(key)
            if got != _plain(value):
                raise CheckpointError(_difference(store, key, got, value))
        if len(saved.history) > self.settings.rounds:
            raise CheckpointError(
                f"{store} is at round {len(saved.history)}, beyond rounds={self.settings.rounds}; "
                "ask for at least as many rounds, or give another folder"
            )
        device = self.problem.device
        self.server = _to(saved.server, device)
        states = {i: _to(saved.clients[i], device) for i in saved.clients.participants}
        self.clients = ClientStates(self.problem.n, _to(saved.clients.initial, device), states)
        self.buffers = {name: value.to(device) for name, value in saved.buffers.items()}
        self.history = saved.history
        self.t = len(saved.history)


class Sums:
    """What is averaged over a round's clients beside the algorithm's own messages."""

    def __init__(self) -> None:
        self.S: float = 0
        self.steps: float = 0
        self.losses: list[Tensor] = []
        self.buffers: dict[str, Tensor] = {}

    def add(self, weight: float, steps: int, result: Result) -> None:
        """Add one client; with weight 1 throughout, S is its plain count."""
        self.S += int(weight) if weight == 1 else weight
        self.steps += weight * steps
        self.losses.append(result.loss)
        for name, value in result.buffers.items():
            exact = value.double() if value.is_floating_point() else value.long()
            weighted = exact if weight == 1 else exact * weight
            self.buffers[name] = weighted + self.buffers[name] if name in self.buffers else weighted

    def mean_loss(self) -> float | None:
        """Mean over clients of the mean over local steps."""
        return float(torch.stack(self.losses).double().mean()) if self.losses else None

    def mean_buffers(self, like: Buffers) -> Buffers:
        """Mean over clients; whole numbers (counts of batches) are rounded."""
        mean = {name: value / self.S for name, value in self.buffers.items()}
        return {
            name: (mean[name] if value.is_floating_point() else mean[name].round()).to(value.dtype)
            for name, value in like.items()
        }


def in_order(results: Iterator[Result], clients: Sequence[int]) -> Iterator[Result]:
    """Results in the order of the clients, so that sums do not depend on who was done first."""
    early: dict[int, Result] = {}
    position = 0
    for result in results:
        early[result.client] = result
        while position < len(clients) and clients[position] in early:
            yield early.pop(clients[position])
            position += 1


def _finite(result: Result) -> bool:
    tensors = (*result.up, *result.state, *result.buffers.values())
    return all(bool(torch.isfinite(t).all()) for t in tensors)


def _draws(schedule: Sequence[tuple[Sequence[int], Sequence[int]]]) -> tuple[Draw, ...]:
    try:
        return tuple(
            Draw(tuple(sorted(int(i) for i in sampled)), tuple(sorted(int(i) for i in tracked)))
            for sampled, tracked in schedule
        )
    except (TypeError, ValueError) as error:
        raise InputError(
            f"schedule={schedule!r} is not a list of ([sampled ids], [tracked ids]) pairs: {error}"
        ) from None


def _to(state: Any, device: torch.device) -> Any:
    return type(state)(*(value.to(device) for value in state))


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, np.generic):
        return value.item()
    return value


def _difference(store: Path, key: str, got: Any, wanted: Any) -> str:
    if isinstance(wanted, dict):
        key, got, wanted = next(
            (f"{key}.{k}", (got or {}).get(k), v)
            for k, v in wanted.items()
            if (got or {}).get(k) != _plain(v)
        )
    if key.startswith("fingerprint."):
        part = key.removeprefix("fingerprint.")
        return f"{store} is a checkpoint of another task: its {part} differs; give another folder"
    return f"{store} is a checkpoint of another run: {key}={got!r} there, {key}={wanted!r} here"
