"""What tests of compiled code need."""

from __future__ import annotations

from typing import Any

import pytest

from fadamgc.sim.executors.machine_code import compiler


def needs_compiler(test: Any) -> Any:
    """Mark a test that compiles: it is slow, and skipped where there is no compiler."""
    return pytest.mark.slow(pytest.mark.skipif(compiler() is None, reason="no C++ compiler")(test))
