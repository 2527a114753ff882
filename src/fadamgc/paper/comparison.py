"""One page with all results of a folder next to the paper's, and where the order of the methods agrees.

python -m fadamgc.paper.comparison results docs/results.md
"""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

from fadamgc.escape import markdown as escaped
from fadamgc.experiments.folder import ExperimentFolder
from fadamgc.experiments.report import tables
from fadamgc.experiments.report.numbers import (
    TO_TARGET,
    Experiments,
    ReportedExperiment,
    Results,
    Row,
    read_results,
)
from fadamgc.files import write_atomic
from fadamgc.paper import theory
from fadamgc.paper.published import BETA2, MAIN, PaperRow
from fadamgc.paper.study import STUDY, SavedStudy, read_members, read_study

ORDER = (
    *("digits", "main-cifar10", "main-cifar100", "main-tinyimagenet", "main-20news", "main-qnli", "main-qqp"),
    *("main-sst2", "curves", "heterogeneity", "tracking", "participation", "beta2", "theory", "har"),
)
NOTES = "notes.md"  # explanations, written by hand, in the folder of the records
CLEAR = 2.0  # standard errors by which two means must differ for their order to be clear
LEVEL = 0.9  # a number of rounds below this share of another is called smaller


# Which of two methods is ahead.


def ahead(a: Row, b: Row, measure: str) -> int | None:
    """Return -1 if ``a`` is ahead on the way to the target, 1 if ``b`` is, 0 if it is not clear.

    None: neither reaches the target.
    """
    if not a.reached and not b.reached:
        return None
    if abs(a.reached - b.reached) >= 2 or not a.reached or not b.reached:
        return -1 if a.reached > b.reached else 1
    first, second = getattr(a, measure), getattr(b, measure)
    error = math.hypot(first.std / math.sqrt(a.reached), second.std / math.sqrt(b.reached))
    if math.isnan(error) or abs(first.mean - second.mean) <= CLEAR * error:
        return 0
    return -1 if first.mean < second.mean else 1


class Agreement(NamedTuple):
    """Pairs of methods, by how their order compares with the paper's."""

    same: list[tuple[str, str]]  # labels, first the method that is ahead here
    opposite: list[tuple[str, str]]
    open: list[tuple[str, str]]  # too close, or neither reaches the target


def agreement(paper: Mapping[str, float], rows: Sequence[Row], measure: str) -> Agreement:
    """Compare the order of all pairs of methods that are in the paper; ``paper``: its means by label."""
    result = Agreement([], [], [])
    for row, other in combinations([row for row in rows if row.method.label in paper], 2):
        a, b = row.method.label, other.method.label
        ours = ahead(row, other, measure)
        if not ours:
            result.open.append((a, b))
        else:
            same = (ours < 0) == (paper[a] < paper[b])
            (result.same if same else result.opposite).append((a, b) if ours < 0 else (b, a))
    return result


def _sentence(agreed: Agreement, measure: str) -> str:
    pairs = "; ".join(f"{a} ahead of {b}" for a, b in agreed.opposite)
    return (
        f"- **{measure.capitalize()}**: of {sum(map(len, agreed))} pairs of methods {len(agreed.same)} are "
        f"in the paper's order, {len(agreed.opposite)} in the opposite order, and {len(agreed.open)} "
        f"cannot be told apart here.{f' Opposite: {pairs}.' if pairs else ''}"
    )


def _next_to_paper(results: Results, published: PaperRow, key: Callable[[Row], str]) -> str:
    """Tabulate the paper's numbers and ours, and compare orders; ``key``: a method's name in the paper."""
    rows = results.rows
    lines, sentences = [], []
    for measure in TO_TARGET:
        numbers = getattr(published, measure)
        paper = {row.method.label: numbers[key(row)] for row in rows if key(row) in numbers}
        pairs = [paper.get(row.method.label) for row in rows]
        theirs = [tables.DASH if pair is None else f"{pair[0]:g} ± {pair[1]:g}" for pair in pairs]
        lines.append([f"{measure} to {published.target:.0%}, paper", *theirs])
        ours = [tables.to_target(results, row, measure).text for row in rows]
        lines.append([f"{measure} to {results.target}, here", *ours])
        means = {label: mean for label, (mean, _) in paper.items()}
        sentences.append(_sentence(agreement(means, rows, measure), measure))
    lines.append(["final accuracy, here", *(tables.final_cell(row, row.final, ".1%").text for row in rows)])
    steps = [(row.method.hyperparameter("eta_l"), row.method.hyperparameter("eta_g") or 1) for row in rows]
    lines.append(["eta_l, eta_g, here", *(f"{eta_l:g}, {eta_g:g}" for eta_l, eta_g in steps)])
    labels = [row.method.label for row in rows]
    table = tables.Table(["", *labels], tables.text_rows(lines), "l" + "r" * len(labels))
    return table.to_markdown() + "\n" + "\n".join(sentences) + "\n"


# The paper's statements about its figures, checked here.


class Claim(NamedTuple):
    """A statement of the paper, whether it holds here, and our numbers."""

    paper: str
    holds: bool | None  # None: not clear
    numbers: str


def _claims_table(claims: Sequence[Claim]) -> str:
    answers = {True: tables.Cell("yes"), False: tables.Cell("no", bold=True), None: tables.Cell("not clear")}
    lines = [[tables.Cell(claim.paper), answers[claim.holds], tables.Cell(claim.numbers)] for claim in claims]
    return tables.Table(["The paper", "Here", "Numbers"], lines, "lll").to_markdown()


def _row(experiment: ReportedExperiment, algorithm: str) -> Row | None:
    return next((row for row in experiment.results.rows if row.method.algorithm == algorithm), None)


def _ahead(
    claim: str, experiment: ReportedExperiment, first: str, second: str, measure: str, place: str = ""
) -> Claim:
    """Claim that the first algorithm is ahead of the second."""
    results, a, b = experiment.results, _row(experiment, first), _row(experiment, second)
    if a is None or b is None:
        return Claim(claim, None, tables.DASH)
    order = ahead(a, b, measure)
    cells = [f"{row.method.label} {tables.to_target(results, row, measure).text}" for row in (a, b)]
    return Claim(claim, order < 0 if order else None, place + " and ".join(cells))


def _ratio(experiment: ReportedExperiment, first: str, second: str) -> float:
    """Return the rounds of one algorithm over those of another; NaN where one does not reach the target."""
    a, b = _row(experiment, first), _row(experiment, second)
    return math.nan if a is None or b is None else a.rounds.mean / b.rounds.mean


def _heterogeneity(experiments: Experiments) -> list[Claim]:
    most, least = experiments[0], experiments[-1]
    gaps = [_ratio(experiment, "local_adam", "fadamgc") for experiment in (most, least)]
    known = not any(map(math.isnan, gaps))
    text = f"LocalAdam's rounds over FAdamGC's: {gaps[0]:.2f} at {most.name}, {gaps[1]:.2f} at {least.name}"
    copes = "FAdamGC copes better with such clients than FA-NT"
    largest = "The gap to LocalAdam in rounds is largest where clients differ most"
    minutes = "In minutes, FAdamGC is ahead of LocalAdam where clients differ most"
    place = f"{most.name}: "
    return [
        Claim(largest, known and gaps[0] > gaps[1], text),
        Claim("and negligible where they are alike (within 10 %)", known and abs(gaps[1] - 1) <= 0.1, text),
        _ahead(minutes, most, "fadamgc", "local_adam", "minutes", place),
        _ahead(copes, most, "fadamgc", "fa_nt", "rounds", place),
    ]


def _tracking(experiments: Experiments) -> list[Claim]:
    claims = []
    for group in dict.fromkeys(experiment.group for experiment in experiments):
        members = sorted((e for e in experiments if e.group == group), key=lambda e: e.value or 0)
        for algorithm in ("fa_nt", "fadamgc"):
            pairs = [(e.value or 0, row) for e in members if (row := _row(e, algorithm)) is not None]
            if len(pairs) < 2:
                continue
            subject = f"{group}, {pairs[0][1].method.label}"
            never = ", ".join(f"S~ = {value:g}" for value, row in pairs if not row.reached)
            if never:
                claims.append(Claim(f"{subject}: reaches the target", False, f"never with {never}"))
                continue
            few, many = pairs[0][1].rounds.mean, pairs[-1][1].rounds.mean
            rounds = ", ".join(f"{row.rounds.mean:.1f} (S~ = {value:g})" for value, row in pairs)
            slowly = f"{subject}: rounds grow slowly as S~ falls (to at most twice as many)"
            claims.append(Claim(slowly, LEVEL * many <= few <= 2 * many, f"rounds {rounds}"))
            value, best = min(pairs, key=lambda pair: pair[1].minutes.mean)
            last = pairs[-1][1]
            minutes = f"fewest at S~ = {value:g}: {best.minutes.mean:.2f}; at S~ = S: {last.minutes.mean:.2f}"
            fewest = f"{subject}: some S~ below S takes the fewest minutes"
            claims.append(Claim(fewest, best is not last, minutes))
    return claims


def _participation(experiments: Experiments) -> list[Claim]:
    return [
        _ahead(f"{e.name}: FAdamGC is ahead of {other}", e, "fadamgc", algorithm, "rounds")
        for e in experiments
        for algorithm, other in (("fa_nt", "FA-NT"), ("local_adam", "LocalAdam"))
    ]


def _theory(experiments: Experiments) -> list[Claim]:
    claims = []
    for experiment in experiments:
        if experiment.results.spec.task.data != "quadratics":
            continue
        rows = experiment.results.rows
        finals = {row.method.label: math.inf if row.diverged else row.final.mean for row in rows}
        text = ", ".join(f"{label} {value:.1e}" for label, value in finals.items())
        stall = min(value for label, value in finals.items() if not label.startswith("FAdamGC"))
        claim = f"{experiment.name}: FAdamGC reaches the optimum, the others stall"
        holds = finals["FAdamGC"] < 1e-12 < 1e-9 < stall
        claims.append(Claim(claim, holds, f"squared gradient norm at the end: {text}"))
    for group, method, slope in theory.speed_ups(theory.bounds(experiments)):
        if not group.startswith("Exact"):
            claim = f"{group}, {method}: falls at least as fast as 1/sqrt(n K)"
            claims.append(Claim(claim, slope <= -0.45, f"exponent of n K: {slope:.2f}"))
    return claims


CLAIMS: dict[str, Callable[[Experiments], list[Claim]]] = {
    "heterogeneity": _heterogeneity,
    "tracking": _tracking,
    "participation": _participation,
    "theory": _theory,
}


# The page.

INTRODUCTION = """# Results

The command

    python -m fadamgc.paper.comparison results docs/results.md

writes this page from the records in `results/`. Only the paragraphs that start with *Why* are written by
hand; they are in `notes.md` next to the records. The title of a section is the name of a study: `fadamgc
reproduce NAME --scale laptop` runs the study again. The laptop scale has the paper's data, clients,
participation and methods, but a smaller network, fewer local steps, a lower target, and step sizes that are
tuned on one grid for all methods. Compare the order of the methods with the order in the paper, not the
numbers. The order of two methods is clear if their means are more than two standard errors apart, or if one
method reaches the target with at least two more seeds than the other.
"""


def page(root: Path, to: Path) -> str:
    """Render the page, with links relative to the file that it will be written to."""
    folders = [path for path in root.iterdir() if ExperimentFolder(path).has_spec or (path / STUDY).is_file()]
    parts = [INTRODUCTION]
    for folder in sorted(folders, key=lambda folder: ([*ORDER, folder.name].index(folder.name), folder.name)):
        link = os.path.relpath(folder, to.parent)
        study = read_study(folder)
        body = _experiment(folder, link) if study is None else _study(folder, study, link)
        notes = folder / NOTES
        if notes.is_file():
            body += f"\n**Why.** {notes.read_text(encoding='utf-8').strip()}\n"
        parts.append(f"## {folder.name}\n\n{body}")
    return "\n".join(parts)


def _experiment(folder: Path, link: str) -> str:
    results = read_results(folder)
    parts = [f"{escaped(tables.caption(results))}. {_setting(results)} ([records]({link}))\n"]
    if folder.name in MAIN:
        parts.append(_next_to_paper(results, MAIN[folder.name], lambda row: row.method.algorithm))
    else:
        parts.append("Not in the paper.\n\n" + tables.results_markdown(results))
    parts.append(f"![Accuracy over rounds and minutes]({link}/curves.png)\n")
    return "\n".join(parts)


def _study(folder: Path, study: SavedStudy, link: str) -> str:
    experiments = read_members(folder, study)
    setting = _setting(experiments[0].results)
    parts = [f"{escaped(study.title)}. {setting} ([records]({link}))\n"]
    if study.name == "beta2":
        for experiment in experiments:
            table = _next_to_paper(experiment.results, BETA2[experiment.name], lambda row: row.method.label)
            parts.append(f"### {escaped(experiment.name)}\n\n{table}")
    else:
        parts.append(tables.summary_markdown(experiments, study.measures))
    if study.name in CLAIMS:
        parts.append(_claims_table(CLAIMS[study.name](experiments)))
    if study.axis is not None:
        parts.append(f"![The measures over the axis]({link}/summary.png)\n")
    if (folder / "bounds.md").is_file():
        parts.append(theory.bounds_markdown(theory.bounds(experiments)))
        parts.append(f"![Bounds]({link}/bounds.png)\n")
    return "\n".join(parts)


def _setting(results: Results) -> str:
    run, task = results.spec.run, results.spec.task
    sampled = run.sampled or task.clients
    local = f"K = {run.local_steps}" if run.local_steps else f"{run.local_epochs} local epochs"
    batch = f"batches of {run.batch_size}" if run.batch_size else "full batches"
    model = getattr(task, "model", "linear model")
    shrink = getattr(task, "shrink", 1)
    shrunk = f" on images shrunk {shrink} times" if shrink > 1 else ""
    return f"Model {model}{shrunk}, n = {task.clients}, S = {sampled}, {local}, {batch}."


def main(arguments: Sequence[str]) -> None:
    """Write the page."""
    if len(arguments) != 2:
        sys.exit(f"usage: python -m {__spec__.name if __spec__ else 'comparison'} RESULTS PAGE")
    root, to = map(Path, arguments)
    write_atomic(to, page(root, to).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
