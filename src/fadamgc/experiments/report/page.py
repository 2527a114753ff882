"""The report page: one HTML file that needs no network.

``web/page.html.j2`` has the tables and the data; ``web/page.js`` draws the curves, and prices the rounds
again when a slider is moved.
"""

from __future__ import annotations

import base64
import functools
import json
import math
from collections import Counter
from importlib import resources
from itertools import accumulate
from statistics import median
from typing import Any

import jinja2

from fadamgc.escape import printable
from fadamgc.experiments.report.numbers import T95, Experiments, ReportedExperiment, Results
from fadamgc.experiments.report.plots import colour
from fadamgc.experiments.report.tables import (
    FURTHER,
    extent,
    further_table,
    group_links,
    legend,
    pricing,
    results_table,
)
from fadamgc.federation.cost import PerClient
from fadamgc.federation.run import Run
from fadamgc.tasks.sections import CustomTask

AXES = {"round": "Over rounds", "bytes": "Over bytes", "minutes": "Over simulated time"}
SLIDERS = (  # field of the cost model, text, unit, powers of ten from, to
    ("down_mbps", "Link to the clients", "Mbps", -3, 4),
    ("up_mbps", "Link to the server", "Mbps", -3, 4),
    ("seconds_per_step", "A local step", "s", -5, 2),
    ("latency", "Latency of a round", "s", -3, 2),
)


def page(title: str, experiments: Experiments) -> str:
    """Render the page of one or several experiments."""
    from plotly.offline import get_plotlyjs

    colours: dict[str, str] = {}
    for experiment in experiments:
        for number, label in enumerate(experiment.results.runs):
            colours.setdefault(label, colour(number, len(experiment.results.runs)))
    data = json.dumps([_data(experiment.results, colours) for experiment in experiments], allow_nan=False)
    alone = len(experiments) == 1
    return _template().render(
        title=title,
        subtitle=_subtitle(experiments[0].results) if alone else f"{len(experiments)} experiments",
        style=_file("page.css"),
        scripts=[get_plotlyjs(), _file("page.js")],
        colours=colours,
        sliders=SLIDERS,
        axes=AXES,
        experiments=[_context(experiment) for experiment in experiments],
        data=data.replace("<", "\\u003c"),
    )


def _file(name: str) -> str:
    return (resources.files("fadamgc.experiments.report") / "web" / name).read_text(encoding="utf-8")


@functools.cache
def _template() -> jinja2.Template:
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, keep_trailing_newline=True, undefined=jinja2.StrictUndefined
    )
    return environment.from_string(_file("page.html.j2"))


def _context(experiment: ReportedExperiment) -> dict[str, Any]:
    """Return the values of an experiment that the template shows."""
    results = experiment.results
    table = results_table(results)
    runs = [run for runs in results.runs.values() for run in runs]
    environments = dict.fromkeys(
        ", ".join(f"{name} {value}" for name, value in run.environment.items()) for run in runs
    )
    executors = sorted({run.settings["executor"] for run in runs})
    plot = experiment.label_plot
    return {
        "name": experiment.name,
        "table": table,
        "further": further_table(results),
        "further_caption": FURTHER,
        "colours": [colour(number, len(table.rows)) for number in range(len(table.rows))],
        "legend": legend(results).split(pricing(results), 1),
        "pricing": pricing(results),
        "logarithmic": results.logarithmic,
        "label_plot": None if plot is None else base64.b64encode(plot).decode(),
        "first_seed": results.spec.run.seeds[0],
        "spec": results.spec.to_toml(),
        "repeatable": not isinstance(results.spec.task, CustomTask),
        "environments": [*environments, f"executor {', '.join(executors)}"],
    }


def _subtitle(results: Results) -> str:
    run, n = results.spec.run, results.spec.task.clients
    batch = f"batch {run.batch_size}" if run.batch_size else "all data in every step"
    return f"{extent(results)}; {run.sampled or n} of {n} clients per round, {run.local_work}, {batch}"


# The data that the script draws.


def _data(results: Results, colours: dict[str, str]) -> dict[str, Any]:
    """Return an experiment as the script reads it."""
    works: dict[Any, int] = {}
    methods = [
        {
            "label": label,
            "colour": colours[label],
            "runs": [_run(run, works) for run in runs],
            "ended": row.runs,
            "diverged": row.diverged,
        }
        for (label, runs), row in zip(results.runs.items(), results.rows, strict=True)
    ]
    metric = printable(results.spec.task.metric)
    return {
        "methods": methods,
        "works": list(works),
        "seeds": len(results.spec.run.seeds),
        "t95": T95,
        "target": results.spec.run.target,
        "target_text": results.target,
        "goal": next(run for runs in results.runs.values() for run in runs).goal,
        "accuracy": results.accuracy,
        "logarithmic": results.logarithmic,
        "metric_text": f"test {metric}" if results.accuracy else metric,
        "cost": {
            **{name: _slider_start(getattr(results.cost, name)) for name, *_ in SLIDERS},
            "per_round": results.cost.per_round,
        },
        "groups": {  # the links between groups and the server
            "down_mbps": min(results.cost.group_down_mbps, 1e12),
            "up_mbps": min(results.cost.group_up_mbps, 1e12),
            "text": group_links(results),
        },
    }


def _run(run: Run, works: dict[Any, int]) -> dict[str, Any]:
    """Return the rounds of a run; equal rounds share a number in ``works``."""
    work_numbers = []
    metrics = [record.test_metric for record in run.history if record.test_metric is not None]
    for record in run.history:
        exchanges = []
        for work in record.work:
            clients = Counter(zip(work.down, work.up, work.steps, strict=True))
            kind = () if work.link == "client" and work.deadline is None else (work.link, work.deadline)
            exchanges.append(tuple((*load, count, *kind) for load, count in sorted(clients.items())))
        work_numbers.append(works.setdefault(tuple(exchanges), len(works)))
    return {
        "seed": run.settings["seed"],
        "metric": [_finite(record.test_metric) for record in run.history],
        "bytes": list(accumulate(record.bytes_down + record.bytes_up for record in run.history)),
        "seconds": [_finite(record.simulated_seconds) for record in run.history],
        "work": work_numbers,
        "diverged": any(not math.isfinite(value) for value in metrics[-1:]),
    }


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _slider_start(value: PerClient) -> float:
    """Return where a slider starts: at the median where clients differ."""
    return min(float(median(value) if isinstance(value, tuple) else value), 1e12)
