"""The values of the local rules: next to torch.optim, and by hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop

from fadamgc import local
from fadamgc.algebra.local import LocalRule

STEPS = 20
GENERATOR = torch.Generator().manual_seed(0)
X = torch.randn(6, generator=GENERATOR, dtype=torch.float64)
GRADIENTS = list(torch.randn(STEPS, 6, generator=GENERATOR, dtype=torch.float64))
BETAS = {"beta1": 0.8, "beta2": 0.95}
TORCH_BETAS = {"betas": (0.8, 0.95)}

# eps is large, so that its place and its size are seen.
Make = Callable[[list[Any]], Optimizer]
RULES: dict[str, tuple[LocalRule, Make]] = {
    "sgd": (local.SGD(0.1), lambda p: SGD(p, 0.1)),
    "momentum": (local.Momentum(0.1, beta=0.8), lambda p: SGD(p, 0.1, momentum=0.8)),
    "nesterov": (
        local.Momentum(0.1, beta=0.8, nesterov=True),
        lambda p: SGD(p, 0.1, momentum=0.8, nesterov=True),
    ),
    "adagrad": (local.AdaGrad(0.1, eps=0.2), lambda p: Adagrad(p, 0.1, eps=0.2)),
    "rmsprop": (local.RMSProp(0.1, beta2=0.9, eps=0.2), lambda p: RMSprop(p, 0.1, alpha=0.9, eps=0.2)),
    "adam": (
        local.Adam(0.1, eps=0.2, bias_correction=True, **BETAS),
        lambda p: Adam(p, 0.1, eps=0.2, **TORCH_BETAS),
    ),
    "adam without bias correction": (
        local.Adam(0.1, eps=0.2, **BETAS),
        lambda p: late(Adam(p, 0.1, eps=0.2, **TORCH_BETAS)),
    ),
    "amsgrad without bias correction": (
        local.Adam(0.1, eps=0.2, amsgrad=True, **BETAS),
        lambda p: late(Adam(p, 0.1, eps=0.2, amsgrad=True, **TORCH_BETAS)),
    ),
    "adamw": (
        local.AdamW(0.1, eps=0.2, bias_correction=True, weight_decay=0.3, **BETAS),
        lambda p: AdamW(p, 0.1, eps=0.2, weight_decay=0.3, **TORCH_BETAS),
    ),
    "amsgradw without bias correction": (
        local.AdamW(0.1, eps=0.2, amsgrad=True, weight_decay=0.3, **BETAS),
        lambda p: late(AdamW(p, 0.1, eps=0.2, weight_decay=0.3, amsgrad=True, **TORCH_BETAS)),
    ),
    "adam with L2": (
        local.AdamW(0.1, eps=0.2, bias_correction=True, weight_decay=0.3, decoupled=False, **BETAS),
        lambda p: Adam(p, 0.1, eps=0.2, weight_decay=0.3, **TORCH_BETAS),
    ),
}


def late(optimizer: Optimizer) -> Optimizer:
    """Put an optimizer of torch at a step whose bias correction is 1, with moments of zero."""
    for p in optimizer.param_groups[0]["params"]:
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")
        optimizer.state[p] = {"step": torch.tensor(1e6), **{name: torch.zeros_like(p) for name in names}}
    return optimizer


def trajectory(rule: LocalRule, gradients: list[Tensor] = GRADIENTS) -> Tensor:
    x, moments, xs = X, rule.start(X), []
    for g in gradients:
        d, moments = rule.direction(moments, x, g)
        x = x - rule.eta_l * d
        xs.append(x)
    return torch.stack(xs)


@pytest.mark.parametrize("name", RULES)
def test_a_rule_takes_the_steps_of_torch(name: str) -> None:
    rule, make = RULES[name]
    parameter = torch.nn.Parameter(X.clone())
    optimizer, xs = make([parameter]), []
    for g in GRADIENTS:
        parameter.grad = g.clone()
        optimizer.step()
        xs.append(parameter.detach().clone())
    torch.testing.assert_close(trajectory(rule), torch.stack(xs), rtol=1e-12, atol=1e-14)


def test_sign_by_hand() -> None:
    d, _ = local.Sign().direction(local.Sign().start(X), X, torch.tensor([3.0, -0.5, 0.0]))
    assert d.tolist() == [1.0, -1.0, 0.0]


def test_lion_by_hand() -> None:
    """beta1 = 1/2, beta2 = 3/4, gradients 4, -2, -1 and a coordinate with the opposite signs.

    Step 1: c = 2              > 0 ; m = 1
    Step 2: c = 1/2 - 1        < 0 ; m = 3/4 - 1/2 = 1/4 (with beta1 in its place m = -1/2)
    Step 3: c = 1/8 - 1/2      < 0 ; m = 3/16 - 1/4 = -1/16
    Step 4, gradient 1/8: c = -1/32 + 1/16 > 0
    """
    rule = local.Lion(eta_l=0.5, beta1=0.5, beta2=0.75)
    gradients = [torch.tensor([g, -g], dtype=torch.float64) for g in (4.0, -2.0, -1.0, 0.125)]
    moments, signs, ms = rule.start(gradients[0]), [], []
    for g in gradients:
        d, moments = rule.direction(moments, g, g)
        signs.append(d.tolist())
        ms.append(moments.m.tolist())
    assert signs == [[1, -1], [-1, 1], [-1, 1], [1, -1]]
    assert ms == [[m, -m] for m in (1.0, 0.25, -0.0625, -0.015625)]


@pytest.mark.parametrize("cls", [local.AdaGrad, local.RMSProp, local.Adam, local.AdamW])
def test_a_coordinate_without_gradients_does_not_move_with_eps_0(cls: type[Any]) -> None:
    options = {"weight_decay": 0.0} if cls is local.AdamW else {}
    gradients = [torch.cat([g[:-1], g.new_zeros(1)]) for g in GRADIENTS]
    xs = trajectory(cls(0.1, eps=0.0, **options), gradients)
    assert torch.isfinite(xs).all()
    assert (xs[:, -1] == X[-1]).all()
    assert (xs[-1, :-1] != X[:-1]).all()
