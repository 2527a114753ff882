"""Split arrays into the clients' data and test data."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset, TensorDataset

from fadamgc.data.partition import Partition, dirichlet, iid, natural
from fadamgc.errors import InputError, finite, listed, not_accepted, shown

Pair = tuple[Tensor, Tensor]
Tests = list[Subset[Any] | None] | None  # of each client
STREAM = 0x73706C74  # "splt" in ASCII; no other random numbers use this number with the seed


def split(
    X: Any, y: Any, clients: Any, alpha: float | None, test: Any, seed: int, min_size: int
) -> tuple[list[Subset[Any]], Pair, Tests]:
    """Return the clients' data, rows of the same tensors, and the test data; see ``Task.split``.

    The third result is the test data of each client, if samples of clients were held out.
    """
    inputs, targets = _tensor("X", X), _tensor("y", y)
    if len(inputs) != len(targets):
        raise InputError(f"X has {len(inputs)} samples and y {len(targets)}; give one target per sample")
    owner = None if isinstance(clients, (int, np.integer)) else _owner(clients, len(inputs))
    data, tests = TensorDataset(inputs, targets), None
    rows, held_out = np.arange(len(inputs)), np.arange(0)
    if isinstance(test, (int, float)) and not isinstance(test, bool):
        share = finite("test", test, 0, exclusive=True)
        if share >= 1:
            raise not_accepted("test", test, "a share with 0 < share < 1, or a pair of data")
        rows, held_out = hold_out(targets, owner, share, seed)
        test_pair = inputs[held_out], targets[held_out]
        if owner is not None:
            tests = client_tests_of(owner[rows], owner[held_out], data, held_out)
    else:
        pair = listed(test)
        if pair is None or len(pair) != 2:
            raise InputError(
                f"test={shown(test)} is not accepted; give a share such as 0.2, or a pair of data"
            )
        test_pair = _tensor("test[0]", pair[0]), _tensor("test[1]", pair[1])
    labels = not targets.is_floating_point() and targets.ndim == 1
    if owner is not None:
        parts: Partition = natural(owner[rows])
    elif labels and alpha != math.inf:
        parts = dirichlet(targets[rows], clients, 0.1 if alpha is None else alpha, seed, min_size=min_size)
    elif alpha is None or alpha == math.inf:
        parts = iid(len(rows), clients, seed)
    else:
        raise InputError(f"alpha={alpha} needs labels, whole numbers (n,); omit it for other targets")
    return [Subset(data, rows[part].tolist()) for part in parts], test_pair, tests


def client_tests_of(owner: Any, test_owner: Any, data: TensorDataset, rows: Any = None) -> Tests:
    """Return the test data of each client, in the order of ``natural``: None for a client without any.

    Args:
        owner: the client of each train sample.
        test_owner: the client of each test sample; None: not known.
        data: samples, of which ``rows`` are the test samples (None: all).

    Returns:
        None if no client has test data.
    """
    if owner is None or test_owner is None:
        return None
    rows = np.arange(len(test_owner)) if rows is None else rows
    found = [rows[test_owner == name] for name in np.unique(owner)]
    if not any(map(len, found)):
        return None
    return [Subset(data, part.tolist()) if len(part) else None for part in found]


def _tensor(name: str, values: Any) -> Tensor:
    try:
        tensor = torch.as_tensor(np.asarray(values) if not isinstance(values, Tensor) else values)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} cannot be a tensor: {error}") from None
    if tensor.ndim == 0 or not len(tensor):
        raise InputError(f"{name} has the shape {tuple(tensor.shape)}; it must have one entry per sample")
    return tensor.float() if tensor.dtype == torch.float64 else tensor


def _owner(clients: Any, samples: int) -> Any:
    owner = np.asarray(clients)
    if owner.shape != (samples,):
        raise InputError(
            f"clients={shown(clients)} is not accepted; give a number of clients, or the client of each of "
            f"the {samples} samples"
        )
    return owner


def hold_out(targets: Tensor, owner: Any, share: float, seed: int) -> tuple[Any, Any]:
    """Hold out a share of each client's samples if clients are known, else of each label, else of all.

    If that is less than one sample for every client (or label), the test samples are drawn from all samples
    together, and each client (or label) keeps at least one sample.
    """
    random = np.random.default_rng((STREAM, seed))
    kinds: Any = np.zeros(len(targets))
    if owner is not None:
        kinds = owner
    elif not targets.is_floating_point() and targets.ndim == 1:
        kinds = targets.numpy()
    is_test = np.zeros(len(targets), dtype=bool)
    for kind in np.unique(kinds):
        rows = random.permutation(np.flatnonzero(kinds == kind))
        is_test[rows[: min(round(share * len(rows)), len(rows) - 1)]] = True
    if not is_test.any():
        order = random.permutation(len(targets))
        _, stays = np.unique(kinds[order], return_index=True)
        is_test[np.delete(order, stays)[: max(1, round(share * len(targets)))]] = True
    if not is_test.any():
        raise InputError(
            f"test={share} is less than one sample: there is one sample per client or label; give more "
            "samples, or test data"
        )
    return np.flatnonzero(~is_test), np.flatnonzero(is_test)
