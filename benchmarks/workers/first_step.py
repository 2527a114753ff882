"""For ``fadamgc --import``: writes when the first round begins and ends, and ends the process.

The times are those of the machine's monotonic clock, so that the process that has started the command can
subtract its own.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

from environments import FIRST_STEP
from fadamgc.sim.engine import Engine

times: dict[str, float] = {}
begin, end = Engine.begin, Engine.end


def _begin(self: Engine) -> Any:
    jobs = begin(self)
    times.setdefault("begin", time.monotonic())
    return jobs


def _end(self: Engine, *arguments: Any) -> Any:
    end(self, *arguments)
    times["end"] = time.monotonic()
    Path(os.environ[FIRST_STEP]).write_text(json.dumps(times))
    os._exit(0)


Engine.begin = _begin  # type: ignore[method-assign]
Engine.end = _end  # type: ignore[method-assign]
