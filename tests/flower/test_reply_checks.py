"""Updates out of all proportion, and a model that is of no use."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch

import fadamgc
from fadamgc.errors import InputError
from fadamgc.federation.settings import Settings
from fadamgc.flower.client_round import LocalClient
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.coordinator import Scale
from fadamgc.flower.protocol import RefusedError
from fadamgc.samples import Rows
from problems import class_task

flwr = pytest.importorskip("flwr", reason="Flower is not installed")


from world import SETTINGS, SIZES, World  # noqa: E402

# Updates out of all proportion.


def poisoned_round(world, change, client=1):
    """A round in which one client's reply is changed."""
    for message in world.messages():
        reply = world.deliver(message)
        if reply.client == client:
            reply = change(reply)
        world.server.consider(reply.client, reply)
    return world.server.close()


def times(name, factor):
    return lambda reply: reply._replace(up=reply.up | {name: reply.up[name] * factor})


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dx", "dy"])
@pytest.mark.parametrize("rounds", [0, 2])
@pytest.mark.parametrize("sizes", [SIZES, SIZES[:2]])
def test_one_huge_update_does_not_count(name, rounds, sizes, tmp_path):
    world = World(tmp_path, sizes=sizes, sampled=None, tracked=None, rounds=9)
    for _ in range(rounds):
        world.round()
    record = poisoned_round(world, times(name, 1e30))
    assert record.dropped == (1,)
    assert f"{name} has norm" in world.server.refusals[-1]
    assert "more than max_norm_ratio=100 times" in world.server.refusals[-1]
    world.check()
    world.start()  # the same after a restart
    assert poisoned_round(world, times(name, 1e30)).dropped == (1,)
    world.check()
    assert world.round().dropped == ()
    world.check()
    assert world.server.server.x.abs().max() < 10


def test_a_lone_client_is_compared_with_earlier_rounds(tmp_path):
    world = World(tmp_path, sampled=1, tracked=1, rounds=20)
    for _ in range(3):
        world.round()
    scales = world.server.checks.scales
    world.start()
    assert world.server.checks.scales == scales  # a server that resumes has the same rule
    (client,) = world.settings.who(4, 3).sampled
    assert poisoned_round(world, times("dx", 1e30), client).dropped == (client,)
    world.check()


def test_the_bound_can_be_changed_or_turned_off(tmp_path):
    loose = World(tmp_path / "loose", sampled=3, tracked=3, max_norm_ratio=0.0)
    assert poisoned_round(loose, times("dx", 1e6)).dropped == ()
    strict = World(tmp_path / "strict", sampled=3, tracked=3, max_norm_ratio=3.0)
    strict.round()
    before = strict.server.server.x.norm()
    assert float(before) > 0
    state = strict.server.federation.state
    zero = state.server._replace(x=torch.zeros_like(state.server.x))
    strict.server.federation.state = state._replace(server=zero)
    assert poisoned_round(strict, times("dx", 20)).dropped == (1,)
    with pytest.raises(InputError, match="max_norm_ratio=0.5 is not accepted; it must be a number > 1"):
        World(tmp_path / "none", max_norm_ratio=0.5)


def test_the_typical_norm():
    assert Scale().reference([5.0]) == 0  # nothing to compare with
    assert Scale().reference([5.0, 0.0, 0.0]) == 0
    assert Scale().reference([1.0, 1e30]) == 1
    assert Scale().reference([1.0, 2.0, 1e30]) == 2
    scale = Scale().after([1.0, 2.0, 3.0])
    assert scale == Scale(2.0, (2.0,))
    assert scale.after([0.0]) == scale
    for _ in range(10):
        scale = scale.after([1e-6, 1e-6, 1e-6])  # clients that have converged
    assert scale == Scale(2.0, (1e-6,) * 5)
    assert scale.reference([1e-6, 1e-6, 1.0]) == 2  # a client that comes back after a long time
    assert scale.after([1e30]).largest == 2  # one client that is alone in a round
    assert scale.reference([400.0, 500.0, 600.0]) == 500  # all of them grow


@pytest.mark.slow
def test_honest_clients_of_very_different_sizes_are_not_refused(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    task = class_task(sizes=(4, 4, 4, 1600), model=model)
    named = {"local_epochs": 1, "batch_size": 4, "seed": 5}
    for sampled in (4, 1):
        world = World.__new__(World)
        world.folder, world.algo, world.options = (
            tmp_path / str(sampled),
            fadamgc.make_algorithm("scaffold"),
            {},
        )
        world.task, world.settings = task, Settings(rounds=6, sampled=sampled, **named)
        world.parties = [
            LocalClient(fadamgc.Task(model, task.loss, [pair]), i) for i, pair in enumerate(task.pairs)
        ]
        world.keepers = [ClientStore(world.folder / "node", "test", i) for i in range(4)]
        world.start()
        assert all(world.round().dropped == () for _ in range(6))
        run = fadamgc.simulate(world.algo, task, rounds=6, sampled=sampled, executor="loop", **named)
        assert torch.equal(run.x, world.server.server.x)


def test_a_huge_first_gradient_is_requested_again(tmp_path):
    world = World(tmp_path, fadamgc.FAdamGC(init="gradient"))
    poisoned_round(world, times("g", 1e30))
    assert world.server.needs_setup  # it is asked for again
    assert world.server.answered == (0, 2)
    world.setup()
    world.round()
    assert world.server.server.y.abs().max() < 100


def norm_world(tmp_path, rounds=6, **options):
    """A world whose model has buffers."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    world = World.__new__(World)
    world.folder, world.algo, world.options = tmp_path, fadamgc.FAdamGC(eta_l=0.05), options
    world.task = class_task(sizes=SIZES, model=model)
    world.settings = Settings(rounds=rounds, dtype=None, **SETTINGS | {"sampled": 3, "tracked": 3})
    world.parties = [
        LocalClient(fadamgc.Task(model, world.task.loss, [pair]), i)
        for i, pair in enumerate(world.task.pairs)
    ]
    world.keepers = [ClientStore(tmp_path / "node", "test", i) for i in range(3)]
    world.start()
    return world


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("1.running_mean", lambda b: b + 1e30, "1.running_mean has norm"),
        ("1.running_var", lambda b: b + 1e30, "1.running_var has norm"),
        ("1.running_var", lambda b: -b, "1.running_var has variances below 0"),
        ("1.num_batches_tracked", lambda b: b + 10**15, "1.num_batches_tracked has norm"),
    ],
)
@pytest.mark.parametrize("rounds", [0, 2])
def test_buffers_out_of_all_proportion_do_not_count(name, change, said, rounds, tmp_path):
    world = norm_world(tmp_path, max_update_norm=1e6)
    for _ in range(rounds):
        assert world.round().dropped == ()
    replies = [world.deliver(message) for message in world.messages()]
    for reply in replies:
        bad = reply._replace(buffers=dict(reply.buffers) | {name: change(reply.buffers[name])})
        with suppress(RefusedError):
            world.server.consider(reply.client, bad if reply.client == 1 else reply)
    assert world.server.close().dropped == (1,)
    assert said in world.server.refusals[-1]
    world.round()
    assert world.server.history[-1].test_loss < 10
    assert all(value.abs().max() < 1e6 for value in world.server.buffers.values())
    took = [([i for i in r.sampled if i not in r.dropped],) * 2 for r in world.server.history]
    named = {k: v for k, v in SETTINGS.items() if k not in ("sampled", "tracked")}
    run = fadamgc.simulate(world.algo, world.task, schedule=took, executor="loop", **named)
    assert torch.equal(run.x, world.server.server.x)


# A model that is of no use.


@pytest.mark.parametrize("eval_every", [1, 100])
def test_a_round_without_a_finite_test_loss_is_refused(eval_every, tmp_path, caplog):
    algo = fadamgc.FAdamGC(eta_l=0.05)
    world = World(
        tmp_path, algo, dtype=torch.float32, sampled=3, tracked=3, max_norm_ratio=0.0, eval_every=eval_every
    )
    world.round()
    before, counted = world.server.server, world.server.counted
    record = poisoned_round(world, lambda r: r._replace(up=r.up | {"dx": torch.full_like(r.up["dx"], 3e38)}))
    assert record.dropped == (0, 1, 2)
    assert all(map(torch.equal, world.server.server, before))
    assert world.server.counted == counted
    assert "round 2 is refused: with the replies, the loss on the test data is" in caplog.text
    world.start()
    states = world.states()  # those of round 1: clients drop what did not count
    torch.testing.assert_close(world.server.server.y, torch.stack([s.y for s in states]).mean(0))
    world.round()
    states = world.states()
    torch.testing.assert_close(world.server.server.y, torch.stack([s.y for s in states]).mean(0))
    assert torch.isfinite(world.server.server.x).all()


@pytest.mark.parametrize("eval_every", [1, 100])
def test_a_federation_of_a_16_bit_model_looks_at_the_test_loss(eval_every, tmp_path):
    world = World(tmp_path, dtype=torch.bfloat16, sampled=3, tracked=3, eval_every=eval_every)
    assert world.round().dropped == ()
    assert world.server.server.x.dtype == torch.float32


def test_a_loss_that_fails_on_the_test_data_is_an_error_with_a_reason(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3, eval_every=100)
    functions = world.server.functions
    inputs, targets = functions.test.samples.pair()
    functions.test = functions.data_of(Rows(inputs, targets + 1000))
    with pytest.raises(InputError, match="model or loss failed on the test data"):
        world.round()


def test_a_test_loss_that_never_was_finite_stops_nothing(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3)
    functions = world.server.functions
    inputs, targets = functions.test.samples.pair()
    functions.test = functions.data_of(Rows(inputs * float("nan"), targets))
    assert world.round().dropped == ()
    functions.test = functions.data_of(Rows(inputs, targets))
    world.round()
    world.check()


def test_a_metric_that_cannot_take_a_poisoned_model_ends_no_run(tmp_path):
    world = World(tmp_path, dtype=torch.float32, sampled=3, tracked=3, max_norm_ratio=0.0)

    def metric(output, target):
        if not torch.isfinite(output).all():
            raise ValueError("input contains NaN")
        return 1.0

    world.task.metric = metric
    world.round()
    record = poisoned_round(world, lambda r: r._replace(up=r.up | {"dx": torch.full_like(r.up["dx"], 3e38)}))
    assert record.dropped == (0, 1, 2)
    world.round()
