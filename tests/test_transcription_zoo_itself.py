"""The transcription of the further methods by itself: optima, special cases and invariants."""

from typing import Any

import numpy as np
import pytest
import torch

import transcription as base
import transcription_zoo as zoo
from transcription import Problem, Result, Schedule

K = 4
N = 6
FULL: Schedule = [(list(range(N)), list(range(N)))]
ROTATING: Schedule = [([0, 1, 2], [0, 2]), ([3, 4, 5], [4, 5]), ([1, 3, 5], [1, 3]), ([0, 2, 4], [0, 4])]
GROUPS = [[0, 3], [1, 2, 5], [4]]

pytestmark = pytest.mark.slow


def quadratics(n: int = N, d: int = 3, seed: int = 1) -> Problem:
    """Clients with different minimisers and different curvatures, between 0.5 and 2."""
    rng = np.random.default_rng(seed)
    A, b = [], []
    for _ in range(n):
        rotation = np.linalg.qr(rng.normal(size=(d, d)))[0]
        A.append(np.sqrt(d) * np.diag(np.sqrt(rng.uniform(0.5, 2.0, size=d))) @ rotation)
        b.append(A[-1] @ rng.normal(size=d))
    return Problem(A, b, rng.normal(size=d))


def distance(result: Result) -> float:
    """The distance of the last x to the minimiser of the mean of all f_i."""
    return float(np.abs(result["x"][-1] - quadratics().optimum()).max())


def assert_same(result: Result, other: Result) -> None:
    np.testing.assert_allclose(result["x"], other["x"], rtol=0, atol=1e-12)


# Which methods are exact.


@pytest.mark.parametrize("method", [zoo.feddyn, zoo.feddc])
@pytest.mark.parametrize("schedule", [FULL * 250, ROTATING * 150], ids=["full", "rotating"])
def test_feddyn_and_feddc_reach_the_optimum(method: Any, schedule: Schedule) -> None:
    assert distance(method(quadratics(), schedule, K, eta_l=0.1, alpha=0.5)) < 1e-10


def test_scaffnew_reaches_the_optimum() -> None:
    assert distance(zoo.scaffnew(quadratics(), FULL * 200, K, eta_l=0.1)) < 1e-10


def test_scaffnew_with_a_coin_reaches_the_optimum() -> None:
    lengths = [int(k) for k in np.random.default_rng(0).geometric(0.25, size=200)]
    assert distance(zoo.scaffnew(quadratics(), FULL * 200, lengths, eta_l=0.1, p=0.25)) < 1e-10


@pytest.mark.parametrize("eta_g", [1.0, 0.7])
def test_scaffold_local_reaches_the_optimum(eta_g: float) -> None:
    assert distance(zoo.scaffold_local(quadratics(), FULL * 200, K, eta_l=0.1, eta_g=eta_g)) < 1e-10


def test_mtgc_reaches_the_optimum_only_if_z_is_kept() -> None:
    problem = quadratics()
    assert distance(zoo.mtgc(problem, GROUPS, 3, K, 100, eta_l=0.1)) < 1e-10
    assert distance(zoo.mtgc(problem, GROUPS, 3, K, 100, eta_l=0.1, z="reset")) > 1e-4


def test_mtgc_with_adam_reaches_the_optimum() -> None:
    assert distance(zoo.mtgc_adam(quadratics(), GROUPS, 2, K, 300, eta_l=0.05, eps=1e-3)) < 1e-8


@pytest.mark.parametrize(
    ("method", "options"),
    [
        (zoo.fedprox, {"eta_l": 0.1, "mu": 0.1}),
        (zoo.fednova, {"eta_l": 0.1}),
        (zoo.server_momentum, {"eta_l": 0.1, "beta": 0.5}),
        (zoo.fedadagrad, {"eta_l": 0.1, "eta_g": 0.1}),
        (zoo.fedyogi, {"eta_l": 0.1, "eta_g": 0.1}),
        (zoo.fedexp, {"eta_l": 0.1}),
        (zoo.fedacg, {"eta_l": 0.1, "beta": 0.1}),
        (zoo.fedlada, {"eta_l": 0.03, "eps": 1e-3}),
        (zoo.fedlalr, {"eta_l": 0.03}),
        (zoo.fedadamw, {"eta_l": 0.03, "alpha": 0.5, "weight_decay": 0.0}),
        (zoo.diloco, {"eta_l": 0.01, "weight_decay": 0.0}),
        (zoo.fedlion, {"eta_l": 0.03}),
        (zoo.mimelite, {"eta_l": 0.03, "eps": 0.1}),
    ],
)
def test_other_methods_come_near_the_optimum_and_stay_there(method: Any, options: dict[str, Any]) -> None:
    start = float(np.abs(quadratics().x - quadratics().optimum()).max())
    assert 1e-8 < distance(method(quadratics(), FULL * 100, K, **options)) < start / 2


# Special cases.


@pytest.mark.parametrize("schedule", [FULL * 5, ROTATING * 2], ids=["full", "rotating"])
@pytest.mark.parametrize(
    ("method", "options"),
    [
        (zoo.fedprox, {"mu": 0.0, "eta_g": 0.8}),
        (zoo.fednova, {"eta_g": 0.8}),
        (zoo.server_momentum, {"beta": 0.0, "eta_g": 0.8}),
        (zoo.server_momentum, {"beta": 0.0, "eta_g": 0.8, "nesterov": True}),
        (zoo.mimelite, {"beta1": 0.0, "beta2": 1.0, "eps": 1.0, "eta_g": 0.8}),
    ],
)
def test_is_fedavg(method: Any, options: dict[str, Any], schedule: Schedule) -> None:
    problem = quadratics()
    fedavg = base.fedavg(problem, schedule, K, eta_l=0.1, eta_g=0.8)
    assert_same(method(problem, schedule, K, eta_l=0.1, **options), fedavg)


def test_fedexp_of_one_client_is_fedavg() -> None:
    problem = quadratics(n=1)
    fedavg = base.fedavg(problem, [([0], [0])] * 5, K, eta_l=0.1)
    assert_same(zoo.fedexp(problem, [([0], [0])] * 5, K, eta_l=0.1), fedavg)


def test_fednova_is_not_fedavg_if_K_differs() -> None:
    problem, steps = quadratics(), [1, 2, 3, 4, 5, 6]
    nova = zoo.fednova(problem, FULL, steps, eta_l=0.1)["x"][0]
    assert np.abs(nova - base.fedavg(problem, FULL, steps, eta_l=0.1)["x"][0]).max() > 1e-3


def test_fednova_with_momentum_knows_the_weights_of_the_gradients() -> None:
    """Linear losses: D_i / a_i is -eta_l times the client's gradient, whatever K and rho are."""

    class Linear(Problem):
        def gradient(self, i: int, w: Any) -> Any:
            return self.b[i][: self.d]

    plain = quadratics()
    problem = Linear(plain.A, plain.b, plain.x)
    steps = [1, 2, 3, 4, 5, 6]
    rho = 0.6
    a = [sum(sum(rho**j for j in range(k)) for k in range(1, K_i + 1)) for K_i in steps]
    expected = problem.x - 0.1 * np.mean(a) * np.mean([b[: problem.d] for b in problem.b], axis=0)
    x = zoo.fednova(problem, FULL, steps, eta_l=0.1, rho=rho)["x"][0]
    np.testing.assert_allclose(x, expected, rtol=0, atol=1e-12)


def test_fedacg_without_momentum_is_fedprox() -> None:
    problem = quadratics()
    fedprox = zoo.fedprox(problem, ROTATING, K, eta_l=0.1, mu=0.3)
    assert_same(zoo.fedacg(problem, ROTATING, K, eta_l=0.1, beta=0.3, lam=0.0), fedprox)


def test_fedacg_without_the_pull_averages_from_the_model_ahead() -> None:
    """x = x~ + mean D, so the second round is a round of FedAvg that starts from x~."""
    problem = quadratics()
    first, second = zoo.fedacg(problem, FULL * 2, K, eta_l=0.1, beta=0.0, lam=0.5)["x"]
    ahead = Problem(problem.A, problem.b, first + 0.5 * (first - problem.x))
    np.testing.assert_allclose(base.fedavg(ahead, FULL, K, eta_l=0.1)["x"][0], second, rtol=0, atol=1e-12)


def test_yogi_grows_as_adagrad_does_with_beta2_0() -> None:
    """From a v below D^2, v + (1 - beta2) D^2 with beta2 = 0 is Adagrad's v."""
    problem = quadratics()
    options = {"eta_l": 0.1, "eta_g": 0.1, "beta1": 0.5, "tau": 1e-6}
    yogi = zoo.fedyogi(problem, FULL, K, beta2=0.0, **options)
    assert_same(yogi, zoo.fedadagrad(problem, FULL, K, **options))


@pytest.mark.parametrize("eta_g", [1.0, 0.7])
def test_scaffold_local_is_scaffold(eta_g: float) -> None:
    problem = quadratics()
    scaffold = base.scaffold(problem, FULL * 6, K, eta_l=0.1, eta_g=eta_g)
    local = zoo.scaffold_local(problem, FULL * 6, K, eta_l=0.1, eta_g=eta_g)
    assert_same(local, scaffold)
    np.testing.assert_allclose(local["z_i"], scaffold["y"] - np.array(scaffold["y_i"]), rtol=0, atol=1e-12)


def test_scaffnew_is_scaffold_local_and_its_p_is_one_over_K() -> None:
    problem = quadratics()
    scaffnew = zoo.scaffnew(problem, FULL * 6, K, eta_l=0.1)
    assert_same(scaffnew, zoo.scaffold_local(problem, FULL * 6, K, eta_l=0.1))
    assert_same(scaffnew, zoo.scaffnew(problem, FULL * 6, [K] * 6, eta_l=0.1, p=1 / K))


def test_feddc_without_alpha_has_the_clients_of_scaffold() -> None:
    """With alpha = 0, the first round is one of SCAFFOLD, and the server adds h."""
    problem = quadratics()
    result = zoo.feddc(problem, FULL, K, eta_l=0.1, alpha=0.0)
    scaffold = base.scaffold(problem, FULL, K, eta_l=0.1)
    np.testing.assert_allclose(result["x"][0] - result["h"], scaffold["x"][0], rtol=0, atol=1e-12)
    np.testing.assert_allclose(result["s_i"], scaffold["y_i"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(result["s"], scaffold["y"], rtol=0, atol=1e-12)


def test_fedlada_without_adam_stays_where_it_is() -> None:
    problem = quadratics()
    assert_same(zoo.fedlada(problem, FULL * 2, K, eta_l=0.1, eps=0.1, alpha=0.0), {"x": [problem.x] * 2})


def test_fedlada_of_one_round_is_fedlalr() -> None:
    problem = quadratics()
    lada = zoo.fedlada(problem, FULL, K, eta_l=0.1, eps=0.1, alpha=1.0)
    lalr = zoo.fedlalr(problem, FULL, K, eta_l=0.1, eps=0.1)
    assert_same(lada, lalr)
    np.testing.assert_allclose(lada["v"], lalr["v_hat"], rtol=0, atol=1e-15)


def test_fedlalr_of_one_client_is_amsgrad_in_one_long_round_if_v_never_falls() -> None:
    """v restarts at v_hat in every round, which changes nothing as long as v = v_hat."""
    problem = quadratics(n=1)
    alone: Schedule = [([0], [0])]
    options = {"eta_l": 0.001, "beta2": 0.99}
    rounds = zoo.fedlalr(problem, alone * 3, K, **options)["x"][-1]
    np.testing.assert_allclose(
        zoo.fedlalr(problem, alone, 3 * K, **options)["x"][-1], rounds, rtol=0, atol=1e-12
    )


def torch_steps(problem: Problem, optimizer: Any, w: torch.nn.Parameter, steps: int) -> Any:
    for _ in range(steps):
        w.grad = torch.from_numpy(problem.gradient(0, w.detach().numpy()))
        optimizer.step()
    return w.detach().numpy().copy()


@pytest.mark.slow  # the first optimizer of torch imports its compiler
def test_diloco_and_fedadamw_take_the_steps_of_torch_adamw() -> None:
    """One client, no outer momentum: DiLoCo is AdamW over all rounds, FedAdamW in its first round."""
    problem = quadratics(n=1)
    alone: Schedule = [([0], [0])]
    w = torch.nn.Parameter(torch.from_numpy(problem.x.copy()))
    adamw = torch.optim.AdamW([w], lr=0.1, betas=(0.8, 0.95), eps=1e-3, weight_decay=0.1)
    expected = [torch_steps(problem, adamw, w, K) for _ in range(3)]
    options = {"eta_l": 0.1, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}
    diloco = zoo.diloco(problem, alone * 3, K, eta_g=1.0, mu=0.0, bias_correction=True, **options)
    assert_same(diloco, {"x": expected})
    fedadamw = zoo.fedadamw(problem, alone, K, alpha=0.7, **options)
    assert_same(fedadamw, {"x": expected[:1]})


@pytest.mark.slow  # the first optimizer of torch imports its compiler
def test_fedadamw_keeps_v_and_t_between_rounds() -> None:
    """With beta1 = 0 and the full v, rounds of one client are AdamW without interruption."""
    problem = quadratics(n=1)
    alone: Schedule = [([0], [0])]
    w = torch.nn.Parameter(torch.from_numpy(problem.x.copy()))
    adamw = torch.optim.AdamW([w], lr=0.1, betas=(0.0, 0.95), eps=1e-3, weight_decay=0.1)
    expected = [torch_steps(problem, adamw, w, K) for _ in range(3)]
    options = {"eta_l": 0.1, "beta1": 0.0, "beta2": 0.95, "eps": 1e-3, "weight_decay": 0.1}
    result = zoo.fedadamw(problem, alone * 3, K, alpha=0.0, second_moment="full", **options)
    assert_same(result, {"x": expected})
    assert result["t"] == 3 * K


def test_fedadamw_with_blocks_of_one_number_has_the_full_v() -> None:
    problem = quadratics()
    options = {"eta_l": 0.1, "alpha": 0.5, "weight_decay": 0.1}
    full = zoo.fedadamw(problem, ROTATING, K, second_moment="full", **options)
    assert_same(zoo.fedadamw(problem, ROTATING, K, sizes=[1, 1, 1], **options), full)
    blocks = zoo.fedadamw(problem, ROTATING, K, sizes=[1, 2], **options)
    assert blocks["v"][1] == blocks["v"][2] != blocks["v"][0]


@pytest.mark.slow
@pytest.mark.parametrize("nesterov", [False, True])
def test_server_momentum_takes_the_steps_of_torch_sgd(nesterov: bool) -> None:
    """With one step of size 1 of one client, mean D is minus the gradient."""
    problem = quadratics(n=1)
    w = torch.nn.Parameter(torch.from_numpy(problem.x.copy()))
    sgd = torch.optim.SGD([w], lr=0.1, momentum=0.8, nesterov=nesterov)
    expected = [torch_steps(problem, sgd, w, 1) for _ in range(5)]
    options = {"eta_l": 1.0, "eta_g": 0.1, "beta": 0.8, "nesterov": nesterov}
    assert_same(zoo.server_momentum(problem, [([0], [0])] * 5, 1, **options), {"x": expected})


def test_fedmuon_of_one_client_is_fedlion_with_equal_decays() -> None:
    """C = C_i, so nothing is corrected."""
    problem = quadratics(n=1)
    alone: Schedule = [([0], [0])]
    lion = zoo.fedlion(problem, alone * 5, K, eta_l=0.1, beta1=0.7, beta2=0.7)
    assert_same(zoo.fedmuon_sign(problem, alone * 5, K, eta_l=0.1, alpha=0.3), lion)


@pytest.mark.parametrize("groups", [[list(range(N))], [[i] for i in range(N)]], ids=["one", "each"])
def test_mtgc_of_one_level_is_scaffnew(groups: list[list[int]]) -> None:
    problem = quadratics()
    scaffnew = zoo.scaffnew(problem, FULL * 6, K, eta_l=0.1)
    assert_same(zoo.mtgc(problem, groups, 1, K, 6, eta_l=0.1), scaffnew)


@pytest.mark.parametrize("groups", [[list(range(N))], [[i] for i in range(N)]], ids=["one", "each"])
def test_mtgc_with_adam_of_one_level_is_fadamgc(groups: list[list[int]]) -> None:
    problem = quadratics()
    fadamgc = base.fadamgc(problem, FULL * 6, K, eta_l=0.1)
    assert_same(zoo.mtgc_adam(problem, groups, 1, K, 6, eta_l=0.1), fadamgc)


def test_products_of_the_algebra_without_a_global_direction_or_without_momentum() -> None:
    """alpha = 1 ignores G, which leaves FAdamGC; beta = 0 leaves FedCM."""
    problem = quadratics()
    fadamgc = base.fadamgc(problem, ROTATING * 2, K, eta_l=0.1)
    assert_same(zoo.amsgrad_pre_direction(problem, ROTATING * 2, K, eta_l=0.1, alpha=1.0), fadamgc)
    fedavg_m = base.fedavg_m(problem, ROTATING * 2, K, eta_l=0.1, beta=0.3)
    assert_same(zoo.momentum_direction(problem, ROTATING * 2, K, eta_l=0.1, alpha=0.3, beta=0.0), fedavg_m)


def test_shared_moments_of_one_client_are_adam_in_one_long_round() -> None:
    """y = y_i, so nothing is corrected."""
    problem = quadratics(n=1)
    alone: Schedule = [([0], [0])]
    for bias_correction in (False, True):
        rounds = zoo.adam_shared_pre(problem, alone * 3, K, eta_l=0.1, bias_correction=bias_correction)
        long = zoo.adam_shared_pre(problem, alone, 3 * K, eta_l=0.1, bias_correction=bias_correction)
        np.testing.assert_allclose(rounds["x"][-1], long["x"][-1], rtol=0, atol=1e-12)


# Invariants.


@pytest.mark.parametrize(
    ("method", "options", "pairs"),
    [
        (zoo.feddyn, {"alpha": 0.3}, ["h"]),
        (zoo.feddc, {"alpha": 0.3}, ["h", "s"]),
        (zoo.fedmuon_sign, {"alpha": 0.3}, ["C"]),
    ],
)
def test_the_server_has_the_mean_of_all_clients(
    method: Any, options: dict[str, Any], pairs: list[str]
) -> None:
    result = method(quadratics(), ROTATING[:3], K, eta_l=0.1, **options)
    for name in pairs:
        assert np.abs(result[name]).max() > 1e-3
        np.testing.assert_allclose(result[name], np.mean(result[f"{name}_i"], axis=0), rtol=0, atol=1e-14)


@pytest.mark.parametrize("method", [zoo.mtgc, zoo.mtgc_adam])
def test_the_corrections_of_mtgc_cancel(method: Any) -> None:
    result = method(quadratics(), GROUPS, 2, K, 3, eta_l=0.1)
    for group in GROUPS:
        np.testing.assert_allclose(sum(result["z_i"][i] for i in group), 0, rtol=0, atol=1e-12)
    total = sum(len(group) * y for group, y in zip(GROUPS, result["y_j"], strict=True))
    np.testing.assert_allclose(total, 0, rtol=0, atol=1e-12)


def test_the_optimum_is_a_fixed_point_of_the_control_variates() -> None:
    """At the optimum, with h_i = grad f_i there, no client of Scaffnew moves."""
    plain = quadratics()
    result = zoo.scaffnew(plain, FULL * 200, K, eta_l=0.1)
    gradients = [plain.gradient(i, plain.optimum()) for i in range(N)]
    np.testing.assert_allclose(result["h_i"], gradients, rtol=0, atol=1e-9)


@pytest.mark.parametrize("z", ["keep", "reset"])
def test_mtgc_by_hand(z: str) -> None:
    """Clients 0: g = w and 1: g = w/4 - 1/4 in one group, eta = 1/2, H = 2, two group rounds.

    Group round 1, from 2: x_0 = .5, x_1 = 1.765625, xbar = 1.1328125, z_0 = -.6328125 = -z_1.
    Group round 2: x_0 = .7578125, x_1 = .5084228515625, xbar = .63311767578125 = x (see Scaffnew's number).
    z_0 = -.6328125 + .12469482421875 = -.50811767578125 in round 2 with "keep", else 0.
    """
    problem = Problem([np.array([[1.0]]), np.array([[0.5]])], [np.zeros(1), np.array([0.5])], np.array([2.0]))
    first, second = zoo.mtgc(problem, [[0, 1]], 2, 2, 2, eta_l=0.5, z=z)["x"]
    assert first[0] == pytest.approx(0.63311767578125, abs=1e-12)
    start = Problem(problem.A, problem.b, first)
    restarted = zoo.mtgc(start, [[0, 1]], 2, 2, 1, eta_l=0.5)["x"][0]
    assert (abs(second[0] - restarted[0]) < 1e-12) == (z == "reset")
