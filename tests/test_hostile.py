"""A federation that one client tries to stop or to spoil."""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from contextlib import suppress
from types import SimpleNamespace

import pytest
import torch

import fadamgc
from fadamgc.errors import CheckpointError, InputError
from fadamgc.federation.settings import Settings
from fadamgc.flower.client_round import LocalClient
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.coordinator import Scale
from fadamgc.flower.protocol import RefusedError, Request, Stamp, StoredState, resolve_pending
from fadamgc.flower.server_store import ServerStore
from problems import class_task

flwr = pytest.importorskip("flwr", reason="Flower is not installed")

from flwr.app import Array, Context, Error, Message, RecordDict  # noqa: E402
from flwr.common.serde import message_to_proto  # noqa: E402
from flwr.proto.message_pb2 import (  # noqa: E402
    ConfirmMessageReceivedResponse,
    PullObjectResponse,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import NodeInfo  # noqa: E402
from flwr.proto.runtime_pb2 import (  # noqa: E402
    GetNodesResponse,
    PullAppMessagesResponse,
    PushAppMessagesResponse,
)
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree  # noqa: E402
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents  # noqa: E402
from flwr.supercore.run import Run  # noqa: E402
from flwr.superlink.grid.http_grid import HttpGrid  # noqa: E402

from fadamgc.flower.config import read_config  # noqa: E402
from fadamgc.flower.inbox import ObjectInbox, SizeLimit, ThreadInbox, TooLargeError, make_inbox  # noqa: E402
from fadamgc.flower.serverapp import make_coordinator  # noqa: E402
from fadamgc.flower.strategy import BARRED_ROUNDS, TooFewClientsError  # noqa: E402
from fadamgc.flower.wire import ARRAY_ENCODING, TrainRequest, read_request, request_content  # noqa: E402
from in_process_grid import LOCAL, Here, app_of, make  # noqa: E402
from world import SETTINGS, SIZES, World  # noqa: E402


def simulated(task, rounds, **more):
    return fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=rounds, executor="loop", **LOCAL, **more)


# A SuperLink in this process, behind Flower's own grid: every object as Flower carries it.


class Link:
    """What Flower's grid asks over the network. Some replies never arrive in full."""

    def __init__(self, app, folder, clients):
        self.app, self.folder = app, folder
        self.nodes = {100 + i: i for i in range(clients)}
        self.keys = {node: f"key {node}".encode() for node in self.nodes}
        self.objects, self.sent, self.trees, self.confirmed = {}, {}, {}, []
        self.stalled = set()  # (type of message, client)
        self.pulled = self.answered = 0
        self._client = SimpleNamespace(event_hooks={"request": [], "response": []})

    def GetNodes(self, request):
        nodes = [NodeInfo(node_id=node, public_key=self.keys[node]) for node in self.nodes]
        return GetNodesResponse(nodes=nodes)

    def PushMessages(self, request):
        ids = []
        for message, tree in zip(request.messages_list, request.message_object_trees, strict=True):
            self.sent[message.metadata.message_id] = message.metadata.dst_node_id, tree
            ids.append(message.metadata.message_id)
        return PushAppMessagesResponse(message_ids=ids, objects_to_push=self._named(request), session_id="s")

    def _named(self, request):
        def names(tree):
            return [tree.object_id, *(name for child in tree.children for name in names(child))]

        return [name for tree in request.message_object_trees for name in names(tree)]

    def PushObject(self, request):
        self.objects[request.object_id] = request.object_content
        return PushObjectResponse(stored=True)

    def PullMessages(self, request):
        (identity,) = request.message_ids
        node, _ = self.sent.pop(identity, (None, None))
        if node not in self.nodes:
            return PullAppMessagesResponse()
        message = inflate_object_from_contents(identity, dict(self.objects))
        message.metadata.__dict__["_message_id"] = identity
        client = self.nodes[node]
        config = {"partition-id": client, "state-folder": str(self.folder / f"node-{client}")}
        reply = self.app(message, Context(1, 1, config, RecordDict(), {}))
        reply.metadata.__dict__["_message_id"] = reply.object_id
        tree = get_object_tree(reply)
        contents = {name: part.deflate() for name, part in get_all_nested_objects(reply).items()}
        if (message.metadata.message_type, client) in self.stalled:
            self.late = dict(contents)
            contents |= dict.fromkeys([min(contents)], None)  # this part is still on its way
        self.objects |= contents
        self.answered += 1
        plain = message_to_proto(Message(Error(0), reply_to=message))
        plain.metadata.message_id = reply.object_id
        return PullAppMessagesResponse(messages_list=[plain], message_object_trees=[tree])

    def PullObject(self, request):
        content = self.objects[request.object_id]
        if content is None:
            return PullObjectResponse(object_found=True, object_available=False)
        for hook in self._client.event_hooks["response"]:
            hook(SimpleNamespace(headers={"content-length": str(len(content))}))
        self.pulled += len(content)
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request):
        self.confirmed.append(request.message_object_id)
        return ConfirmMessageReceivedResponse()


def linked(tmp_path, clients=3, **options):
    sizes = (6, 20, 11, 8, 9, 10, 12, 7, 14, 16)[:clients]
    task, _, strategy = make(tmp_path, clients=clients, sizes=sizes, **options)
    grid = HttpGrid(token="token")
    grid._client = Link(app_of(task), tmp_path, clients)
    grid.set_run(Run.create_empty(1))
    return task, grid, strategy


def test_a_federation_on_flowers_own_grid_gives_the_simulators_numbers(tmp_path):
    task, grid, strategy = linked(tmp_path)
    assert isinstance(make_inbox(grid), ObjectInbox)
    strategy.start(grid)
    run = simulated(task, 3)
    assert torch.equal(strategy.coordinator.server.x, run.x)
    assert all(not record.dropped for record in strategy.coordinator.history)


# One stalled upload.


class Stalled(Here):
    """A grid that waits for the rest of what some clients have announced."""

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.stalled, self.to, self.freed = {("train", 0)}, {}, threading.Event()

    def push_messages(self, messages):
        identities = super().push_messages(messages)
        for identity, message in zip(identities, messages, strict=True):
            self.to[identity] = message.metadata.message_type, self.nodes[message.metadata.dst_node_id]
        return identities

    def pull_messages(self, message_ids):
        if any(self.to[identity] in self.stalled for identity in message_ids):
            self.freed.wait(30)
        return super().pull_messages(message_ids)


def test_of_ten_clients_with_one_stalled_only_that_one_is_lost(tmp_path):
    sizes = (6, 20, 11, 8, 9, 10, 12, 7, 14, 16)
    _, plain, strategy = make(tmp_path, clients=10, sizes=sizes, rounds=4, min_clients=9, round_timeout=1.0)
    grid = Stalled(plain.app, tmp_path, 10)
    before = set(threading.enumerate())
    try:
        strategy.start(grid)
        history = strategy.coordinator.history
        assert [record.dropped for record in history] == [(0,), (), (), ()]
        assert [set(record.sampled) | {0} for record in history] == [set(range(10))] * 4
        assert grid.sent.count(("train", 0)) == 1  # it is not asked again while that answer is under way
        left = set(threading.enumerate()) - before
        assert len(left) <= 1
        assert all(thread.daemon for thread in left)
        assert len(strategy._stuck) == 1
    finally:
        grid.freed.set()


def test_a_stalled_answer_that_comes_at_last_is_not_used(tmp_path):
    _, plain, strategy = make(tmp_path, rounds=6)
    grid = Stalled(plain.app, tmp_path, 3)

    def free(record):
        if record.round == 2:
            grid.stalled = set()
            grid.freed.set()
            while not strategy._inbox_of(grid)._results.qsize():
                time.sleep(0.01)

    strategy.on_round = free
    strategy.start(grid)
    history = strategy.coordinator.history
    assert history[0].dropped == (0,)
    assert history[-1].sampled == (0, 1, 2)  # it takes part again, and its state fits the server's
    assert all(not record.dropped for record in history[1:])
    took = [([i for i in r.sampled if i not in r.dropped],) * 2 for r in history]
    run = fadamgc.simulate(
        fadamgc.FAdamGC(), class_task(sizes=SIZES), schedule=took, executor="loop", **LOCAL
    )
    assert torch.equal(strategy.coordinator.server.x, run.x)


def test_on_flowers_own_grid_a_stalled_client_needs_no_thread(tmp_path):
    _, grid, strategy = linked(tmp_path, clients=10, rounds=4, min_clients=9)
    grid._client.stalled = {("train", 0)}
    before = set(threading.enumerate())
    strategy.start(grid)
    for record in strategy.coordinator.history:
        assert record.dropped in ((), (0,))
        assert set(record.sampled) | {0} == set(range(10))
    assert strategy.coordinator.history[0].dropped == (0,)
    left = {thread.name.split("-")[0] for thread in set(threading.enumerate()) - before}
    assert left <= {"ThreadPoolExecutor"}  # with which Flower sends


# Replies of any size.


def large(app, client, size):
    """The app of a client that answers with far more than it was asked for."""

    def answer(message, context):
        reply = app(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == client:
            reply.content["up"]["dx"] = Array("uint8", (size,), ARRAY_ENCODING, bytes(size))
        return reply

    return answer


def test_a_reply_that_is_too_large_is_not_pulled(tmp_path, caplog):
    rounds = BARRED_ROUNDS + 3
    _, grid, strategy = linked(tmp_path, rounds=rounds, min_clients=2)
    size = 8 << 20
    grid._client.app = large(grid._client.app, 0, size)
    strategy.start(grid)
    assert grid._client.pulled < size / 4
    history = strategy.coordinator.history
    assert history[0].dropped == (0,)
    assert all(record.sampled == (1, 2) for record in history[1:BARRED_ROUNDS])  # it is not asked for a while
    assert any(0 in record.dropped for record in history[BARRED_ROUNDS:])  # and then again
    assert "its reply is not pulled: one of its parts has" in caplog.text
    assert "it is not asked before round 11" in caplog.text
    assert any("not pulled" in said for said in strategy.coordinator.refusals)
    assert len(grid._client.confirmed) == grid._client.answered  # the SuperLink need not keep any


def test_on_another_grid_too_large_a_reply_bars_its_node(tmp_path):
    _, grid, strategy = make(tmp_path, rounds=4, min_clients=2)
    grid.app = large(grid.app, 0, 1 << 20)
    strategy.start(grid)
    assert [record.sampled for record in strategy.coordinator.history] == [(0, 1, 2), *[(1, 2)] * 3]
    assert grid.sent.count(("train", 0)) == 1
    assert grid.sent.count(("query", 0)) == 1


def test_an_array_that_names_one_chunk_many_times_is_too_large(tmp_path):
    _, grid, strategy = linked(tmp_path, rounds=1, min_clients=2)
    link, app = grid._client, grid._client.app

    def bomb(message, context):
        reply = app(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 0:
            array = reply.content["up"]["dx"]
            chunk = array.slice_array()[0]
            array.__dict__["_chunks"] = [chunk] * 10_000
        return reply

    link.app = bomb
    strategy.start(grid)
    assert strategy.coordinator.history[0].dropped == (0,)
    assert "its reply is not pulled: it has at least" in strategy.coordinator.refusals[0]


def test_limits_leave_room_for_what_is_asked_for():
    limit = SizeLimit(2, 1 << 20)
    limit.check(20, (1 << 20) + 4000)
    with pytest.raises(TooLargeError, match="it has 2000 parts"):
        limit.check(2000, 0)
    with pytest.raises(TooLargeError, match="it has at least 2097152 bytes"):
        limit.check(1, 2 << 20)


def test_arrays_that_were_not_asked_for_are_not_read(tmp_path, monkeypatch):
    _, grid, strategy = make(tmp_path, rounds=1, min_clients=2)
    app, read = grid.app, []
    monkeypatch.setattr("fadamgc.flower.wire._tensor", spy(read))

    def more(message, context):
        reply = app(message, context)
        if message.metadata.message_type == "train" and context.node_config["partition-id"] == 0:
            reply.content["up"]["another"] = reply.content["up"]["dx"]
        return reply

    grid.app = more
    strategy.start(grid)
    assert strategy.coordinator.history[0].dropped == (0,)
    assert "it has ['another', 'dx', 'dy'], not ['dx', 'dy']" in strategy.coordinator.refusals[0]
    assert "another" not in read


def spy(read):
    from fadamgc.flower import wire as records

    real = records._tensor

    def tensor(name, array):
        read.append(name)
        return real(name, array)

    return tensor


def test_reasons_of_clients_are_short_and_on_one_line(tmp_path, caplog):
    _, grid, strategy = make(tmp_path, rounds=2, min_clients=1)
    honest = grid.app
    reason = "\x1b[2J broken\nround 7 of 7, all is well " + 10**6 * "x"

    def app(message, context):
        client = context.node_config["partition-id"]
        if message.metadata.message_type == "query" or client == 2:
            return honest(message, context)
        if client == 0:
            reply = Message(Error(1, reason), reply_to=message)
            reply.metadata.__dict__["_src_node_id"] = 1
            return reply
        reply = honest(message, context)
        reply.content = fadamgc.flower.wire.refusal_content("kind", reason)
        return reply

    grid.app = app
    with caplog.at_level(logging.WARNING, logger="fadamgc"):
        strategy.start(grid)
    assert any("broken" in record.getMessage() for record in caplog.records)
    for record in caplog.records:
        assert len(record.getMessage()) < 700
        assert record.getMessage().isprintable()
    assert all(text.isprintable() and len(text) < 700 for text in strategy.coordinator.refusals)


def test_a_reply_to_another_nodes_message_is_refused(tmp_path):
    _, grid, strategy = make(tmp_path, rounds=1, min_clients=1)
    honest, sent = grid.app, {}

    def app(message, context):
        reply = honest(message, context)
        client = context.node_config["partition-id"]
        if message.metadata.message_type == "train":
            sent[client] = message.metadata.message_id
            if client == 1:  # a message that was sent to client 0
                reply.metadata.__dict__["_reply_to_message_id"] = sent[0]
                reply.content["reply"]["client"] = 0
                reply.content["up"]["dx"] = Array("float32", (75,), ARRAY_ENCODING, bytes(300))
        if message.metadata.message_type == "train" and client == 0:
            grid.deaf = {0}
            return reply
        return reply

    grid.app = app
    strategy.start(grid)
    (record,) = strategy.coordinator.history
    assert record.dropped == (1,)
    assert "is not to the message it was sent" in strategy.coordinator.refusals[0]


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
    loose = World(tmp_path / "loose", sampled=3, tracked=3, max_norm_ratio=None)
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


def test_what_is_typical():
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
        world.parties = [LocalClient(model, task.loss, pair, i) for i, pair in enumerate(task.pairs)]
        world.keepers = [ClientStore(world.folder / "node", "test", i) for i in range(4)]
        world.start()
        assert all(world.round().dropped == () for _ in range(6))
        run = fadamgc.simulate(world.algo, task, rounds=6, sampled=sampled, executor="loop", **named)
        assert torch.equal(run.x, world.server.server.x)


def test_a_huge_first_gradient_ends_no_federation_well(tmp_path):
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
    world.parties = [LocalClient(model, world.task.loss, pair, i) for i, pair in enumerate(world.task.pairs)]
    world.keepers = [ClientStore(tmp_path / "node", "test", i) for i in range(3)]
    world.start()
    return world


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
    world = norm_world(tmp_path, max_norm=1e6)
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
        tmp_path, algo, dtype=torch.float32, sampled=3, tracked=3, max_norm_ratio=None, eval_every=eval_every
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
    inputs, targets = world.server.functions.test
    world.server.functions.test = inputs, targets + 1000
    with pytest.raises(InputError, match="model or loss failed on the test data"):
        world.round()


def test_what_a_killed_server_left_while_it_read_a_checkpoint_is_removed(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3)
    left = tmp_path / "server" / ".round-killed"
    left.mkdir()
    world.start()
    assert not left.exists()


def test_a_test_loss_that_never_was_finite_stops_nothing(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3)
    inputs, targets = world.server.functions.test
    world.server.functions.test = inputs * float("nan"), targets
    assert world.round().dropped == ()
    world.server.functions.test = inputs, targets
    world.round()
    world.check()


def test_a_metric_that_cannot_take_a_poisoned_model_ends_no_run(tmp_path):
    world = World(tmp_path, dtype=torch.float32, sampled=3, tracked=3, max_norm_ratio=None)

    def metric(output, target):
        if not torch.isfinite(output).all():
            raise ValueError("input contains NaN")
        return 1.0

    world.task.metric = metric
    world.round()
    record = poisoned_round(world, lambda r: r._replace(up=r.up | {"dx": torch.full_like(r.up["dx"], 3e38)}))
    assert record.dropped == (0, 1, 2)
    world.round()


# Going back.


def test_the_last_checkpoints_are_kept_and_can_be_gone_back_to(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3, rounds=9)
    x = {}
    for t in range(1, 6):
        world.round()
        x[t] = world.server.server.x
        if t == 4:
            world.start()  # a restart in between costs none of them
    store = ServerStore(tmp_path / "server", 3)
    assert store.rounds() == [3, 4, 5]
    assert len(list((tmp_path / "server").glob("round-*"))) == 6
    with pytest.raises(CheckpointError, match=r"restore-round=1 is not accepted; .* of rounds: 3, 4, 5"):
        world.start(restore_round=1)
    generation = world.server.generation
    world.start(restore_round=3)
    assert (world.server.t, len(world.server.history)) == (3, 3)
    assert torch.equal(world.server.server.x, x[3])
    assert not world.server.server.y.any()
    assert world.server.generation > generation
    for t in range(4, 7):  # clients that have counted rounds 4 and 5 take part, with new states
        assert world.round().dropped == ()
        mean = torch.stack([state.y for state in world.states()]).mean(0)
        torch.testing.assert_close(world.server.server.y, mean, rtol=1e-10, atol=1e-12)
        assert world.server.t == t
    x[6] = world.server.server.x
    world.start()  # the newest is that of after going back
    assert world.server.t == 6
    assert torch.equal(world.server.server.x, x[6])
    assert store.rounds() == [4, 5, 6]
    world.start(restore_round=5)
    assert not torch.equal(world.server.server.x, x[5])  # the round 5 of after going back
    world.round()


def test_the_config_says_what_is_bounded_and_where_to_go_back_to(tmp_path):
    task = class_task(sizes=SIZES)
    config = {"experiment": "test", "local-steps": 3, "rounds": 4, "checkpoints": 2}

    def started(**more):
        more = {key.replace("_", "-"): value for key, value in more.items()}
        return make_coordinator(task, read_config(config | more), tmp_path)

    server = started()
    limits = server.checks.max_norm_ratio, server.members.max_samples, server.members.max_size_ratio
    assert limits == (100, None, 100)
    for _ in range(3):
        server.ask([])
        server.close()
    assert started(restore_round=2).t == 2
    assert started().t == 2
    free = started(max_norm_ratio=0.0, max_size_ratio=0.0, max_samples=50, unbind_clients="all")
    limits = free.checks.max_norm_ratio, free.members.max_samples, free.members.max_size_ratio
    assert limits == (None, 50, None)


def test_a_damaged_checkpoint_can_be_gone_back_from(tmp_path):
    world = World(tmp_path, sampled=3, tracked=3, rounds=9)
    for _ in range(3):
        world.round()
    newest = tmp_path / "server" / "federation.json"
    text = newest.read_text()
    newest.unlink()  # the kept one is another name of the same file
    newest.write_text(text[:100])
    with pytest.raises(CheckpointError, match="truncated"):
        world.start()
    world.start(restore_round=2)
    assert world.server.t == 2
    world.round()
    mean = torch.stack([state.y for state in world.states()]).mean(0)
    torch.testing.assert_close(world.server.server.y, mean, rtol=1e-10, atol=1e-12)


def test_a_server_killed_while_it_keeps_a_checkpoint_resumes(tmp_path, monkeypatch):
    world = World(tmp_path, sampled=3, tracked=3, rounds=9)
    world.round()
    with monkeypatch.context() as patched:
        patched.setattr(
            "fadamgc.flower.server_store._link", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
        )
        with pytest.raises(KeyboardInterrupt):
            world.round()
    world.start()
    assert world.server.t == 2
    world.check()
    world.round()
    world.check()
    assert ServerStore(tmp_path / "server", 3).rounds() == [1, 2, 3]


def test_one_checkpoint_is_enough_for_those_who_want_no_more(tmp_path):
    world = World(tmp_path, checkpoints=1)
    world.round()
    assert not list((tmp_path / "server").glob("round-*"))
    with pytest.raises(CheckpointError, match="of rounds: none"):
        world.start(restore_round=0)
    with pytest.raises(InputError, match="checkpoints=0 is not accepted"):
        world.start(checkpoints=0)


def test_an_algorithm_that_begins_with_gradients_cannot_go_back(tmp_path):
    world = World(tmp_path, fadamgc.FAdamGC(init="gradient"))
    world.setup()
    world.round()
    with pytest.raises(InputError, match="cannot be reset with another model"):
        world.start(restore_round=1)


# Weights by size.


def test_a_client_cannot_give_itself_all_the_weight(tmp_path):
    for name, order in (("last", (0, 1, 2)), ("first", (2, 0, 1))):
        world = World(tmp_path / name, weights="size")
        says = dict(enumerate((6, 20, 10**9)))
        refused = []
        for i in order:
            try:
                world.server.admit(i, says[i])
            except RefusedError as error:
                refused.append(str(error))
        assert world.server.members.samples == {0: 6, 1: 20}
        assert world.server.needs_all
        with pytest.raises(
            RefusedError, match="client 2 has 1000000000 samples, more than 100 times the median"
        ):
            world.server.admit(2, 10**9)
        world.server.admit(2, 11)
        assert not world.server.needs_all
    known = World(tmp_path / "known", max_samples=100)
    with pytest.raises(RefusedError, match="client 1 has 101 samples, more than max_samples=100"):
        known.server.admit(1, 101)
    free = World(tmp_path / "free", weights="size", max_size_ratio=None)
    for i, size in enumerate((6, 20, 10**9)):
        free.server.admit(i, size)
    assert not free.server.needs_all


@pytest.mark.parametrize("liar", [0, 2])
def test_a_node_with_too_many_samples_is_turned_away(liar, tmp_path, caplog):
    _, grid, strategy = make(tmp_path, weights="size", wait_timeout=0.5)
    honest = grid.app

    def app(message, context):
        reply = honest(message, context)
        if message.metadata.message_type == "query" and context.node_config["partition-id"] == liar:
            reply.content["hello"]["samples"] = 10**9
        return reply

    grid.app = app
    with pytest.raises(TooFewClientsError, match=r"2 of 3 clients are connected.*samples"):
        strategy.start(grid)
    assert strategy.available == sorted({0, 1, 2} - {liar})


# Keys.


def test_a_client_is_bound_to_the_key_that_first_spoke_for_it(tmp_path, caplog):
    _, grid, first = linked(tmp_path, rounds=4, min_clients=2)
    first.bind_clients = True
    link = grid._client
    link.nodes[999], link.keys[999] = 0, b"stranger"  # it also says that it is client 0

    def gone(record):
        if record.round == 2:  # the honest node is away, and the stranger is alone
            del link.nodes[100]

    first.on_round = gone
    with caplog.at_level(logging.WARNING, logger="fadamgc"):
        first.start(grid)
    assert [r.sampled for r in first.coordinator.history] == [(0, 1, 2)] * 2 + [(1, 2)] * 2
    digest = hashlib.sha256(b"key 100").hexdigest()
    assert f"that client is bound to key {digest[:16]}" in caplog.text
    assert "unbind-clients = '0'" in caplog.text

    def again(clients, **options):
        _, other, strategy = linked(tmp_path, **options)
        strategy.bind_clients = True
        other._client.nodes, other._client.keys = clients, link.keys | dict.fromkeys(clients, b"new")
        return other, strategy

    # After a restart of the server, and under another node id, the stranger is still refused.
    other, strategy = again({555: 0, 101: 1, 102: 2}, rounds=5, min_clients=2)
    other._client.keys |= {555: b"stranger", 101: b"key 101", 102: b"key 102"}
    strategy.start(other)
    assert strategy.coordinator.history[-1].sampled == (1, 2)
    # The honest node comes back under another id, with its key.
    other, strategy = again({777: 0, 101: 1, 102: 2}, rounds=6, min_clients=2)
    other._client.keys |= {777: b"key 100", 101: b"key 101", 102: b"key 102"}
    strategy.start(other)
    assert strategy.coordinator.history[-1].sampled == (0, 1, 2)
    # A registered node cannot change its number.
    strategy.coordinator.members.keys.pop(2)
    with pytest.raises(RefusedError, match="is bound to client 0.*unbind-clients = '0'"):
        strategy.coordinator.check_key(2, hashlib.sha256(b"key 100").hexdigest())


def test_an_operator_can_replace_a_node(tmp_path):
    world = World(tmp_path)
    server = world.server
    server.members.bind(0, "old")
    world.round()
    world.start()
    with pytest.raises(RefusedError, match="that client is bound to key old, not new"):
        world.server.check_key(0, "new")
    with pytest.raises(RefusedError, match="it shows no key"):
        world.server.check_key(1, "")
    world.start(reset_states=True)  # a reset of states opens no door
    with pytest.raises(RefusedError, match="unbind-clients = '0'"):
        world.server.check_key(0, "new")
    world.start(unbind=[0])
    world.server.check_key(0, "new")
    world.server.members.bind(0, "new")
    world.server.check_key(0, "new")


def test_whether_clients_are_bound(monkeypatch):
    def binds(choice):
        return read_config({"bind-clients": choice}).binds_clients

    def unbound(clients):
        return read_config({"unbind-clients": clients}).unbound_clients

    assert (binds("on"), binds("off"), binds("auto")) == (True, False, False)
    monkeypatch.setenv("FADAMGC_BIND_CLIENTS", "on")
    assert (binds("off"), binds("auto")) == (False, True)
    with pytest.raises(InputError, match="config bind-clients='yes' is not accepted"):
        binds("yes")
    assert unbound("0, 2") == [0, 2]
    assert unbound(1) == [1]
    assert unbound("all") == [0, 1, 2]
    assert unbound("") == []
    with pytest.raises(InputError, match="config unbind-clients='3' is not accepted"):
        unbound("3")
    assert read_config({}).options.bind_clients == "auto"


# Clocks.


def test_a_reset_with_a_clock_that_is_days_ahead_blocks_nobody(tmp_path, monkeypatch):
    world = World(tmp_path, sampled=3, tracked=3, rounds=9)
    world.round()
    now = time.time()
    with monkeypatch.context() as patched:
        patched.setattr("fadamgc.flower.coordinator.time.time", lambda: now + 400 * 24 * 3600)
        world.start(reset_states=True)
    ahead = world.server.generation
    for message in world.messages():
        train = TrainRequest(message[0].request, True, world.algo, world.settings, *message[1:])
        assert read_request(request_content(train)).request == message[0].request  # as a client sees it
    world.round()
    world.start(reset_states=True)  # with the right clock
    assert world.server.generation == ahead + 1
    world.round()
    mean = torch.stack([state.y for state in world.states()]).mean(0)
    torch.testing.assert_close(world.server.server.y, mean, rtol=1e-10, atol=1e-12)


def test_states_of_an_earlier_generation_are_accepted():
    before = StoredState(1_700_000_000, Stamp(3, 1), Stamp(3, 1), "state")  # as 0.1 wrote them
    same = resolve_pending(before, Request("test", 0, 1_700_000_000, Stamp(4, 1), Stamp(3, 1)))
    assert same.committed_state == "state"
    reset = resolve_pending(before, Request("test", 0, 1_700_000_001, Stamp(4, 2), Stamp(0, 0)))
    assert reset.committed_state is None
    with pytest.raises(RefusedError, match=r"generation 1700000000.*its clock was ahead"):
        resolve_pending(before, Request("test", 0, 5, Stamp(4, 1), Stamp(3, 1)))


def test_a_checkpoint_of_the_version_before_is_read(tmp_path, monkeypatch):
    world = World(tmp_path, sampled=3, tracked=3)
    real = ServerStore.write

    def write(store, content, tensors):
        real(store, {k: v for k, v in content.items() if k not in ("scales", "keys")}, tensors)

    with monkeypatch.context() as patched:
        patched.setattr(ServerStore, "write", write)
        world.round()
    world.start()
    assert world.server.checks.scales == {}
    world.round()
    world.check()


def test_threads_do_not_ask_twice_for_what_is_under_way(tmp_path):
    task = class_task(sizes=SIZES)
    grid = Stalled(app_of(task), tmp_path, 3)
    box = ThreadInbox(grid)
    messages = [
        Message(RecordDict(), dst_node_id=100 + i, message_type="query", ttl=9.0, group_id="1")
        for i in range(3)
    ]
    grid.stalled = {("query", 1)}
    limits = dict.fromkeys(grid.push_messages(messages), SizeLimit())
    found = box.collect(limits)
    first, stalled, last = limits
    assert [identity for identity, _ in found] == [first, last]
    assert box.busy(stalled)
    count = threading.active_count()
    for _ in range(3):
        assert box.collect({stalled: SizeLimit()}) == []
    assert threading.active_count() <= count
    box.forget([stalled])
    grid.freed.set()
    while box.busy(stalled):
        box.collect({})  # it was given up: what comes now is dropped
    assert box.collect({stalled: SizeLimit()}) == []


def test_replies_that_come_while_others_are_collected_are_not_lost(tmp_path):
    grid = Stalled(app_of(class_task(sizes=SIZES)), tmp_path, 3)
    box = ThreadInbox(grid)
    messages = [
        Message(RecordDict(), dst_node_id=100 + i, message_type="query", ttl=9.0, group_id="1")
        for i in range(2)
    ]
    grid.stalled = {("query", 0)}
    late, other = grid.push_messages(messages)
    assert box.collect({late: SizeLimit()}) == []
    grid.freed.set()
    while box.busy(late):
        box.collect({other: SizeLimit()})
    ((identity, reply),) = box.collect({late: SizeLimit()})
    assert (identity, reply.content["hello"]["client"]) == (late, 0)

    _, linked_grid, _ = linked(tmp_path / "link")
    objects, link = make_inbox(linked_grid), linked_grid._client
    link.stalled = {("query", 0)}
    late, other = linked_grid.push_messages(messages)
    assert objects.collect({late: SizeLimit()}) == []
    assert len(objects.collect({other: SizeLimit()})) == 1
    name = next(name for name, content in link.objects.items() if content is None)
    link.objects[name] = link.late[name]
    ((identity, reply),) = objects.collect({late: SizeLimit()})
    assert (identity, reply.content["hello"]["client"]) == (late, 0)
