"""Server and clients without a network: the simulator's numbers, and faults at every point."""

from __future__ import annotations

import multiprocessing
import time

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import fadamgc
from fadamgc.errors import CheckpointError, InputError
from fadamgc.flower import server_store as store_module
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.protocol import NEVER, RefusedError, Request, Stamp, StoredState, resolve_pending
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.tree import leaves
from world import SETTINGS, SIZES, Killed, World

# The same numbers as the simulator's.


@pytest.mark.parametrize(
    "algo",
    [fadamgc.FAdamGC(), fadamgc.FANTLocal(), fadamgc.FedAvg(), fadamgc.Scaffold(option="I")],
    ids=["fadamgc", "fa_nt_local", "fedavg", "scaffold-option=I"],  # the last needs a gradient in every round
)
def test_a_federation_gives_the_simulators_numbers(algo, tmp_path):
    options = {"local_epochs": 1, "local_steps": None} if not algo.full_participation else {}
    if algo.full_participation:
        options |= {"sampled": None, "tracked": None, "min_clients": len(SIZES)}
    world = World(tmp_path, algo, dtype=torch.float32, **options)
    world.server.members.samples = dict(enumerate(SIZES))
    world.setup()
    while not world.server.over():
        world.round()
    rest = {k: v for k, v in (SETTINGS | options).items() if k != "min_clients"}
    run = fadamgc.simulate(algo, world.task, rounds=4, dtype=torch.float32, executor="loop", **rest)
    assert torch.equal(world.server.server.x, run.x)
    assert [dataclass_without_time(r) for r in world.server.history] == [
        dataclass_without_time(r) for r in run.history
    ]
    for state, other in zip(world.states(), run.clients, strict=True):
        assert all(map(torch.equal, state, other))


ONE_LEVEL = [
    name for name in fadamgc.algorithms() if not isinstance(fadamgc.make_algorithm(name), GroupedAlgorithm)
]


@pytest.mark.slow
@pytest.mark.parametrize("name", ONE_LEVEL)
def test_a_federation_of_every_method_gives_the_simulators_numbers(name, tmp_path):
    """Three rounds over the wires of the test double; model, states of the clients and counted bytes."""
    algo = fadamgc.make_algorithm(name)
    n = len(SIZES)
    options = {"sampled": n, "tracked": n, "min_clients": n} if algo.full_participation else {}
    world = World(tmp_path, algo, rounds=3, **options)
    world.setup()
    while not world.server.over():
        world.round()
    settings = {k: v for k, v in (SETTINGS | options).items() if k != "min_clients"}
    run = fadamgc.simulate(
        algo, world.task, rounds=3, dtype=torch.float64, executor="loop", progress=False, **settings
    )
    assert torch.equal(world.server.server.x, run.x)
    for state, other in zip(world.states(), run.clients, strict=True):
        pairs = zip(leaves(state), leaves(other), strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
    for record, other in zip(world.server.history, run.history, strict=True):
        assert (record.bytes_down, record.bytes_up) == (other.bytes_down, other.bytes_up)


def dataclass_without_time(record):
    """Also without the norms of the replies, which a simulation does not compute."""
    return {k: v for k, v in record.to_json().items() if k not in ("wall_seconds", "replies")}


def test_algorithms_that_begin_with_gradients_do(tmp_path):
    algo = fadamgc.FAdamGC(init="gradient")
    world = World(tmp_path, algo, weights="size")
    world.server.members.samples = dict(enumerate(SIZES))
    assert world.server.needs_setup
    world.messages()
    assert world.server.close() is None  # nobody answered: it is asked for again
    world.setup()
    world.start()  # killed after the setup
    assert not world.server.needs_setup
    while not world.server.over():
        world.round()
    run = fadamgc.simulate(
        algo, world.task, rounds=4, dtype=torch.float64, executor="loop", weights="size", **SETTINGS
    )
    torch.testing.assert_close(world.server.server.x, run.x, rtol=1e-12, atol=1e-13)


def test_buffers_travel_and_are_averaged(tmp_path):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(5, 4), torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 3))
    world = World(tmp_path, fadamgc.FAdamGC(), torch.float32, model, rounds=3)
    while not world.server.over():
        world.round()
    run = fadamgc.simulate(world.algo, world.task, rounds=3, executor="loop", **SETTINGS)
    assert run.buffers.keys() == world.server.buffers.keys()
    assert all(torch.equal(world.server.buffers[name], value) for name, value in run.buffers.items())


# Faults. What can happen to a request on its way: one fault at a time, then stories of any faults.

FAULTS = ("none", "request lost", "killed before", "killed after", "reply lost", "twice", "late", "garbled")
SERVER = ("none", "killed asking", "killed before writing", "killed after writing")


def faulty_round(world, faults, server, late):
    """A round with a fault for each client, and one for the server."""
    world_messages = world.messages()
    if server == "killed asking":
        for message, fault in zip(world_messages, faults, strict=False):
            if fault != "request lost":
                world.deliver(message)
        world.start()
        return
    for reply in late:  # of an earlier round
        with pytest.raises(RefusedError):
            world.server.consider(reply.client, reply)
    late.clear()
    for message, fault in zip(world_messages, [*faults, *["none"] * 3], strict=False):
        client = message[0].request.client
        if fault == "request lost":
            continue
        if fault in ("killed before", "killed after"):
            with pytest.raises(Killed):
                world.deliver(message, fault.removeprefix("killed "))
            continue
        reply = world.deliver(message)
        if fault == "twice":
            again = world.deliver(message)
            assert all(torch.equal(again.up[k], reply.up[k]) for k in reply.up)
            world.server.consider(client, again)
            with pytest.raises(RefusedError, match="has already answered"):
                world.server.consider(client, reply)
        elif fault == "late":
            late.append(reply)
        elif fault == "garbled":
            bad = reply._replace(up={k: v * float("nan") for k, v in reply.up.items()})
            with pytest.raises(RefusedError, match="not finite"):
                world.server.consider(client, bad)
        elif fault == "none":
            world.server.consider(client, reply)
    if server == "none":
        world.server.close()
        return
    original = store_module.write_bundle

    def write(*arguments, **options):
        if server == "killed after writing":
            original(*arguments, **options)
        raise Killed

    store_module.write_bundle = write
    try:
        with pytest.raises(Killed):
            world.server.close()
    finally:
        store_module.write_bundle = original
    world.start()


@pytest.mark.parametrize(
    ("faults", "server"),
    [
        *(((fault, "none"), server) for fault in FAULTS for server in SERVER),
        *(((fault, fault), "none") for fault in FAULTS[1:]),
    ],
    ids=lambda fault: fault if isinstance(fault, str) else "+".join(fault),
)
def test_every_fault_at_every_point(faults, server, tmp_path):
    world = World(tmp_path, rounds=100)
    world.round()
    late = []
    faulty_round(world, faults, server, late)
    world.check()
    for _ in range(2):  # the next complete rounds
        for reply in late:
            with pytest.raises(RefusedError):
                world.server.consider(reply.client, reply)
        world.round()
        world.check()


@pytest.mark.slow
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    story=st.lists(
        st.tuples(st.lists(st.sampled_from(FAULTS), min_size=3, max_size=3), st.sampled_from(SERVER)),
        min_size=1,
        max_size=6,
    ),
    name=st.sampled_from(["fadamgc", "scaffold_m", "fa_nt"]),
)
def test_any_story_ends_well(story, name, tmp_path_factory):
    folder = tmp_path_factory.mktemp("story")
    world = World(folder, fadamgc.make_algorithm(name), rounds=100, sampled=3, tracked=2)
    late = []
    for faults, server in story:
        faulty_round(world, faults, server, late)
        world.check()
    world.round()
    world.check()


def test_a_request_that_was_overtaken_is_refused(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3)
    old = world.messages()
    world.server.close()  # nobody answered in time
    world.round()
    with pytest.raises(RefusedError, match="received a request for round 1 after one for round 2") as caught:
        world.deliver(old[0])
    assert caught.value.kind == "stale"
    world.round()
    world.check()


def test_a_lost_state_is_noticed_and_can_be_reset(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3)
    world.round()
    for path in world.keepers[1].folder.iterdir():
        path.unlink()
    message = world.messages()[1]
    with pytest.raises(
        RefusedError, match=r"has the state of no round.*counted round 1.*reset-states"
    ) as caught:
        world.deliver(message)
    assert caught.value.kind == "lost"
    x = world.server.server.x
    world.start(reset_states=True)
    assert torch.equal(world.server.server.x, x)
    assert not world.server.server.y.any()
    world.round()
    assert torch.stack([s.y for s in world.states()]).mean(0) == pytest.approx(world.server.server.y)


def test_a_server_that_forgot_everything_is_refused(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3)
    for _ in range(2):
        world.round()
    for path in (tmp_path / "server").iterdir():
        path.unlink()
    world.start()
    with pytest.raises(RefusedError, match="an old message, or a server whose checkpoint was replaced"):
        world.deliver(world.messages()[0])


# The rules by themselves.


def request(round=3, attempt=1, counted=NEVER, generation=0):
    return Request("test", 0, generation, Stamp(round, attempt), counted)


def test_pending_is_committed_or_dropped():
    kept = StoredState().with_pending(request(1), "one")
    assert kept == StoredState(0, Stamp(1, 1), NEVER, None, Stamp(1, 1), "one")
    counted = resolve_pending(kept, request(2, counted=Stamp(1, 1)))
    assert (counted.committed, counted.committed_state, counted.pending) == (Stamp(1, 1), "one", None)
    dropped = resolve_pending(kept, request(2))
    assert (dropped.committed, dropped.committed_state, dropped.pending) == (NEVER, None, None)
    two = counted.with_pending(request(2), "two")
    other_start = resolve_pending(two, request(2, attempt=2, counted=Stamp(1, 1)))
    assert other_start.committed_state == "one"
    anew = resolve_pending(kept, request(1, generation=1))
    assert anew == StoredState(1)


# What the server refuses.


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda r: r._replace(client=0), "another client"),
        (lambda r: r._replace(stamp=Stamp(7, 1)), "another round"),
        (lambda r: r._replace(stamp=Stamp(1, 2)), "another round"),
        (lambda r: r._replace(generation=3), "another round"),
        (lambda r: r._replace(experiment="other"), "another round"),
        (lambda r: r._replace(up={"dx": r.up["dx"]}), "fields"),
        (lambda r: r._replace(up=r.up | {"extra": r.up["dx"]}), "fields"),
        (lambda r: r._replace(up=r.up | {"dx": r.up["dx"][1:]}), "shape"),
        (lambda r: r._replace(up=r.up | {"dx": r.up["dx"].float()}), "shape"),
        (lambda r: r._replace(up=r.up | {"dx": r.up["dx"] / 0}), "not finite"),
        (lambda r: r._replace(up=r.up | {"dx": r.up["dx"] * 1e9}), "norm"),
        (lambda r: r._replace(buffers={"b": torch.zeros(1)}), "fields"),
        (lambda r: r._replace(loss=float("inf")), "not finite"),
        (lambda r: r._replace(loss="low"), "not finite"),
        (lambda r: r._replace(steps=4), "steps"),
        (lambda r: r._replace(steps=-1), "steps"),
    ],
)
def test_what_is_not_as_asked_is_refused_and_changes_nothing(change, kind, tmp_path):
    world = World(tmp_path, sampled=3, tracked=3, max_update_norm=1e3)
    world.server.members.samples = dict(enumerate(SIZES))
    message = world.messages()[1]
    reply = world.deliver(message)
    before = world.server.server
    with pytest.raises(RefusedError, match="the reply of client 1 is refused") as caught:
        world.server.consider(1, change(reply))
    assert caught.value.kind == kind
    assert world.server.answered == ()
    assert len(world.server.refusals) == 1
    record = world.server.close()
    assert record.dropped == (0, 1, 2)
    assert all(map(torch.equal, world.server.server, before))
    world.round()
    world.check()


def test_who_was_not_asked_is_refused(tmp_path):
    world = World(tmp_path, sampled=1, tracked=1)
    (message,) = world.messages()
    reply = world.deliver(message)
    other = (reply.client + 1) % 3
    with pytest.raises(RefusedError, match="it was not asked in this round"):
        world.server.consider(other, reply._replace(client=other))


def test_a_client_checks_what_it_receives(tmp_path):
    world = World(tmp_path)
    (asked, down, buffers) = world.messages()[0]
    for bad, said in (
        (down | {"x": down["x"][1:]}, "the server's x is torch.float64"),
        (down | {"y": down["y"] / 0}, "the server's y has numbers that are not finite"),
        ({"x": down["x"]}, r"has \['x'\], this model needs \['x', 'y'\]"),
    ):
        with pytest.raises(RefusedError, match=said):
            world.deliver((asked, bad, buffers))
    assert world.keepers[asked.request.client].load(()) == StoredState()


# Too few.


def test_a_round_with_too_few_answers_does_not_count(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3, min_clients=2)
    before = world.server.server
    reply = world.deliver(world.messages()[2])
    world.server.consider(2, reply)
    assert not world.server.enough
    record = world.server.close()
    assert record.dropped == (0, 1, 2)
    assert record.train_loss is None
    assert all(map(torch.equal, world.server.server, before))
    world.round()
    world.check()


def test_who_is_not_there_is_not_asked(tmp_path):
    world = World(tmp_path, sampled=2, tracked=1)
    assert {a.request.client for a, _, _ in world.messages(available=[2])} == {2}
    assert world.messages(available=[]) == []
    for t in range(5):
        world.server.federation.t = t
        assert set(world.server.federation.who([0, 2]).sampled) == {0, 2}
        assert world.server.federation.who(range(3)) == world.settings.who(t + 1, 3)


# What lasts.


def test_the_state_of_a_client_is_checked_when_it_is_read(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3)
    world.round()
    keeper = world.keepers[0]
    kind = fadamgc.algorithm.example(world.algo, torch.zeros(1)).client
    assert keeper.load(kind).pending == Stamp(1, 1)
    (tensors,) = keeper.folder.glob("*.safetensors")
    data = bytearray(tensors.read_bytes())
    data[-1] ^= 1
    tensors.write_bytes(data)
    with pytest.raises(CheckpointError, match="altered after it was written"):
        keeper.load(kind)
    data[-1] ^= 1
    tensors.write_bytes(data)
    other = ClientStore(tmp_path / "node", "test", 5)
    keeper.folder.rename(other.folder)
    with pytest.raises(
        CheckpointError, match="has the state of client 0 of experiment 'test', not of client 5"
    ):
        other.load(kind)
    with pytest.raises(InputError, match="it names a folder"):
        ClientStore(tmp_path, "../other", 0)


def _hold(folder, ready, seconds):
    with ClientStore(folder, "test", 0).locked():
        ready.set()
        time.sleep(seconds)


@pytest.mark.slow
def test_two_processes_do_not_work_on_one_state(tmp_path):
    context = multiprocessing.get_context("fork")
    ready = context.Event()
    other = context.Process(target=_hold, args=(tmp_path, ready, 30))
    other.start()
    try:
        assert ready.wait(10)
        with pytest.raises(RefusedError, match="still at work"), ClientStore(tmp_path, "test", 0).locked(0.2):
            pass
    finally:
        other.kill()
        other.join()
    with ClientStore(tmp_path, "test", 0).locked(5):  # who is killed lets go
        pass


def test_a_checkpoint_of_other_settings_is_refused(tmp_path):
    world = World(tmp_path)
    world.round()
    world.algo = fadamgc.FAdamGC(eta_l=0.1)
    with pytest.raises(
        CheckpointError, match=r"another experiment: hyperparameters=.*give another experiment"
    ):
        world.start()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"min_clients": 4}, "min_clients=4 is not accepted; it must be from 1 to clients=3"),
        ({"max_update_norm": -1.0}, "max_norm=-1.0 is not accepted"),
    ],
)
def test_settings_that_cannot_be_are_refused(options, said, tmp_path):
    with pytest.raises(InputError, match=said):
        World(tmp_path, **options)


def test_the_history_is_a_run(tmp_path):
    world = World(tmp_path)
    world.round()
    run = world.server.run()
    run.save(tmp_path / "run", states=False)
    assert fadamgc.load_run(tmp_path / "run").history == run.history


def test_the_history_has_norms_and_refusals(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3)
    vectors = []
    for message in world.messages():
        reply = world.deliver(message)
        if reply.client == 2:
            reply = reply._replace(loss=float("nan"))
            with pytest.raises(RefusedError):
                world.server.consider(2, reply)
        else:
            world.server.consider(reply.client, reply)
            vectors.append(reply.up)
    found = world.server.close().replies
    assert found.pop("refused replies") == 1
    norms = {name: [float(up[name].norm()) for up in vectors] for name in ("dx", "dy")}
    assert found == {
        f"norm of {name}, {of}": pytest.approx(value)
        for name, values in norms.items()
        for of, value in (("median", sum(values) / 2), ("largest", max(values)))
    }
    world.start()  # they are in the checkpoint
    assert world.server.history[0].replies == found | {"refused replies": 1}
    world.server.run().save(tmp_path / "run", states=False)
    run = fadamgc.load_run(tmp_path / "run")
    assert run.history[0].replies == found | {"refused replies": 1}
    assert "its loss is nan" in run.settings["refusals"][0]
    assert run.to_pandas()["refused replies"].tolist() == [1]


# Two servers, and what does not sum up.


def test_a_server_that_another_has_taken_over_from_changes_nothing_more(tmp_path):
    world = World(tmp_path)
    world.round()
    first = world.server
    for message in world.messages():
        first.consider(message[0].request.client, world.deliver(message))
    world.start()  # the first was thought to be dead
    while not world.server.over():
        world.round()
    before = {path.name: path.read_bytes() for path in (tmp_path / "server").iterdir()}
    with pytest.raises(CheckpointError, match=r"another server \(start 2\) has taken over .* \(start 1\)"):
        first.close()
    assert {path.name: path.read_bytes() for path in (tmp_path / "server").iterdir()} == before
    world.start()
    assert world.server.store.attempt == 3
    world.check()


def test_starts_are_counted_even_where_the_checkpoint_is_older(tmp_path):
    world = World(tmp_path)
    (tmp_path / "server" / "start.json").write_text('{"attempt": 7}')
    world.start()
    assert world.server.store.attempt == 8
    world.round()
    world.check()
    (tmp_path / "server" / "start.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"start\.json cannot be read"):
        world.start()


@pytest.mark.parametrize(("algo", "size"), [(fadamgc.FedAvg(eta_g=4.0), 3e38), (fadamgc.FedAdam(), 1e30)])
def test_a_sum_that_is_not_finite_is_not_counted(tmp_path, algo, size, caplog):
    world = World(tmp_path, algo, dtype=torch.float32, sampled=3, tracked=None, max_norm_ratio=0.0)
    world.round()
    before = world.server.server
    for message in world.messages():
        reply = world.deliver(message)
        if reply.client == 1:
            reply = reply._replace(up={k: torch.full_like(v, size) for k, v in reply.up.items()})
        world.server.consider(reply.client, reply)
    record = world.server.close()
    assert all(map(torch.equal, world.server.server, before))
    assert record.dropped == (0, 1, 2)
    assert "not finite" in world.server.refusals[-1]
    world.start()  # refusals are in the checkpoint
    assert "not finite" in world.server.refusals[-1]
    world.round()
    assert all(torch.isfinite(v).all() for v in world.server.server)


def test_a_client_does_not_keep_a_state_that_is_not_finite(tmp_path):
    world = World(tmp_path, dtype=torch.float32, sampled=3, tracked=None)
    world.round()
    (asked, down, buffers), *_ = world.messages()
    i = asked.request.client
    before = world.keepers[i].load(world.states()[i])
    real = world.parties[i].train

    def overflow(*args):
        result = real(*args)
        return result._replace(state=result.state._replace(v=torch.full_like(result.state.v, float("inf"))))

    world.parties[i].train = overflow
    with pytest.raises(RefusedError, match="its round gave numbers that are not finite"):
        world.deliver((asked, down, buffers))
    after_it = world.keepers[i].load(world.states()[i])
    assert after_it.seen == before.seen
    assert after_it.pending == before.pending


def test_a_weight_does_not_change_during_a_run(tmp_path):
    world = World(tmp_path, weights="size")
    assert world.server.needs_all
    for i, size in enumerate(SIZES):
        world.server.admit(i, size)
    assert not world.server.needs_all
    with pytest.raises(RefusedError, match="client 1 has 200 samples, and had 20"):
        world.server.admit(1, 200)
    assert world.server.members.samples[1] == 20
    world.round()
    world.start()
    with pytest.raises(RefusedError, match="client 1 has 200 samples, and had 20"):
        world.server.admit(1, 200)
    world.start(reset_states=True)
    world.server.admit(1, 200)
    free = World(tmp_path / "uniform")  # without weights, data may grow
    free.server.admit(1, 20)
    free.server.admit(1, 200)


def test_what_belongs_to_an_experiment_is_its_model_and_its_data(tmp_path):
    world = World(tmp_path, dtype=torch.float32)
    with pytest.raises(
        CheckpointError, match=r"another experiment: facts=\{\} there, \{'data.alpha': 0.5\} here"
    ):
        world.start(facts={"data.alpha": 0.5})
    world.task.model = torch.nn.Sequential(world.task.model, torch.nn.Linear(3, 3))
    with pytest.raises(CheckpointError, match="another experiment: model="):
        world.start()


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"min_clients": 3}, "min_clients=3 is not accepted; a round asks only sampled=2"),
        ({"experiment": "my experiment"}, "experiment='my experiment' is not accepted"),
    ],
)
def test_a_coordinator_refuses_what_cannot_work(tmp_path, more, said):
    with pytest.raises(InputError, match=said):
        World(tmp_path, **more)


def test_who_does_not_answer_has_sent_nothing(tmp_path):
    world = World(tmp_path, sampled=3, tracked=None)
    messages = world.messages()
    for message in messages[1:]:
        world.server.consider(message[0].request.client, world.deliver(message))
    record = world.server.close()
    (work,) = record.work
    assert record.dropped == (0,)
    assert work.up[0] == work.steps[0] == 0
    assert all(work.up[1:])
    assert all(work.down)
