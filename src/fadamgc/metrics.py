"""Metrics for classification, for ``Task(metric=...)``; a metric may return several named numbers.

task = fadamgc.Task(model, loss, clients, test, metric=fadamgc.metrics.classification)
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["accuracy", "classification", "macro_f1"]


def accuracy(output: Tensor, target: Tensor) -> float:
    """Return the share of correct predictions, over all positions with a label (one that is not negative).

    Outputs are one number per class, (n, C), (n, C, ...) or (n, ..., C); or one logit per sample, (n,) or
    (n, 1), which predicts class 1 above 0. If the classes may be in the second or in the last dimension, they
    are in the second, as in torch.

    >>> accuracy(torch.tensor([[2.0, 1.0], [1.0, 2.0]]), torch.tensor([0, 0]))
    0.5
    """
    predicted, labels = _labelled(output, target)
    return float((predicted == labels).double().mean())


def macro_f1(output: Tensor, target: Tensor) -> float:
    """Return the mean over classes of F1 = 2 TP / (2 TP + FP + FN); a class that never occurs does not count.

    >>> output = torch.tensor([[2.0, 1.0], [2.0, 1.0], [1.0, 2.0]])
    >>> round(macro_f1(output, torch.tensor([0, 1, 1])), 4)
    0.6667
    """
    predicted, labels = _labelled(output, target)
    values = []
    for c in torch.unique(torch.cat([predicted, labels])).tolist():
        both = float(((predicted == c) & (labels == c)).sum())
        values.append(2 * both / float((predicted == c).sum() + (labels == c).sum()))
    return sum(values) / len(values)


def class_accuracies(output: Tensor, target: Tensor) -> dict[str, float]:
    """Return the share of correct predictions of each class that occurs in the targets."""
    predicted, labels = _labelled(output, target)
    return {
        f"accuracy of {c}": float((predicted[labels == c] == c).double().mean())
        for c in torch.unique(labels).tolist()
    }


def classification(output: Tensor, target: Tensor) -> dict[str, float]:
    """Return accuracy, macro-F1, the accuracy of the worst class, and the accuracy of each class.

    >>> output = torch.tensor([[2.0, 1.0], [1.0, 2.0], [1.0, 2.0], [2.0, 1.0]])
    >>> classification(output, torch.tensor([0, 1, 1, 1]))["worst class"]
    0.6666666666666666
    """
    each = class_accuracies(output, target)
    return {
        "accuracy": accuracy(output, target),
        "macro-F1": macro_f1(output, target),
        "worst class": min(each.values()),
        **each,
    }


def has_classes(output: Tensor, target: Tensor) -> bool:
    """Whether ``accuracy`` accepts the targets; ``output`` may cover only their first samples."""
    first = target[: len(output)]
    if not target.is_floating_point() and _class_dimension(output, first) is not None:
        return True
    one_logit = output.numel() == first.numel() and output.ndim <= 2
    return one_logit and bool(((target == 0) | (target == 1)).all())


def _class_dimension(output: Tensor, target: Tensor) -> int | None:
    for dimension in (1, -1):
        if output.ndim > 1 and output.shape[dimension] > 1:
            shape = [*output.shape]
            del shape[dimension]
            if shape == [*target.shape]:
                return dimension
    return None


def _labelled(output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Return predicted classes and labels, as vectors, where there is a label."""
    dimension = _class_dimension(output, target)
    predicted = (output > 0).long() if dimension is None else output.argmax(dim=dimension)
    labels = target.reshape(-1).long()
    is_label = labels >= 0
    return predicted.reshape(-1)[is_label], labels[is_label]


def client_metrics(values: NDArray[np.float64], seen: Collection[int], goal: str = "max") -> dict[str, float]:
    """Return how a metric is distributed over clients: mean, worst tenth, spread, and clients not yet seen.

    ``seen`` are the clients that have taken part in training.

    >>> client_metrics(np.array([0.5, 0.9, 1.0, 1.0]), seen=[1, 2, 3])["clients: worst tenth"]
    0.5
    """
    ordered = np.sort(values) if goal == "max" else -np.sort(-values)
    worst = ordered[: max(1, round(len(values) / 10))]
    others = [value for i, value in enumerate(values) if i not in seen]
    found = {
        "clients: mean": float(values.mean()),
        "clients: worst tenth": float(worst.mean()),
        "clients: spread": float(values.std()),
    }
    return found | ({"clients: not yet seen": float(np.mean(others))} if others else {})
