"""Compositions: equal to the literal methods, and algorithms like any other."""

from __future__ import annotations

import pytest
import torch

import fadamgc
from fadamgc import compose, correction, local, server
from problems import class_task
from short_runs import simulate

AMSGRAD = local.Adam(eta_l=2e-3, amsgrad=True, m="reset", v="keep")
EQUAL = {
    "FedAvg": (fadamgc.FedAvg(eta_l=0.2, eta_g=0.7), compose(local.SGD(0.2), "none", server.Average(0.7))),
    "FedAdam": (fadamgc.FedAdam(eta_l=0.2), compose(local.SGD(0.2), "none", server.Adam())),
    "FedAdam-bias": (
        fadamgc.FedAdam(eta_l=0.2, bias_correction=True, v0=0.0),
        compose(local.SGD(0.2), "none", server.Adam(bias_correction=True, v0=0.0)),
    ),
    "FedAMS": (fadamgc.FedAMS(eta_l=0.2), compose(local.SGD(0.2), "none", server.AMSGrad())),
    "FedAMS-amsgrad": (
        fadamgc.FedAMS(eta_l=0.2, option="amsgrad"),
        compose(local.SGD(0.2), "none", server.AMSGrad(option="amsgrad")),
    ),
    "LocalAdam": (fadamgc.LocalAdam(eta_l=2e-3), compose(AMSGRAD)),
    "FAdamGC": (fadamgc.FAdamGC(eta_l=2e-3, eta_g=0.8), compose(AMSGRAD, "pre", server.Average(0.8))),
    "FAdamGC-gradient": (
        fadamgc.FAdamGC(eta_l=2e-3, init="gradient"),
        compose(AMSGRAD, correction.Pre(init="gradient")),
    ),
    "FA-NT": (fadamgc.FANT(eta_l=2e-3), compose(AMSGRAD, "post")),
    "FedAvg-M": (fadamgc.FedAvgM(eta_l=0.2, beta=0.3), compose(local.SGD(0.2), "direction", alpha=0.3)),
}


@pytest.mark.parametrize("executor", ["loop", "vectorized", "threads"])
@pytest.mark.parametrize("name", EQUAL)
def test_compositions_are_the_literal_methods_to_the_bit(name, executor):
    literal, composed = EQUAL[name]
    one, other = (simulate(algo, class_task(), executor=executor) for algo in (literal, composed))
    assert torch.equal(one.x, other.x)
    assert [r.bytes_up for r in one.history] == [r.bytes_up for r in other.history]
    assert [r.bytes_down for r in one.history] == [r.bytes_down for r in other.history]
