"""MTGC: clients in groups, with SGD and with Adam."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_transcription import ATOL, RTOL, make_problem, make_task

import fadamgc
import transcription_zoo
from fadamgc.errors import ClientError
from fadamgc.experiments.report.write import write_report
from fadamgc.experiments.run.runner import run_spec
from fadamgc.experiments.spec.toml_io import parse_spec
from fadamgc.federation.cost import Work
from fadamgc.flower.config import read_config
from fadamgc.flower.coordinator import Coordinator
from problems import EVEN, class_task, mlp
from transcription import Problem

GROUPS = [[0, 3], [1, 2, 5], [4]]
ADAM = {"eta_l": 0.05, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
CASES = [
    pytest.param(fadamgc.MTGC, transcription_zoo.mtgc, {"eta_l": 0.05}, id="sgd"),
    pytest.param(fadamgc.MTGC, transcription_zoo.mtgc, {"eta_l": 0.05, "z": "reset"}, id="sgd-reset"),
    pytest.param(fadamgc.MTGCAdam, transcription_zoo.mtgc_adam, ADAM, id="adam"),
    pytest.param(fadamgc.MTGCAdam, transcription_zoo.mtgc_adam, ADAM | {"z": "reset"}, id="adam-reset"),
]
BOTH = [fadamgc.MTGC(eta_l=0.05), fadamgc.MTGCAdam(eta_l=0.01)]
RUN: dict[str, Any] = {
    "rounds": 4,
    "local_steps": 3,
    "batch_size": 8,
    "groups": GROUPS,
    "group_rounds": 2,
    "progress": False,
}


def title(algorithm: Any) -> str:
    return str(algorithm.title)


@pytest.mark.parametrize(("cls", "function", "options"), CASES)
@pytest.mark.parametrize(("groups", "E"), [(GROUPS, 3), (GROUPS, 1), ([[0, 1, 2, 3, 4, 5]], 2)])
def test_package_follows_the_transcription(
    cls: Any, function: Any, options: dict[str, Any], groups: list[list[int]], E: int
) -> None:
    problem, xs = make_problem(), []
    fadamgc.simulate(
        cls(**options),
        make_task(problem),
        rounds=5,
        local_steps=4,
        groups=groups,
        group_rounds=E,
        dtype=torch.float64,
        executor="loop",
        callbacks=[lambda end: xs.append(end.server.x.numpy().copy())],
    )
    expected = function(problem, groups, E, 4, 5, **options)["x"]
    np.testing.assert_allclose(xs, expected, rtol=RTOL, atol=ATOL)


def by_hand(clients: list[tuple[float, float]], algorithm: Any, **how: Any) -> list[float]:
    """The models after the rounds; clients have f(w) = (A w - b)^2 / 2, and x = 2 before round 1."""
    A, b = zip(*clients, strict=True)
    problem = Problem(
        [np.full((1, 1), float(a)) for a in A], [np.full(1, float(c)) for c in b], np.array([2.0])
    )
    xs: list[float] = []
    fadamgc.simulate(
        algorithm,
        make_task(problem),
        local_steps=1,
        dtype=torch.float64,
        callbacks=[lambda end: xs.append(end.server.x.item())],
        **how,
    )
    return xs


@pytest.mark.parametrize("z", ["keep", "reset"])
def test_two_rounds_of_sgd_by_hand(z: Any) -> None:
    """Gradients w, w - 1 and (w - 1) / 4; eta_l = 1/2, one step in a group round.

    Round 1, group 0: 2 -> 1 and 3/2, x_0 = 5/4, z = -1/2 and 1/2 ; then 5/4 -> 7/8 and 7/8, x_0 = 7/8
             group 1: 2 -> 15/8 -> 113/64
        x = (2 * 7/8 + 113/64) / 3 = 75/64 ; y_0 = 7/8 - 75/64 = -19/64 ; y_1 = 113/64 - 75/64 = 38/64
    Round 2, group 0: 75/64 -> 63/64 (mean) -> 57/64
             group 1: 75/64 - (11/256 + 38/64)/2 = 437/512 ; 437/512 - (-75/2048 + 38/64)/2 = 2355/4096
        x = (2 * 57/64 + 2355/4096) / 3
    With one step, z does not change the mean of a group: "reset" gives the same models.
    """
    xs = by_hand(
        [(1, 0), (1, 1), (0.5, 0.5)],
        fadamgc.MTGC(eta_l=0.5, z=z),
        rounds=2,
        groups=[[0, 1], [2]],
        group_rounds=2,
    )
    assert xs == pytest.approx([75 / 64, 3217 / 4096], abs=1e-15)


@pytest.mark.parametrize(
    "how",
    [
        {"rounds": 2, "groups": [[0], [1]], "group_rounds": 1},  # corrected by y_j
        {"rounds": 1, "groups": [[0, 1]], "group_rounds": 2},  # corrected by z_i
    ],
    ids=["two groups", "one group"],
)
def test_two_steps_of_adam_by_hand(how: Any) -> None:
    """Gradients w and w - 1; eta_l = 1/2, eps = 1, no decay: a step is g / (sqrt(v_hat) + 1) / 2.

    First  2 - 2/3/2 = 5/3 and 2 - 1/2/2 = 7/4, mean 41/24 ; v_hat = 4 and 1 ; corrections -1/2 and 1/2
    Second g = 41/24 - 1/2 = 29/24 and 17/24 + 1/2 = 29/24 ; v_hat = 4 and (29/24)^2
           41/24 - 29/72/2 = 217/144 and 41/24 - 29/53/2 = 1825/1272
    """
    algorithm = fadamgc.MTGCAdam(eta_l=0.5, beta1=0, beta2=0, eps=1)
    xs = by_hand([(1, 0), (1, 1)], algorithm, **how)
    assert xs[-1] == pytest.approx((217 / 144 + 1825 / 1272) / 2, abs=1e-15)


@pytest.mark.parametrize("algorithm", BOTH, ids=title)
@pytest.mark.parametrize("executor", ["vectorized", "threads"])
def test_executors_agree(algorithm: Any, executor: Any) -> None:
    task = class_task(EVEN)
    fast = fadamgc.simulate(algorithm, task, executor=executor, dtype=torch.float64, **RUN)
    loop = fadamgc.simulate(algorithm, task, executor="loop", dtype=torch.float64, **RUN)
    torch.testing.assert_close(fast.x, loop.x, rtol=0, atol=1e-12)
    torch.testing.assert_close(fast.clients[4], loop.clients[4], rtol=0, atol=1e-12)
    assert fast.history[-1].train_loss == pytest.approx(loop.history[-1].train_loss, abs=1e-12)


@pytest.mark.parametrize("algorithm", BOTH, ids=title)
@pytest.mark.parametrize("states", ["memory", "files"])
def test_a_stopped_run_resumes_to_the_same_bits(algorithm: Any, states: Any, tmp_path: Path) -> None:
    task = class_task(EVEN)
    how = RUN | {"executor": "loop", "states": states}
    whole = fadamgc.simulate(algorithm, task, **how)
    stop = [lambda end: end.record.round == 2]
    fadamgc.simulate(algorithm, task, **how, checkpoint=tmp_path / "c", callbacks=stop)
    resumed = fadamgc.simulate(algorithm, task, **how, checkpoint=tmp_path / "c", resume=True)
    assert len(resumed.history) == 4
    for a, b in zip((*resumed.server, *resumed.clients[5]), (*whole.server, *whole.clients[5]), strict=True):
        assert torch.equal(a, b)
    assert resumed.history == whole.history


def test_an_interrupted_group_round_leaves_the_checkpoint_of_the_round_before(tmp_path: Path) -> None:
    """A client whose data fails in the second group round of round 2; then the run resumes."""
    calls = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == stop_at:
            raise RuntimeError("interrupted")
        return torch.nn.functional.cross_entropy(output, target)

    stop_at = math.inf
    clients = class_task(EVEN).pairs
    task = fadamgc.Task(mlp(0), loss, clients)
    how = RUN | {"executor": "loop"}
    whole = fadamgc.simulate(fadamgc.MTGC(), task, **how)
    calls_per_group_round = 6 * RUN["local_steps"]
    calls, stop_at = 0, math.inf
    fadamgc.simulate(fadamgc.MTGC(), task, **how | {"rounds": 1}, checkpoint=tmp_path)
    before = calls  # the calls that probe the task are the same in the next run
    stop_at = before + (before - 2 * calls_per_group_round) + calls_per_group_round + 5
    with pytest.raises(ClientError, match="interrupted"):
        fadamgc.simulate(fadamgc.MTGC(), task, **how, checkpoint=tmp_path, resume=True)
    assert len(fadamgc.load_run(tmp_path).history) == 1
    stop_at = math.inf
    resumed = fadamgc.simulate(fadamgc.MTGC(), task, **how, checkpoint=tmp_path, resume=True)
    assert torch.equal(resumed.x, whole.x)


@pytest.mark.slow
def test_many_runs_at_once_are_each_as_alone() -> None:
    task = class_task(EVEN)
    runs = [{"algorithm": fadamgc.MTGC(eta_l=e), "seed": s} for e in (0.1, 0.01) for s in (0, 1)]
    how = RUN | {"task": task, "executor": "vectorized"}
    together = fadamgc.simulate_many(runs, **how)
    for run, arguments_of_run in zip(together, runs, strict=True):
        alone = fadamgc.simulate(**arguments_of_run, **how)
        assert torch.equal(run.x, alone.x)
        assert run.history == alone.history


@pytest.mark.parametrize(
    ("algorithm", "reduced"),
    [
        (fadamgc.MTGC(eta_l=0.05), fadamgc.ScaffoldLocal(eta_l=0.05)),
        (fadamgc.MTGCAdam(eta_l=0.05), fadamgc.FAdamGC(eta_l=0.05)),
    ],
    ids=["scaffold_local", "fadamgc"],
)
def test_one_group_and_one_group_round_is_a_method_of_one_level(algorithm: Any, reduced: Any) -> None:
    task = class_task(EVEN, torch.nn.Sequential(torch.nn.Linear(5, 3), torch.nn.BatchNorm1d(3)))
    how = {key: value for key, value in RUN.items() if not key.startswith("group")}
    run, other = (
        fadamgc.simulate(a, task, dtype=torch.float64, executor="loop", **how) for a in (algorithm, reduced)
    )
    torch.testing.assert_close(run.x, other.x, rtol=0, atol=1e-9)  # Adam amplifies the rounding of small g
    for name, value in run.buffers.items():
        torch.testing.assert_close(value, other.buffers[name], rtol=0, atol=1e-9)


def test_buffers_of_groups_are_averaged_over_their_clients() -> None:
    """With one step per group round and step size 0 (almost), BatchNorm sees the same data in both orders."""
    model = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 3))
    how = RUN | {
        "rounds": 1,
        "group_rounds": 1,
        "batch_size": None,
        "dtype": torch.float64,
        "executor": "loop",
    }
    tiny = fadamgc.MTGC(eta_l=1e-300)
    grouped = fadamgc.simulate(tiny, class_task(EVEN, model), **how)
    one_group = fadamgc.simulate(tiny, class_task(EVEN, model), **how | {"groups": 1})
    for name, value in grouped.buffers.items():
        torch.testing.assert_close(value, one_group.buffers[name], rtol=0, atol=1e-12)


def test_the_corrections_cancel() -> None:
    run = fadamgc.simulate(fadamgc.MTGC(eta_l=0.05), class_task(EVEN), dtype=torch.float64, **RUN)
    for j, group in enumerate(GROUPS):
        z = sum(run.clients[i].z + run.clients[i].d for i in group)
        torch.testing.assert_close(z, len(group) * run.server.d_j[j], rtol=0, atol=1e-12)
    sizes = torch.tensor([len(group) for group in GROUPS], dtype=torch.float64)
    assert float((sizes[:, None] * run.server.y_j).sum(dim=0).abs().max()) < 1e-12


def test_a_number_of_groups_divides_the_clients_in_order() -> None:
    task = class_task(EVEN)
    by_number = fadamgc.simulate(fadamgc.MTGC(), task, **RUN | {"groups": 2})
    by_list = fadamgc.simulate(fadamgc.MTGC(), task, **RUN | {"groups": [[2, 0, 1], [3, 4, 5]]})
    assert torch.equal(by_number.x, by_list.x)


@pytest.mark.parametrize(
    ("algorithm", "down", "up", "group_down", "group_up"),
    [(BOTH[0], (3, 1), 1, 1, 1), (BOTH[1], (3, 2), 2, 2, 2)],
    ids=["sgd", "adam"],
)
def test_bytes_are_counted_on_both_kinds_of_links(
    algorithm: Any, down: tuple[int, int], up: int, group_down: int, group_up: int
) -> None:
    task = class_task(EVEN)
    run = fadamgc.simulate(algorithm, task, **RUN)
    d, number = 4 * len(run.x), 4
    first, second, groups = run.history[-1].work
    assert first == Work(tuple(range(6)), (3,) * 6, (down[0] * d + number,) * 6, (up * d,) * 6)
    assert second == Work(tuple(range(6)), (3,) * 6, (down[1] * d,) * 6, (up * d,) * 6)
    assert groups == Work((0, 1, 2), (0,) * 3, (group_down * d,) * 3, (group_up * d,) * 3, "group")
    assert run.history[-1].bytes_up == 2 * 6 * up * d + 3 * group_up * d


def test_both_kinds_of_links_have_their_price(tmp_path: Path) -> None:
    run = fadamgc.simulate(fadamgc.MTGC(), class_task(EVEN), **RUN)
    free = {"down_mbps": math.inf, "up_mbps": math.inf}
    d = 32e-6 * len(run.x)
    slow = fadamgc.CostModel(**free, group_down_mbps=1.0, group_up_mbps=0.5)
    assert run.reprice(slow).history[0].simulated_seconds == pytest.approx(d + 2 * d)
    near = fadamgc.CostModel(
        up_mbps=1.0, down_mbps=math.inf, group_down_mbps=math.inf, group_up_mbps=math.inf
    )
    assert run.reprice(near).history[0].simulated_seconds == pytest.approx(2 * d)
    run.reprice(slow).save(tmp_path)
    again = fadamgc.load_run(tmp_path)
    assert again.history == run.reprice(slow).history
    assert again.cost == slow


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"groups": [[0, 1], [2, 3, 4]]}, "client 5 is in no group"),
        ({"groups": [[0, 1, 2], [2, 3, 4, 5]]}, r"client 2 is in groups\[0\] and groups\[1\]"),
        ({"groups": [[0, 1, 2, 3, 4, 5], []]}, r"groups\[1\] is empty"),
        ({"groups": [[0, 1, 2], [3, 4, 6]]}, "client 6 is not in 0..5"),
        ({"groups": 7}, "groups=7 is not accepted.*from 1 to clients=6"),
        ({"groups": 0}, "groups=0 is not accepted"),
        ({"groups": [0, 1, 2]}, "list of lists"),
        ({"groups": "two"}, "list of lists"),
        ({"group_rounds": 0}, "group_rounds=0"),
        ({"sampled": 3}, "needs all 6 clients"),
        ({"algorithm": fadamgc.FedAvg()}, "FedAvg has no groups"),
        ({"algorithm": fadamgc.FedAvg(), "groups": None}, "FedAvg has no groups"),
    ],
)
def test_bad_groups_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(fadamgc.InputError, match=message):
        fadamgc.simulate(**{"algorithm": fadamgc.MTGC(), "task": class_task(EVEN)} | RUN | change)


def test_bad_group_links_are_refused() -> None:
    with pytest.raises(fadamgc.InputError, match=r"CostModel\.group_up_mbps=0"):
        fadamgc.CostModel(group_up_mbps=0)
    with pytest.raises(fadamgc.InputError, match=r"CostModel\.group_down_mbps"):
        fadamgc.CostModel(group_down_mbps=(1.0, 2.0))  # type: ignore[arg-type]


def test_flower_refuses_groups(tmp_path: Path) -> None:
    config = read_config({"algorithm": "mtgc", "clients": 3, "min-clients": 3})
    with pytest.raises(fadamgc.InputError, match="MTGC needs clients in groups.*one level"):
        Coordinator(class_task((8, 8, 8)), config, tmp_path)


@pytest.mark.slow
def test_a_spec_gives_groups_to_the_methods_that_have_them(tmp_path: Path) -> None:
    text = """
        name = "groups"
        [task]
        data = "digits"
        clients = 6
        [run]
        rounds = 2
        local_steps = 2
        seeds = [0]
        groups = [[0, 1, 2], [3, 4, 5]]
        group_rounds = 3
        executor = "loop"
        [cost]
        group_up_mbps = 0.01
        [[method]]
        algorithm = "mtgc"
        [[method]]
        algorithm = "fedavg"
    """
    run_spec(parse_spec(text, "spec.toml"), tmp_path, workers=1, quiet=True)
    write_report(tmp_path)
    runs = {run.settings["algorithm"]: run for run in map(fadamgc.load_run, (tmp_path / "runs").iterdir())}
    assert [len(record.work) for record in runs["mtgc"].history] == [4, 4]
    assert runs["fedavg"].settings["groups"] is None
    d = 32e-6 * sum(p.numel() for p in fadamgc.models.mlp(64, (64,), 10, seed=0).parameters())
    down, up = d * (3 + 1 + 1) + 32e-6, 3 * d
    expected = (down + up) / 100 + d / 100 + d / 0.01
    assert runs["mtgc"].history[0].simulated_seconds == pytest.approx(expected)
    assert "MTGC" in (tmp_path / "report.html").read_text()
