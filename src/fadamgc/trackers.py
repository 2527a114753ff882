"""Runs watched from outside while they go on: TensorBoard and MLflow, as callbacks of a simulation.

fadamgc.simulate(..., callbacks=[fadamgc.trackers.tensorboard("logs/first")])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fadamgc.errors import InputError, nearest
from fadamgc.sim.engine import RoundEnd

VARIABLE = "FADAMGC_TRACK"  # what the command line passes on to its workers
Tracker = Callable[[RoundEnd], None]


def tensorboard(folder: str | Path) -> Tracker:
    """Write every round to a folder that ``tensorboard --logdir`` shows."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("tracking by tensorboard needs it; pip install 'fadamgc[track]'") from None
    writer = SummaryWriter(str(folder))

    def track(end: RoundEnd) -> None:
        for name, value in numbers(end).items():
            writer.add_scalar(name, value, end.record.round)
        writer.flush()

    return track


def mlflow(
    name: str,
    experiment: str = "fadamgc",
    parameters: Mapping[str, Any] | None = None,
    uri: str | None = None,
) -> Tracker:
    """Log every round to a run of MLflow's.

    Args:
        name: of the run.
        experiment: that it belongs to.
        parameters: what is kept with it, e.g. the hyperparameters.
        uri: where the tracking server or its folder is; None is MLflow's own default.
    """
    try:
        from mlflow import MlflowClient
    except ImportError:
        raise InputError("tracking by mlflow needs it; pip install 'fadamgc[track]'") from None
    if uri is not None and uri.startswith("file:"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a folder will do here
    client = MlflowClient(tracking_uri=uri)
    found = client.get_experiment_by_name(experiment)
    at = found.experiment_id if found else client.create_experiment(experiment)
    run = client.create_run(at, run_name=name).info.run_id
    for key, value in (parameters or {}).items():
        client.log_param(run, key, value)

    def track(end: RoundEnd) -> None:
        for key, value in numbers(end).items():
            client.log_metric(run, key, value, step=end.record.round)

    return track


def numbers(end: RoundEnd) -> dict[str, float]:
    """What there is to show of a round."""
    names = ("train_loss", "test_loss", "test_accuracy", "test_metric")
    more = ("bytes_down", "bytes_up", "simulated_seconds", "wall_seconds")
    values = {name: getattr(end.record, name) for name in (*names, *more)}
    return {name: float(value) for name, value in values.items() if value is not None}


KNOWN = ("tensorboard", "mlflow")


def choose(names: str) -> None:
    """Have all runs of this process, and of those started from it, tracked by some of ``KNOWN``."""
    for name in filter(None, names.split(",")):
        if name not in KNOWN:
            raise InputError(
                f"track={name!r} is not known{nearest(name, KNOWN)}; known are {', '.join(KNOWN)}"
            )
    os.environ[VARIABLE] = names


def chosen(folder: Path, name: str, parameters: Mapping[str, Any]) -> list[Tracker]:
    """The trackers of a run that is saved below a folder."""
    made: list[Tracker] = []
    for kind in filter(None, os.environ.get(VARIABLE, "").split(",")):
        if kind == "tensorboard":
            made.append(tensorboard(folder / "tensorboard" / name))
        else:
            uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").resolve().as_uri()
            made.append(mlflow(name, folder.resolve().name, parameters, uri))
    return made
