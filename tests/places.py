"""Where things are, for tests in any folder."""

from pathlib import Path

TESTS = Path(__file__).parent
ROOT = TESTS.parent
