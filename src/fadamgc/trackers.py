"""Callbacks of a simulation that show its rounds in TensorBoard, MLflow or Weights & Biases.

fadamgc.simulate(..., callbacks=[fadamgc.trackers.tensorboard("logs/first")])
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from fadamgc.errors import InputError, nearest
from fadamgc.sim.engine import RoundEnd

__all__ = ["mlflow", "tensorboard", "wandb"]

VARIABLE = "FADAMGC_TRACK"  # environment variable that worker processes inherit: some of TRACKERS
TRACKERS = ("tensorboard", "mlflow", "wandb")
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


def wandb(
    name: str,
    project: str = "fadamgc",
    parameters: Mapping[str, Any] | None = None,
    folder: str | Path | None = None,
    mode: Literal["online", "offline"] | None = None,
) -> WandbRun:
    """Log every round to a run of Weights & Biases.

    Offline, the run is written to ``folder/wandb``, and ``wandb sync`` sends it later.

    Args:
        name: name of the run.
        project: name of the project that the run belongs to.
        parameters: stored with the run, e.g. the hyperparameters.
        folder: where wandb writes its files; None is wandb's default.
        mode: "online" or "offline"; None is the environment variable ``WANDB_MODE``, or else online if there
            is an API key and offline if there is none.

    Example:
        >>> import fadamgc, tempfile, torch
        >>> data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(4)]
        >>> task = fadamgc.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     track = wandb("first", folder=folder, mode="offline")
        ...     run = fadamgc.simulate(fadamgc.FedAvg(), task, rounds=2, callbacks=[track])
        ...     track.finish()
        ...     [path.suffix for path in Path(folder).rglob("run-*.wandb")]
        ['.wandb']
    """
    try:
        import wandb as package
    except ImportError:
        raise InputError("tracking with wandb needs a package; pip install 'fadamgc[wandb]'") from None
    if mode is None and not os.environ.get("WANDB_MODE"):
        mode = "online" if package.api.api_key else "offline"
    run = package.init(
        project=project,
        name=name,
        config=dict(parameters or {}),
        dir=None if folder is None else str(folder),
        mode=mode,
        reinit="create_new",  # several runs of a process at the same time
        settings=package.Settings(silent=True, console="off"),
    )
    return WandbRun(run)


class WandbRun:
    """A run of Weights & Biases. wandb ends it when the process ends, or ``finish`` does."""

    def __init__(self, run: Any) -> None:
        self._run = run

    def __call__(self, end: RoundEnd) -> None:
        """Log a round."""
        self._run.log(_numbers(end), step=end.record.round)

    def finish(self) -> None:
        """Write everything that is still in memory, and end the run."""
        self._run.finish()


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
        elif kind == "wandb":
            trackers.append(wandb(name, folder.resolve().name, parameters, folder))
        else:
            uri = os.environ.get("MLFLOW_TRACKING_URI") or (folder / "mlruns").resolve().as_uri()
            trackers.append(mlflow(name, folder.resolve().name, parameters, uri))
    return trackers
