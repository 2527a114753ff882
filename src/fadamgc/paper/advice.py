"""Which method to start with: what saved runs of similar federations say.

``advice.json`` has the runs' numbers (``make tables`` writes it from results/), so that advice needs neither
the records nor torch. Every experiment counts by its weight, which falls with its distance from the situation
on logarithmic axes. Methods are compared within experiments, by the ratio of their minutes (or rounds) to
those of the reference, FAdamGC, which all experiments have.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fadamgc.experiments.report.means import Difference
from fadamgc.section import Positive, Section

FILE = Path(__file__).with_name("advice.json")
REFERENCE = "fadamgc"
TRACKING = "tracking"  # the study of S~, which compares no methods
HALF = 0.5  # the share of tracked clients of the paper
KINDS = ("images", "texts", "sensors")
BITS = 32  # of a number in a message

# Two situations that differ by this factor are at distance 1; a weight is exp(-distance^2 / 2).
SCALES = {"participation": 4.0, "local_steps": 4.0, "alpha": 4.0, "parameters": 100.0}
OTHER_KIND = 2.0  # distance between kinds of data
UNKNOWN = 0.5  # distance of a value that an experiment does not have, such as alpha where clients are people
LEAST = 0.02  # experiments with a smaller share of the weight are not used
COVERED = 1 / 3  # a method needs experiments with this share of the weight
BEYOND = 1.5  # a value that is beyond all records by more than this factor is called an extrapolation
FAR = math.exp(-2)  # if no experiment has this weight, none is near


class Situation(Section):
    """A federation that wants advice.

    >>> Situation.from_table({"clients": 10, "sampled": 20}, "advise")
    Traceback (most recent call last):
        ...
    fadamgc.errors.InputError: advise sampled=20 is more than clients=10
    """

    clients: int = Field(100, ge=1)
    sampled: int = Field(10, ge=1)
    local_steps: Positive = 10
    alpha: Positive = 0.1
    parameters: float = Field(1e5, ge=1, allow_inf_nan=False)
    kind: Literal["images", "texts", "sensors"] | None = None
    down_mbps: Positive | None = None
    up_mbps: Positive | None = None
    seconds_per_step: float = Field(0.0, ge=0, allow_inf_nan=False)
    stateless: bool = False

    @model_validator(mode="after")
    def _check(self) -> Situation:
        if self.sampled > self.clients:
            raise ValueError(f"sampled={self.sampled} is more than clients={self.clients}")
        return self

    @property
    def by(self) -> str:
        """What methods are compared by: minutes where a link is given, else rounds."""
        return "rounds" if self.down_mbps is None and self.up_mbps is None else "minutes"

    @property
    def participation(self) -> float:
        """The share of the clients that is sampled."""
        return self.sampled / self.clients

    def seconds(self, method: RecordedMethod) -> float:
        """Return how long a round of a method takes; a link that is not given takes no time."""
        share = method.tracked_share
        size = BITS * self.parameters / 1e6  # of a vector, in megabits
        down = 0.0 if self.down_mbps is None else size * method.down / self.down_mbps
        up = 0.0 if self.up_mbps is None else size * (method.up + share * method.up_tracked) / self.up_mbps
        return down + up + self.local_steps * self.seconds_per_step


class RecordedMethod(BaseModel):
    """A method in an experiment: its settings, its rounds to the target by seed, and its vectors."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    label: str
    algorithm: str
    settings: dict[str, Any]
    tracked_share: float  # of the sampled clients
    rounds: dict[str, int]  # by seed; a run that missed the target has all its rounds
    missed: int
    down: float
    up: float
    up_tracked: float
    state: int  # vectors that a client keeps


class Evidence(BaseModel):
    """An experiment, as ``advice.json`` has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    study: str
    experiment: str
    data: str
    kind: Literal["images", "texts", "sensors"]
    model: str
    clients: int
    participation: float
    local_steps: float
    alpha: float | None
    parameters: int
    target: float
    methods: tuple[RecordedMethod, ...]

    @property
    def text(self) -> str:
        """The experiment and its place."""
        labels = "" if self.alpha is None else f", Dirichlet({self.alpha:g})"
        return (
            f"results/{self.study}, {self.experiment.partition(',')[0]}: {self.parameters:,} parameters, "
            f"{self.clients} clients{labels}, S/n = {self.participation:.0%}, K = {self.local_steps:g}, "
            f"to {self.target:.0%}"
        )


class Suggestion(NamedTuple):
    """A method in a situation."""

    label: str
    algorithm: str
    ratio: float  # of its rounds or minutes to those of the first suggestion
    rounds: float  # in the experiments, on average by weight
    missed: int  # runs that missed the target
    runs: int
    seconds: float  # per round
    settings: Mapping[str, Any]  # of the nearest experiment
    tracked: int | None  # S~; None where nothing is tracked
    clear: tuple[int, int]  # experiments in which the first suggestion is clearly ahead of it, and behind it
    shared: int  # experiments that have both


class Tracking(NamedTuple):
    """The share of the sampled clients that is best tracked, by the study of S~."""

    share: float
    ratio: float  # of rounds or minutes to those with half of the sampled clients
    data: tuple[str, ...]

    def text(self, situation: Situation) -> str:
        """Say it in a sentence."""
        count = max(1, round(self.share * situation.sampled))
        half = max(1, round(HALF * situation.sampled))
        return (
            f"by the study of S~ ({', '.join(self.data)}), tracking {count} of {situation.sampled} takes "
            f"{self.ratio:.2f} times as many {situation.by} as tracking {half}"
        )


class Advice(NamedTuple):
    """Methods from the best on, the experiments with their shares of the weight, S~, and warnings."""

    suggestions: list[Suggestion]
    evidence: list[tuple[float, Evidence]]
    tracking: Tracking | None
    warnings: list[str]

    def plain(self) -> dict[str, Any]:
        """Return everything as plain data."""
        return {
            "suggestions": [suggestion._asdict() for suggestion in self.suggestions],
            "relies_on": [{"weight": share, "experiment": e.text} for share, e in self.evidence],
            "tracking": None if self.tracking is None else self.tracking._asdict(),
            "warnings": self.warnings,
        }


@cache
def recorded() -> tuple[Evidence, ...]:
    """Read what the package knows."""
    lines = json.loads(FILE.read_text(encoding="utf-8"))
    return tuple(Evidence.model_validate(line) for line in lines)


def advise(situation: Situation, evidence: Iterable[Evidence] | None = None) -> Advice:
    """Return the methods from the best on, with what the advice relies on.

    >>> found = advise(Situation(clients=100, sampled=10, local_steps=10, kind="images"))
    >>> found.suggestions[0].ratio, len(found.warnings)
    (1.0, 0)
    """
    everything = tuple(recorded() if evidence is None else evidence)
    experiments = [e for e in everything if e.study != TRACKING]
    weights = [(math.exp(-(_distance(situation, e) ** 2) / 2), e) for e in experiments]
    total = sum(weight for weight, _ in weights)
    used = sorted(
        ((weight / total, e) for weight, e in weights if total and weight / total >= LEAST),
        key=lambda pair: -pair[0],
    )
    warnings = _extrapolations(situation, experiments)
    if max((weight for weight, _ in weights), default=0.0) < FAR:
        warnings.append("no experiment is near this situation; take the order as a guess")
    ranked = sorted(_scores(situation, used).items(), key=lambda item: item[1])
    suggestions = [
        _suggestion(situation, used, algorithm, ranked[0][0], math.exp(score - ranked[0][1]))
        for algorithm, score in ranked
    ]
    return Advice(suggestions, used, _tracking(situation, everything), warnings)


def _tracking(situation: Situation, experiments: Iterable[Evidence]) -> Tracking | None:
    """Return the share of tracked clients with which the reference takes the fewest rounds or minutes."""
    by_data: dict[str, dict[float, float]] = {}  # data set, share, cost
    for experiment in experiments:
        for method in experiment.methods:
            if experiment.study == TRACKING and method.algorithm == REFERENCE:
                costs = by_data.setdefault(experiment.data, {})
                costs[method.tracked_share] = math.log(_cost(situation, method))
    shares = set.intersection(*(set(costs) for costs in by_data.values())) if by_data else set()
    if HALF not in shares:
        return None
    ratios = {share: fmean(costs[share] - costs[HALF] for costs in by_data.values()) for share in shares}
    best = min(ratios, key=ratios.__getitem__)
    return Tracking(best, math.exp(ratios[best]), tuple(by_data))


def _distance(situation: Situation, evidence: Evidence) -> float:
    squares = 0.0
    for name, scale in SCALES.items():
        theirs = getattr(evidence, name)
        if theirs is None:
            squares += UNKNOWN**2
        else:
            squares += (math.log(getattr(situation, name) / theirs) / math.log(scale)) ** 2
    if situation.kind not in (None, evidence.kind):
        squares += OTHER_KIND**2
    return math.sqrt(squares)


def _extrapolations(situation: Situation, experiments: Sequence[Evidence]) -> list[str]:
    """Say which values are beyond those of all experiments with this kind of data."""
    alike = [e for e in experiments if situation.kind in (None, e.kind)]
    found = []
    for name in SCALES:
        ours = getattr(situation, name)
        values = sorted(value for e in alike if (value := getattr(e, name)) is not None)
        if values and not values[0] / BEYOND <= ours <= values[-1] * BEYOND:
            span = (
                f"from {values[0]:g} to {values[-1]:g}" if values[0] < values[-1] else f"{values[0]:g} only"
            )
            found.append(f"this extrapolates: {name} is {ours:g}, and the experiments have {span}")
    return found


def _scores(situation: Situation, used: Sequence[tuple[float, Evidence]]) -> dict[str, float]:
    """Return the mean logarithm of each method's cost relative to the reference, by algorithm."""
    ratios: dict[str, list[tuple[float, float]]] = {}
    for weight, experiment in used:
        by_name = {method.algorithm: method for method in experiment.methods}
        reference = _cost(situation, by_name[REFERENCE])
        for name, method in by_name.items():
            if not (situation.stateless and method.state):
                ratios.setdefault(name, []).append((weight, math.log(_cost(situation, method) / reference)))
    everything = sum(weight for weight, _ in used)
    return {
        name: sum(weight * ratio for weight, ratio in pairs) / covered
        for name, pairs in ratios.items()
        if (covered := sum(weight for weight, _ in pairs)) >= COVERED * everything
    }


def _cost(situation: Situation, method: RecordedMethod) -> float:
    """Return the mean rounds or minutes of a method, to the target of the experiment."""
    return fmean(_costs(situation, method).values())


def _costs(situation: Situation, method: RecordedMethod) -> dict[str, float]:
    each = 1.0 if situation.by == "rounds" else situation.seconds(method) / 60
    return {seed: rounds * each for seed, rounds in method.rounds.items()}


def _suggestion(
    situation: Situation, used: Sequence[tuple[float, Evidence]], algorithm: str, first: str, ratio: float
) -> Suggestion:
    runs, clear, shared = [], [0, 0], 0
    for weight, experiment in used:
        by_name = {method.algorithm: method for method in experiment.methods}
        if algorithm in by_name:
            runs.append((weight, by_name[algorithm]))
        if algorithm != first and algorithm in by_name and first in by_name:
            ours, theirs = (_costs(situation, by_name[name]) for name in (first, algorithm))
            sign = Difference.of([theirs[seed] - ours[seed] for seed in ours if seed in theirs]).clear
            clear[0] += sign > 0
            clear[1] += sign < 0
            shared += 1
    total = sum(weight for weight, _ in runs)
    nearest = runs[0][1]
    return Suggestion(
        label=nearest.label,
        algorithm=algorithm,
        ratio=ratio,
        rounds=sum(weight * fmean(method.rounds.values()) for weight, method in runs) / total,
        missed=sum(method.missed for _, method in runs),
        runs=sum(len(method.rounds) for _, method in runs),
        seconds=situation.seconds(nearest),
        settings=nearest.settings,
        tracked=max(1, round(nearest.tracked_share * situation.sampled)) if nearest.up_tracked else None,
        clear=(clear[0], clear[1]),
        shared=shared,
    )
