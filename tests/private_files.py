"""The modes of files that only their owner may read."""

from __future__ import annotations

import os
import stat


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def check_private(folder):
    assert mode(folder) == 0o700
    for path in folder.rglob("*"):
        if path.name != ".lock":  # empty
            assert mode(path) == (0o700 if path.is_dir() else 0o600), path
