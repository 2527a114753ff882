"""Runs of a few rounds."""

from __future__ import annotations

import fadamgc

# Settings that are accepted, to be spoilt one at a time.
GOOD = {"rounds": 2, "sampled": 3, "tracked": 2, "local_steps": 2, "batch_size": 4, "seed": 0}
OPTIONS = {"rounds": 3, "sampled": 4, "tracked": 2, "local_steps": 4, "batch_size": 5, "seed": 1}


def simulate(algo, task, **options):
    return fadamgc.simulate(algo, task, **(OPTIONS | options))
