"""Fixtures for tests of a federation on Flower."""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _quiet(monkeypatch):
    """Print nothing, as a node of Flower's would."""
    pytest.importorskip("flwr", reason="Flower is not installed")
    monkeypatch.setattr("fadamgc.flower.clientapp.log_to_stdout", lambda: None)
