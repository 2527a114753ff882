"""Single steps computed by hand, and the limits of the hyperparameters."""

from __future__ import annotations

import math

import pytest
import torch

import fadamgc
from fadamgc.algorithm import Algorithm, Cohort
from fadamgc.rules import adam_ratio


def vec(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def same(got: torch.Tensor, *expected: float) -> None:
    torch.testing.assert_close(got, vec(*expected), rtol=0, atol=1e-15)


def local_round(algo, server, client, gradients, tracked=True, g=None):
    """A client's round on given gradients: new state, message, final x, directions."""
    down = algo.broadcast(server)
    local, x, directions = algo.begin(down, client, g), down.x, []
    for gradient in gradients:
        before = x
        x, local = algo.step(down, client, local, x, gradient)
        directions.append((before - x) / algo.eta_l)
    state, up = algo.finish(down, client, local, x, len(gradients), tracked)
    return state, up, x, directions


def test_fadamgc_two_steps_by_hand():
    algo = fadamgc.FAdamGC(eta_l=0.5, eta_g=0.5, beta1=0.5, beta2=0.75, eps=1.0)
    server = algo.init_server(vec(1, 0, 2))._replace(y=vec(1, 0, -1))
    client = algo.init_client(server.x)._replace(y=vec(3, 0, 1))
    # step 1: g_hat = g + y - y_i = (2, 0, -4); m = g_hat / 2; v = g_hat^2 / 4; v_hat = v
    # step 2: g_hat = (0, 2, 0)
    state, up, x, directions = local_round(algo, server, client, [vec(4, 0, -2), vec(2, 2, 2)])
    same(directions[0], 1 / (1 + 1), 0, -2 / (2 + 1))
    # m = m / 2 + g_hat / 2 = (0.5, 1, -1); v = 0.75 v + g_hat^2 / 4 = (0.75, 1, 3); v_hat = (1, 1, 4)
    same(directions[1], 0.5 / (1 + 1), 1 / (1 + 1), -1 / (2 + 1))
    same(x, 1 - 0.25 - 0.125, -0.25, 2 + 1 / 3 + 1 / 6)
    same(state.y, 3, 1, 0)  # the mean of the RAW gradients
    same(state.v, 0.75, 1, 3)
    same(state.v_hat, 1, 1, 4)
    same(up.dx, -0.375, -0.25, 0.5)
    same(up.dy, 0, 1, -1)
    # one of two sampled clients moved, ten clients in all
    after = algo.aggregate(server, up, Cohort(n=10, S=2, K=2))
    same(after.x, 1 - 0.5 * 0.375 / 2, -0.5 * 0.25 / 2, 2 + 0.5 * 0.5 / 2)
    same(after.y, 1, 0.1, -1.1)


def test_fadamgc_untracked_keeps_y_and_moves_v():
    algo = fadamgc.FAdamGC(eta_l=0.5)
    server = algo.init_server(vec(1, 2))
    client = algo.init_client(server.x)._replace(y=vec(5, 5))
    state, up, _, _ = local_round(algo, server, client, [vec(1, 1)], tracked=False)
    same(state.y, 5, 5)
    same(up.dy, 0, 0)
    assert (state.v > 0).all()


def test_fadamgc_restart_starts_v_hat_from_v():
    client = fadamgc.FAdamGC().init_client(vec(0))._replace(v=vec(1), v_hat=vec(9))
    down = fadamgc.FAdamGC().broadcast(fadamgc.FAdamGC().init_server(vec(0)))
    same(fadamgc.FAdamGC().begin(down, client).v_hat, 9)
    same(fadamgc.FAdamGC(v_hat="restart").begin(down, client).v_hat, 1)


def test_fa_nt_by_hand():
    algo = fadamgc.FANT(eta_l=0.5, beta1=0.5, beta2=0.75, eps=1.0)
    server = algo.init_server(vec(1))._replace(y=vec(1))
    client = algo.init_client(server.x)._replace(y=vec(3))
    # raw moments: m = 2, v = 4, direction = 2 / (2 + 1) + 1 - 3
    state, up, x, directions = local_round(algo, server, client, [vec(4)])
    same(directions[0], 2 / 3 - 2)
    same(x, 1 - 0.5 * (2 / 3 - 2))
    same(state.y, 3 - 1 + (2 / 3 - 2))  # y_i - y + (x - x_i) / (K eta_l): the Adam direction itself
    same(up.dy, 2 / 3 - 3)


def test_local_adam_by_hand():
    algo = fadamgc.LocalAdam(eta_l=0.5, beta1=0.5, beta2=0.75, eps=1.0)
    client = algo.init_client(vec(0))._replace(v=vec(12), v_hat=vec(16))
    state, _, x, _ = local_round(algo, algo.init_server(vec(1)), client, [vec(4)])
    same(x, 1 - 0.5 * 2 / (4 + 1))  # v = 0.75 * 12 + 4 = 13 < 16
    same(state.v, 13)
    same(state.v_hat, 16)
    reset = fadamgc.LocalAdam(eta_l=0.5, beta1=0.5, beta2=0.75, eps=1.0, moments="reset")
    state, _, x, _ = local_round(reset, reset.init_server(vec(1)), client, [vec(4)])
    same(x, 1 - 0.5 * 2 / (2 + 1))
    assert state is client  # nothing of a round is kept


def test_fedavg_m_by_hand():
    algo = fadamgc.FedAvgM(eta_l=0.5, eta_g=2.0, beta=0.25)
    server = algo.init_server(vec(1))._replace(G=vec(4))
    _, up, x, _ = local_round(algo, server, algo.init_client(server.x), [vec(8), vec(0)])
    same(x, 1 - 0.5 * (2 + 3) - 0.5 * (0 + 3))
    after = algo.aggregate(server, up, Cohort(n=5, S=1, K=2))
    same(after.G, 4)  # the mean direction, (5 + 3) / 2
    same(after.x, 1 + 2 * -4)


def test_scaffold_by_hand():
    server = fadamgc.Scaffold().init_server(vec(1))._replace(y=vec(1))
    client = fadamgc.Scaffold().init_client(server.x)._replace(y=vec(3))
    two = fadamgc.Scaffold(eta_l=0.5)
    state, up, x, _ = local_round(two, server, client, [vec(4), vec(6)])
    same(x, 1 - 0.5 * 2 - 0.5 * 4)  # g - y_i + y
    same(state.y, 5)  # option II is the mean raw gradient, as SCAFFOLD's authors say
    same(two.aggregate(server, up, Cohort(n=4, S=1, K=2)).y, 1 + 2 / 4)
    one = fadamgc.Scaffold(eta_l=0.5, option="I")
    assert one.round_gradient
    state, _, _, _ = local_round(one, server, client, [vec(4), vec(6)], g=vec(7))
    same(state.y, 7)


def test_scaffold_m_by_hand():
    algo = fadamgc.ScaffoldM(eta_l=0.5, beta=0.25)
    server = algo.init_server(vec(1))._replace(y=vec(1), G=vec(4))
    client = algo.init_client(server.x)._replace(y=vec(3))
    state, up, x, _ = local_round(algo, server, client, [vec(10), vec(2)])
    same(x, 1 - 0.5 * (0.25 * 8 + 3) - 0.5 * (0 + 3))
    same(state.y, 6)
    after = algo.aggregate(server, up, Cohort(n=3, S=1, K=2))
    same(after.G, 4)
    same(after.y, 2)


def test_fedadam_by_hand():
    algo = fadamgc.FedAdam(eta_g=0.5, beta1=0.5, beta2=0.75, tau=1.0)
    server = algo.init_server(vec(1))
    same(server.v, 1)  # tau^2
    up = type(local_round(algo, server, algo.init_client(server.x), [vec(0)])[1])
    after = algo.aggregate(server, up(dx=vec(8)), Cohort(n=9, S=4, K=1))
    same(after.m, 1)
    same(after.v, 0.75 + 0.25 * 4)
    same(after.x, 1 + 0.5 * 1 / (math.sqrt(1.75) + 1))
    corrected = fadamgc.FedAdam(eta_g=0.5, beta1=0.5, beta2=0.75, tau=1.0, v0=0.0, bias_correction=True)
    server = corrected.init_server(vec(1))
    for _ in range(2):
        server = corrected.aggregate(server, up(dx=vec(8)), Cohort(n=9, S=4, K=1))
    same(server.x, 1 + 2 * 0.5 * 2 / (2 + 1))  # a constant D = 2 gives m = 2 and v = 4 in every round


def test_fedams_by_hand():
    algo = fadamgc.FedAMS(eta_g=0.5, beta1=0.5, beta2=0.75, eps=4.0)
    server = algo.init_server(vec(1))
    up = type(local_round(algo, server, algo.init_client(server.x), [vec(0)])[1])
    after = algo.aggregate(server, up(dx=vec(8)), Cohort(n=9, S=4, K=1))  # D = 2, m = 1, v = 1
    same(after.v_hat, 4)
    same(after.x, 1 + 0.5 * 1 / 2)
    option2 = fadamgc.FedAMS(eta_g=0.5, beta1=0.5, beta2=0.75, eps=4.0, option="amsgrad")
    after = option2.aggregate(option2.init_server(vec(1)), up(dx=vec(8)), Cohort(n=9, S=4, K=1))
    same(after.v_hat, 1)
    same(after.x, 1 + 0.5 * 1 / (1 + 4))


@pytest.mark.parametrize("cls", [fadamgc.FAdamGC, fadamgc.FANT, fadamgc.LocalAdam])
def test_beta2_and_eps_zero_never_give_nan(cls):
    algo = cls(eta_l=0.5, beta1=0.0, beta2=0.0, eps=0.0)
    server = algo.init_server(vec(1, 1, 1))
    gradients = [vec(0, 3, -5), vec(0, 0, 0)]
    _, _, x, directions = local_round(algo, server, algo.init_client(server.x), gradients)
    same(directions[0], 0, 1, -1)
    same(directions[1], 0, 0, 0)
    same(x, 1, 0.5, 1.5)


def test_adam_ratio_where_the_square_underflows():
    tiny = torch.tensor([1e-30, 0.0, 1.0])
    ratio = adam_ratio(tiny, tiny * tiny, 0.0)
    assert ratio.tolist() == [0.0, 0.0, 1.0]


BAD = [
    ({"eta_l": 0}, "eta_l=0"),
    ({"eta_l": -1.0}, "eta_l=-1.0"),
    ({"eta_l": math.nan}, "eta_l=nan"),
    ({"eta_l": "fast"}, "eta_l='fast'"),
    ({"eta_g": math.inf}, "eta_g=inf"),
    ({"beta1": 1.0}, "beta1=1.0"),
    ({"beta2": -0.1}, "beta2=-0.1"),
    ({"eps": -1e-8}, "eps=-1e-08"),
    ({"v_hat": "keep"}, "v_hat='keep'.*'carry', 'restart'"),
    ({"init": True}, "init=True"),
]


@pytest.mark.parametrize(("settings", "message"), BAD)
def test_bad_hyperparameters_are_refused(settings, message):
    with pytest.raises(fadamgc.InputError, match=f"FAdamGC.{message}"):
        fadamgc.FAdamGC(**settings)


def test_other_rules():
    with pytest.raises(fadamgc.InputError, match="FedAvgM.beta=0"):
        fadamgc.FedAvgM(beta=0)
    with pytest.raises(fadamgc.InputError, match="Scaffold.option='III'"):
        fadamgc.Scaffold(option="III")  # type: ignore[arg-type]
    with pytest.raises(fadamgc.InputError, match="FedAdam.bias_correction=1 "):
        fadamgc.FedAdam(bias_correction=1)  # type: ignore[arg-type]
    with pytest.raises(fadamgc.InputError, match="FedAdam.v0=-1"):
        fadamgc.FedAdam(v0=-1)


def test_registry():
    assert set(fadamgc.algorithms()) >= {
        "fadamgc", "fa_nt", "local_adam", "fedavg", "fedavg_m", "scaffold", "scaffold_m", "fedadam", "fedams"
    }  # fmt: skip
    assert fadamgc.make_algorithm("fadamgc", eta_l=0.5) == fadamgc.FAdamGC(eta_l=0.5)
    with pytest.raises(fadamgc.InputError, match="'fadamcg' is not known; did you mean 'fadamgc'"):
        fadamgc.make_algorithm("fadamcg")
    with pytest.raises(fadamgc.InputError, match="no setting 'eta_1'; did you mean 'eta_l'"):
        fadamgc.make_algorithm("fedavg", eta_1=0.5)
    with pytest.raises(fadamgc.InputError, match="'fedavg' is taken by FedAvg"):
        fadamgc.register("fedavg", fadamgc.FedAMS)
    with pytest.raises(fadamgc.InputError, match="'no name'"):
        fadamgc.register("no name", fadamgc.FedAMS)
    assert issubclass(fadamgc.FAdamGC, Algorithm)
