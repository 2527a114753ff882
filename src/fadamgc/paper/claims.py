"""The paper's claims, and what the saved runs say about them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, TypeAlias

from fadamgc.experiments.report import tables
from fadamgc.experiments.report.means import Difference
from fadamgc.experiments.report.numbers import (
    Experiments,
    ReportedExperiment,
    Results,
    Row,
    difference,
    values_by_seed,
)
from fadamgc.paper import theory
from fadamgc.paper.published import METHODS, minutes_of_rounds

IMAGES = ("cifar10", "cifar100", "tiny-imagenet")
TEXTS = ("20_newsgroups", "glue/qnli", "glue/qqp", "glue/sst2")
LOCAL_ADAM, FA_NT, FADAMGC = "local_adam", "fa_nt", "fadamgc"
Records: TypeAlias = Mapping[str, Experiments]  # by the name of the study


class Finding(NamedTuple):
    """What the runs of one experiment say about a claim."""

    study: str  # empty: the paper's own numbers
    experiment: str
    holds: bool | None  # None: it cannot be told
    numbers: str


class Claim(NamedTuple):
    """A claim of the paper, and the function that looks for it in the records."""

    text: str
    check: Callable[[Records], Iterable[Finding]]


# Comparing two methods.


def ahead(results: Results, label: str, rival: str, measure: str) -> int:
    """Return 1 if a method is ahead on the way to the target, -1 if its rival is, 0 if it cannot be told.

    One is ahead if the 95 % confidence interval of the paired difference over seeds excludes 0, where a run
    that missed the target counts with all its rounds, or if all runs of the other diverged.
    """
    rows = {row.method.label: row for row in results.rows}
    ours, theirs = rows[label], rows[rival]
    if not ours.reached and not theirs.reached:
        return 0
    if ours.all_diverged or theirs.all_diverged:
        return 1 if theirs.all_diverged else -1
    return difference(results, label, rival, measure).clear


def _row(experiment: ReportedExperiment, method: str) -> Row | None:
    """Return the row of a method, given by its algorithm or its label."""
    rows = experiment.results.rows
    return next((row for row in rows if method in (row.method.algorithm, row.method.label)), None)


def _orders(
    study: str, experiment: ReportedExperiment, pairs: Sequence[tuple[str, str]], measure: str = "rounds"
) -> Iterator[Finding]:
    """Find whether the first method of each pair is ahead of the second; nothing if one has no row."""
    results = experiment.results
    rows = [tuple(_row(experiment, method) for method in pair) for pair in pairs]
    orders, texts = [], {}
    for ours, theirs in rows:
        if ours is None or theirs is None or not ours.runs or not theirs.runs:
            return
        orders.append(ahead(results, ours.method.label, theirs.method.label, measure))
        for row in (ours, theirs):
            texts[row.method.label] = f"{row.method.label} {tables.to_target(results, row, measure).text}"
    yield Finding(study, experiment.name, _all(orders), f"{measure}: {', '.join(texts.values())}")


def _all(orders: Sequence[int]) -> bool | None:
    """Return whether all orders are as claimed; None if no order is opposite and some are not clear."""
    return False if -1 in orders else None if 0 in orders else True


def _below(values: Sequence[float], bound: float) -> bool | None:
    """Return whether the mean of the values, one per seed, is below a bound; None if it cannot be told."""
    return {1: True, -1: False, 0: None}[Difference.of([bound - value for value in values]).clear]


def _paired(
    one: tuple[ReportedExperiment, Row], other: tuple[ReportedExperiment, Row], measure: str
) -> list[tuple[float, float]]:
    """List the values of two rows, by the seeds that both have."""
    ours, theirs = (values_by_seed(e.results, row.method.label, measure) for e, row in (one, other))
    return [(value, theirs[seed]) for seed, value in ours.items() if seed in theirs]


# One claim each.


def _first_of_all(data: Sequence[str], measure: str) -> Callable[[Records], Iterator[Finding]]:
    """Find whether FAdamGC is ahead of all methods that were run, where the paper's methods were."""

    def check(records: Records) -> Iterator[Finding]:
        for study, experiment in _main_rows(records, data):
            results = experiment.results
            ours = _row(experiment, FADAMGC)
            if ours is None or not ours.runs:
                continue
            others = [row.method.label for row in results.rows if row is not ours and row.runs]
            orders = {label: ahead(results, ours.method.label, label, measure) for label in others}
            words = {1: "ahead of", -1: "behind", 0: "not clear against"}
            parts = [
                f"{word} {', '.join(label for label in others if orders[label] == order)}"
                for order, word in words.items()
                if order in orders.values()
            ]
            yield Finding(study, experiment.name, _all([*orders.values()]), f"{measure}: {'; '.join(parts)}")

    return check


def _between(records: Records) -> Iterator[Finding]:
    for study, experiment in _main_rows(records, (*IMAGES, *TEXTS)):
        yield from _orders(study, experiment, [(FA_NT, LOCAL_ADAM), (FADAMGC, FA_NT)])


def _main_rows(records: Records, data: Sequence[str]) -> Iterator[tuple[str, ReportedExperiment]]:
    """List the experiments that compare methods of different kinds, as the paper's main table does."""
    for study, experiments in records.items():
        for experiment in experiments:
            algorithms = {method.algorithm for method in experiment.results.spec.methods}
            data_set = getattr(experiment.results.spec.task, "data", None)
            if study.startswith(("main-", "paper-steps")) and data_set in data and FADAMGC in algorithms:
                yield study, experiment


def _heterogeneity(records: Records) -> Iterator[Finding]:
    if len(experiments := records.get("heterogeneity", ())) > 1:
        most, least = experiments[0], experiments[-1]
        gaps = [_log_ratios(experiment.results, LOCAL_ADAM, FADAMGC) for experiment in (most, least)]
        seeds = [seed for seed in gaps[0] if seed in gaps[1]]
        growth = [gaps[1][seed] - gaps[0][seed] for seed in seeds]
        yield Finding("heterogeneity", "", _below(growth, 0.0), _gaps_text(experiments))


def _alike(records: Records) -> Iterator[Finding]:
    if experiments := records.get("heterogeneity", ()):
        least = experiments[-1]
        gaps = [abs(gap) for gap in _log_ratios(least.results, LOCAL_ADAM, FADAMGC).values()]
        yield Finding("heterogeneity", least.name, _below(gaps, math.log(1.1)), _gaps_text([least]))


def _most_different(pair: tuple[str, str], measure: str) -> Callable[[Records], Iterator[Finding]]:
    def check(records: Records) -> Iterator[Finding]:
        for experiment in records.get("heterogeneity", ())[:1]:
            yield from _orders("heterogeneity", experiment, [pair], measure)

    return check


def _log_ratios(results: Results, method: str, reference: str) -> dict[int, float]:
    """Return the logarithm of the rounds of one algorithm over those of another, by seed."""
    labels = {row.method.algorithm: row.method.label for row in results.rows}
    ours, theirs = (values_by_seed(results, labels[name], "rounds") for name in (method, reference))
    return {seed: math.log(value / theirs[seed]) for seed, value in ours.items() if seed in theirs}


def _gaps_text(experiments: Experiments) -> str:
    gaps = []
    for experiment in experiments:
        ratios = [math.exp(value) for value in _log_ratios(experiment.results, LOCAL_ADAM, FADAMGC).values()]
        gaps.append(f"{sum(ratios) / len(ratios):.2f} ({experiment.name})" if ratios else tables.DASH)
    return f"LocalAdam's rounds over FAdamGC's: {', '.join(gaps)}"


def _few_tracking(records: Records) -> Iterator[Finding]:
    for name, pairs in _by_tracked(records):
        if not any(row.reached for _, _, row in pairs):
            yield Finding("tracking", name, None, "never reaches the target")
            continue
        few, many = pairs[0], pairs[-1]
        growth = [a / b for a, b in _paired((few[0], few[2]), (many[0], many[2]), "rounds")]
        rounds = ", ".join(f"{row.rounds.mean:.1f} (S~ = {value:g})" for _, value, row in pairs)
        fall = _below(growth, 0.9)  # as few as 0.9 times the rounds are a fall
        yield Finding("tracking", name, False if fall else _below(growth, 2.0), f"rounds {rounds}")


def _fewest_minutes(records: Records) -> Iterator[Finding]:
    for name, pairs in _by_tracked(records):
        reached = [pair for pair in pairs[:-1] if pair[2].reached]
        if not reached:
            yield Finding("tracking", name, None, "never reaches the target")
            continue
        best, value, row = min(reached, key=lambda pair: pair[2].minutes.mean)
        full, _, last = pairs[-1]
        saved = [a - b for a, b in _paired((best, row), (full, last), "minutes")]
        text = f"minutes {row.minutes.mean:.2f} (S~ = {value:g}), {last.minutes.mean:.2f} (S~ = S)"
        yield Finding("tracking", name, _below(saved, 0.0), text)


def _by_tracked(records: Records) -> Iterator[tuple[str, list[tuple[ReportedExperiment, float, Row]]]]:
    """List experiment, S~ and row, from the smallest S~ to the largest, for each data set and method."""
    experiments = records.get("tracking", ())
    for group in dict.fromkeys(experiment.group for experiment in experiments):
        members = sorted((e for e in experiments if e.group == group), key=lambda e: e.value or 0)
        for algorithm in (FA_NT, FADAMGC):
            pairs = [(e, e.value or 0, row) for e in members if (row := _row(e, algorithm)) is not None]
            if len(pairs) > 1:
                yield f"{group}, {pairs[0][2].method.label}", pairs


def _second_moments(records: Records) -> Iterator[Finding]:
    for experiment in records.get("beta2", ()):
        yield from _orders("beta2", experiment, [("FAdamGC, b2 = 0.99", "FAdamGC, b2 = 0")])


def _paper_minutes(records: Records) -> Iterator[Finding]:
    del records  # the paper's own numbers
    found = minutes_of_rounds()
    for name in METHODS:
        pairs = {data_set: cells[name] for data_set, cells in found.items()}
        # The paper prints one decimal, so half of it is not the model's error.
        errors = {d: max(abs(ours - theirs) - 0.05, 0) / theirs for d, (ours, theirs) in pairs.items()}
        worst = max(errors, key=lambda data_set: errors[data_set])
        yield Finding("", name, errors[worst] <= 0.02, f"largest error {errors[worst]:.1%} ({worst})")


def _few_of_all(records: Records) -> Iterator[Finding]:
    for experiment in records.get("participation", ()):
        if experiment.value == 10 and experiment.results.spec.run.local_steps == 10:
            yield from _orders("participation", experiment, [(FA_NT, FADAMGC)])


def _more_participation(records: Records) -> Iterator[Finding]:
    experiments = records.get("participation", ())
    for group in dict.fromkeys(experiment.group for experiment in experiments):
        members = sorted((e for e in experiments if e.group == group), key=lambda e: e.value or 0)
        rows = [(e, row) for e in members if (row := _row(e, FADAMGC)) is not None]
        if len(rows) > 1:
            saved = [a - b for a, b in _paired(rows[-1], rows[0], "rounds")]
            rounds = ", ".join(f"{row.rounds.mean:.1f} (S = {e.value:g})" for e, row in rows)
            yield Finding("participation", f"{group}", _below(saved, 0.0), f"rounds {rounds}")


def _participation(records: Records) -> Iterator[Finding]:
    for experiment in records.get("participation", ()):
        pairs = [(FADAMGC, FA_NT), (FADAMGC, LOCAL_ADAM)]
        yield from _orders("participation", experiment, pairs)


def _fixed_point(records: Records) -> Iterator[Finding]:
    for experiment in records.get("theory", ()):
        rows = experiment.results.rows
        labels = {row.method.label for row in rows}
        if experiment.results.spec.task.data != "quadratics" or "FAdamGC" not in labels:
            continue
        finals = {row.method.label: math.inf if row.diverged else row.final.mean for row in rows}
        text = ", ".join(f"{label} {value:.1e}" for label, value in finals.items())
        stall = min(value for label, value in finals.items() if not label.startswith("FAdamGC"))
        holds = finals["FAdamGC"] < 1e-12 < 1e-9 < stall
        yield Finding("theory", experiment.name, holds, f"squared gradient norm at the end: {text}")


def _speed_up(records: Records) -> Iterator[Finding]:
    for group, method, slope in theory.speed_ups(theory.bounds(records.get("theory", ()))):
        if not group.startswith("Exact"):
            yield Finding("theory", f"{group}, {method}", slope <= -0.45, f"exponent of n K: {slope:.2f}")


CLAIMS = (
    Claim("On images, FAdamGC needs the fewest rounds", _first_of_all(IMAGES, "rounds")),
    Claim("FA-NT needs fewer rounds than LocalAdam and more than FAdamGC", _between),
    Claim("FAdamGC saves most of LocalAdam's rounds where clients differ most", _heterogeneity),
    Claim("Rounds grow slowly as S~ falls: S~ = 1 takes at most twice those of S~ = S", _few_tracking),
    Claim("Some S~ below S takes the fewest minutes", _fewest_minutes),
    Claim("Second moments save rounds: FAdamGC with b2 = 0.99 is ahead of b2 = 0", _second_moments),
    Claim("Minutes (without SST-2's) follow from rounds and bytes within 2 %", _paper_minutes),
    Claim("FA-NT is ahead of FAdamGC where 10 % take part with K = 10", _few_of_all),
    Claim("FAdamGC needs fewer rounds if more clients take part", _more_participation),
    Claim("On texts, FAdamGC needs the fewest rounds", _first_of_all(TEXTS, "rounds")),
    Claim("With exact gradients FAdamGC reaches the optimum, and LocalAdam and FA-NT stall", _fixed_point),
    Claim("Gradients fall at least as fast as 1 / sqrt(n K)", _speed_up),
    Claim("On images, FAdamGC needs the fewest minutes", _first_of_all(IMAGES, "minutes")),
    Claim("Where clients are alike, FAdamGC and LocalAdam need the same rounds within 10 %", _alike),
    Claim(
        "Where clients differ most, FAdamGC needs fewer minutes than LocalAdam",
        _most_different((FADAMGC, LOCAL_ADAM), "minutes"),
    ),
    Claim(
        "Where clients differ most, FAdamGC needs fewer rounds than FA-NT",
        _most_different((FADAMGC, FA_NT), "rounds"),
    ),
    Claim("Whatever the participation, FAdamGC is ahead of FA-NT and LocalAdam", _participation),
)

# Tables.

ANSWERS = {True: "holds", False: "does not hold", None: "cannot be told"}


def findings(records: Records) -> list[tuple[Claim, list[Finding]]]:
    """Check all claims."""
    return [(claim, list(claim.check(records))) for claim in CLAIMS]


def summary_table(checked: Sequence[tuple[Claim, Sequence[Finding]]]) -> tables.Table:
    """Tabulate all claims, with the studies in which each holds, does not hold, or cannot be told."""
    lines = []
    for number, (claim, found) in enumerate(checked, 1):
        cells = [_studies([finding for finding in found if finding.holds is answer]) for answer in ANSWERS]
        lines.append([f"{number}", claim.text, *cells])
    header = ["", "The paper", *(answer.capitalize() for answer in ANSWERS.values())]
    return tables.Table(header, tables.text_rows(lines), "rllll")


def _studies(found: Sequence[Finding]) -> str:
    """List studies, with the number of their experiments where there are several."""
    counts: dict[str, int] = {}
    for finding in found:
        study = finding.study or "the paper's numbers"
        counts[study] = counts.get(study, 0) + 1
    return ", ".join(f"{study} ({count})" if count > 1 else study for study, count in counts.items())


def study_table(checked: Sequence[tuple[Claim, Sequence[Finding]]], study: str) -> tables.Table | None:
    """Tabulate what one study says about the claims; None if it says nothing."""
    lines = [
        [
            tables.Cell(f"{number}"),
            tables.Cell(claim.text + (f": {finding.experiment}" if finding.experiment != study else "")),
            tables.Cell(ANSWERS[finding.holds], bold=finding.holds is False),
            tables.Cell(finding.numbers),
        ]
        for number, (claim, found) in enumerate(checked, 1)
        for finding in found
        if finding.study == study
    ]
    return tables.Table(["Claim", "The paper", "Here", "Numbers"], lines, "rlll") if lines else None
