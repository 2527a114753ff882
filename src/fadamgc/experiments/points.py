"""The points of a tuning grid: their order of choice, and the file tuning.csv."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from fadamgc.errors import InputError
from fadamgc.escape import csv_cell

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = {  # of tuning.csv, by the fields of a Point
    **{"label": "method", "tried": "rounds_tried"},
    **{"seeds": "seeds_tried", "reached": "seeds_reached", "rounds": "rounds_to_target"},
    **{"final": "final_metric", "diverged": "seeds_diverged"},
}
CHOSEN = "chosen"  # the last column

Values: TypeAlias = tuple[tuple[str, Any], ...]  # hyperparameters with their values


@dataclass(frozen=True)
class Point:
    """The result of one point of a method's grid, over the seeds of [tune]."""

    label: str
    values: Values
    reached: int  # seeds that reached the target
    rounds: float | None  # to the target, mean over those seeds
    final: float | None  # metric at the end, mean over the seeds that did not diverge
    diverged: int  # seeds whose updates or final metric were not finite
    goal: str  # "max" if a high metric is good, "min" if a low one is
    tried: int = 0  # rounds for which it was tried
    seeds: int = 1  # number of seeds with which it was tried

    def rank(self) -> tuple[Any, ...]:
        """Return the place in the order of choice, smallest first.

        First come the points that were tried for the most rounds, then those with the most seeds at the
        target, the fewest rounds to it, the fewest diverged seeds, the best metric at the end.
        """
        final = math.inf if self.final is None else self.final * (-1 if self.goal == "max" else 1)
        rounds = math.inf if self.rounds is None else self.rounds
        last = tuple((isinstance(value, str), value) for _, value in self.values)
        return (-self.tried, -self.reached, rounds, self.diverged, final, last)

    def at_best(self, seeds: int, least: int) -> tuple[Any, ...]:
        """Bound the rank with ``seeds`` seeds from below, if no seed needs fewer than ``least`` rounds."""
        more = seeds - self.seeds
        reached = self.reached + more
        total = self.reached * (self.rounds or 0.0) + more * least
        return (-self.tried, -reached, total / reached if reached else math.inf, self.diverged, -math.inf)


def is_number(value: Any) -> bool:
    """Whether a hyperparameter is a number."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def shown_value(value: Any) -> str:
    """Return the value of a hyperparameter as text."""
    return f"{value:g}" if is_number(value) else str(value)


def shown_values(values: Values) -> str:
    """Return hyperparameters with their values as text."""
    return ", ".join(f"{name}={shown_value(value)}" for name, value in values)


def grid_end(value: Any, values: Sequence[Any]) -> str | None:
    """Return the end of a grid, "low" or "high", at which a chosen number lies; None if it is inside.

    >>> grid_end(0.1, [0.1, 0.3]), grid_end(0.3, [0.1, 0.3, 1.0]), grid_end(1.0, [1.0])
    ('low', None, None)
    """
    if len(set(values)) < 2 or not all(map(is_number, values)):
        return None
    return "low" if value == min(values) else "high" if value == max(values) else None


def beyond_end(value: Any, values: Sequence[Any]) -> float | None:
    """Return the value to try next if the chosen one is at an end of those that were tried, else None.

    The ratio of the last values is repeated: 30 comes after 1, 3, 10.

    >>> beyond_end(1.0, [0.1, 0.3, 1.0]), beyond_end(0.1, [0.1, 0.3, 1.0]), beyond_end(0.3, [0.1, 0.3, 1.0])
    (3.0, 0.03, None)
    """
    end = grid_end(value, values)
    if end is None or min(values) <= 0:
        return None
    last, *others = sorted(set(values), reverse=end == "high")
    first, second = others[0], others[min(1, len(others) - 1)]
    following = first * last / second if len(others) > 1 else last * last / first
    return float(f"{following:.6g}")


def points_table(points: Sequence[Point], best: Sequence[Point]) -> pd.DataFrame:
    """Make the table of tuning.csv, one row per point; ``chosen`` marks the best ones."""
    import pandas as pd

    names = list(dict.fromkeys(name for p in points for name, _ in p.values))
    rows = [{"label": p.label, **dict(p.values), **asdict(p)} for p in points]
    columns = ["label", *names, *list(COLUMNS)[1:]]
    frame = pd.DataFrame(rows)[columns].rename(columns=COLUMNS)
    return frame.assign(**{CHOSEN: [point in best for point in points]})


def read_points(path: Path, labels: Sequence[str], goal: str, seeds: int) -> dict[Point, bool]:
    """Read the points of some methods from tuning.csv, and whether each was chosen.

    ``seeds`` is the number of seeds per point in files of earlier versions, which do not contain it.
    """
    by_text = {csv_cell(label): label for label in labels}
    try:
        lines = list(csv.DictReader(io.StringIO(path.read_text(encoding="utf-8"))))
        return {
            _point(line, by_text[line["method"]], goal, seeds): line[CHOSEN] == "True"
            for line in lines
            if line["method"] in by_text
        }
    except (OSError, ValueError, KeyError, TypeError, OverflowError, csv.Error) as error:
        reason = f"{type(error).__name__}: {error}"
        raise InputError(
            f"{path}: not what `fadamgc tune` wrote there ({reason}); remove it, or tune again"
        ) from None


def _point(line: dict[str, Any], label: str, goal: str, seeds: int) -> Point:
    names = [name for name in line if name not in (*COLUMNS.values(), CHOSEN) and line[name]]
    reached, diverged = int(line["seeds_reached"]), int(line["seeds_diverged"])
    return Point(
        label=label,
        values=tuple((name, _parsed(line[name])) for name in names),
        reached=reached,
        rounds=_finite(line["rounds_to_target"]),
        final=_finite(line["final_metric"]),
        diverged=diverged,
        goal=goal,
        tried=int(line.get("rounds_tried", 0)),
        seeds=max(int(line.get("seeds_tried", seeds)), reached, diverged),
    )


def _finite(text: str) -> float | None:
    value = float(text) if text else math.nan
    return value if math.isfinite(value) else None


def _parsed(text: str) -> float | str:
    """Return a hyperparameter: a finite number, or else a text."""
    try:
        value = float(text)
    except ValueError:
        return text
    return value if math.isfinite(value) else text
