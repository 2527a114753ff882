"""ClientOptimizer beyond its agreement with the simulator (which the battery shows)."""

from __future__ import annotations

import copy
import io
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fadamgc
from fadamgc import ClientOptimizer, Cohort, optim, pieces
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
    return torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad])


def train(optimizer: ClientOptimizer, model: nn.Module, steps: int, start: int = 0) -> None:
    for k in range(start, start + steps):
        optimizer.zero_grad()
        F.cross_entropy(model(X[k : k + 4]), Y[k : k + 4]).backward()
        optimizer.step()


def start(algo, optimizer, server) -> None:
    down = algo.broadcast(server)
    optimizer.start_round(down, 0.1 * down.x if algo.round_gradient else None)


def a_round(algo, optimizer, model, server, steps=3, **options):
    start(algo, optimizer, server)
    train(optimizer, model, steps)
    up = optimizer.finish_round(**options)
    return algo.aggregate(server, up, Cohort(n=2, S=1, K=steps))


@pytest.mark.parametrize("algo", ALGORITHMS)
def test_state_dict_round_trip_between_and_inside_rounds(algo):
    """Saved in the middle of the second round and loaded into a new process's objects, nothing changes."""
    model = mlp()
    optimizer = ClientOptimizer(model.parameters(), algo)
    server = a_round(algo, optimizer, model, algo.init_server(vector(model)))
    start(algo, optimizer, server)
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


NUMBER_IN_UP = ("fednova", "fedexp", "fedadamw")


@pytest.mark.parametrize("algo", [algo for algo in ALGORITHMS if algo.id not in NUMBER_IN_UP])
def test_groups_with_one_lr_are_as_one_group(algo):
    one, two = mlp(), mlp()
    halves = [{"params": two[0].parameters()}, {"params": two[2].parameters()}]
    a, b = ClientOptimizer(one.parameters(), algo), ClientOptimizer(halves, algo)
    server_a = server_b = algo.init_server(vector(one))
    for _ in range(3):
        server_a = a_round(algo, a, one, server_a)
        server_b = a_round(algo, b, two, server_b)
    torch.testing.assert_close(server_a.x, server_b.x, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("name", NUMBER_IN_UP)
def test_a_number_in_the_clients_message_needs_one_group(name):
    algo, model = fadamgc.make_algorithm(name), mlp()
    groups = [{"params": model[0].parameters()}, {"params": model[2].parameters()}]
    optimizer = ClientOptimizer(groups, algo)
    before = vector(model)
    with pytest.raises(
        fadamgc.InputError, match=r"up\.\w+ of .* shape \(1,\), which 2 parameter groups cannot"
    ):
        optimizer.start_round(algo.broadcast(algo.init_server(torch.zeros(75))))
    assert torch.equal(vector(model), before)
    assert not optimizer.in_round


def test_a_number_in_the_servers_message_goes_to_every_group():
    algo = fadamgc.FedAdamW(eta_l=0.1, second_moment="full")
    servers = []
    for groups in (1, 2):
        model = mlp()
        parts = [model] if groups == 1 else [model[0], model[2]]
        optimizer = ClientOptimizer([{"params": part.parameters()} for part in parts], algo)
        server = algo.init_server(vector(model))._replace(t=torch.tensor([5.0]))
        with pytest.raises(fadamgc.InputError, match=r"down.t of shape \(2,\) does not fit.*shape is \(1,\)"):
            optimizer.start_round(algo.broadcast(server._replace(t=torch.ones(2))))
        servers.append(a_round(algo, optimizer, model, server))
    torch.testing.assert_close(*servers)


def test_block_means_go_to_one_group():
    model = mlp()
    algo = fadamgc.FedAdamW(eta_l=0.1).for_model([p.shape for p in model.parameters()])
    optimizer = ClientOptimizer(model.parameters(), algo)
    server = a_round(algo, optimizer, model, algo.init_server(vector(model)))
    assert server.v.shape == (4,)


# Long vectors: steps in place and in pieces.

COMPOSITIONS = {
    "adamw": fadamgc.compose(fadamgc.local.AdamW(bias_correction=True, amsgrad=True), "pre+direction"),
    "lion": fadamgc.compose(fadamgc.local.Lion(), "pre"),
    "eps0": fadamgc.FAdamGC(eps=0.0),
}
LONG = [*ALGORITHMS, *(pytest.param(algo, id=name) for name, algo in COMPOSITIONS.items())]


class Long(nn.Module):
    """Large and small parameters, one that is not contiguous, and one without a gradient."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        shapes = [(20, 9), (5,), (3,), (4, 3, 5, 5), (7,), (2, 3)]
        self.all = nn.ParameterList(torch.randn(shape, generator=generator).to(dtype) for shape in shapes)
        self.all[3].data = self.all[3].data.to(memory_format=torch.channels_last)

    def set_gradients(self, k: int) -> None:
        for i, p in enumerate(self.all):
            generator = torch.Generator().manual_seed(100 * k + i)
            p.grad = torch.randn(p.shape, generator=generator).to(p.dtype) if i != 4 else None
            if i == 1:
                p.grad[0] = 0


def long_run(algo, dtype, piece, monkeypatch):
    monkeypatch.setattr(optim, "PIECE", piece)
    model = Long(dtype)
    optimizer = ClientOptimizer(model.parameters(), algo)
    server = algo.init_server(vector(model))
    for t in range(3):
        start(algo, optimizer, server)
        for k in range(3):
            model.set_gradients(3 * t + k)
            optimizer.step()
            if k == 1:
                saved = copy.deepcopy(optimizer.state_dict())  # and the next step starts from copies
                kept = optimizer.state_dict()
        for name, value in kept["state"][0].items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(value, saved["state"][0][name]), name
        recorded = optimizer._programs[0].program
        up = optimizer.finish_round(tracked=t != 1)
        server = algo.aggregate(server, up, Cohort(n=2, S=1, K=3))
    return [*leaves(server), *leaves(up), *optimizer.state[model.all[0]].values()], recorded


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("algo", LONG)
def test_steps_in_place_have_the_same_numbers(algo, dtype, monkeypatch):
    """Pieces of 16 numbers, in numpy (one thread) and in torch, next to whole vectors."""
    expected, recorded = long_run(algo, dtype, 1 << 20, monkeypatch)
    assert recorded is None
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        result, recorded = long_run(algo, dtype, 16, monkeypatch)
        assert recorded is not None
        roots = any(operation.function is torch.sqrt for operation in recorded.on_vectors)
        for a, b in zip(result, expected, strict=True):
            if threads == 1 and roots and dtype != torch.bfloat16:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
            else:
                assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "algo",
    [fadamgc.FedLALR(eta_l=0.1), fadamgc.compose(fadamgc.local.AdaGrad(0.1, eps=0.0), "pre")],
    ids=["FedLALR", "AdaGrad"],
)
def test_a_choice_with_where_runs_in_numpy_with_the_same_bits(algo, dtype, monkeypatch):
    """With torch's square root, whose rounding numpy does not have; some numbers have v = 0, one NaN."""

    def sqrt(v, out):
        torch.sqrt(torch.from_numpy(v), out=torch.from_numpy(out))

    monkeypatch.setitem(pieces.UFUNCS, "sqrt", sqrt)
    monkeypatch.setattr(optim, "PIECE", 16)
    results = []
    for threads in (1, 2):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        random = torch.Generator().manual_seed(0)
        parameter = nn.Parameter(torch.randn(100, generator=random, dtype=dtype))
        optimizer = ClientOptimizer([parameter], algo)
        optimizer.start_round(algo.broadcast(algo.init_server(parameter.detach().clone())))
        for _ in range(4):
            parameter.grad = torch.randn(100, generator=random, dtype=dtype)
            parameter.grad[::7], parameter.grad[50] = 0.0, torch.nan
            optimizer.step()
        run = optimizer._steps[0].run.__self__
        assert isinstance(run, pieces.NumpyProgram) == (threads == 1)
        results.append([parameter.detach(), *leaves(optimizer.finish_round())])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("place", ["yes", "no", "elsewhere"])
def test_where_writes_into_the_memory_of_an_argument(place):
    condition = np.array([True, False, True])
    yes, no = np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0])
    out = {"yes": yes, "no": no}.get(place, np.empty(3))
    pieces.UFUNCS["where"](condition, yes, no, out)
    assert out.tolist() == [1.0, 5.0, 3.0]


def test_a_step_that_is_not_pointwise_runs_as_it_is_written(monkeypatch):
    @dataclass(frozen=True)
    class Normalized(fadamgc.FedAvg):
        def step(self, down, client, local, x, g):
            return x - self.eta_l * g / g.norm(), local

    expected, _ = long_run(Normalized(), torch.float32, 1 << 20, monkeypatch)
    result, recorded = long_run(Normalized(), torch.float32, 16, monkeypatch)
    assert recorded is None
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))


def test_autograd_sees_steps_in_place(monkeypatch):
    """A graph from before the step refuses to run backward after it, as with every torch optimizer."""
    monkeypatch.setattr(optim, "PIECE", 16)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 1)
    w = nn.Parameter(torch.ones(40))
    algo = fadamgc.FAdamGC()
    optimizer = ClientOptimizer([w], algo)
    optimizer.start_round(algo.broadcast(algo.init_server(torch.ones(40))))
    loss = (w * w).sum()
    w.grad = torch.ones(40)
    optimizer.step()
    assert optimizer._programs[0].program is not None
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_two_optimizers_that_share_a_state_dict_do_not_share_memory(monkeypatch):
    monkeypatch.setattr(optim, "PIECE", 16)
    algo, models = fadamgc.FAdamGC(), (mlp(), mlp())
    a, b = (ClientOptimizer(model.parameters(), algo) for model in models)
    a.start_round(algo.broadcast(algo.init_server(vector(models[0]))))
    train(a, models[0], 2)
    models[1].load_state_dict(models[0].state_dict())
    b.load_state_dict(a.state_dict())
    train(a, models[0], 3, start=2)
    train(b, models[1], 3, start=2)
    assert all(torch.equal(x, y) for x, y in zip(a.finish_round(), b.finish_round(), strict=True))


def test_a_converted_model_is_detected():
    algo, model = fadamgc.FAdamGC(), mlp()
    optimizer = ClientOptimizer(model.parameters(), algo)
    server = a_round(algo, optimizer, model, algo.init_server(vector(model)))
    model.double()
    with pytest.raises(
        fadamgc.FadamgcError, match="float64 on cpu, but client.y of the optimizer is .*float32"
    ):
        optimizer.start_round(algo.broadcast(server))
    assert not optimizer.in_round
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.start_round(algo.broadcast(server))
    assert optimizer.state[model[0].weight]["local.m"].dtype == torch.float64
    model.float()
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    with pytest.raises(fadamgc.FadamgcError, match="the model was converted"):
        optimizer.step()


def test_parameters_that_are_frozen_later_are_detected():
    algo, model = fadamgc.FAdamGC(), mlp()
    optimizer = ClientOptimizer(model.parameters(), algo)
    server = a_round(algo, optimizer, model, algo.init_server(vector(model)))
    optimizer.start_round(algo.broadcast(server))
    model[2].weight.requires_grad_(False)
    with pytest.raises(fadamgc.FadamgcError, match="51 trainable numbers, and had 75"):
        optimizer.step()
    model[2].weight.requires_grad_(True)
    train(optimizer, model, 1)
    optimizer.finish_round()
    model[2].weight.requires_grad_(False)
    with pytest.raises(fadamgc.FadamgcError, match="51 trainable numbers, but client.y .* has 75"):
        optimizer.start_round(algo.broadcast(algo.init_server(vector(model))))


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


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda down: down._replace(x=down.x * torch.nan), "down.x is not finite"),
        (lambda down: down._replace(y=down.y.long()), "down.y is of type torch.int64"),
        (lambda down: down._replace(y=None), "down has no tensors; FAdamGC sends down.x, down.y"),
    ],
)
def test_a_message_that_no_server_sends_is_refused(change, message):
    model, algo = torch.nn.Linear(2, 1), fadamgc.FAdamGC()
    x = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    optimizer = fadamgc.ClientOptimizer(model.parameters(), algo)
    with pytest.raises(fadamgc.InputError, match=message):
        optimizer.start_round(change(algo.broadcast(algo.init_server(x))))
    assert torch.equal(torch.nn.utils.parameters_to_vector(model.parameters()), x)
    assert not optimizer.in_round


def test_a_message_of_another_composition_is_refused():
    model = torch.nn.Linear(2, 1)
    x = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    algo = fadamgc.compose(fadamgc.local.Adam(), "pre")
    other = fadamgc.compose(fadamgc.local.Adam(v="share"))
    optimizer = fadamgc.ClientOptimizer(model.parameters(), algo)
    with pytest.raises(fadamgc.InputError, match="down has down.x, down.moments.v.v; Composed sends"):
        optimizer.start_round(other.broadcast(other.init_server(x)))


def test_a_step_size_that_a_scheduler_has_ended_is_refused():
    model, algo = torch.nn.Linear(2, 1), fadamgc.FAdamGC()
    x = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    optimizer = fadamgc.ClientOptimizer(model.parameters(), algo)
    optimizer.param_groups[0]["lr"] = 0.0
    with pytest.raises(fadamgc.InputError, match=r"lr=0\.0 of a parameter group is not accepted"):
        optimizer.start_round(algo.broadcast(algo.init_server(x)))
