"""The reference: one client after the other, one step after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from fadamgc.errors import ClientError, reason
from fadamgc.federation.problem import Problem
from fadamgc.federation.sampling import FORWARD, torch_seed
from fadamgc.runtime import seeded
from fadamgc.sim.executors.base import Job, Plan, Result


class LoopExecutor:
    """Plain autograd over one client at a time; every other executor is tested against this one."""

    name = "loop"

    def __init__(self, problem: Problem, plan: Plan | None = None) -> None:
        self.problem, self.plan = problem, plan

    def run(self, jobs: Sequence[Job]) -> Iterator[Result]:
        """Carry out the jobs in the order given."""
        for job in jobs:
            yield one(job)


def one(job: Job) -> Result:
    """One client's round."""
    *_, (_, result) = steps(job)
    assert result is not None
    return result


def first_nonfinite_step(job: Job) -> int | None:
    """Replay a client's round, and tell the first step (from 1) whose outcome is not finite."""
    for k, (tensors, _) in enumerate(steps(job), start=1):
        if not all(bool(torch.isfinite(t).all()) for t in tensors):
            return min(k, job.batches.steps)
    return None


def steps(job: Job) -> Iterator[tuple[tuple[Tensor, ...], Result | None]]:
    """The client's round as a sequence: what each step left behind, then the result."""
    round, client = job.round, job.state
    algo, down, problem = round.algorithm, round.down, round.problem
    K, start = job.batches.steps, int(problem.start[job.client])
    buffers = {name: value.clone() for name, value in round.buffers.items()}
    g_x = None
    if algo.round_gradient:
        g_x = problem.whole_gradient(down.x, buffers, job.client, round.seed, round.t)
    x, loss_sum = down.x, torch.zeros((), dtype=problem.x0.dtype, device=problem.device)
    local = algo.begin(down, client, g_x)
    with seeded(torch_seed(round.seed, FORWARD, round.t, job.client)):
        for k, batch in enumerate(job.batches):
            rows = torch.from_numpy(batch + start).to(problem.device)
            try:
                g, loss = problem.gradient(x, buffers, problem.inputs[rows], problem.targets[rows])
            except Exception as error:
                raise failure(job, k, len(rows), error) from error
            x, local = algo.step(down, client, local, x, g)
            loss_sum = loss_sum + loss
            yield (x, *local), None
    state, up = algo.finish(down, client, local, x, K, job.tracked)
    yield (*state, *up), Result(job, state, up, buffers, loss_sum / K)


def failure(job: Job, k: int, size: int, error: Exception) -> ClientError:
    """What to say of a model or loss that failed at step k (from 0) of a client."""
    return ClientError(
        f"model or loss failed for client {job.client} in round {job.round.t}, "
        f"at local step {k + 1}, on a batch of {size}: {reason(error)}"
    )
