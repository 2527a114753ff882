"""Checks that every method must pass, whatever it computes."""

from __future__ import annotations

import dataclasses
import json
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fadamgc.algorithm import AnyAlgorithm, Cohort, add, example
from fadamgc.errors import FadamgcError, first_line
from fadamgc.federation.client_data import ClientTable
from fadamgc.federation.cost import state_bytes, traffic
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.run import Run
from fadamgc.federation.sampling import draw
from fadamgc.federation.settings import Settings
from fadamgc.files import as_json
from fadamgc.grouped import GroupedAlgorithm
from fadamgc.judge.relations import lossy_codecs, relations
from fadamgc.judge.walk import walk
from fadamgc.optim import ClientOptimizer
from fadamgc.runtime import seeded
from fadamgc.sim.simulate import simulate
from fadamgc.task import Task
from fadamgc.tree import leaves, named_leaves

ROUNDS, K, BATCH, SEED = 4, 5, 8, 3
GROUPS, GROUP_ROUNDS = [[0, 3], [1, 2, 5], [4]], 2  # for methods with groups
RTOL, ATOL = 1e-9, 1e-11  # in float64; rules that divide by small numbers magnify rounding


class Check(NamedTuple):
    """The result of a check."""

    name: str
    passed: bool
    detail: str = ""  # why it failed, or what was found


def small_task() -> Task:
    """Return a classification task of six clients that differ in size and in distribution."""
    with seeded(0):
        model = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        clients = []
        for i, size in enumerate((3, 20, 7, 16, 40, 9)):
            x = torch.randn(size, 5) + 0.3 * i
            clients.append((x, (x[:, :3] + 0.5 * torch.randn(size, 3)).argmax(dim=1)))
    return Task(model, cross_entropy, clients, clients[4], name="six small clients")


def run_checks(algorithm: AnyAlgorithm) -> Iterator[Check]:
    """Yield the results of all checks; an error in a check is its failure."""
    for name, check in CHECKS.items():
        try:
            yield Check(name, True, check(algorithm) or "")
        except (FadamgcError, AssertionError) as error:
            yield Check(name, False, first_line(error))
        except (Exception, SystemExit) as error:
            yield Check(name, False, f"{type(error).__name__}: {first_line(error)}")


def _simulate(algorithm: AnyAlgorithm, task: Task, executor: str = "loop", **others: Any) -> Run:
    n = task.n
    who = {"sampled": n, "tracked": n} if algorithm.full_participation else {"sampled": 3, "tracked": 2}
    settings: dict[str, Any] = {"rounds": ROUNDS, "local_steps": K, "batch_size": BATCH, "seed": SEED, **who}
    if isinstance(algorithm, GroupedAlgorithm):
        settings |= {"groups": GROUPS, "group_rounds": GROUP_ROUNDS}
    arguments = settings | {"dtype": torch.float64, "executor": executor, "progress": False} | others
    return simulate(algorithm, task, **arguments)


def check_contract(algorithm: AnyAlgorithm) -> str:
    """Check the dataclass, the types of states and messages, and the hyperparameters as plain data."""
    parameters = getattr(type(algorithm), "__dataclass_params__", None)
    assert parameters is not None, "the class is not a dataclass; write @dataclass(frozen=True) above it"
    assert parameters.frozen, "the class is not frozen; write @dataclass(frozen=True) above it"
    assert isinstance(algorithm.title, str), "title is not a text"
    states = example(algorithm, torch.linspace(1, 2, 5))
    for kind, state in states._asdict().items():
        assert hasattr(state, "_fields"), f"{kind} is {type(state).__name__}, not a NamedTuple"
        rows = kind == "server" and isinstance(algorithm, GroupedAlgorithm)
        for name, leaf in named_leaves(state).items():
            assert isinstance(leaf, Tensor), f"{kind}.{name} is {type(leaf).__name__}, not a tensor"
            shapes = "(d,), (1,), (G, d) or (G, 1)" if rows else "(d,) or (1,)"
            fits = leaf.ndim == 1 or (rows and leaf.ndim == 2)
            assert fits, f"{kind}.{name} has the shape {tuple(leaf.shape)}, not {shapes}"
    assert states.down._fields[0] == "x", "the first field of the server's message must be x"
    assert hasattr(states.server, "x"), "the server's state has no x"
    missing = set(algorithm.tracked_only) - set(states.up._fields)
    assert not missing, f"tracked_only names {sorted(missing)}, which the client's message does not have"
    plain = json.loads(json.dumps(as_json(algorithm.plain())))
    assert type(algorithm).make(**plain) == algorithm, "make(**plain()) does not equal the algorithm"
    for dtype in (torch.float32, torch.float64):
        walk(algorithm, dtype)
    return f"{len(algorithm.setting_names())} hyperparameters"


def check_purity(algorithm: AnyAlgorithm) -> None:
    """Check that methods change none of their arguments and give the same result twice."""
    walk(algorithm, torch.float64, twice=True)


def check_executors(algorithm: AnyAlgorithm) -> str:
    """Check that all executors give the same numbers."""
    task = small_task()
    runs = {name: _simulate(algorithm, task, name) for name in ("loop", "threads", "vectorized")}
    largest = 0.0
    for name in ("threads", "vectorized"):
        _assert_close(runs[name].x, runs["loop"].x, f"x on {name} and on loop")
        for i, (state, expected) in enumerate(zip(runs[name].clients, runs["loop"].clients, strict=True)):
            for a, b in zip(leaves(state), leaves(expected), strict=True):
                _assert_close(a, b, f"the state of client {i} on {name} and on loop")
        largest = max(largest, float((runs[name].x - runs["loop"].x).abs().max()))
    return f"loop, threads, vectorized; largest difference {largest:.1g}"


def check_client_optimizer(algorithm: AnyAlgorithm) -> None:
    """Check that ``ClientOptimizer`` in a hand-written loop gives the simulator's numbers."""
    task = small_task()
    run = _simulate(algorithm, task)
    functions = TaskFunctions(task, torch.float64)
    model = TaskFunctions(task, torch.float64).module.requires_grad_(True)
    table = ClientTable(task.samples, functions.dtype, functions.device)
    settings = Settings(rounds=ROUNDS, local_steps=K, batch_size=BATCH, seed=SEED)
    bound = algorithm.for_model(functions.flat.shapes)

    def whole(x: Tensor, i: int) -> Tensor:
        return functions.whole_gradient(x, {}, i, table[i], SEED, 0)

    starts = [whole(functions.x0, i) if bound.init_gradient else None for i in range(task.n)]
    mean = torch.stack([g for g in starts if g is not None]).mean(0) if bound.init_gradient else None
    groups = GROUPS if isinstance(bound, GroupedAlgorithm) else [list(range(task.n))]
    algo: Any = bound.for_groups([*map(len, groups)]) if isinstance(bound, GroupedAlgorithm) else bound
    server = algo.init_server(functions.x0, mean)
    optimizers = [ClientOptimizer(model.parameters(), algo, g) for g in starts]
    n = task.n
    who = (n, n) if algorithm.full_participation else (3, 2)

    def train(down: Any, clients: Sequence[int], tracked: Sequence[int], number: int) -> tuple[Any, float]:
        """Return the sum of the clients' messages, and their mean number of steps."""
        total, steps = None, 0
        for i in clients:
            optimizers[i].start_round(down, whole(down.x, i) if algo.round_gradient else None)
            for positions in settings.batches(number, i, table[i].size, algo.coin):
                optimizers[i].zero_grad()
                inputs, targets = table[i].batch(positions)
                torch.autograd.backward(task.loss(model(inputs), targets))
                optimizers[i].step()
                steps += 1
            up = optimizers[i].finish_round(tracked=i in tracked)
            total = up if total is None else add(total, up)
        return total, steps / len(clients)

    for t in range(1, ROUNDS + 1):
        if groups is not GROUPS:
            sampled, tracked = draw(SEED, t, n, *who)
            total, steps = train(algo.broadcast(server), sampled, tracked, t)
            server = algo.aggregate(server, total, Cohort(n=n, S=len(sampled), K=steps, t=t))
            continue
        server = algo.start_round(server)
        for e in range(GROUP_ROUNDS):
            number = (t - 1) * GROUP_ROUNDS + e + 1
            downs = [algo.broadcast_to(server, j) for j in range(len(groups))]
            for j, (down, group) in enumerate(zip(downs, groups, strict=True)):
                total, steps = train(down, group, group, number)
                server = algo.aggregate_group(server, j, total, Cohort(n=n, S=len(group), K=steps, t=t))
        server = algo.end_round(server, Cohort(n=n, S=n, K=steps * GROUP_ROUNDS, t=t))
    _assert_close(server.x, run.x, "x with ClientOptimizer and in the simulator")


def check_resume(algorithm: AnyAlgorithm) -> None:
    """Check that a run that was interrupted equals one that was not, bit for bit."""
    task = small_task()
    whole = _simulate(algorithm, task)
    with tempfile.TemporaryDirectory() as folder:
        for rounds in (2, ROUNDS):
            run = _simulate(algorithm, task, rounds=rounds, checkpoint=Path(folder) / "c", resume=True)
            _simulate(algorithm, task, rounds=3, seed=SEED + 1)  # would disturb hidden state of a method
        for a, b in zip([run.server, *run.clients], [whole.server, *whole.clients], strict=True):
            for p, q in zip(leaves(a), leaves(b), strict=True):
                assert torch.equal(p, q), "a resumed run differs from one without a stop"


def check_bytes(algorithm: AnyAlgorithm) -> str:
    """Check that messages have the counted bytes, and that untracked clients send no ``tracked_only``."""
    x = torch.linspace(1, 2, 5)
    states = example(algorithm, x)
    _, up = algorithm.finish(states.down, states.client, states.local, x + 1, 3, False)
    for field in algorithm.tracked_only:
        sends = any(bool(leaf.any()) for leaf in leaves(getattr(up, field)))
        assert not sends, f"an untracked client sends {field}, which tracked_only names; it must be zero"
    counted = traffic(algorithm, len(x))
    sizes = {"down": counted.down, "up": counted.up + counted.up_tracked}
    for messages in walk(algorithm, torch.float32):
        for kind, message in zip(sizes, messages, strict=True):
            size = state_bytes(message)
            assert size == sizes[kind], f"{kind} has {size} bytes after 3 steps, {sizes[kind]} are counted"
    vector = 4 * 1000
    down, always, more = (round(value / vector, 1) for value in traffic(algorithm, 1000))
    state = state_bytes(example(algorithm, torch.linspace(1, 2, 1000)).client) / vector
    return f"vectors: {down:g} down, {always:g} up, {more:g} more if tracked; {state:.3g} kept by each client"


def check_absent_clients(algorithm: AnyAlgorithm) -> str:
    """Check that clients that do not take part keep their states."""
    if algorithm.full_participation:
        return "all clients take part in every round"
    seen: list[list[Any]] = []
    run = _simulate(algorithm, small_task(), callbacks=[lambda end: seen.append(list(end.clients))])
    states = [[run.clients.initial] * run.clients.n, *seen]
    for record, before, after in zip(run.history, states, seen, strict=False):
        for i in set(range(run.clients.n)) - set(record.sampled):
            for a, b in zip(leaves(before[i]), leaves(after[i]), strict=True):
                assert torch.equal(a, b), f"client {i} was not in round {record.round}, and its state changed"
    return ""


def check_order(algorithm: AnyAlgorithm) -> None:
    """Check that the result does not depend on the numbers of the clients."""
    task = small_task()
    who = list(range(task.n))
    schedule = [(who, who)] * ROUNDS
    options: dict[str, Any] = {"sampled": None, "tracked": None, "schedule": schedule, "batch_size": None}
    if isinstance(algorithm, GroupedAlgorithm):
        options = {"batch_size": None}
    backwards = dataclasses.replace(task, clients=task.samples[::-1])
    runs = [_simulate(algorithm, task, **options)]
    if isinstance(algorithm, GroupedAlgorithm):
        options["groups"] = [[task.n - 1 - i for i in group] for group in reversed(GROUPS)]
    runs.append(_simulate(algorithm, backwards, **options))
    _assert_close(runs[1].x, runs[0].x, "x with the clients in another order and x")


def check_codecs(algorithm: AnyAlgorithm) -> str:
    """Check that states that belong together also do where messages are sent with a lossy codec."""
    if isinstance(algorithm, GroupedAlgorithm):
        return "methods with groups have no codecs"
    task = small_task()
    functions = TaskFunctions(task, torch.float64)
    bound = algorithm.for_model(functions.flat.shapes)
    codec = lossy_codecs(bound, functions.flat.d)
    simulate_all = partial(_simulate, algorithm, task, sampled=task.n, tracked=task.n)
    held, lossy = (relations(bound, simulate_all, table) for table in (None, codec))
    broken = sorted(held - lossy)
    assert not broken, (
        f"{broken[0]} holds for server and clients, but not with codec={codec}; say which field of "
        'the message is the change of which field of the client\'s state, changes = {"dy": "y"}, or override '
        "received (docs/codecs.md)"
    )
    return ", ".join(sorted(held))


def _assert_close(actual: Tensor, expected: Tensor, what: str) -> None:
    if not torch.allclose(actual, expected, rtol=RTOL, atol=ATOL):
        difference = float((actual - expected).abs().max())
        raise AssertionError(f"{what} differ by {difference:.2g}")


CHECKS: dict[str, Callable[[AnyAlgorithm], str | None]] = {
    "contract": check_contract,
    "pure": check_purity,
    "equal on all executors": check_executors,
    "equal in ClientOptimizer": check_client_optimizer,
    "resumes bit for bit": check_resume,
    "bytes are counted": check_bytes,
    "absent clients untouched": check_absent_clients,
    "order of clients": check_order,
    "clients follow what arrives": check_codecs,
}
