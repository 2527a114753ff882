"""Messages in codecs on Flower: the simulator's numbers, the bytes of the records, and what is refused."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import fadamgc
from fadamgc import compose, local, server

flwr = pytest.importorskip("flwr", reason="Flower is not installed")

from fadamgc.codecs import codec_table, make_codec  # noqa: E402
from fadamgc.errors import CheckpointError, InputError, NonFiniteError  # noqa: E402
from fadamgc.federation.settings import Settings  # noqa: E402
from fadamgc.flower.config import read_config  # noqa: E402
from fadamgc.flower.protocol import NEVER, RefusedError, Request, Stamp, TrainRequest  # noqa: E402
from fadamgc.flower.wire import read_request, request_content  # noqa: E402
from fadamgc.tree import leaves  # noqa: E402
from in_process_grid import LOCAL, held, make  # noqa: E402
from world import SETTINGS, Killed, World  # noqa: E402

COMPOSED = compose(local.Adam(v="share"), "pre", server.Adam())
CASES = {
    "fadamgc-int8": (fadamgc.FAdamGC(eta_l=0.05), "y=int8,dy=int8"),
    "fadamgc-topk": (fadamgc.FAdamGC(eta_l=0.05), "dx=topk:0.1,dy=int4"),
    "compose": (COMPOSED, "correction.y=int8,dy=int4,dx=topk:0.2,x=bfloat16"),
    "feddyn": (fadamgc.FedDyn(), "dx=int4"),
    "fadamgc-gradient": (fadamgc.FAdamGC(init="gradient"), "y=int8,dy=int8,dx=topk:0.1"),
}
D = 75


@pytest.fixture(params=CASES)
def case(request):
    return CASES[request.param]


def without_time(record):
    return {k: v for k, v in record.to_json().items() if k not in ("wall_seconds", "replies")}


def test_a_federation_gives_the_simulators_numbers(case, tmp_path):
    algo, codec = case
    world = World(tmp_path, algo, dtype=torch.float32, codec=codec)
    world.setup()
    while not world.server.over():
        world.round()
    options = {"rounds": 4, "dtype": torch.float32, "executor": "loop", "codec": codec}
    run = fadamgc.simulate(algo, world.task, **options, **SETTINGS)
    assert torch.equal(world.server.server.x, run.x)
    assert list(map(without_time, world.server.history)) == list(map(without_time, run.history))
    for state, other in zip(world.states(), run.clients, strict=True):
        assert type(state) is type(other)
        assert all(map(torch.equal, leaves(state), leaves(other)))


def test_what_is_sent_in_a_run_is_what_its_history_says(tmp_path):
    options = {"codec": "y=int8,dy=int4,dx=topk:0.1", "sampled": 2, "tracked": 1}
    task, grid, strategy = make(tmp_path, **options)
    up, down = [], []
    push, pull = grid.push_messages, grid.pull_messages

    def counted_push(messages):
        down.extend(held(m.content) for m in messages)
        return push(messages)

    def counted_pull(ids):
        replies = pull(ids)
        up.extend(held(m.content) for m in replies)
        return replies

    grid.push_messages, grid.pull_messages = counted_push, counted_pull
    strategy.start(grid)
    history = strategy.coordinator.history
    assert (sum(down), sum(up)) == (sum(r.bytes_down for r in history), sum(r.bytes_up for r in history))
    sizes = {name: make_codec(codec).size(D) for name, codec in codec_table(options["codec"])}
    assert history[0].bytes_down == 2 * (4 * D + sizes["y"])
    assert history[0].bytes_up == 2 * sizes["dx"] + sizes["dy"]
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=3, executor="loop", **LOCAL, **options)
    assert torch.equal(strategy.coordinator.server.x, run.x)


def test_the_size_limit_of_a_reply_is_that_of_its_encoded_vectors(tmp_path):
    _, _, plain = make(tmp_path / "a")
    _, _, lean = make(tmp_path / "b", codec="dx=topk:0.1,dy=int4")
    limits = []
    for strategy in (plain, lean):
        strategy.coordinator.ask(range(3))
        limits.append(strategy._limit(0).bytes)
    saved = 8 * D - make_codec("topk:0.1").size(D) - make_codec("int4").size(D)
    assert limits[0] - limits[1] == saved + 8 * D // 64 - (8 * D - saved) // 64


def test_a_client_that_is_killed_repeats_its_round_with_the_same_reply(tmp_path):
    algo, codec = CASES["fadamgc-topk"]
    world = World(tmp_path, algo, dtype=torch.float32, codec=codec, sampled=3, tracked=3)
    world.round()
    message = world.messages()[0]
    with pytest.raises(Killed):
        world.deliver(message, killed="before")
    first, again = world.deliver(message), world.deliver(message)
    assert first.up.keys() == again.up.keys()
    assert all(torch.equal(first.up[name], again.up[name]) for name in first.up)
    world.start()  # the server is killed, too: the rest of the round that did not count is dropped
    while not world.server.over():
        world.round()
    options = {"rounds": 4, "dtype": torch.float32, "executor": "loop", "codec": codec}
    run = fadamgc.simulate(algo, world.task, **options, **SETTINGS | {"sampled": 3, "tracked": 3})
    assert torch.equal(world.server.server.x, run.x)
    assert all(torch.equal(a.rest.dx, b.rest.dx) for a, b in zip(world.states(), run.clients, strict=True))


# What is refused.


def poisoned(name, value, at=slice(0, 4)):
    """A change of a reply: the bytes of a number in an encoded vector."""

    def change(up):
        data = up[name].clone()
        dtype = torch.int32 if isinstance(value, int) else torch.float32
        data[at] = torch.tensor([value], dtype=dtype).view(torch.uint8)
        return {**up, name: data}

    return change


@pytest.mark.parametrize(
    ("change", "kind", "message"),
    [
        (lambda up: {**up, "dy": up["dy"][:-1]}, "shape", "dy is torch.uint8 (78,), this model needs"),
        (lambda up: {**up, "dy": torch.zeros(D)}, "shape", "dy is torch.float32 (75,), this model needs"),
        (lambda up: {"dx": up["dx"]}, "fields", "update has ['dx'], this model needs"),
        (poisoned("dy", torch.nan), "not finite", "dy has numbers that are not finite"),
        (poisoned("dy", torch.inf), "not finite", "dy has numbers that are not finite"),
        (poisoned("dy", 3e38), "not finite", "dy has numbers that are not finite"),
        (poisoned("dx", torch.nan, slice(-4, None)), "not finite", "dx has numbers that are not finite"),
        (poisoned("dx", -1), "codec", "update cannot be read: dx: the positions"),
        (poisoned("dx", D, slice(28, 32)), "codec", "dx: the positions of the numbers do not ascend"),
        (poisoned("dx", D - 1), "codec", "dx: the positions of the numbers do not ascend from 0 to at most"),
    ],
)
def test_a_reply_that_no_codec_has_written_is_refused_and_nothing_changes(change, kind, message, tmp_path):
    world = World(tmp_path, dtype=torch.float32, codec="dy=int8,dx=topk:0.1", sampled=3, tracked=3)
    world.round()
    before = world.server.federation.state
    replies = [world.deliver(m) for m in world.messages()]
    with pytest.raises(RefusedError) as refused:
        world.server.consider(0, replies[0]._replace(up=change(replies[0].up)))
    assert refused.value.kind == kind
    assert message in str(refused.value)
    assert world.server.answered == ()
    assert world.server.federation.state is before
    assert world.server.t == 1
    for reply in replies:  # the correct one still counts
        world.server.consider(reply.client, reply)
    assert world.server.answered == (0, 1, 2)


@pytest.mark.parametrize(
    ("change", "kind"),
    [
        (lambda down: {**down, "y": down["y"][1:]}, "shape"),
        (lambda down: {**down, "y": torch.zeros(D)}, "shape"),
        (poisoned("y", torch.inf), "not finite"),
        (poisoned("x", torch.nan, slice(-4, None)), "not finite"),
        (poisoned("x", -7), "codec"),
    ],
)
def test_a_request_that_no_codec_has_written_is_refused_and_nothing_changes(change, kind, tmp_path):
    world = World(tmp_path, dtype=torch.float32, codec="y=int8,x=topk:1")
    asked, down, buffers = world.messages()[0]
    with pytest.raises(RefusedError) as refused:
        world.deliver((asked, change(down), buffers))
    assert refused.value.kind == kind
    assert not (world.keepers[asked.request.client].folder / "state.json").exists()


def test_a_request_with_a_codec_for_another_field_is_refused(tmp_path):
    world = World(tmp_path, dtype=torch.float32)
    asked, down, buffers = world.messages()[0]
    wrong = asked._replace(settings=dataclasses.replace(asked.settings, codec="dz=int8"))
    with pytest.raises(RefusedError, match="request cannot be understood: codec for 'dz': no message"):
        world.deliver((wrong, down, buffers))


@pytest.mark.parametrize(("before", "after"), [("dy=int8", "dx=topk"), ("dx=topk", None)])
def test_a_state_of_other_codecs_is_refused_with_the_remedy(before, after, tmp_path):
    world = World(tmp_path, dtype=torch.float32, codec=before)
    while not world.server.over():
        world.round()
    world.settings = dataclasses.replace(world.settings, codec=after)
    with pytest.raises(CheckpointError, match="the checkpoint of another experiment: codec="):
        world.start()
    world.folder = tmp_path / "new"  # a server without its checkpoint
    world.start()
    with pytest.raises(CheckpointError, match="of other codecs: it has no .*; use another experiment, or"):
        world.deliver(world.messages()[0])


def test_numbers_beyond_the_codecs_are_not_sent(tmp_path):
    world = World(tmp_path, fadamgc.FedAvg(), codec="x=int8")
    state = world.server.federation.state
    big = state._replace(server=state.server._replace(x=state.server.x + 1e60))
    world.server.federation.state = big
    with pytest.raises(NonFiniteError, match="the server's x is not finite as it is sent in round 1"):
        world.messages()
    world = World(tmp_path / "up", fadamgc.FedAvg(eta_l=1e60), codec="dx=int8")
    with pytest.raises(RefusedError, match="numbers that are not finite, so it does not count"):
        world.deliver(world.messages()[0])


# The request and the config.


def test_a_request_names_the_algorithm_and_its_codecs():
    settings = Settings(rounds=1, local_steps=1, codec="dx=topk:0.1,y=int8")
    request = Request("test", 0, 0, Stamp(1, 1), NEVER)
    train = TrainRequest(request, True, fadamgc.FAdamGC(), settings, {"x": torch.zeros(3)}, {})
    read = read_request(request_content(train))
    assert read.settings.codec == settings.codec
    assert read.algorithm == fadamgc.FAdamGC()
    content = request_content(train._replace(settings=Settings(rounds=1, local_steps=1)))
    assert "codec" not in content["request"]
    for wrong in ("[", "3", '{"dy": "int9"}', '{"dy": 3}', '["dy"]'):
        content["request"]["codec"] = wrong
        with pytest.raises(RefusedError, match="request cannot be understood"):
            read_request(content)


def test_the_config_has_codecs():
    expected = (("correction.dy", "int8"), ("y", "int4"))
    tables = {"codec.y": "int4", "codec.correction.dy": "int8", "data.alpha": 0.3}
    config = read_config(tables)
    assert config.settings.codec == expected
    assert config.app == {"data.alpha": 0.3}
    assert read_config({"codec": "y=int4,correction.dy=int8"}).settings.codec == expected
    assert read_config({}).settings.codec is None
    for wrong in ({"codec.y": "int9"}, {"codec": "y"}, {"codec": 3}, {"codec": "y=int8", "codec.dy": "int8"}):
        with pytest.raises(InputError, match="codec"):
            read_config(wrong)
