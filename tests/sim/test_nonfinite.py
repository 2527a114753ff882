"""Updates that are not finite: named, or dropped, and nothing is changed by them."""

from __future__ import annotations

import pickle

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fadamgc
from problems import class_task, half_squared_error


def test_errors_cross_process_boundaries():
    error = pickle.loads(pickle.dumps(fadamgc.NonFiniteError(3, 7, 2, "update")))
    assert (error.client, error.round, error.step) == (3, 7, 2)
    assert "client 3" in str(error)


class Poisoned(nn.Module):
    """A model whose output is not finite for one client's data once its weights have moved."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 3)
        self.register_buffer("origin", self.linear.weight.detach().clone())

    def forward(self, x):
        poison = (self.linear.weight - self.origin).abs().sum().detach()
        for _ in range(12):
            poison = poison * 1e30  # 0 stays 0, all else overflows
        return self.linear(x) + torch.where(x[:, :1] > 50, poison, 0.0)


def poisoned_task():
    task = class_task(sizes=(6, 6, 6, 6))
    clients = list(task.pairs)
    clients[2] = (clients[2][0] + 100.0, clients[2][1])
    return fadamgc.Task(Poisoned(), F.cross_entropy, clients, task.test_pair)


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["loop", "threads", "vectorized"])
@pytest.mark.parametrize(
    "algo", [fadamgc.FAdamGC(), fadamgc.Scaffold(eta_l=1e-3), fadamgc.FedAvg(eta_l=1e-3)]
)
def test_a_non_finite_update_is_named(algo, executor):
    with pytest.raises(fadamgc.NonFiniteError, match="client 2 .* round 1, at local step 2") as error:
        fadamgc.simulate(algo, poisoned_task(), rounds=3, local_steps=4, executor=executor)
    assert (error.value.client, error.value.round, error.value.step) == (2, 1, 2)


@pytest.mark.parametrize("executor", ["loop", "threads", "vectorized"])
@pytest.mark.parametrize("name", ["fadamgc", "scaffold", "scaffold_m", "fa_nt", "local_adam", "fedadam"])
def test_a_dropped_client_is_left_as_it_was(name, executor):
    algo = fadamgc.make_algorithm(name, eta_l=1e-3)
    task = poisoned_task()
    options = {"local_steps": 4, "dtype": torch.float64, "executor": executor}
    everybody = [(range(4), range(4))] * 3
    run = fadamgc.simulate(algo, task, schedule=everybody, on_nonfinite="drop", **options)
    assert [r.dropped for r in run.history] == [(2,)] * 3
    assert [r.sampled for r in run.history] == [(0, 1, 2, 3)] * 3
    assert all(torch.equal(a, b) for a, b in zip(run.clients[2], run.clients.initial, strict=True))
    assert torch.isfinite(run.x).all()
    # The rest is what it would have been without the client; n is still 4.
    rest = fadamgc.simulate(algo, task, schedule=[([0, 1, 3], [0, 1, 3])] * 3, **options)
    torch.testing.assert_close(run.x, rest.x, rtol=1e-12, atol=1e-13)
    if "y" in type(run.server)._fields:
        mean = torch.stack([client.y for client in run.clients]).mean(0)
        torch.testing.assert_close(run.server.y, mean, rtol=1e-10, atol=1e-13)
        assert run.server.y.abs().max() > 0


def test_if_all_are_dropped_the_server_stands_still():
    algo, task = fadamgc.FedAdam(eta_l=1e-3), poisoned_task()
    schedule = [([0], []), ([2], []), ([0], [])]
    run = fadamgc.simulate(algo, task, schedule=schedule, local_steps=3, on_nonfinite="drop")
    alone = fadamgc.simulate(algo, task, schedule=[([0], [])], local_steps=3)
    assert run.history[1].dropped == (2,)
    assert run.history[1].train_loss is None
    assert run.history[1].test_loss == run.history[0].test_loss == alone.history[0].test_loss


@pytest.mark.slow
@pytest.mark.parametrize("on_nonfinite", ["error", "drop"])
def test_a_server_that_is_not_finite_is_named(on_nonfinite):
    """All updates are finite, and the step of the server is too large: no client is to blame."""
    task = class_task()
    with pytest.raises(fadamgc.NonFiniteError, match="the server's x is not finite after round 1") as error:
        fadamgc.simulate(fadamgc.FedAvg(eta_l=1e3, eta_g=1e37), task, rounds=3, on_nonfinite=on_nonfinite)
    assert error.value.client is None
    assert str(pickle.loads(pickle.dumps(error.value))) == str(error.value)


def test_an_initial_model_that_is_not_finite_is_refused():
    task = class_task()
    with torch.no_grad():
        next(task.model.parameters()).view(-1)[0] = float("nan")
    for on_nonfinite in ("error", "drop"):
        with pytest.raises(fadamgc.InputError, match="model has parameters or buffers that are not finite"):
            fadamgc.simulate(fadamgc.FedAvg(), task, rounds=1, on_nonfinite=on_nonfinite)


def test_a_gradient_at_the_start_that_is_not_finite_is_named():
    task = class_task(sizes=(4, 4, 4))
    task.pairs[1][0][0] = float("inf")
    with pytest.raises(fadamgc.NonFiniteError, match="gradient of client 1 at the initial model"):
        fadamgc.simulate(fadamgc.FAdamGC(init="gradient"), task, rounds=1)


def test_a_run_that_has_lost_its_clients_ends_with_an_error(tmp_path):
    """Once the updates of most clients were dropped in a row, there is nothing to wait for."""
    task, algo = class_task(sizes=(6,) * 8), fadamgc.FedAvg(eta_l=1e39)
    options = {"rounds": 20, "sampled": 2, "local_steps": 3, "on_nonfinite": "drop", "executor": "loop"}
    with pytest.raises(fadamgc.NonFiniteError, match="no client is left in round .* 8 clients") as whole:
        fadamgc.simulate(algo, task, **options)
    assert whole.value.round >= 3
    options |= {"checkpoint": tmp_path / "c"}
    fadamgc.simulate(algo, task, **options | {"rounds": 2})
    with pytest.raises(fadamgc.NonFiniteError) as resumed:
        fadamgc.simulate(algo, task, resume=True, **options)
    assert str(resumed.value) == str(whole.value)


def test_overflow_of_a_second_moment_is_seen():
    """A gradient whose square overflows leaves x finite and v infinite: the client would never move again."""
    task = fadamgc.Task(
        nn.Linear(5, 1), half_squared_error, [(torch.full((2, 5), 1e15), torch.full((2, 1), 1e15))]
    )
    with pytest.raises(fadamgc.NonFiniteError, match="client 0 .* round 1, at local step 1"):
        fadamgc.simulate(fadamgc.LocalAdam(), task, rounds=1, local_steps=2)


def test_an_error_changes_no_state():
    task = class_task()
    before = [p.clone() for p in task.model.parameters()]
    with pytest.raises(fadamgc.InputError):
        fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=1, sampled=99)
    assert all(torch.equal(a, b) for a, b in zip(before, task.model.parameters(), strict=True))
