"""Is a method exact? Clients with different quadratics, exact gradients, and a known optimum.

A method that is exact reaches the optimum of the mean with constant step sizes; any other stalls at a
distance that depends on how much the clients differ.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.sim.many import simulate_many
from fadamgc.task import Task
from fadamgc.tasks.build import build_task
from fadamgc.tasks.sections import task_spec

CLIENTS, DIM, SAMPLED = 12, 5, 4
STEPS, ROUNDS = 10, 1500
GROUPS = 3  # for methods with groups
STEP_SIZES = (0.1, 0.03, 0.01, 0.003, 0.001)
EXACT, SMALL, LARGE = 1e-18, 1e-5, 1e3  # squared gradient norms; about 10 at the start


class Exactness(NamedTuple):
    """The final squared gradient norm of the mean objective, with the best of several local step sizes."""

    sampled: int  # clients per round, of 12
    norm: float
    eta_l: float
    before: float  # the norm at two thirds of the rounds

    @property
    def verdict(self) -> str:
        """Return "exact", "converging" (slowly, not there yet), "stalls" or "diverges"."""
        if self.norm <= EXACT:
            return "exact"
        if not self.norm <= LARGE:
            return "diverges"
        return "converging" if self.norm < min(SMALL, 0.1 * self.before) else "stalls"


@cache
def quadratics() -> Task:
    """Return the task: twelve clients with different curvatures and minimisers."""
    return build_task(task_spec(data="quadratics", clients=CLIENTS, dim=DIM), seed=1)


def exactness(
    algorithm: AnyAlgorithm, sampled: int, rounds: int = ROUNDS, sizes: Sequence[float] = STEP_SIZES
) -> Exactness:
    """Run the method with several local step sizes, and return the best result."""
    mark = 2 * rounds // 3
    groups: dict[str, Any] = (
        {"groups": GROUPS, "group_rounds": 2} if isinstance(algorithm, GroupedAlgorithm) else {}
    )
    runs = simulate_many(
        [{"algorithm": algorithm.replace(eta_l=eta_l)} for eta_l in sizes],
        task=quadratics(),
        rounds=rounds,
        sampled=sampled,
        local_steps=STEPS,
        **groups,
        batch_size=None,
        eval_every=mark,
        dtype=torch.float64,
        executor="vectorized",
        errors="return",
        progress=False,
    )
    results = []
    for eta_l, run in zip(sizes, runs, strict=True):
        if isinstance(run, Exception):
            continue
        norms = [record.test_metric for record in run.history if record.test_metric is not None]
        if norms and math.isfinite(norms[-1]):
            results.append(Exactness(sampled, norms[-1], eta_l, norms[0]))
    return min(
        results, key=lambda result: result.norm, default=Exactness(sampled, math.inf, math.nan, math.inf)
    )
