"""The settings of a federated run: the values that, with algorithm and task, determine its numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from operator import index
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.codecs import codec_table
from fadamgc.errors import InputError, listed, not_accepted, real, reason, shown, whole
from fadamgc.federation.computing import Computing
from fadamgc.federation.gradients import GradientOptions
from fadamgc.federation.privacy import Privacy
from fadamgc.federation.robust import check_aggregation
from fadamgc.federation.sampling import Batches, Draw, draw, draw_part, draw_silent, draw_steps
from fadamgc.files import as_json
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.loading import reference_of
from fadamgc.samples import DTYPES

StepsOf: TypeAlias = Callable[[int, int], int]  # the local steps of a client in a round
Sizes: TypeAlias = Sequence[int] | NDArray[np.int64]  # the samples of each client

LARGEST_COUNT = 2**53  # rounds, clients, steps, samples: they are also counted in floats
LARGEST_SEED = 2**128 - 1
SMALLEST_WEIGHT = 1e-30  # relative to the mean weight: messages are multiplied by it, in float32
DEFAULT_STEPS = 10  # local steps, if neither local_steps nor local_epochs is given
WEIGHTS = "'uniform', 'size' or one number per client"
NOT_IDENTITY = (
    "rounds",
    "target",
    "eval_clients",
    "checkpoint_every",
    "dtype",
)  # dtype: the identity has the dtype of the model instead


@dataclass(frozen=True)
class Settings:
    """How a federated run proceeds; the same object for ``simulate``, specs and Flower.

    Attributes:
        rounds: global rounds.
        sampled: clients drawn in each round; None is all.
        tracked: number of sampled clients that send tracking updates; None is all sampled clients.
        local_steps: local steps K per client and round: one number, one per client, or a function of the
            client and the round.
        local_epochs: passes over the client's data, instead of ``local_steps``; K then differs per client.
        batch_size: samples in a mini-batch; None is a client's whole data in every step.
        seed: seed of everything random.
        schedule: who takes part in each round, instead of a draw.
        weights: "uniform", "size" (a client counts as its share of the data), or one number per client.
        eval_every: rounds between two evaluations; the last round is always evaluated.
        eval_clients: whether each evaluation also has the metric on every client's data; "epoch": also that
            of every client's model after one more local epoch.
        target: stop as soon as the metric reaches this value.
        on_nonfinite: "error", or "drop" to skip a client whose update is not finite.
        checkpoint_every: rounds between two checkpoints; the last round always has one.
        groups: who is in which group, or a number of groups of equal size, for algorithms with groups; None
            is one group of all clients.
        group_rounds: group rounds in a global round; None is 1.
        dropout: probability that a sampled client does not answer; None is 0.
        stragglers: probability that a client does only a part of its steps, drawn from 1 .. K - 1; None is 0.
        deadline: seconds, by the cost model, after which the server does not wait for a client; None: it
            waits for all.
        clip_norm: largest norm of a local gradient; longer ones are scaled down to it. None: no clipping.
        weight_decay: weight of an L2 penalty, whose gradient is added to every local gradient; None: none.
        local_parameters: names of layers or parameters, or classes of layers, that stay at the clients: never
            sent, averaged or corrected. "*" stands for anything, as in file names.
        codec: how fields of messages are sent, as pairs of a field and the name of its codec; None:
            as they are.
        aggregation: "median" or "trimmed:0.1", instead of the mean over clients; None: the mean.
        privacy: clipping and noise of the clients' messages, for differential privacy; None: none.
        dtype: type of model and data; None is the model's.
        autocast: "bf16": the operations of the model that allow it run in bfloat16; None: all in ``dtype``.
        channels_last: whether images and kernels of convolutions have their channels last, which is faster on
            many GPUs. None or False: as torch has them.

    Example:
        >>> import fadamgc
        >>> fadamgc.Settings(rounds=10, sampled=5, local_steps=20).batch_size is None
        True
    """

    rounds: int
    sampled: int | None = None
    tracked: int | None = None
    local_steps: int | tuple[int, ...] | StepsOf | None = None
    local_epochs: int | None = None
    batch_size: int | None = None
    seed: int = 0
    schedule: tuple[Draw, ...] | None = None
    weights: Literal["uniform", "size"] | tuple[float, ...] = "uniform"
    eval_every: int = 1
    eval_clients: bool | Literal["epoch"] = False
    target: float | None = None
    on_nonfinite: Literal["error", "drop"] = "error"
    checkpoint_every: int = 1
    groups: tuple[tuple[int, ...], ...] | int | None = None
    group_rounds: int | None = None
    dropout: float | None = None
    stragglers: float | None = None
    deadline: float | None = None
    clip_norm: float | None = None
    weight_decay: float | None = None
    local_parameters: tuple[str, ...] | None = None
    codec: tuple[tuple[str, str], ...] | None = None
    aggregation: str | None = None
    privacy: Privacy | None = None
    dtype: torch.dtype | None = None
    autocast: Literal["bf16"] | None = None
    channels_last: bool | None = None

    @classmethod
    def of(cls, *, rounds: int | None = None, schedule: Any = None, **others: Any) -> Settings:
        """Make settings from the arguments of ``simulate``.

        A schedule may be any list of pairs ([sampled ids], [tracked ids]) and determines ``rounds`` if that
        is None; ``local_steps`` has a default; weights may be any sequence of numbers.
        """
        draws = None if schedule is None else _draws(schedule)
        if rounds is None and draws is None:
            raise InputError("rounds=None; give the number of rounds to run")
        if "weights" in others and not isinstance(others["weights"], str):
            others["weights"] = _weights(others["weights"])
        if others.get("local_parameters") is not None:
            others["local_parameters"] = _patterns(others["local_parameters"])
        if others.get("groups") is not None:
            others["groups"] = _groups(others["groups"])
        if others.get("local_steps") is None and others.get("local_epochs") is None:
            others["local_steps"] = DEFAULT_STEPS
        return cls(rounds=len(draws or ()) if rounds is None else rounds, schedule=draws, **others)

    def __post_init__(self) -> None:
        least, most = {"rounds": 0, "tracked": 0, "seed": 0}, {"seed": LARGEST_SEED}
        optional = ("sampled", "tracked", "local_steps", "local_epochs", "batch_size", "group_rounds")
        if several := not isinstance(self.local_steps, str) and listed(self.local_steps):
            steps = tuple(whole(f"local_steps[{i}]", K, 1, LARGEST_COUNT) for i, K in enumerate(several))
            object.__setattr__(self, "local_steps", steps)
        for name in ("rounds", "seed", "eval_every", "checkpoint_every", *optional):
            value = getattr(self, name)
            if name == "local_steps" and (isinstance(value, tuple) or callable(value)):
                continue
            if value is not None or name not in optional:
                count = whole(name, value, least.get(name, 1), most.get(name, LARGEST_COUNT))
                object.__setattr__(self, name, count)
        if self.local_steps is None and self.local_epochs is None:
            raise InputError("local_steps=None and local_epochs=None; give one of them")
        if self.local_steps is not None and self.local_epochs is not None:
            raise InputError(
                f"local_steps={self.local_steps} and local_epochs={self.local_epochs} are both given; "
                "give one of them"
            )
        chosen = self.eval_clients
        if not (isinstance(chosen, bool) or (isinstance(chosen, str) and chosen == "epoch")):
            raise not_accepted("eval_clients", self.eval_clients, "True, False or 'epoch'")
        if not isinstance(self.on_nonfinite, str) or self.on_nonfinite not in ("error", "drop"):
            raise not_accepted("on_nonfinite", self.on_nonfinite, "'error' or 'drop'")
        if self.target is not None:
            target = real(self.target)
            if target is None or not math.isfinite(target):
                raise not_accepted("target", self.target, "a finite number")
            object.__setattr__(self, "target", target)
        if self.codec is not None:
            object.__setattr__(self, "codec", codec_table(self.codec) or None)
        object.__setattr__(self, "aggregation", check_aggregation(self.aggregation))
        object.__setattr__(self, "privacy", Privacy.of(self.privacy))
        for name in ("clip_norm", "deadline", "weight_decay", "dropout", "stragglers"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _number(name, getattr(self, name)))
        if self.autocast not in (None, "bf16"):
            raise not_accepted("autocast", self.autocast, "None or 'bf16'")
        if self.channels_last not in (None, True, False):
            raise not_accepted("channels_last", self.channels_last, "True or False")
        object.__setattr__(self, "channels_last", True if self.channels_last else None)
        dtype: Any = self.dtype
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype in DTYPES):
            accepted = "a type of floating-point numbers such as torch.float32, of at least 16 bits"
            raise not_accepted("dtype", dtype, accepted)

    def check(self, n: int, sizes: Sizes, algorithm: AnyAlgorithm) -> None:
        """Refuse settings that do not fit the task or the algorithm."""
        S, tracked = self._numbers_drawn(n)
        if n < S:
            raise InputError(f"sampled={S} exceeds clients={n}")
        if tracked > S:
            raise InputError(f"tracked={tracked} exceeds sampled={S}")
        if self.schedule is not None:
            self._check_schedule(n)
        if isinstance(self.weights, tuple):
            bad = [w for w in self.weights if not 0 < w <= 1e100]
            if len(self.weights) != n or bad:
                raise InputError(
                    f"weights must be 'uniform', 'size' or {n} numbers > 0, one for each client; "
                    f"got {len(self.weights)} numbers" + (f", among them {bad[0]}" if bad else "")
                )
            with np.errstate(over="ignore", invalid="ignore"):
                scaled = self.weight_of(np.empty(0)) or []
            if not all(math.isfinite(w) and w >= SMALLEST_WEIGHT for w in scaled):
                raise InputError(
                    f"weights from {min(self.weights)} to {max(self.weights)} cannot be scaled to a mean "
                    f"of 1: they are too small, or one is below {SMALLEST_WEIGHT:g} of their mean; "
                    "give numbers nearer to 1"
                )
        elif self.weights not in ("uniform", "size"):
            raise not_accepted("weights", self.weights, WEIGHTS)
        if isinstance(self.local_steps, tuple) and len(self.local_steps) != n:
            raise InputError(
                f"local_steps has {len(self.local_steps)} entries for clients={n}; give one number, or one "
                "for each client"
            )
        K = max(self.planned_steps(sizes))
        if K > LARGEST_COUNT:
            raise InputError(
                f"local_epochs={self.local_epochs} is {K} local steps of a client; at most {LARGEST_COUNT} "
                "are possible"
            )
        for name in ("local_epochs", "stragglers"):
            if algorithm.coin is not None and getattr(self, name) is not None:
                raise InputError(
                    f"{name}={getattr(self, name)} is given, but {type(algorithm).__name__} draws the number "
                    "of local steps; omit it"
                )
        if isinstance(algorithm, GroupedAlgorithm):
            self._check_groups(n)
            for name in ("local_parameters", "eval_clients"):
                if getattr(self, name) not in (None, False, True):
                    raise InputError(
                        f"{name}={shown(getattr(self, name))} is given, but {type(algorithm).__name__} has "
                        "clients in groups; omit it, or use another algorithm"
                    )
        elif self.groups is not None or self.group_rounds is not None:
            raise InputError(
                f"groups={shown(self.groups)} and group_rounds={self.group_rounds} are given, but "
                f"{type(algorithm).__name__} has no groups; omit them, or use fadamgc.MTGC or "
                "fadamgc.MTGCAdam"
            )
        if algorithm.full_participation:
            self._check_full_participation(n, sizes, type(algorithm).__name__)

    def _check_schedule(self, n: int) -> None:
        assert self.schedule is not None
        if self.sampled is not None or self.tracked is not None:
            raise InputError(
                f"schedule is given together with sampled={self.sampled}, tracked={self.tracked}; "
                "the schedule says who takes part, so omit those"
            )
        if len(self.schedule) < self.rounds:
            raise InputError(f"rounds={self.rounds} exceeds the schedule's {len(self.schedule)} entries")
        for t, entry in enumerate(self.schedule, start=1):
            where = f"schedule of round {t}"
            if not entry.sampled:
                raise InputError(f"{where} samples no client; each round needs at least one")
            for name, ids in entry._asdict().items():
                if outside := [i for i in ids if not 0 <= i < n]:
                    raise InputError(f"{where}: {name} client {outside[0]} is not in 0..{n - 1}")
                if len(set(ids)) != len(ids):
                    raise InputError(f"{where}: a client is {name} twice in {shown(list(ids))}")
            if extra := sorted(set(entry.tracked) - set(entry.sampled)):
                raise InputError(f"{where}: client {extra[0]} is tracked but not sampled")

    def _check_groups(self, n: int) -> None:
        if isinstance(self.groups, int):
            if not 1 <= self.groups <= n:
                raise not_accepted("groups", self.groups, f"a number of groups from 1 to clients={n}")
            return
        seen: dict[int, int] = {}
        for j, group in enumerate(self.groups or ()):
            if not group:
                raise InputError(f"groups[{j}] is empty; each group needs at least one client")
            for i in group:
                if not 0 <= i < n:
                    raise InputError(f"groups[{j}]: client {i} is not in 0..{n - 1}")
                if seen.get(i) == j:
                    raise InputError(f"groups[{j}] has client {i} twice; give each client once")
                if i in seen:
                    raise InputError(f"client {i} is in groups[{seen[i]}] and groups[{j}]; give it one group")
                seen[i] = j
        if self.groups is not None and len(seen) < n:
            missing = next(i for i in range(n) if i not in seen)
            raise InputError(f"client {missing} is in no group; every client of 0..{n - 1} needs one")

    def group_ids(self, n: int) -> tuple[tuple[int, ...], ...]:
        """Return the clients of each group; a number of groups divides the clients in their order."""
        if isinstance(self.groups, tuple):
            return self.groups
        parts = np.array_split(np.arange(n), self.groups or 1)
        return tuple(tuple(part.tolist()) for part in parts)

    def _check_full_participation(self, n: int, sizes: Sizes, name: str) -> None:
        draws = [self._numbers_drawn(n)]
        if self.schedule is not None:
            draws = [(len(sampled), len(tracked)) for sampled, tracked in self.schedule[: self.rounds]]
        for t, (sampled, tracked) in enumerate(draws, start=1):
            if (sampled, tracked) != (n, n):
                raise InputError(
                    f"{name} needs all {n} clients sampled and tracked in every round; "
                    f"round {t} has sampled={sampled}, tracked={tracked}"
                )
        if len(self.planned_steps(sizes)) > 1 or callable(self.local_steps):
            raise InputError(
                f"{name} needs the same number of local steps at every client; use local_steps=10"
            )
        for setting in ("dropout", "stragglers", "deadline"):
            if getattr(self, setting):
                raise InputError(
                    f"{name} needs all clients in every round, with all their steps; omit "
                    f"{setting}={getattr(self, setting)}"
                )
        if self.weights != "uniform":
            raise InputError(f"{name} needs weights='uniform'; got weights={shown(self.weights)}")
        if self.on_nonfinite == "drop":
            raise InputError(f"{name} cannot continue without a client; use on_nonfinite='error'")

    def who(self, t: int, n: int) -> Draw:
        """Return who takes part in round t."""
        if self.schedule is not None:
            return self.schedule[t - 1]
        return draw(self.seed, t, n, *self._numbers_drawn(n))

    def _numbers_drawn(self, n: int) -> tuple[int, int]:
        """Return how many of n clients are sampled and tracked in a round."""
        S = n if self.sampled is None else self.sampled
        return S, S if self.tracked is None else self.tracked

    def steps(self, client: int, samples: int, t: int, coin: float | None = None) -> int:
        """Return the number of local steps K of a client with that many samples in round t, from 1.

        With a ``coin`` (see ``Algorithm.coin``) K is drawn for all clients.
        """
        if coin is not None:
            return draw_steps(self.seed, t, coin)
        K = self._all_steps(client, samples, t)
        return K if not self.stragglers else draw_part(self.seed, t, client, K, self.stragglers)

    def _all_steps(self, client: int, samples: int, t: int) -> int:
        if callable(self.local_steps):
            return self._steps_by_function(self.local_steps, client, t)
        if isinstance(self.local_steps, tuple):
            return self.local_steps[client]
        if self.local_steps is not None:
            return self.local_steps
        assert self.local_epochs is not None
        return self.local_epochs * self.passes(samples)

    @staticmethod
    def _steps_by_function(function: StepsOf, client: int, t: int) -> int:
        try:
            return whole("a number of local steps", function(client, t), 1, LARGEST_COUNT)
        except Exception as error:
            raise InputError(
                f"local_steps={shown(function)} failed for client {client} in round {t}: {reason(error)}"
            ) from error

    def planned_steps(self, sizes: Sizes, coin: float | None = None) -> set[int]:
        """Return the numbers of local steps that clients do, if all do all of them (the mean, with a coin).

        ``sizes`` are the numbers of samples of all clients.
        """
        if coin is not None:
            return {round(1 / coin)}
        if callable(self.local_steps):
            return {self._all_steps(i, int(samples), 1) for i, samples in enumerate(sizes)}
        if isinstance(self.local_steps, tuple):
            return set(self.local_steps)
        if self.local_steps is not None:
            return {self.local_steps}
        return {self._all_steps(0, int(samples), 1) for samples in np.unique(np.asarray(sizes))}

    def silent(self, t: int, sampled: Sequence[int]) -> tuple[int, ...]:
        """Return the sampled clients that do not answer in round t."""
        return draw_silent(self.seed, t, sampled, self.dropout) if self.dropout else ()

    @property
    def gradients(self) -> GradientOptions:
        """The clipping and the weight decay of every local gradient."""
        return GradientOptions(self.clip_norm, self.weight_decay or None)

    @property
    def computing(self) -> Computing:
        """How the model is computed."""
        return Computing(self.autocast, self.channels_last)

    def passes(self, samples: int) -> int:
        """Return the number of steps that one pass over a client's data costs."""
        return 1 if self.batch_size is None else -(-samples // self.batch_size)

    def weight_of(self, sizes: np.ndarray[Any, Any]) -> list[float] | None:
        """Return weights with mean 1 over all clients; None if all are equal."""
        if self.weights == "uniform":
            return None
        raw = np.asarray(sizes if self.weights == "size" else self.weights, dtype=np.float64)
        return [float(w) for w in raw * (len(raw) / raw.sum())]

    def batches(self, t: int, client: int, samples: int, coin: float | None = None) -> Batches:
        """Return the mini-batches of a client with that many samples in round t.

        With ``local_steps`` the client reads its data in random orders, one after the other, until K full
        batches are made. With ``local_epochs`` each epoch is a random order cut into batches, the last of
        which may be smaller. A client with no more data than a batch uses all of it in every step, in the
        order of its data.
        """
        K, B = self.steps(client, samples, t, coin), self.batch_size
        if B is None or samples <= B:
            return Batches(K, samples, samples)
        address, rest = (self.seed, t, client), samples % B
        if self.local_epochs is None or not rest:
            return Batches(K, B, samples, address)
        return Batches(K, B, samples, address, period=self.passes(samples), last=rest)

    def to_json(self) -> dict[str, Any]:
        """Return the settings that determine the run's numbers, as plain data (not how many rounds)."""
        names = [field.name for field in fields(self) if field.name not in NOT_IDENTITY]
        plain = {name: as_json(getattr(self, name)) for name in names}
        plain["privacy"] = self.privacy and self.privacy.plain()
        for name in (
            "codec",
            "aggregation",
            "privacy",
        ):  # without them, the identity is that of older versions
            if getattr(self, name) is None:
                del plain[name]
        return {name: reference_of(value) if callable(value) else value for name, value in plain.items()}


def _number(name: str, value: Any) -> float:
    """Return the value of a setting that is a number > 0, a weight >= 0, or a probability."""
    number, probability = real(value), name in ("dropout", "stragglers")
    or_zero = probability or name == "weight_decay"
    too_small = number is None or not math.isfinite(number) or number < 0 or (number == 0 and not or_zero)
    if number is None or too_small or (probability and number >= 1):
        accepted = "0 <= probability < 1" if probability else f"a number {'>=' if or_zero else '>'} 0"
        raise not_accepted(name, value, f"None or {accepted}")
    return number


def _draws(schedule: Any) -> tuple[Draw, ...]:
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


def _groups(value: Any) -> tuple[tuple[int, ...], ...] | int:
    accepted = "a list of lists of client numbers such as [[0, 1], [2, 3]], or a number of groups"
    if isinstance(value, (int, np.integer)) and not isinstance(value, bool):
        return int(value)
    if (entries := listed(value)) is None:
        raise not_accepted("groups", value, accepted)
    try:
        if any(isinstance(i, bool) for group in entries for i in group):
            raise not_accepted("groups", value, accepted)
        return tuple(tuple(sorted(index(i) for i in group)) for group in entries)
    except TypeError:
        raise not_accepted("groups", value, accepted) from None


def _patterns(value: Any) -> tuple[str, ...]:
    patterns = (value,) if isinstance(value, str) else tuple(listed(value) or ())
    if not patterns or not all(isinstance(pattern, str) and pattern for pattern in patterns):
        raise not_accepted("local_parameters", value, "names such as 'head' or ['*.bn*', 'BatchNorm2d']")
    return patterns


def _weights(values: Any) -> tuple[float, ...]:
    try:
        return tuple(float(value) for value in values)
    except (TypeError, ValueError, OverflowError):
        raise not_accepted("weights", values, WEIGHTS) from None
