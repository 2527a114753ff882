"""Callbacks of a simulation that show its rounds in TensorBoard or MLflow.

fadamgc.simulate(..., callbacks=[fadamgc.trackers.tensorboard("logs/first")])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from fadamgc.errors import InputError, nearest
from fadamgc.sim.engine import RoundEnd

__all__ = ["mlflow", "tensorboard"]

VARIABLE = "FADAMGC_TRACK"  # environment variable that worker processes inherit: some of TRACKERS
TRACKERS = ("tensorboard", "mlflow")
NUMBERS = (  # of a record
    *("train_loss", "test_loss", "test_accuracy", "test_metric"),
    *("bytes_down", "bytes_up", "simulated_seconds", "wall_seconds"),
)
Tracker = Callable[[RoundEnd], None]


def tensorboard(folder: str | Path) -> Tracker:
    """Write every round to a folder that ``tensorboard --logdir`` shows.

    >>> import fadamgc, tempfile, torch
    >>> data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(4)]
    >>> task = fadamgc.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     run = fadamgc.simulate(fadamgc.FedAvg(), task, rounds=2, callbacks=[tensorboard(folder)])
    ...     [file.name.startswith("events") for file in Path(folder).iterdir()]
    [True]
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        raise InputError("tracking with tensorboard needs a package; pip install 'fadamgc[track]'") from None
    writer = SummaryWriter(str(folder))

    def track(end: RoundEnd) -> None:
        for name, value in _numbers(end).items():
            writer.add_scalar(name, value, end.record.round)
        writer.flush()

    return track


def mlflow(
    name: str,
    experiment: str = "fadamgc",
    parameters: Mapping[str, Any] | None = None,
    uri: str | None = None,
) -> Tracker:
    """Log every round to a run of MLflow.

    Args:
        name: name of the run.
        experiment: name of the experiment that the run belongs to.
        parameters: stored with the run, e.g. the hyperparameters.
        uri: address of the tracking server, or a folder; None is MLflow's default.

    Example:
        >>> import fadamgc, tempfile, torch
        >>> data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(4)]
        >>> task = fadamgc.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     track = mlflow("first", uri=f"file:{folder}/mlruns")
        ...     run = fadamgc.simulate(fadamgc.FedAvg(), task, rounds=2, callbacks=[track])
        ...     [len(run.history), any(Path(folder).rglob("train_loss"))]
        [2, True]
    """
    try:
        from mlflow import MlflowClient
    except ImportError:
        raise InputError("tracking with mlflow needs a package; pip install 'fadamgc[track]'") from None
    if uri is not None and uri.startswith("file:"):
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # otherwise MLflow refuses folders
    client = MlflowClient(tracking_uri=uri)
    existing = client.get_experiment_by_name(experiment)
    experiment_id = existing.experiment_id if existing else client.create_experiment(experiment)
    run = client.create_run(experiment_id, run_name=name).info.run_id
    for key, value in (parameters or {}).items():
        client.log_param(run, key, value)

    def track(end: RoundEnd) -> None:
        for key, value in _numbers(end).items():
            client.log_metric(run, key, value, step=end.record.round)

    return track


def _numbers(end: RoundEnd) -> dict[str, float]:
    """Return the numbers of a round that are tracked."""
    values = {name: getattr(end.record, name) for name in NUMBERS}
    return {name: float(value) for name, value in values.items() if value is not None}


def track_with(names: str) -> None:
    """Track all runs of this process and its workers; ``names`` are trackers, separated by commas."""
    for name in filter(None, names.split(",")):
        if name not in TRACKERS:
            raise InputError(
                f"track={name!r} is not known{nearest(name, TRACKERS)}; known are {', '.join(TRACKERS)}"
            )
    os.environ[VARIABLE] = names


def trackers_of(folder: Path, name: str, parameters: Mapping[str, Any]) -> list[Tracker]:
    """Return the trackers for one run of the experiment in a folder."""
    trackers: list[Tracker] = []
    for kind in filter(None, os.environ.get(VARIABLE, "").split(",")):
        if kind == "tensorboard":
            trackers.append(tensorboard(folder / "tensorboard" / name))
        else:
            uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").resolve().as_uri()
            trackers.append(mlflow(name, folder.resolve().name, parameters, uri))
    return trackers
