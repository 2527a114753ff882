"""Classify a text with the result of a run."""

from __future__ import annotations

import json
from pathlib import Path

import torch

from fadamgc.data.sources import data_root, source
from fadamgc.errors import InputError, nearest
from fadamgc.experiments.folder import RUNS
from fadamgc.experiments.planned_run import ADAPTER, IDENTITY
from fadamgc.federation.run import read_run
from fadamgc.tasks.sections import TextTask, task_spec

LABELS = {
    "glue/sst2": ("negative", "positive"),
    "glue/qnli": ("entailment", "not entailment"),
    "glue/qqp": ("not duplicate", "duplicate"),
}


def predict(
    folder: str | Path, first: str, second: str | None = None, base: str | Path | None = None
) -> dict[str, float]:
    """Return the probability of each label, the likeliest first.

    ``base`` is the folder of the base model, if it has moved since the run.
    """
    folder = Path(folder)
    task = _task(folder)
    inputs, classes = source(task.data).inputs, source(task.data).classes
    texts = [first] if second is None else [first, second]
    if len(texts) != len(inputs):
        raise InputError(f"{task.data} has {' and '.join(inputs)}; give {len(inputs)} text(s)")
    for text in texts:
        if not text.strip():
            raise InputError("the text is empty")
        if any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InputError(f"the text {text!r} is not UTF-8")
    from fadamgc.models.pretrained import base_folder, load_adapter
    from fadamgc.models.text import TextClassifier, encode

    try:
        loaded = load_adapter(base or task.model, classes, folder / ADAPTER)
    except InputError as error:
        if base is not None or Path(base_folder(task.model)).is_dir():
            raise
        raise InputError(f"{error}; if it is a folder that has moved, give its path with --base") from None
    model = TextClassifier(loaded.net, loaded.tokenizer.pad_token_id).eval()
    length = task.length if loaded.positions is None else min(task.length, loaded.positions)
    tokens = encode(loaded.tokenizer, [first], texts[1:] or None, length)
    with torch.no_grad():
        probabilities = torch.softmax(model(tokens)[0], dim=0).tolist()
    return dict(sorted(zip(labels_of(task.data), probabilities, strict=True), key=lambda pair: -pair[1]))


def labels_of(data: str) -> tuple[str, ...]:
    """Return the names of a data set's labels; their numbers where names are not known."""
    classes = source(data).classes
    if data in LABELS:
        return LABELS[data]
    try:
        names = json.loads((data_root() / data / "labels.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        names = []
    return tuple(map(str, names)) if len(names) == classes else tuple(map(str, range(classes)))


def _task(folder: Path) -> TextTask:
    if not (folder / ADAPTER).is_dir():
        reason = f"there is no {ADAPTER} in it" if folder.is_dir() else "there is no such folder"
        inside = sorted(str(path.parent) for path in folder.glob(f"{RUNS}/*/{ADAPTER}"))
        siblings = [str(path.parent) for path in folder.parent.glob(f"*/{ADAPTER}")]
        hint = f"; it has {', '.join(inside)}" if inside else nearest(str(folder), siblings)
        raise InputError(f"run={str(folder)!r} is not a run on texts: {reason}{hint}")
    task = task_spec(**read_run(folder).settings.get(IDENTITY, {}).get("task", {}))
    if not isinstance(task, TextTask):
        raise InputError(f"run={str(folder)!r} is not a run on texts: its data are {task.data!r}")
    return task
