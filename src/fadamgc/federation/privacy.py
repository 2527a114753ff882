"""Differential privacy of clients: every client's message is clipped, and noise is added to the sum.

For a field with the clip c and a round t,

    up_i  = up_i min(1, c / |up_i|)               what the server reads of client i, after codecs
    total = sum of the up_i + noise c N(0, I)     drawn once per round, at the address (seed, t, field)

Clients follow what arrives (ADR 9): their states change by the clipped fields. They do not follow the noise,
so y is the mean of the y_i plus the noise of all rounds; ADR 12 says why. ``accounting.py`` computes epsilon.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fadamgc.algorithm import AnyAlgorithm, Cohort, example
from fadamgc.errors import InputError, nearest, not_accepted, real, shown, whole
from fadamgc.federation.accounting import Accounting
from fadamgc.federation.sampling import NOISE, torch_seed
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.toml import flat
from fadamgc.tree import from_names, leaves, map_leaves, named_leaves, names

KEYS = ("clip", "noise")
TABLE = "fadamgc.Privacy(clip={'dx': 1.0}, noise=1.0), or a table with clip and noise"


@dataclass(frozen=True)
class Privacy:
    """How much one client can change the messages' sum, and how much noise hides it.

    Attributes:
        clip: the largest norm of each field that clients send, ``{"dx": 1.0, "dy": 0.5}``. The last part of
            the name of a nested field is enough: "dy" for "correction.dy".
        noise: the standard deviation of the noise in the sum over clients, as a multiple of the field's clip;
            0 is clipping only, which is not private.

    Example:
        >>> import fadamgc
        >>> privacy = fadamgc.Privacy(clip={"dx": 1.0}, noise=4.0)
        >>> epsilon = privacy.epsilon(fadamgc.FedAvg(), rounds=60, clients=400, sampled=100, delta=1e-5)
        >>> round(epsilon, 1)
        5.7
    """

    clip: Mapping[str, float]
    noise: float

    def __post_init__(self) -> None:
        if not isinstance(self.clip, Mapping) or not self.clip:
            raise not_accepted("privacy clip", self.clip, "the largest norm of each field, {'dx': 1.0}")
        clips = {str(field): real(norm) for field, norm in flat(self.clip)}
        for field, norm in clips.items():
            if norm is None or not math.isfinite(norm) or norm <= 0:
                raise not_accepted(f"privacy clip of {field}", dict(flat(self.clip))[field], "a number > 0")
        object.__setattr__(self, "clip", dict(sorted(clips.items())))
        noise = real(self.noise)
        if noise is None or not math.isfinite(noise) or noise < 0:
            raise not_accepted("privacy noise", self.noise, "a number >= 0")
        object.__setattr__(self, "noise", noise)

    def __hash__(self) -> int:
        return hash((tuple(self.clip.items()), self.noise))

    @classmethod
    def of(cls, value: Any) -> Privacy | None:
        """Make it from a table; None and an empty table are none.

        >>> Privacy.of({"clip": {"dx": 1}, "noise": 0.5})
        Privacy(clip={'dx': 1.0}, noise=0.5)
        """
        if value is None or isinstance(value, Privacy):
            return value
        if not isinstance(value, Mapping):
            raise not_accepted("privacy", value, TABLE)
        if not value:
            return None
        for key in value:
            if key not in KEYS:
                raise InputError(
                    f"privacy has no key {shown(key)}{nearest(str(key), KEYS)}; it has clip, noise"
                )
        if missing := [key for key in KEYS if key not in value]:
            raise InputError(f"privacy={shown(dict(value))} has no {missing[0]}; give {TABLE}")
        return cls(**value)

    def plain(self) -> dict[str, Any]:
        """Return it as plain data; the inverse of ``of``."""
        return {"clip": dict(self.clip), "noise": self.noise}

    def epsilon(
        self,
        algorithm: AnyAlgorithm,
        *,
        rounds: int,
        clients: int,
        sampled: int | None = None,
        tracked: int | None = None,
        delta: float = 1e-5,
    ) -> float:
        """Return epsilon of a run with this algorithm, before it is run; ``run.epsilon`` is that of a run.

        Args:
            algorithm: the algorithm; it determines which fields are sent, and whether clients keep a state.
            rounds: global rounds.
            clients: number of all clients.
            sampled: clients drawn in each round; None is all.
            tracked: sampled clients that send tracking updates; None is all sampled clients.
            delta: the other number of (epsilon, delta)-privacy, less than 1 / clients.
        """
        n = whole("clients", clients, 1)
        S = n if sampled is None else whole("sampled", sampled, 1, n)
        if tracked is not None:
            whole("tracked", tracked, 0, S)
        whole("rounds", rounds, 0)
        mechanism = Mechanism.of(self, algorithm.at(1))
        return mechanism.accounting(clients, sampled, tracked).epsilon(rounds, delta)


@dataclass(frozen=True)
class Mechanism:
    """Clipping and noise of the messages of one algorithm.

    Attributes:
        clip: the largest norm of each field of the clients' messages, by its full name.
        noise: see ``Privacy``.
        tracked: the fields that only tracked clients send.
        keeps_state: whether clients keep a state between rounds.
    """

    clip: Mapping[str, float]
    noise: float
    tracked: tuple[str, ...]
    keeps_state: bool

    @classmethod
    def of(cls, privacy: Privacy, algorithm: AnyAlgorithm) -> Mechanism:
        """Return the mechanism of an algorithm; refuse one whose messages cannot be made private."""
        name = type(algorithm).__name__
        if isinstance(algorithm, GroupedAlgorithm):
            raise InputError(
                f"privacy is given, but {name} has clients in groups; omit it, or use another algorithm"
            )
        if algorithm.init_gradient:
            raise InputError(
                f"privacy is given, but the clients of this {name} send their gradients before round 1, "
                "without noise; start with init='zero', or use another algorithm"
            )
        sample = example(algorithm, torch.zeros(3))
        up = named_leaves(sample.up)
        clip = _by_field(privacy.clip, tuple(up), name)
        numbers = [field for field, leaf in up.items() if leaf.shape == (1,)]
        signed = [] if numbers else [field for field in up if not _takes_any_sign(algorithm, field)]
        for fields, why in ((numbers, "is a number and not a vector"), (signed, "must not be negative")):
            if fields:
                raise InputError(
                    f"privacy is given, but the field {fields[0]} that clients of {name} send {why}, which "
                    "noise would change; use another algorithm, such as fadamgc.FedAvg or fadamgc.FAdamGC"
                )
        tracked = tuple(field for field in up if field.partition(".")[0] in algorithm.tracked_only)
        return cls(clip, privacy.noise, tracked, bool(names(sample.client)))

    def clipped(self, fields: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the fields of a client's message, each scaled down to its largest norm."""
        return {name: scaled_down(vector, self.clip[name]) for name, vector in fields.items()}

    def noised(self, total: Any, seed: int, t: int) -> Any:
        """Return the sum of the messages of round t with its noise."""
        if not self.noise:
            return total
        fields = named_leaves(total)
        for number, (name, leaf) in enumerate(fields.items()):
            generator = torch.Generator().manual_seed(torch_seed(seed, NOISE, t, number))
            drawn = torch.randn(leaf.shape, generator=generator, dtype=leaf.dtype).to(leaf.device)
            fields[name] = leaf + self.noise * self.clip[name] * drawn
        return from_names(total, fields)

    def accounting(
        self, n: int, sampled: int | None, tracked: int | None, keeps_more: bool = False
    ) -> Accounting:
        """Return what epsilon depends on; ``keeps_more``: clients keep something else than their state."""
        S = n if sampled is None else sampled
        share = 1.0 if tracked is None else min(tracked, S) / S
        fields, secret = len(self.clip) - len(self.tracked), not (self.keeps_state or keeps_more)
        return Accounting(self.noise, min(1.0, S / n), share, fields, len(self.tracked), secret)


def scaled_down(vector: Tensor, norm: float) -> Tensor:
    """Return a vector with at most this norm (up to rounding), in its direction.

    >>> scaled_down(torch.tensor([3.0, 4.0]), 1.0), scaled_down(torch.tensor([3.0, 4.0]), 9.0)
    (tensor([0.6000, 0.8000]), tensor([3., 4.]))
    """
    length: Tensor = torch.linalg.vector_norm(vector, dtype=torch.float64)
    scaled = vector.double() * (norm / length.clamp(min=norm))
    return scaled.to(vector.dtype)


def check_privacy(privacy: Privacy | None, settings: Any, algorithm: AnyAlgorithm) -> Mechanism | None:
    """Return the mechanism of a run, if it has one; refuse settings with which epsilon would not hold.

    ``settings`` are those of a run, or a [run] of a spec.
    """
    if privacy is None:
        return None
    for name, plain, remedy in (
        ("weights", "uniform", "one client could weigh more than its clip; use weights='uniform'"),
        ("aggregation", None, "noise is added to a sum; omit one of the two"),
        ("schedule", None, "epsilon needs clients that are drawn at random; use sampled and tracked"),
        ("local_epochs", None, "the number of steps depends on how much data a client has; use local_steps"),
        ("deadline", None, "who is late depends on the clients' data; omit it, or use dropout"),
        ("on_nonfinite", "error", "the number of clients would depend on their data; use 'error'"),
    ):
        if (value := getattr(settings, name, plain)) != plain:
            raise InputError(f"privacy is given together with {name}={shown(value)}, but {remedy}")
    return Mechanism.of(privacy, algorithm)


def check_buffers(buffers: Mapping[str, Tensor]) -> None:
    """Refuse buffers that clients would send without noise."""
    if buffers:
        raise InputError(
            f"privacy is given, but the model's buffer {next(iter(buffers))} is averaged without noise; use "
            "layers without running statistics (GroupNorm), or local_parameters='BatchNorm2d'"
        )


def _by_field(clip: Mapping[str, float], fields: tuple[str, ...], owner: str) -> dict[str, float]:
    """Return the clip of each field; refuse fields without one, and clips of no field."""
    clips: dict[str, float] = {}
    sent = f"clients of {owner} send {', '.join(fields)}"
    for key, norm in clip.items():
        found = [field for field in fields if field == key or field.endswith(f".{key}")]
        if not found:
            raise InputError(f"privacy clip has {key!r}, which is not sent{nearest(key, fields)}; {sent}")
        for field in found:
            if field in clips:
                raise InputError(f"privacy clip has two norms for {field}; give one of them")
            clips[field] = norm
    if missing := [field for field in fields if field not in clips]:
        raise InputError(f"privacy clip has no norm for {missing[0]}; give one for every field: {sent}")
    return {field: clips[field] for field in fields}


def _takes_any_sign(algorithm: AnyAlgorithm, field: str) -> bool:
    """Whether a round stays finite after the server has read negative numbers in a field."""
    x = torch.zeros(3)
    sample = example(algorithm, x)
    up = map_leaves(torch.zeros_like, sample.up)
    up = from_names(up, named_leaves(up) | {field: torch.full_like(named_leaves(up)[field], -1e3)})
    g = x if algorithm.round_gradient else None
    server = algorithm.aggregate(sample.server, up, Cohort(n=1, S=1, K=1, t=1))
    down, client = algorithm.broadcast(server), sample.client
    x, local = algorithm.step(down, client, algorithm.begin(down, client, g), down.x, torch.ones(3))
    client, up = algorithm.finish(down, client, local, x, 1, True)
    server = algorithm.aggregate(server, up, Cohort(n=1, S=1, K=1, t=2))
    return all(bool(leaf.isfinite().all()) for leaf in leaves((server, client, up)))
