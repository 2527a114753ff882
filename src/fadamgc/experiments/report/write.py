"""Tables, figures and a page from the saved runs of an experiment, and from nothing else."""

from __future__ import annotations

import gzip
from collections.abc import Sequence
from pathlib import Path

import pandas as pd
from rich.table import Table
from rich.text import Text

from fadamgc import escape
from fadamgc.errors import InputError
from fadamgc.experiments.folder import PARTITION, RUNS, SPEC
from fadamgc.experiments.planned_run import DIVERGED_RECORD, RECORDS
from fadamgc.experiments.report.numbers import (
    Results,
    caption,
    cells,
    curves,
    header,
    legend,
    mean_curves,
    read_results,
    rows,
)
from fadamgc.experiments.report.page import Shown, page
from fadamgc.experiments.report.plots import curves_figure, png, svg
from fadamgc.experiments.report.summary import TO_TARGET, Entry, latex, write_summary
from fadamgc.federation.cost import CostModel
from fadamgc.files import write_atomic
from fadamgc.paper.study import STUDY, SavedCell, SavedStudy, check_inside, read_study
from fadamgc.paper.theory import write_bounds


def write_report(folder: str | Path, cost: CostModel | None = None, out: str | Path | None = None) -> Results:
    """Write all tables, figures and the page of an experiment into its folder, or into another."""
    folder = Path(folder)
    to = folder if out is None else Path(out)
    results = read_results(folder, cost)
    table = curves(results)
    lines = mean_curves(results, table)
    measures = (*TO_TARGET, "final")
    try:
        to.mkdir(parents=True, exist_ok=True)
        write_atomic(to / "results.csv", escape.csv_bytes(_summary(results)))
        write_atomic(to / "results.md", markdown(results).encode())
        tex = latex([Entry(results.spec.name, results)], measures, as_alone=True)
        write_atomic(to / "results.tex", tex.encode())
        write_atomic(to / "curves.csv", escape.csv_bytes(table))
        for name, axes in (
            ("rounds", ("round",)),
            ("minutes", ("minutes",)),
            ("curves", ("round", "minutes")),
        ):
            drawn = curves_figure(results, lines, axes)
            write_atomic(to / f"{name}.png", png(drawn))
            write_atomic(to / f"{name}.svg", svg(drawn))
        title = results.spec.title or results.spec.name
        shown = Shown(title, results, _picture(folder))
        write_atomic(to / "report.html", page(title, [shown]).encode())
    except OSError as error:
        name, hint = ("folder", "; --out names another") if out is None else ("out", "")
        raise InputError(f"{name}={str(to)!r} cannot be written: {error.strerror}{hint}") from None
    return results


def read_entries(folder: Path, study: SavedStudy, cost: CostModel | None = None) -> list[Entry]:
    """The cells of a study, as far as they have run."""
    return [
        Entry(cell.name, read_results(folder / cell.folder, cost), cell.value, cell.group, cell.axis)
        for cell in _there(folder, study)
    ]


def _cells(folder: Path) -> list[SavedCell]:
    study = read_study(folder)
    return [] if study is None else study.cells


def _there(folder: Path, study: SavedStudy) -> list[SavedCell]:
    return [cell for cell in study.cells if (folder / cell.folder / SPEC).is_file()]


def write_study_report(
    folder: str | Path, cost: CostModel | None = None, out: str | Path | None = None
) -> list[Path]:
    """The tables, the figures and the page of a study with several cells, as far as they have run.

    They go into its folder, or into another.
    """
    folder = Path(folder)
    to = folder if out is None else Path(out)
    study = read_study(folder)
    if study is None:
        raise InputError(f"folder={str(folder)!r} holds no {STUDY}; `fadamgc reproduce` writes one")
    entries = read_entries(folder, study, cost)
    shown = [
        Shown(entry.name, entry.results, _picture(folder / cell.folder))
        for entry, cell in zip(entries, _there(folder, study), strict=True)
    ]
    files = write_summary(to, entries, study.title, study.axis, study.measures)
    files += write_bounds(to, entries)
    write_atomic(to / "report.html", page(study.title, shown).encode())
    return [*files, to / "report.html"]


def write_reports(
    folders: Sequence[str | Path], out: str | Path, cost: CostModel | None = None, title: str | None = None
) -> list[Results]:
    """One page and one set of tables for several experiments."""
    shown = [_shown(Path(folder), cost) for folder in folders]
    out = Path(out)
    title = title or ", ".join(one.name for one in shown)
    write_summary(out, [Entry(one.name, one.results) for one in shown], title)
    write_atomic(out / "report.html", page(title, shown).encode())
    return [one.results for one in shown]


def _shown(folder: Path, cost: CostModel | None) -> Shown:
    results = read_results(folder, cost)
    return Shown(results.spec.title or results.spec.name, results, _picture(folder))


def _picture(folder: Path) -> bytes | None:
    """The picture of who holds which labels."""
    picture = folder / PARTITION
    return picture.read_bytes() if picture.exists() else None


# What is worth keeping for good: records, tables and a few figures; no weights, no checkpoints, no page.
KEPT = (
    *(SPEC, STUDY, PARTITION, "tuning.csv", "tuned.toml", "results.csv", "results.md", "results.tex"),
    *("curves.png", "summary.csv", "summary.md", "summary.tex", "summary.png"),
    *("bounds.csv", "bounds.md", "bounds.png"),
)


def keep(folder: str | Path, to: str | Path) -> int:
    """Copy an experiment or a study so that its report can be made again; the bytes that this took.

    Records are packed, about six times smaller.
    """
    folder, to = Path(folder), Path(to)
    if not (folder / SPEC).is_file() and read_study(folder) is None:
        raise InputError(
            f"folder={str(folder)!r} holds no {SPEC} and no {STUDY}; run an experiment there first"
        )
    inside = [folder, *(folder / cell.folder for cell in _cells(folder))]
    found = [path for one in inside for name in KEPT if (path := one / name).is_file()]
    runs = [path for one in inside for path in sorted(one.glob(f"{RUNS}/*"))]
    found += [path for one in runs for name in (*RECORDS, DIVERGED_RECORD) if (path := one / name).is_file()]
    total = 0
    try:
        for path in found:
            target = to / path.relative_to(folder)
            check_inside(folder, path, "folder")
            check_inside(to, target, "to")
            target.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes()
            if path.name == "run.json":
                target, data = target.with_name("run.json.gz"), gzip.compress(data, mtime=0)
            write_atomic(target, data)
            total += len(data)
    except OSError as error:
        raise InputError(f"to={str(to)!r} cannot be written: {error.strerror}") from None
    return total


def summarise(folder: str | Path, cost: CostModel | None = None) -> pd.DataFrame:
    """One row a method: what ``results.csv`` holds."""
    return _summary(read_results(folder, cost))


def _summary(results: Results) -> pd.DataFrame:
    return pd.DataFrame(
        [
            {
                "method": row.method.label,
                "algorithm": row.method.algorithm,
                "eta_l": row.method.hyperparameter("eta_l"),
                "eta_g": row.method.hyperparameter("eta_g"),
                "runs": row.runs,
                "runs_reached": row.reached,
                "runs_diverged": row.diverged,
                "target": results.spec.run.target,
                "rounds_mean": row.rounds.mean,
                "rounds_std": row.rounds.std,
                "minutes_mean": row.minutes.mean,
                "minutes_std": row.minutes.std,
                "final_mean": row.final.mean,
                "final_std": row.final.std,
                "mb_down_per_round": row.mb_down,
                "mb_up_per_round": row.mb_up,
            }
            for row in rows(results)
        ]
    )


def rich_table(results: Results) -> Table:
    """The table for a terminal."""
    table = Table(title=Text(caption(results)), title_justify="left")
    for i, title in enumerate(header(results)):
        table.add_column(Text(title), justify="left" if i == 0 else "right", no_wrap=i == 0)
    for line in cells(results):
        table.add_row(*(Text(cell.text, style="bold" if cell.best else "") for cell in line))
    return table


def markdown(results: Results) -> str:
    """The table in Markdown."""
    titles = list(map(escape.markdown, header(results)))
    lines = ["| " + " | ".join(titles) + " |", "|:--" + "|--:" * (len(titles) - 1) + "|"]
    for line in cells(results):
        shown = [escape.markdown(cell.text) for cell in line]
        shown = [f"**{text}**" if cell.best else text for text, cell in zip(shown, line, strict=True)]
        lines.append("| " + " | ".join(shown) + " |")
    return f"{escape.markdown(caption(results))}.\n{legend(results)}\n\n" + "\n".join(lines) + "\n"
