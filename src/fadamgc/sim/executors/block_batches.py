"""The mini-batches of a block of clients, gathered many steps at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fadamgc.federation.client_data import ClientData
from fadamgc.federation.jobs import Job
from fadamgc.sim.executors.base import Workload
from fadamgc.sim.executors.block import Batch

GATHERED_BYTES = 64 << 20  # of mini-batches that are gathered at once


def padded_width(job: Job, workload: Workload) -> tuple[int, bool]:
    """Return how many samples a client's batches have with padding, and whether they may have padding.

    The answer depends on the job and on the workload only, so no bit of a result depends on the other clients
    of a block.
    """
    if not workload.whole:
        return workload.batch, workload.ragged
    width = 1 << (job.batches.width - 1).bit_length()  # few different shapes, whatever the sizes are
    return width, job.batches.width != width or not job.batches.even


def block_batches(jobs: Sequence[Job], workload: Workload, samplewise: bool) -> Iterator[Batch]:
    """Yield series of mini-batches for a block whose jobs have equal widths.

    Where the clients' batches are padded (``samplewise``), a batch has weights, each sample's share of the
    mean. Padding has weight 0 and repeats a row of the client's own data, so that it is valid data. Where
    batches are not padded, those of a block have equal sizes, which may change from step to step.
    """
    functions = workload.functions
    steps = np.array([job.batches.steps for job in jobs])
    B, padded = padded_width(jobs[0], workload) if samplewise else (jobs[0].batches.width, False)
    sample = jobs[0].data.inputs[:1]
    chunk = max(1, GATHERED_BYTES // (len(jobs) * B * max(1, sample.numel() * sample.element_size())))
    readers = [job.batches.reader() for job in jobs]
    period = 1 if samplewise else jobs[0].batches.period
    fewest = int(steps.min())
    for first, last in _series(int(steps.max()), chunk, fewest, period):
        positions = np.zeros((last - first, len(jobs), B), dtype=np.int64)
        size = np.full((last - first, len(jobs)), B, dtype=np.int64)
        for c, (job, read) in enumerate(zip(jobs, readers, strict=True)):
            k = min(last, job.batches.steps) - first
            if k > 0:
                positions[:k, c, : job.batches.width] = read(k)
                size[:k, c] = job.batches.size_of(first, first + k)
        width = B if samplewise else int(size[0, 0])
        inputs, targets = _gather([job.data for job in jobs], positions[:, :, :width])
        weights = None
        if padded:
            shares = (np.arange(B) < size[:, :, None]) / size[:, :, None]
            weights = torch.from_numpy(shares).to(functions.x0)
        active = None
        if first >= fewest:  # some clients have no more steps to do
            active = torch.from_numpy(steps > np.arange(first, last)[:, None]).to(functions.device)
        yield Batch(inputs, targets, weights, active)


def _series(K: int, chunk: int, fewest: int, period: int) -> Iterator[tuple[int, int]]:
    """Yield series of steps first .. last - 1 that are gathered at once.

    A series is at most a chunk long, does not cross step ``fewest`` (from which on not all clients are
    active), and does not contain an epoch's last batch together with another batch.
    """
    first = 0
    while first < K:
        last = min(K, first - first % chunk + chunk)
        if first < fewest:
            last = min(last, fewest)
        if period > 1:
            before_last = first - first % period + period - 1
            last = min(last, before_last if first < before_last else first + 1)
        yield first, last
        first = last


def _gather(clients: Sequence[ClientData], positions: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    """Return the samples at positions (steps, clients, samples) of each client's own data."""
    if len({id(data.inputs) for data in clients}) == 1:  # clients of one table: one look-up for all
        start = np.array([data.start for data in clients])
        return _rows(clients[0], positions + start[:, None])
    columns = [_rows(data, positions[:, c] + data.start) for c, data in enumerate(clients)]
    inputs, targets = zip(*columns, strict=True)
    return torch.stack(inputs, dim=1), torch.stack(targets, dim=1)


def _rows(data: ClientData, rows: NDArray[np.int64]) -> tuple[Tensor, Tensor]:
    index = torch.from_numpy(rows).to(data.inputs.device)
    inputs, targets = (torch.index_select(t, 0, index.view(-1)) for t in (data.inputs, data.targets))
    return inputs.view(*rows.shape, *inputs.shape[1:]), targets.view(*rows.shape, *targets.shape[1:])
