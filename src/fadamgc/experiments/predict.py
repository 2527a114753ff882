"""What a trained text classifier says of a sentence."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import torch

from fadamgc.data.sources import data_root, source
from fadamgc.data.texts import Texts
from fadamgc.errors import InputError, nearest
from fadamgc.experiments.folder import RUNS
from fadamgc.experiments.planned_run import ADAPTER, IDENTITY
from fadamgc.experiments.spec.sections import TextTask
from fadamgc.experiments.spec.toml_io import task_spec
from fadamgc.federation.run import read_run

LABELS = {
    "glue/sst2": ("negative", "positive"),
    "glue/qnli": ("entailment", "not entailment"),
    "glue/qqp": ("not duplicate", "duplicate"),
}


def predict(
    folder: str | Path, first: str, second: str | None = None, base: str | Path | None = None
) -> dict[str, float]:
    """The probability of each label, the likeliest first.

    Args:
        folder: of a run on texts, ``OUT/runs/NAME``.
        first: the text.
        second: of a pair.
        base: where the base model is, if no longer where it was for the run.
    """
    folder = Path(folder)
    task = _task(folder)
    known = source(task.data)
    if (second is not None) != (len(known.inputs) > 1):
        raise InputError(f"{task.data} has {' and '.join(known.inputs)}; give {len(known.inputs)} text(s)")
    for text in (first, second):
        if text is not None and not text.strip():
            raise InputError("the text is empty")
        if text is not None and any("\ud800" <= letter <= "\udfff" for letter in text):
            raise InputError(f"the text {text!r} is no UTF-8")
    from fadamgc.models.pretrained import base_folder, load_adapter
    from fadamgc.models.text import TextClassifier, encode

    try:
        loaded = load_adapter(base or task.model, known.classes, folder / ADAPTER)
    except InputError as error:
        if base is not None or Path(base_folder(task.model)).is_dir():
            raise
        raise InputError(f"{error}; where it is now, if it is a folder, can be said with --base") from None
    model = TextClassifier(loaded.net, loaded.tokenizer.pad_token_id).eval()
    length = task.length if loaded.positions is None else min(task.length, loaded.positions)
    one = Texts([first], None if second is None else [second], np.zeros(1, dtype=np.int64))
    with torch.no_grad():
        shares = torch.softmax(model(encode(loaded.tokenizer, one, length))[0], dim=0).tolist()
    names = labels_of(task.data)
    return dict(sorted(zip(names, shares, strict=True), key=lambda pair: -pair[1]))


def labels_of(data: str) -> tuple[str, ...]:
    """What the labels of a data set are called; their numbers where that is not known."""
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
        what = f"there is no {ADAPTER} in it" if folder.is_dir() else "there is no such folder"
        inside = sorted(str(path.parent) for path in folder.glob(f"{RUNS}/*/{ADAPTER}"))
        beside = [str(path.parent) for path in folder.parent.glob(f"*/{ADAPTER}")]
        hint = f"; it has {', '.join(inside)}" if inside else nearest(str(folder), beside)
        raise InputError(f"run={str(folder)!r} is no run on texts: {what}{hint}")
    facts = read_run(folder).settings.get(IDENTITY, {}).get("task", {})
    task = task_spec(**facts)
    if not isinstance(task, TextTask):
        raise InputError(f"run={str(folder)!r} is no run on texts: its data are {task.data!r}")
    return task
