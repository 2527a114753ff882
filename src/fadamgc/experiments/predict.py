"""Classify a text with the result of a run, or with saved adapters."""

from __future__ import annotations

from pathlib import Path

from fadamgc.data.sources import source
from fadamgc.data.texts import label_names
from fadamgc.errors import InputError, nearest
from fadamgc.experiments.folder import RUNS
from fadamgc.experiments.planned_run import ADAPTER, IDENTITY
from fadamgc.federation.run import NAME, read_run
from fadamgc.models.pretrained import ADAPTER_CONFIG, base_folder
from fadamgc.models.reading import Reading, saved_reading
from fadamgc.models.text import load_classifier
from fadamgc.tasks.sections import KnownTextTask, task_spec


def predict(
    folder: str | Path, first: str, second: str | None = None, base: str | Path | None = None
) -> dict[str, float]:
    """Return the probability of each label, the likeliest first.

    Args:
        folder: the folder of a run on texts, or one that ``save_adapter`` has written.
        first: the text.
        second: the other text, if the data are pairs.
        base: the folder of the base model, if it has moved since the run.
    """
    adapter, reading = _adapter(Path(folder))
    texts: list[str | tuple[str, str]] = [first if second is None else (first, second)]
    reading.parts(texts)  # check the texts before loading the model
    try:
        model = load_classifier(reading, adapter, base)
    except InputError as error:
        if base is not None or Path(base_folder(reading.base)).is_dir():
            raise
        raise InputError(f"{error}; if it is a folder that has moved, give its path with --base") from None
    shares = model.probabilities(texts)[0].tolist()
    names = map(str, reading.labels)
    return dict(sorted(zip(names, shares, strict=True), key=lambda pair: -pair[1]))


def _adapter(folder: Path) -> tuple[Path, Reading]:
    """Return the folder of the adapters, and how texts are read."""
    adapter = folder if (folder / ADAPTER_CONFIG).is_file() else folder / ADAPTER
    if not adapter.is_dir():
        reason = f"there is no {ADAPTER} in it" if folder.is_dir() else "there is no such folder"
        inside = sorted(str(path.parent) for path in folder.glob(f"{RUNS}/*/{ADAPTER}"))
        siblings = [str(path.parent) for path in folder.parent.glob(f"*/{ADAPTER}")]
        hint = f"; it has {', '.join(inside)}" if inside else nearest(str(folder), siblings)
        if (folder / f"{NAME}.json").is_file():
            hint = "; save the adapters of a run on texts with run.model.save_adapter(folder)"
        raise InputError(f"run={str(folder)!r} is not a run on texts: {reason}{hint}")
    reading = saved_reading(adapter)
    if reading is not None:
        return adapter, reading
    if adapter == folder:
        raise InputError(
            f"{folder} does not say how texts are read; it was not written by save_adapter of this version"
        )
    return adapter, _reading_of_run(folder)


def _reading_of_run(folder: Path) -> Reading:
    """Return how texts are read in a run of an earlier version, whose adapters do not say so."""
    task = task_spec(**read_run(folder).settings.get(IDENTITY, {}).get("task", {}))
    if not isinstance(task, KnownTextTask):
        raise InputError(f"run={str(folder)!r} is not a run on texts: its data are {task.data!r}")
    return Reading(task.model, task.length, source(task.data).inputs, label_names(task.data))
