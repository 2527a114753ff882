"""The 8x8 handwritten digits that come with scikit-learn: 1797 samples, 10 classes, no download."""

from __future__ import annotations

from importlib.metadata import version
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from fadamgc.cache import cached
from fadamgc.errors import finite, not_accepted

FORMAT = 1  # of the cached rows


class Digits(NamedTuple):
    """Pixels as float32 in [0, 1], (n, 64); labels as int64, (n,)."""

    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor


def load(validation: float = 0.0) -> Digits:
    """Return the digits in a fixed stratified split, 80 % to train and 20 % to test.

    With ``validation`` > 0, this share of the train part replaces the test part, so that tuning cannot see
    the test part.

    >>> [len(part) for part in load()]
    [1437, 1437, 360, 360]
    >>> [len(part) for part in load(validation=0.25)]
    [1077, 1077, 360, 360]
    """
    share = finite("validation", validation, 0)
    if share and not 0.01 <= share <= 0.99:
        raise not_accepted("validation", share, "0 or a number from 0.01 to 0.99")
    name = f"digits/{FORMAT}-{version('scikit-learn')}-{share}"
    rows = torch.from_numpy(cached(name, lambda: _rows(share)))
    x, y, held_out = rows[:, :64].to(torch.float32) / 16, rows[:, 64].to(torch.int64), rows[:, 65].bool()
    return Digits(x[~held_out], y[~held_out], x[held_out], y[held_out])


def _rows(validation: float) -> npt.NDArray[np.uint8]:
    """Return one row per digit: 64 pixels from 0 to 16, the label, and whether it is in the test part."""
    # These imports are slow and not needed for other data.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    pixels, labels = load_digits(return_X_y=True)
    samples = np.arange(len(labels))
    train, test = train_test_split(samples, test_size=0.2, stratify=labels, random_state=0)
    if validation:
        train, test = train_test_split(train, test_size=validation, stratify=labels[train], random_state=0)
    order, held_out = np.concatenate([train, test]), np.repeat([0, 1], [len(train), len(test)])
    return np.column_stack([pixels[order], labels[order], held_out]).astype(np.uint8)
