"""The bench for inventors: sound methods pass, and each kind of mistake is named."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import pytest
import torch

import fadamgc
from command import fadamgc as command
from fadamgc.judge.checks import CHECKS, run_checks
from fadamgc.judge.digits import compare_on_digits
from fadamgc.judge.invariants import invariants
from fadamgc.judge.quadratics import Exactness, exactness
from fadamgc.judge.verdict import Verdict, find_method, judge
from problems import REPRESENTATIVES


@pytest.mark.slow
@pytest.mark.parametrize("name", [*REPRESENTATIVES, "fedadamw", "scaffnew", "mtgc", "mtgc_adam"])
def test_sound_methods_pass(name):
    failed = [check for check in run_checks(fadamgc.make_algorithm(name)) if not check.passed]
    assert failed == []


# One mistake for each check, in a method that is otherwise FedAvg or FAdamGC.


class NotFrozenState(fadamgc.FedAvg):
    def init_client(self, x, g=None):
        return [x]


class ChangesItsArguments(fadamgc.FAdamGC):
    def step(self, down, client, local, x, g):
        local.g_sum.add_(g)
        return super().step(down, client, local, x, g)


class LooksAtTracked(fadamgc.FAdamGC):
    def finish(self, down, client, local, x, K, tracked):
        return super().finish(down, client, local, x, K, bool(tracked) if isinstance(tracked, bool) else True)


class SendsUntracked(fadamgc.FAdamGC):
    def finish(self, down, client, local, x, K, tracked):
        return super().finish(down, client, local, x, K, True)


class Remembers(fadamgc.FedAvg):
    calls: ClassVar[list[int]] = [0]

    def aggregate(self, server, total, cohort):
        self.calls[0] += 1
        return server._replace(x=server.x + total.dx / cohort.S / self.calls[0])


class KnowsTheRound(fadamgc.FedAvg):
    """Sound: the round is in the cohort."""

    def aggregate(self, server, total, cohort):
        return server._replace(x=server.x + total.dx / cohort.S / cohort.t)


class ChangesTheServer(fadamgc.FedAvg):
    def aggregate(self, server, total, cohort):
        server.x.add_(total.dx / cohort.S)
        return server


class ChangesTheSum(fadamgc.FedAvg):
    def aggregate(self, server, total, cohort):
        return server._replace(x=server.x + total.dx.div_(cohort.S))


class HidesItsMomentum(fadamgc.FedAvg):
    """Keeps a state where no checkpoint finds it, and starts it again in round 1."""

    def aggregate(self, server, total, cohort):
        m = 0.0 if cohort.t == 1 else self.__dict__.get("m", 0.0)
        m = 0.5 * m + total.dx / cohort.S
        object.__setattr__(self, "m", m)
        return server._replace(x=server.x + m)


HIDDEN = {}


class HidesItInTheModule(fadamgc.FedAvg):
    def aggregate(self, server, total, cohort):
        m = 0.0 if cohort.t == 1 else HIDDEN["m"]
        HIDDEN["m"] = 0.5 * m + total.dx / cohort.S
        return server._replace(x=server.x + HIDDEN["m"])


class Longer(NamedTuple):
    dx: torch.Tensor
    more: torch.Tensor


class SendsMoreWithMoreSteps(fadamgc.FedAvg):
    def finish(self, down, client, local, x, K, tracked):
        state, up = super().finish(down, client, local, x, K, tracked)
        return state, Longer(up.dx, up.dx.repeat(K))


class DrawsInAStep(fadamgc.FedAvg):
    def step(self, down, client, local, x, g):
        return x - self.eta_l * (g + 1e-3 * torch.randn_like(g)), local


class ShortensX(fadamgc.FedAvg):
    def step(self, down, client, local, x, g):
        return (x - self.eta_l * g)[:-1], local


class SendsDoubles(fadamgc.FedAvg):
    def aggregate(self, server, total, cohort):
        return server._replace(x=(server.x + total.dx / cohort.S).double())


class Exits(fadamgc.FedAvg):
    def begin(self, down, client, g=None):
        raise SystemExit(0)


class CommitsToWhatItMeant(fadamgc.FAdamGC):
    changes: ClassVar[dict[str, str]] = {}


class OneGroupForAll(fadamgc.MTGC):
    def broadcast_to(self, server, j):
        return super().broadcast_to(server, 0)


class ChangesAGroup(fadamgc.MTGC):
    def aggregate_group(self, server, j, total, cohort):
        server.x_j[j] += total.dx / cohort.S
        return server


MISTAKES = {
    NotFrozenState: ("contract", "client is list, not a NamedTuple"),
    ChangesItsArguments: ("pure", "step changes its arguments"),
    ChangesTheServer: ("pure", "aggregate changes its arguments"),
    ChangesTheSum: ("pure", "aggregate changes its arguments"),
    HidesItsMomentum: ("resumes bit for bit", "a resumed run differs"),
    HidesItInTheModule: ("resumes bit for bit", "a resumed run differs"),
    SendsMoreWithMoreSteps: ("bytes are counted", "up has 80 bytes after 3 steps, 40 are counted"),
    DrawsInAStep: ("pure", "step gives another result if it is called again"),
    ShortensX: ("contract", "step returns a tensor (1) of shape (4,) of torch.float32, not (5,)"),
    SendsDoubles: ("contract", "aggregate returns a tensor (1) of shape (5,) of torch.float64"),
    Exits: ("contract", "SystemExit"),
    OneGroupForAll: ("order of clients", "differ by"),
    ChangesAGroup: ("pure", "aggregate_group changes its arguments"),
    LooksAtTracked: ("equal on all executors", "vectorized and on loop differ"),
    SendsUntracked: ("bytes are counted", "an untracked client sends dy"),
    CommitsToWhatItMeant: (
        "clients follow what arrives",
        "y holds for server and clients, but not with codec=",
    ),
    Remembers: ("resumes bit for bit", "a resumed run differs"),
}


@pytest.mark.slow
@pytest.mark.parametrize("cls", MISTAKES)
def test_a_mistake_is_named(cls):
    name, message = MISTAKES[cls]
    results = {check.name: check for check in run_checks(cls())}
    assert not results[name].passed
    assert message in results[name].detail


def test_a_sound_variant_passes():
    assert all(check.passed for check in run_checks(KnowsTheRound()))


def test_an_unsound_method_is_not_compared():
    verdict = judge(SendsUntracked())
    assert not verdict.sound
    assert verdict.digits == verdict.quadratics == verdict.invariants == []
    assert verdict.summary == "FAdamGC is not sound: 1 checks failed (bytes are counted)"


# The invariants, in their order: means, copies, coordinates, signs, origin, scale of the loss.


@dataclass(frozen=True)
class ForgetsTheFactor(fadamgc.FAdamGC):
    """The server adds dy as if the clients of the round were all clients."""

    def aggregate(self, server, total, cohort):
        return super().aggregate(server, total, cohort._replace(n=cohort.S))


@dataclass(frozen=True)
class SumsTheChanges(fadamgc.FedAvg):
    """The server adds the clients' changes instead of their mean."""

    def aggregate(self, server, total, cohort):
        return super().aggregate(server, total, cohort._replace(S=1.0))


@dataclass(frozen=True)
class OnlyUp(fadamgc.FedAvg):
    """Steps that depend on the sign of the gradient."""

    def step(self, down, client, local, x, g):
        return super().step(down, client, local, x, g.clamp(max=0))


@dataclass(frozen=True)
class FirstIsFaster(fadamgc.FedAvg):
    """Coordinates with step sizes of their own."""

    def step(self, down, client, local, x, g):
        return super().step(down, client, local, x, g / torch.arange(1, len(x) + 1))


@pytest.mark.parametrize(
    ("algorithm", "holds"),
    [
        (fadamgc.FAdamGC(), [True, True, True, True, True, True]),
        (fadamgc.FedAvg(), [None, True, True, True, True, False]),
        (fadamgc.Scaffold(), [True, True, True, True, True, False]),
        (fadamgc.FedDC(), [True, True, True, True, True, False]),
        (fadamgc.MimeLite(), [None, True, True, True, True, False]),
        (fadamgc.FAdamGC(init="gradient"), [True, True, True, True, True, True]),
        (fadamgc.DiLoCo(), [None, True, True, True, False, True]),
        (fadamgc.DiLoCo(weight_decay=0.0), [None, True, True, True, True, True]),
        (fadamgc.MTGCAdam(), [None, True, True, True, True, True]),
        (fadamgc.compose(fadamgc.local.Adam(), "pre"), [True, True, True, True, True, True]),
        (ForgetsTheFactor(), [False, True, True, True, True, True]),
        (SumsTheChanges(), [None, False, True, True, True, False]),
        (FirstIsFaster(), [None, True, False, True, True, False]),
        (OnlyUp(), [None, True, True, False, True, False]),
    ],
    ids=lambda value: getattr(value, "title", None),
)
def test_invariants(algorithm, holds):
    assert [invariant.holds for invariant in invariants(algorithm)] == holds


def test_the_verdict_says_which_invariants_hold():
    verdict = judge(ForgetsTheFactor(), quick=True)
    assert verdict.sound  # an invariant that does not hold is no failure
    found = {invariant["name"]: invariant for invariant in json.loads(verdict.to_json())["invariants"]}
    assert found["server's state is the clients' mean"]["holds"] is False
    assert "y and the mean of the clients' y differ" in found["server's state is the clients' mean"]["detail"]


def test_a_method_that_fails_in_an_invariant_is_told():
    class Small(fadamgc.FedAvg):
        def step(self, down, client, local, x, g):
            raise ValueError("too many coordinates")

    assert all("too many coordinates" in invariant.detail for invariant in invariants(Small()))


@pytest.mark.slow
def test_exactness(monkeypatch):
    monkeypatch.setattr("fadamgc.judge.quadratics.EXACT", 1e-9)  # so few rounds are not compiled
    assert exactness(fadamgc.Scaffold(), sampled=12, rounds=90, sizes=(0.03,)).verdict == "exact"
    stalled = exactness(fadamgc.FedAvg(), sampled=12, rounds=90, sizes=(0.03, 0.01))
    assert stalled.verdict == "stalls"
    assert stalled.eta_l == 0.01  # the smaller the steps, the nearer
    diverged = exactness(fadamgc.FedAvg(), sampled=12, rounds=30, sizes=(1e9,))
    assert diverged.norm == float("inf")


@pytest.mark.slow
def test_digits(monkeypatch):
    from fadamgc.judge import digits

    monkeypatch.setattr(digits, "BASELINES", ("local_adam",))
    monkeypatch.setattr(digits, "GLOBAL_STEPS", (1.0,))
    short = digits.preset("digits")
    short = short.replace("run", rounds=3, executor="loop").replace("tune", rounds=2, eta_l=(0.001, 0.3))
    monkeypatch.setattr(digits, "preset", lambda _: short)
    mine, other = compare_on_digits(fadamgc.FedAvg())
    assert mine.step_sizes == {"eta_l": 0.3, "eta_g": 1.0}
    assert other.method == "LocalAdam"
    assert (mine.reached, mine.seeds, mine.rounds) == (0, 2, None)
    assert 0 < mine.final < 1
    verdict = Verdict("FedAvg", {}, [], [], [], [mine, other])
    assert "of 2 on digits" in verdict.summary


# The commands.


def test_new_writes_a_method_that_passes_its_own_test(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = command("new", "shy_sgd")
    assert written.exit_code == 0
    assert "fadamgc judge shy_sgd.py:ShySgd" in written.stderr
    verdict = command("judge", "shy_sgd.py:ShySgd", "--quick", "--json")
    assert verdict.exit_code == 0
    found = json.loads(verdict.stdout)
    assert found["sound"]
    assert found["method"] == "Shy sgd"
    assert [check["name"] for check in found["checks"]] == list(CHECKS)
    again = command("new", "shy_sgd")
    assert again.exit_code == 2
    assert "exists; choose another name" in again.stderr


@pytest.mark.slow
def test_the_test_of_a_new_method_passes(tmp_path):
    assert command("new", "bold_sgd", "--folder", tmp_path).exit_code == 0
    done = subprocess.run([sys.executable, "-m", "pytest", "-q", tmp_path], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


def test_judge_shows_what_failed_and_exits_with_1(tmp_path):
    file = tmp_path / "broken.py"
    file.write_text(
        "import fadamgc\n"
        "class Broken(fadamgc.FAdamGC):\n"
        "    def finish(self, down, client, local, x, K, tracked):\n"
        "        return super().finish(down, client, local, x, K, True)\n"
    )
    verdict = command("judge", f"{file}:Broken", "--quick")
    assert verdict.exit_code == 1
    assert "an untracked client sends dy" in verdict.stdout


@pytest.mark.parametrize(
    ("text", "reference", "message"),
    [
        (
            "",
            "my_file.py",
            "'my_file.py' is not a registered method; for one of your own write my_file.py:MyMeth",
        ),
        ("", "no_such.py:A", "there is no file 'no_such.py'"),
        ("", "no_such_module:A", "there is no module 'no_such_module'"),
        ("class Alpha: pass", "FILE:Alpa", "has no 'Alpa'; did you mean 'Alpha'?"),
        ("1 / 0", "FILE:A", "cannot be imported: ZeroDivisionError"),
        ("import nothing_of_this_name", "FILE:A", "cannot be imported: ModuleNotFoundError"),
        ("A = 3", "FILE:A", "is int; it must be a class derived from fadamgc.Algorithm"),
        (
            "import fadamgc\nclass A(fadamgc.Algorithm): pass",
            "FILE:A",
            "does not define aggregate, begin, broadcast, finish, init_client, init_server, step",
        ),
        (
            "import fadamgc\nclass A(fadamgc.FedAvg):\n    def __init__(self, mu): pass",
            "FILE:A",
            "cannot be made without arguments",
        ),
    ],
)
def test_what_cannot_be_judged_is_refused(text, reference, message, tmp_path):
    file = tmp_path / f"file_{abs(hash(text))}.py"
    file.write_text(text)
    refused = command("judge", reference.replace("FILE", str(file)))
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_a_function_may_make_the_method(tmp_path):
    file = tmp_path / "maker_of_a_method.py"
    file.write_text("import fadamgc\ndef make():\n    return fadamgc.compose(fadamgc.local.Lion(), 'pre')\n")
    assert find_method(f"{file}:make") == fadamgc.compose(fadamgc.local.Lion(), "pre")
    assert find_method("fedavg") == fadamgc.FedAvg()


@pytest.mark.parametrize("name", ["class", "numpy", "json", "My-Method"])
def test_new_refuses_names_that_no_module_can_have(name, tmp_path):
    refused = command("new", name, "--folder", tmp_path)
    assert refused.exit_code == 2
    assert list(tmp_path.iterdir()) == []


def test_new_without_a_test(tmp_path):
    assert command("new", "only_sgd", "--folder", tmp_path, "--no-test").exit_code == 0
    assert [path.name for path in tmp_path.iterdir()] == ["only_sgd.py"]


def test_whatever_a_method_prints_the_verdict_is_json(tmp_path):
    file = tmp_path / "talkative.py"
    (tmp_path / "beside_it.py").write_text("NAME = 'a [/b] title [bold]'")
    file.write_text(
        "import fadamgc, beside_it\n"
        "class Talkative(fadamgc.FedAvg):\n"
        "    title = beside_it.NAME\n"
        "    def broadcast(self, server):\n"
        "        print('hello')\n"
        "        return super().broadcast(server)\n"
    )
    verdict = command("judge", f"{file}:Talkative", "--quick", "--json")
    assert json.loads(verdict.stdout)["method"] == "a [/b] title [bold]"
    assert "a [/b] title [bold]" in command("judge", f"{file}:Talkative", "--quick").stdout


def test_numbers_that_json_does_not_have_become_null():
    result = Exactness(sampled=12, norm=float("inf"), eta_l=float("nan"), before=float("inf"))
    verdict = Verdict("mine", {}, [], [], [result], [])
    found = json.loads(verdict.to_json(), parse_constant=lambda name: pytest.fail(name))
    assert found["quadratics"][0]["norm"] is None
    assert found["quadratics"][0]["verdict"] == "diverges"


@pytest.mark.parametrize(
    ("source", "name", "message"),
    [
        ("raise SystemExit(0)", "X", "cannot be imported: SystemExit"),
        ("def X():\n    raise ValueError('no data')", "X", "is a function and failed: ValueError: no data"),
        ("def X(a):\n    return a", "X", "is called without arguments"),
    ],
)
def test_files_that_cannot_be_judged_are_refused(source, name, message, tmp_path):
    file = tmp_path / f"file_{abs(hash(source))}.py"
    file.write_text(source)
    refused = command("judge", f"{file}:{name}", "--quick")
    assert refused.exit_code == 2
    assert message in refused.stderr


def test_a_file_with_the_name_of_a_module_is_refused(tmp_path):
    (tmp_path / "numpy.py").write_text("X = 1")
    refused = command("judge", f"{tmp_path / 'numpy.py'}:X")
    assert refused.exit_code == 2
    assert "rename the file" in refused.stderr


def test_an_error_after_the_checks_is_part_of_the_verdict(monkeypatch):
    def broken(algorithm, sampled):
        raise ValueError("in round 10")

    monkeypatch.setattr("fadamgc.judge.verdict.exactness", broken)
    verdict = judge(fadamgc.FedAvg())
    assert not verdict.sound
    assert verdict.checks[-1] == ("runs on quadratics", False, "ValueError: in round 10")


def test_a_method_that_needs_all_clients_is_compared_with_a_note():
    from fadamgc.judge.digits import _note, preset

    note = _note("MTGC", fadamgc.MTGC(), preset("digits"))
    assert "its rounds have 50 clients, in 5 groups" in note
    assert _note("FedAvg", fadamgc.FedAvg(), preset("digits")) == ""


def test_names_that_are_nearly_right():
    with pytest.raises(fadamgc.InputError, match="did you mean 'fedavg'"):
        find_method("fedavgg")
