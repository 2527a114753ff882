"""Code that worker processes and Ray tasks share: groups of runs, and callbacks for their progress."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import NamedTuple

import numpy as np

from fadamgc.experiments.planned_run import PlannedRun
from fadamgc.experiments.run.execution import RunEnd
from fadamgc.stages import Hear, Warn
from fadamgc.tasks.sections import ImagesTask, TextTask

TOGETHER = 16  # runs that advance together, at most

OnRound = Callable[[int], None]  # run i has made a round
OnEnd = Callable[[int, RunEnd], None]  # run i has ended


class Listener(NamedTuple):
    """Functions that are called while runs are executed."""

    on_round: OnRound
    on_end: OnEnd
    warn: Warn
    on_stage: Hear


def in_groups(plan: Sequence[PlannedRun], workers: int) -> list[list[int]]:
    """Group runs of one method that go to a process together, with enough groups for all processes."""
    most = max(1, min(TOGETHER, -(-len(plan) // (3 * workers))))
    if any(isinstance(planned.task, ImagesTask | TextTask) for planned in plan):
        most = 1  # these runs cannot share work, and each needs memory for its data
    groups: list[list[int]] = []
    for _, alike in groupby(range(len(plan)), key=lambda i: plan[i].method.algorithm):
        numbers = list(alike)
        groups += [part.tolist() for part in np.array_split(numbers, -(-len(numbers) // most))]
    return groups
