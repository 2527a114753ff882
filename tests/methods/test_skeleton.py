"""Tests of the skeleton, to copy with it: two steps computed by hand, and the rules again in numpy."""

import shutil
import subprocess
import sys

import numpy as np
import pytest
import torch
from test_algorithms import local_round, same, vec
from test_transcription import PARTIAL, K, make_problem, make_task

import fadamgc
from fadamgc.algorithm import Cohort
from fadamgc.judge import skeleton
from fadamgc.judge.skeleton import MyMethod
from places import ROOT


def test_two_steps_by_hand():
    algo = MyMethod(eta_l=0.5, eta_g=0.5, beta=0.5)
    server = algo.init_server(vec(1, 2))._replace(y=vec(1, 0))
    client = algo.init_client(server.x)._replace(y=vec(3, 1))
    # g_hat = g + y - y_i = (2, -1), then (0, 1); m = (2, -1), then (1, 0.5)
    state, up, x, directions = local_round(algo, server, client, [vec(4, 0), vec(2, 2)])
    same(directions[0], 2, -1)
    same(directions[1], 1, 0.5)
    same(x, 1 - 1 - 0.5, 2 + 0.5 - 0.25)
    same(state.y, 3, 1)
    same(up.dx, -1.5, 0.25)
    same(up.dy, 0, 0)
    after = algo.aggregate(server, up, Cohort(n=10, S=2, K=2))
    same(after.x, 1 - 0.5 * 1.5 / 2, 2 + 0.5 * 0.25 / 2)
    same(after.y, 1, 0)


def transcribed(problem, schedule, K, eta_l, eta_g, beta):
    """The rules of the docstring as plain loops; all models, y, and the y_i."""
    x, y, y_i = problem.x, np.zeros(problem.d), [np.zeros(problem.d) for _ in range(problem.n)]
    models = []
    for sampled, tracked in schedule:
        dx, dy = np.zeros(problem.d), np.zeros(problem.d)
        for i in sampled:
            w, m, g_sum = x, np.zeros(problem.d), np.zeros(problem.d)
            for _ in range(K):
                g = problem.gradient(i, w)
                m = beta * m + g + y - y_i[i]
                w = w - eta_l * m
                g_sum = g_sum + g
            dx = dx + w - x
            if i in tracked:
                dy = dy + g_sum / K - y_i[i]
                y_i[i] = g_sum / K
        x, y = x + eta_g * dx / len(sampled), y + dy / problem.n
        models.append(x)
    return models, y, y_i


def test_transcription():
    problem, hyperparameters = make_problem(), {"eta_l": 0.05, "eta_g": 0.8, "beta": 0.7}
    models, y, y_i = transcribed(problem, PARTIAL, K, **hyperparameters)
    seen = []
    run = fadamgc.simulate(
        MyMethod(**hyperparameters), make_task(problem), rounds=len(PARTIAL), schedule=PARTIAL, local_steps=K,
        dtype=torch.float64, executor="loop", callbacks=[lambda end: seen.append(end.server.x.numpy())],
    )  # fmt: skip
    np.testing.assert_allclose(seen, models, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(run.server.y, y, rtol=1e-9, atol=1e-11)
    np.testing.assert_allclose(torch.stack([c.y for c in run.clients]), y_i, rtol=1e-9, atol=1e-11)


@pytest.mark.slow
def test_one_file_and_one_line_add_an_algorithm(tmp_path):
    """The steps of docs/extending.md, in a copy of the package."""
    shutil.copytree(ROOT / "src", tmp_path / "src", ignore=shutil.ignore_patterns("__pycache__"))
    methods = tmp_path / "src" / "fadamgc" / "methods"
    shutil.copy(skeleton.__file__, methods / "my_method.py")
    text = (methods / "__init__.py").read_text()
    line = "from fadamgc.methods.my_method import MyMethod as MyMethod"
    assert line in (ROOT / "docs" / "extending.md").read_text()
    (methods / "__init__.py").write_text(text.replace("# isort: on\n", f"{line}\n# isort: on\n"))
    program = (
        "import fadamgc\n"
        "assert fadamgc.algorithms()[-1] == 'my_method', fadamgc.algorithms()\n"
        "assert fadamgc.make_algorithm('my_method', beta=0.5) == fadamgc.MyMethod(beta=0.5)\n"
        "assert 'MyMethod' in fadamgc.__all__"
    )
    subprocess.run(
        [sys.executable, "-c", program], check=True, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "src")}
    )
