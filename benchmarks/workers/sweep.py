"""Sixteen runs of FAdamGC on digits in one call, on the process pool or on a Ray cluster of this machine.

A "round" of the protocol is one sweep.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Literal

import fadamgc
from workers.ours import FOREVER, make_task
from workers.protocol import Gate, parser
from workloads import WORKLOADS

SEEDS = 4
WORKERS = 2
STEP_SIZES = (3e-4, 1e-3, 3e-3, 1e-2)


def grid() -> list[dict[str, Any]]:
    """Return the arguments in which the runs differ."""
    return [
        {"algorithm": fadamgc.FAdamGC(eta_l=eta_l), "seed": seed}
        for eta_l in STEP_SIZES
        for seed in range(SEEDS)
    ]


def run_all(
    runs: Sequence[dict[str, Any]], task: fadamgc.Task, workers: int | Literal["ray"], rounds: int
) -> None:
    """Run a sweep, and check that nothing is missing."""
    workload = WORKLOADS["digits"]
    finished = fadamgc.simulate_many(
        runs,
        task=task,
        workers=workers,
        progress=False,
        rounds=rounds,
        sampled=workload.sampled,
        local_steps=workload.steps,
        batch_size=workload.batch,
        eval_every=FOREVER,
    )
    if len(finished) != len(runs) or any(len(run.history) != rounds for run in finished):
        raise SystemExit("simulate_many did not run all rounds of all runs")


def main() -> None:
    """Run sweeps when the orchestrator asks for them."""
    arguments = parser(__doc__)
    arguments.add_argument("--rounds", type=int, required=True)
    arguments.add_argument("--ray", action="store_true")
    options = arguments.parse_args()
    workload = WORKLOADS[options.workload]
    task, runs = make_task(workload), grid()
    gate = Gate(workload, 0, "fadamgc")
    gate.info = {"runs": len(runs), "workers": WORKERS}
    if options.ray:
        import ray

        quiet = {"include_dashboard": False, "log_to_driver": False, "logging_level": logging.ERROR}
        ray.init("local", num_cpus=WORKERS, _node_ip_address="127.0.0.1", **quiet)
    while gate.round_done():  # at first, it reports that the worker is ready
        run_all(runs, task, "ray" if options.ray else WORKERS, options.rounds)


if __name__ == "__main__":
    main()
