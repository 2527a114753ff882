"""Going on from a checkpoint: what must be the same, and what is said when it is not."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.errors import CheckpointError, OtherRunError
from fadamgc.files import as_json, has_bundle, make_folder
from fadamgc.sim.run import Run, read_run, write_run
from fadamgc.sim.settings import Settings

NAME = "checkpoint"
STATES = "states"  # folder of clients' states that are kept in files


def open_checkpoint(
    store: Path, resume: bool, identity: Mapping[str, Any], algorithm: AnyAlgorithm, settings: Settings
) -> Run | None:
    """The run that a folder holds if it is to go on; None if there is nothing to go on from."""
    make_folder(store)
    if not has_bundle(store, NAME):
        return None
    if not resume:
        raise CheckpointError(
            f"{store} already holds a checkpoint; pass resume=True to go on from it, or give another folder"
        )
    saved = read_run(
        store, NAME, algorithm=algorithm, expected=identity["algorithm"], states_in=store / STATES
    )
    done = len(saved.history)
    for key, here in identity.items():
        there, here = saved.settings.get(key), as_json(here)
        if key == "schedule" and there and here:  # it may have been made longer
            there, here = there[:done], here[:done]
        if there != here:
            raise OtherRunError(_difference(store, key, there, here))
    if done > settings.rounds:
        raise CheckpointError(
            f"{store} is at round {done}, beyond rounds={settings.rounds}; "
            "ask for at least as many rounds, or give another folder"
        )
    if done and done < settings.rounds and done % settings.eval_every:
        # It was evaluated because it was the last round; a run that never stopped has nothing there.
        last = saved.history[-1]
        saved.history[-1] = dataclasses.replace(last, test_loss=None, test_accuracy=None, test_metric=None)
    return saved


def write_checkpoint(store: Path, run: Run) -> None:
    """Replace the checkpoint in a folder."""
    write_run(store, NAME, run, states_in=store / STATES)


def _difference(store: Path, key: str, there: Any, here: Any) -> str:
    if isinstance(here, dict):
        there = there if isinstance(there, dict) else {}
        part = next(k for k in {**here, **there} if there.get(k) != here.get(k))
        key, there, here = f"{key}.{part}", there.get(part), here.get(part)
    if key in ("fingerprint.data", "fingerprint.model"):
        part = key.removeprefix("fingerprint.")
        return f"{store} is a checkpoint of another task: its {part} differs; give another folder"
    key = key.removeprefix("fingerprint.")
    if key == "schedule":
        return f"{store} is a checkpoint of another run: its schedule differs in a round that is done"
    return f"{store} is a checkpoint of another run: {key}={there!r} there, {key}={here!r} here"
