"""Arguments of Task, simulate, simulate_many, algorithms, cost models, partitions and problems."""

from __future__ import annotations

import dataclasses
import math
import os
import random
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset, default_collate

from .harness import Target

HUGE = (10**400, -(10**400), 10**5000, 2**63, 2**64, 2**53 + 1, Fraction(10**400), Fraction(1, 3))
# None between a thousand and 2^53: what is accepted and takes long is not a failure.
ODD: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        2,
        3,
        -1,
        0.0,
        0.5,
        1.5,
        -0.5,
        1e-320,
        1e-30,
        1e30,
        1e300,
        math.inf,
        -math.inf,
    ),
    *(
        math.nan,
        "",
        "x",
        "uniform",
        "auto",
        "loop",
        "é" * 20_000,
        b"x",
        (),
        [],
        {},
        [1],
        (1, 2),
        {"a": 1},
        {1},
    ),
    *(range(3), object, lambda *a: 1.0, np.float32(0.5), np.int64(2), np.array(3), np.array([1.0, 2.0])),
    *(np.array(["a"]), np.nan, 3j, torch.tensor(2), torch.tensor([1.0, 2.0]), torch.float64, torch.float16),
    *(torch.bfloat16, torch.int32, torch.float8_e4m3fn, torch.complex64, "cpu", "meta", "cuda:99", *HUGE),
)
HYPER = (*ODD, 0.01, 0.1, 0.9, 0.99, 1e-8, 1.0, 10.0, "min", "sum", "mean", "scalar")


class Items(Dataset):  # type: ignore[type-arg]
    """A Dataset of whatever items."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, i: int) -> Any:
        return self.items[i]


class Strange(nn.Module):
    """A model whose output is odd."""

    def __init__(self, change: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.change = nn.Linear(4, 3), change

    def forward(self, x: torch.Tensor) -> Any:
        return self.change(self.linear(x.reshape(len(x), -1)))


def fails(*_: Any) -> Any:
    raise RuntimeError("a model that fails")


def tensor(r: random.Random, *shape: int, kind: str | None = None) -> Any:
    """Numbers of a shape, as one of many kinds of tensors."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(r.randrange(1000)))
    return _kinds(x, kind or r.choice(KINDS)) if shape else x


KINDS = (
    *[
        "float32",
        "float64",
        "float16",
        "bfloat16",
        "int64",
        "int32",
        "int16",
        "int8",
        "uint8",
        "uint16",
        "uint32",
        "uint64",
        "bool",
        "complex64",
    ],
    *[
        "float8_e4m3fn",
        "float8_e5m2",
        "sparse",
        "csr",
        "meta",
        "quantized",
        "nested",
        "nan",
        "inf",
        "empty",
        "scalar",
        "numpy",
        "list",
        "strings",
    ],
    *["objects", "grad", "huge", "transposed", "expanded", "conj", "none", "ragged", "parameter", "subclass"],
)


class Sub(torch.Tensor):
    """A subclass of Tensor."""


def _kinds(x: torch.Tensor, kind: str) -> Any:
    match kind:
        case "sparse":
            return x.to_sparse()
        case "csr":
            return x.reshape(len(x), -1).to_sparse_csr()
        case "meta":
            return x.to("meta")
        case "quantized":
            return torch.quantize_per_tensor(x, 0.1, 0, torch.quint8)
        case "nested":
            return torch.nested.nested_tensor([x[0], x[-1]])
        case "nan" | "inf":
            return torch.full_like(x, float(kind))
        case "empty":
            return x[:0]
        case "scalar":
            return x.sum()
        case "numpy":
            return x.numpy()
        case "list":
            return x.tolist()
        case "strings":
            return ["a"] * len(x)
        case "objects":
            return np.array([object()] * len(x))
        case "grad":
            return x.clone().requires_grad_() * 1
        case "huge":
            return x * 1e30
        case "transposed":
            return x.flip(0).T.T if x.ndim < 3 else x.transpose(1, 2)
        case "expanded":
            return x[:1].expand(x.shape)
        case "conj":
            return x.to(torch.complex64).conj()
        case "none":
            return None
        case "ragged":
            return [x[0].reshape(-1).tolist(), [1.0]]
        case "parameter":
            return nn.Parameter(x)
        case "subclass":
            return x.as_subclass(Sub)
    return (x * 2).to(getattr(torch, kind))


def models(r: random.Random) -> Any:
    return r.choice(
        (
            *(lambda: nn.Linear(4, 3), lambda: nn.Sequential(nn.Flatten(), nn.Linear(4, 3))) * 6,
            lambda: nn.Linear(4, 1),
            lambda: nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)),
            lambda: nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)),
            lambda: nn.Linear(4, 3, device="meta"),
            lambda: nn.Linear(4, 3).half(),
            lambda: nn.Linear(4, 3).double(),
            lambda: nn.Linear(4, 3).to(torch.bfloat16),
            lambda: nn.Linear(4, 3).to(torch.float8_e4m3fn),
            lambda: nn.Linear(4, 3).to(torch.complex64),
            lambda: nn.Linear(4, 3).requires_grad_(False),
            lambda: nn.LazyLinear(3),
            lambda: nn.Embedding(5, 3),
            lambda: nn.Identity(),
            lambda: nn.GRU(4, 3),
            lambda: nn.Linear(0, 3),
            lambda: Strange(lambda o: o.sum()),
            lambda: Strange(lambda o: (o, o)),
            lambda: Strange(lambda o: None),
            lambda: Strange(lambda o: o[:0]),
            lambda: Strange(lambda o: o.detach()),
            lambda: Strange(lambda o: o.to_sparse()),
            lambda: Strange(lambda o: o.to(torch.complex64)),
            lambda: Strange(lambda o: o.long()),
            lambda: Strange(lambda o: o / 0),
            lambda: Strange(lambda o: o.numpy()),
            lambda: Strange(lambda o: o.to("meta")),
            lambda: Strange(lambda o: o[0]),
            lambda: Strange(fails),
            lambda: None,
            lambda: "mlp",
            lambda: nn.Linear,
        )
    )()


LOSSES: tuple[Any, ...] = (
    *(F.cross_entropy,) * 8,
    *(F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits, F.nll_loss, F.smooth_l1_loss, nn.MSELoss()),
    nn.CrossEntropyLoss(weight=torch.ones(3)),
    nn.CrossEntropyLoss(weight=torch.ones(2)),
    nn.CrossEntropyLoss(reduction="none"),
    lambda o, y: ((o - y) ** 2).mean(),
    lambda o, y: o.sum() * 0,
    lambda o, y: o.sum() / 0,
    lambda o, y: 1.0,
    lambda o, y: None,
    lambda o, y: o,
    lambda o, y: o.detach().sum(),
    lambda o: o.sum(),
    fails,
    None,
    "cross_entropy",
)
METRICS: tuple[Any, ...] = (
    *("accuracy", "loss") * 4,
    lambda o, y: 1.0,
    lambda o, y: torch.ones(3),
    lambda o, y: None,
    lambda o, y: math.nan,
    lambda o, y: "x",
    fails,
    *("mae", None, 3, ["accuracy"], {}, np.array([1, 2])),
)


def pair(r: random.Random, odd: float) -> Any:
    n = r.choice((1, 2, 3, 5, 9))
    x: Any = tensor(r, n, 4, kind=None if r.random() < odd else "float32")
    if r.random() < odd / 2:
        x = tensor(r, *r.choice(((n,), (n, 2, 2), (n, 4, 1), (n, 5), (n, 0), (n + 1, 4), ())))
    y: Any = torch.tensor([r.randrange(3) for _ in range(n)])
    if r.random() < odd:
        y = r.choice(
            (
                lambda: tensor(r, n),
                lambda: tensor(r, n, 1),
                lambda: tensor(r, n, 3),
                lambda: y + r.choice((-1, 1, 100, 2**40)),
                lambda: y.to(
                    getattr(torch, r.choice(("uint8", "int32", "uint16", "uint64", "bool", "float64")))
                ),
                lambda: y[:-1],
                lambda: y.reshape(n, 1),
            )
        )()
    if r.random() < odd:
        return r.choice(
            (
                lambda: TensorDataset(torch.ones(4, 4), torch.zeros(4).long()),
                lambda: Items([(x, y), (x, y)]),
                lambda: Items([(torch.ones(4) * i, i % 3) for i in range(n)]),
                lambda: Items([(torch.ones(1 + i % 2), 0) for i in range(4)]),
                lambda: Items([{"x": 1}] * 3),
                lambda: Items([(1.0,)] * 3),
                lambda: Items([]),
                lambda: [x, y],
                lambda: (x, y, y),
                lambda: (x,),
                lambda: {"x": x, "y": y},
                lambda: r.choice(ODD),
            )
        )()
    return x, y


def task(r: random.Random, odd: float) -> Any:
    from fadamgc import Task

    clients: Any = [pair(r, odd if r.random() < 0.5 else 0) for _ in range(r.choice((1, 2, 3, 5)))]
    settings: dict[str, Any] = {
        "model": models(r) if r.random() < 3 * odd else nn.Linear(4, 3),
        "loss": r.choice(LOSSES) if r.random() < 2 * odd else F.cross_entropy,
        "clients": clients,
    }
    if r.random() < 0.7:
        settings["test"] = pair(r, odd)
    if r.random() < 0.4:
        settings["metric"] = r.choice(METRICS)
    if r.random() < 0.2:
        settings["lazy"] = True
    if r.random() < 0.1:
        settings["collate"] = r.choice((default_collate, lambda items: items, lambda items: (1, 2), fails))
    if r.random() < 0.1:
        settings["transform"] = r.choice(
            (lambda x, y: (2 * x, y), lambda x, y: x, lambda x, y: (x[:1], y), fails)
        )
    if r.random() < 0.1:
        settings["client_tests"] = [pair(r, odd) for _ in clients]
    for name in ("clients", "test", "goal", "name", "metric", "transform", "client_tests", "lazy", "collate"):
        if r.random() < odd / 4:
            settings[name] = r.choice(ODD)
    return Task(**settings)


def algorithm(r: random.Random, odd: float) -> Any:
    from fadamgc.methods import algorithm_class, algorithms, make_algorithm

    name = r.choice(algorithms()) if r.random() > odd / 4 else r.choice((*ODD, "fadamg"))
    if not isinstance(name, str) or name not in algorithms():
        return make_algorithm(name)
    fields = [field.name for field in dataclasses.fields(algorithm_class(name))]
    chosen = {key: r.choice(HYPER) for key in fields if r.random() < odd}
    if r.random() < odd / 10:
        chosen["eta_x"] = 1
    return make_algorithm(name, **chosen)


def settings(r: random.Random, odd: float, folder: Path) -> dict[str, Any]:
    from fadamgc import CostModel

    good: dict[str, Any] = {
        "rounds": r.choice((0, 1, 2, 3)),
        "sampled": r.choice((None, 1, 2)),
        "tracked": r.choice((None, 0, 1)),
        "local_steps": r.choice((1, 2, 5)),
        "batch_size": r.choice((None, 1, 2, 4)),
        "seed": r.choice((0, 1, 2**40)),
        "executor": r.choice(("loop", "loop", "vectorized", "threads", "auto")),
        "eval_every": r.choice((1, 2)),
        "on_nonfinite": r.choice(("error", "drop")),
        "progress": False,
    }
    if r.random() < 0.2:
        good["local_epochs"] = good.pop("local_steps")
    if r.random() < 0.2:
        good["weights"] = r.choice(
            ("uniform", "size", [1, 2, 3], [1e-320] * 3, [1e-300, 1, 1], [1e100, 1, 1])
        )
    if r.random() < 0.1:
        good |= {
            "schedule": r.choice(([([0], [0])] * 3, [([0], [])], [[0]], [([-1], [])], [([10**400], [])], ODD))
        }
        good["sampled"] = good["tracked"] = None
    if r.random() < 0.1:
        good["local_parameters"] = r.choice(("bias", ["weight"], "*", "0", ["BatchNorm1d", "bias"]))
    if r.random() < 0.1:
        good["eval_clients"] = r.choice((True, "epoch"))
    if r.random() < 0.1:
        good |= {"clip_norm": 1.0, "weight_decay": 0.1, "dropout": 0.5, "stragglers": 0.5}
    if r.random() < 0.15:
        codec = r.choice(("int8", "int4:3", "topk:0.5", "bfloat16", "means:2", "float32", "int9", "topk:2"))
        good["codec"] = r.choice(({"dx": codec}, {"dy": codec, "dx": "topk"}, f"dx={codec}", {"x": codec}))
    if r.random() < 0.1:
        good["aggregation"] = r.choice(("median", "mean", "trimmed:0.1", "trimmed:1", "trimmed:", "mode"))
    if r.random() < 0.1:
        clip = r.choice(
            ({"dx": 1.0}, {"dx": 0.1, "dy": 2}, {"correction": {"dy": 1}, "dx": 1}, {}, {"dx": ODD[0]})
        )
        good["privacy"] = r.choice(({"clip": clip, "noise": r.choice((0, 1.0, *ODD))}, {"clip": clip}, clip))
    if r.random() < 0.1:
        good["checkpoint"] = folder / "checkpoint"
        good["states"] = r.choice(("memory", "files", "auto"))
    for name in (*good, *OTHERS):
        if r.random() < odd / 6:
            called = name in ("callbacks", "executor")  # functions of one's own may fail as they like
            good[name] = r.choice([v for v in ODD if not called or not callable(v)])
    if r.random() < odd / 4:
        keys = ("down_mbps", "up_mbps", "seconds_per_step", "latency", "per_round")
        good["cost"] = CostModel(
            **{key: r.choice((*ODD, [1, 2], [1, "a"], [10**400])) for key in keys if r.random() < 0.4}
        )
    stop = good.get("callbacks", ())
    good["callbacks"] = [*stop, ends(3)] if isinstance(stop, (list, tuple)) else stop
    if good["callbacks"] is stop and not callable(stop):
        return good
    if isinstance(good.get("rounds"), int) and 1000 < good["rounds"] <= 2**53:
        good["rounds"] = 2
    return good


OTHERS = ("weights", "schedule", "target", "cost", "dtype", "device", "states", "callbacks", "resume")
OTHERS += (
    "local_epochs",
    "checkpoint_every",
    "checkpoint",
    "clip_norm",
    "weight_decay",
    "dropout",
    "stragglers",
)
OTHERS += (
    "deadline",
    "eval_clients",
    "local_parameters",
    "keep",
    "groups",
    "group_rounds",
    "codec",
    "aggregation",
    "privacy",
)


def ends(t: int) -> Callable[[Any], bool]:
    return lambda end: end.record.round >= t


def case(r: random.Random, shared: Path, folder: Path) -> str:
    import fadamgc

    odd = r.choice((0.05, 0.2, 0.5))
    which = r.random()
    if which < 0.12:
        return pieces(r)
    if which < 0.3:
        algorithm(r, odd)
        return "accepted"
    of = r.choice(("task", "algorithm", "settings"))
    learned = task(r, odd if of == "task" else 0.0)
    chosen = algorithm(r, odd if of == "algorithm" else 0.0)
    given = settings(r, odd if of == "settings" else 0.02, folder)
    if os.environ.get("FUZZ_SHOW"):
        print(learned, chosen, {k: v if k != "seed" else "..." for k, v in given.items()})
    if which < 0.4:
        given.pop("progress")
        runs = [{"seed": s} for s in range(r.choice((1, 2, 3)))]
        many: Any = runs if r.random() > odd / 4 else r.choice((*ODD, [{"seed": 0}, 1], [{"sead": 0}]))
        common = {key: value for key, value in given.items() if key not in ("seed", "checkpoint")}
        for name in ("workers", "errors"):
            if r.random() < odd / 4:
                common[name] = r.choice([v for v in ODD if not isinstance(v, int) or not 1 < v <= 2**53])
        fadamgc.simulate_many(many, algorithm=chosen, task=learned, progress=False, **common)
        return "accepted"
    run = fadamgc.simulate(chosen, learned, **given)
    repr(run)
    run.rounds_to(0.5)
    return "accepted"


def pieces(r: random.Random) -> str:
    """The functions that make data, models and prices."""
    import fadamgc
    from fadamgc import data
    from fadamgc.data.synthetic import linear_regression, quadratics

    def odd(*good: Any) -> Any:
        return r.choice(ODD) if r.random() < 0.3 else r.choice(good)

    labels = [0, 1, 2] * 5
    match r.randrange(8):
        case 0:
            data.dirichlet(odd(labels), odd(2, 3), odd(0.1, 1.0), odd(0, 1), min_size=odd(1, 2))
        case 1:
            data.iid(odd(labels, 20), odd(2, 3), odd(0, 1))
        case 2:
            data.shards(odd(labels), odd(2, 3), odd(0), odd(1, 2))
        case 3:
            data.natural(odd(labels, ["a", "b", "a"]))
        case 4:
            quadratics(odd(2, 3), odd(2, 5), odd(0), odd(10.0), odd(1.0))
        case 5:
            linear_regression(odd(2, 3), odd(2, 5), odd(10, (3, 5)), odd(0), odd(1.0), odd(0.1))
        case 6:
            fadamgc.CostModel(odd(1.0), odd(1.0, (1, 2)), odd(0.0), odd(0.0), odd("mean", "slowest"))
        case 7:
            fadamgc.models.mlp(odd(4), odd((3,), ()), odd(2), odd(0))
    return "accepted"


def prepare(shared: Path) -> None:
    """Nothing."""


TARGET = Target("arguments", prepare, case)
