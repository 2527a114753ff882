"""The clients of a round on the actors of a Ray cluster: more cores, GPUs or machines for one run.

The driver, which is the process of ``simulate``, has the clients' states, adds the results in the order of
the jobs and writes the checkpoints. An actor has the task's data, once per node in shared memory, and an
executor of this package, so the results do not depend on the number of actors. If an actor is lost,
another actor does its jobs, with the same results.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch

from fadamgc.cluster import ClusterError, Parcel, Surroundings, connect, pack, places, ray_module, unpack
from fadamgc.errors import InputError, finite, first_line, not_accepted, whole
from fadamgc.federation.client_data import ClientTable
from fadamgc.federation.computing import Computing
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.jobs import Job, Result, Round
from fadamgc.runtime import device_of
from fadamgc.samples import tensors_of
from fadamgc.sim.executors.base import Executor, Workload
from fadamgc.stages import stage
from fadamgc.task import Task
from fadamgc.tree import map_leaves

log = logging.getLogger("fadamgc")

INNER = ("auto", "loop", "threads", "vectorized")
AHEAD = 2  # assignments that an actor has at the most, so that it never waits for the next one
TASKS = 2  # tasks that an actor keeps
POLL = 5.0  # seconds between two checks of the deadline


@dataclass(frozen=True)
class Ray:
    """How to run the clients of a round on a Ray cluster: ``simulate(..., executor=fadamgc.Ray(cpus=2))``.

    Args:
        address: address of the cluster, ``host:port``; None is the cluster that RAY_ADDRESS names or that
            runs on this machine, or else a new one on this machine. An existing connection is used as it is.
        actors: processes that train clients; None is as many as the cluster has room for.
        cpus: CPUs of an actor, which are also its threads.
        gpus: GPUs of an actor, such as 1 or 0.25; above 0, it trains on its GPU.
        inner: the executor of an actor: "loop", "threads" or "vectorized"; "auto" chooses by a rule.
        deadline: seconds for one assignment; an actor that needs longer is replaced. The first assignment
            includes loading the data.
        attempts: how often an assignment is given to an actor before the run ends with an error.

    Example:
        >>> import fadamgc
        >>> fadamgc.Ray(cpus=2, deadline=600)
        Ray(address=None, actors=None, cpus=2, gpus=0, inner='auto', deadline=600, attempts=4)
    """

    address: str | None = None
    actors: int | None = None
    cpus: float = 1
    gpus: float = 0
    inner: str = "auto"
    deadline: float = 1800
    attempts: int = 4

    def __post_init__(self) -> None:
        if self.address is not None and not isinstance(self.address, str):
            raise not_accepted(
                "address", self.address, "the address of a Ray cluster, such as '10.0.0.1:6379'"
            )
        if self.actors is not None:
            whole("actors", self.actors, 1)
        finite("cpus", self.cpus, 0, exclusive=True)
        finite("gpus", self.gpus, 0)
        finite("deadline", self.deadline, 0, exclusive=True)
        whole("attempts", self.attempts, 1)
        if self.inner not in INNER:
            raise not_accepted("inner", self.inner, f"one of {', '.join(INNER)}")

    def __call__(self, workload: Workload, compiled: bool | None = None) -> RayExecutor:
        """Connect to the cluster, and make the executor."""
        return RayExecutor(workload, self, compiled)


class Plan(NamedTuple):
    """The values of a run that an actor needs in addition to the task."""

    workload: tuple[Any, ...]  # the fields of a Workload after functions and clients
    dtype: torch.dtype
    device: str
    computing: Computing
    inner: str
    compiled: bool | None


class PackedJob(NamedTuple):
    """One client's part in an assignment: a Job without the data and the values that all clients share."""

    round: int  # position among the rounds of the assignment
    client: int
    state: Any
    tracked: bool
    batches: Any


@dataclass
class Assignment:
    """Some jobs that one actor gets at once."""

    jobs: list[Job]
    attempts: int = 0
    sent: float = 0.0  # time from which the actor could start


@dataclass
class ActorMember:
    """An actor, and its assignments by the Ray references of their replies."""

    handle: Any
    assignments: dict[Any, Assignment] = field(default_factory=dict)


class RayExecutor:
    """Gives the jobs of a round to actors, and gives them again if an actor is lost."""

    name = "ray"

    def __init__(self, workload: Workload, options: Ray, compiled: bool | None = None) -> None:
        self.options = options
        self.inner: str | None = None if options.inner == "auto" else options.inner  # of the actors
        self.compiled = bool(compiled)
        self._device = "auto" if options.gpus else str(workload.functions.device)
        if not options.gpus and self._device != "cpu":
            raise InputError(
                f"device={self._device!r} with Ray: the driver stays on the CPU; give the actors GPUs with "
                "executor=fadamgc.Ray(gpus=1)"
            )
        self._given_compiled = compiled
        self._workload = workload
        self._tasks: dict[int, tuple[Task, Any]] = {}  # by identity, with a reference to the packed task
        self._members: list[ActorMember] = []
        self.sent = self.received = 0  # bytes through the object store, without the task
        self._disconnect: Callable[[], None] = connect(options.address)
        try:
            with stage("starting actors"):
                fitting = places(options.cpus, options.gpus)
                count = min(options.actors or fitting, fitting, max(1, workload.sampled))
                self._actor_class = self._remote_class()
                self._members = [ActorMember(self._new_actor()) for _ in range(count)]
        except BaseException:
            self.close()
            raise

    @property
    def actors(self) -> int:
        """The number of actors."""
        return len(self._members)

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Run the jobs on the actors; yield results as they arrive."""
        ray = ray_module()
        rounds = {id(job.round): job.round for job in jobs}
        try:
            messages = {key: pack(tuple(round[1:])) for key, round in rounds.items()}  # all but the task
            self.sent += sum(message.size for message in messages.values())
            packed = {key: ray.put(message) for key, message in messages.items()}
            waiting = deque(Assignment(part) for part in self._parts(jobs))
            while waiting or any(member.assignments for member in self._members):
                self._hand_out(waiting, packed)
                for member, reference in self._replies(waiting):
                    assignment = member.assignments[reference]
                    try:
                        parcel = ray.get(reference)
                    except (ray.exceptions.RayError, ConnectionError) as error:
                        self._replace(member, waiting, error)
                        continue
                    self.received += parcel.size
                    reply = unpack(parcel)
                    del member.assignments[reference]
                    for other in member.assignments.values():
                        other.sent = time.monotonic()
                    if isinstance(reply, BaseException):
                        raise reply
                    self.inner, self.compiled, results = reply
                    for job, result in zip(assignment.jobs, results, strict=True):
                        here = partial(_to, job.round.functions.device)
                        yield Result(job, *(map_leaves(here, part) for part in result))
        finally:
            for member in self._members:  # after an error, nobody waits for the other replies
                if member.assignments:
                    self._kill(member.handle)
                    member.handle, member.assignments = self._new_actor(), {}

    def close(self) -> None:
        """Stop the actors, and disconnect from the cluster if this executor has connected to it."""
        members, self._members = self._members, []
        for member in members:
            self._kill(member.handle)
        self._disconnect()
        self._disconnect = lambda: None

    # Requests.

    def _parts(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Split the jobs into parts: one block per actor, or a few jobs per part."""
        tasks: dict[int, list[Job]] = {}
        for job in jobs:
            tasks.setdefault(id(job.round.functions), []).append(job)
        parts = []
        for of_task in tasks.values():
            if self.inner == "vectorized" or self.inner is None:
                size = -(-len(of_task) // self.actors)
            else:
                size = max(1, int(self.options.cpus))
                of_task = sorted(of_task, key=lambda job: -job.batches.total)
            parts += [of_task[first : first + size] for first in range(0, len(of_task), size)]
        return parts

    def _hand_out(self, waiting: deque[Assignment], packed: dict[int, Any]) -> None:
        """Give assignments to the actors that have the fewest."""
        while waiting:
            member = min(self._members, key=lambda member: len(member.assignments))
            if len(member.assignments) >= AHEAD:
                return
            assignment = waiting.popleft()
            assignment.attempts += 1
            assignment.sent = time.monotonic()
            functions = assignment.jobs[0].round.functions
            task = self._packed_task(functions)
            rounds = list(dict.fromkeys(id(job.round) for job in assignment.jobs))
            parts = pack(
                [
                    PackedJob(rounds.index(id(job.round)), job.client, job.state, job.tracked, job.batches)
                    for job in assignment.jobs
                ]
            )
            self.sent += parts.size
            plan = Plan(
                tuple(self._workload[2:]),
                functions.dtype,
                self._device,
                functions.computing,
                self.options.inner,
                self._given_compiled,
            )
            # References in a list are not resolved: the actor reads a task only if it does not have it.
            references = [packed[key] for key in rounds]
            reference = member.handle.train.remote(id(functions), [task], pack(plan), references, parts)
            member.assignments[reference] = assignment

    def _replies(self, waiting: deque[Assignment]) -> Iterator[tuple[ActorMember, Any]]:
        """Wait for replies; replace an actor whose assignment has taken too long."""
        owner = {reference: member for member in self._members for reference in member.assignments}
        ready, _ = ray_module().wait(list(owner), num_returns=1, timeout=min(POLL, self.options.deadline))
        for reference in ready:
            if reference in owner[reference].assignments:  # else its actor was replaced just now
                yield owner[reference], reference
        now, late = time.monotonic(), TimeoutError(f"no reply within deadline={self.options.deadline:g} s")
        for member in {id(member): member for member in owner.values()}.values():
            if any(
                now - assignment.sent > self.options.deadline
                for assignment in list(member.assignments.values())[:1]
            ):
                self._replace(member, waiting, late)

    def _replace(self, member: ActorMember, waiting: deque[Assignment], error: Exception) -> None:
        """Start an actor in the place of one that is lost, and let others do its assignments."""
        assignments = list(member.assignments.values())
        first, clients = assignments[0], [job.client for job in assignments[0].jobs]
        log.warning(
            "ray: an actor was lost (%s); its clients %s are trained by another", first_line(error), clients
        )
        if first.attempts >= self.options.attempts:
            raise ClusterError(
                f"clients {clients} were given to {first.attempts} actors of the Ray cluster, and none "
                f"replied: {first_line(error)}; look at the cluster (ray status), then resume from the "
                "checkpoint"
            ) from error
        for assignment in assignments[1:]:
            assignment.attempts -= 1  # the actor had not started this assignment
        waiting.extendleft(reversed(assignments))
        self._kill(member.handle)
        member.handle, member.assignments = self._new_actor(), {}

    def _packed_task(self, functions: TaskFunctions) -> Any:
        """Return the reference of a task, whose data is read by all actors of a node from the same memory."""
        task = functions.task
        if id(functions) not in self._tasks:
            tests = dict.fromkeys(("test", "test_samples", "client_tests", "client_test_samples"))
            copied = _with(task, clients=(), **tests)  # the samples are those of the clients
            packed = pack(copied, shared=tensors_of(copied.in_memory()))
            log.info("ray: the task has %.3g MB per node", packed.size / 1e6)
            self._tasks[id(functions)] = functions.task, ray_module().put(packed)
        return self._tasks[id(functions)][1]

    # Actors.

    def _remote_class(self) -> Any:
        ray, options = ray_module(), self.options
        remote = ray.remote(num_cpus=options.cpus, num_gpus=options.gpus, max_restarts=0)
        return remote(ClientActor)

    def _new_actor(self) -> Any:
        ray = ray_module()
        if not ray.is_initialized():
            raise ClusterError("the connection to the Ray cluster is lost; resume from the checkpoint")
        threads = max(1, int(self.options.cpus))
        return self._actor_class.options(scheduling_strategy="SPREAD").remote(
            pack(Surroundings.here()), threads
        )

    def _kill(self, handle: Any) -> None:
        try:
            ray_module().kill(handle)
        except Exception as error:  # the cluster is gone, and the actor with it
            log.debug("ray: %s", first_line(error))


class ClientActor:
    """Trains clients in a process of the cluster. It keeps only caches, so it can be replaced at any time."""

    def __init__(self, surroundings: Parcel, threads: int) -> None:
        unpack(surroundings).take_over(threads)
        self._tasks: dict[tuple[int, bytes], tuple[TaskFunctions, ClientTable, Executor]] = {}

    def train(self, key: int, task: list[Any], plan: Parcel, rounds: list[Any], parts: Parcel) -> Parcel:
        """Return the packed results of some jobs, or the packed error that one of them raised."""
        try:
            with torch.inference_mode(False):
                return pack(self._train(key, task[0], plan, rounds, unpack(parts)))
        except Exception as error:
            return pack(error)

    def _train(self, key: int, task: Any, plan: Parcel, rounds: list[Any], parts: list[PackedJob]) -> Any:
        functions, clients, executor = self._prepared(key, task, plan)
        ray = ray_module()
        messages = [unpack(ray.get(reference)) for reference in rounds]
        here = partial(_to, functions.device)
        opened = [Round(functions, *_on_device(message, here)) for message in messages]
        jobs = [
            Job(
                opened[part.round],
                part.client,
                clients[part.client],
                partial(_same, map_leaves(here, part.state)),
                part.tracked,
                part.batches,
            )
            for part in parts
        ]
        position = {id(job): i for i, job in enumerate(jobs)}
        results: list[Any] = [None] * len(jobs)
        to_cpu = partial(_to, torch.device("cpu"))
        for result in executor.run(jobs):
            values = result.state, result.up, result.buffers, result.loss
            results[position[id(result.job)]] = [map_leaves(to_cpu, value) for value in values]
        return executor.name, bool(getattr(executor, "compiled", False)), results

    def _prepared(self, key: int, task: Any, plan: Parcel) -> tuple[TaskFunctions, ClientTable, Executor]:
        """Return the task on the device of this actor; the tasks that were used last are kept."""
        place = key, plan.text
        if place not in self._tasks:
            from fadamgc.sim.executors.auto import choose_executor, make_executor

            p: Plan = unpack(plan)
            task = unpack(ray_module().get(task))
            functions = TaskFunctions(task, p.dtype, device_of(p.device), p.computing)
            clients = ClientTable(functions.task.samples, functions.dtype, functions.device)
            workload = Workload(functions, clients, *p.workload)
            if p.inner == "auto":
                executor = choose_executor(workload, timed=False, compiled=p.compiled)
            else:
                executor = make_executor(p.inner, workload, p.compiled)
            while len(self._tasks) >= TASKS:
                del self._tasks[next(iter(self._tasks))]
            self._tasks[place] = functions, clients, executor
        return self._tasks[place]


def _on_device(message: tuple[Any, ...], here: Callable[[torch.Tensor], torch.Tensor]) -> tuple[Any, ...]:
    algorithm, seed, t, down, buffers, gradients = message
    return algorithm, seed, t, map_leaves(here, down), map_leaves(here, buffers), gradients


def _to(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(device)


def _same(value: Any) -> Any:
    return value


def _with(task: Task, **values: Any) -> Task:
    """Return a copy of a task with other attributes; nothing is checked again."""
    copied = copy(task)
    vars(copied).update(values)
    return copied
