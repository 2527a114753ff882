"""ClientOptimizer beyond its agreement with the simulator (which the battery shows)."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fadamgc
from fadamgc import ClientOptimizer, Cohort
from fadamgc.methods import fadamgc as flat
from fadamgc.tree import leaves, rebuild
from problems import class_task, mlp

X, Y = class_task().pairs[1]


class Correction(NamedTuple):
    y: torch.Tensor


class Down(NamedTuple):
    x: torch.Tensor
    correction: Correction


class Kept(NamedTuple):
    v: torch.Tensor
    v_hat: torch.Tensor


class Client(NamedTuple):
    y: torch.Tensor
    kept: Kept


class Moments(NamedTuple):
    m: torch.Tensor
    kept: Kept


class Local(NamedTuple):
    moments: Moments
    g_sum: torch.Tensor


class Change(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


class Up(NamedTuple):
    change: Change


CLIENT, LOCAL, UP = Client(0, Kept(0, 0)), Local(Moments(0, Kept(0, 0)), 0), Up(Change(0, 0))


@dataclass(frozen=True)
class Nested(fadamgc.FAdamGC):
    """FAdamGC whose states and messages contain NamedTuples."""

    def init_client(self, x, g=None):
        return rebuild(CLIENT, super().init_client(x, g))

    def broadcast(self, server):
        return Down(server.x, Correction(server.y))

    def begin(self, down, client, g=None):
        return rebuild(LOCAL, super().begin(flat.Down(*leaves(down)), flat.Client(*leaves(client)), g))

    def step(self, down, client, local, x, g):
        states = flat.Down(*leaves(down)), flat.Client(*leaves(client)), flat.Local(*leaves(local))
        x, local = super().step(*states, x, g)
        return x, rebuild(LOCAL, local)

    def finish(self, down, client, local, x, K, tracked):
        states = flat.Down(*leaves(down)), flat.Client(*leaves(client)), flat.Local(*leaves(local))
        client, up = super().finish(*states, x, K, tracked)
        return rebuild(CLIENT, client), rebuild(UP, up)

    def aggregate(self, server, total, cohort):
        return super().aggregate(server, flat.Up(*leaves(total)), cohort)


ALGORITHMS = [pytest.param(fadamgc.make_algorithm(name), id=name) for name in fadamgc.algorithms()]
ALGORITHMS += [pytest.param(Nested(), id="nested")]


def vector(model: nn.Module) -> torch.Tensor:
    return (
        torch.nn.utils.parameters_to_vector(p for p in model.parameters() if p.requires_grad).detach().clone()
    )


def train(optimizer: ClientOptimizer, model: nn.Module, steps: int, start: int = 0) -> None:
    for k in range(start, start + steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X[k : k + 4]), Y[k : k + 4]).backward()
        optimizer.step()


def a_round(algo, optimizer, model, server, steps=3, **options):
    optimizer.start_round(algo.broadcast(server))
    train(optimizer, model, steps)
    up = optimizer.finish_round(**options)
    return algo.aggregate(server, up, Cohort(n=2, S=1, K=steps))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_state_dict_round_trip_between_and_inside_rounds(algo):
    """Saved in the middle of the second round and loaded into a new process's objects, nothing changes."""
    model = mlp()
    optimizer = ClientOptimizer(model.parameters(), algo)
    server = a_round(algo, optimizer, model, algo.init_server(vector(model)))
    optimizer.start_round(algo.broadcast(server))
    train(optimizer, model, 2)
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    train(optimizer, model, 3, start=2)
    expected = optimizer.finish_round()

    file.seek(0)
    saved = torch.load(file, weights_only=True)
    other = mlp(seed=5)
    other.load_state_dict(saved["model"])
    resumed = ClientOptimizer(other.parameters(), algo)
    resumed.load_state_dict(saved["optimizer"])
    train(resumed, other, 3, start=2)
    up = resumed.finish_round()
    assert all(torch.equal(a, b) for a, b in zip(leaves(up), leaves(expected), strict=True))
    # and the kept state is the same, too: one more round
    third, again = (a_round(algo, o, m, server).x for o, m in ((optimizer, model), (resumed, other)))
    assert torch.equal(third, again)


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_groups_with_one_lr_are_as_one_group(algo):
    one, two = mlp(), mlp()
    halves = [{"params": two[0].parameters()}, {"params": two[2].parameters()}]
    a, b = ClientOptimizer(one.parameters(), algo), ClientOptimizer(halves, algo)
    server_a = server_b = algo.init_server(vector(one))
    for _ in range(3):
        server_a = a_round(algo, a, one, server_a)
        server_b = a_round(algo, b, two, server_b)
    torch.testing.assert_close(server_a.x, server_b.x, rtol=1e-6, atol=1e-7)


def test_nested_states_give_the_same_numbers():
    servers = []
    for algo in (fadamgc.FAdamGC(eta_l=0.1), Nested(eta_l=0.1)):
        model = mlp()
        optimizer = ClientOptimizer(model.parameters(), algo)
        server = algo.init_server(vector(model))
        for tracked in (True, False, True):
            server = a_round(algo, optimizer, model, server, tracked=tracked)
        servers.append(server)
    assert all(torch.equal(a, b) for a, b in zip(*servers, strict=True))
    assert {"client.y", "client.kept.v", "client.kept.v_hat"} == set(optimizer.state[model[0].weight])
    short = Nested().broadcast(flat.Server(vector(model), torch.zeros(3)))
    with pytest.raises(fadamgc.InputError, match=r"down.correction.y of shape \(3,\) does not fit"):
        optimizer.start_round(short)


@pytest.mark.parametrize("algo", [fadamgc.Scaffold(eta_l=0.1), fadamgc.FANT(eta_l=0.1)])
def test_groups_with_different_lr_use_their_own_in_every_rule(algo):
    """SCAFFOLD's y_i is the mean gradient whatever the step size: only if each group divides by its own."""
    model = mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters(), "lr": 0.02}]
    optimizer = ClientOptimizer(groups, algo)
    optimizer.start_round(algo.broadcast(algo.init_server(vector(model))))
    directions = []
    for k in range(3):
        before = vector(model)
        train(optimizer, model, 1, start=k)
        rate = torch.cat([torch.full((48,), 0.1), torch.full((27,), 0.02)])
        directions.append((before - vector(model)) / rate)
    up = optimizer.finish_round()
    torch.testing.assert_close(up.dy, torch.stack(directions).mean(0), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("cls", [fadamgc.Scaffold, fadamgc.FANT])
def test_a_scheduler_inside_a_round_does_not_spoil_the_correction(cls):
    results = []
    for schedule in (False, True):
        model = mlp()
        optimizer = ClientOptimizer(model.parameters(), cls(eta_l=0.1))
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        algo = optimizer.algorithm
        optimizer.start_round(algo.broadcast(algo.init_server(vector(model))))
        train(optimizer, model, 3)
        if schedule:
            scheduler.step()
        up = optimizer.finish_round()
        results.append(up.dy)
        if schedule:  # the new step size counts from the next round on
            optimizer.start_round(algo.broadcast(algo.init_server(vector(model))))
            before = vector(model)
            assert optimizer.param_groups[0]["lr"] == 0.05
            train(optimizer, model, 1)
            y = optimizer.state[model[0].weight]["client.y"]
            if cls is fadamgc.Scaffold:
                g = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
                torch.testing.assert_close(vector(model), before - 0.05 * (g - y))
    assert torch.equal(results[0], results[1])


def test_start_round_loads_the_servers_model():
    model = mlp()
    algo = fadamgc.FAdamGC()
    optimizer = ClientOptimizer(model.parameters(), algo)
    x = torch.arange(75.0)
    optimizer.start_round(algo.broadcast(algo.init_server(x)))
    assert torch.equal(vector(model), x)


def test_frozen_parameters_are_skipped():
    model = mlp()
    model[0].weight.requires_grad_(False)
    frozen = model[0].weight.clone()
    algo = fadamgc.FAdamGC()
    optimizer = ClientOptimizer(model.parameters(), algo)
    server = a_round(algo, optimizer, model, algo.init_server(vector(model)))
    assert server.x.shape == (75 - 40,)
    assert torch.equal(model[0].weight, frozen)


def test_a_parameter_without_gradient_counts_as_zero():
    model = mlp()
    algo = fadamgc.FedAvg(eta_l=1.0)
    optimizer = ClientOptimizer(model.parameters(), algo)
    server = algo.init_server(vector(model))
    optimizer.start_round(algo.broadcast(server))
    model[0](X).sum().backward()
    optimizer.step()
    up = optimizer.finish_round()
    assert (up.dx[48:] == 0).all()
    assert (up.dx[:48] != 0).any()


def test_a_discarded_round_leaves_the_state_alone():
    algo = fadamgc.FAdamGC(eta_l=0.01)
    model, other = mlp(), mlp()
    a, b = ClientOptimizer(model.parameters(), algo), ClientOptimizer(other.parameters(), algo)
    server = algo.init_server(vector(model))
    a.start_round(algo.broadcast(server))
    train(a, model, 2)  # never finished
    one, two = a_round(algo, a, model, server), a_round(algo, b, other, server)
    assert torch.equal(one.x, two.x)
    assert torch.equal(one.y, two.y)


def test_a_group_may_be_added_before_the_first_round():
    algo = fadamgc.FAdamGC()
    one, two = mlp(), mlp()
    a, b = ClientOptimizer(one.parameters(), algo), ClientOptimizer(two[0].parameters(), algo)
    b.add_param_group({"params": two[2].parameters()})
    servers = [a_round(algo, o, m, algo.init_server(vector(m))) for o, m in ((a, one), (b, two))]
    torch.testing.assert_close(servers[0].x, servers[1].x)


def test_untracked():
    algo = fadamgc.FAdamGC()
    model = mlp()
    optimizer = ClientOptimizer(model.parameters(), algo)
    server = a_round(algo, optimizer, model, algo.init_server(vector(model)), tracked=False)
    assert (server.y == 0).all()
    assert (optimizer.state[model[0].weight]["client.y"] == 0).all()
    assert (optimizer.state[model[0].weight]["client.v"] != 0).any()


def test_closure_and_copy():
    algo = fadamgc.FedAvg()
    model = mlp()
    optimizer = ClientOptimizer(model.parameters(), algo)
    optimizer.start_round(algo.broadcast(algo.init_server(vector(model))))

    def closure() -> float:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(X), Y)
        loss.backward()
        return float(loss.detach())

    assert optimizer.step(closure) > 0
    assert copy.deepcopy(optimizer).algorithm == algo


def test_errors():
    algo = fadamgc.FAdamGC()
    model = mlp()
    optimizer = ClientOptimizer(model.parameters(), algo)
    down = algo.broadcast(algo.init_server(vector(model)))
    with pytest.raises(fadamgc.FadamgcError, match="step.. outside a round; call start_round"):
        optimizer.step()
    with pytest.raises(fadamgc.FadamgcError, match="finish_round.. outside a round"):
        optimizer.finish_round()
    with pytest.raises(fadamgc.InputError, match=r"down.x of shape \(3,\) does not fit parameters of 75"):
        optimizer.start_round(algo.broadcast(algo.init_server(torch.zeros(3))))
    optimizer.start_round(down)
    with pytest.raises(fadamgc.FadamgcError, match="before any step"):
        optimizer.finish_round()
    with pytest.raises(fadamgc.InputError, match="no option 'lrr'; did you mean 'lr'"):
        ClientOptimizer([{"params": model.parameters(), "lrr": 1}], algo)
    with pytest.raises(fadamgc.InputError, match="starts from gradients: pass gradient="):
        ClientOptimizer(model.parameters(), fadamgc.FAdamGC(init="gradient"))
    scaffold = fadamgc.Scaffold(option="I")
    one = ClientOptimizer(model.parameters(), scaffold)
    with pytest.raises(fadamgc.InputError, match="needs the client's gradient at x"):
        one.start_round(scaffold.broadcast(scaffold.init_server(vector(model))))
    with pytest.raises(fadamgc.InputError, match="down of type Down is not what Scaffold sends"):
        one.start_round(down)
    with pytest.raises(fadamgc.InputError, match="down of type Tensor is not what Scaffold sends"):
        one.start_round(vector(model))
    with pytest.raises(fadamgc.FadamgcError, match="add_param_group.. after the first start_round"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
    with pytest.raises(fadamgc.InputError, match="algorithm='fadamgc' is not an algorithm"):
        ClientOptimizer(model.parameters(), "fadamgc")  # type: ignore[arg-type]
    other = ClientOptimizer(model.parameters(), fadamgc.Scaffold())
    other.load_state_dict(optimizer.state_dict())
    with pytest.raises(fadamgc.FadamgcError, match="state has no .*another algorithm"):
        other.step()
    with pytest.raises(fadamgc.InputError, match="one type and on one device"):
        ClientOptimizer([nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2).double())], algo)
    with pytest.raises(fadamgc.InputError, match="one type and on one device"):
        ClientOptimizer([nn.Parameter(torch.ones(2), requires_grad=False)], algo)
