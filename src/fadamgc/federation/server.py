"""The server's half of a federated run: one object under the simulator and under Flower."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm, Cohort
from fadamgc.errors import NonFiniteError
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.cost import CostModel, Work, message_sizes, state_bytes, traffic
from fadamgc.federation.functions import Buffers, TaskFunctions
from fadamgc.federation.group_rounds import GroupRounds
from fadamgc.federation.jobs import Result, Round
from fadamgc.federation.local_parameters import PartDown, PartlyLocal, partly_local
from fadamgc.federation.messages import MessageCodecs, on_the_wire
from fadamgc.federation.privacy import check_buffers, check_privacy
from fadamgc.federation.record import Record
from fadamgc.federation.robust import RobustSums, check_robust
from fadamgc.federation.run import Run, environment
from fadamgc.federation.sampling import Draw, draw
from fadamgc.federation.settings import Settings
from fadamgc.federation.sums import Sums, all_finite
from fadamgc.files import as_json
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.methods import algorithm_name
from fadamgc.tree import named_leaves


class ServerState(NamedTuple):
    """The server's state and the model's averaged buffers, before or after a round."""

    server: Any
    buffers: Buffers

    def nonfinite(self) -> str | None:
        """Return the name of a tensor that is not finite, or None."""
        tensors = {**named_leaves(self.server), **self.buffers}
        return next((name for name, tensor in tensors.items() if not all_finite(tensor)), None)


class Federation:
    """The state of a federated run between rounds. It knows neither executors nor networks nor files.

    A round changes nothing before ``commit``:

        draw = federation.who()                     who takes part
        round = federation.open()                   what the server sends
        sums = federation.new_sums()                add the clients' results, in ascending order
        after = federation.aggregate(sums)          the server after the round
        evaluation = federation.evaluate(after)
        federation.commit(after, federation.record(draw, sums, evaluation, ...))

    Attributes:
        method: the algorithm as it was given, whose numbers may be schedules.
        scheduled: ``method``; with local parameters, a wrapper of it that keeps them at the clients.
        t: number of the last round that was committed.
        state: the server's state and the buffers; ``state.server`` is None as long as the run waits for the
            clients' gradients at the initial model (``begin_with``).
        weights: the clients' weights, with mean 1; None if all are equal.
        history: one record per round.
        setup: the work before round 1, which counts in round 1.
        privacy: clipping and noise of the clients' messages; None without.
        robust_fields: the fields of the clients' messages whose mean is robust.
        message_sizes: numbers and bytes of each field of the messages; None with groups.
    """

    def __init__(
        self,
        algorithm: AnyAlgorithm,
        functions: TaskFunctions,
        n: int,
        settings: Settings,
        cost: CostModel | None = None,
    ) -> None:
        self.privacy = check_privacy(settings.privacy, settings, algorithm.at(1))
        algorithm = algorithm.for_model(functions.flat.shapes).for_rounds(settings.rounds)
        if isinstance(algorithm, GroupedAlgorithm):
            algorithm = algorithm.for_groups([len(group) for group in settings.group_ids(n)])
        self.method = algorithm
        x0, buffers0 = functions.x0, functions.buffers0
        sent, buffers = functions.flat.d, buffers0
        self.robust_fields = check_robust(settings.aggregation, algorithm.at(1), settings.weights)
        self.codecs = MessageCodecs(settings.codec or (), algorithm.at(1), sent, x0.dtype, self.privacy)
        algorithm = self.codecs.keeping_rest(algorithm)
        if settings.local_parameters is not None:
            patterns = settings.local_parameters
            algorithm = partly_local(algorithm, patterns, functions.module, functions.flat, buffers0)
            sent, buffers = algorithm.layout.shared_size, algorithm.layout.shared_buffers(buffers0)
        if self.privacy is not None:
            check_buffers(buffers)
        self.scheduled, self.functions, self.n, self.settings = algorithm, functions, n, settings
        self._at: tuple[int, AnyAlgorithm] | None = None
        self.task = functions.task
        self.cost = cost or CostModel()
        self.cost.check(n)
        self.t = 0
        algorithm, codec = self.algorithm, settings.codec or ()
        plain = on_the_wire(algorithm)
        self.traffic = traffic(plain, sent, x0.dtype, buffers, codec)
        # Groups send messages of their own, which have no codecs.
        grouped = isinstance(plain, GroupedAlgorithm)
        self.message_sizes = None if grouped else message_sizes(plain, sent, x0.dtype, codec)
        self.state = ServerState(None if algorithm.init_gradient else algorithm.init_server(x0), buffers0)
        self.weights: list[float] | None = None
        self.history: list[Record] = []
        self.setup: tuple[Work, ...] = ()

    @property
    def algorithm(self) -> AnyAlgorithm:
        """The algorithm of the next round, with numbers in the place of schedules."""
        t = min(self.t + 1, max(1, self.settings.rounds))
        if self._at is None or self._at[0] != t:
            self._at = t, self.scheduled.at(t)  # kept, because a round asks for it often
        return self._at[1]

    def begin_with(self, gradients: Iterable[Tensor], steps: Sequence[int]) -> None:
        """Start from every client's gradient at the initial model, for algorithms with ``init_gradient``.

        ``gradients`` and ``steps`` (the cost of each gradient, in local steps) have one entry per client.
        """
        x0, n = self.functions.x0, self.n
        total = torch.zeros_like(x0)
        for i, g in enumerate(gradients):
            total = total + (g if self.weights is None else g * self.weights[i])
        if not all_finite(total):
            message = "the sum of the clients' gradients at the initial model is not finite"
            raise NonFiniteError(None, 0, None, message)
        sent, buffers = x0, self.state.buffers
        if isinstance(self.scheduled, PartlyLocal):
            layout = self.scheduled.layout
            sent, buffers = layout.split(x0)[0], layout.shared_buffers(buffers)
        down, up = state_bytes((sent, buffers)), sent.nbytes
        self.setup = (Work(tuple(range(n)), tuple(steps), (down,) * n, (up,) * n),)
        self.state = self.state._replace(server=self.algorithm.init_server(x0, total / n))

    def over(self) -> bool:
        """Whether the last round or the target has been reached."""
        value = self.history[-1].test_metric if self.history else None
        target = self.settings.target
        reached = target is not None and value is not None and self.task.reached(value, target)
        return self.t >= self.settings.rounds or reached

    def who(self, available: Iterable[int] | None = None) -> Draw:
        """Return who takes part in the next round, out of the clients that are available (None: all)."""
        s, t = self.settings, self.t + 1
        if available is None:
            return s.who(t, self.n)
        present = sorted(set(available))
        if s.schedule is not None:
            return Draw(*(tuple(i for i in ids if i in present) for ids in s.who(t, self.n)))
        S = min(s.sampled or self.n, len(present))
        tracked = S if s.tracked is None else min(s.tracked, S)
        positions = draw(s.seed, t, len(present), S, tracked) if S else Draw((), ())
        return Draw(*(tuple(present[i] for i in ids) for ids in positions))

    def open(self) -> Round:
        """Return the next round as its clients see it."""
        algo, (server, buffers), s = self.algorithm, self.state, self.settings
        down = algo.broadcast(server)
        if self.codecs.down:
            down = self._received(down)
            for name, value in named_leaves(down).items():
                if not all_finite(value):
                    message = (
                        f"the server's {name} is not finite as it is sent in round {self.t + 1}: a codec "
                        "sends numbers of float32; lower eta_g or eta_l"
                    )
                    raise NonFiniteError(None, self.t + 1, None, message)
        return Round(self.functions, algo, s.seed, self.t + 1, down, buffers, s.gradients)

    def message(self) -> dict[str, Tensor]:
        """Return the server's message of the next round as it is sent: see ``MessageCodecs``."""
        return self._sent(self.algorithm.broadcast(self.state.server))

    def _sent(self, down: Any) -> dict[str, Tensor]:
        return self.codecs.as_sent_down(down, self.settings.seed, self.t + 1)

    def _received(self, down: Any) -> Any:
        """Return the server's message of the next round as the clients read it."""
        if not isinstance(self.scheduled, PartlyLocal):
            return self.codecs.received_down(self._sent(down), down)
        shared = self.codecs.received_down(self._sent(down.shared), down.shared)
        return PartDown(down.x, shared)

    def at_client(self, round: Round, state: Any) -> Round:
        """Return a round as a client with this state sees it: with its local parameters and buffers."""
        algo = round.algorithm
        if not isinstance(algo, PartlyLocal):
            return round
        buffers = round.buffers | algo.layout.unpack(state.buffers)
        return round._replace(down=algo.receive(round.down, state), buffers=buffers)

    def from_client(self, result: Result) -> Result:
        """Return a result with the state that the client keeps, and the message and buffers that arrive."""
        job, state, up, buffers, *_ = result
        if self.codecs.changes_up:
            algo, address = job.round.algorithm, (job.round.seed, job.round.t, job.client)
            state, _, up = self.codecs.send_up(algo, state, up, job.tracked, address)
        if isinstance(self.scheduled, PartlyLocal):
            layout = self.scheduled.layout
            state = state._replace(buffers=layout.pack(buffers, state.buffers))
            buffers = layout.shared_buffers(buffers)
        finite = None if self.codecs.changes_up else result.finite
        return result._replace(state=state, up=up, buffers=buffers, finite=finite)

    def open_groups(self) -> GroupRounds:
        """Return the next global round of an algorithm with groups."""
        s, t = self.settings, self.t + 1
        algorithm = self.algorithm
        assert isinstance(algorithm, GroupedAlgorithm)
        groups, count = s.group_ids(self.n), s.group_rounds or 1
        return GroupRounds(algorithm, self.functions, groups, count, s, t, self.state)

    def new_sums(self) -> Sums:
        """Return empty sums for the next round."""
        aggregation = self.settings.aggregation
        return Sums(self.weights) if aggregation is None else RobustSums(aggregation, self.robust_fields)

    def aggregate(self, sums: Sums) -> ServerState:
        """Return the server's state and the buffers after the next round; unchanged without any client."""
        server, buffers = self.state
        if sums.up is None:
            return self.state
        cohort = Cohort(n=self.n, S=sums.S, K=sums.steps / sums.S, t=self.t + 1)
        total = sums.total()
        if self.privacy is not None:
            total = self.privacy.noised(total, self.settings.seed, self.t + 1)
        return ServerState(self.algorithm.aggregate(server, total, cohort), sums.mean_buffers(buffers))

    @property
    def is_evaluated(self) -> bool:
        """Whether the next round is evaluated."""
        return self.evaluated_after(self.t + 1)

    def evaluated_after(self, t: int) -> bool:
        """Whether round t is evaluated."""
        return t % self.settings.eval_every == 0 or t == self.settings.rounds

    def evaluate(self, state: ServerState) -> dict[str, Any]:
        """Return the evaluation of the next round; {} if that round is not evaluated."""
        t, s = self.t + 1, self.settings
        if not self.is_evaluated:
            return {}
        return self.functions.evaluate(state.server.x, state.buffers, s.seed, t)

    def work_steps(self, steps: int, samples: int) -> int:
        """Return the cost of a client's round in steps, with the pass over its data that some rules need."""
        return steps + (self.settings.passes(samples) if self.algorithm.round_gradient else 0)

    def record(
        self,
        draw: Draw,
        sums: Sums,
        evaluation: Mapping[str, Any],
        steps: Sequence[int],
        seconds: float,
        dropped: Collection[int] = (),
        silent: Collection[int] = (),
        absent: Collection[int] = (),
        work: Sequence[Work] | None = None,
    ) -> Record:
        """Return the record of the next round, with its cost.

        ``steps`` has the work of each sampled client, and ``seconds`` is how long the round took here.
        ``dropped`` are the clients whose updates were not finite, and ``absent`` those that did not answer
        in time; ``silent`` clients have sent no bytes.
        ``work`` is the work of a round that had several exchanges, instead of ``steps``.
        """
        t = self.t + 1
        deadline = self.settings.deadline
        now = (self.traffic.work(draw, steps, silent, deadline),) if work is None else tuple(work)
        work = (*self.setup, *now) if t == 1 else now
        return Record(
            round=t,
            train_loss=sums.mean_loss(),
            test_loss=evaluation.get("test_loss"),
            test_accuracy=evaluation.get("test_accuracy"),
            test_metric=evaluation.get("test_metric"),
            bytes_down=sum(sum(w.down) for w in work),
            bytes_up=sum(sum(w.up) for w in work),
            simulated_seconds=sum(self.cost.seconds(w) for w in work),
            wall_seconds=seconds,
            sampled=draw.sampled,
            tracked=draw.tracked,
            dropped=tuple(dropped),
            absent=tuple(absent),
            metrics=dict(evaluation.get("metrics", {})),
            work=work,
        )

    def commit(self, state: ServerState, record: Record) -> None:
        """End the round: store the new state and the record."""
        self.state, self.t = state, record.round
        self.history.append(record)

    def late(self, draw: Draw, steps: Sequence[int]) -> tuple[int, ...]:
        """Return the drawn clients that would answer after the deadline."""
        if self.settings.deadline is None:
            return ()
        seconds = self.cost.seconds_of_each(self.traffic.work(draw, steps))
        return tuple(i for i, s in zip(draw.sampled, seconds, strict=True) if s > self.settings.deadline)

    def identity(self) -> dict[str, Any]:
        """Return the values that must be equal for one run to continue another."""
        priced = {} if self.settings.deadline is None else {"cost": as_json(asdict(self.cost))}
        return priced | {
            "algorithm": algorithm_name(self.method),
            "hyperparameters": self.method.plain(),
            "clients": self.n,
            "dtype": str(self.functions.dtype).removeprefix("torch."),
            **self.settings.to_json(),
        }

    def run(self, clients: ClientStates, settings: Mapping[str, Any]) -> Run:
        """Return the run so far; ``settings`` are added to the settings that the run saves."""
        s = self.settings
        described: dict[str, Any] = {"rounds": s.rounds, "target": s.target, "task": self.task.name}
        if self.message_sizes is not None:
            described["messages"] = as_json(self.message_sizes)
        if self.privacy is not None:
            keeps_more = bool(self.codecs.rest) or s.local_parameters is not None
            accounting = self.privacy.accounting(self.n, s.sampled, s.tracked, keeps_more)
            described["accounting"] = accounting._asdict()
        return Run(
            algorithm=self.method,
            server=self.state.server,
            clients=clients,
            buffers=self.state.buffers,
            history=list(self.history),
            settings=self.identity() | described | dict(settings),
            environment=environment(),
            cost=self.cost,
            task=self.task,
            goal=str(self.task.goal),
        )
