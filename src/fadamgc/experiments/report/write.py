"""Write the tables, the figures and the page of experiments from their saved runs, and from nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from fadamgc import escape
from fadamgc.errors import InputError
from fadamgc.experiments.folder import PARTITION
from fadamgc.experiments.report import numbers
from fadamgc.experiments.report.numbers import TO_TARGET, Experiments, ReportedExperiment, Results
from fadamgc.experiments.report.page import page
from fadamgc.experiments.report.plots import curves_figure, image_files, summary_figure
from fadamgc.experiments.report.tables import results_markdown, summary_latex, summary_markdown
from fadamgc.experiments.report.tuning import read_tuning
from fadamgc.files import write_atomic


def write_report(folder: str | Path, cost: Mapping[str, Any] = {}, out: str | Path | None = None) -> Results:
    """Write the report of an experiment into its folder or ``out``; ``cost`` replaces values of [cost]."""
    if out is not None:
        check_elsewhere([out], [folder])
    experiment = read_experiment(folder, cost)
    results = experiment.results
    by_name = experiment._replace(name=results.spec.name)
    rounds = numbers.curves(results)
    averages = numbers.mean_curves(results, rounds)
    files = {
        "results.csv": escape.csv_bytes(numbers.summary_frame(results)),
        "results.md": results_markdown(results).encode(),
        "results.tex": summary_latex([by_name], precise_minutes=True).encode(),
        "curves.csv": escape.csv_bytes(rounds),
    }
    for name, axes in (("rounds", ("round",)), ("minutes", ("minutes",)), ("curves", ("round", "minutes"))):
        files |= image_files(name, curves_figure(results, averages, axes))
    files["report.html"] = page(results.title, [experiment]).encode()
    if out is None:
        write_files(Path(folder), files, "folder", "; --out names another")
    else:
        write_files(Path(out), files)
    return results


def check_elsewhere(targets: Iterable[str | Path], sources: Iterable[str | Path]) -> None:
    """Refuse to write a report into or below the folder of an experiment that is only to be read."""
    read_only = {Path(source).resolve() for source in sources}
    for target in targets:
        place = Path(target).resolve()
        if source := next((path for path in (place, *place.parents) if path in read_only), None):
            where = f"over {str(target)!r}" if source == place else f"to {str(target)!r} in {str(source)!r}"
            raise InputError(
                f"out: a report would be written {where}, which is only read; give another "
                "folder, or omit it to write each report into the folder of its experiment"
            )


def read_experiment(folder: str | Path, cost: Mapping[str, Any] = {}) -> ReportedExperiment:
    """Read the experiment in a folder, under its title, with the plot of its labels and its tuning."""
    results, plot = numbers.read_results(folder, cost), Path(folder) / PARTITION
    return ReportedExperiment(
        results.title,
        results,
        label_plot=plot.read_bytes() if plot.exists() else None,
        tuning=read_tuning(Path(folder), results),
    )


def write_reports(folders: Iterable[str | Path], out: str | Path, cost: Mapping[str, Any] = {}) -> list[Path]:
    """Write one page and one set of tables for the experiments in several folders."""
    folders = list(folders)
    check_elsewhere([out], folders)
    experiments = [read_experiment(folder, cost) for folder in folders]
    return write_summary(out, experiments, title=", ".join(experiment.name for experiment in experiments))


def write_summary(
    folder: str | Path,
    experiments: Experiments,
    title: str,
    axis: str | None = None,
    measures: Sequence[str] = TO_TARGET,
    more: Mapping[str, bytes] = {},
    figures: Mapping[str, bytes] = {},
) -> list[Path]:
    """Write the tables and the page of several experiments, and a figure if they vary along an ``axis``.

    ``more`` has further files that are written to the folder, and ``figures`` those of the page, by caption.
    """
    files = {
        "summary.csv": escape.csv_bytes(numbers.experiments_frame(experiments)),
        "summary.md": f"# {escape.markdown(title)}\n\n{summary_markdown(experiments, measures)}".encode(),
        "summary.tex": summary_latex(experiments, measures).encode(),
    }
    if axis is not None:
        files |= image_files("summary", summary_figure(experiments, axis, title, measures))
    report = page(title, experiments, figures).encode()
    return write_files(Path(folder), {**files, **more, "report.html": report})


def write_files(
    folder: Path, files: Mapping[str, bytes], argument: str = "out", hint: str = ""
) -> list[Path]:
    """Write files by name into a folder; ``argument`` is the name of the folder in error messages."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, data in files.items():
            write_atomic(folder / name, data)
    except OSError as error:
        raise InputError(f"{argument}={str(folder)!r} cannot be written: {error.strerror}{hint}") from None
    return [folder / name for name in files]
