"""Rules on vectors that are cut into pieces, rules that look alike, and bias correction."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import fadamgc
from fadamgc.algebra.local import LocalRule
from fadamgc.algorithm import Cohort
from fadamgc.fields import positive
from fadamgc.flower.config import nested
from fadamgc.sim.executors import inplace
from problems import EVEN, class_task

RUN: dict[str, Any] = {"rounds": 4, "local_steps": 3, "batch_size": 8, "progress": False}


class Nothing(NamedTuple):
    pass


@dataclass(frozen=True)
class ByLength(LocalRule):
    """The sign of the gradient, divided by the length of the vector's diagonal."""

    eta_l: float = positive(0.1)

    def start(self, x: Tensor) -> Nothing:
        return Nothing()

    def direction(self, moments: Nothing, x: Tensor, g: Tensor) -> tuple[Tensor, Nothing]:
        return g.sign() / x.numel() ** 0.5, moments


COMPOSITIONS = {
    "kept": fadamgc.compose(fadamgc.local.AdamW(bias_correction=True, m="keep"), "pre"),
    "shared": fadamgc.compose(fadamgc.local.Adam(bias_correction=True, m="share", v="share"), "pre"),
    "amsgrad": fadamgc.compose(fadamgc.local.Adam(amsgrad=True, bias_correction=True, v="share")),
    "diloco": fadamgc.DiLoCo(bias_correction=True),
    "by length": fadamgc.compose(ByLength()),
}


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_pieces_give_the_numbers_of_whole_vectors(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As for a model of millions of parameters; the states can be saved, and read back."""
    monkeypatch.setattr(inplace, "PIECE", 11)
    monkeypatch.setattr(inplace, "WIDE_PIECE", 13)
    algorithm, task = COMPOSITIONS[name], class_task(EVEN)
    options = {**RUN, "dtype": torch.float64}
    loop = fadamgc.simulate(algorithm, task, executor="loop", **options)
    fadamgc.simulate(
        algorithm, task, executor="threads", states="files", checkpoint=tmp_path, **options | {"rounds": 2}
    )
    pieces = fadamgc.simulate(
        algorithm, task, executor="threads", states="files", checkpoint=tmp_path, resume=True, **options
    )
    torch.testing.assert_close(pieces.x, loop.x, rtol=1e-12, atol=1e-14)
    for i in range(task.n):
        for mine, expected in zip(
            fadamgc.tree.leaves(pieces.clients[i]), fadamgc.tree.leaves(loop.clients[i]), strict=True
        ):
            torch.testing.assert_close(mine, expected, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", COMPOSITIONS)
def test_a_client_optimizer_on_a_long_vector(name: str) -> None:
    """Long enough to be cut into pieces."""
    algorithm, d = COMPOSITIONS[name], 300_000
    generator = torch.Generator().manual_seed(0)
    x, *gradients = (torch.randn(d, generator=generator, dtype=torch.float64) for _ in range(4))
    parameter = torch.nn.Parameter(x.clone())
    optimizer = fadamgc.ClientOptimizer([parameter], algorithm)
    server, client = algorithm.init_server(x), algorithm.init_client(x)
    down = algorithm.broadcast(server)
    optimizer.start_round(down)
    local = algorithm.begin(down, client)
    for g in gradients:
        parameter.grad = g.clone()
        optimizer.step()
        x, local = algorithm.step(down, client, local, x, g)
    torch.testing.assert_close(parameter.detach(), x, rtol=1e-12, atol=1e-14)


def test_a_shared_maximum_is_corrected_once() -> None:
    """With gradients of 1, corrected v and v_hat are 1 in all rounds, wherever they live."""
    for home in ("keep", "share"):
        algorithm = fadamgc.compose(fadamgc.local.Adam(amsgrad=True, bias_correction=True, v=home))
        x = torch.zeros(2, dtype=torch.float64)
        server, client = algorithm.init_server(x), algorithm.init_client(x)
        for t in range(1, 31):
            down = algorithm.broadcast(server)
            local, x = algorithm.begin(down, client), down.x
            for _ in range(2):
                x, local = algorithm.step(down, client, local, x, torch.ones(2, dtype=torch.float64))
            client, up = algorithm.finish(down, client, local, x, 2, True)
            server = algorithm.aggregate(server, up, Cohort(n=1, S=1, K=2, t=t))
            torch.testing.assert_close(local.moments.v.v_hat, torch.ones(2, dtype=torch.float64))
        torch.testing.assert_close(server.x, torch.full((2,), -0.06, dtype=torch.float64), rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_bias_correction_of_16_bit_parameters(dtype: torch.dtype) -> None:
    """As torch's AdamW: parameters move, and those without a gradient stay."""
    algorithm = fadamgc.compose(
        fadamgc.local.AdamW(0.1, bias_correction=True, beta2=0.999, eps=1e-4, weight_decay=0.0)
    )
    parameter = torch.nn.Parameter(torch.tensor([1.0, 1.0], dtype=dtype))
    optimizer = fadamgc.ClientOptimizer([parameter], algorithm)
    optimizer.start_round(algorithm.broadcast(algorithm.init_server(parameter.detach().clone())))
    for k in range(400):
        parameter.grad = torch.tensor([1.0, 0.0], dtype=dtype)
        optimizer.step()
        if k == 300:
            optimizer.load_state_dict(optimizer.state_dict())
    assert parameter[1] == 1
    assert parameter[0] < -20


def powers() -> list[Any]:
    rules = []
    for power in (1.0, 0.3):

        @dataclass(frozen=True)
        class Power(LocalRule):
            eta_l: float = positive(0.1)

            def start(self, x: Tensor) -> Nothing:
                return Nothing()

            def direction(
                self, moments: Nothing, x: Tensor, g: Tensor, power: float = power
            ) -> tuple[Tensor, Nothing]:
                return g.sign() * g.abs() ** power, moments

        rules.append(Power())
    return rules


@dataclass(frozen=True)
class Shown(LocalRule):
    eta_l: float = positive(0.1)
    power: str = field(default="1.0", repr=False)

    def start(self, x: Tensor) -> Nothing:
        return Nothing()

    def direction(self, moments: Nothing, x: Tensor, g: Tensor) -> tuple[Tensor, Nothing]:
        return g.sign() * g.abs() ** float(self.power), moments


@pytest.mark.slow
@pytest.mark.parametrize("rules", [powers(), [Shown(), Shown(power="0.3")]], ids=["classes", "fields"])
def test_rules_that_look_alike_are_not_mixed_up(rules: list[Any]) -> None:
    assert repr(rules[0]) == repr(rules[1])
    runs = [{"algorithm": fadamgc.compose(rule)} for rule in rules]
    options = {**RUN, "task": class_task(EVEN), "executor": "vectorized"}
    together = fadamgc.simulate_many(runs, **options)
    for arguments, run in zip(runs, together, strict=True):
        assert torch.equal(run.x, fadamgc.simulate(**arguments, **options).x)
    assert not torch.equal(together[0].x, together[1].x)


@pytest.mark.parametrize("order", [1, -1])
def test_a_table_and_a_value_of_one_name_are_refused(order: int) -> None:
    pairs = [("local.rule", "adam"), ("local", "sgd")][::order]
    with pytest.raises(fadamgc.InputError, match="give one of them"):
        nested(dict(pairs))
