"""This package's simulator, as a user calls it; it waits in the callback after each round."""

from __future__ import annotations

import torch
from torch.nn.functional import cross_entropy

import fadamgc
from fadamgc.algorithm import AnyAlgorithm
from fadamgc.sim.executors import RayExecutor
from fadamgc.sim.executors.auto import make_executor
from fadamgc.sim.executors.base import Executor
from fadamgc.sim.executors.base import Workload as Work
from workers.protocol import Gate, parser
from workloads import ETA_L, WORKLOADS, Workload

FOREVER = 10**9
ALGORITHMS = ("fedavg", "local_adam", "fadamgc")


def make_algorithm(name: str, optimizer: str) -> AnyAlgorithm:
    """Make the algorithm whose local work is that of the bare loop with the same optimizer."""
    eta_l = ETA_L[optimizer]
    if name == "fedavg":
        return fadamgc.FedAvg(eta_l=eta_l)
    if name == "local_adam":
        return fadamgc.LocalAdam(eta_l=eta_l, moments="reset")
    return fadamgc.FAdamGC(eta_l=eta_l)


def make_task(workload: Workload) -> fadamgc.Task:
    """Make a task from the workload, without test data."""
    clients = list(zip(*workload.data(), strict=True))
    model = (workload.make_own or workload.make_model)(0)
    return fadamgc.Task(model, cross_entropy, clients, name=workload.name)


def main() -> None:
    """Run rounds when the orchestrator asks for them."""
    arguments = parser(__doc__)
    arguments.add_argument("--algorithm", choices=ALGORITHMS, required=True)
    arguments.add_argument("--executor", default="auto")
    options = arguments.parse_args()
    workload = WORKLOADS[options.workload]
    task = make_task(workload)
    gate = Gate(workload, options.warmup, "fadamgc")
    gate.info["threads"] = torch.get_num_threads()

    def make(work: Work) -> Executor:
        executor = make_executor(options.executor, work)
        if isinstance(executor, RayExecutor):
            gate.moved = lambda: {"sent": executor.sent, "received": executor.received}
        gate.info["executor"] = executor.name
        return executor

    fadamgc.simulate(
        make_algorithm(options.algorithm, options.optimizer),
        task,
        rounds=FOREVER,
        sampled=workload.sampled,
        local_steps=workload.steps,
        batch_size=workload.batch,
        eval_every=FOREVER,
        executor=make,
        progress=False,
        callbacks=[lambda _: not gate.round_done()],
    )


if __name__ == "__main__":
    main()
