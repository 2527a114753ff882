"""The report page: one HTML file that needs no network.

``web/page.html.j2`` has the tables and the data; ``web/page.js`` draws the curves with uPlot, and prices the
rounds again when a slider is moved.
"""

from __future__ import annotations

import base64
import functools
import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import accumulate
from statistics import median
from typing import Any

import jinja2

from fadamgc.codecs import make_codec
from fadamgc.errors import InputError, whole
from fadamgc.escape import printable
from fadamgc.experiments.report.means import T95
from fadamgc.experiments.report.numbers import Experiments, ReportedExperiment, Results, method_labels
from fadamgc.experiments.report.plots import EARLY, MARGIN, colour, dash
from fadamgc.experiments.report.tables import (
    FURTHER,
    extent,
    further_table,
    group_links,
    legend,
    pricing,
    results_table,
)
from fadamgc.experiments.report.tuning import LEGEND, tuning_maps
from fadamgc.federation.cost import PerClient
from fadamgc.federation.record import BY_CLIENT, Record
from fadamgc.federation.run import Run
from fadamgc.tasks.sections import CustomTask

AXES = {"round": "rounds", "minutes": "simulated minutes", "bytes": "megabytes", "wall": "wall clock seconds"}
FIRST_AXES = ("round", "minutes")  # of the two plots of an experiment
MOST_NAMED = 12  # limit for the named numbers of a metric that can be drawn; numbers over clients come first
SLIDERS = (  # field of the cost model, text, unit, powers of ten from, to
    ("down_mbps", "Link to the clients", "Mbps", -3, 4),
    ("up_mbps", "Link to the server", "Mbps", -3, 4),
    ("seconds_per_step", "A local step", "s", -5, 2),
    ("latency", "Latency of a round", "s", -3, 2),
)
OTHER_CODECS = ("float32", "bfloat16", "int8", "int4")  # that messages can be priced with
CODEC_CHOICES = (  # kind of a field, text, codecs
    ("tracking", "Codec of y, dy and moments", OTHER_CODECS),
    ("change", "Codec of dx", (*OTHER_CODECS, "topk:0.1", "topk:0.01")),
)


def page(title: str, experiments: Experiments, figures: Mapping[str, bytes] = {}) -> str:
    """Render the page of one or several experiments, under further figures: PNGs by caption."""
    styles = {
        label: {"colour": colour(number), "dash": dash(number)}
        for number, label in enumerate(method_labels(experiments))
    }
    data = json.dumps([_data(experiment.results, styles) for experiment in experiments], allow_nan=False)
    alone = len(experiments) == 1
    return _template().render(
        title=title,
        subtitle=_subtitle(experiments[0].results) if alone else f"{len(experiments)} experiments",
        style=_file("uPlot.min.css") + _file("page.css"),
        uplot=f"/*\n{_file('uPlot.LICENSE')}*/\n{_file('uPlot.iife.min.js')}",
        script=_file("page.js"),
        styles=styles,
        sliders=SLIDERS,
        codec_choices=CODEC_CHOICES,
        axes=AXES,
        first_axes=FIRST_AXES,
        tuning_legend=LEGEND,
        figures={caption: base64.b64encode(png).decode() for caption, png in figures.items()},
        experiments=_contexts(experiments),
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


def _contexts(experiments: Experiments) -> list[dict[str, Any]]:
    """Return the values of all experiments; equal label plots are in the page once."""
    contexts, first = [], dict[str, str]()
    for experiment in experiments:
        context = _context(experiment)
        plot = context["label_plot"]
        same = None if plot is None else first.setdefault(plot, experiment.name)
        contexts.append(context | {"same_labels_as": same if same != experiment.name else None})
    return contexts


def _context(experiment: ReportedExperiment) -> dict[str, Any]:
    """Return the values of an experiment that the template shows."""
    results = experiment.results
    table = results_table(results)
    runs = [run for runs in results.runs.values() for run in runs]
    environments = dict.fromkeys(
        ", ".join(f"{name} {value}" for name, value in run.environment.items()) for run in runs
    )
    executors = sorted({run.settings["executor"] for run in runs})
    plot, tuning = experiment.label_plot, experiment.tuning
    return {
        "name": experiment.name,
        "table": table,
        "further": further_table(results),
        "further_caption": FURTHER,
        "labels": list(results.runs),
        "quantities": {key: text for key, (text, _) in _quantities(results).items()},
        "legend": legend(results).split(pricing(results), 1),
        "pricing": pricing(results),
        "tuning": tuning_maps(results, tuning) if isinstance(tuning, dict) else [],
        "tuning_problem": tuning if isinstance(tuning, str) else None,
        "label_plot": None if plot is None else base64.b64encode(plot).decode(),
        "first_seed": results.spec.run.seeds[0],
        "spec": results.spec.to_toml(),
        "repeatable": not isinstance(results.spec.task, CustomTask),
        "refusals": [printable(text) for run in runs for text in _texts(run.settings.get("refusals"))],
        "environments": [*environments, f"executor {', '.join(executors)}"],
    }


def _texts(value: object) -> list[str]:
    """Return a list of texts; empty if a record has something else in its place."""
    return [text for text in value if isinstance(text, str)] if isinstance(value, list) else []


def _subtitle(results: Results) -> str:
    run, n = results.spec.run, results.spec.task.clients
    batch = f"batch {run.batch_size}" if run.batch_size else "all data in every step"
    return f"{extent(results)}; {run.sampled or n} of {n} clients per round, {run.local_work}, {batch}"


# The data that the script draws.


def _quantities(results: Results) -> dict[str, tuple[str, str]]:
    """Return what curves can show: by key, the text and the kind of axis (share, logarithmic or linear)."""
    metric = printable(results.spec.task.metric)
    scale = "share" if results.accuracy else "logarithmic" if results.logarithmic else "linear"
    found = {"metric": (f"test {metric}" if results.accuracy else metric, scale)}
    records = [record for runs in results.runs.values() for run in runs for record in run.history]
    for name in ("train_loss", "test_loss"):
        pairs = [(getattr(record, name), record.test_metric) for record in records]
        finite = [v for v, _ in pairs if v is not None and math.isfinite(v)]
        if finite and any(value != metric_value for value, metric_value in pairs):
            found[name] = (name.replace("_", " "), "logarithmic" if min(finite) > 0 else "linear")
    for name in dict.fromkeys(name for record in records for name in record.replies):
        found[f"replies {name}"] = (printable(name), "linear")
    names = dict.fromkeys(name for record in records for name in record.metrics)
    by_client = [name for name in names if name.startswith(BY_CLIENT)]
    for name in [*by_client, *(name for name in names if name not in by_client)][:MOST_NAMED]:
        share = results.accuracy and name in by_client
        found[f"metrics {name}"] = (printable(name), "share" if share else "linear")
    return found


def _data(results: Results, styles: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Return an experiment as the script reads it."""
    works: dict[Any, int] = {}
    quantities = _quantities(results)
    methods = [
        {
            "label": label,
            **styles[label],
            "messages": _messages(runs),
            "runs": [_run(run, works, list(quantities)[1:]) for run in runs],
            "ended": row.runs,
            "diverged": row.diverged,
        }
        for (label, runs), row in zip(results.runs.items(), results.rows, strict=True)
    ]
    return {
        "methods": methods,
        "quantities": {key: {"text": text, "scale": scale} for key, (text, scale) in quantities.items()},
        "early": EARLY,
        "margin": MARGIN,
        "works": list(works),
        "seeds": len(results.spec.run.seeds),
        "t95": T95,
        "target": results.spec.run.target,
        "target_text": results.target,
        "goal": next(run for runs in results.runs.values() for run in runs).goal,
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


def _run(run: Run, works: dict[Any, int], quantities: Sequence[str]) -> dict[str, Any]:
    """Return the rounds of a run; rounds with equal work share one entry of ``works``."""
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
        "wall": [_rounded(record.wall_seconds) for record in run.history],
        "more": {key: [_rounded(_recorded(record, key)) for record in run.history] for key in quantities},
        "work": work_numbers,
        "diverged": any(not math.isfinite(value) for value in metrics[-1:]),
    }


_KINDS = {("down", 0): "model", ("up", 0): "change"}  # by part and place; other fields track, or are moments


def _messages(runs: Sequence[Run]) -> list[dict[str, Any]] | None:
    """Return the fields of a method's messages and their bytes, as they were sent and with other codecs.

    None if the runs do not say: methods with groups, and records of earlier versions.
    """
    descriptions: list[Any] = [run.settings.get("messages") for run in runs]
    if not runs or any(description != descriptions[0] for description in descriptions):
        return None
    fields: list[dict[str, Any]] = []
    try:
        for part in ("down", "up", "tracked"):
            for number, (n, size) in enumerate(descriptions[0][part].values()):
                kind = _KINDS.get((part, number), "tracking")
                whole("numbers", n, 0), whole("bytes", size, 0)
                codecs = next((codecs for known, _, codecs in CODEC_CHOICES if known == kind and n > 1), ())
                sizes = {codec: make_codec(codec).size(n) for codec in codecs}
                fields.append({"part": part, "kind": kind, "bytes": size, "codecs": sizes})
    except (InputError, KeyError, TypeError, ValueError, AttributeError):
        return None  # a damaged or a foreign record
    return fields


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _rounded(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.6g}")


def _recorded(record: Record, key: str) -> float | None:
    """Return what a record has under a key of ``_quantities``."""
    kind, _, name = key.partition(" ")
    value: float | None = getattr(record, kind).get(name) if name else getattr(record, key)
    return value


def _slider_start(value: PerClient) -> float:
    """Return the first value of a slider: the median if clients have different values."""
    return min(float(median(value) if isinstance(value, tuple) else value), 1e12)
