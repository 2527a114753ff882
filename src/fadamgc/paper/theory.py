"""The bounds of the theorems next to measurements, on problems whose constants are known.

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
from statistics import fmean
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

from fadamgc.escape import csv_bytes, printable
from fadamgc.experiments.report.means import Spread, mean_of
from fadamgc.experiments.report.numbers import Experiments
from fadamgc.experiments.report.plots import colour, image_files, tidy
from fadamgc.experiments.report.tables import DIVERGED, Table, text_rows
from fadamgc.experiments.spec.sections import MethodSpec, Spec
from fadamgc.federation.run import Run
from fadamgc.methods.fa_nt import FANT
from fadamgc.methods.fadamgc import FAdamGC
from fadamgc.tasks.build import build_task, synthetic
from fadamgc.tasks.sections import LinearRegressionTask, QuadraticsTask

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class Constants(NamedTuple):
    """The constants of the assumptions; maxima over all x are taken over the first x and the optimum."""

    L: float  # smoothness of every f_i
    F: float  # f(x^1) - f*
    sigma: float  # standard deviation of a batch's gradient
    G: float  # norm of a single sample's gradient, and so of a batch's
    B: float  # norm of grad f_i - grad f


class Bound(NamedTuple):
    """The bound of a theorem next to a measurement."""

    experiment: str
    group: str | None
    method: str
    n: int
    K: int
    T: int
    norm: str  # the bound is on the mean over the rounds of "|grad f|^2" or "|grad f|"
    measured: float  # NaN if every run diverged
    leading: float  # the term with 1/sqrt(n K T)
    rest: float  # all other terms


def constants(spec: Spec, seed: int) -> Constants:
    """Return the constants of the problem that the run of a seed solves."""
    assert isinstance(spec.task, LinearRegressionTask | QuadraticsTask)
    return _constants(spec.task, spec.run.batch_size, seed)


@functools.lru_cache(maxsize=1024)
def _constants(task: LinearRegressionTask | QuadraticsTask, batch_size: int | None, seed: int) -> Constants:
    problem = synthetic(task, seed)
    model = build_task(task, seed).model
    start = torch.cat([p.detach().flatten() for p in model.parameters()]).double()
    clients = [(X.numpy(), Y.numpy()[:, 0]) for X, Y in problem.clients]
    optimum = problem.optimum.numpy()

    def f(w: np.ndarray) -> float:
        return fmean(0.5 * float(np.mean((X @ w - Y) ** 2)) for X, Y in clients)

    sigma, G, B = 0.0, 0.0, 0.0
    for w in (start.numpy(), optimum):
        gradients = [X * (X @ w - Y)[:, None] for X, Y in clients]  # of single samples
        means = [g.mean(axis=0) for g in gradients]
        grad_f = np.mean(means, axis=0)
        for g, mean in zip(gradients, means, strict=True):
            m = len(g)
            batch = min(batch_size or m, m)
            correction = (m - batch) / (m - 1) if m > 1 else 0.0  # batches are drawn without replacement
            variance = float(np.mean(((g - mean) ** 2).sum(axis=1))) * correction / batch
            sigma = max(sigma, math.sqrt(variance))
            G = max(G, float(np.linalg.norm(g, axis=1).max()))
            B = max(B, float(np.linalg.norm(mean - grad_f)))
    L = max(float(np.linalg.eigvalsh(X.T @ X / len(X))[-1]) for X, _ in clients)
    return Constants(L, f(start.numpy()) - f(optimum), sigma, G, B)


def bound(c: Constants, method: MethodSpec, n: int, K: int, T: int) -> tuple[str, float, float] | None:
    """Return the bounded norm, the leading term and the sum of the others; None where no theorem applies."""
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


def bounds(experiments: Experiments) -> list[Bound]:
    """Compare theorems with the runs of experiments whose metric is the squared norm of the gradient."""
    lines = []
    for experiment in experiments:
        spec = experiment.results.spec
        if spec.task.metric != "squared gradient norm" or not isinstance(spec.run.local_steps, int):
            continue
        n, K, T = spec.task.clients, spec.run.local_steps, spec.run.rounds
        for method in spec.methods:
            runs = experiment.results.runs[method.label]
            problems = [constants(spec, run.settings["seed"]) for run in runs]
            terms = [term for c in problems if (term := bound(c, method, n, K, T)) is not None]
            if terms:
                norms, leading, rest = zip(*terms, strict=True)
                measured = Spread.of([_mean_norm(run, squared=norms[0].endswith("2")) for run in runs]).mean
                place = (experiment.name, experiment.group, method.label, n, K, T, norms[0])
                lines.append(Bound(*place, measured, fmean(leading), fmean(rest)))
    return lines


def _mean_norm(run: Run, squared: bool) -> float:
    values = [record.test_metric for record in run.history if record.test_metric is not None]
    return mean_of([value if squared else math.sqrt(value) for value in values])


def slope(lines: Sequence[Bound]) -> float:
    """Return the exponent p of measured ~ (n K)^p, by least squares on logarithms."""
    x = np.log([line.n * line.K for line in lines])
    y = np.log([line.measured for line in lines])
    return float(np.polyfit(x, y, 1)[0])


def speed_ups(lines: Sequence[Bound]) -> list[tuple[str, str, float]]:
    """List group, method and slope for each method of a group with several values of n K."""
    positive: dict[tuple[str, str], list[Bound]] = {}
    for line in lines:
        if line.measured > 0:
            positive.setdefault((line.group or "", line.method), []).append(line)
    several = {k: members for k, members in positive.items() if len({b.n * b.K for b in members}) > 1}
    return [(group, method, slope(members)) for (group, method), members in several.items()]


def bounds_markdown(lines: Sequence[Bound]) -> str:
    """Render the bounds and the slopes as tables in Markdown."""
    header = ["Experiment", "Method", "n", "K", "T", "bounded", "measured", "leading term", "other terms"]
    rows = []
    for b in lines:
        measured = DIVERGED if math.isnan(b.measured) else f"{b.measured:.3g}"
        row = (b.experiment, b.method, f"{b.n}", f"{b.K}", f"{b.T}", f"mean of {b.norm}", measured)
        rows.append((*row, f"{b.leading:.3g}", f"{b.rest:.3g}"))
    slopes = [(group, method, f"{p:.2f}") for group, method, p in speed_ups(lines)]
    tables = [
        Table(header, text_rows(rows), "llrrrlrrr"),
        Table(["Group", "Method", "measured ~ (n K)^p, p ="], text_rows(slopes), "llr"),
    ]
    return "\nThe leading terms have p = -0.5.\n\n".join(table.to_markdown() for table in tables)


def bounds_figure(lines: Sequence[Bound]) -> Figure:
    """Draw the measurements and the leading terms over n K."""
    from matplotlib.figure import Figure

    norms = list(dict.fromkeys(line.norm for line in lines))
    figure = Figure(figsize=(5.5 * len(norms), 4), layout="constrained")
    for norm, panel in zip(norms, figure.subplots(1, len(norms), squeeze=False)[0], strict=True):
        of_norm = [line for line in lines if line.norm == norm]
        methods = list(dict.fromkeys(line.method for line in of_norm))
        for number, method in enumerate(methods):
            shade, label = colour(number), printable(method)
            points = sorted((b.n * b.K, b.measured, b.leading) for b in of_norm if b.method == method)
            x, measured, leading = zip(*points, strict=True)
            panel.plot(x, measured, "o", color=shade, label=f"{label}, measured")
            panel.plot(x, leading, "--", color=shade, label=f"{label}, leading term")
        panel.set_xscale("log")
        if any(b.measured > 0 or b.leading > 0 for b in of_norm):
            panel.set_yscale("log")
        panel.set_xlabel("n K")
        panel.set_ylabel(f"mean over the rounds of {norm}", parse_math=False)
        panel.legend(frameon=False, fontsize=8)
        tidy(panel)
    return figure


def bounds_files(experiments: Experiments) -> dict[str, bytes]:
    """Render bounds.csv, bounds.md and the figure; nothing where no theorem applies."""
    lines = bounds(experiments)
    if not lines:
        return {}
    import pandas as pd

    return {
        "bounds.csv": csv_bytes(pd.DataFrame(lines)),
        "bounds.md": f"# Bounds of the theorems and measurements\n\n{bounds_markdown(lines)}".encode(),
        **image_files("bounds", bounds_figure(lines)),
    }
