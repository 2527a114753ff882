"""Draw the figures in docs/figures: those of the examples, and one of saved records.

python docs/gallery.py [NAME ...]        all, or some of them: drift own_csv places_cifar10
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from fadamgc.experiments.report import numbers
from fadamgc.experiments.report.means import Difference
from fadamgc.experiments.report.numbers import Results, read_results
from fadamgc.experiments.report.plots import COLOURS

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parent.parent
FIGURES = ROOT / "docs" / "figures"
# The examples of the hook print numbers and draw no figure.
EXAMPLES = sorted(path.stem for path in (ROOT / "examples").glob("*.py") if not path.stem.startswith("hook_"))
CIFAR10 = ROOT / "results" / "main-cifar10"
PLACES = {
    "LocalAdam": ("no correction (LocalAdam)", COLOURS[1]),
    "FA-NT": ("after the moments (FA-NT)", COLOURS[2]),
    "FAdamGC": ("before the moments (FAdamGC)", COLOURS[0]),
}


def differences(results: Results, method: str, other: str) -> dict[int, Difference]:
    """Return the differences of the test metric of runs with the same seed, by round."""
    values: dict[int, list[float]] = {}
    runs, others = ({run.settings["seed"]: run for run in results.runs[name]} for name in (method, other))
    for seed, run in runs.items():
        for record, beside in zip(run.history, others[seed].history, strict=True):
            if record.test_metric is not None and beside.test_metric is not None:
                values.setdefault(record.round, []).append(record.test_metric - beside.test_metric)
    return {number: Difference.of(found) for number, found in values.items()}


def places_cifar10() -> Figure:
    """Draw the saved runs on CIFAR-10 without correction, and with it after and before the moments."""
    from matplotlib.figure import Figure

    results = read_results(CIFAR10)
    curves = numbers.mean_curves(results, numbers.curves(results))
    figure = Figure(figsize=(9.5, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    for method, (label, colour) in PLACES.items():
        curve = 100 * curves[method].set_index("round")
        left.plot(curve.index, curve["mean"], color=colour, label=label)
        left.fill_between(curve.index, curve["low"], curve["high"], color=colour, alpha=0.15, linewidth=0)
    seeds = len(results.spec.run.seeds)
    left.set(xlabel="round", ylabel="test accuracy in %", title=f"mean ± standard deviation of {seeds} seeds")
    left.set_ylim(bottom=0)  # the legend is below the curves
    left.legend(frameon=False, loc="lower right")
    by_round = differences(results, "FAdamGC", "FA-NT")
    means, halves = ([100 * value for value in values] for values in zip(*by_round.values(), strict=True))
    bounds = [[m + sign * h for m, h in zip(means, halves, strict=True)] for sign in (-1, 1)]
    right.plot(list(by_round), means, color="black")
    right.fill_between(list(by_round), *bounds, color="black", alpha=0.15, linewidth=0)
    right.axhline(0, color="0.5", linewidth=1)
    right.set(xlabel="round", ylabel="percentage points", title="before - after, with 95 % interval")
    return figure


def main(wanted: list[str]) -> None:
    """Draw the figures with these names, or all."""
    if unknown := {*wanted} - {*EXAMPLES, places_cifar10.__name__}:
        raise SystemExit(f"unknown figure: {', '.join(sorted(unknown))}")
    for name in wanted or [*EXAMPLES, places_cifar10.__name__]:
        figure = FIGURES / f"{name}.png"
        if name == places_cifar10.__name__:
            places_cifar10().savefig(figure, dpi=120)
        else:
            subprocess.run([sys.executable, ROOT / "examples" / f"{name}.py", figure], check=True)
        print(f"drew {figure.relative_to(ROOT)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
