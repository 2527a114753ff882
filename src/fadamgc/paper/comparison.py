"""One page with all results of a folder next to the paper's, and where the order of the methods agrees.

python -m fadamgc.paper.comparison results docs/results.md
"""

from __future__ import annotations

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
from fadamgc.experiments.report.plots import png
from fadamgc.files import write_atomic
from fadamgc.paper import claims, ours, overview, theory
from fadamgc.paper.claims import ahead
from fadamgc.paper.published import BETA2, MAIN, PaperRow
from fadamgc.paper.study import STUDY, SavedStudy, read_members, read_study

ORDER = (
    *("digits", "main-cifar10", "main-cifar100", "main-tinyimagenet", "main-20news", "main-qnli", "main-qqp"),
    *(
        "main-sst2",
        "curves",
        "heterogeneity",
        "tracking",
        "participation",
        "beta2",
        "theory",
        "har",
        "ours",
        "regimes",
        "paper-steps",
    ),
)
NOTES = "notes.md"  # explanations, written by hand, in the folder of the records


# The order of two methods.


class Agreement(NamedTuple):
    """Pairs of methods, by how their order compares with the paper's."""

    same: list[tuple[str, str]]  # labels, first the method that is ahead here
    opposite: list[tuple[str, str]]
    open: list[tuple[str, str]]  # too close, or neither reaches the target


def agreement(paper: Mapping[str, float], results: Results, measure: str) -> Agreement:
    """Compare the order of all pairs of methods that are in the paper; ``paper``: its means by label."""
    found = Agreement([], [], [])
    for a, b in combinations([label for label in results.runs if label in paper], 2):
        order = ahead(results, a, b, measure)
        if not order:
            found.open.append((a, b))
        else:
            same = (order > 0) == (paper[a] < paper[b])
            (found.same if same else found.opposite).append((a, b) if order > 0 else (b, a))
    return found


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
        sentences.append(_sentence(agreement(means, results, measure), measure))
    lines.append(["final accuracy, here", *(tables.final_cell(row, row.final, ".1%").text for row in rows)])
    steps = [(row.method.hyperparameter("eta_l"), row.method.hyperparameter("eta_g") or 1) for row in rows]
    lines.append(["eta_l, eta_g, here", *(f"{eta_l:g}, {eta_g:g}" for eta_l, eta_g in steps)])
    labels = [row.method.label for row in rows]
    table = tables.Table(["", *labels], tables.text_rows(lines), "l" + "r" * len(labels))
    return table.to_markdown() + "\n" + "\n".join(sentences) + "\n"


# The page.

INTRODUCTION = """# Results

## In short

{answer}
![Rounds to the target, relative to the fewest of the row]({figure})

Every point is a method on one row; 1 is the method with the fewest rounds to the target there, on average
over seeds, where a run that missed the target counts with all its rounds. One method is *clearly* ahead of
another if the 95 % confidence interval of the mean paired difference excludes 0. The same runs give advice:
[Which method should I use?](which.md)

## How to read this page

The command

    python -m fadamgc.paper.comparison results docs/results.md

writes this page from the records in `results/`. Only the paragraphs that start with *Why* are written by
hand; they are in `notes.md` next to the records. The title of a section is the name of a study: `fadamgc
reproduce NAME --scale laptop` runs the study again. The laptop scale has the paper's data, clients,
participation and methods, but a smaller network, fewer local steps, a lower target, and step sizes that are
tuned on one grid for all methods. Compare the order of the methods with the order in the paper, not the
numbers. Seeds are paired: all methods have the same partition and the same batches with a seed. So one method
is ahead of another if the 95 % confidence interval of the mean paired difference excludes 0, where a run that
missed the target counts with all its rounds. Of comparisons between equal methods one in twenty looks clear.
In minutes, this rule favours cheap rounds: a method that missed the target can count as ahead of one that
reached it in dearer rounds. So read *never* in a table before an order in minutes.

## The paper's claims

Each cell names the studies, and the number of their settings if there are several; the numbers are in the
sections of the studies.

"""


def page(root: Path, to: Path) -> str:
    """Render the page, with links relative to the file that it will be written to."""
    folders = _folders(root)
    studies = {folder.name: read_study(folder) for folder in folders}
    records = {folder.name: _experiments(folder, studies[folder.name]) for folder in folders}
    checked = claims.findings(records)
    short = overview.answer(overview.standings(records), checked, _ours(records))
    figure = os.path.relpath(root / overview.FIGURE, to.parent)
    introduction = INTRODUCTION.format(answer=short, figure=figure)
    parts = [introduction + claims.summary_table(checked).to_markdown()]
    for folder in folders:
        link = os.path.relpath(folder, to.parent)
        study, experiments = studies[folder.name], records[folder.name]
        if study is None:
            body = _experiment(folder.name, experiments[0].results, link)
        else:
            body = _study(folder, study, experiments, link)
        if (table := claims.study_table(checked, folder.name)) is not None:
            body += "\n" + table.to_markdown()
        notes = folder / NOTES
        if notes.is_file():
            body += f"\n**Why.** {notes.read_text(encoding='utf-8').strip()}\n"
        parts.append(f"## {folder.name}\n\n{body}")
    return "\n".join(parts)


def _folders(root: Path) -> list[Path]:
    """List the folders of studies, in the order of the page."""
    found = [path for path in root.iterdir() if ExperimentFolder(path).has_spec or (path / STUDY).is_file()]
    return sorted(found, key=lambda folder: ([*ORDER, folder.name].index(folder.name), folder.name))


def _ours(records: Mapping[str, Experiments]) -> list[ours.Line]:
    others = {name: records[name][0] for name in ours.ROWS.values() if name in records}
    return ours.lines(records.get(ours.STUDY, ()), others)


def _experiments(folder: Path, study: SavedStudy | None) -> Experiments:
    if study is None:
        return [ReportedExperiment(folder.name, read_results(folder))]
    return read_members(folder, study)


def _experiment(name: str, results: Results, link: str) -> str:
    parts = [f"{escaped(tables.caption(results))}. {_setting(results)} ([records]({link}))\n"]
    if name in MAIN:
        parts.append(_next_to_paper(results, MAIN[name], lambda row: row.method.algorithm))
    else:
        parts.append("Not in the paper.\n\n" + tables.results_markdown(results))
    parts.append(f"![Accuracy over rounds and minutes]({link}/curves.png)\n")
    return "\n".join(parts)


def _study(folder: Path, study: SavedStudy, experiments: Experiments, link: str) -> str:
    setting = _setting(experiments[0].results)
    parts = [f"{escaped(study.title)}. {setting} ([records]({link}))\n"]
    if study.name == "beta2":
        for experiment in experiments:
            table = _next_to_paper(experiment.results, BETA2[experiment.name], lambda row: row.method.label)
            parts.append(f"### {escaped(experiment.name)}\n\n{table}")
    else:
        parts.append(tables.summary_markdown(experiments, study.measures))
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
    records = {folder.name: _experiments(folder, read_study(folder)) for folder in _folders(root)}
    write_atomic(root / overview.FIGURE, png(overview.figure(overview.standings(records))))


if __name__ == "__main__":
    main(sys.argv[1:])
