"""Messages in codecs: what the server reads is what the clients commit to."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import fadamgc
from fadamgc import compose, correction, local, server
from fadamgc.algebra.compose import Composition
from fadamgc.algorithm import example
from fadamgc.codecs import make_codec
from fadamgc.errors import InputError, NonFiniteError
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.messages import MessageCodecs, RestClient, WithRest, decode
from fadamgc.federation.server import Federation
from fadamgc.federation.settings import Settings
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.judge.relations import relations
from fadamgc.methods import algorithm_class
from fadamgc.tree import leaves, named_leaves
from problems import class_task, mlp, settings_for

CLASSES = {name: algorithm_class(name) for name in fadamgc.algorithms()}
ALGORITHMS = {name: cls() for name, cls in CLASSES.items() if not issubclass(cls, GroupedAlgorithm)}
ALGORITHMS |= {
    "compose-pre": compose(local.Adam(v="share"), "pre", server.Adam()),
    "compose-post": compose(local.Momentum(0.05, m="keep"), "post"),
    "compose-pre+direction": compose(local.Adam(amsgrad=True, v="share"), "pre+direction", alpha=0.2),
    "fadamgc-gradient": fadamgc.FAdamGC(init="gradient"),
    "scaffnew-coin": fadamgc.Scaffnew(p=0.4),
    "scaffold-I": fadamgc.Scaffold(option="I"),
}
EVERY = [pytest.param(algo, id=name) for name, algo in ALGORITHMS.items()]
SIZES = (3, 20, 7, 16)
QUICK = {"local_steps": 2, "batch_size": 4, "executor": "loop", "eval_every": 100}
BOTH = {"y": "int8", "dy": "int8"}


def fields_of(algo, part):
    """The names of the fields of a message that are vectors."""
    d = 75
    one = example(algo.for_model([p.shape for p in mlp().parameters()]), torch.zeros(d))
    return [name for name, leaf in named_leaves(getattr(one, part)).items() if leaf.numel() == d]


def simulated(algo, codec=None, task=None, **options):
    task = task or class_task(SIZES)
    return fadamgc.simulate(algo, task, **{"rounds": 3, **QUICK, "codec": codec} | options)


def equal_states(one, other):
    pairs = [(one.server, other.server), *zip(one.clients, other.clients, strict=True)]
    return all(torch.equal(a, b) for p, q in pairs for a, b in zip(leaves(p), leaves(q), strict=True))


# The server's state and the clients' belong together.


def followed(algo, codec):
    """Return the relations between server and clients that hold after all rounds."""
    task = class_task(SIZES)
    bound = algo.for_model([p.shape for p in task.model.parameters()])
    options = {"sampled": task.n, "tracked": task.n, "dtype": torch.float64, "rounds": 4}
    return relations(bound, partial(simulated, algo, task=task, **options), codec)


@pytest.mark.parametrize("algo", EVERY)
@pytest.mark.parametrize("codec", ["int8:16", "topk:0.2"])
def test_every_relation_of_the_states_holds_with_lossy_codecs(algo, codec):
    shared = set(fields_of(algo, "down"))
    lossy = {field: codec for field in fields_of(algo, "up") if field not in shared}
    assert followed(algo, None) <= followed(algo, lossy)


def test_the_relations_are_found():
    assert "y" in followed(fadamgc.FAdamGC(), None)
    assert "correction.y" in followed(ALGORITHMS["compose-pre"], None)
    assert "h" in followed(fadamgc.FedDyn(), None)
    assert {"h", "s"} <= followed(fadamgc.FedDC(), None)
    assert "mean of local z = 0" in followed(fadamgc.ScaffoldLocal(), None)
    assert "mean of local z = 0" in followed(fadamgc.FANTLocal(), None)
    assert {"x", "mean of local h = 0"} <= followed(fadamgc.Scaffnew(), None)
    assert "C" in followed(fadamgc.FedMuonSign(), None)


@dataclasses.dataclass(frozen=True)
class Forgetful(fadamgc.FAdamGC):
    """FAdamGC whose clients commit to what they meant to send."""

    changes = {}  # noqa: RUF012


def test_a_method_that_does_not_follow_what_arrives_is_detected():
    assert "y" in followed(Forgetful(), None)
    assert "y" not in followed(Forgetful(), {"dy": "int8:16"})


@pytest.mark.slow
@pytest.mark.parametrize("codec", [BOTH, {"y": "int4", "dy": "topk:0.1", "dx": "int8"}])
def test_y_stays_the_mean_of_the_y_i_over_1000_rounds(codec):
    algo = fadamgc.FAdamGC(eta_l=0.01)
    run = simulated(algo, codec, class_task((3, 5, 4)), rounds=1000, sampled=2, tracked=1, local_steps=1)
    mean = torch.stack([state.y for state in run.clients]).mean(0)
    scale = max(float(state.y.abs().max()) for state in run.clients)
    assert float((run.server.y - mean).abs().max()) <= 1e-5 * scale  # 1000 roundings of float32
    assert scale > 1e-3


# The bytes that count are those that are sent.


@pytest.mark.parametrize("algo", EVERY)
def test_the_bytes_that_count_are_those_that_are_sent(algo):
    task = class_task((3, 6, 5))
    who = settings_for(algo, task.n, 2, 1)
    names = dict.fromkeys(fields_of(algo, "down") + fields_of(algo, "up"))
    chosen = {name: ("int8", "int4")[i % 2] for i, name in enumerate(names)}
    chosen |= {"dx": "topk:0.1"} if "dx" in fields_of(algo, "up") else {}
    settings = Settings.of(rounds=2, local_steps=2, batch_size=4, codec=chosen, **who)
    federation = Federation(algo, TaskFunctions(task), task.n, settings)
    if federation.state.server is None:
        federation.begin_with([torch.ones(75)] * task.n, [1] * task.n)
    down, round = federation.message(), federation.open()
    state = round.algorithm.init_client(round.down.x, torch.ones(75) if algo.init_gradient else None)
    up = example(round.algorithm, round.down.x).up
    size = lambda sent: sum(value.nbytes for value in sent.values())
    sent = federation.codecs.send_up(round.algorithm, state, up, True, (0, 1, 0)).fields
    tracked = {name for name in sent if name.partition(".")[0] in algo.tracked_only}
    assert federation.traffic.down == size(down)
    assert federation.traffic.up_tracked == size({name: sent[name] for name in tracked})
    assert federation.traffic.up == size(sent) - federation.traffic.up_tracked
    for name, codec in chosen.items():
        fields = [value for key, value in (down | sent).items() if key == name]
        assert all(value.dtype == torch.uint8 for value in fields)
        assert {len(value) for value in fields} == {make_codec(codec).size(75)}


def test_the_records_have_the_bytes_of_the_encoded_messages():
    run = simulated(fadamgc.FAdamGC(), BOTH, sampled=3, tracked=2)
    d, small = 75, make_codec("int8").size(75)
    for record in run.history:
        assert record.bytes_down == 3 * (4 * d + small)
        assert record.bytes_up == 3 * 4 * d + 2 * small


# Executors, resuming, saving.


@pytest.mark.parametrize("codec", [BOTH, {"dx": "topk:0.1", "dy": "int4", "x": "bfloat16"}])
def test_executors_agree(codec):
    algo = fadamgc.FAdamGC(eta_l=0.01)
    runs = [
        simulated(algo, codec, executor=executor, dtype=torch.float64, sampled=3, tracked=2)
        for executor in ("loop", "threads", "vectorized")
    ]
    for run in runs[1:]:
        # A number that is rounded at random the other way differs by a level; none of these does.
        torch.testing.assert_close(leaves(run.server), leaves(runs[0].server), rtol=1e-9, atol=1e-11)
        for a, b in zip(runs[0].clients, run.clients, strict=True):
            torch.testing.assert_close(leaves(b), leaves(a), rtol=1e-9, atol=1e-11)
        assert [r.work for r in run.history] == [r.work for r in runs[0].history]


@pytest.mark.parametrize("states", ["memory", "files"])
def test_a_run_with_a_rest_resumes_exactly(states, tmp_path):
    codec = {"dx": "topk:0.1", "y": "int8", "dy": "int8"}
    options = {"codec": codec, "sampled": 2, "tracked": 1}
    whole = simulated(fadamgc.FAdamGC(), rounds=5, **options)
    assert any(leaf.any() for state in whole.clients for leaf in leaves(state.rest))
    for stop in (2, 5):
        saving = {"checkpoint": tmp_path / "c", "resume": True, "states": states}
        run = simulated(fadamgc.FAdamGC(), rounds=stop, **options, **saving)
    assert run.history == whole.history
    assert equal_states(run, whole)
    with pytest.raises(fadamgc.FadamgcError, match="checkpoint of another run: codec="):
        simulated(fadamgc.FAdamGC(), rounds=6, **options | {"codec": {"dx": "topk:0.2"}}, **saving)


@pytest.mark.parametrize("name", ["fadamgc", "compose-pre", "feddyn", "fedmuon_sign", "scaffnew"])
def test_a_saved_run_is_read_back(name, tmp_path):
    algo = ALGORITHMS[name]
    task = class_task(SIZES)
    codec = dict.fromkeys(fields_of(algo, "up"), "topk:0.1")
    run = simulated(algo, codec, task, local_parameters="0" if name == "fadamgc" else None)
    run.save(tmp_path / "run")
    back = fadamgc.load_run(tmp_path / "run", task=task)
    assert equal_states(back, run)
    assert back.history == run.history
    assert [type(state) for state in back.clients] == [type(state) for state in run.clients]
    checkpoint = tmp_path / "checkpoint"
    other = simulated(algo, codec, task, checkpoint=checkpoint)
    assert equal_states(simulated(algo, codec, task, checkpoint=checkpoint, resume=True), other)


def test_a_run_without_codecs_is_described_as_before():
    run = simulated(fadamgc.FAdamGC())
    assert "codec" not in run.settings
    assert "codec" not in simulated(fadamgc.FAdamGC(), {}).settings
    assert simulated(fadamgc.FAdamGC(), BOTH).settings["codec"] == [["dy", "int8"], ["y", "int8"]]


def test_float32_loses_nothing_in_a_run_of_float32():
    codec = dict.fromkeys(("x", "y", "dx", "dy"), "float32")
    assert equal_states(simulated(fadamgc.FAdamGC(), codec), simulated(fadamgc.FAdamGC()))


@pytest.mark.parametrize("executor", ["loop", pytest.param("vectorized", marks=pytest.mark.slow)])
def test_many_runs_at_once_are_those_of_simulate(executor):
    task = class_task(SIZES)
    runs = [
        {"algorithm": fadamgc.FAdamGC(), "codec": BOTH},
        {"algorithm": fadamgc.FAdamGC(), "codec": {"dx": "topk:0.1"}},
        {"algorithm": fadamgc.FedAvg(), "codec": {"dx": "int4"}, "seed": 3},
        {"algorithm": fadamgc.FAdamGC()},
    ]
    common = {"rounds": 3, "task": task, **QUICK, "executor": executor}
    for run, arguments in zip(fadamgc.simulate_many(runs, **common), runs, strict=True):
        alone = fadamgc.simulate(**arguments, **common)
        torch.testing.assert_close(run.x, alone.x, rtol=1e-4, atol=1e-5)
        assert [r.work for r in run.history] == [r.work for r in alone.history]


def test_local_parameters_stay_at_the_clients():
    codec = {"dx": "topk:0.1", **BOTH}
    run = simulated(fadamgc.FAdamGC(), codec, local_parameters="0", eval_clients="epoch", eval_every=3)
    d = sum(p.numel() for p in mlp()[2].parameters())
    sizes = {name: make_codec(text).size(d) for name, text in codec.items()}
    assert run.history[0].bytes_down == 4 * (4 * d + sizes["y"])
    assert run.history[0].bytes_up == 4 * (sizes["dx"] + sizes["dy"])
    shared = [state.shared for state in run.clients]
    assert all(isinstance(state, RestClient) for state in shared)
    mean = torch.stack([state.inner.y for state in shared]).mean(0)
    torch.testing.assert_close(run.server.shared.y, mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_models_of_other_types(dtype):
    codec = {"dx": "topk:0.3", "x": "bfloat16", **BOTH}
    run = simulated(fadamgc.FAdamGC(eta_l=0.01), codec, dtype=dtype)
    states = [state.inner for state in run.clients]
    assert run.x.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(run.server.y, torch.stack([s.y for s in states]).mean(0), rtol=1e-5, atol=1e-7)


# What is not finite.


class Huge(nn.Module):
    """A model whose gradient is beyond the range of float32, but not of float64."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3, dtype=torch.float64))

    def forward(self, x):
        return x @ self.w


def huge_task(sizes=(1.0, 1.0, 1e60)):
    clients = [(size * torch.ones(4, 3, dtype=torch.float64), torch.zeros(4)) for size in sizes]
    return fadamgc.Task(Huge(), lambda output, _: output.mean(), clients)


@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8", "int4", "topk:1", "means"])
def test_numbers_beyond_float32_are_an_error_and_not_a_wrong_result(codec):
    options = {"dtype": torch.float64, "rounds": 2}
    plain = simulated(fadamgc.FedAvg(eta_l=1.0), None, huge_task(), **options)
    assert float(plain.x.abs().max()) > 1e50
    with pytest.raises(NonFiniteError, match="client 2 produced a non-finite update in round 1"):
        simulated(fadamgc.FedAvg(eta_l=1.0), {"dx": codec}, huge_task(), **options)
    with pytest.raises(NonFiniteError, match="the server's x is not finite as it is sent in round 2"):
        simulated(fadamgc.FedAvg(eta_l=1.0), {"x": codec}, huge_task(), **options)
    options |= {"on_nonfinite": "drop"}
    run = simulated(fadamgc.FedAvg(eta_l=1.0), {"dx": codec}, huge_task(), **options)
    assert [record.dropped for record in run.history] == [(2,), (2,)]
    assert torch.isfinite(run.x).all()
    assert float(run.x.abs().max()) < 1e3


def test_one_of_many_runs_may_end_because_its_message_is_too_large():
    runs = [{"codec": {"x": "int8"}}, {"codec": {"dx": "float32"}, "task": huge_task((1.0, 1.0))}, {}]
    common = {"algorithm": fadamgc.FedAvg(eta_l=1.0), "task": huge_task(), "dtype": torch.float64}
    ended = fadamgc.simulate_many(runs, rounds=2, errors="return", **common, **QUICK)
    assert isinstance(ended[0], NonFiniteError)
    assert [len(run.history) for run in ended[1:]] == [2, 2]


# Methods of a user's own.


class Kept(NamedTuple):
    y: Tensor


class Sent(NamedTuple):
    dx: Tensor
    change: Tensor


@dataclasses.dataclass(frozen=True)
class Custom(fadamgc.FedAvg):
    """Clients that keep how far they have moved, of which the server keeps the mean."""

    changes = {"change": "y"}  # noqa: RUF012

    def init_server(self, x, g=None):
        return ServerOfCustom(x, torch.zeros_like(x))

    def init_client(self, x, g=None):
        return Kept(torch.zeros_like(x))

    def finish(self, down, client, local, x, K, tracked):
        y = 0.5 * client.y + (x - down.x)
        return Kept(y), Sent(x - down.x, y - client.y)

    def aggregate(self, server, total, cohort):
        return ServerOfCustom(server.x + total.dx / cohort.S, server.y + total.change / cohort.n)


class ServerOfCustom(NamedTuple):
    x: Tensor
    y: Tensor


@dataclasses.dataclass(frozen=True)
class OwnCorrection(correction.Correction):
    """The same, as a correction of compositions."""

    title = "own"
    tracks = True
    changes = {"change": "y"}  # noqa: RUF012

    def init_server(self, x, g):
        return Kept(torch.zeros_like(x))

    def init_client(self, x, g):
        return Kept(torch.zeros_like(x))

    def finish(self, down, client, local, x, K, eta_l, tracked):
        y = fadamgc.rules.select(tracked, 0.5 * client.y + (x - down.x), client.y)
        return Kept(y), ChangeOnly(y - client.y)

    def aggregate(self, server, total, D, cohort, eta_l):
        return Kept(server.y + total.change / cohort.n)


class ChangeOnly(NamedTuple):
    change: Tensor


@pytest.mark.parametrize("executor", ["loop", "vectorized"])
def test_a_custom_method_says_what_follows_its_messages(executor):
    run = simulated(Custom(), {"change": "int4", "dx": "topk:0.2"}, sampled=3, executor=executor)
    mean = torch.stack([state.inner.y for state in run.clients]).mean(0)
    assert mean.any()
    torch.testing.assert_close(run.server.y, mean, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("executor", ["loop", "vectorized"])
def test_a_custom_correction_says_what_follows_its_messages(executor):
    algo = compose(local.SGD(0.05), OwnCorrection())
    assert isinstance(algo, Composition)
    assert algo.changes == {"correction.change": "correction.y"}
    run = simulated(algo, {"change": "int4"}, sampled=3, tracked=2, executor=executor)
    mean = torch.stack([state.correction.y for state in run.clients]).mean(0)
    assert mean.any()
    torch.testing.assert_close(run.server.correction.y, mean, rtol=1e-5, atol=1e-7)


# What a client did not send.


def test_the_rest_is_sent_later():
    """Without training, a client with a rest sends it piece by piece until nothing is left."""
    codecs = MessageCodecs((("dx", "topk:0.25"),), fadamgc.FedAvg(), 8, torch.float32)
    algo = codecs.keeping_rest(fadamgc.FedAvg())
    assert isinstance(algo, WithRest)
    x = torch.arange(8.0)
    state, arrived = algo.init_client(x), torch.zeros(8)
    up = example(algo, x).up._replace(dx=x)
    for t in range(1, 5):
        state, _, read = codecs.send_up(algo, state, up, True, (0, t, 0))
        arrived += read.dx
        up = up._replace(dx=torch.zeros(8))
        assert torch.equal(arrived + state.rest.dx, x)
    assert torch.equal(arrived, x)


def test_a_change_of_a_kept_state_has_no_rest():
    codecs = MessageCodecs((("dx", "topk"), ("dy", "topk")), fadamgc.FAdamGC(), 8, torch.float32)
    assert codecs.rest == ("dx",)


def test_clients_that_are_not_tracked_send_and_keep_nothing_of_it():
    run = simulated(fadamgc.FAdamGC(), {"dy": "int8", "dx": "topk:0.1"}, sampled=4, tracked=0)
    assert not any(state.inner.y.any() for state in run.clients)
    assert not run.server.y.any()


# Bad input.


@pytest.mark.parametrize(
    ("algo", "codec", "message"),
    [
        (fadamgc.FAdamGC(), {"dz": "int8"}, "codec for 'dz': no message of FAdamGC has this field; did you"),
        (fadamgc.FedAvg(), BOTH, "codec for 'dy': no message of FedAvg has this field.*it has x, dx"),
        (fadamgc.FAdamGC(), {"dy": "int9"}, "codec for dy='int9' is not accepted; it must be one of float32"),
        (fadamgc.FAdamGC(), {"dy": 8}, "codec for dy=8 is not accepted"),
        (fadamgc.FAdamGC(), 8, "codec=8 is not accepted; it must be a dict"),
        (fadamgc.MTGC(), {"dx": "int8"}, "codec=.*is given, but MTGC has clients in groups; omit it"),
        (
            compose(local.Adam(), "pre"),
            {"correction.dy": "int8", "dy": "int4"},
            r"codec for 'correction\.dy' and 'dy': both are correction\.dy; give one of them",
        ),
    ],
)
def test_bad_codecs_are_refused_before_anything_changes(algo, codec, message, tmp_path):
    folder = tmp_path / "checkpoint"
    with pytest.raises(InputError, match=message):
        simulated(algo, codec, checkpoint=folder)
    assert not folder.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"dz": "y"}, "the message has no dz"), ({"change": "z"}, "the state of a client has no z; it has y")],
)
def test_changes_of_fields_that_do_not_exist_are_refused(changes, message):
    wrong = type("Wrong", (Custom,), {"changes": changes})()
    with pytest.raises(InputError, match=message):
        simulated(wrong, {"dx": "int8"})


def test_bytes_of_another_message_are_refused():
    codecs = MessageCodecs((("dx", "int8"),), fadamgc.FedAvg(), 75, torch.float32)
    like = named_leaves(example(fadamgc.FedAvg(), torch.zeros(75)).up)
    for data in (torch.zeros(78, dtype=torch.uint8), torch.zeros(79)):
        with pytest.raises(InputError, match="dx: 75 numbers as int8 are 79 bytes; got"):
            decode({"dx": data}, codecs.coded_up(True), like)
