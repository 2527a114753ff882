"""Write the files of a new method: a renamed copy of the skeleton, and its test."""

from __future__ import annotations

import keyword
import re
from pathlib import Path

from fadamgc.errors import InputError
from fadamgc.files import write_atomic
from fadamgc.judge import skeleton
from fadamgc.loading import hidden_module

TEST = '''"""Tests of {name}: the checks that every method must pass, and a step computed by hand."""

import pytest
import torch
from {module} import {name}

from fadamgc.algorithm import Cohort
from fadamgc.judge.checks import CHECKS


@pytest.mark.parametrize("check", CHECKS)
def test_{module}(check):
    CHECKS[check]({name}())


def test_a_step_by_hand():
    """Change this test with the rules: every number is computed by hand."""
    algo = {name}(eta_l=0.5, eta_g=1.0, beta=0.5)
    server = algo.init_server(torch.tensor([1.0, 2.0]))
    client = algo.init_client(server.x)
    down = algo.broadcast(server)
    local = algo.begin(down, client)
    x, local = algo.step(down, client, local, down.x, torch.tensor([4.0, -2.0]))  # m = g; x - 0.5 m
    assert x.tolist() == [-1.0, 3.0]
    client, up = algo.finish(down, client, local, x, K=1, tracked=True)
    assert up.dx.tolist() == [-2.0, 1.0]
    server = algo.aggregate(server, up, Cohort(n=4, S=1, K=1, t=1))
    assert server.x.tolist() == [-1.0, 3.0]
    assert server.y.tolist() == [1.0, -0.5]  # the mean of four y_i, three of which are 0
'''


def new_method(module: str, folder: Path, test: bool = True) -> list[Path]:
    """Write ``module.py`` and ``test_module.py`` into a folder; return the paths."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", module) or keyword.iskeyword(module):
        raise InputError(f"name={module!r} is not accepted; write it like a module: my_method")
    if hidden_module(folder / f"{module}.py") is not None:
        raise InputError(f"name={module!r} is the name of a module that exists; choose another")
    name = "".join(word.capitalize() for word in module.split("_"))
    source = Path(skeleton.__file__).read_text(encoding="utf-8")
    start, end = source.index('"""'), source.index('"""', 3) + 3
    source = f'"""{name}: say in one line what it does."""' + source[end:] if start == 0 else source
    title = module.replace("_", " ").capitalize()
    source = source.replace("MyMethod", name).replace('"My method"', f'"{title}"')
    paths = [folder / f"{module}.py", folder / f"test_{module}.py"][: 1 + test]
    for path in paths:
        if path.exists():
            raise InputError(f"{str(path)!r} exists; choose another name, or another --folder")
    folder.mkdir(parents=True, exist_ok=True)
    for path, text in zip(paths, (source, TEST.format(name=name, module=module)), strict=False):
        write_atomic(path, text.encode())
    return paths
