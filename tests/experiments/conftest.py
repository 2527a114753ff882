"""Fixtures for tests of experiments."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from fadamgc.experiments.report import plots
from fadamgc.experiments.report.write import write_report
from fadamgc.experiments.run.runner import run_spec
from reported import experiment
from tiny_experiments import TINY, spec_of


@pytest.fixture(scope="session")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny experiment, run in one process, with its report."""
    out = tmp_path_factory.mktemp("tiny") / "out"
    assert run_spec(spec_of(TINY), out, workers=1, quiet=True) == ()
    write_report(out)
    return out


@pytest.fixture
def quick(request, monkeypatch):
    """No figures where a test does not ask for them."""
    if "figures" not in request.fixturenames:
        for name in ("png", "svg", "pdf"):
            monkeypatch.setattr(plots, name, lambda figure: b"")


@pytest.fixture(scope="session")
def ready(tmp_path_factory):
    """An experiment whose runs are fine."""
    folder = tmp_path_factory.mktemp("ready") / "out"
    experiment(folder)
    return folder


@pytest.fixture
def copy(ready, tmp_path):
    return Path(shutil.copytree(ready, tmp_path / "copy"))
