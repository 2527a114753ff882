"""Mistakes on purpose, to see that each is found."""

from __future__ import annotations

import os
import random
import time
from pathlib import Path

from .harness import Target, Wrong

KINDS = ("accepted", "refused", "traceback", "hang", "death", "other data", "long message")


def prepare(shared: Path) -> None:
    (shared / "prepared").touch()


def case(r: random.Random, shared: Path, folder: Path) -> str:
    from fadamgc import InputError

    assert (shared / "prepared").exists()
    assert not list(folder.iterdir())
    (folder / "leftover").touch()
    match r.choice(KINDS[1:]) if r.random() < 0.8 else "accepted":
        case "refused":
            raise InputError("rounds=0")
        case "traceback":
            raise KeyError("goal")
        case "hang":
            time.sleep(100)
        case "death":
            os.abort()
        case "other data":
            raise Wrong("a damaged run was loaded")
        case "long message":
            raise InputError("y" * 10_000)
    return "accepted"


TARGET = Target("planted", prepare, case, limit=0.5)
