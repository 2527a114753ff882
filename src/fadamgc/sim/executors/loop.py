"""The reference: one client after the other, one step after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fadamgc.errors import ClientError, reason
from fadamgc.federation.jobs import Job, Result
from fadamgc.federation.sampling import FORWARD, torch_seed
from fadamgc.runtime import seeded
from fadamgc.sim.executors.base import Workload
from fadamgc.tree import leaves


class LoopExecutor:
    """Plain autograd over one client at a time; every other executor is tested against this one."""

    name = "loop"

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Run the jobs in the order given."""
        for job in jobs:
            yield run_job(job)


def run_job(job: Job) -> Result:
    """Run one client's round."""
    *_, (_, result) = _steps(job)
    assert result is not None
    return result


def first_nonfinite_step(job: Job) -> int | None:
    """Replay a client's round, and return the first step (from 1) with a result that is not finite."""
    for k, (tensors, _) in enumerate(_steps(job), start=1):
        if not all(bool(torch.isfinite(t).all()) for t in tensors):
            return min(k, job.batches.steps)
    return None


def _steps(job: Job) -> Iterator[tuple[list[Tensor], Result | None]]:
    """Yield the tensors after each local step, then those after the round together with the result."""
    round, client = job.round, job.state
    algo, down, functions = round.algorithm, round.down, round.functions
    buffers = {name: value.clone() for name, value in round.buffers.items()}
    x, loss_sum = down.x, torch.zeros((), dtype=functions.x0.dtype, device=functions.device)
    local = algo.begin(down, client, job.whole_gradient())
    with seeded(torch_seed(round.seed, FORWARD, round.t, job.client), functions.device):
        for k, positions in enumerate(job.batches):
            try:
                g, loss = functions.gradient(x, buffers, *job.batch(k, positions))
            except Exception as error:
                raise failure(job, k, len(positions), error) from error
            x, local = algo.step(down, client, local, x, round.gradients.adjust(x, g))
            loss_sum = loss_sum + loss
            yield [x, *leaves(local)], None
    K = job.batches.steps
    state, up = algo.finish(down, client, local, x, K, job.tracked)
    yield [*leaves(state), *leaves(up)], Result(job, state, up, buffers, loss_sum / K)


def failure(job: Job, k: int, size: int, error: Exception) -> ClientError:
    """Return the error for a model or loss that failed at step k (from 0) of a client."""
    return ClientError(
        f"model or loss failed for client {job.client} in round {job.round.t}, "
        f"at local step {k + 1}, on a batch of {size}: {reason(error)}"
    )
