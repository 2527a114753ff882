"""Compositions: equal to the literal methods, and algorithms like any other."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import pytest
import torch
from torch import Tensor

import fadamgc
from fadamgc import compose, correction, local, server
from fadamgc.algebra.compose import Composition, Parts
from fadamgc.algebra.correction import Correction, Tracking, TrackingUp
from fadamgc.algebra.local import LocalRule
from fadamgc.algebra.server import ServerRule
from fadamgc.fields import choice, nonnegative, positive
from fadamgc.sim.executors.trace import liftable
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


@pytest.mark.parametrize(
    ("name", "executor"),
    [
        *((name, "loop") for name in EQUAL),
        *(pytest.param(n, e, marks=pytest.mark.slow) for n in EQUAL for e in ("vectorized", "threads")),
    ],
)
def test_compositions_are_the_literal_methods_to_the_bit(name, executor):
    literal, composed = EQUAL[name]
    one, other = (simulate(algo, class_task(), executor=executor) for algo in (literal, composed))
    assert torch.equal(one.x, other.x)
    assert [r.bytes_up for r in one.history] == [r.bytes_up for r in other.history]
    assert [r.bytes_down for r in one.history] == [r.bytes_down for r in other.history]


def test_scaffold_is_sgd_with_gradient_correction_to_rounding():
    # SCAFFOLD computes the mean gradient from the way that the client went, SCAFFOLD-M adds y_i before y.
    options = {"dtype": torch.float64, "executor": "loop", "rounds": 5}
    composed = simulate(compose(local.SGD(0.2), "pre"), class_task(), **options)
    for literal in (fadamgc.Scaffold(eta_l=0.2), fadamgc.ScaffoldM(eta_l=0.2, beta=1.0)):
        run = simulate(literal, class_task(), **options)
        torch.testing.assert_close(composed.x, run.x, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(composed.server.correction.y, run.server.y, rtol=1e-9, atol=1e-11)


# Plain data.


def test_a_composition_is_plain_data_and_back():
    for algorithm in (
        *(pair[1] for pair in EQUAL.values()),
        compose(local.SGD(), "pre+direction", alpha=0.3),
    ):
        assert fadamgc.make_algorithm("compose", **algorithm.plain()) == algorithm


def test_factors_by_name_with_the_step_sizes_next_to_them():
    algorithm = fadamgc.make_algorithm(
        "compose",
        local={"rule": "lion", "m": "keep"},
        correction="direction",
        alpha=0.4,
        eta_l=0.5,
        eta_g=2.0,
    )
    assert algorithm == compose(
        local.Lion(0.5, m="keep"), correction.Direction(alpha=0.4), server.Average(2.0)
    )
    assert (algorithm.eta_l, algorithm.eta_g) == (0.5, 2.0)
    assert algorithm.replace(eta_l=0.1).local.eta_l == 0.1
    assert algorithm.title == "Lion (m keep) x direction x Average"


def test_titles_say_what_a_composition_is():
    assert compose().title == "SGD x none x Average"
    assert compose(AMSGRAD, "pre", server.Yogi()).title == "AMSGrad (m reset, v keep) x pre x Yogi"
    assert compose(local.AdamW(amsgrad=True)).title == "AMSGradW (m reset, v keep) x none x Average"


# What is refused.

REFUSED = {
    "a class": (lambda: compose(local.Adam), r"local=Adam is a class; make an instance: Adam\(\)"),
    "another kind": (lambda: compose(server.Adam()), r"local=Adam\(.* is not a LocalRule; there are fadamgc"),
    "a number": (
        lambda: compose(server=1.0),
        r"server=1.0 is not a ServerRule; there are fadamgc.server.Average",
    ),
    "unknown correction": (
        lambda: compose(correction="prae"),
        r"correction rule 'prae' is not known; did you mean 'pre'\?; known are none, pre, post",
    ),
    "no correction": (lambda: compose(correction=None), "correction=None is not a Correction"),
    "post with share": (
        lambda: compose(local.Adam(v="share"), "post"),
        "correction='post' with v='share' is not accepted: .* use v='keep', or correction='pre'",
    ),
    "direction without averaging": (
        lambda: compose(local.SGD(), "direction", server.Adam()),
        "correction='direction' with server=Adam is not accepted: .* use server=fadamgc.server.Average",
    ),
    "alpha without direction": (
        lambda: compose(local.SGD(), "pre", alpha=0.1),
        "alpha=0.1 is not accepted: correction='pre' has no alpha",
    ),
    "alpha out of range": (
        lambda: compose(local.SGD(), "direction", alpha=2),
        "Direction.alpha=2 is not accepted",
    ),
    "home": (lambda: local.Adam(m="server"), "Adam.m='server' is not accepted; it must be one of 'reset'"),
    "eta_l": (lambda: local.SGD(eta_l=-1), "SGD.eta_l=-1 is not accepted"),
    "no rule": (
        lambda: fadamgc.make_algorithm("compose", local={"eta_l": 0.1}),
        "local needs the key 'rule'; known are sgd, momentum",
    ),
    "unknown rule": (
        lambda: fadamgc.make_algorithm("compose", server={"rule": "adan"}),
        r"server rule 'adan' is not known; did you mean 'adam'\?",
    ),
    "unknown field": (
        lambda: fadamgc.make_algorithm("compose", local={"rule": "adam", "beta_1": 0.5}),
        r"local rule adam has no setting 'beta_1'; did you mean 'beta1'\?; it has eta_l",
    ),
    "unknown setting": (
        lambda: fadamgc.make_algorithm("compose", locl="sgd"),
        r"compose has no setting 'locl'; did you mean 'local'\?; it has local, correction, server",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_a_composition_that_makes_no_sense_is_refused(name):
    make, message = REFUSED[name]
    with pytest.raises(fadamgc.InputError, match=message):
        make()


# Custom factors: one small class each.


class Sums(NamedTuple):
    v: Tensor


@dataclass(frozen=True)
class Normalised(LocalRule):
    """The gradient divided by the largest one so far."""

    eta_l: float = positive(0.1)
    v: str = choice("keep", "reset", "share")

    def start(self, x):
        return Sums(torch.zeros_like(x))

    def direction(self, moments, x, g):
        v = torch.maximum(moments.v, g.abs())
        return g / (v + 1e-3), Sums(v)


@dataclass(frozen=True)
class Weaker(Correction):
    """Gradients that lose weight where the model has gone far."""

    title: ClassVar[str] = "weaker"
    rate: float = nonnegative(1.0)

    def before(self, down, client, local, x, g):
        return g / (1 + self.rate * (x - down.x).abs()), local


@dataclass(frozen=True)
class Halved(ServerRule):
    """Half of the way."""

    def step(self, state, x, D):
        return x + 0.5 * self.eta_g * D, state


@pytest.mark.parametrize("home", ["keep", "reset", "share"])
def test_custom_factors_run_everywhere(home, tmp_path):
    algorithm = compose(Normalised(v=home), Weaker(), Halved())
    assert algorithm.title == f"Normalised (v {home}) x weaker x Halved"
    task, options = class_task(), {"dtype": torch.float64}
    runs = [simulate(algorithm, task, executor=e, **options) for e in ("loop", "vectorized", "threads")]
    for run in runs[1:]:
        torch.testing.assert_close(run.x, runs[0].x, rtol=1e-11, atol=1e-12)
    simulate(algorithm, task, rounds=1, checkpoint=tmp_path / "c", executor="loop", **options)
    resumed = simulate(algorithm, task, checkpoint=tmp_path / "c", resume=True, executor="loop", **options)
    assert torch.equal(resumed.x, runs[0].x)


def test_a_rule_without_a_field_for_its_moment_is_refused():
    @dataclass(frozen=True)
    class Homeless(LocalRule):
        def start(self, x):
            return Sums(x)

        def direction(self, moments, x, g):
            return g, moments

    with pytest.raises(
        fadamgc.InputError, match="Homeless.v=None is not accepted; the moment 'v' needs a field"
    ):
        compose(Homeless())

    @dataclass(frozen=True)
    class Loose(LocalRule):
        def start(self, x):
            return x

        def direction(self, moments, x, g):
            return g, moments

    with pytest.raises(fadamgc.InputError, match="it must be a NamedTuple of moments"):
        compose(Loose())


# Sweeps: numbers of factors are inputs of one graph.


def test_numbers_of_factors_are_lifted():
    names = liftable(compose(local.Adam(amsgrad=True), "pre+direction"))
    assert {"local.eta_l", "local.beta1", "local.beta2", "correction.alpha", "server.eta_g"} <= set(names)
    assert "local.eps" not in names  # the rule looks at it


def test_many_compositions_at_once_are_the_same_runs_alone():
    algorithms = [
        compose(local.Adam(eta_l=eta_l, beta1=beta1), "pre", server.Average(eta_g))
        for eta_l, beta1, eta_g in ((1e-3, 0.9, 1.0), (0.05, 0.5, 0.7))
    ]
    task, options = class_task(), {"rounds": 3, "local_steps": 3, "batch_size": 4, "executor": "vectorized"}
    many = fadamgc.simulate_many([{"algorithm": a} for a in algorithms], task=task, progress=False, **options)
    for algorithm, run in zip(algorithms, many, strict=True):
        assert torch.equal(run.x, fadamgc.simulate(algorithm, task, progress=False, **options).x)


# Custom rules that are not right.


@dataclass(frozen=True)
class OnlyD(LocalRule):
    def direction(self, moments, x, g):
        return g


@dataclass(frozen=True)
class Shorter(LocalRule):
    def direction(self, moments, x, g):
        return g[:-1], moments


class NoDataclass(LocalRule):
    beta: float = positive(0.9)

    def direction(self, moments, x, g):
        return g * self.beta, moments


@dataclass(frozen=True)
class OnlyX(ServerRule):
    def step(self, state, x, D):
        return x + D


@dataclass(frozen=True)
class OnlyG(Correction):
    def before(self, down, client, local, x, g):
        return g


@dataclass(frozen=True)
class ShorterD(Correction):
    def after(self, down, client, local, d):
        return d[:-1]


@dataclass(frozen=True)
class NoMessage(Correction):
    def finish(self, down, client, local, x, K, eta_l, tracked):
        return client


@dataclass(frozen=True)
class AlwaysSends(correction.Pre):
    def finish(self, down, client, local, x, K, eta_l, tracked):
        y = local.g_sum / K
        return Tracking(y), TrackingUp(y - client.y)


@dataclass(frozen=True)
class OnlyIfTracked(correction.Pre):
    def finish(self, down, client, local, x, K, eta_l, tracked):
        return super().finish(down, client, local, x, K, eta_l, tracked) if tracked else (client, None)


@dataclass(frozen=True)
class NoState(Correction):
    def aggregate(self, server, total, D, cohort, eta_l):
        return D


@dataclass(frozen=True)
class Named(Composition):
    """A composition under a name of its own, whose factors do not fit."""

    title: ClassVar[str] = "Named"
    eta_l: float = positive(0.1)
    correction: str = choice("post", "direction")

    def parts(self):
        if self.correction == "post":
            return Parts(local.Adam(v="share"), correction.Post(), server.Average())
        return Parts(local.SGD(), correction.Direction(), server.Adam())


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: compose(correction=OnlyG()), r"OnlyG\.before must return the corrected gradient"),
        (lambda: compose(correction=ShorterD()), r"ShorterD\.after must return .* of the same types and"),
        (lambda: compose(correction=NoMessage()), r"NoMessage\.finish must return the client's new state"),
        (
            lambda: compose(correction=AlwaysSends()),
            r"AlwaysSends\.finish returns a message .* tracked=False",
        ),
        (lambda: compose(correction=AlwaysSends(init="gradient")), "a message that is not zero"),
        (lambda: compose(correction=OnlyIfTracked()), r"OnlyIfTracked\.finish must return the client's new"),
        (lambda: compose(correction=NoState()), r"NoState\.aggregate must return the server's new state"),
        (lambda: Named(), "correction='post' with v='share' is not accepted"),
        (lambda: Named(correction="direction"), "correction='direction' with server=Adam is not accepted"),
        (lambda: fadamgc.compose(OnlyD()), r"OnlyD\.direction must return the direction"),
        (lambda: fadamgc.compose(Shorter()), "of the same types and shapes"),
        (lambda: fadamgc.compose(NoDataclass()), r"write @dataclass\(frozen=True\) above the class"),
        (lambda: fadamgc.compose(server=OnlyX()), r"OnlyX\.step must return the new x and the new state"),
        (lambda: fadamgc.compose().replace(beta=1.0), "a composition has no 'beta'"),
        (lambda: fadamgc.compose(correction="pre").replace(alpha=0.5), "has no alpha"),
        (lambda: fadamgc.make_algorithm("compose", local={"rule": "sgd", 3: 1}), "has no setting '3'"),
        (lambda: fadamgc.register("x", fadamgc.local.SGD()), "or a rule of a composition from"),
        (lambda: fadamgc.make_algorithm("compose", local="json:dumps"), "is not a class of LocalRule"),
    ],
)
def test_rules_that_are_not_right_are_refused(make, message):
    with pytest.raises(fadamgc.InputError, match=message):
        make()


def test_alpha_is_replaced():
    algo = fadamgc.compose(correction="direction", alpha=0.3)
    assert algo.replace(alpha=0.5) == fadamgc.compose(correction="direction", alpha=0.5)


@pytest.mark.slow
def test_a_rule_of_ones_own_is_named_by_its_module(tmp_path, monkeypatch):
    (tmp_path / "my_rules_of_mine.py").write_text(
        "from dataclasses import dataclass\n"
        "from fadamgc.algebra.local import LocalRule\n"
        "@dataclass(frozen=True)\n"
        "class Half(LocalRule):\n"
        "    def direction(self, moments, x, g):\n"
        "        return g / 2, moments\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.path", list(sys.path))
    algo = fadamgc.make_algorithm("compose", local={"rule": "my_rules_of_mine:Half", "eta_l": 0.2})
    assert algo.plain()["local"] == {"rule": "my_rules_of_mine:Half", "eta_l": 0.2}
    assert fadamgc.make_algorithm("compose", **algo.plain()) == algo
    task = class_task()
    fadamgc.simulate(algo, task, rounds=1, checkpoint=tmp_path / "c", progress=False)
    assert fadamgc.load_run(tmp_path / "c").algorithm == algo


@pytest.mark.slow
def test_another_number_of_a_rule_is_named_when_a_run_does_not_continue(tmp_path):
    options = {"checkpoint": tmp_path, "resume": True, "progress": False}
    fadamgc.simulate(fadamgc.compose(fadamgc.local.Adam(0.1)), class_task(), rounds=1, **options)
    with pytest.raises(fadamgc.OtherRunError, match=r"hyperparameters\.local\.eta_l=0\.1 there"):
        fadamgc.simulate(fadamgc.compose(fadamgc.local.Adam(0.2)), class_task(), rounds=2, **options)
