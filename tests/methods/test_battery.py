"""What every registered algorithm must pass, and the skeleton."""

from __future__ import annotations

import dataclasses
from functools import partial

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import fadamgc
from compiling import needs_compiler
from fadamgc import compose, correction, local, server
from fadamgc.algorithm import Cohort, add, example
from fadamgc.federation.client_data import ClientTable
from fadamgc.federation.cost import traffic
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.sampling import draw
from fadamgc.fields import options
from fadamgc.judge.skeleton import MyMethod
from fadamgc.methods import _REGISTRY, algorithm_class
from fadamgc.sim.executors import VectorizedExecutor
from fadamgc.tree import leaves, named_leaves
from problems import EVEN, REPRESENTATIVES, class_task, settings_for

CLASSES = {name: algorithm_class(name) for name in fadamgc.algorithms()} | {"skeleton": MyMethod}

# Every local rule, correction and server rule, and every home of a moment, each in one composition at least.
COMPOSITIONS = {
    f"compose-{name}": algorithm
    for name, algorithm in {
        "momentum-keep-post": compose(local.Momentum(0.05, m="keep"), "post"),
        "nesterov-share-pre": compose(local.Momentum(0.05, nesterov=True, m="share"), "pre"),
        "adam-share": compose(local.Adam(m="share", v="share", bias_correction=True), "none", server.Adam()),
        "amsgrad-pre+direction": compose(local.Adam(amsgrad=True, v="share"), "pre+direction", alpha=0.2),
        "adamw-keep-pre": compose(
            local.AdamW(m="keep", amsgrad=True, bias_correction=True), "pre", server.Nesterov()
        ),
        "adamw-l2": compose(local.AdamW(v="reset", decoupled=False), "none", server.Momentum()),
        "adagrad-pre": compose(local.AdaGrad(), "pre", server.AMSGrad()),
        "rmsprop-direction": compose(local.RMSProp(v="share"), "direction"),
        "lion-pre": compose(local.Lion(m="keep"), "pre", server.Yogi()),
        "sign-proximal": compose(local.Sign(), correction.Proximal(0.1), server.AdaGrad()),
    }.items()
}
# Layers that do not know the algorithm are tested with these: one for each shape of a state.
SHAPES = [pytest.param(algo, id=name) for name, algo in REPRESENTATIVES.items()]
SHAPES.append(pytest.param(COMPOSITIONS["compose-amsgrad-pre+direction"], id="compose"))
MEANS = ("y", "C", "s", "h", "correction.y")  # fields of a server that are the mean of the clients' fields


@pytest.fixture(scope="module", autouse=True)
def _register_the_skeleton():
    fadamgc.register("skeleton", MyMethod)
    yield
    del _REGISTRY["skeleton"]


def variants(name: str) -> dict[str, fadamgc.Algorithm]:
    """The defaults, and every other option of every field that is a choice; with the ids of their tests."""
    default = CLASSES[name]()
    others = {
        f"{name}-{field.name}={option}": dataclasses.replace(default, **{field.name: option})
        for field in dataclasses.fields(default)
        for option in options(field)
        if option != field.default
    }
    return {name: default, **others}


VARIANTS = [pytest.param(algo, id=id) for name in CLASSES for id, algo in variants(name).items()]
VARIANTS += [pytest.param(algo, id=name) for name, algo in COMPOSITIONS.items()]
VARIANTS += [pytest.param(compose(local.SGD(), correction.Pre(init="gradient")), id="compose-pre-gradient")]
NAMED = {name: cls() for name, cls in CLASSES.items()} | COMPOSITIONS
DEFAULTS = [pytest.param(algo, id=name) for name, algo in NAMED.items()]


def test_the_variants_are_found():
    assert fadamgc.FAdamGC(init="gradient") in variants("fadamgc").values()
    assert fadamgc.FAdamGC(v_hat="restart") in variants("fadamgc").values()
    assert fadamgc.Scaffold(option="I") in variants("scaffold").values()
    assert fadamgc.FedAdam(bias_correction=True) in variants("fedadam").values()
    assert fadamgc.FedAMS(option="amsgrad") in variants("fedams").values()


@pytest.mark.parametrize(
    "algo",
    [
        pytest.param(*param.values, id=param.id, marks=[] if param.id in CLASSES else pytest.mark.slow)
        for param in VARIANTS
    ],
)
def test_loop_vectorized_and_client_optimizer_agree(algo):
    task = class_task()
    rounds, K, B, seed = 4, 5, 8, 3
    who = settings_for(algo, task.n)
    runs = [
        fadamgc.simulate(
            algo, task, rounds=rounds, local_steps=K, batch_size=B, seed=seed,
            dtype=torch.float64, executor=executor, **who,
        )
        for executor in ("loop", "vectorized", "threads")
    ]  # fmt: skip
    by_hand = with_client_optimizer(algo, task, rounds, who, K, B, seed)
    torch.testing.assert_close(by_hand, runs[0].x, rtol=1e-12, atol=1e-13)
    for run in runs[1:]:
        assert_equal_to_rounding(run, runs[0])


def assert_equal_to_rounding(run, reference):
    torch.testing.assert_close(run.x, reference.x, rtol=1e-12, atol=1e-13)
    for a, b in zip(reference.history, run.history, strict=True):
        assert a.train_loss == pytest.approx(b.train_loss, rel=1e-12)
        for name in ("sampled", "tracked", "bytes_up", "bytes_down"):
            assert getattr(a, name) == getattr(b, name)
    for a, b in zip(reference.clients, run.clients, strict=True):
        torch.testing.assert_close(leaves(b), leaves(a), rtol=1e-11, atol=1e-12)


# The steps that are compiled are those that the executor records and runs without a compiler, too. They are
# compared with the loop above, for every algorithm and option. Here is the compiler, on two of them; the
# rules that threads compile are in tests/sim/executors.


@needs_compiler
@pytest.mark.parametrize("algo", [fadamgc.FAdamGC(), fadamgc.FANTLocal()], ids=["fadamgc", "fa_nt_local"])
def test_compiled_steps_agree_with_the_loop(algo):
    # The shapes of batches are the executor's matter, whatever the algorithm: all of them with one of these.
    task = class_task() if isinstance(algo, fadamgc.FAdamGC) else class_task(EVEN)
    options = {"rounds": 3, "local_steps": 4, "batch_size": 8, "seed": 3, "dtype": torch.float64}
    options |= settings_for(algo, task.n)
    reference = fadamgc.simulate(algo, task, executor="loop", **options)
    run = fadamgc.simulate(algo, task, executor=partial(VectorizedExecutor, compile=True), **options)
    assert run.settings["compiled"]
    assert_equal_to_rounding(run, reference)


def with_client_optimizer(algo, task, rounds, who, K, B, seed):
    """The same federation in a hand-written training loop that uses only the simulator's draws."""
    model = TaskFunctions(task, torch.float64).module.requires_grad_(True)
    functions = TaskFunctions(task, torch.float64)
    table = ClientTable(task.samples, functions.dtype, functions.device)
    loss_of = task.loss

    def whole_gradient(x, client):
        return functions.whole_gradient(x, {}, client, table[client], seed, 0)

    algo = algo.for_model([parameter.shape for parameter in model.parameters()])
    x = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    starts = [whole_gradient(x, i) if algo.init_gradient else None for i in range(task.n)]
    server = algo.init_server(x, torch.stack(starts).mean(0) if algo.init_gradient else None)
    optimizers = [fadamgc.ClientOptimizer(model.parameters(), algo, g) for g in starts]
    for t in range(1, rounds + 1):
        sampled, tracked = draw(seed, t, task.n, who["sampled"], who["tracked"])
        down = algo.broadcast(server)
        total = None
        for i in sampled:
            optimizer = optimizers[i]
            optimizer.start_round(down, whole_gradient(down.x, i) if algo.round_gradient else None)
            inputs, targets = task.pairs[i]
            plan = fadamgc.Settings(rounds, seed=seed, batch_size=B, local_steps=K)
            for positions in plan.batches(t, i, len(inputs)):
                rows = torch.from_numpy(positions.copy())
                optimizer.zero_grad()
                loss_of(model(inputs[rows].double()), targets[rows]).backward()
                optimizer.step()
            up = optimizer.finish_round(tracked=i in tracked)
            total = up if total is None else add(total, up)
        server = algo.aggregate(server, total, Cohort(n=task.n, S=len(sampled), K=K))
    return server.x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algo", "plan"),
    [
        pytest.param(algo, plan, id=f"{name}-{next(iter(plan))}")
        for name, algo in {**REPRESENTATIVES, "compose": COMPOSITIONS["compose-adam-share"]}.items()
        for plan in ({"local_epochs": 2, "batch_size": 6}, {"local_steps": 7, "batch_size": 12})
        if not (algo.full_participation and "local_epochs" in plan)  # it needs the same K at every client
    ],
)
def test_ragged_clients_are_masked_correctly(algo, plan):
    task = class_task(sizes=(1, 25, 6, 13, 4, 12))
    runs = [
        fadamgc.simulate(
            algo, task, rounds=3, seed=5, dtype=torch.float64, executor=executor,
            **settings_for(algo, task.n, 4, 2), **plan,
        )
        for executor in ("loop", "vectorized", "threads")
    ]  # fmt: skip
    for run in runs[1:]:
        assert_equal_to_rounding(run, runs[0])


@pytest.mark.parametrize("algo", VARIANTS)
def test_methods_are_pure(algo):
    x = torch.linspace(1, 2, 5, dtype=torch.float64)
    before = example(algo, x)
    copies = [[t.clone() for t in leaves(part)] for part in before]
    after = example(algo, x)
    algo.aggregate(before.server, before.up, Cohort(n=4, S=2, K=1))
    algo.finish(before.down, before.client, before.local, x + 1, 3, False)
    algo.step(before.down, before.client, before.local, x + 2, x - 1)
    for part, copy, again in zip(before, copies, after, strict=True):
        for a, b, c in zip(leaves(part), copy, leaves(again), strict=True):
            assert torch.equal(a, b)
            assert torch.equal(a, c)


@pytest.mark.parametrize("algo", DEFAULTS)
def test_untracked_clients_send_nothing_that_only_tracked_ones_send(algo):
    x = torch.linspace(1, 2, 5)
    one = example(algo, x)
    _, up = algo.finish(one.down, one.client, one.local, x + 1, 3, False)
    for field in algo.tracked_only:
        assert not any(leaf.any() for leaf in leaves(getattr(up, field)))
    assert set(algo.tracked_only) <= set(up._fields)


@pytest.mark.parametrize("algo", DEFAULTS)
def test_bytes_are_those_of_the_messages(algo):
    task = class_task()
    who = settings_for(algo, task.n)
    run = fadamgc.simulate(algo, task, rounds=2, local_steps=2, batch_size=4, executor="loop", **who)
    shapes = [parameter.shape for parameter in task.model.parameters()]
    one = example(algo.for_model(shapes), run.x)
    size = lambda fields: sum(t.numel() * t.element_size() for t in leaves(fields))
    extra = [getattr(one.up, f) for f in algo.tracked_only]
    for record in run.history:
        work = [work for work in record.work if work.link == "client"]
        up = who["sampled"] * (size(one.up) - size(extra)) + who["tracked"] * size(extra)
        assert sum(sum(w.down) for w in work) == who["sampled"] * size(one.down)
        assert sum(sum(w.up) for w in work) == up
        assert record.bytes_down == sum(sum(w.down) for w in record.work)
        assert record.bytes_up == sum(sum(w.up) for w in record.work)
    assert traffic(algo.for_model(shapes), run.x.numel()).down == size(one.down)


@pytest.mark.parametrize("algo", SHAPES)
def test_the_task_is_left_alone_and_the_result_repeats(algo):
    task = class_task(
        model=nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6), nn.Linear(6, 3)), sizes=(4, 9, 5)
    )
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    was_training, rng = task.model.training, torch.get_rng_state()
    who = settings_for(algo, task.n, 2, 1)
    one, two = (
        fadamgc.simulate(algo, task, rounds=3, local_steps=3, batch_size=4, seed=9, **who) for _ in range(2)
    )
    assert torch.equal(one.x, two.x)
    assert one.history == two.history
    assert task.model.training == was_training
    assert torch.equal(torch.get_rng_state(), rng)
    for name, value in task.model.state_dict().items():
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in task.model.parameters())


@pytest.mark.parametrize("algo", VARIANTS)
def test_save_and_load(algo, tmp_path):
    task = class_task()
    options = {"rounds": 2, "local_steps": 2, "batch_size": 4, "executor": "loop"}
    run = fadamgc.simulate(algo, task, **options, **settings_for(algo, task.n))
    run.save(tmp_path / "run")
    back = fadamgc.load_run(tmp_path / "run", task=task)
    assert back.algorithm == algo
    assert back.history == run.history
    assert [r.wall_seconds for r in back.history] == [r.wall_seconds for r in run.history]
    for a, b in zip([run.server, *run.clients], [back.server, *back.clients], strict=True):
        assert type(a) is type(b)
        assert all(torch.equal(p, q) for p, q in zip(leaves(a), leaves(b), strict=True))
    assert torch.equal(torch.nn.utils.parameters_to_vector(back.model.parameters()), run.x)


@pytest.mark.slow
@pytest.mark.parametrize("algo", SHAPES)
def test_resume_is_bit_for_bit(algo, tmp_path):
    task = class_task()
    options = {"local_steps": 3, "batch_size": 4, "seed": 2, **settings_for(algo, task.n)}
    whole = fadamgc.simulate(algo, task, rounds=5, **options)
    for stop in (2, 4, 5):
        run = fadamgc.simulate(algo, task, rounds=stop, checkpoint=tmp_path / "c", resume=True, **options)
    assert run.history == whole.history
    for a, b in zip([run.server, *run.clients], [whole.server, *whole.clients], strict=True):
        assert all(torch.equal(p, q) for p, q in zip(leaves(a), leaves(b), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMED)
@settings(max_examples=6, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)
@given(data=st.data())
def test_invariants_over_shapes_of_federations(name, data):
    """Whatever n, S, S~, K, sizes and seed: y is the mean of the y_i, and who is absent is untouched."""
    algo = NAMED[name].replace(eta_l=data.draw(st.sampled_from([1e-3, 0.05])))
    sizes = data.draw(st.lists(st.integers(1, 12), min_size=1, max_size=6), label="sizes")
    n = len(sizes)
    S = n if algo.full_participation else data.draw(st.integers(1, n), label="S")
    tracked = n if algo.full_participation else data.draw(st.integers(0, S), label="tracked")
    K, seed = data.draw(st.integers(1, 4), label="K"), data.draw(st.integers(0, 2**40), label="seed")
    seen = []
    run = fadamgc.simulate(
        algo, class_task(sizes), rounds=3, sampled=S, tracked=tracked, local_steps=K, batch_size=4, seed=seed,
        dtype=torch.float64, executor="loop", callbacks=[lambda end: seen.append(list(end.clients))],
    )  # fmt: skip
    states = [[run.clients.initial] * n, *seen]
    for record, before, after in zip(run.history, states, seen, strict=False):
        assert len(record.sampled) == S
        assert len(record.tracked) == tracked
        assert set(record.tracked) <= set(record.sampled)
        for i in set(range(n)) - set(record.sampled):
            assert all(torch.equal(p, q) for p, q in zip(leaves(before[i]), leaves(after[i]), strict=True))
        for i in set(range(n)) - set(record.tracked):
            old, new = named_leaves(before[i]), named_leaves(after[i])
            tracked_fields = [field for field in MEANS if field in old and field != "h"]
            assert all(torch.equal(old[field], new[field]) for field in tracked_fields)
    for field, value in named_leaves(run.server).items():
        if field in MEANS and field in named_leaves(run.clients.initial):
            mean = torch.stack([named_leaves(client)[field] for client in run.clients]).mean(0)
            torch.testing.assert_close(value, mean, rtol=1e-9, atol=1e-12)
