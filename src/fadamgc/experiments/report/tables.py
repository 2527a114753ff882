"""Tables of one experiment and of several, in Markdown, in LaTeX and for a terminal."""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fadamgc import escape
from fadamgc.escape import printable
from fadamgc.experiments.report import numbers
from fadamgc.experiments.report.means import Spread
from fadamgc.experiments.report.numbers import CLEARLY_BEST, TO_TARGET, Experiments, Results, Row

if TYPE_CHECKING:
    import rich.table

DASH = "\N{EN DASH}"
DIVERGED = "diverged"
MARKDOWN_ALIGNMENT = {"l": ":--|", "r": "--:|"}


class Cell(NamedTuple):
    """A cell of a table."""

    text: str
    bold: bool = False
    math: str | None = None  # what LaTeX shows instead of the text


@dataclass(frozen=True)
class Table:
    """A table of plain texts; every format escapes them."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    align: str  # "l", "c" or "r" per column

    def to_markdown(self) -> str:
        """Render the table in Markdown."""
        rows = [[Cell(text) for text in self.header], *self.rows]
        lines = ["|" + "".join(map(_markdown_cell, row)) for row in rows]
        lines.insert(1, "|" + "".join(MARKDOWN_ALIGNMENT[side] for side in self.align))
        return "\n".join(lines) + "\n"

    def to_latex(self, group: int, note: str) -> str:
        """Render the table as a LaTeX tabular (needs booktabs), with a rule above every ``group`` rows.

        The note is a comment in the file, for the caption of the table.
        """
        lines = [f"% {escape.printable(note)}", rf"\begin{{tabular}}{{{self.align}}}", r"\toprule"]
        lines.append(" & ".join(map(escape.latex, self.header)) + r" \\")
        for number, row in enumerate(self.rows):
            if number % group == 0:
                lines.append(r"\midrule")
            lines.append(" & ".join(map(_latex_cell, row)) + r" \\")
        return "\n".join([*lines, r"\bottomrule", r"\end{tabular}"]) + "\n"

    def to_rich(self, title: str, note: str = "") -> rich.table.Table:
        """Render the table for a terminal, with a note below it."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=Text(title), title_justify="left", caption_justify="left")
        table.caption = Text(note, style="dim") if note else None
        for text, side in zip(self.header, self.align, strict=True):
            table.add_column(Text(text), justify="left" if side == "l" else "right", no_wrap=side == "l")
        for row in self.rows:
            table.add_row(*(Text(cell.text, style="bold" if cell.bold else "") for cell in row))
        return table


def text_rows(rows: Iterable[Iterable[str]]) -> list[list[Cell]]:
    """Make rows of plain texts."""
    return [[Cell(text) for text in row] for row in rows]


def _markdown_cell(cell: Cell) -> str:
    text = escape.markdown(cell.text)
    return f" **{text}** |" if cell.bold else f" {text} |" if text else " |"


def _latex_cell(cell: Cell) -> str:
    if cell.math is not None:
        return cell.math
    return "--" if cell.text == DASH else escape.latex(cell.text)


def number(spread: Spread, form: str, note: str = "", bold: bool = False, unit: str = "") -> Cell:
    """Show mean ± standard deviation and a note in parentheses; in LaTeX, only the mean is bold."""
    note = f" ({note})" if note else ""
    if math.isnan(spread.mean):
        return Cell(DASH + note)
    mean, std = (f"{value:{form}}" for value in spread)
    has_std = not math.isnan(spread.std)
    text = f"{mean} ± {std}" if has_std else mean
    strong = rf"\mathbf{{{_in_math(mean)}}}" if bold else _in_math(mean)
    math_text = rf"${strong} \pm {_in_math(std)}$" if has_std else f"${strong}$"
    return Cell(text + unit + note, bold, math_text + escape.latex(unit) + note)


def _in_math(digits: str) -> str:
    """Write a number in LaTeX's math mode: 2.13e-06 is 2.13 times a power of ten.

    >>> _in_math("2.13e-06")
    '2.13 \\\\cdot 10^{-6}'
    """
    return re.sub(r"e([+-]\d+)", lambda match: rf" \cdot 10^{{{int(match[1])}}}", escape.latex(digits))


def _three_digits(column: Sequence[float]) -> str:
    """Return the format that shows the largest number of a column with about three digits."""
    largest = max((value for value in column if math.isfinite(value)), default=0.0)
    if 0 < largest < 1e-3:
        return ".2e"
    decimals = 2 - math.floor(math.log10(largest)) if largest > 0 else 2
    return f".{max(decimals, 0)}f"


# One experiment.


def results_table(results: Results) -> Table:
    """Tabulate an experiment, one row per method.

    Bold cells are those of ``Results.clearly_best``.
    """
    rows, accuracy = results.rows, results.accuracy
    scale, form, unit = (100, ".1f", " %") if accuracy else (1, ".2e", "")
    minutes = _three_digits([row.minutes.mean for row in rows])
    mb = _three_digits([row.mb for row in rows])
    lines = []
    for row in rows:
        final = Spread(scale * row.final.mean, scale * row.final.std)
        lines.append(
            [
                Cell(printable(row.method.label) + _run_count(row, results)),
                to_target(results, row, "rounds", ".1f", " reached"),
                to_target(results, row, "minutes", minutes, " reached"),
                final_cell(row, final, form, unit, _is_best(results, row, "final")),
                Cell(DASH if math.isnan(row.mb) else f"{row.mb:{mb}}"),
            ]
        )
    target, metric = results.target, printable(results.spec.task.metric)
    header = ["Method", f"Rounds to {target}", f"Minutes to {target}", f"Final {metric}", "MB per round"]
    return Table(header, lines, "lrrrr")


def _run_count(row: Row, results: Results) -> str:
    """Return a note such as " (3 of 4 runs)" if runs of a method are missing, else ""."""
    seeds, damaged = len(results.spec.run.seeds), len(results.damaged[row.method.label])
    more = f", {damaged} damaged" if damaged else ""
    return "" if row.runs == seeds else f" ({row.runs} of {seeds} runs{more})"


def to_target(results: Results, row: Row, measure: str, form: str = ".1f", word: str = "") -> Cell:
    """Show the rounds or minutes to the target, and how many runs reached it if not all did."""
    if not row.runs or results.spec.run.target is None:
        return Cell(DASH)
    if row.all_diverged and not row.reached:
        return Cell(DIVERGED)
    more = f", {row.diverged} {DIVERGED}" if row.diverged else ""
    if not row.reached:
        return Cell(f"never (0/{row.runs}{more})")
    note = "" if row.reached == row.runs else f"{row.reached}/{row.runs}{word}{more}"
    return number(getattr(row, measure), form, note, _is_best(results, row, measure))


def _is_best(results: Results, row: Row, measure: str) -> bool:
    return results.clearly_best[measure] == row.method.label


def final_cell(row: Row, final: Spread, form: str, unit: str = "", bold: bool = False) -> Cell:
    """Show the metric at the end, with the number of runs that diverged."""
    if row.all_diverged:
        return Cell(DIVERGED)
    note = f"{row.diverged}/{row.runs} {DIVERGED}" if row.diverged else ""
    return number(final, form, note, bold, unit)


def results_markdown(results: Results) -> str:
    """Render the table of an experiment in Markdown, with its caption and legend."""
    table = results_table(results).to_markdown()
    further = further_table(results)
    more = "" if further is None else f"\n{FURTHER}:\n\n{further.to_markdown()}"
    return f"{escape.markdown(caption(results))}.\n{legend(results)}\n\n{table}{more}"


FURTHER = "Further metrics at the end, mean ± sample standard deviation over seeds"


def further_table(results: Results) -> Table | None:
    """Tabulate all named numbers of the last evaluation, one row per method; None if there are none."""
    found = numbers.further_metrics(results, with_first=True)
    if not found:
        return None
    rows = [
        [Cell(printable(label)), *(number(spreads[label], ".3g") for spreads in found.values())]
        for label in results.runs
    ]
    return Table(["Method", *map(printable, found)], rows, "l" + "r" * len(found))


def caption(results: Results) -> str:
    """Return the line above the table."""
    return f"{printable(results.title)}: {extent(results)}"


def extent(results: Results) -> str:
    """Return the number of rounds and seeds."""
    count = len(results.spec.run.seeds)
    return f"{results.spec.run.rounds} rounds, {count} seed{'s' if count > 1 else ''}"


def legend(results: Results) -> str:
    """Explain the table."""
    return (
        "Mean ± sample standard deviation over seeds; rounds and minutes over the seeds that reached the "
        f"target. Minutes are simulated: {pricing(results)}. "
        f"MB per round: down and up, all clients together. {CLEARLY_BEST}{_diverged_note(results.rows)}"
    )


def _diverged_note(rows: Iterable[Row]) -> str:
    if not any(row.diverged for row in rows):
        return ""
    return " Diverged: the last metric or a client's update was not finite; no mean includes these runs."


def pricing(results: Results) -> str:
    """Return how rounds are priced, in words; web/page.js has the same sentence."""
    cost = results.cost
    links = f"links of {_range(cost.down_mbps)} Mbps down and {_range(cost.up_mbps)} Mbps up"
    steps = f"{_range(cost.seconds_per_step)} s per local step"
    latency = f", {_range(cost.latency)} s latency" if cost.latency else ""
    client = "the mean of its clients" if cost.per_round == "mean" else "its slowest client"
    return f"{links}{group_links(results)}, {steps}{latency}; a round takes as long as {client}"


def group_links(results: Results) -> str:
    """Return the links between groups and the server, in words; empty if no method has groups."""
    first = (run.history[0] for runs in results.runs.values() for run in runs if run.history)
    if not any(work.link == "group" for record in first for work in record.work):
        return ""
    cost = results.cost
    return f", of {cost.group_down_mbps:g} Mbps down and {cost.group_up_mbps:g} Mbps up for groups"


def _range(value: float | tuple[float, ...]) -> str:
    return f"{min(value):g} to {max(value):g}" if isinstance(value, tuple) else f"{value:g}"


# Several experiments, in the shape of the paper's tables.


def summary_table(experiments: Experiments, measure: str, precise_minutes: bool = False) -> Table:
    """Tabulate a measure, one row per experiment and one column per method.

    Bold cells are those of ``Results.clearly_best``. With ``precise_minutes``, minutes have as
    many digits as in ``results_table``.
    """
    labels = numbers.method_labels(experiments)
    lines = []
    for experiment in experiments:
        results, form = experiment.results, ".1f"
        if precise_minutes and measure == "minutes":
            form = _three_digits([row.minutes.mean for row in results.rows])
        show = functools.partial(to_target, form=form) if measure in TO_TARGET else _metric_cell
        cells = {row.method.label: show(results, row, measure) for row in results.rows}
        lines.append([Cell(experiment.name), *(cells.get(label, Cell(DASH)) for label in labels)])
    return Table([numbers.measure_title(experiments, measure), *labels], lines, "l" + "r" * len(labels))


def _metric_cell(results: Results, row: Row, measure: str) -> Cell:
    """Show the metric at the end or its average, and how many seeds finished if not all did."""
    spread: Spread = getattr(row, measure)
    if not row.runs or math.isnan(spread.mean):
        return Cell(DIVERGED if row.all_diverged else DASH)
    finished, seeds = row.runs - row.diverged, len(results.spec.run.seeds)
    note = "" if finished == seeds else f"{finished}/{seeds}"
    if note and row.diverged:
        note += f", {row.diverged} {DIVERGED}"
    form, bold = ".1%" if results.accuracy else ".2e", _is_best(results, row, measure)
    return number(spread, form, note, bold)


def summary_markdown(experiments: Experiments, measures: Sequence[str] = TO_TARGET) -> str:
    """Render the tables of several experiments in Markdown, with a legend."""
    tables = [summary_table(experiments, measure).to_markdown() for measure in measures]
    did = "reached the target" if set(measures) <= set(TO_TARGET) else "finished"
    note = (
        f"Mean ± sample standard deviation over the seeds that {did}; (k/n): k of n seeds did. "
        + CLEARLY_BEST
        + _diverged_note(row for experiment in experiments for row in experiment.results.rows)
    )
    return "\n".join([*tables, f"{note}\n"])


def summary_latex(
    experiments: Experiments, measures: Sequence[str] = TO_TARGET, precise_minutes: bool = False
) -> str:
    """Render the tables of several experiments as one LaTeX tabular; the last rows are the final metric.

    Below these, a single experiment has its further metrics.
    """
    lines = []
    for measure in dict.fromkeys((*measures, "final")):
        table = summary_table(experiments, measure, precise_minutes)
        titles = [table.header[0]] + [""] * (len(table.rows) - 1)
        lines += [[Cell(title), *row] for title, row in zip(titles, table.rows, strict=True)]
    labels = numbers.method_labels(experiments)
    if len(experiments) == 1:
        name, results = experiments[0].name, experiments[0].results
        for metric, spreads in numbers.further_metrics(results).items():
            cells = [number(spreads[label], ".3g") for label in labels]
            lines.append([Cell(printable(metric)), Cell(name), *cells])
    table = Table(["Measure", "Data", *labels], lines, "ll" + "c" * len(labels))
    return table.to_latex(len(experiments), f"Mean and sample standard deviation. {CLEARLY_BEST}")
