"""The report page: one HTML file that needs no network.

Python writes the tables and the data; ``web/page.js`` draws the curves, and prices the rounds again when a
slider is moved.
"""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Sequence
from html import escape
from importlib import resources
from statistics import median
from typing import Any, NamedTuple

from plotly.offline import get_plotlyjs

from fadamgc.escape import printable
from fadamgc.experiments.report.numbers import Results, cells, extent, header, legend, pricing, rows
from fadamgc.experiments.report.plots import colour
from fadamgc.federation.cost import PerClient
from fadamgc.federation.run import Run
from fadamgc.tasks.sections import CustomTask

AXES = {
    "round": "Over rounds",
    "bytes": "Over bytes",
    "minutes": "Over simulated time",
}
SLIDERS = (  # name, what it says, unit, powers of ten from, to
    ("down_mbps", "Link to the clients", "Mbps", -3, 4),
    ("up_mbps", "Link to the server", "Mbps", -3, 4),
    ("seconds_per_step", "A local step", "s", -5, 2),
    ("latency", "Latency of a round", "s", -3, 2),
)
MINUTES = 2  # the table's column that the sliders change


class Shown(NamedTuple):
    """An experiment on the page, with the picture of its label distribution as PNG, if there is one."""

    name: str
    results: Results
    labels: bytes | None = None


def page(title: str, experiments: Sequence[Shown]) -> str:
    """The page of one or several experiments."""
    labels: dict[str, str] = {}
    for shown in experiments:
        every = list(shown.results.runs)
        labels |= {label: colour(i, len(every)) for i, label in enumerate(every) if label not in labels}
    one = len(experiments) == 1
    parts = [_controls(labels)]
    for number, shown in enumerate(experiments):
        inside = _experiment(shown)
        if one:
            parts.append(f'<div id="experiment-{number}">{inside}</div>')
        else:
            opened = " open" if number == 0 else ""
            parts.append(
                f'<details class="experiment" id="experiment-{number}"{opened}>'
                f"<summary>{escape(shown.name)}</summary>{inside}</details>"
            )
    subtitle = _subtitle(experiments[0].results) if one else f"{len(experiments)} experiments"
    data = json.dumps([_data(shown.results, labels) for shown in experiments], allow_nan=False)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_file('page.css')}</style>\n"
        f"<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n"
        f"<h1>{escape(title)}</h1>\n<p>{escape(subtitle)}</p>\n"
        + "\n".join(parts)
        + '\n</main>\n<script type="application/json" id="experiments">'
        + data.replace("<", "\\u003c")
        + f"</script>\n<script>{_file('page.js')}</script>\n</body>\n</html>\n"
    )


def _file(name: str) -> str:
    return (resources.files("fadamgc.experiments.report") / "web" / name).read_text(encoding="utf-8")


# What the script draws


def _data(results: Results, colours: dict[str, str]) -> dict[str, Any]:
    """An experiment as the script reads it."""
    works: dict[Any, int] = {}
    methods = [
        {
            "label": label,
            "colour": colours[label],
            "runs": [_run(run, works) for run in runs],
            "ended": row.runs,
            "diverged": row.diverged,
        }
        for (label, runs), row in zip(results.runs.items(), rows(results), strict=True)
    ]
    spec = results.spec
    metric = printable(spec.task.metric)
    first = next(run for runs in results.runs.values() for run in runs)
    return {
        "methods": methods,
        "works": list(works),
        "seeds": len(spec.run.seeds),
        "target": spec.run.target,
        "target_text": results.target,
        "goal": first.goal,
        "accuracy": results.accuracy,
        "logarithmic": results.logarithmic,
        "metric_text": f"test {metric}" if results.accuracy else metric,
        "cost": {
            **{name: _single(getattr(results.cost, name)) for name, *_ in SLIDERS},
            "per_round": results.cost.per_round,
        },
    }


def _run(run: Run, works: dict[Any, int]) -> dict[str, Any]:
    """A run: what it reached, and for each round the number of its work among all kinds of work."""
    total = 0
    so_far = []
    kinds = []
    for record in run.history:
        total += record.bytes_down + record.bytes_up
        so_far.append(total)
        exchanges = []
        for work in record.work:
            alike: dict[tuple[int, int, int], int] = {}
            for one in zip(work.down, work.up, work.steps, strict=True):
                alike[one] = alike.get(one, 0) + 1
            exchanges.append(tuple((*one, count) for one, count in sorted(alike.items())))
        kinds.append(works.setdefault(tuple(exchanges), len(works)))
    return {
        "seed": run.settings["seed"],
        "metric": [_finite(record.test_metric) for record in run.history],
        "bytes": so_far,
        "seconds": [_finite(record.simulated_seconds) for record in run.history],
        "work": kinds,
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _single(value: PerClient) -> float:
    """What a slider starts from where each client has a number of its own."""
    number = float(median(value) if isinstance(value, tuple) else value)
    return min(number, 1e12)


# What is written as it is


def _controls(colours: dict[str, str]) -> str:
    sliders = "".join(
        f'<label for="cost-{name}">{said}, {unit} <output id="shown-{name}"></output>'
        f'<input type="range" id="cost-{name}" min="{low}" max="{high}" step="any"></label>'
        for name, said, unit, low, high in SLIDERS
    )
    toggles = "".join(
        f'<label><input type="checkbox" data-method="{escape(label)}" checked>'
        f'<span class="swatch" style="background:{shade}"></span>{escape(label)}</label>'
        for label, shade in colours.items()
    )
    return (
        "<section><h2>What if</h2>"
        f'<div class="toggles">{toggles}</div>'
        f'<div class="controls">{sliders}'
        '<label for="cost-per_round">A round takes as long as<br><select id="cost-per_round">'
        '<option value="mean">the mean of its clients</option>'
        '<option value="slowest">its slowest client</option></select></label>'
        '<label>&nbsp;<br><button type="button" id="cost-reset">As in the spec</button></label></div>'
        "<p>The same saved rounds, priced for other links and devices: minutes in the tables and the last "
        "curves follow. Boxes show and hide methods.</p></section>"
    )


def _experiment(shown: Shown) -> str:
    results = shown.results
    means = "geometric means" if results.logarithmic else "means"
    band = "one standard deviation" + (" of the logarithm" if results.logarithmic else "")
    plots = "".join(
        f'<h3>{said}</h3><div class="plot" data-axis="{axis}"></div>' for axis, said in AXES.items()
    )
    priced = escape(pricing(results))
    said = escape(legend(results)).replace(priced, f"<span data-pricing>{priced}</span>")
    parts = [
        _section("Results", f"{_table(results)}<p>{said}</p>"),
        _section(
            "Curves",
            plots,
            f"Lines are {means} over seeds, bands {band}. "
            "Drag over a plot to zoom, double-click to zoom out.",
        ),
    ]
    if shown.labels is not None:
        data = base64.b64encode(shown.labels).decode()
        image = f'<img alt="Label distribution of every client" src="data:image/png;base64,{data}">'
        seed = results.spec.run.seeds[0]
        parts.append(_section("Who holds which labels", image, f"Partition of seed {seed}."))
    again = "Save it as spec.toml; <code>fadamgc run spec.toml</code> makes the same runs again."
    if isinstance(results.spec.task, CustomTask):
        again = "The runs came from a program with its own task; <code>fadamgc run</code> cannot repeat them."
    parts.append(
        "<section><details><summary>The spec that made this</summary>"
        f"<pre>{escape(results.spec.to_toml())}</pre></details><p>{again}</p></section>"
    )
    parts.append(_section("Made with", _environments(results)))
    return "\n".join(parts)


def _subtitle(results: Results) -> str:
    run, n = results.spec.run, results.spec.task.clients
    work = f"{run.local_steps} local steps" if run.local_steps else f"{run.local_epochs} local epochs"
    batch = f"batch {run.batch_size}" if run.batch_size else "whole data in every step"
    return f"{extent(results)}; {run.sampled or n} of {n} clients a round, {work}, {batch}"


def _section(title: str, content: str, note: str = "") -> str:
    said = f"<p>{escape(note)}</p>" if note else ""
    return f"<section><h2>{escape(title)}</h2>{content}{said}</section>"


def _table(results: Results) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in header(results))
    body = []
    lines = cells(results)
    for number, line in enumerate(lines):
        swatch = f'<span class="swatch" style="background:{colour(number, len(lines))}"></span>'
        row = []
        for column, cell in enumerate(line):
            mark = f' data-minutes="{number}"' if column == MINUTES else ""
            best = ' class="best"' if cell.best else ""
            row.append(f"<td{mark}{best}>{swatch if column == 0 else ''}{escape(cell.text)}</td>")
        body.append("<tr>" + "".join(row) + "</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _environments(results: Results) -> str:
    """Each set of versions and machine that some of the runs were made with."""
    seen = {tuple(run.environment.items()): None for runs in results.runs.values() for run in runs}
    texts = [", ".join(f"{name} {value}" for name, value in items) for items in seen]
    executors = sorted({run.settings["executor"] for runs in results.runs.values() for run in runs})
    return "".join(f"<p>{escape(text)}</p>" for text in [*texts, f"executor {', '.join(executors)}"])
