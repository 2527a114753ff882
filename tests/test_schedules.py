"""Hyperparameters that follow a schedule, in every place where algorithms run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import fadamgc
from fadamgc import schedules
from fadamgc.algorithm import Cohort
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from fadamgc.flower.config import read_config
from fadamgc.hyperparameters import numbers
from fadamgc.schedules import from_plain
from fadamgc.sim.executors import inplace, vectorized
from fadamgc.sim.executors.machine_code import compiler
from fadamgc.sim.executors.threads import ThreadsExecutor
from fadamgc.sim.executors.trace import Kinds
from fadamgc.sim.executors.vectorized import VectorizedExecutor
from problems import EVEN, class_task

RUN: dict[str, Any] = {"rounds": 6, "local_steps": 3, "batch_size": 8, "progress": False}
COMPILES = [pytest.mark.slow, pytest.mark.skipif(compiler() is None, reason="no C++ compiler")]


def halved(t: int) -> float:
    return 0.2 / 2**t


ALL = {
    "constant": (schedules.constant(0.1), [0.1, 0.1, 0.1, 0.1]),
    "step": (schedules.step(0.8, every=2, factor=0.5), [0.8, 0.8, 0.4, 0.4]),
    "step at": (schedules.step(0.8, at_rounds=[2, 4], factor=0.5), [0.8, 0.4, 0.4, 0.2]),
    "exponential": (schedules.exponential(0.8, factor=0.5), [0.8, 0.4, 0.2, 0.1]),
    "linear": (schedules.linear(0.8, rounds=4), [0.8, 0.6, 0.4, 0.2]),
    "linear beyond": (schedules.linear(0.8, rounds=2, end=0.2), [0.8, 0.5, 0.2, 0.2]),
    "cosine": (
        schedules.cosine(1.0, rounds=4),
        [1.0, (1 + math.sqrt(0.5)) / 2, 0.5, (1 - math.sqrt(0.5)) / 2],
    ),
    "warm-up": (schedules.warmup(2, then=0.8), [0.4, 0.8, 0.8, 0.8]),
    "warm-up, then": (schedules.warmup(2, {"exponential": 0.8, "factor": 0.5}), [0.4, 0.8, 0.8, 0.4]),
    "function": (schedules.function(halved), [0.1, 0.05, 0.025, 0.0125]),
}


@pytest.mark.parametrize("name", ALL)
def test_the_numbers_of_a_schedule(name: str) -> None:
    schedule, values = ALL[name]
    assert [schedule.at(t) for t in (1, 2, 3, 4)] == pytest.approx(values)
    assert from_plain("eta_l", schedule.plain()) == schedule
    algorithm = fadamgc.FedAvg(eta_l=schedule)
    assert fadamgc.make_algorithm("fedavg", **algorithm.plain()) == algorithm
    assert algorithm.at(3) == fadamgc.FedAvg(eta_l=schedule.at(3))


def test_the_rounds_of_the_run_are_those_of_a_schedule_without() -> None:
    schedule = schedules.warmup(2, schedules.cosine(1.0)).over(6)
    assert schedule == schedules.warmup(2, schedules.cosine(1.0, rounds=4))
    run = fadamgc.simulate(fadamgc.FedAvg(eta_l=schedules.linear(0.1)), class_task(), **RUN)
    assert run.settings["hyperparameters"]["eta_l"] == {"linear": 0.1, "rounds": 6, "end": 0.0}


ALGORITHMS = {
    "fadamgc": lambda eta: fadamgc.FAdamGC(eta_l=eta),
    "scaffold_m": lambda eta: fadamgc.ScaffoldM(eta_l=eta),
    "composed": lambda eta: fadamgc.compose(fadamgc.local.Adam(eta_l=eta, v="share"), "pre+direction"),
}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_run_with_a_schedule_is_a_run_with_the_numbers_of_each_round(name: str) -> None:
    """By hand: one round after the other, each with its own algorithm."""
    task = class_task(EVEN)
    make = ALGORITHMS[name]
    run = fadamgc.simulate(make(halved), task, executor="loop", dtype=torch.float64, **RUN)
    server, clients, xs = None, None, []
    for t in range(1, 7):
        algorithm = make(halved(t))
        if server is None:
            x = torch.cat([p.detach().double().reshape(-1) for p in task.model.parameters()])
            server, clients = algorithm.init_server(x), [algorithm.init_client(x)] * task.n
        total, down = None, algorithm.broadcast(server)
        for i, (inputs, targets) in enumerate(task.pairs):
            client, local, x = clients[i], algorithm.begin(down, clients[i]), down.x
            batches = fadamgc.Settings(rounds=6, local_steps=3, batch_size=8).batches(t, i, len(inputs))
            for rows in batches:
                x = x.detach().requires_grad_()
                state, start = {}, 0
                for key, p in task.model.named_parameters():
                    state[key] = x[start : start + p.numel()].view(p.shape)
                    start += p.numel()
                output = torch.func.functional_call(task.model, state, (inputs[rows].double(),))
                (g,) = torch.autograd.grad(task.loss(output, targets[rows]), x)
                x, local = algorithm.step(down, client, local, x.detach(), g)
            clients[i], up = algorithm.finish(down, client, local, x, 3, True)
            total = up if total is None else fadamgc.add(total, up)
        server = algorithm.aggregate(server, total, Cohort(n=task.n, S=task.n, K=3, t=t))
        xs.append(server.x)
    torch.testing.assert_close(run.x, xs[-1], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("name", ALGORITHMS)
@pytest.mark.parametrize("executor", ["vectorized", "threads"])
def test_executors_agree(name: str, executor: Any) -> None:
    task, algorithm = class_task(EVEN), ALGORITHMS[name](schedules.cosine(0.05))
    common: dict[str, Any] = {"dtype": torch.float64, **RUN}
    loop = fadamgc.simulate(algorithm, task, executor="loop", **common)
    fast = fadamgc.simulate(algorithm, task, executor=executor, **common)
    torch.testing.assert_close(fast.x, loop.x, rtol=1e-12, atol=1e-14)


@pytest.mark.slow
def test_a_schedule_of_any_number_of_an_algorithm() -> None:
    task = class_task(EVEN)
    algorithm = fadamgc.FAdamGC(
        beta1=schedules.linear(0.9, end=0.5), eta_g=schedules.step(1.0, every=2), eps=lambda t: 1e-3 / t
    )
    runs = [fadamgc.simulate(algorithm, task, executor=e, **RUN) for e in ("loop", "vectorized", "threads")]
    for run in runs[1:]:
        torch.testing.assert_close(run.x, runs[0].x, rtol=1e-4, atol=1e-6)


def test_a_stopped_run_resumes_to_the_same_bits(tmp_path) -> None:
    task, algorithm = class_task(), fadamgc.FAdamGC(eta_l=schedules.cosine(0.05, rounds=6))
    whole = fadamgc.simulate(algorithm, task, **RUN)
    fadamgc.simulate(algorithm, task, checkpoint=tmp_path, **RUN | {"rounds": 3})
    resumed = fadamgc.simulate(algorithm, task, checkpoint=tmp_path, resume=True, **RUN)
    assert torch.equal(resumed.x, whole.x)
    assert fadamgc.load_run(tmp_path).algorithm == algorithm


def test_other_rounds_are_another_schedule(tmp_path) -> None:
    task, algorithm = class_task(), fadamgc.FAdamGC(eta_l=schedules.cosine(0.05))
    fadamgc.simulate(algorithm, task, checkpoint=tmp_path, **RUN | {"rounds": 3})
    with pytest.raises(fadamgc.OtherRunError, match="rounds"):
        fadamgc.simulate(algorithm, task, checkpoint=tmp_path, resume=True, **RUN)


def test_a_run_with_a_lambda_is_saved_and_read(tmp_path) -> None:
    task, algorithm = class_task(), fadamgc.FAdamGC(eta_l=lambda t: 0.1 / t)
    run = fadamgc.simulate(algorithm, task, checkpoint=tmp_path, **RUN | {"rounds": 3})
    read = fadamgc.load_run(tmp_path)
    assert torch.equal(read.x, run.x)
    with pytest.raises(fadamgc.InputError, match="give it again"):
        read.algorithm.at(1)
    resumed = fadamgc.simulate(algorithm, task, checkpoint=tmp_path, resume=True, **RUN)
    assert torch.equal(resumed.x, fadamgc.simulate(algorithm, task, **RUN).x)


def test_schedules_of_many_runs() -> None:
    task = class_task(EVEN)
    runs = [{"algorithm": fadamgc.FAdamGC(eta_l=schedules.cosine(e))} for e in (0.05, 0.02)]
    together = fadamgc.simulate_many(runs, task=task, executor="vectorized", **RUN)
    for arguments, run in zip(runs, together, strict=True):
        assert torch.equal(run.x, fadamgc.simulate(task=task, executor="vectorized", **arguments, **RUN).x)


def test_one_graph_serves_all_rounds() -> None:
    """Nothing is compiled again in a later round; numbers that a rule inspects make another kind."""
    kinds = Kinds()
    algorithm = fadamgc.FAdamGC(eta_l=schedules.cosine(0.05, rounds=100), beta1=schedules.linear(0.9, 100))
    assert len({kinds.of(algorithm.at(t)) for t in range(1, 100)}) == 1
    kind = kinds.of(algorithm.at(1))
    constants = set(numbers(algorithm.at(1))) - set(kind.lifted_names)
    assert not kinds.changes(algorithm.at(1), ("eta_l", "beta1"))
    assert all(kinds.changes(algorithm.at(1), (name,)) for name in constants)


@pytest.mark.parametrize(
    ("executor", "compile"),
    [
        (VectorizedExecutor, False),
        pytest.param(VectorizedExecutor, True, marks=COMPILES),
        pytest.param(ThreadsExecutor, True, marks=COMPILES),
    ],
)
def test_nothing_is_recorded_or_compiled_again_in_a_later_round(
    executor: Any, compile: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []

    def counted(function: Any) -> Any:
        return lambda *arguments: made.append(function.__name__) or function(*arguments)

    for module, name in ((vectorized, "_recorded"), (vectorized, "compiled"), (inplace, "compiled")):
        monkeypatch.setattr(module, name, counted(getattr(module, name)))
    after: list[int] = []
    algorithm = fadamgc.FAdamGC(eta_l=schedules.cosine(0.05), beta1=schedules.linear(0.9, end=0.5))
    run = fadamgc.simulate(
        algorithm,
        class_task(EVEN),
        executor=lambda workload: executor(workload, compile=compile),
        callbacks=[lambda _: after.append(len(made))],
        **RUN | {"rounds": 6},
    )
    assert len(run.history) == 6
    assert len(set(after)) == 1
    assert ("compiled" in made) == compile


def test_a_federation_gives_the_simulators_numbers(tmp_path) -> None:
    pytest.importorskip("flwr", reason="Flower is not installed")
    from in_process_grid import LOCAL, make

    algorithm = fadamgc.FAdamGC(eta_l=schedules.cosine(0.05))
    task, grid, strategy = make(tmp_path, algorithm, sampled=2, tracked=1)
    strategy.start(grid)
    run = fadamgc.simulate(algorithm, task, rounds=3, executor="loop", sampled=2, tracked=1, **LOCAL)
    assert torch.equal(strategy.coordinator.server.x, run.x)


def test_a_config_of_flower_has_schedules() -> None:
    table = {"eta_l.warmup": 3, "eta_l.then.cosine": 0.1, "eta_l.then.end": 0.01}
    expected = schedules.warmup(3, schedules.cosine(0.1, end=0.01))
    assert read_config({"clients": 2, **table}).algorithm.eta_l == expected


@pytest.mark.slow
def test_a_spec_has_schedules(tmp_path) -> None:
    text = """
        name = "schedules"
        [task]
        data = "digits"
        clients = 6
        [run]
        rounds = 3
        local_steps = 2
        seeds = [0]
        [[method]]
        algorithm = "fadamgc"
        eta_l = { warmup = 1, then = { cosine = 0.01, end = 0.001 } }
        [[method]]
        algorithm = "fedavg"
        eta_l = { step = 0.1, every = 2 }
    """
    spec = parse_spec(text, "spec.toml")
    assert parse_spec(spec.to_toml(), "again.toml") == spec
    run_spec(spec, tmp_path, workers=1, quiet=True)
    run = fadamgc.load_run(tmp_path / "runs" / "fadamgc-seed0")
    assert run.algorithm.eta_l.then == schedules.cosine(0.01, rounds=2, end=0.001)


@pytest.mark.parametrize(
    ("eta_l", "message"),
    [
        ({"cosin": 0.1}, "did you mean 'cosine'"),
        ({"cosine": 0.1, "ends": 0.1}, "has no key 'ends'; did you mean 'end'"),
        ({"exponential": 0.1}, "eta_l: exponential needs factor"),
        ({"cosine": "x"}, "cosine: value='x' is not accepted"),
        ({"cosine": 0.1, "rounds": 0}, "cosine: rounds=0"),
        ({"step": 0.1}, "give either every"),
        ({"function": "no_module_of_mine:f"}, "there is no module"),
        ({"cosine": -1.0}, r"FAdamGC\.eta_l=-1\.0 is not accepted"),
        (lambda t: 1 / 0, "failed for round 1: division by zero"),
        (lambda t: "many", "failed for round 1"),
    ],
)
def test_bad_schedules_are_refused(eta_l: Any, message: str) -> None:
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.FAdamGC(eta_l=eta_l)


def test_a_number_that_is_refused_in_a_later_round_names_the_round() -> None:
    algorithm = fadamgc.FedAvg(eta_l=schedules.linear(0.1, rounds=3))
    with pytest.raises(fadamgc.InputError, match=r"in round 4: FedAvg\.eta_l=0\.0 is not accepted"):
        fadamgc.simulate(algorithm, class_task(), **RUN)


def test_a_client_optimizer_wants_numbers() -> None:
    model = torch.nn.Linear(2, 1)
    with pytest.raises(fadamgc.InputError, match=r"algorithm\.at\(1\)"):
        fadamgc.ClientOptimizer(model.parameters(), fadamgc.FAdamGC(eta_l=schedules.cosine(0.1)))
