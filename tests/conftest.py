"""Fixtures that tests in several folders share."""

from __future__ import annotations

import os

import pytest
import torch

import tiny
from fadamgc.cache import code_folder

# One thread per process: the suite runs in two processes on two cores.
torch.set_num_threads(1)

# Tests have their own caches; what torch compiles is shared between them, since it takes long.
os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(code_folder() / "torch"))


# These files wait for other processes most of the time, or take longest; the others run next to them.
FIRST = ("test_ray.py", "test_other_device.py", "test_studies.py", "test_fuzz.py", "test_checkpoint.py")


def pytest_collection_modifyitems(items):
    """Let the files that take longest begin first (stable, so each file keeps its order)."""
    items.sort(key=lambda item: FIRST.index(item.path.name) if item.path.name in FIRST else len(FIRST))


@pytest.fixture
def two_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty folder in the place of the user's cache."""
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def folders(cache, tmp_path, monkeypatch):
    """The folder for data sets; it, the cache and the user's configuration are empty."""
    monkeypatch.setenv("FADAMGC_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    return tmp_path / "data"


@pytest.fixture(scope="session")
def bases(tmp_path_factory):
    """Folders of tiny base models, by kind. Tests that change one copy it first."""
    folder = tmp_path_factory.mktemp("bases")
    return {name: make(folder / name) for name, make in tiny.KINDS.items()}


@pytest.fixture
def without_figures(monkeypatch):
    """Figures of reports and partitions are empty files: drawing them takes most of a small report's time."""
    from fadamgc.experiments.report import label_plot, plots

    for name in ("png", "svg", "pdf"):
        monkeypatch.setattr(plots, name, lambda figure: b"")
    monkeypatch.setattr(label_plot, "save_label_plot", lambda counts, path, title=None: path.touch())
