"""The report page: one HTML file that needs no network."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from html import escape
from typing import TYPE_CHECKING, Any

import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from fadamgc.experiments.figures import X_TITLE, colour
from fadamgc.experiments.results import Results, cells, extent, header, legend

if TYPE_CHECKING:
    import pandas as pd

STYLE = """
:root { color-scheme: light; --ink: #1c2430; --soft: #5b6675; --line: #e3e7ec; --card: #ffffff; }
* { box-sizing: border-box; }
body { margin: 0; background: #f6f7f9; color: var(--ink);
       font: 16px/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif; }
main { max-width: 1080px; margin: 0 auto; padding: 2.2rem 1.2rem 4rem; }
h1 { font-size: 1.7rem; line-height: 1.25; margin: 0 0 .3rem; }
h2 { font-size: 1.1rem; margin: 0 0 .8rem; }
p { margin: 0; color: var(--soft); }
section { background: var(--card); border: 1px solid var(--line); border-radius: 10px;
          padding: 1.2rem 1.4rem; margin-top: 1.2rem; }
section > p { font-size: .88rem; margin-top: .8rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: .5rem .7rem; border-bottom: 1px solid var(--line); white-space: nowrap; }
th:first-child, td:first-child { text-align: left; }
thead th { font-size: .85rem; color: var(--soft); font-weight: 600; border-bottom: 2px solid var(--line); }
tbody tr:last-child td { border-bottom: 0; }
td b { color: #0b6b3a; }
.swatch { display: inline-block; width: .8em; height: .8em; border-radius: 2px; margin-right: .55em; }
.plot { height: 460px; }
img { max-width: 100%; height: auto; display: block; margin: 0 auto; }
pre { margin: 0; overflow-x: auto; font: .82rem/1.5 ui-monospace, Menlo, Consolas, monospace; }
summary { cursor: pointer; font-weight: 600; font-size: 1.1rem; }
details pre { margin-top: .8rem; }
"""


def page(results: Results, lines: Mapping[str, pd.DataFrame], labels: bytes | None) -> str:
    """The page; ``labels`` is the picture of the label distribution as PNG, if there is one."""
    spec = results.spec
    title = escape(spec.title or spec.name)
    parts = [
        _section("Results", _table(results), legend(results)),
        _section(
            "Over rounds",
            _plot(results, lines, "round"),
            f"Lines are {'' if results.accuracy else 'geometric '}means over seeds, "
            f"bands one standard deviation{'' if results.accuracy else ' of the logarithm'}. "
            "Click a name in the legend to hide a method, double-click it to see it alone; "
            "drag over the plot to zoom, double-click to zoom out.",
        ),
        _section("Over simulated time", _plot(results, lines, "minutes")),
    ]
    if labels is not None:
        data = base64.b64encode(labels).decode()
        image = f'<img alt="Label distribution of every client" src="data:image/png;base64,{data}">'
        parts.append(_section("Who holds which labels", image, f"Partition of seed {spec.run.seeds[0]}."))
    parts.append(
        "<section><details><summary>The spec that made this</summary>"
        f"<pre>{escape(spec.to_toml())}</pre></details>"
        "<p>Save it as spec.toml; <code>fadamgc run spec.toml</code> makes the same runs again.</p></section>"
    )
    parts.append(_section("Made with", _environments(results)))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>{STYLE}</style>\n<script>{get_plotlyjs()}</script>\n</head>\n<body>\n<main>\n"
        f"<h1>{title}</h1>\n<p>{escape(_subtitle(results))}</p>\n"
        + "\n".join(parts)
        + "\n</main>\n</body>\n</html>\n"
    )


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
        shown = [f"<b>{escape(cell.text)}</b>" if cell.best else escape(cell.text) for cell in line]
        shown[0] = f'<span class="swatch" style="background:{colour(number, len(lines))}"></span>{shown[0]}'
        body.append("<tr>" + "".join(f"<td>{text}</td>" for text in shown) + "</tr>")
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table>"
    return f'<div class="scroll">{table}</div>'


def _plot(results: Results, lines: Mapping[str, pd.DataFrame], x: str) -> str:
    figure = go.Figure()
    everyone = list(results.runs)
    scale = 100 if results.accuracy else 1
    unit = " %" if results.accuracy else ""
    form = ".1f" if results.accuracy else ".3g"
    for number, label in enumerate(everyone):
        if label not in lines:
            continue
        line, shade = lines[label], colour(number, len(everyone))
        low, high = line["low"] * scale, line["high"] * scale
        common: dict[str, Any] = {"legendgroup": label, "name": escape(label)}
        figure.add_scatter(
            x=[*line[x], *line[x][::-1]],
            y=[*high, *low[::-1]],
            fill="toself",
            mode="lines",
            fillcolor=_faint(shade),
            line={"width": 0},
            hoverinfo="skip",
            showlegend=False,
            **common,
        )
        figure.add_scatter(
            x=line[x].tolist(),
            y=(line["mean"] * scale).tolist(),
            customdata=line[["round", "minutes"]].to_numpy().tolist(),
            line={"color": shade, "width": 3 if number == len(everyone) - 1 else 1.8},
            mode="lines",
            hovertemplate=f"%{{y:{form}}}{unit}, round %{{customdata[0]}}, %{{customdata[1]:.3g}} min",
            **common,
        )
    if results.spec.run.target is not None:
        height = results.spec.run.target * scale
        figure.add_hline(y=height, line={"color": "#555", "width": 1, "dash": "dash"})
        figure.add_annotation(
            text=f"target {results.target}",
            xref="paper",
            x=1,
            y=height if results.accuracy else math.log10(height),  # annotations count decades on a log axis
            xanchor="right",
            yanchor="top",
            showarrow=False,
        )
    figure.update_layout(
        template="plotly_white",
        margin={"l": 60, "r": 10, "t": 10, "b": 50},
        hovermode="x" if x == "round" else "closest",
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.02, "x": 0},
        font={"family": "system-ui, sans-serif", "size": 13},
        xaxis={"title": {"text": X_TITLE[x]}, "rangemode": "tozero"},
        yaxis={
            "title": {
                "text": f"test {results.spec.task.metric}" if results.accuracy else results.spec.task.metric
            },
            "ticksuffix": unit,
            **({"range": [0, 100]} if results.accuracy else {"type": "log", "exponentformat": "power"}),
        },
    )
    shown: str = figure.to_html(
        full_html=False,
        include_plotlyjs=False,
        include_mathjax=False,
        default_height="460px",
        div_id=f"plot-{x}",
        config={"responsive": True, "displayModeBar": False},
    )
    return f'<div class="plot">{shown}</div>'


def _faint(colour: str) -> str:
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.12)"


def _environments(results: Results) -> str:
    """Each set of versions and machine that some of the runs were made with."""
    seen = {tuple(run.environment.items()): None for runs in results.runs.values() for run in runs}
    texts = [", ".join(f"{name} {value}" for name, value in items) for items in seen]
    executors = sorted({run.settings["executor"] for runs in results.runs.values() for run in runs})
    return "".join(f"<p>{escape(text)}</p>" for text in [*texts, f"executor {', '.join(executors)}"])
