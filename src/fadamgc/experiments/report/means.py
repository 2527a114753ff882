"""Means, standard deviations, and paired differences with their confidence intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

# 97.5 % quantiles of Student's t distribution with 1 to 30 degrees of freedom; more seeds use the last one.
T95 = (
    *(12.7062, 4.3027, 3.1824, 2.7764, 2.5706, 2.4469, 2.3646, 2.3060, 2.2622, 2.2281),
    *(2.2010, 2.1788, 2.1604, 2.1448, 2.1314, 2.1199, 2.1098, 2.1009, 2.0930, 2.0860),
    *(2.0796, 2.0739, 2.0687, 2.0639, 2.0595, 2.0555, 2.0518, 2.0484, 2.0452, 2.0423),
)


def mean_of(values: Sequence[float]) -> float:
    """Return the mean, also of values whose sum is beyond the largest number."""
    try:
        return fmean(values)
    except (OverflowError, ValueError):
        largest = max(map(abs, values))
        return fmean(value / largest for value in values) * largest


class Spread(NamedTuple):
    """Mean and sample standard deviation; NaN where there are too few values."""

    mean: float
    std: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Return the spread of the finite values."""
        finite = [value for value in values if math.isfinite(value)]
        try:
            std = stdev(finite) if len(finite) > 1 else math.nan
        except OverflowError:
            std = math.nan
        return cls(mean_of(finite) if finite else math.nan, std)


class Difference(NamedTuple):
    """The mean of paired differences, and half of the width of its 95 % confidence interval.

    >>> Difference.of([1.0, 1.1, 0.9]).clear, Difference.of([1.0, 2.0]).clear
    (1, 0)
    """

    mean: float
    half: float  # NaN with fewer than two pairs

    @classmethod
    def of(cls, differences: Sequence[float]) -> Difference:
        """Return the mean of the differences and its interval, by Student's t distribution."""
        count = len(differences)
        mean, std = Spread.of(differences)
        return cls(
            mean, T95[min(count - 2, len(T95) - 1)] * std / math.sqrt(count) if count > 1 else math.nan
        )

    @property
    def clear(self) -> int:
        """1 or -1 if the interval is above or below 0, else 0."""
        return int(self.mean > self.half) - int(self.mean < -self.half)
