"""A run with a checkpoint, for a test that kills it: python killed.py FOLDER OUT."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import fadamgc
from problems import class_task

ROUNDS = 60


def run(checkpoint: Path | None) -> fadamgc.Run:
    torch.set_num_threads(1)
    return fadamgc.simulate(
        fadamgc.FAdamGC(eta_l=0.01),
        class_task(),
        rounds=ROUNDS,
        sampled=4,
        tracked=2,
        local_steps=4,
        batch_size=5,
        seed=6,
        executor="loop",
        checkpoint=checkpoint,
        resume=checkpoint is not None,
        callbacks=[lambda end: print(end.record.round, flush=True)],
    )


if __name__ == "__main__":
    run(Path(sys.argv[1])).save(sys.argv[2])
