"""``simulate``: the function that runs a simulation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import torch

from fadamgc.algorithm import Algorithm, AnyAlgorithm
from fadamgc.errors import InputError, shown
from fadamgc.federation.cost import CostModel
from fadamgc.federation.privacy import Privacy
from fadamgc.federation.run import Run
from fadamgc.federation.settings import Settings
from fadamgc.sim.engine import Callback, Engine, Options, check_flag
from fadamgc.sim.executors.auto import ExecutorChoice
from fadamgc.sim.progress import progress_bar
from fadamgc.sim.resources import Resources
from fadamgc.task import Task


def simulate(
    algorithm: AnyAlgorithm,
    task: Task,
    rounds: int | None = None,
    sampled: int | None = None,
    tracked: int | None = None,
    local_steps: int | Sequence[int] | Callable[[int, int], int] | None = None,
    batch_size: int | None = None,
    seed: int = 0,
    *,
    local_epochs: int | None = None,
    schedule: Sequence[tuple[Sequence[int], Sequence[int]]] | None = None,
    weights: Literal["uniform", "size"] | Sequence[float] = "uniform",
    eval_every: int = 1,
    eval_clients: bool | Literal["epoch"] = False,
    target: float | None = None,
    on_nonfinite: Literal["error", "drop"] = "error",
    groups: Sequence[Sequence[int]] | int | None = None,
    group_rounds: int | None = None,
    dropout: float | None = None,
    stragglers: float | None = None,
    deadline: float | None = None,
    clip_norm: float | None = None,
    weight_decay: float | None = None,
    local_parameters: str | Sequence[str] | None = None,
    codec: Mapping[str, str] | str | None = None,
    aggregation: str | None = None,
    privacy: Privacy | None = None,
    cost: CostModel | None = None,
    dtype: torch.dtype | None = None,
    autocast: Literal["bf16"] | None = None,
    channels_last: bool | None = None,
    device: str | torch.device | None = None,
    executor: ExecutorChoice = "auto",
    states: Literal["auto", "memory", "files"] = "auto",
    progress: bool = True,
    callbacks: Sequence[Callback] = (),
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 1,
    resume: bool = False,
    keep: Literal["last", "best"] = "last",
) -> Run:
    """Run a federated algorithm on a task, on this machine. The task is left as it was.

    Args:
        algorithm: the algorithm, e.g. ``fadamgc.FAdamGC(eta_l=1e-3)``.
        task: the task.
        rounds: global rounds; None is the length of the schedule.
        sampled: clients drawn in each round; None is all.
        tracked: number of sampled clients that send tracking updates; None is all sampled clients.
        local_steps: local steps K of every client in a round (default 10 unless ``local_epochs``); also one
            number per client, or a function ``local_steps(client, round)``.
        batch_size: samples in a mini-batch; None is a client's whole data in every step.
        seed: seed of everything random; the same seed gives the same result, bit for bit.
        local_epochs: passes over the client's data, instead of ``local_steps``; K then differs per client.
        schedule: who takes part, ``[([sampled ids], [tracked ids]), ...]``, instead of a draw.
        weights: "uniform", "size" (a client counts as its share of the data), or one number per client.
            A weighted run minimises the weighted mean of the clients' losses, and y is the weighted
            mean of the y_i.
        eval_every: rounds between two evaluations; the last round is always evaluated.
        eval_clients: whether each evaluation also computes the metric on every client's data: on its test
            data if the task has ``client_tests`` (clients without test data are skipped), else on its
            training data. ``record.metrics`` then has "clients: mean", "clients: worst tenth",
            "clients: spread" and "clients: not yet seen". "epoch" adds the metric of each client's model
            after one more local epoch ("clients: mean after an epoch" and so on), which costs an epoch of
            all clients.
        target: stop as soon as the metric reaches this value.
        on_nonfinite: "error", or "drop" to skip a client whose update is not finite; its state does not
            change and the record names it. In both cases a NonFiniteError ends the run if the server's
            state is not finite; with "drop" also if no update is left and more than half of all
            clients were dropped.
        groups: for algorithms with groups such as ``fadamgc.MTGC``: the clients of each group,
            ``[[0, 1], [2, 3]]``, or a number of groups of equal size; None is one group.
        group_rounds: group rounds in a global round, each with ``local_steps`` steps (default 1).
        dropout: probability that a sampled client does not answer. Its state does not change, and the record
            names it as absent.
        stragglers: probability that a client does only a part of its steps, drawn from 1 .. K - 1.
        deadline: seconds, by the cost model, that the server waits for a client; one that is late is absent.
        clip_norm: largest norm of a local gradient; longer ones are scaled down to it.
        weight_decay: weight of an L2 penalty, whose gradient is added to every local gradient after clipping.
        local_parameters: names of layers or parameters, or classes of layers ("BatchNorm2d"), that stay at
            the clients: each client trains its own copy with the same algorithm (FedBN), and never sends it.
            "*" matches anything, as in file names. The test data is evaluated with the local parameters of
            the initial model; see ``eval_clients`` and ``run.model_of(client)``.
        codec: how fields of messages are sent, ``{"y": "int8", "dy": "int8"}``: "float32", "bfloat16",
            "int8", "int4", "topk:0.01" or "means:64"; see docs/codecs.md. The bytes that are sent count.
        aggregation: "median" or "trimmed:0.1" (without the tenth at each end), per coordinate, instead of the
            mean over clients; the messages of a round are kept until its end. See docs/robust.md.
        privacy: ``fadamgc.Privacy(clip={"dx": 1.0}, noise=4.0)``: each client's message is clipped, and noise
            is added to the sum, so that the models hide all the data of any one client; ``run.epsilon()``
            says how far. See docs/privacy.md.
        cost: how rounds are priced; a finished run can be priced again.
        dtype: type of model and data; None is the model's. With a 16-bit type, gradients are computed in that
            type, and x, the clients' states, messages and sums are float32.
        autocast: "bf16": the operations of the model that allow it run in bfloat16, with the model, gradients
            and losses in float32.
        channels_last: whether images and kernels of convolutions have their channels last, which is faster
            on many GPUs; executor="threads" does so in any case.
        device: where to compute, such as "cuda:1"; "auto" is a GPU if there is one; None is the model's.
        executor: "loop" (one client at a time: the reference), "threads" (one thread per client),
            "vectorized" (a block of clients at once, compiled in long runs), "ray" or ``fadamgc.Ray(...)``
            (actors of a Ray cluster, each with one of these executors), "auto" (the fastest of those on this
            machine by a rule and, in long runs, by timing; ``run.settings["executor"]`` says which), or a
            function of a ``Workload`` that returns an executor.
        states: where the clients' states are stored between rounds: "memory", "files" (in the checkpoint's
            folder, or in a temporary file), or "auto" (files if they would take over half of the memory).
        progress: show the progress on stderr: a bar in a terminal, else a line now and then.
        callbacks: functions of a RoundEnd, called after each round; one that returns True ends the run.
        checkpoint: a folder for the state of the run; it is locked until the run ends, and a second run
            gets a CheckpointInUseError.
        checkpoint_every: rounds between two checkpoints; the last round always has one.
        resume: resume from the checkpoint if there is one; start from round 1 if there is none.
        keep: "best" also keeps the model of the round with the best metric, as ``run.best``.

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
    settings = Settings.of(
        rounds=rounds,
        sampled=sampled,
        tracked=tracked,
        local_steps=local_steps,
        batch_size=batch_size,
        seed=seed,
        local_epochs=local_epochs,
        schedule=schedule,
        weights=weights,
        eval_every=eval_every,
        eval_clients=eval_clients,
        target=target,
        on_nonfinite=on_nonfinite,
        groups=groups,
        group_rounds=group_rounds,
        dropout=dropout,
        stragglers=stragglers,
        deadline=deadline,
        clip_norm=clip_norm,
        weight_decay=weight_decay,
        local_parameters=local_parameters,
        codec=codec,
        aggregation=aggregation,
        privacy=privacy,
        checkpoint_every=checkpoint_every,
        dtype=dtype,
        autocast=autocast,
        channels_last=channels_last,
    )
    options = Options(cost, device, executor, states, callbacks, checkpoint, resume, keep)
    check_flag("progress", progress)
    label = f"{getattr(algorithm, 'title', 'a run')} on {getattr(task, 'name', 'a task')}"
    with torch.inference_mode(False), ExitStack() as stack:
        shown_progress = stack.enter_context(progress_bar(progress, label, settings.rounds))
        resources = Resources()
        stack.callback(resources.close)
        engine = start(algorithm, task, settings, options, resources)
        stack.callback(engine.close)
        shown_progress.begin(engine.t)
        while not engine.over():
            jobs = engine.begin()
            end = engine.end(jobs, engine.executor.run(jobs))
            if end is None:  # more group rounds of this round follow
                continue
            shown_progress.advance(end.record)
            if engine.stops_after(end):
                break
        engine.write()
        return engine.result()


def start(
    algorithm: AnyAlgorithm, task: Task, settings: Settings, options: Options, resources: Resources
) -> Engine:
    """Check everything; return the run before round 1, or as its checkpoint saved it."""
    if not isinstance(algorithm, Algorithm):
        raise InputError(
            f"algorithm={shown(algorithm)} is not an algorithm; give one such as fadamgc.FAdamGC()"
        )
    if not isinstance(task, Task):
        raise InputError(f"task={type(task).__name__} is not a task; give a fadamgc.Task")
    if not task.n:
        raise InputError(
            f"task={task.name!r} has clients=None, which is for the server of a federation; give the data of "
            "the clients"
        )
    if options.keep == "best" and task.test is None:
        raise InputError("keep='best' without test data; give the task a test set")
    if settings.target is not None and task.test is None:
        raise InputError(f"target={shown(settings.target)} without test data; give the task a test set")
    settings.check(task.n, task.sizes, algorithm.at(1))
    return Engine(algorithm, task, settings, options, resources)


SETTINGS = tuple(field.name for field in fields(Settings))
OPTIONS = tuple(field.name for field in fields(Options))
ARGUMENTS = ("algorithm", "task", *SETTINGS, *OPTIONS)
"""The arguments of ``simulate`` that belong to a run (all except ``progress``)."""


def start_from(arguments: Mapping[str, Any], resources: Resources) -> Engine:
    """Start the run that ``simulate(**arguments)`` would run."""
    settings = Settings.of(**{name: value for name, value in arguments.items() if name in SETTINGS})
    options = Options(**{name: value for name, value in arguments.items() if name in OPTIONS})
    return start(arguments["algorithm"], arguments["task"], settings, options, resources)
