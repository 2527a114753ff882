"""The package's further methods against the transcription of their update rules, in float64.

Only x after every round is compared: how a method stores its state is its own affair.
"""

import dataclasses
import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from test_transcription import ATOL, FULL, PARTIAL, RTOL, SCHEDULES, K, make_problem, make_task
from test_transcription import CASES as PAPER

import fadamgc
import transcription_zoo
from fadamgc import compose, local
from fadamgc.federation.sampling import draw_steps
from fadamgc.methods import algorithm_class
from transcription import Problem, Result, Schedule, Steps


def amsgrad_pre_direction(eta_l: float, alpha: float, eta_g: float = 1.0, **moments: Any) -> Any:
    rule = local.Adam(eta_l, amsgrad=True, m="reset", v="keep", **moments)
    return compose(rule, "pre+direction", fadamgc.server.Average(eta_g), alpha)


def adam_shared_pre(eta_l: float, eta_g: float = 1.0, **moments: Any) -> Any:
    rule = local.Adam(eta_l, m="share", v="share", **moments)
    return compose(rule, "pre", fadamgc.server.Average(eta_g))


def momentum_direction(eta_l: float, alpha: float, eta_g: float = 1.0, **momentum: Any) -> Any:
    rule = local.Momentum(eta_l, m="keep", **momentum)
    return compose(rule, "direction", fadamgc.server.Average(eta_g), alpha)


# Compositions without a class of their own, by the names of their transcriptions.
PRODUCTS: dict[str, Callable[..., Any]] = {
    "amsgrad_pre_direction": amsgrad_pre_direction,
    "adam_shared_pre": adam_shared_pre,
    "momentum_direction": momentum_direction,
}


@dataclass(frozen=True)
class Case:
    """One method with one set of options, in the package's name and in the transcription's.

    ``cls`` is a class of the package, or a key of ``PRODUCTS``.
    """

    name: str
    cls: str
    function: str
    options: dict[str, Any]
    full_only: bool = False
    by_round: bool = False  # the transcription expects the number of steps of each round

    def by_hand(self, problem: Problem, schedule: Schedule, K: Steps = K) -> Result:
        return self.call(getattr(transcription_zoo, self.function), problem, schedule, K)

    def call(
        self, function: Callable[..., Result], problem: Problem, schedule: Schedule, K: Steps = K
    ) -> Result:
        if self.by_round:  # the coin of each round, which all clients share
            K = [draw_steps(0, t, self.options["p"]) for t in range(1, len(schedule) + 1)]
        return function(problem, schedule, K, **self.options)

    def algorithm(self) -> Any:
        make = PRODUCTS.get(self.cls) or getattr(fadamgc, self.cls)
        return make(**self.options)


# "defaults" omits the hyperparameters whose default is settled; the others are given in every case.
SGD = {"eta_l": 0.08, "eta_g": 0.8}
SERVER = {"eta_l": 0.08, "eta_g": 0.1, "beta1": 0.8, "tau": 0.01}
MOMENTS = {"eta_l": 0.05, "eta_g": 0.8, "beta1": 0.8, "beta2": 0.95}
ADAMW = MOMENTS | {"alpha": 0.3, "eps": 1e-3, "weight_decay": 0.1}
DILOCO = MOMENTS | {"eta_g": 0.6, "mu": 0.5, "eps": 1e-3, "weight_decay": 0.1}
MOMENTUM = {"eta_l": 0.03, "eta_g": 0.8, "alpha": 0.4, "beta": 0.6}


def product(name: str, options: dict[str, Any]) -> Case:
    function = name.partition("-")[0]
    return Case(name, function, function, options)


CASES = [
    Case("fedprox-defaults", "FedProx", "fedprox", {"eta_l": 0.08, "mu": 0.1}),
    Case("fedprox", "FedProx", "fedprox", SGD | {"mu": 1.5}),
    Case("fedprox-mu=0", "FedProx", "fedprox", SGD | {"mu": 0.0}),
    Case("feddyn", "FedDyn", "feddyn", {"eta_l": 0.08, "alpha": 0.5}),
    Case("feddyn-small-alpha", "FedDyn", "feddyn", {"eta_l": 0.03, "alpha": 0.01}),
    Case("feddc", "FedDC", "feddc", {"eta_l": 0.08, "alpha": 0.5}),
    Case("feddc-small-alpha", "FedDC", "feddc", {"eta_l": 0.03, "alpha": 0.01}),
    Case("fednova-defaults", "FedNova", "fednova", {"eta_l": 0.08}),
    Case("fednova", "FedNova", "fednova", SGD | {"rho": 0.0}),
    Case("fednova-momentum", "FedNova", "fednova", SGD | {"rho": 0.6}),
    Case("server_momentum-defaults", "ServerMomentum", "server_momentum", {"eta_l": 0.08, "beta": 0.9}),
    Case("server_momentum", "ServerMomentum", "server_momentum", SGD | {"beta": 0.6}),
    Case(
        "server_momentum-nesterov",
        "ServerMomentum",
        "server_momentum",
        SGD | {"beta": 0.6, "nesterov": True},
    ),
    Case("fedadagrad-defaults", "FedAdagrad", "fedadagrad", {"eta_l": 0.08, "eta_g": 0.1, "beta1": 0.9}),
    Case("fedadagrad", "FedAdagrad", "fedadagrad", SERVER | {"tau": 0.2}),
    Case("fedadagrad-beta1=0", "FedAdagrad", "fedadagrad", SERVER | {"beta1": 0.0}),
    Case("fedyogi-defaults", "FedYogi", "fedyogi", {"eta_l": 0.08, "eta_g": 0.1}),
    Case("fedyogi", "FedYogi", "fedyogi", SERVER | {"beta2": 0.7}),
    Case("fedyogi-large-tau", "FedYogi", "fedyogi", SERVER | {"beta2": 0.7, "tau": 0.5, "eta_g": 0.5}),
    Case("fedexp-small-eps", "FedExP", "fedexp", {"eta_l": 0.08, "eps": 1e-3}),
    Case("fedexp", "FedExP", "fedexp", {"eta_l": 0.15, "eps": 0.01}),
    Case("fedacg-defaults", "FedACG", "fedacg", {"eta_l": 0.04, "beta": 0.01}),
    Case("fedacg", "FedACG", "fedacg", {"eta_l": 0.08, "lam": 0.5, "beta": 0.7}),
    Case("scaffnew", "Scaffnew", "scaffnew", {"eta_l": 0.08}, full_only=True),
    Case("scaffnew-p", "Scaffnew", "scaffnew", {"eta_l": 0.08, "p": 0.4}, full_only=True, by_round=True),
    Case("scaffold_local-defaults", "ScaffoldLocal", "scaffold_local", {"eta_l": 0.08}, full_only=True),
    Case("scaffold_local", "ScaffoldLocal", "scaffold_local", SGD, full_only=True),
    Case("fedlada-defaults", "FedLADA", "fedlada", {"eta_l": 0.05, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3}),
    Case("fedlada", "FedLADA", "fedlada", MOMENTS | {"alpha": 0.4, "eps": 0.1}),
    Case("fedlada-alpha=1", "FedLADA", "fedlada", MOMENTS | {"alpha": 1.0, "eps": 0.5}),
    Case("fedkeel-defaults", "FedKeel", "fedkeel", {"eta_l": 0.05, "alpha": 0.4, "eps": 1e-3}),
    Case("fedkeel", "FedKeel", "fedkeel", MOMENTS | {"alpha": 0.4, "eps": 0.1}),
    Case("fedkeel-gradient", "FedKeel", "fedkeel", MOMENTS | {"alpha": 0.4, "eps": 0.1, "init": "gradient"}),
    Case("fedlalr-defaults", "FedLALR", "fedlalr", {"eta_l": 0.05, "beta1": 0.9, "beta2": 0.99}),
    Case("fedlalr", "FedLALR", "fedlalr", MOMENTS),
    Case("fedlalr-eps", "FedLALR", "fedlalr", MOMENTS | {"eps": 0.3}),
    Case("fedadamw", "FedAdamW", "fedadamw", ADAMW | {"second_moment": "blocks"}),
    Case("fedadamw-full", "FedAdamW", "fedadamw", ADAMW | {"second_moment": "full"}),
    Case(
        "fedadamw-small-eps",
        "FedAdamW",
        "fedadamw",
        ADAMW | {"alpha": 0.0, "beta2": 0.999, "eps": 1e-8, "weight_decay": 0.0, "second_moment": "full"},
    ),
    Case("diloco", "DiLoCo", "diloco", DILOCO | {"bias_correction": False}),
    Case("diloco-bias", "DiLoCo", "diloco", DILOCO | {"bias_correction": True}),
    Case(
        "diloco-defaults",
        "DiLoCo",
        "diloco",
        {"eta_l": 0.02, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.01}
        | {"bias_correction": True},
    ),
    Case("fedlion-defaults", "FedLion", "fedlion", {"eta_l": 0.05, "beta1": 0.9, "beta2": 0.99}),
    Case("fedlion", "FedLion", "fedlion", MOMENTS | {"beta1": 0.6, "beta2": 0.7}),
    Case("fedmuon_sign-defaults", "FedMuonSign", "fedmuon_sign", {"eta_l": 0.05, "alpha": 0.1}),
    Case("fedmuon_sign", "FedMuonSign", "fedmuon_sign", {"eta_l": 0.05, "eta_g": 0.8, "alpha": 0.6}),
    Case(
        "mimelite-defaults",
        "MimeLite",
        "mimelite",
        {"eta_l": 0.001, "beta1": 0.9, "beta2": 0.99, "eps": 1e-3},
    ),
    Case("mimelite", "MimeLite", "mimelite", MOMENTS | {"eps": 0.2}),
    product("amsgrad_pre_direction-defaults", {"eta_l": 0.05, "alpha": 0.1}),
    product("amsgrad_pre_direction", MOMENTS | {"alpha": 0.7, "eps": 0.1}),
    product("amsgrad_pre_direction-eps=0", MOMENTS | {"alpha": 0.4, "eps": 0.0}),
    product("adam_shared_pre-defaults", {"eta_l": 0.02}),
    product("adam_shared_pre", MOMENTS | {"eps": 0.1}),
    product("adam_shared_pre-bias", MOMENTS | {"eps": 0.1, "bias_correction": True}),
    product("momentum_direction-defaults", {"eta_l": 0.02, "alpha": 0.1}),
    product("momentum_direction", MOMENTUM),
    product("momentum_direction-nesterov", MOMENTUM | {"nesterov": True}),
]
BY_NAME = {case.name: case for case in CASES}
RUNS = [
    pytest.param(case, schedule, id=f"{case.name}-{label}")
    for case in CASES
    for label, schedule in SCHEDULES.items()
    if label == "full" or not case.full_only
]
DIFFERENT_K = [case for case in CASES if not case.full_only]


def xs_of_package(algorithm: Any, task: fadamgc.Task, schedule: Schedule, **how: Any) -> list[Any]:
    """x after every round."""
    how = how or {"local_steps": K, "batch_size": None}
    xs: list[torch.Tensor] = []
    run = fadamgc.simulate(
        algorithm,
        task,
        rounds=len(schedule),
        schedule=schedule,
        dtype=torch.float64,
        executor="loop",
        progress=False,
        callbacks=[lambda end: xs.append(end.server.x.clone())],
        **how,
    )
    assert torch.equal(run.x, xs[-1])
    assert all(x.dtype == torch.float64 for x in xs)
    return [x.numpy() for x in xs]


def assert_close(actual: list[Any], expected: list[Any]) -> None:
    assert len(actual) == len(expected)
    for t, (x, x_by_hand) in enumerate(zip(actual, expected, strict=True), start=1):
        np.testing.assert_allclose(x, x_by_hand, rtol=RTOL, atol=ATOL, err_msg=f"x after round {t}")


@pytest.mark.parametrize(("case", "schedule"), RUNS)
def test_package_follows_the_transcription(case: Case, schedule: Schedule) -> None:
    problem = make_problem()
    xs = xs_of_package(case.algorithm(), make_task(problem), schedule)
    assert_close(xs, case.by_hand(problem, schedule)["x"])


@pytest.mark.slow
@pytest.mark.parametrize("case", DIFFERENT_K, ids=lambda case: case.name)
def test_clients_with_different_K(case: Case) -> None:
    """A client whose rows are all the same has the same gradient on every batch, so batches stay harmless."""
    problem, steps = repeated_rows()
    xs = xs_of_package(case.algorithm(), make_task(problem), PARTIAL, local_epochs=2, batch_size=2)
    assert_close(xs, case.by_hand(problem, PARTIAL, steps)["x"])


def repeated_rows() -> tuple[Problem, list[int]]:
    """Clients whose rows are all the same, and their steps in two epochs of batches of two rows."""
    rng = np.random.default_rng(5)
    rows = [2, 8, 4, 6, 2, 10]
    A = [np.repeat(rng.normal(size=(1, 5)), r, axis=0) for r in rows]
    b = [np.repeat(rng.normal(size=1), r) for r in rows]
    return Problem(A, b, rng.normal(size=5)), [2 * (r // 2) for r in rows]


class TwoTensors(torch.nn.Module):
    """A linear model whose weights are two tensors, of 2 and of 3 numbers."""

    def __init__(self, w: torch.Tensor) -> None:
        super().__init__()
        self.head = torch.nn.Parameter(w[:2].clone())
        self.tail = torch.nn.Parameter(w[2:].clone())

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return (rows[:, :2] @ self.head + rows[:, 2:] @ self.tail)[:, None]


@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_blocks_of_fedadamw_are_the_parameter_tensors(schedule: Schedule) -> None:
    problem = make_problem()
    task = dataclasses.replace(make_task(problem), model=TwoTensors(torch.from_numpy(problem.x)))
    options = ADAMW | {"second_moment": "blocks"}
    algorithm = fadamgc.FedAdamW(**options)
    expected = transcription_zoo.fedadamw(problem, schedule, K, **options, sizes=(2, 3))["x"]
    assert_close(xs_of_package(algorithm, task, schedule), expected)


@dataclass(frozen=True)
class Mistake:
    """A text in the transcription of a case, and the mistake to put in its place."""

    case: str
    right: str
    wrong: str
    unequal_steps: bool = False  # seen only if K differs between clients


# Each has to be seen in x.
MISTAKES = {
    "fedprox: the pull reversed": Mistake("fedprox", "mu * (x_i - x)", "mu * (x - x_i)"),
    "fedprox: pulled to the initial model": Mistake("fedprox", "(x_i - x))\n", "(x_i - problem.x))\n"),
    "fedprox: eta_g omitted": Mistake("fedprox", "eta_g * (", "("),
    "feddyn: h divided by S": Mistake("feddyn", "dx_sum / n", "dx_sum / len(sampled)"),
    "feddyn: the old h": Mistake("feddyn", "len(sampled) + h\n", "len(sampled) + h - dx_sum / n\n"),
    "feddyn: h_i reversed": Mistake("feddyn", "(x_i - x + h_i[i])", "(x_i - x - h_i[i])"),
    "feddyn: h_i replaced, not added": Mistake("feddyn", "h_i[i] = h_i[i] + (x_i - x)", "h_i[i] = x_i - x"),
    "feddc: all sampled clients tracked": Mistake("feddc", "if i in tracked", "if i in sampled"),
    "feddc: h_i of the tracked only": Mistake(
        "feddc", "h_i[i] = h_i[i] + (x_i - x)", "h_i[i] = h_i[i] + (x_i - x) * (i in tracked)"
    ),
    "feddc: s divided by S": Mistake("feddc", "ds_sum / n", "ds_sum / len(sampled)"),
    "feddc: s without 1/K": Mistake("feddc", "(K_i * eta_l)", "eta_l"),
    "feddc: the correction reversed": Mistake("feddc", "+ s - s_i[i])", "- s + s_i[i])"),
    "fednova: divided by a, not multiplied by its mean": Mistake("fednova", "(a_sum / len(sampled)) * ", ""),
    "fednova: a = 1, which is FedAvg": Mistake(
        "fednova", "(K_i - rho * (1 - rho**K_i) / (1 - rho)) / (1 - rho)", "1.0", unequal_steps=True
    ),
    "fednova: a of no momentum": Mistake(
        "fednova-momentum", "(K_i - rho * (1 - rho**K_i) / (1 - rho)) / (1 - rho)", "K_i", unequal_steps=True
    ),
    "fednova: a by the first power of rho": Mistake(
        "fednova-momentum", "rho * (1 - rho**K_i)", "rho * (1 - rho)", unequal_steps=True
    ),
    "server_momentum: an average": Mistake(
        "server_momentum", "beta * m + D\n", "beta * m + (1 - beta) * D\n"
    ),
    "server_momentum: nesterov": Mistake("server_momentum", "if nesterov", "if not nesterov"),
    "server_momentum-nesterov: m without beta": Mistake(
        "server_momentum-nesterov", "beta * m + D if", "m + D if"
    ),
    "fedadagrad: v starts at zero": Mistake("fedadagrad", "np.full(d, tau**2)", "np.zeros(d)"),
    "fedadagrad: v decays": Mistake("fedadagrad", "v = v + D**2", "v = 0.99 * v + 0.01 * D**2"),
    "fedadagrad: v of m": Mistake("fedadagrad", "v = v + D**2", "v = v + m**2"),
    "fedyogi: Adam": Mistake(
        "fedyogi", "v - (1 - beta2) * D**2 * np.sign(v - D**2)", "beta2 * v + (1 - beta2) * D**2"
    ),
    "fedyogi: v never shrinks": Mistake("fedyogi-large-tau", "np.sign(v - D**2)", "-1.0"),
    "fedyogi: tau inside the root": Mistake("fedyogi-large-tau", "np.sqrt(v) + tau", "np.sqrt(v + tau**2)"),
    "fedexp: without the 2": Mistake("fedexp", "2 * S * (", "S * ("),
    "fedexp: the mean of the norms": Mistake("fedexp", "2 * S * (", "2 * ("),
    "fedexp: eta_g always 1": Mistake("fedexp", "x + eta_g * D", "x + D"),
    "fedacg: clients start at x": Mistake("fedacg", "x_ahead = x + lam * m", "x_ahead = x"),
    "fedacg: the pull reversed": Mistake("fedacg", "beta * (x_i - x_ahead)", "beta * (x_ahead - x_i)"),
    "fedacg: the momentum twice": Mistake("fedacg", "x = x + m\n", "x = x_ahead + m\n"),
    "scaffnew: h_i reversed": Mistake("scaffnew", "(g - h_i[i])", "(g + h_i[i])"),
    "scaffnew: h_i without 1/K": Mistake("scaffnew", "(steps_of(K, i) * eta_l)", "eta_l"),
    "scaffnew-p: h_i by the steps of the round": Mistake(
        "scaffnew-p", "(p / eta_l)", "(1 / (steps_of(K, t) * eta_l))"
    ),
    "scaffold_local: eta_g in z_i": Mistake("scaffold_local", "(x_new - x) / eta_g)", "(x_new - x))"),
    "scaffold_local: z_i reversed": Mistake("scaffold_local", "(g + z_i[i])", "(g - z_i[i])"),
    "fedlada: alpha weighs G": Mistake(
        "fedlada",
        "(alpha * quotient(m, np.sqrt(vh)) + (1 - alpha) * G)",
        "((1 - alpha) * quotient(m, np.sqrt(vh)) + alpha * G)",
    ),
    "fedlada: G with the wrong sign": Mistake("fedlada", "G = -D", "G = D"),
    "fedlada: v starts at zero": Mistake("fedlada", "np.full(d, eps**2)", "np.zeros(d)"),
    "fedlada: the mean of v, not of v_hat": Mistake("fedlada", "vh_sum + vh\n", "vh_sum + v\n"),
    "fedkeel: no y": Mistake("fedkeel", "g + y - y_i[i]", "g - y_i[i]"),
    "fedkeel: the correction reversed": Mistake("fedkeel", "g + y - y_i[i]", "g - y + y_i[i]"),
    "fedkeel: all sampled clients tracked": Mistake("fedkeel", "if i in tracked", "if i in sampled"),
    "fedkeel: y of the corrected gradients": Mistake("fedkeel", "g_sum + g\n", "g_sum + g_hat\n"),
    "fedkeel: y divided by S": Mistake("fedkeel", "dy_sum / n", "dy_sum / len(sampled)"),
    "fedkeel: v of the raw gradient": Mistake("fedkeel", "(1 - beta2) * g_hat**2", "(1 - beta2) * g**2"),
    "fedkeel: the mean of v, not of v_hat": Mistake("fedkeel", "vh_sum + vh\n", "vh_sum + v\n"),
    "fedkeel: the direction is corrected too": Mistake(
        "fedkeel", "(1 - alpha) * G)", "(1 - alpha) * (G + y))"
    ),
    "fedkeel-gradient: starts at zero": Mistake("fedkeel-gradient", 'init == "gradient"', "False"),
    "fedlalr: m reset": Mistake("fedlalr", "m = m_server\n", "m = np.zeros(d)\n"),
    "fedlalr: no maximum": Mistake("fedlalr", "np.maximum(vh, v)", "v"),
    "fedlalr: v starts at zero in every round": Mistake("fedlalr", " v = vh_server\n", " v = np.zeros(d)\n"),
    "fedadamw: t restarts in every round": Mistake("fedadamw", "beta2 ** (t + k)", "beta2**k"),
    "fedadamw: t counted by the round": Mistake("fedadamw", "t = t + mean_steps(K, sampled)", "t = t + 1"),
    "fedadamw: the other option": Mistake("fedadamw", 'second_moment == "blocks"', 'second_moment == "full"'),
    "fedadamw: G with the wrong sign": Mistake("fedadamw", "G = -D", "G = D"),
    "fedadamw: the decay of the gradient": Mistake(
        "fedadamw-full", "g = problem.gradient(i, x_i)", "g = problem.gradient(i, x_i) + weight_decay * x_i"
    ),
    "diloco: no Nesterov": Mistake("diloco", "eta_g * (mu * u - D)", "eta_g * u"),
    "diloco: moments not kept": Mistake("diloco", "v_i[i] = v\n", "pass\n"),
    "diloco: decay with the wrong sign": Mistake("diloco", "delta + weight_decay", "delta - weight_decay"),
    "diloco-bias: t restarts in every round": Mistake("diloco-bias", "t = t_i[i]", "t = 0"),
    "diloco: bias corrected": Mistake("diloco", "if bias_correction", "if not bias_correction"),
    "fedlion: beta1 and beta2 exchanged": Mistake(
        "fedlion", "c = beta1 * m + (1 - beta1) * g", "c = beta2 * m + (1 - beta2) * g"
    ),
    "fedlion: m reset": Mistake("fedlion", "m = m_server\n", "m = np.zeros(d)\n"),
    "fedmuon_sign: x without S/n": Mistake("fedmuon_sign", "eta_g * (S / n)", "eta_g"),
    "fedmuon_sign: C divided by S": Mistake("fedmuon_sign", "dC_sum / n", "dC_sum / S"),
    "fedmuon_sign: the correction reversed": Mistake("fedmuon_sign", "M - C_i[i] + C)", "M + C_i[i] - C)"),
    "fedmuon_sign: M_i reset": Mistake("fedmuon_sign", "M = M_i[i]\n", "M = np.zeros(d)\n"),
    "mimelite: the raw gradient": Mistake("mimelite", "quotient(beta1 * m + (1 - beta1) * g,", "quotient(g,"),
    "mimelite: the gradient at x_i": Mistake(
        "mimelite",
        "dx_sum = dx_sum + (x_i - x)",
        "dx_sum, c_sum = dx_sum + (x_i - x), c_sum + g - problem.gradient(i, x)",
    ),
    "mimelite: v of m": Mistake("mimelite", "c**2", "m**2"),
    **{
        f"amsgrad_pre_direction: {name}": Mistake("amsgrad_pre_direction", right, wrong)
        for name, right, wrong in (
            ("G with the wrong sign", "G = -D", "G = D"),
            (
                "alpha weighs G",
                "(alpha * quotient(m, np.sqrt(vh) + eps) + (1 - alpha) * G)",
                "((1 - alpha) * quotient(m, np.sqrt(vh) + eps) + alpha * G)",
            ),
            ("the correction reversed", "g + y - y_i[i]", "g - y + y_i[i]"),
            ("no correction", "g + y - y_i[i]", "g"),
            ("y_i of corrected gradients", "g_sum = g_sum + g\n", "g_sum = g_sum + g_hat\n"),
            ("all sampled clients tracked", "if i in tracked", "if i in sampled"),
            ("y divided by S", "dy_sum / n", "dy_sum / len(sampled)"),
            ("v not kept", "v_i[i] = v\n", "pass\n"),
            ("m not reset", " m = np.zeros(d)\n", " m = m if xs else np.zeros(d)\n"),
            ("G of the step size eta_g", "G = -D /", "G = -eta_g * D /"),
        )
    },
    **{
        f"adam_shared_pre: {name}": Mistake("adam_shared_pre-bias", right, wrong)
        for name, right, wrong in (
            ("m reset", "m = m_server\n", "m = np.zeros(d)\n"),
            ("v reset", "v = v_server\n", "v = np.zeros(d)\n"),
            ("v of the raw gradient", "g_hat**2", "g**2"),
            ("the correction reversed", "g + y - y_i[i]", "g - y + y_i[i]"),
            ("t of v restarts in every round", "(1 - beta2 ** (t + k))", "(1 - beta2**k)"),
            ("t of m restarts in every round", "(1 - beta1 ** (t + k))", "(1 - beta1**k)"),
            ("t counted by the round", "t = t + mean_steps(K, sampled)", "t = t + 1"),
            ("all sampled clients tracked", "if i in tracked", "if i in sampled"),
            ("m of the last client", "m_sum = m_sum + m\n", "m_sum = len(sampled) * m\n"),
        )
    },
    **{
        f"momentum_direction: {name}": Mistake("momentum_direction-nesterov", right, wrong)
        for name, right, wrong in (
            ("m not kept", "m_i[i] = m\n", "pass\n"),
            ("an average", "m = beta * m + g\n", "m = beta * m + (1 - beta) * g\n"),
            ("the other option", "if nesterov", "if not nesterov"),
            ("nesterov without beta", "g + beta * m if", "g + m if"),
            ("G with the wrong sign", "G = -D", "G = D"),
            ("alpha weighs G", "(alpha * delta + (1 - alpha) * G)", "((1 - alpha) * delta + alpha * G)"),
        )
    },
}


def with_mistake(mistake: Mistake, problem: Problem, schedule: Schedule, K: Steps = K) -> Result:
    """The case by hand, by a transcription in which one text is replaced by another."""
    case = BY_NAME[mistake.case]
    source = inspect.getsource(getattr(transcription_zoo, case.function))
    assert source.count(mistake.right) == 1, f"{mistake.right!r} has to be in {case.function} once"
    names = dict(vars(transcription_zoo))
    exec(source.replace(mistake.right, mistake.wrong), names)
    return case.call(names[case.function], problem, schedule, K)


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_in_one_line_is_seen(name: str) -> None:
    """The comparison can fail: a transcription with a known mistake is far from the package."""
    mistake = MISTAKES[name]
    case = BY_NAME[mistake.case]
    schedule = FULL if case.full_only else PARTIAL
    if mistake.unequal_steps:
        problem, steps = repeated_rows()
        how: dict[str, Any] = {"local_epochs": 2, "batch_size": 2}
    else:
        problem, steps, how = make_problem(), K, {}
    xs = xs_of_package(case.algorithm(), make_task(problem), schedule, **how)
    assert_close(xs, case.by_hand(problem, schedule, steps)["x"])
    x_wrong = with_mistake(mistake, problem, schedule, steps)["x"]
    assert np.abs(xs[-1] - x_wrong[-1]).max() > 1e-4
    with pytest.raises(AssertionError):
        assert_close(xs, x_wrong)


def test_every_registered_method_has_cases_and_mistakes() -> None:
    with_mistakes = {BY_NAME[mistake.case].cls for mistake in MISTAKES.values()}
    assert with_mistakes == {case.cls for case in CASES}
    assert with_mistakes == zoo() | set(PRODUCTS)


def zoo() -> set[str]:
    """The registered classes of this package except those of the paper, of groups and of compositions."""
    classes = {algorithm_class(name) for name in fadamgc.algorithms()}
    names = {cls.__name__ for cls in classes if cls.__module__.startswith("fadamgc.")}
    paper = {case.cls for case in PAPER}
    assert len(paper) == 10
    assert paper | {"MTGC", "MTGCAdam", "Composed"} <= names
    return names - paper - {"MTGC", "MTGCAdam", "Composed"}
