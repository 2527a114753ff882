"""Least-squares problems whose optimum is known in closed form.

Client i has X_i (m_i, d) and Y_i (m_i, 1), its objective is f_i(w) = 0.5 * mean((X_i w - Y_i)^2), and
the clients together minimise f(w) = mean_i f_i(w). Everything is float64.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch

from fadamgc.data.partition import generator
from fadamgc.errors import InputError, counts, finite, not_accepted
from fadamgc.runtime import check_room

STREAM = 0x73796E74  # "synt" in ASCII


class Synthetic(NamedTuple):
    """A problem and its solution."""

    clients: list[tuple[torch.Tensor, torch.Tensor]]  # (X_i, Y_i)
    optimum: torch.Tensor  # the minimiser of f, (d,)
    dim: int  # d


def quadratics(
    clients: int = 10, dim: int = 20, seed: int = 0, condition: float = 10.0, spread: float = 1.0
) -> Synthetic:
    """Return f_i(w) = 0.5 (w - c_i)^T diag(a_i) (w - c_i), with w in R^dim.

    The curvatures a_i are log-uniform in [1, condition], and the minimisers c_i are normal with standard
    deviation ``spread``. As least squares: X_i = diag(sqrt(d a_i)) and Y_i = X_i c_i, so a client has d
    samples, and f_i is the mean over all of them.

    >>> quadratics(clients=3, dim=2).clients[0][0].shape
    torch.Size([2, 2])
    """
    counts(clients=clients, dim=dim)
    condition, spread = finite("condition", condition, 1), finite("spread", spread, 0)
    check_room(f"clients={clients} with dim={dim}", 8 * int(clients) * int(dim) ** 2)
    rng = generator(seed, STREAM)
    a = condition ** rng.random((clients, dim))
    c = spread * rng.standard_normal((clients, dim))

    root = np.sqrt(dim * a)
    X = [np.diag(row) for row in root]
    Y = list((root * c)[..., None])
    return _synthetic(X, Y, optimum=(a * c).sum(axis=0) / a.sum(axis=0))


def linear_regression(
    clients: int = 10,
    dim: int = 10,
    samples: int | tuple[int, int] = 40,
    seed: int = 0,
    heterogeneity: float = 1.0,
    noise: float = 0.1,
) -> Synthetic:
    """Return noisy linear targets; ground truth and scales of the features differ between clients.

    Y_i = X_i (w + heterogeneity * u_i) + noise * e_i, with w, u_i, e_i standard normal; the columns of X_i
    are normal with standard deviations log-uniform in [1/2, 2]. ``samples`` is the number of samples per
    client, or (low, high) to draw each client's number from low..high.

    >>> X, Y = linear_regression(dim=3, samples=40).clients[0]
    >>> X.shape, Y.shape
    (torch.Size([40, 3]), torch.Size([40, 1]))
    """
    counts(clients=clients, dim=dim)
    heterogeneity, noise = finite("heterogeneity", heterogeneity, 0), finite("noise", noise, 0)
    low, high = _range(samples)
    check_room(f"dim={dim}", 8 * int(dim) ** 2)
    check_room(f"clients={clients} with samples={samples!r}", 8 * int(clients) * int(low) * int(dim))
    rng = generator(seed, STREAM)
    sizes = rng.integers(low, high, size=clients, endpoint=True)
    total = sum(sizes.tolist())
    if total < dim:
        raise InputError(
            f"samples={samples!r} over clients={clients} are {total} in total; dim={dim} needs at least "
            f"{dim}, or the optimum is not unique"
        )
    check_room(f"clients={clients} with samples={samples!r}", 8 * total * int(dim))

    w = rng.standard_normal((dim, 1))
    X, Y = [], []
    for size in sizes:
        w_i = w + heterogeneity * rng.standard_normal((dim, 1))
        scale = 4.0 ** rng.uniform(-0.5, 0.5, dim)
        X_i = scale * rng.standard_normal((size, dim))
        X.append(X_i)
        Y.append(X_i @ w_i + noise * rng.standard_normal((size, 1)))

    A = sum(X_i.T @ X_i / len(X_i) for X_i in X)
    b = sum(X_i.T @ Y_i / len(X_i) for X_i, Y_i in zip(X, Y, strict=True))
    return _synthetic(X, Y, optimum=np.linalg.solve(A, b)[:, 0])


def _synthetic(X: list[np.ndarray], Y: list[np.ndarray], optimum: np.ndarray) -> Synthetic:
    pairs = [(torch.from_numpy(X_i), torch.from_numpy(Y_i)) for X_i, Y_i in zip(X, Y, strict=True)]
    return Synthetic(pairs, torch.from_numpy(optimum), len(optimum))


def _range(samples: int | tuple[int, int]) -> tuple[int, int]:
    low, high = samples if isinstance(samples, (tuple, list)) and len(samples) == 2 else (samples, samples)
    counts(samples=low)
    counts(samples=high)
    if low > high:
        raise not_accepted("samples", samples, "a whole number or (low, high) with low <= high")
    return low, high
