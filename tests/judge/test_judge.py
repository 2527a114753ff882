"""The bench for inventors: sound methods pass, and each kind of mistake is named."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import ClassVar

import pytest

import fadamgc
from command import fadamgc as command
from fadamgc.judge.checks import CHECKS, run_checks
from fadamgc.judge.digits import compare_on_digits
from fadamgc.judge.quadratics import exactness
from fadamgc.judge.verdict import Verdict, find_method, judge
from problems import REPRESENTATIVES


@pytest.mark.parametrize("name", [*REPRESENTATIVES, "fedadamw", "scaffnew"])
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


MISTAKES = {
    NotFrozenState: ("contract", "client is list, not a NamedTuple"),
    ChangesItsArguments: ("pure", "a method changes the tensors of local"),
    LooksAtTracked: ("equal on all executors", "vectorized and on loop differ"),
    SendsUntracked: ("bytes are counted", "an untracked client sends dy"),
    Remembers: ("resumes bit for bit", "a resumed run differs"),
}


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
    assert verdict.digits == verdict.quadratics == []
    assert verdict.summary == "FAdamGC is not sound: 1 checks failed (bytes are counted)"


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
    verdict = Verdict("FedAvg", {}, [], [], [mine, other])
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
    assert command("new", "shy_sgd", "--folder", tmp_path).exit_code == 0
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
