"""The workloads of the measurements: the same models and the same data for every system."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from fadamgc.models import cnn, convnet, mlp, resnet18
from fadamgc.models.pretrained import load_base
from fadamgc.models.text import PADDING, TextClassifier

RESNET_NORM: Literal["batch", "group"] = "batch"
ETA_L = {"sgd": 0.01, "adam": 0.001}  # small, because random labels cannot be learned
OPTIMIZERS = tuple(ETA_L)


@dataclass(frozen=True)
class Workload:
    """A model, and how much of it is trained in one round.

    Attributes:
        name: in tables.
        make_model: makes the model from a seed.
        make_own: makes this package's form of the model, if it has one.
        shape: shape of one input.
        classes: number of labels.
        clients: n.
        sampled: S, clients per round.
        steps: K, local steps per client.
        batch: samples per step.
        turn: rounds per turn; more if a round is short.
        warmup: rounds before the first turn.
        in_groups: whether all systems are compared on it; else it is for one of the other measurements.
    """

    name: str
    make_model: Callable[[int], nn.Module]
    shape: tuple[int, ...]
    classes: int
    clients: int
    sampled: int
    steps: int
    batch: int
    turn: int
    warmup: int
    make_own: Callable[[int], nn.Module] | None = None
    in_groups: bool = True

    @property
    def texts(self) -> bool:
        """Whether inputs are tokens."""
        return len(self.shape) == 2

    @property
    def samples(self) -> int:
        """Samples per client: exactly one pass per round (pfl stops at the end of the data)."""
        return self.steps * self.batch

    def data(self, seed: int = 0) -> tuple[Tensor, Tensor]:
        """Return inputs (n, samples, *shape) and labels (n, samples) of all clients."""
        if self.name == "digits":
            return _digits(self.clients, self.samples)
        if self.texts:
            return _tokens(self.clients, self.samples, self.shape[-1], seed)
        random = torch.Generator().manual_seed(seed)
        inputs = torch.randn(self.clients, self.samples, *self.shape, generator=random)
        return inputs, torch.randint(self.classes, (self.clients, self.samples), generator=random)


def _digits(clients: int, samples: int) -> tuple[Tensor, Tensor]:
    """Return scikit-learn's digits, repeated until every client has enough."""
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    rows = torch.arange(clients * samples) % len(labels)
    inputs = torch.from_numpy(pixels / 16).float()[rows]
    return inputs.view(clients, samples, -1), torch.from_numpy(labels).long()[rows].view(clients, samples)


def _tokens(clients: int, samples: int, longest: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return texts of 8 to ``longest`` random tokens, as many as sentences of reviews have."""
    random = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1000, 30_000, (clients, samples, 1, longest), generator=random, dtype=torch.int32)
    length = torch.randint(8, longest + 1, (clients, samples, 1, 1), generator=random)
    tokens[torch.arange(longest) >= length] = PADDING
    return tokens, torch.randint(2, (clients, samples), generator=random)


class Cut(nn.Module):
    """The model of transformers and peft on tokens; a batch is cut to its longest text."""

    def __init__(self, net: nn.Module, pad: int) -> None:
        super().__init__()
        self.net, self.pad = net, pad

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits."""
        mask = tokens[:, 0] != PADDING
        mask = mask[:, : int(mask.sum(dim=1).max())]
        ids = tokens[:, 0, : mask.shape[1]].long().where(mask, self.pad)
        logits: Tensor = self.net(input_ids=ids, attention_mask=mask.long()).logits
        return logits


def _minilm(kind: Callable[[nn.Module, int], nn.Module], seed: int) -> nn.Module:
    """Make all-MiniLM-L6-v2 with LoRA of rank 8 on queries and values of all layers, without dropout."""
    base = load_base("minilm", 2, seed, dropout=0.0)
    return kind(base.net, base.tokenizer.pad_token_id)


WORKLOADS = {
    w.name: w
    for w in (
        Workload(
            name="digits",
            make_model=lambda seed: mlp(64, [64], 10, seed=seed),
            shape=(64,),
            classes=10,
            clients=20,
            sampled=10,
            steps=20,
            batch=16,
            turn=20,
            warmup=5,
        ),
        Workload(
            name="cnn",
            make_model=lambda seed: cnn(seed=seed),
            shape=(3, 32, 32),
            classes=10,
            clients=20,
            sampled=10,
            steps=20,
            batch=32,
            turn=1,
            warmup=1,
        ),
        Workload(
            name="resnet18",
            make_model=lambda seed: resnet18(norm=RESNET_NORM, seed=seed),
            shape=(3, 32, 32),
            classes=10,
            clients=20,
            sampled=10,
            steps=2,
            batch=32,
            turn=1,
            warmup=1,
        ),
        Workload(
            name="minilm",
            make_model=partial(_minilm, Cut),
            make_own=partial(_minilm, TextClassifier),
            shape=(1, 32),
            classes=2,
            clients=20,
            sampled=10,
            steps=2,
            batch=16,
            turn=1,
            warmup=1,
        ),
        # The network of the studies at laptop scale, with their number of clients, S, K and batch.
        Workload(
            name="convnet",
            make_model=lambda seed: convnet(side=16, seed=seed),
            shape=(3, 16, 16),
            classes=10,
            clients=100,
            sampled=10,
            steps=10,
            batch=20,
            turn=10,
            warmup=3,
            in_groups=False,
        ),
    )
}
