"""FedKeel, the method of this package, next to the methods of the paper on every row that both have.

The rows of the study ``ours`` have the settings and the seeds of other studies, so that runs are paired.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from fadamgc.escape import markdown
from fadamgc.experiments.report.means import Difference, mean_of
from fadamgc.experiments.report.numbers import Experiments, ReportedExperiment, Results, values_by_seed
from fadamgc.experiments.report.tables import to_target

STUDY = "ours"
OURS, LEAN = "FedKeel", "FedKeel, lean"
FADAMGC, FEDAVG_M = "FAdamGC", "FedAvg-M"
ROWS = {  # the rows of the study, and the studies with the other methods
    "CIFAR-10": "main-cifar10",
    "CIFAR-100": "main-cifar100",
    "Tiny ImageNet": "main-tinyimagenet",
    "20NewsGroups": "main-20news",
    "SST-2": "main-sst2",
    "QNLI": "main-qnli",
    "QQP": "main-qqp",
    "HAR": "har",
    "Digits": "digits",
}


class Comparison(NamedTuple):
    """A method of ours and another one: their numbers, and the paired difference."""

    rival: str
    ours_text: str
    rival_text: str
    difference: Difference  # of the rival's rounds or minutes and ours

    @property
    def text(self) -> str:
        """The rival's number, with the verdict."""
        words = {1: "ahead", -1: "behind", 0: "not clear"}
        return f"{self.rival} {self.rival_text}: {words[self.difference.clear]}"


class Line(NamedTuple):
    """A row: FedKeel against the best of the others and FAdamGC in rounds, the lean form in minutes."""

    name: str
    target: str
    best: Comparison
    fadamgc: Comparison
    lean: Comparison | None  # None where FedAvg-M was not run


def compare(ours: Results, label: str, others: Results, rival: str, measure: str) -> Comparison:
    """Compare two methods of two experiments with the same seeds.

    In minutes, a run that missed the target may have ended sooner than one that reached it, since its rounds
    are cheaper; it is not ahead for that.
    """
    mine, theirs = values_by_seed(ours, label, measure), values_by_seed(others, rival, measure)
    rows = {row.method.label: (results, row) for results in (others, ours) for row in results.rows}
    our_text, rival_text = (to_target(*rows[name], measure).text for name in (label, rival))
    missed = [_missed(ours, label), _missed(others, rival)]
    pairs = []
    for seed in mine.keys() & theirs.keys():
        pair = [mine[seed], theirs[seed]]
        # A run that missed the target needed at least what it took; here, at least as much as the other.
        one, other = (max(pair) if seed in seeds else own for own, seeds in zip(pair, missed, strict=True))
        pairs.append(other - one)
    return Comparison(rival, our_text, rival_text, Difference.of(pairs))


def _missed(results: Results, label: str) -> set[int]:
    """Return the seeds with which a method missed the target."""
    target = results.spec.run.target
    assert target is not None
    return {run.settings["seed"] for run in results.runs[label] if run.rounds_to(target) is None}


def best_of(others: Results) -> str:
    """Return the method with the fewest rounds; a run that missed the target counts with all its rounds."""
    means = {
        row.method.label: mean_of(list(values.values()))
        for row in others.rows
        if (values := values_by_seed(others, row.method.label, "rounds"))
    }
    return min(means, key=means.__getitem__)


def lines(ours: Experiments, others: Mapping[str, ReportedExperiment]) -> list[Line]:
    """Compare the rows that have run; ``others`` has the experiments with the other methods by study."""
    found = []
    for experiment in ours:
        if ROWS.get(experiment.name) not in others or not experiment.results.runs[OURS]:
            continue
        mine, theirs = experiment.results, others[ROWS[experiment.name]].results
        with_momentum = bool(theirs.runs.get(FEDAVG_M)) and bool(mine.runs.get(LEAN))
        found.append(
            Line(
                name=experiment.name,
                target=mine.target,
                best=compare(mine, OURS, theirs, best_of(theirs), "rounds"),
                fadamgc=compare(mine, OURS, theirs, FADAMGC, "rounds"),
                lean=compare(mine, LEAN, theirs, FEDAVG_M, "minutes") if with_momentum else None,
            )
        )
    return found


def table(found: list[Line]) -> str:
    """Write the rows, and in how many of them the method is where it should be."""
    head = [
        "row",
        "rounds of FedKeel to",
        "the best of the others",
        "FAdamGC",
        "minutes of the lean form",
        "FedAvg-M",
    ]
    texts = [f"| {' | '.join(head)} |", "|---|--:|---|---|--:|---|"]
    for line in found:
        lean = ["", ""] if line.lean is None else [line.lean.ours_text, line.lean.text]
        cells = [line.name, f"{line.target}: {line.best.ours_text}", line.best.text, line.fadamgc.text, *lean]
        texts.append(f"| {' | '.join(map(markdown, cells))} |".replace("|  |", "| |"))
    count, timed = len(found), [line.lean for line in found if line.lean is not None]
    behind = [line.name for line in found if line.best.difference.clear < 0]
    ahead = sum(line.fadamgc.difference.clear > 0 for line in found)
    slower = sum(lean.difference.clear < 0 for lean in timed)
    texts += [
        "",
        f"- In rounds, FedKeel is clearly behind the best of the others on {len(behind)} of {count} rows"
        f"{': ' + ', '.join(behind) if behind else ''}.",
        f"- It is clearly ahead of FAdamGC on {ahead} of {count} rows.",
        f"- In minutes, its lean form is clearly behind FedAvg-M on {slower} of {len(timed)} rows.",
    ]
    return "\n".join(texts)
