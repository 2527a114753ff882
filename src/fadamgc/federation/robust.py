"""Robust aggregation: the median or a trimmed mean over clients, instead of the mean.

Each coordinate of a field is aggregated on its own. The server's rule still receives a sum, which is the
number of clients times the robust mean, so rules need no change. Two kinds of fields stay sums: those by
which a client's kept state changes (dy, by which y_i changes), since the server's y would else not be the
mean of the y_i; and those that only tracked clients send. An algorithm whose clients keep what they have sent
in another way (with its own ``received``) is refused, because its server keeps the sum of the same numbers.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from fadamgc.algorithm import Algorithm, AnyAlgorithm, example, stand_in
from fadamgc.errors import InputError, not_accepted
from fadamgc.federation.functions import Buffers
from fadamgc.federation.sums import Sums
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.tree import from_names, named_leaves, names

AGGREGATIONS = "'mean', 'median' or 'trimmed:SHARE' with a share below 0.5, such as 'trimmed:0.1'"
COLUMNS = 2**18  # how many coordinates are sorted at once


def check_aggregation(text: Any) -> str | None:
    """Return the name of an aggregation, or None for the mean.

    >>> check_aggregation("trimmed:0.1"), check_aggregation("mean")
    ('trimmed:0.1', None)
    """
    if text is None or (isinstance(text, str) and text == "mean"):
        return None
    if isinstance(text, str):
        kind, _, share = text.partition(":")
        if text == "median" or (kind == "trimmed" and _share(share) is not None):
            return text
    raise not_accepted("aggregation", text, AGGREGATIONS)


def _share(text: str) -> float | None:
    try:
        share = float(text)
    except ValueError:
        return None
    return share if 0 < share < 0.5 else None


def trimmed_count(aggregation: str, S: int) -> int:
    """Return how many of S values are removed at each end; of any three, at least one.

    >>> trimmed_count("median", 5), trimmed_count("median", 4), trimmed_count("trimmed:0.1", 5)
    (2, 1, 1)
    """
    most = (S - 1) // 2
    return most if aggregation == "median" else min(most, math.ceil(float(aggregation.partition(":")[2]) * S))


def robust_fields(algorithm: AnyAlgorithm) -> tuple[str, ...]:
    """Return the fields of the clients' messages that can have a robust mean."""
    sent = names(example(algorithm, stand_in(1, torch.float32)).up)
    summed = (*algorithm.changes, *algorithm.tracked_only)
    return tuple(name for name in sent if name not in summed and name.partition(".")[0] not in summed)


def check_robust(aggregation: str | None, algorithm: AnyAlgorithm, weights: Any) -> tuple[str, ...]:
    """Return the fields that have a robust mean; refuse it where it has no meaning."""
    if aggregation is None:
        return ()
    given, name = f"aggregation={aggregation!r} is given", type(algorithm).__name__
    if isinstance(algorithm, GroupedAlgorithm):
        raise InputError(f"{given}, but {name} has clients in groups; omit it, or use another algorithm")
    if weights != "uniform":
        raise InputError(f"{given}, but clients have weights; use weights='uniform', or omit it")
    if type(algorithm).received is not Algorithm.received:
        raise InputError(
            f"{given}, but the clients of {name} keep what they have sent, and its server the sum of the "
            "same numbers; omit it, or use another algorithm"
        )
    fields = robust_fields(algorithm)
    if not fields:
        raise InputError(f"{given}, but all that clients of {name} send must be summed; omit it")
    return fields


class RobustSums(Sums):
    """Sums over the clients of a round, in which some fields are the robust mean times the number of clients.

    It keeps these fields of all messages of the round.
    """

    def __init__(self, aggregation: str, fields: tuple[str, ...]) -> None:
        super().__init__()
        self._aggregation = aggregation
        self._kept: dict[str, list[Tensor]] = {name: [] for name in fields}

    def add(self, client: int, steps: int, up: Any, buffers: Buffers, loss: Tensor) -> None:
        """Add one client."""
        super().add(client, steps, up, buffers, loss)
        sent = named_leaves(up)
        for name, kept in self._kept.items():
            kept.append(sent[name].clone())

    def total(self) -> Any:
        """Return the sums of the messages, computed from robust means instead of means."""
        if self.up is None:
            return None
        sums = named_leaves(self.up)
        for name, kept in self._kept.items():
            sums[name] = len(kept) * robust_mean(kept, trimmed_count(self._aggregation, len(kept)))
        return from_names(self.up, sums)


def robust_mean(values: list[Tensor], trimmed: int) -> Tensor:
    """Return the mean of each coordinate without its ``trimmed`` smallest and largest values.

    >>> robust_mean([torch.tensor([1.0, 5.0]), torch.tensor([2.0, 6.0]), torch.tensor([99.0, -9.0])], 1)
    tensor([2., 5.])
    """
    mean = torch.empty_like(values[0]).reshape(-1)
    rows = [value.reshape(-1) for value in values]
    for start in range(0, len(mean), COLUMNS):
        part = torch.stack([row[start : start + COLUMNS] for row in rows])
        kept = part.sort(dim=0).values[trimmed : len(rows) - trimmed]
        mean[start : start + COLUMNS] = kept.mean(dim=0)
    return mean.reshape(values[0].shape)
