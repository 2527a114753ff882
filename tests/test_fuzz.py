"""A few seconds of each kind of bad input; ``make fuzz`` has as many as one likes."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

from places import ROOT

pytest.importorskip("resource")  # and with it, fork


def fuzz(*arguments):
    command = [sys.executable, "-m", "tests.fuzz", "--seed", "0", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)


@pytest.mark.slow
def test_bad_input_is_refused_with_a_message():
    budget = {"specs": 6, "arguments": 16, "data": 8, "folders": 4}
    done = fuzz("cache=2", *(f"{name}={count}" for name, count in budget.items()))
    assert done.returncode == 0, done.stdout + done.stderr
    for name, count in budget.items():
        accepted, refused = map(
            int, re.search(rf"{name}: .*?(\d+) accepted.*?(\d+) refused", done.stdout).groups()
        )
        assert accepted > count / 20
        assert refused > count / 4


@pytest.mark.slow
def test_planted_mistakes_are_found():
    done = fuzz("planted=20")
    assert done.returncode == 1
    for message in (
        r"planted: 20 cases: \d+ FAILED, \d+ accepted, \d+ refused",
        r"\d+ x KeyError at planted.py:\d+\n    python -m tests.fuzz --seed 0 --case planted:\d+",
        r"\d+ x took more than 0.5 s",
        r"\d+ x the process died \(exit code -6\)",
        r"\d+ x accepted with another result: a damaged run was loaded",
        r"\d+ x a message of more than 5,000 characters \(InputError\)",
    ):
        assert re.search(message, done.stdout), (message, done.stdout)
    case = re.search(r"KeyError.*\n.*(planted:\d+)", done.stdout)[1]
    again = fuzz("--case", case)
    assert f"{case}: KeyError at planted.py" in again.stdout
