"""What the theorems promise, beside what was measured, on problems whose constants are known.

For beta_2 > 0 and eps > 0 the appendix bounds the mean of E|grad f(x^t)|^2 over T rounds by

    L F / T + 2 sqrt(L F sigma^2 / (n K T))
        + (2 / ((1 - beta_1)^2 beta_1^2) + K (1 - beta_2)) G^6 / (eps^2 T)
        + K (1 - beta_1) (sigma^2 + G^2) / (eps^2 T)

for FAdamGC; for FA-NT the last term has K^2. For beta_2 = eps = 0 it bounds the mean of E|grad f(x^t)|,
without its constants, by

    sqrt(L F sigma^2 / (n K T)) + L F / T + K (L + sigma) / T           FAdamGC
    sqrt(L F / (n K T)) + L F / T + K (L + sigma + n B) / T             FA-NT
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fadamgc.escape import csv_bytes, printable
from fadamgc.escape import markdown as markdown_text
from fadamgc.experiments.report.numbers import DIVERGED, Spread, mean_of
from fadamgc.experiments.report.plots import colour, png, svg
from fadamgc.experiments.report.summary import Entry
from fadamgc.experiments.spec.sections import MethodSpec, Spec
from fadamgc.federation.run import Run
from fadamgc.files import write_atomic
from fadamgc.methods.fa_nt import FANT
from fadamgc.methods.fadamgc import FAdamGC
from fadamgc.tasks.build import build_task, synthetic
from fadamgc.tasks.sections import LinearRegressionTask, QuadraticsTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Constants(NamedTuple):
    """What the assumptions name. Those that hold for all x are taken at the first x and at the optimum."""

    L: float  # smoothness of every f_i
    F: float  # f(x^1) - f*
    sigma: float  # standard deviation of a batch's gradient
    G: float  # norm of a single sample's gradient, and so of a batch's
    B: float  # norm of grad f_i - grad f


class Bound(NamedTuple):
    """A theorem beside a measurement."""

    experiment: str
    group: str | None
    method: str
    n: int
    K: int
    T: int
    norm: str  # what is bounded: the mean over the rounds of "|grad f|^2" or "|grad f|"
    measured: float  # NaN if every run diverged
    leading: float  # the term with 1/sqrt(n K T)
    rest: float  # all others


def constants(spec: Spec, seed: int) -> Constants:
    """The constants of the problem that a seed's run solves."""
    assert isinstance(spec.task, LinearRegressionTask | QuadraticsTask)
    return _constants(spec.task, spec.run.batch_size, seed)


@functools.lru_cache(maxsize=1024)
def _constants(of: LinearRegressionTask | QuadraticsTask, batch_size: int | None, seed: int) -> Constants:
    problem = synthetic(of, seed)
    task = build_task(of, seed)
    start = torch.cat([p.detach().flatten() for p in task.model.parameters()]).double()
    clients = [(X.numpy(), Y.numpy()[:, 0]) for X, Y in problem.clients]
    optimum = problem.optimum.numpy()

    def f(w: np.ndarray) -> float:
        return fmean(0.5 * float(np.mean((X @ w - Y) ** 2)) for X, Y in clients)

    sigma, G, B = 0.0, 0.0, 0.0
    for w in (start.numpy(), optimum):
        each = [X * (X @ w - Y)[:, None] for X, Y in clients]  # gradients of single samples
        means = [g.mean(axis=0) for g in each]
        whole = np.mean(means, axis=0)
        for g, mean in zip(each, means, strict=True):
            m = len(g)
            batch = min(batch_size or m, m)
            left = (m - batch) / (m - 1) if m > 1 else 0.0  # a batch is drawn without replacement
            variance = float(np.mean(((g - mean) ** 2).sum(axis=1))) * left / batch
            sigma = max(sigma, math.sqrt(variance))
            G = max(G, float(np.linalg.norm(g, axis=1).max()))
            B = max(B, float(np.linalg.norm(mean - whole)))
    L = max(float(np.linalg.eigvalsh(X.T @ X / len(X))[-1]) for X, _ in clients)
    return Constants(L, f(start.numpy()) - f(optimum), sigma, G, B)


def bound(c: Constants, method: MethodSpec, n: int, K: int, T: int) -> tuple[str, float, float] | None:
    """What is bounded, the leading term, and the others; None where no theorem applies."""
    algo = method.make()
    if not isinstance(algo, FAdamGC | FANT):
        return None
    naive = isinstance(algo, FANT)
    leading = math.sqrt(c.L * c.F * c.sigma**2 / (n * K * T))
    if algo.beta2 == 0 and algo.eps == 0:
        if naive:
            leading = math.sqrt(c.L * c.F / (n * K * T))
        return "|grad f|", leading, (c.L * c.F + K * (c.L + c.sigma + (n * c.B if naive else 0.0))) / T
    if algo.beta2 == 0 or algo.eps == 0 or algo.beta1 == 0:
        return None
    b1 = (1 - algo.beta1) * algo.beta1
    moments = (2 / b1**2 + K * (1 - algo.beta2)) * c.G**6 / algo.eps**2
    drift = (K**2 if naive else K) * (1 - algo.beta1) * (c.sigma**2 + c.G**2) / algo.eps**2
    return "|grad f|^2", 2 * leading, (c.L * c.F + moments + drift) / T


def bounds(entries: Sequence[Entry]) -> list[Bound]:
    """The theorems beside the runs of experiments whose metric is the squared norm of the gradient."""
    found = []
    for entry in entries:
        spec = entry.results.spec
        if spec.task.metric != "squared gradient norm" or spec.run.local_steps is None:
            continue
        n, K, T = spec.task.clients, spec.run.local_steps, spec.run.rounds
        for method in spec.methods:
            runs = entry.results.runs[method.label]
            each = [bound(constants(spec, run.settings["seed"]), method, n, K, T) for run in runs]
            known = [one for one in each if one is not None]
            if not known:
                continue
            norm = known[0][0]
            found.append(
                Bound(
                    *(entry.name, entry.group, method.label, n, K, T, norm),
                    measured=Spread.of([_mean_norm(run, squared=norm.endswith("2")) for run in runs]).mean,
                    leading=fmean(one[1] for one in known),
                    rest=fmean(one[2] for one in known),
                )
            )
    return found


def _mean_norm(run: Run, squared: bool) -> float:
    values = [record.test_metric for record in run.history if record.test_metric is not None]
    return mean_of([value if squared else math.sqrt(value) for value in values])


def slope(lines: Sequence[Bound]) -> float:
    """The exponent p of measured ~ (n K)^p, by least squares on logarithms."""
    x = np.log([line.n * line.K for line in lines])
    y = np.log([line.measured for line in lines])
    return float(np.polyfit(x, y, 1)[0])


def speed_ups(lines: Sequence[Bound]) -> list[tuple[str, str, float]]:
    """Group, method and slope, where there are several n K."""
    found = []
    for group, method in dict.fromkeys((line.group or "", line.method) for line in lines):
        own = [
            line for line in lines if (line.group or "", line.method) == (group, method) and line.measured > 0
        ]
        if len({line.n * line.K for line in own}) > 1:
            found.append((group, method, slope(own)))
    return found


def markdown(lines: Sequence[Bound]) -> str:
    """The tables in Markdown."""
    rows = [
        "| Experiment | Method | n | K | T | bounded | measured | leading term | other terms |",
        "|:--|:--|--:|--:|--:|:--|--:|--:|--:|",
        *(
            f"| {markdown_text(b.experiment)} | {markdown_text(b.method)} | {b.n} | {b.K} | {b.T} | "
            f"mean of {markdown_text(b.norm)} | {_measured(b)} | {b.leading:.3g} | {b.rest:.3g} |"
            for b in lines
        ),
    ]
    fits = [
        "| Group | Method | measured ~ (n K)^p, p = |",
        "|:--|:--|--:|",
        *(
            f"| {markdown_text(group)} | {markdown_text(method)} | {p:.2f} |"
            for group, method, p in speed_ups(lines)
        ),
    ]
    return "\n".join(rows) + "\n\nThe leading terms have p = -0.5.\n\n" + "\n".join(fits) + "\n"


def _measured(line: Bound) -> str:
    return DIVERGED if math.isnan(line.measured) else f"{line.measured:.3g}"


def figure(lines: Sequence[Bound]) -> Figure:
    """What was measured, and the leading terms, over n K."""
    from matplotlib.figure import Figure

    norms = list(dict.fromkeys(line.norm for line in lines))
    made = Figure(figsize=(5.5 * len(norms), 4), layout="constrained")
    for norm, panel in zip(norms, made.subplots(1, len(norms), squeeze=False)[0], strict=True):
        own = [line for line in lines if line.norm == norm]
        methods = list(dict.fromkeys(line.method for line in own))
        for number, method in enumerate(methods):
            shade = colour(number, len(methods))
            points = sorted((b.n * b.K, b.measured, b.leading) for b in own if b.method == method)
            x, measured, leading = zip(*points, strict=True)
            named = printable(method)
            panel.plot(x, measured, "o", color=shade, label=f"{named}, measured")
            panel.plot(x, leading, "--", color=shade, label=f"{named}, leading term")
        panel.set_xscale("log")
        if any(b.measured > 0 or b.leading > 0 for b in own):
            panel.set_yscale("log")
        panel.set_xlabel("n K")
        panel.set_ylabel(f"mean over the rounds of {norm}", parse_math=False)
        panel.grid(color="0.92")
        panel.set_axisbelow(True)
        panel.legend(frameon=False, fontsize=8)
        panel.spines[["top", "right"]].set_visible(False)
    return made


def write_bounds(folder: Path, entries: Sequence[Entry]) -> list[Path]:
    """bounds.csv, bounds.md and the figure; nothing where no theorem applies."""
    lines = bounds(entries)
    if not lines:
        return []
    import pandas as pd

    drawn = figure(lines)
    files = {
        "bounds.csv": csv_bytes(pd.DataFrame(lines)),
        "bounds.md": f"# The theorems beside what was measured\n\n{markdown(lines)}".encode(),
        "bounds.png": png(drawn),
        "bounds.svg": svg(drawn),
    }
    for name, data in files.items():
        write_atomic(folder / name, data)
    return [folder / name for name in files]
