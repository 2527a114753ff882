"""Human activity recognition (UCI HAR): which of six activities a phone's sensors have recorded.

A window has nine signals of 128 values (2.56 s at 50 Hz): body acceleration, angular velocity and total
acceleration, in three directions each. Thirty people were recorded; each is a client.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fadamgc.data.sources import files_of_kind
from fadamgc.errors import InputError, cut

SHAPES = {"x": (9, 128), "y": (), "subject": (), "is_test": ()}  # for one window


class Har(NamedTuple):
    """Windows of signals, with the activity, the person and the part of each."""

    x: Tensor  # (n, 9, 128)
    y: Tensor  # (n,): the activity, 0 to 5
    subject: Tensor  # (n,): the person
    is_test: Tensor  # (n,): whether the window is in the official test part


def load() -> Har:
    """Read all windows of all people."""
    _, (path,) = files_of_kind("uci_har", "signals", "train")
    try:
        with open(path, "rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in SHAPES if name in file.files}
    except (FileNotFoundError, PermissionError) as error:
        raise InputError(f"{path} cannot be read: {error.strerror}") from None
    except Exception as error:  # zipfile and numpy raise many kinds of errors
        message = cut(str(error)) or type(error).__name__
        raise InputError(f"{path}: damaged ({message}); download it again") from None
    for name, shape in SHAPES.items():
        if name not in arrays:
            raise InputError(f"{path}: there is no array {name!r}; it has {', '.join(arrays)}")
        array = arrays[name]
        if array.ndim == 0 or array.shape[1:] != shape or len(array) != len(arrays["x"]):
            accepted = f"({', '.join(map(str, ('n', *shape)))}), n as of 'x'"
            raise InputError(f"{path}: {name!r} has shape {array.shape}; it must be {accepted}")
        kinds, accepted = ("biuf", "numbers") if name == "x" else ("biu", "integers")
        if array.dtype.kind not in kinds:
            raise InputError(f"{path}: {name!r} is of {array.dtype}; it must be of {accepted}")
        if not np.isfinite(array).all():
            raise InputError(f"{path}: {name!r} has numbers that are not finite; download it again")
    x, y, subject, is_test = (arrays[name] for name in SHAPES)
    y = y.astype(np.int64)
    wrong = np.flatnonzero((y < 0) | (y >= 6))
    if len(wrong):
        raise InputError(f"{path}: row {wrong[0]} has y={y[wrong[0]]}; there are 6 classes, 0 to 5")
    columns = (x.astype(np.float32), y, subject.astype(np.int64), is_test.astype(bool))
    return Har(*map(torch.from_numpy, columns))
