"""One page with all results of a folder, beside what the paper reports: where the order agrees, where not.

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

from fadamgc.escape import markdown as markdown_text
from fadamgc.experiments.folder import SPEC
from fadamgc.experiments.report.numbers import (
    DASH,
    DIVERGED,
    Results,
    Row,
    Spread,
    caption,
    read_results,
    rows,
)
from fadamgc.experiments.report.summary import Entry
from fadamgc.experiments.report.summary import markdown as tables_of
from fadamgc.experiments.report.write import markdown as table_of
from fadamgc.experiments.report.write import read_entries
from fadamgc.files import write_atomic
from fadamgc.paper import theory
from fadamgc.paper.published import BETA2, MAIN, PaperRow
from fadamgc.paper.study import STUDY, SavedStudy, read_study

ORDER = (
    *("digits", "main-cifar10", "main-cifar100", "main-tinyimagenet", "main-20news", "main-qnli", "main-qqp"),
    *("main-sst2", "curves", "heterogeneity", "tracking", "participation", "beta2", "theory", "har"),
)
NOTES = "notes.md"  # what is known about why, written by hand, beside the results
CLEAR = 2.0  # standard errors between two means whose order is called clear


# Which of two methods is ahead.


def ahead(one: Row, other: Row, measure: str) -> int | None:
    """-1 if the one needs less to the target, 1 if the other does, 0 if that is not clear; None: neither gets
    there."""
    if not one.reached and not other.reached:
        return None
    if abs(one.reached - other.reached) >= 2 or not one.reached or not other.reached:
        return -1 if one.reached > other.reached else 1
    a, b = getattr(one, measure), getattr(other, measure)
    error = math.hypot(_error(a, one.reached), _error(b, other.reached))
    if math.isnan(error) or abs(a.mean - b.mean) <= CLEAR * error:
        return 0
    return -1 if a.mean < b.mean else 1


def _error(spread: Spread, count: int) -> float:
    return spread.std / math.sqrt(count)


class Agreement(NamedTuple):
    """How the pairs of methods stand to the paper's order."""

    same: list[tuple[str, str]]  # labels, the one that is ahead here first
    opposite: list[tuple[str, str]]
    open: list[tuple[str, str]]  # too close, or neither reaches the target


def agreement(paper: Mapping[str, float], found: Sequence[Row], measure: str) -> Agreement:
    """The pairs of methods that the paper has, too; ``paper`` has its means by the method's label."""
    result = Agreement([], [], [])
    known = [row for row in found if row.method.label in paper]
    for one, other in combinations(known, 2):
        a, b = one.method.label, other.method.label
        theirs = -1 if paper[a] < paper[b] else 1
        ours = ahead(one, other, measure)
        if not ours:
            result.open.append((a, b))
        else:
            first = (a, b) if ours < 0 else (b, a)
            (result.same if ours == theirs else result.opposite).append(first)
    return result


def _sentence(agreed: Agreement, what: str) -> str:
    total = sum(map(len, agreed))
    text = (
        f"- **{what}**: of {total} pairs of methods {len(agreed.same)} are in the paper's order, "
        f"{len(agreed.opposite)} in the opposite one, {len(agreed.open)} cannot be told apart here."
    )
    if agreed.opposite:
        text += " Opposite: " + "; ".join(f"{a} ahead of {b}" for a, b in agreed.opposite) + "."
    return text


def _beside_paper(results: Results, row: PaperRow, by: Callable[[Row], str]) -> str:
    """A table with the paper's row and ours, and how the orders compare."""
    found = rows(results)
    labels = [one.method.label for one in found]
    lines = [
        "| | " + " | ".join(map(markdown_text, labels)) + " |",
        "|:--" + "|--:" * len(labels) + "|",
    ]
    for measure in ("rounds", "minutes"):
        theirs = getattr(row, measure)
        numbers = [theirs.get(by(one)) for one in found]
        cells = [DASH if number is None else f"{number[0]:g} ± {number[1]:g}" for number in numbers]
        lines.append(f"| {measure} to {row.target:.0%}, paper | " + " | ".join(cells) + " |")
        ours = [_reached(one, getattr(one, measure)) for one in found]
        lines.append(f"| {measure} to {results.target}, here | " + " | ".join(ours) + " |")
    finals = [_final(one) for one in found]
    lines.append("| accuracy at the end, here | " + " | ".join(finals) + " |")
    steps = [f"{one.method.make().eta_l:g}, {getattr(one.method.make(), 'eta_g', 1):g}" for one in found]
    lines.append("| eta_l, eta_g, here | " + " | ".join(steps) + " |")
    said = []
    for measure in ("rounds", "minutes"):
        paper = {
            one.method.label: getattr(row, measure)[by(one)][0]
            for one in found
            if by(one) in getattr(row, measure)
        }
        said.append(_sentence(agreement(paper, found, measure), measure.capitalize()))
    return "\n".join(lines) + "\n\n" + "\n".join(said) + "\n"


def _final(row: Row) -> str:
    if row.all_diverged:
        return DIVERGED
    note = f" ({row.diverged}/{row.runs} {DIVERGED})" if row.diverged else ""
    return f"{row.final.mean:.1%} ± {row.final.std:.1%}{note}" if row.runs else DASH


def _reached(row: Row, spread: Spread) -> str:
    if not row.runs:
        return DASH
    if row.all_diverged and not row.reached:
        return DIVERGED
    if not row.reached:
        return f"never (0/{row.runs})"
    std = "" if math.isnan(spread.std) else f" ± {spread.std:.1f}"
    note = "" if row.reached == row.runs else f" ({row.reached}/{row.runs})"
    return f"{spread.mean:.1f}{std}{note}"


# What the paper says about its figures, looked at here.


class Claim(NamedTuple):
    """A statement of the paper's, what was found, and the numbers."""

    paper: str
    holds: bool | None  # None: cannot be said
    numbers: str


def _claims_table(claims: Sequence[Claim]) -> str:
    words = {True: "yes", False: "**no**", None: "not clear"}
    lines = ["| The paper | Here | Numbers |", "|:--|:--|:--|"]
    lines += [f"| {claim.paper} | {words[claim.holds]} | {claim.numbers} |" for claim in claims]
    return "\n".join(lines) + "\n"


def _row(entry: Entry, algorithm: str) -> Row | None:
    return next((row for row in rows(entry.results) if row.method.algorithm == algorithm), None)


def _ahead(entry: Entry, one: str, other: str, measure: str) -> tuple[bool | None, str]:
    """Whether one algorithm is ahead of another, and the two numbers."""
    a, b = _row(entry, one), _row(entry, other)
    if a is None or b is None:
        return None, DASH
    found = ahead(a, b, measure)
    text = " and ".join(f"{row.method.label} {_reached(row, getattr(row, measure))}" for row in (a, b))
    return None if not found else found < 0, text


def _ahead_at(entry: Entry, one: str, other: str, measure: str) -> tuple[bool | None, str]:
    """As ``_ahead``, with the place."""
    found, text = _ahead(entry, one, other, measure)
    return found, text if text == DASH else f"{entry.name}: {text}"


def _ratio(entry: Entry, one: str, other: str, measure: str) -> float:
    a, b = _row(entry, one), _row(entry, other)
    if a is None or b is None or not a.reached or not b.reached:
        return math.nan
    ratio: float = getattr(a, measure).mean / getattr(b, measure).mean
    return ratio


def _heterogeneity(entries: Sequence[Entry]) -> list[Claim]:
    most, least = entries[0], entries[-1]
    gaps = [_ratio(entry, "local_adam", "fadamgc", "rounds") for entry in (most, least)]
    known = not any(map(math.isnan, gaps))
    said = f"LocalAdam's rounds over FAdamGC's: {gaps[0]:.2f} at {most.name}, {gaps[1]:.2f} at {least.name}"
    return [
        Claim(
            "The gap to LocalAdam in rounds is largest where clients differ most",
            known and gaps[0] > gaps[1],
            said,
        ),
        Claim("and negligible where they are alike (within 10 %)", known and abs(gaps[1] - 1) <= 0.1, said),
        Claim(
            "In minutes, FAdamGC is ahead of LocalAdam where clients differ most",
            *_ahead_at(most, "fadamgc", "local_adam", "minutes"),
        ),
        Claim("FAdamGC copes better than FA-NT", *_ahead_at(most, "fadamgc", "fa_nt", "rounds")),
    ]


LEVEL = 0.9  # fewer rounds than this share are fewer


def _tracking(entries: Sequence[Entry]) -> list[Claim]:
    claims = []
    for group in dict.fromkeys(entry.group for entry in entries):
        own = sorted((e for e in entries if e.group == group), key=lambda e: e.value or 0)
        for algorithm in ("fa_nt", "fadamgc"):
            found = [(entry, row) for entry in own if (row := _row(entry, algorithm)) is not None]
            if len(found) < 2:
                continue
            label = found[0][1].method.label
            if not all(row.reached for _, row in found):
                never = ", ".join(f"S~ = {e.value:g}" for e, row in found if not row.reached)
                claims.append(Claim(f"{group}, {label}: reaches the target", False, f"never with {never}"))
                continue
            few, many = found[0][1].rounds.mean, found[-1][1].rounds.mean
            values = ", ".join(f"{row.rounds.mean:.1f} (S~ = {e.value:g})" for e, row in found)
            claims.append(
                Claim(
                    f"{group}, {label}: rounds grow slowly as S~ falls (to at most twice as many)",
                    LEVEL * many <= few <= 2 * many,
                    f"rounds {values}",
                )
            )
            best = min(found, key=lambda pair: pair[1].minutes.mean)
            claims.append(
                Claim(
                    f"{group}, {label}: some S~ < S takes the fewest minutes",
                    best[0] is not found[-1][0],
                    f"fewest at S~ = {best[0].value:g}: {best[1].minutes.mean:.2f}; "
                    f"at S~ = S: {found[-1][1].minutes.mean:.2f}",
                )
            )
    return claims


def _participation(entries: Sequence[Entry]) -> list[Claim]:
    return [
        Claim(f"{entry.name}: FAdamGC is ahead of {other}", *_ahead(entry, "fadamgc", algorithm, "rounds"))
        for entry in entries
        for algorithm, other in (("fa_nt", "FA-NT"), ("local_adam", "LocalAdam"))
    ]


def _theory(entries: Sequence[Entry]) -> list[Claim]:
    exact = [entry for entry in entries if entry.results.spec.task.data == "quadratics"]
    claims = []
    for entry in exact:
        finals = {
            row.method.label: math.inf if row.diverged else row.final.mean for row in rows(entry.results)
        }
        said = ", ".join(f"{label} {value:.1e}" for label, value in finals.items())
        stall = min(value for label, value in finals.items() if not label.startswith("FAdamGC"))
        claims.append(
            Claim(
                f"{entry.name}: FAdamGC reaches the optimum, the others stall",
                finals["FAdamGC"] < 1e-12 < 1e-9 < stall,
                f"squared gradient norm at the end: {said}",
            )
        )
    for group, method, slope in theory.speed_ups(theory.bounds(entries)):
        if not group.startswith("Exact"):
            claims.append(
                Claim(
                    f"{group}, {method}: falls at least as fast as 1/sqrt(n K)",
                    slope <= -0.45,
                    f"exponent of n K: {slope:.2f}",
                )
            )
    return claims


CLAIMS: dict[str, Callable[[Sequence[Entry]], list[Claim]]] = {
    "heterogeneity": _heterogeneity,
    "tracking": _tracking,
    "participation": _participation,
    "theory": _theory,
}


# The page.

INTRODUCTION = """# Results

Everything on this page is made from the records under `results/` by

    python -m fadamgc.paper.comparison results docs/results.md

but for the paragraphs called *Why*, which are written by hand (`notes.md` beside the records). A section's
name is that of the study: `fadamgc reproduce NAME --scale laptop` runs it. The laptop scale has the paper's
data, clients, participation and methods, but a smaller network, fewer local steps and a lower target, and
step sizes tuned on one grid for all methods. So orders are to be compared with the paper's, numbers are
not. An order is called clear if the means are more than two standard errors apart, or if one method reaches
the target with at least two seeds more than the other.
"""


def page(root: Path, to: Path) -> str:
    """The page, with links that work from where it is written to."""
    folders = [path for path in root.iterdir() if (path / SPEC).is_file() or (path / STUDY).is_file()]

    def place(folder: Path) -> tuple[int, str]:
        return (ORDER.index(folder.name) if folder.name in ORDER else len(ORDER), folder.name)

    parts = [INTRODUCTION]
    for folder in sorted(folders, key=place):
        link = os.path.relpath(folder, to.parent)
        study = read_study(folder)
        body = _single(folder, link) if study is None else _several(folder, study, link)
        notes = folder / NOTES
        if notes.is_file():
            body += f"\n**Why.** {notes.read_text(encoding='utf-8').strip()}\n"
        parts.append(f"## {folder.name}\n\n{body}")
    return "\n".join(parts)


def _single(folder: Path, link: str) -> str:
    results = read_results(folder)
    parts = [f"{markdown_text(caption(results))}. {_setting(results)} ([records]({link}))\n"]
    if folder.name in MAIN:
        parts.append(_beside_paper(results, MAIN[folder.name], lambda row: row.method.algorithm))
    else:
        parts.append("Not in the paper.\n\n" + table_of(results))
    parts.append(f"![Accuracy over rounds and minutes]({link}/curves.png)\n")
    return "\n".join(parts)


def _several(folder: Path, study: SavedStudy, link: str) -> str:
    entries = read_entries(folder, study)
    first = entries[0].results
    parts = [f"{markdown_text(study.title)}. {_setting(first)} ([records]({link}))\n"]
    if study.name == "beta2":
        for entry in entries:
            known = _beside_paper(entry.results, BETA2[entry.name], lambda row: row.method.label)
            parts.append(f"### {markdown_text(entry.name)}\n\n{known}")
    else:
        parts.append(tables_of(entries, study.measures))
    if study.name in CLAIMS:
        parts.append(_claims_table(CLAIMS[study.name](entries)))
    if study.axis is not None:
        parts.append(f"![The measures over the axis]({link}/summary.png)\n")
    if (folder / "bounds.md").is_file():
        parts.append(theory.markdown(theory.bounds(entries)))
        parts.append(f"![Bounds]({link}/bounds.png)\n")
    return "\n".join(parts)


def _setting(results: Results) -> str:
    spec = results.spec
    run, task = spec.run, spec.task
    sampled = run.sampled or task.clients
    local = f"K = {run.local_steps}" if run.local_steps else f"{run.local_epochs} local epochs"
    batch = f"batches of {run.batch_size}" if run.batch_size else "whole batches"
    model = getattr(task, "model", "linear model")
    size = getattr(task, "shrink", 1)
    shrunk = f" on pictures shrunk {size} times" if size > 1 else ""
    return f"Model {model}{shrunk}, n = {task.clients}, S = {sampled}, {local}, {batch}."


def main(arguments: Sequence[str]) -> None:
    """Write the page."""
    if len(arguments) != 2:
        sys.exit(f"usage: python -m {__spec__.name if __spec__ else 'comparison'} RESULTS PAGE")
    root, to = map(Path, arguments)
    write_atomic(to, page(root, to).encode())


if __name__ == "__main__":
    main(sys.argv[1:])
