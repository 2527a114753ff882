"""The special cases that docs/algorithms state: two methods that have the same trajectory."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest
import torch
from test_invariants import trajectory

import fadamgc
from problems import class_task

PAGES = Path(__file__).parents[2] / "docs" / "algorithms"
LINE = re.compile(r"^- `(.+?)` is `(.+?)`(?: \((.+)\))?\.$", re.MULTILINE)
NAMES = {name: getattr(fadamgc, name) for name in fadamgc.__all__}
WHEN = {
    "": {"sampled": 4, "tracked": 2},
    "nobody tracked": {"sampled": 4, "tracked": 0},
    "all clients": {"sampled": None},
    "one client per round": {"sampled": 1},
}
CASES = [
    pytest.param(*found, id=f"{path.stem}-{number}")
    for path in sorted(PAGES.glob("*.md"))
    for number, found in enumerate(LINE.findall(path.read_text(encoding="utf-8")))
]


def made(text):
    """The method that a page names, at the local step size of the test."""
    algorithm = eval(text, dict(NAMES))
    if isinstance(algorithm, fadamgc.methods.Composed):
        return algorithm.replace(eta_l=0.05)
    return dataclasses.replace(algorithm, eta_l=0.05)


@pytest.mark.parametrize(("one", "other", "when"), CASES)
def test_two_methods_are_one(one, other, when):
    task = class_task()
    options = {"rounds": 4, "dtype": torch.float64, **WHEN[when]}
    ours, theirs = (trajectory(made(text), task, "loop", **options) for text in (one, other))
    torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    assert float((ours[-1] - ours[0]).abs().max()) > 1e-3


def test_the_pages_have_special_cases():
    assert len(CASES) > 40
    assert {path.stem for path in PAGES.glob("*.md")} == set(fadamgc.algorithms()) - {"compose"}
