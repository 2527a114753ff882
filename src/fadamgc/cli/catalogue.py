"""What ``fadamgc list`` shows: all algorithms, presets, studies, tasks, partitions and executors.

The part that comes with the package is in catalogue.json (``make docs`` writes it), so that it is shown at
once, without importing torch. If other algorithms may be registered, the list is computed.
"""

from __future__ import annotations

import inspect
import json
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

FILE = Path(__file__).with_name("catalogue.json")
ENTRY_POINTS = "fadamgc.algorithms"  # also in fadamgc.methods, whose import would need torch


def catalogue() -> dict[str, Any]:
    """Return everything that ``list`` shows."""
    more = "fadamgc.methods" in sys.modules or any(entry_points(group=ENTRY_POINTS))
    if more or not FILE.is_file():
        return current()
    found: dict[str, Any] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def current() -> dict[str, Any]:
    """Compute everything that ``list`` shows."""
    from fadamgc.experiments.spec.sections import EXECUTORS
    from fadamgc.experiments.spec.toml_io import preset, presets
    from fadamgc.methods import algorithms
    from fadamgc.paper.study import studies
    from fadamgc.tasks.sections import RUNNABLE, LabelledTask

    return {
        "algorithms": [described_algorithm(name) for name in algorithms()],
        "presets": {name: preset(name).title for name in presets()},
        "names": {
            "to reproduce": list(studies()),
            "tasks": list(RUNNABLE),
            "partitions": list(LabelledTask.PARTITIONS),
            "executors": list(EXECUTORS),
        },
    }


def described_algorithm(name: str) -> dict[str, Any]:
    """Return all that `list` says about an algorithm."""
    from fadamgc.federation.cost import traffic
    from fadamgc.grouped import GroupedAlgorithm
    from fadamgc.methods import algorithm_class

    cls = algorithm_class(name)
    text = (inspect.getdoc(cls) or "no description").strip()
    described: dict[str, Any] = {"name": name, "title": str(getattr(cls, "title", name)), "text": text}
    described |= {"what": text.splitlines()[0], "vectors": dict.fromkeys(("down", "up", "tracked"), "?")}
    described |= {"needs": [], "settings": dict.fromkeys(cls.setting_names(), "?")}
    try:
        algorithm = cls()
    except Exception:  # the algorithm needs arguments
        return described
    vectors = [round(size / 4000) for size in traffic(algorithm, d=1000)]  # single numbers do not count
    everybody = ["all clients"] if algorithm.full_participation else []
    groups = ["groups"] if isinstance(algorithm, GroupedAlgorithm) else []
    return described | {
        "title": algorithm.title,
        "vectors": dict(zip(("down", "up", "tracked"), vectors, strict=True)),
        "needs": everybody + groups,
        "settings": algorithm.plain(),
    }
