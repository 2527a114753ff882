"""The server's part of a federation, without the network: whom to ask, what to accept, when it counts.

Nothing of a round is in the state before the round is closed, and it is closed by writing the checkpoint. A
coordinator that is killed at any moment and opened again has the state of the last closed round.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call

from fadamgc.algorithm import AnyAlgorithm, example
from fadamgc.errors import CheckpointError, FadamgcError, InputError, reason, shown, whole
from fadamgc.escape import printable
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.cost import CostModel, Work, traffic
from fadamgc.federation.problem import Buffers, Problem
from fadamgc.federation.run import Record, Run, environment
from fadamgc.federation.sampling import Draw, draw
from fadamgc.federation.settings import Settings
from fadamgc.federation.sums import Sums
from fadamgc.files import as_json
from fadamgc.flower.client_store import check_experiment_name
from fadamgc.flower.protocol import (
    MAX_GENERATION,
    NEVER,
    RefusedError,
    Reply,
    Request,
    Stamp,
    describe,
)
from fadamgc.flower.server_store import ServerStore
from fadamgc.methods import algorithm_name
from fadamgc.task import Task

log = logging.getLogger("fadamgc")

REMEMBERED = 100  # refusals
LARGEST_LOSS = 1e30
LAST_ROUNDS = 5  # whose typical norms are remembered
STEPS = "local steps"  # how many are typical is remembered as norms are
PROBE = 256  # test samples that are looked at in a round without an evaluation
NORMS = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


class Asked(NamedTuple):
    """A request to one client."""

    request: Request
    tracked: bool


class Scale(NamedTuple):
    """How long a vector of the clients' messages typically is."""

    largest: float = 0.0  # the largest median over the last rounds that there has been
    recent: tuple[float, ...] = ()  # the median norm of each of the last rounds

    def after(self, norms: Iterable[float]) -> Scale:
        """With the norms that were accepted in one more round; those that are 0 say nothing."""
        lengths = [norm for norm in norms if norm > 0]
        if not lengths:
            return self
        recent = (*self.recent, median_low(lengths))[-LAST_ROUNDS:]
        return Scale(max(self.largest, median_low(recent)), recent)

    def reference(self, norms: Iterable[float]) -> float:
        """What the norms of a round are compared with; 0 if there is nothing to compare them with.

        The median of two norms is the lower one, so that one client of two cannot move it up.
        """
        lengths = [norm for norm in norms if norm > 0]
        return max(self.largest, median_low(lengths) if len(lengths) > 1 else 0.0)


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
        max_norm_ratio: refuse a client whose message has a vector, or a change of buffers, that is longer
            than this many times what is typical: the larger of the median of this round and of the largest
            median of earlier rounds. A client with more local steps than is typical may go further, in
            proportion, up to this many times. None accepts any length.
        max_samples: refuse a client that says that it has more samples; None accepts any number.
        max_size_ratio: with weights="size", refuse a client that says that it has more than this many times
            the median number of samples; None accepts any number.
        min_clients: a round with fewer answers does not count.
        checkpoints: how many checkpoints are kept, the newest included.
        restore_round: go back to the checkpoint of this round, and reset all states; None resumes from the
            newest checkpoint.
        unbind: clients that are no longer bound to the key of their node; they are bound to the next key.
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
        self.algorithm, self.task, self.n, self.settings = algorithm, task, clients, settings
        self.experiment, self.max_norm, self.min_clients = experiment, max_norm, min_clients
        self.max_norm_ratio, self.max_samples, self.max_size_ratio = (
            max_norm_ratio,
            max_samples,
            max_size_ratio,
        )
        self.facts = dict(facts or {})
        self.store = None if store is None else ServerStore(store, whole("checkpoints", checkpoints, 1))
        self.cost = cost or CostModel()
        self.cost.check(clients)
        self.problem = Problem(task, settings.dtype)
        self.traffic = traffic(algorithm, self.problem.flat.d, self.problem.x0.dtype, self.problem.buffers0)
        kinds = example(algorithm, torch.zeros(self.problem.flat.d, dtype=self.problem.x0.dtype))
        self._up = kinds.up
        self._variances = {
            f"{name}.running_var" if name else "running_var"
            for name, module in self.problem.module.named_modules()
            if isinstance(module, NORMS)
        }
        self.server: Any = None  # None: it begins with the clients' gradients, which have not been collected
        self.buffers = self.problem.buffers0
        self.t, self.generation = 0, 0
        self.counted: dict[int, Stamp] = {}
        self.samples: dict[int, int] = {}
        self.history: list[Record] = []
        self.setup: tuple[Work, ...] = ()
        self.refusals: list[str] = []  # the last of them, for people
        self.scales: dict[str, Scale] = {}  # of each vector and buffer
        self.keys: dict[int, str] = {}  # of the node that speaks for a client
        if not algorithm.init_gradient:
            self.server = algorithm.init_server(self.problem.x0)
        if self.store is not None:
            # Before anything is asked: no two starts have the same number.
            found = self.store.take_over(needed=restore_round is None)
            if found is not None:
                self._restore(self.store, *found)
        self.attempt = 1 if self.store is None else self.store.attempt
        if restore_round is not None:
            self._go_back(restore_round)
        elif reset_states:
            self._reset()
        for client in unbind:
            self.keys.pop(client, None)
        self._write()
        self._asked: dict[int, Asked] = {}
        self._replies: dict[int, Reply] = {}
        self._norms: dict[int, dict[str, float]] = {}  # of the replies
        self._screened = False
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
        self._replies, self._norms, self._screened = {}, {}, False
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

    def wanted(self, client: int) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """What a client's reply must contain: vectors and buffers, by name, with tensors of their kind."""
        asked = self._asked.get(client)
        if asked is None:
            return {}, {}
        if not asked.request.stamp.round:
            return {"g": self.problem.x0}, {}
        return self._fields(asked.tracked), dict(self.buffers)

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
            norms = self._check(client, reply)
        except RefusedError as error:
            self.refuse(error)
            raise
        self._replies[client], self._norms[client], self._screened = reply, norms, False

    def refuse(self, error: Exception) -> None:
        """Remember that something was refused; it goes into the next checkpoint."""
        self.refusals = [*self.refusals, f"round {self.t + 1}: {printable(error, 500)}"][-REMEMBERED:]

    def welcome(self, client: int, samples: int) -> None:
        """Take in who a client is.

        Raises:
            RefusedError: it has another number of samples than its weight was made of, or too many.
        """

        def refuse(why: str) -> None:
            error = RefusedError("samples", f"client {client} has {samples} samples, {why}")
            self.refuse(error)
            raise error

        if self.max_samples is not None and samples > self.max_samples:
            refuse(f"more than max_samples={self.max_samples}")
        known = self.samples.get(client)
        if self.settings.weights == "size" and known not in (None, samples):
            refuse(
                f"and had {known}: with weights = 'size' that number stays, or y is no longer the mean. "
                "Reset all states (reset-states = true)"
            )
        self.samples[client] = samples
        if self.settings.weights == "size" and len(self.samples) == self.n and not self.counted:
            most = (self.max_size_ratio or math.inf) * median_low(self.samples.values())
            for other in [i for i, size in self.samples.items() if size > most]:
                del self.samples[other]
            if client not in self.samples:
                refuse(
                    f"more than {self.max_size_ratio:g} times the median; with weights = 'size' it would "
                    "decide alone. Set max-size-ratio higher if that number is right"
                )

    def check_key(self, client: int, key: str) -> None:
        """Refuse a node that speaks for a client with another key than the first one that did.

        Args:
            client: number of the client.
            key: digest of the node's public key; empty if the node has none.

        Raises:
            RefusedError: the client is bound to another key, the key to another client, or there is no key.
        """
        bound = self.keys.get(client)
        other = next((i for i, its in self.keys.items() if its == key and i != client), None)
        why = None
        if not key:
            why = "clients are bound to the keys of their nodes (bind-clients = 'on'), and it shows no key"
        elif bound is not None and bound != key:
            why = f"that client is bound to key {bound[:16]}, not {key[:16]}"
        elif other is not None:
            why = f"its key {key[:16]} is bound to client {other}"
        if why is not None:
            bound_ones = ", ".join(str(i) for i in (client, other) if i in self.keys)
            remedy = (
                f"; if that is right, run once with unbind-clients = '{bound_ones}'" if bound_ones else ""
            )
            error = RefusedError("key", f"it says that it is client {client}, but {why}{remedy}")
            self.refuse(error)
            raise error

    def bind(self, client: int, key: str) -> None:
        """Accept a client only from this key from now on."""
        self.keys[client] = key

    def screen(self) -> tuple[int, ...]:
        """Refuse the replies of this round that are out of all proportion; to be called when all are there.

        Returns:
            The clients whose replies were refused.
        """
        if self.max_norm_ratio is None or self._screened:
            return ()
        self._screened = True
        ratio = self.max_norm_ratio
        steps = {i: norms[STEPS] for i, norms in self._norms.items()}
        typical_steps = self._typical(STEPS, steps)
        reasons: dict[int, str] = {}
        for name in sorted({name for norms in self._norms.values() for name in norms} - {STEPS}):
            lengths = {i: norms[name] for i, norms in self._norms.items() if name in norms}
            typical = self._typical(name, lengths)
            if not typical:
                continue  # there is nothing to compare with
            for i, length in lengths.items():
                further = min(max(steps[i] / typical_steps, 1.0), ratio) if typical_steps else 1.0
                if length > max(ratio * further * typical, self._size_of(name)):
                    reasons.setdefault(
                        i,
                        f"{name} has norm {length:.4g}, more than max_norm_ratio={ratio:g} times what is "
                        f"typical ({typical:.4g})",
                    )
        for i in sorted(reasons):
            error = RefusedError("norm", f"the reply of client {i} is refused: {reasons[i]}")
            log.warning("client %d: %s", i, error)
            self.refuse(error)
            del self._replies[i], self._norms[i]
        return tuple(sorted(reasons))

    def _typical(self, name: str, values: Mapping[int, float]) -> float:
        return self.scales.get(name, Scale()).reference(values.values())

    def _size_of(self, name: str) -> float:
        """The norm of what a vector or buffer is added to, if there is such a thing; 0 if not."""
        if name in self.buffers:
            return self._length(name, self.buffers[name], torch.zeros_like(self.buffers[name]))
        value = getattr(self.server, name.removeprefix("d"), None) if name.startswith("d") else None
        return _norm(value) if isinstance(value, Tensor) else 0.0

    def _length(self, name: str, value: Tensor, other: Tensor) -> float:
        """How far a buffer is from another; of variances, their square roots are compared."""
        both = value.double(), other.double()
        first, second = (b.clamp(min=0).sqrt() for b in both) if name in self._variances else both
        return _norm(first - second)

    def _check(self, client: int, reply: Reply) -> dict[str, float]:
        def refuse(kind: str, why: str) -> None:
            raise RefusedError(kind, f"the reply of client {client} is refused: {why}")

        asked = self._asked.get(client)
        if asked is None:
            refuse("not asked", "it was not asked in this round")
            return {}
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
                f"it answers {describe(reply.stamp)} of {reply.experiment!r}, asked was "
                f"{describe(request.stamp)} of {request.experiment!r}",
            )
        if client in self._replies:
            refuse("twice", "it has already answered")
        return self._check_numbers(client, reply, refuse)

    def _check_numbers(
        self, client: int, reply: Reply, refuse: Callable[[str, str], None]
    ) -> dict[str, float]:
        """Check a reply; return the norms of its vectors and of its changes to the buffers."""
        if not (isinstance(reply.steps, int) and 1 <= reply.steps <= 10**9):
            refuse("steps", f"{reply.steps!r} local steps")
        known = self.samples.get(client)
        if known is not None and reply.stamp.round and reply.steps != self.settings.steps(known):
            refuse("steps", f"{reply.steps} local steps, not {self.settings.steps(known)}")
        if not (isinstance(reply.loss, float) and abs(reply.loss) <= LARGEST_LOSS):
            refuse("not finite", f"its loss is {reply.loss!r}")
        vectors, buffers = self.wanted(client)
        for kind, given, wanted in (("update", reply.up, vectors), ("buffers", reply.buffers, buffers)):
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
        for name in self._variances & set(reply.buffers):
            if bool((reply.buffers[name] < 0).any()):
                refuse("variance", f"{name} has variances below 0")
        norms = {name: _norm(value) for name, value in reply.up.items()}
        for name, length in norms.items():
            if self.max_norm is not None and length > self.max_norm:
                refuse("norm", f"{name} has norm {length:.4g}, more than max_norm={self.max_norm:g}")
        norms |= {name: self._length(name, b, self.buffers[name]) for name, b in reply.buffers.items()}
        for name, length in norms.items():
            if not math.isfinite(length):
                refuse("not finite", f"the norm of {name} is not finite")
        return norms | {STEPS: float(reply.steps)}

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
        """End the round: with the replies if they are enough, without any if not. A setup has no record.

        A round whose model is not finite, or has no finite test loss, does not count: the state stays as it
        was, and the clients drop theirs when they are asked again.
        """
        self.screen()
        if self.needs_setup:
            if self.enough:
                self._close_setup()
            return None
        replies = self._replies if self.enough else {}
        t = self.t + 1
        sums, server, buffers = self._sum(replies)
        evaluation: dict[str, float] = {}
        why: str | None
        if not _finite((*server, *buffers.values())):
            why = "what the replies sum up to is not finite"
        else:
            evaluation, why = self._evaluate(t, server, buffers)
            if why is not None and self._evaluate(t, self.server, self.buffers)[1] is not None:
                why = None  # the replies are not the cause
        if why is not None:
            why = f"{why}; none of them counts"
            log.warning("round %d is refused: %s", t, why)
            self.refuse(RefusedError("not finite", why))
            replies = {}
            sums, server, buffers = self._sum(replies)
            evaluation, _ = self._evaluate(t, server, buffers)
        counted = self.counted | {i: self._asked[i].request.stamp for i in replies}
        record = self._record(t, evaluation, sums, replies)
        scales = dict(self.scales)
        for name in {name for i in replies for name in self._norms[i]}:
            accepted = [self._norms[i][name] for i in sorted(replies) if name in self._norms[i]]
            scales[name] = scales.get(name, Scale()).after(accepted)
        before = self.server, self.buffers, self.t, self.counted, self.history, self.scales
        self.server, self.buffers, self.t, self.counted = server, buffers, t, counted
        self.history, self.scales = [*self.history, record], scales
        try:
            self._write()
        except BaseException:
            self.server, self.buffers, self.t, self.counted, self.history, self.scales = before
            raise
        self._asked, self._replies, self._norms = {}, {}, {}
        return record

    def _evaluate(self, t: int, server: Any, buffers: Buffers) -> tuple[dict[str, float], str | None]:
        """The evaluation of round t, if it has one, and what is wrong with the model, if anything is."""
        evaluation: dict[str, float] = {}
        if t % self.settings.eval_every == 0 or t == self.settings.rounds:
            try:
                evaluation = self.problem.evaluate(server.x, buffers, self.settings.seed, t)
            except InputError as error:  # such as a custom metric that fails on numbers that are not finite
                if self._probe(server.x, buffers) is None:
                    raise
                return {}, str(error)
            loss = evaluation.get("test_loss", 0.0)
        else:
            loss = self._probe(server.x, buffers) or 0.0
        if math.isfinite(loss):
            return evaluation, None
        return evaluation, f"with the replies, the loss on the test data is {loss}"

    @torch.no_grad()
    def _probe(self, x: Tensor, buffers: Buffers) -> float | None:
        """The loss on the first test samples if it is not finite; None if there is nothing wrong."""
        if self.problem.test is None:
            return None
        inputs, targets = (part[:PROBE].clone() for part in self.problem.test)
        module = self.problem.module
        state = {**self.problem.parameters(x), **buffers, **self.problem.fixed}
        module.eval()
        try:
            with torch.random.fork_rng(devices=[]):
                loss = float(self.task.loss(functional_call(module, state, (inputs,)), targets))
        except Exception as error:
            raise InputError(f"model or loss failed on the test data: {reason(error)}") from error
        finally:
            module.train()
        return None if math.isfinite(loss) else loss

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
            sums.add(i, reply.steps, up, buffers, torch.tensor(reply.loss, dtype=self.problem.x0.dtype))
        return (
            sums,
            sums.aggregate(self.algorithm, self.server, self.n, self.t + 1),
            sums.mean_buffers(self.buffers),
        )

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
        self, t: int, evaluation: Mapping[str, float], sums: Sums, replies: Mapping[int, Reply]
    ) -> Record:
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
            "scales": {name: list(scale) for name, scale in self.scales.items()},
            "keys": {str(i): key for i, key in self.keys.items()},
        }
        self.store.write(content, tensors)

    def _restore(self, store: ServerStore, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Go on from a checkpoint."""
        here, there = as_json(self._belongs()), content["identity"]
        for key in {**here, **there}:
            if here.get(key) != there.get(key):
                raise CheckpointError(
                    f"{store.folder} is the checkpoint of another experiment: "
                    f"{key}={shown(there.get(key))} there, "
                    f"{shown(here.get(key))} here; give another experiment, or the settings that it had"
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
        scales = content.get("scales", {})  # not there in the checkpoints of 0.1
        self.scales = {name: Scale(largest, tuple(recent)) for name, (largest, recent) in scales.items()}
        self.keys = {int(i): key for i, key in content.get("keys", {}).items()}

    def _go_back(self, t: int) -> None:
        """Take the model of an earlier round, and reset the clients' states, which are of later rounds."""
        if self.store is None:
            raise InputError(f"restore_round={t} is not accepted; there is no folder with checkpoints")
        generation, keys, refusals = self.generation, self.keys, self.refusals
        self._restore(self.store, *self.store.read(t))
        self.generation, self.keys, self.refusals = (
            max(generation, self.generation),
            keys or self.keys,
            refusals,
        )
        self._reset()
        log.info("back at round %d; the states of all clients are reset", t)

    def _reset(self) -> None:
        """New states for all clients. The model stays, as if the experiment began with it."""
        if self.algorithm.init_gradient and self.server is not None:
            raise InputError(
                f"{type(self.algorithm).__name__} begins with the clients' gradients at the first model; its "
                "states cannot begin anew with another"
            )
        # Larger than any of this server's. The time is for a server whose checkpoint is gone: the number is
        # then likely to be larger than what clients have seen. Otherwise the clock may be wrong.
        self.generation = max(self.generation + 1, min(int(time.time()), MAX_GENERATION // 2))
        self.counted, self.samples = {}, {}
        if self.server is not None:
            self.server = self.algorithm.init_server(self.server.x)


def _norm(value: Tensor) -> float:
    return float(torch.linalg.vector_norm(value.double()))


def _finite(values: Iterable[Tensor]) -> bool:
    return all(bool(torch.isfinite(value).all()) for value in values if value.is_floating_point())
