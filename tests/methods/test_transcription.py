"""The package against the transcription of its update rules, in float64."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

import fadamgc
import transcription
from transcription import Problem, Result, Schedule

RTOL, ATOL = 1e-9, 1e-11
SERVER_FIELDS = ("y", "G", "m", "v", "v_hat")
CLIENT_FIELDS = ("y", "v", "v_hat", "z")
K = 4

# Client 5 never takes part; the sets differ in size and order; one round tracks nobody, one has one client.
PARTIAL: Schedule = [
    ([0, 2, 3], [2]),
    ([1, 2, 4], [4, 1]),
    ([0, 1, 3, 4], []),
    ([2, 0, 4], [0, 2, 4]),
    ([4], [4]),
    ([3, 1, 2, 0], [3, 0]),
]
FULL: Schedule = [(list(range(6)), list(range(6)))] * 5
SCHEDULES = {"partial": PARTIAL, "full": FULL}


def make_problem(n: int = 6, d: int = 5, seed: int = 3) -> Problem:
    """Clients that disagree, with unequal amounts of data.

    No client's data touches the last parameter, and client 0's does not touch the first: their gradients are
    exactly zero, which is where a division by sqrt(v_hat) = 0 would show.
    """
    rng = np.random.default_rng(seed)
    A = [rng.normal(size=(3 + i, d)) for i in range(n)]
    for A_i in A:
        A_i[:, -1] = 0.0
    A[0][:, 0] = 0.0
    b = [A_i @ rng.normal(size=d) + 0.1 * rng.normal(size=len(A_i)) for A_i in A]
    return Problem(A, b, rng.normal(size=d))


def make_task(problem: Problem) -> fadamgc.Task:
    """The same problem as the package sees it."""
    model = torch.nn.Linear(problem.d, 1, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(problem.x)[None, :])
    clients = [
        (torch.from_numpy(A), torch.from_numpy(b)[:, None]) for A, b in zip(problem.A, problem.b, strict=True)
    ]
    test = (torch.cat([A for A, _ in clients]), torch.cat([b for _, b in clients]))
    return fadamgc.Task(model=model, loss=half_squared_error, clients=clients, test=test, metric="loss")


def half_squared_error(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return 0.5 * ((output - target) ** 2).mean()


@dataclass(frozen=True)
class Case:
    """One algorithm with one set of options, in the package's name and in the transcription's."""

    name: str
    cls: str
    function: str
    options: dict[str, Any]
    full_only: bool = False
    not_state: tuple[str, ...] = ()  # what this option does not carry from round to round

    def by_hand(self, problem: Problem, schedule: Schedule, K: transcription.Steps = K) -> Result:
        function: Callable[..., Result] = getattr(transcription, self.function)
        return function(problem, schedule, K, **self.options)

    def algorithm(self) -> Any:
        return getattr(fadamgc, self.cls)(**self.options)


ADAM = {"eta_l": 0.05, "eta_g": 0.8, "beta1": 0.8, "beta2": 0.95, "eps": 1e-3}
SGD = {"eta_l": 0.08, "eta_g": 0.8}
SERVER_ADAM = {"eta_l": 0.08, "eta_g": 0.1, "beta1": 0.8, "beta2": 0.95}

CASES = [
    Case("fadamgc", "FAdamGC", "fadamgc", ADAM),
    Case("fadamgc-defaults", "FAdamGC", "fadamgc", {"eta_l": 0.05}),
    Case("fadamgc-restart", "FAdamGC", "fadamgc", ADAM | {"v_hat": "restart"}, not_state=("v_hat_i",)),
    Case("fadamgc-gradient", "FAdamGC", "fadamgc", ADAM | {"init": "gradient"}),
    Case("fadamgc-beta2=0", "FAdamGC", "fadamgc", ADAM | {"beta2": 0.0}),
    Case("fadamgc-eps=0", "FAdamGC", "fadamgc", ADAM | {"eps": 0.0}),
    Case("fadamgc-beta2=eps=0", "FAdamGC", "fadamgc", ADAM | {"beta2": 0.0, "eps": 0.0}),
    Case(
        "fadamgc-restart-gradient-beta2=eps=0",
        "FAdamGC",
        "fadamgc",
        ADAM | {"v_hat": "restart", "init": "gradient", "beta2": 0.0, "eps": 0.0},
        not_state=("v_hat_i",),
    ),
    Case("fa_nt", "FANT", "fa_nt", ADAM),
    Case("fa_nt-defaults", "FANT", "fa_nt", {"eta_l": 0.05}),
    Case("fa_nt-restart", "FANT", "fa_nt", ADAM | {"v_hat": "restart"}, not_state=("v_hat_i",)),
    Case("fa_nt-beta2=eps=0", "FANT", "fa_nt", ADAM | {"beta2": 0.0, "eps": 0.0}),
    Case("fa_nt-local", "FANTLocal", "fa_nt_local", ADAM, full_only=True),
    Case("fa_nt-local-eta_g=1", "FANTLocal", "fa_nt_local", ADAM | {"eta_g": 1.0}, full_only=True),
    Case(
        "fa_nt-local-restart",
        "FANTLocal",
        "fa_nt_local",
        ADAM | {"v_hat": "restart"},
        full_only=True,
        not_state=("v_hat_i",),
    ),
    Case("local_adam", "LocalAdam", "local_adam", ADAM),
    Case("local_adam-defaults", "LocalAdam", "local_adam", {"eta_l": 0.05}),
    Case(
        "local_adam-restart", "LocalAdam", "local_adam", ADAM | {"v_hat": "restart"}, not_state=("v_hat_i",)
    ),
    Case(
        "local_adam-reset",
        "LocalAdam",
        "local_adam",
        ADAM | {"moments": "reset"},
        not_state=("v_i", "v_hat_i"),
    ),
    Case("local_adam-beta2=eps=0", "LocalAdam", "local_adam", ADAM | {"beta2": 0.0, "eps": 0.0}),
    Case("fedavg", "FedAvg", "fedavg", SGD),
    Case("fedavg-defaults", "FedAvg", "fedavg", {"eta_l": 0.08}),
    Case("fedavg_m", "FedAvgM", "fedavg_m", SGD | {"beta": 0.3}),
    Case("fedavg_m-defaults", "FedAvgM", "fedavg_m", {"eta_l": 0.08}),
    Case("scaffold", "Scaffold", "scaffold", SGD),
    Case("scaffold-defaults", "Scaffold", "scaffold", {"eta_l": 0.08}),
    Case("scaffold-I", "Scaffold", "scaffold", SGD | {"option": "I"}),
    Case("scaffold-gradient", "Scaffold", "scaffold", SGD | {"init": "gradient"}),
    Case("scaffold-I-gradient", "Scaffold", "scaffold", SGD | {"option": "I", "init": "gradient"}),
    Case("scaffold_m", "ScaffoldM", "scaffold_m", SGD | {"beta": 0.3}),
    Case("scaffold_m-defaults", "ScaffoldM", "scaffold_m", {"eta_l": 0.08}),
    Case("scaffold_m-gradient", "ScaffoldM", "scaffold_m", SGD | {"beta": 0.3, "init": "gradient"}),
    Case("fedadam", "FedAdam", "fedadam", SERVER_ADAM | {"tau": 0.01}),
    Case("fedadam-defaults", "FedAdam", "fedadam", {"eta_l": 0.08, "eta_g": 0.1}),
    Case("fedadam-v0=0", "FedAdam", "fedadam", SERVER_ADAM | {"v0": 0.0}),
    Case("fedadam-v0", "FedAdam", "fedadam", SERVER_ADAM | {"v0": 0.04}),
    Case("fedadam-bias", "FedAdam", "fedadam", SERVER_ADAM | {"bias_correction": True}),
    Case("fedadam-bias-v0=0", "FedAdam", "fedadam", SERVER_ADAM | {"v0": 0.0, "bias_correction": True}),
    Case("fedams", "FedAMS", "fedams", SERVER_ADAM),
    Case("fedams-small-eps", "FedAMS", "fedams", SERVER_ADAM | {"eps": 1e-5}),
    Case("fedams-defaults", "FedAMS", "fedams", {"eta_l": 0.08, "eta_g": 0.1}),
    Case("fedams-amsgrad", "FedAMS", "fedams", SERVER_ADAM | {"option": "amsgrad"}),
]
BY_NAME = {case.name: case for case in CASES}
EXECUTORS = ("loop", "threads", "vectorized")
# The other executors are compared with the loop in test_battery.py, for every algorithm and option; here, a
# case for each shape of a state.
REPRESENTATIVES = ("fadamgc-gradient", "fa_nt-local", "fedavg")
RUNS = [
    pytest.param(case, schedule, executor, id=f"{executor}-{case.name}-{label}")
    for executor in EXECUTORS
    for case in CASES
    if executor == "loop" or case.name in REPRESENTATIVES
    for label, schedule in SCHEDULES.items()
    if label == "full" or not case.full_only
]


def simulate(algorithm: Any, problem: Problem, schedule: Schedule, executor: str = "loop", **how: Any) -> Any:
    how = how or {"local_steps": K, "batch_size": None}
    return fadamgc.simulate(
        algorithm,
        make_task(problem),
        rounds=len(schedule),
        schedule=schedule,
        dtype=torch.float64,
        executor=executor,
        progress=False,
        **how,
    )


def assert_close(actual: torch.Tensor, expected: Any, what: str) -> None:
    assert actual.dtype == torch.float64, what
    np.testing.assert_allclose(actual.numpy(), expected, rtol=RTOL, atol=ATOL, err_msg=what)


def assert_same(run: Any, expected: Result, schedule: Schedule, not_state: tuple[str, ...] = ()) -> None:
    """Everything that the package carries out of the last round is what the transcription has."""
    assert_close(run.x, expected["x"][-1], "x")
    assert_close(run.server.x, expected["x"][-1], "x of the server")
    for name in SERVER_FIELDS:
        if name in expected:
            assert_close(getattr(run.server, name), expected[name], f"{name} of the server")
    took_part = sorted({i for sampled, _ in schedule for i in sampled})
    for name in CLIENT_FIELDS:
        if f"{name}_i" in expected and f"{name}_i" not in not_state:
            for i in took_part:
                assert_close(client_field(run, i, name), expected[f"{name}_i"][i], f"{name} of client {i}")


def client_field(run: Any, i: int, name: str) -> torch.Tensor:
    """A field of a client's state; z_i of FA-NT's local form is complete once the next x has arrived."""
    if name == "z":
        z: torch.Tensor = run.algorithm.begin(run.algorithm.broadcast(run.server), run.clients[i]).z
        return z
    value: torch.Tensor = getattr(run.clients[i], name)
    return value


@pytest.mark.slow
@pytest.mark.parametrize(("case", "schedule", "executor"), RUNS)
def test_package_follows_the_transcription(case: Case, schedule: Schedule, executor: str) -> None:
    problem = make_problem()
    for rounds in (1, len(schedule)):
        expected = case.by_hand(problem, schedule[:rounds])
        run = simulate(case.algorithm(), problem, schedule[:rounds], executor)
        assert_same(run, expected, schedule[:rounds], case.not_state)


@pytest.mark.parametrize(
    ("name", "executor"),
    [
        *((name, "loop") for name in ("fa_nt", "local_adam", "fedavg_m", "scaffold", "scaffold_m")),
        *((name, "loop") for name in ("fedadam", "fedams")),
        *((name, executor) for name in ("fadamgc", "fedavg") for executor in EXECUTORS),
    ],
)
def test_clients_with_different_K(name: str, executor: str) -> None:
    """A client whose rows are all the same has the same gradient on every batch, so batches stay harmless."""
    rng = np.random.default_rng(5)
    rows = [2, 8, 4, 6, 2, 10]
    A = [np.repeat(rng.normal(size=(1, 5)), r, axis=0) for r in rows]
    b = [np.repeat(rng.normal(size=1), r) for r in rows]
    problem = Problem(A, b, rng.normal(size=5))
    case = BY_NAME[name]
    expected = case.by_hand(problem, PARTIAL, [2 * (r // 2) for r in rows])
    run = simulate(case.algorithm(), problem, PARTIAL, executor, local_epochs=2, batch_size=2)
    assert_same(run, expected, PARTIAL, case.not_state)


# The case, a text in its transcription, and the mistake to put in its place. Each has to be seen in x.
MISTAKES = {
    "scaffold: the sign of the paper's preliminaries": ("scaffold", "(g - y_i[i] + y)", "(g + y_i[i] - y)"),
    "scaffold: y without 1/n": ("scaffold", "dy_sum / n", "dy_sum"),
    "scaffold: y divided by S": ("scaffold", "dy_sum / n", "dy_sum / len(sampled)"),
    "scaffold: y_i never stored": ("scaffold", "y_i[i] = y_new", "pass"),
    "scaffold: y_i starts at the weights": ("scaffold", "y_i = [np.zeros(d)", "y_i = [x"),
    "scaffold: option II without 1/K": ("scaffold", "(K_i * eta_l)", "eta_l"),
    "scaffold: all sampled clients tracked": ("scaffold", "if i in tracked", "if i in sampled"),
    "scaffold-I: the gradient at x_i": ("scaffold-I", "y_new = problem.gradient(i, x)", "y_new = g"),
    "scaffold_m: beta weighs the old": (
        "scaffold_m",
        "beta * (g - y_i[i] + y) + (1 - beta) * G",
        "(1 - beta) * (g - y_i[i] + y) + beta * G",
    ),
    "scaffold_m: y_i by option II": ("scaffold_m", "g_sum / K_i", "y_i[i] - y + (x - x_i) / (K_i * eta_l)"),
    "scaffold_m: y without 1/n": ("scaffold_m", "dy_sum / n", "dy_sum"),
    "fedavg_m: beta weighs the old": ("fedavg_m", "beta * g + (1 - beta) * G", "(1 - beta) * g + beta * G"),
    "fedavg_m: G with the wrong sign": ("fedavg_m", "G = -D", "G = D"),
    "fedavg_m: G without 1/K": ("fedavg_m", " * mean_steps(K, sampled)", ""),
    "fedavg_m: G is of the server's step": ("fedavg_m", "G = -D", "G = -eta_g * D"),
    "fadamgc: y without 1/n": ("fadamgc", "dy_sum / n", "dy_sum"),
    "fadamgc: y divided by S": ("fadamgc", "dy_sum / n", "dy_sum / len(sampled)"),
    "fadamgc: the correction reversed": ("fadamgc", "g + y - y_i[i]", "g - y + y_i[i]"),
    "fadamgc: y_i of corrected gradients": ("fadamgc", "g_sum + g\n", "g_sum + g_hat\n"),
    "fadamgc: y_i the last gradient": ("fadamgc", "g_sum / K_i", "g"),
    "fadamgc: the second moment of raw g": ("fadamgc", "g_hat**2", "g**2"),
    "fadamgc: all sampled clients tracked": ("fadamgc", "if i in tracked", "if i in sampled"),
    "fadamgc: v_i kept by the tracked only": (
        "fadamgc",
        "v_i[i] = v\n",
        "v_i[i] = v if i in tracked else v_i[i]\n",
    ),
    "fadamgc: v not kept": ("fadamgc", "v_i[i] = v\n", "pass\n"),
    "fadamgc: v_hat not kept": ("fadamgc", "v_hat_i[i] = vh", "pass"),
    "fadamgc: v_hat restarted": ("fadamgc", 'v_hat == "carry"', 'v_hat == "restart"'),
    "fadamgc: v in the place of v_hat": ("fadamgc", "np.maximum(vh, v)", "v"),
    "fadamgc: eps inside the root": ("fadamgc", "np.sqrt(vh) + eps", "np.sqrt(vh + eps)"),
    "fadamgc: bias correction": ("fadamgc", "quotient(m,", "quotient(m / (1 - beta1 ** (_k + 1)),"),
    "fadamgc: the step with the old m": (
        "fadamgc",
        "quotient(m,",
        "quotient((m - (1 - beta1) * g_hat) / beta1,",
    ),
    "fadamgc-gradient: y stays at zero": ("fadamgc-gradient", "y = sum(y_i, np.zeros(d)) / n", "pass"),
    "fa_nt: the correction reversed": ("fa_nt", "delta + y - y_i[i]", "delta - y + y_i[i]"),
    "fa_nt: y_i the last gradient": ("fa_nt", "y_i[i] - y + (x - x_i) / (K_i * eta_l)", "g"),
    "fa_nt: y without 1/n": ("fa_nt", "dy_sum / n", "dy_sum"),
    "fa_nt-local: the paper's formula": (
        "fa_nt-local",
        "((x_end[i] - x) - (x_new - x) / eta_g) / (steps_of(K, i) * eta_l)",
        "(x_end[i] - x_new) / (steps_of(K, i) * eta_g * eta_l)",
    ),
    "local_adam: moments reset": ("local_adam", 'moments == "reset"', "True"),
    "local_adam-reset: moments kept": ("local_adam-reset", 'moments == "reset"', "False"),
    "fedavg: eta_g left out": ("fedavg", "eta_g * (", "("),
    "fedadam: v starts at zero": ("fedadam", "tau**2 if v0 is None", "0.0 if v0 is None"),
    "fedadam: v starts at tau": ("fedadam", "tau**2 if v0 is None", "tau if v0 is None"),
    "fedadam: tau inside the root": ("fedadam", "np.sqrt(v) + tau", "np.sqrt(v + tau**2)"),
    "fedadam: bias corrected": ("fedadam", "if bias_correction", "if not bias_correction"),
    "fedadam-bias: t counted from 2": ("fedadam-bias", "start=1", "start=2"),
    "fedams: v_hat without eps": (
        "fedams",
        "np.maximum(np.maximum(vh, v), eps)",
        "np.maximum(vh, v) + 1e-12",
    ),
    "fedams: eps twice": ("fedams", "m / np.sqrt(vh)", "m / (np.sqrt(vh) + eps)"),
    "fedams: v_hat forgets": ("fedams-small-eps", "np.maximum(np.maximum(vh, v), eps)", "np.maximum(v, eps)"),
    "fedams: the other option": ("fedams-amsgrad", 'option == "amsgrad"', 'option == "fedams"'),
}


def with_mistake(case: Case, right: str, wrong: str, problem: Problem, schedule: Schedule) -> Result:
    """The case by hand, by a transcription in which one text stands in the place of another."""
    source = inspect.getsource(getattr(transcription, case.function))
    assert source.count(right) == 1, f"{right!r} has to be in {case.function} once"
    names = dict(vars(transcription))
    exec(source.replace(right, wrong), names)
    function: Callable[..., Result] = names[case.function]
    return function(problem, schedule, K, **case.options)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_one_line_is_seen(mistake: str) -> None:
    """The comparison can fail: a transcription with a known mistake is far from the package."""
    name, right, wrong = MISTAKES[mistake]
    case, problem = BY_NAME[name], make_problem()
    schedule = FULL if case.full_only else PARTIAL
    run = simulate(case.algorithm(), problem, schedule)
    assert_close(run.x, case.by_hand(problem, schedule)["x"][-1], "x without the mistake")
    x_wrong = with_mistake(case, right, wrong, problem, schedule)["x"][-1]
    assert np.abs(run.x.numpy() - x_wrong).max() > 1e-4
    with pytest.raises(AssertionError):
        assert_close(run.x, x_wrong, "x")


# The transcription by itself.


@pytest.mark.parametrize(
    "name", ["fadamgc", "fadamgc-gradient", "fa_nt", "scaffold", "scaffold-I", "scaffold_m"]
)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_by_hand_y_is_the_mean_of_all_y_i(name: str, schedule: Schedule) -> None:
    result = BY_NAME[name].by_hand(make_problem(), schedule)
    assert np.abs(result["y"]).max() > 1e-2
    np.testing.assert_allclose(result["y"], np.mean(result["y_i"], axis=0), rtol=0, atol=1e-14)


DRIFT_FREE = ["fadamgc", "fadamgc-beta2=eps=0", "fadamgc-gradient", "scaffold", "scaffold-I", "scaffold_m"]
DRIFTING = ["fadamgc-restart", "fa_nt", "local_adam", "fedavg", "fedavg_m", "fedadam", "fedams"]
ROTATING: Schedule = [([0, 1, 2], [0, 2]), ([3, 4, 5], [4, 5]), ([1, 3, 5], [1, 3]), ([0, 2, 4], [0])]


def distance(name: str, schedule: Schedule) -> float:
    """How far from the optimum a run ends, without the last parameter, which no data touches."""
    problem = make_problem()
    x = BY_NAME[name].by_hand(problem, schedule)["x"][-1]
    assert x[-1] == problem.x[-1], "a parameter whose gradient is always zero must not move"
    return float(np.abs(x - problem.optimum())[:-1].max())


@pytest.mark.parametrize("name", DRIFT_FREE)
@pytest.mark.parametrize("schedule", [FULL * 160, ROTATING * 250], ids=["full", "rotating"])
def test_by_hand_drift_free_algorithms_reach_the_optimum(name: str, schedule: Schedule) -> None:
    assert distance(name, schedule) < 1e-9


@pytest.mark.parametrize("name", DRIFTING)
def test_by_hand_other_algorithms_do_not(name: str) -> None:
    assert distance(name, FULL * 160) > 1e-3


@pytest.mark.parametrize("eta_g", [1.0, 0.7])
@pytest.mark.parametrize("v_hat", ["carry", "restart"])
def test_by_hand_both_forms_of_fa_nt_agree(eta_g: float, v_hat: str) -> None:
    problem, options = make_problem(), ADAM | {"eta_g": eta_g}
    plain = transcription.fa_nt(problem, FULL, K, **options, v_hat=v_hat)
    local = transcription.fa_nt_local(problem, FULL, K, **options, v_hat=v_hat)
    np.testing.assert_allclose(local["x"], plain["x"], rtol=0, atol=1e-12)
    np.testing.assert_allclose(local["z_i"], plain["y"] - np.array(plain["y_i"]), rtol=0, atol=1e-12)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_by_hand_K_may_be_given_for_each_client(case: Case) -> None:
    problem, schedule = make_problem(), FULL if case.full_only else PARTIAL
    one = case.by_hand(problem, schedule, K)["x"]
    each = case.by_hand(problem, schedule, [K] * problem.n)["x"]
    other = case.by_hand(problem, schedule, [K + i % 2 for i in range(problem.n)])["x"]
    np.testing.assert_array_equal(one, each)
    assert np.abs(np.array(one) - np.array(other)).max() > 1e-4
