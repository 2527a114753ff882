"""Human activity recognition: signals of a phone's sensors, from thirty people who are the clients.

Nine signals of 128 values each (2.56 s at 50 Hz): body acceleration, angular velocity and total acceleration,
in three directions. Six activities.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fadamgc.data.sources import files_of, source
from fadamgc.errors import InputError

SHAPES = {"x": (9, 128), "y": (), "subject": (), "is_test": ()}


class Har(NamedTuple):
    """Signals, (n, 9, 128); activities and people, (n,); which windows are of the official test part."""

    x: Tensor
    y: Tensor
    subject: Tensor
    is_test: Tensor


def load(root: Path | None = None) -> Har:
    """All windows of all people."""
    (path,) = files_of(source("uci_har"), "train", root)
    try:
        with open(path, "rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = {name: file[name] for name in SHAPES if name in file.files}
    except (OSError, ValueError, zipfile.BadZipFile) as error:
        raise InputError(f"{path}: damaged ({error}); download it again") from None
    for name, shape in SHAPES.items():
        if name not in arrays:
            raise InputError(f"{path}: there is no array {name!r}; it has {', '.join(arrays)}")
        if arrays[name].shape[1:] != shape or len(arrays[name]) != len(arrays["x"]):
            raise InputError(f"{path}: {name!r} has shape {arrays[name].shape}; it must be (n, {shape})")
    y = arrays["y"].astype(np.int64)
    wrong = np.flatnonzero((y < 0) | (y >= 6))
    if len(wrong):
        raise InputError(f"{path}: row {wrong[0]} has y={y[wrong[0]]}; there are 6 classes, 0 to 5")
    return Har(
        torch.from_numpy(arrays["x"].astype(np.float32)),
        torch.from_numpy(y),
        torch.from_numpy(arrays["subject"].astype(np.int64)),
        torch.from_numpy(arrays["is_test"].astype(bool)),
    )
