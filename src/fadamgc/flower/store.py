"""Where a server keeps its checkpoint, for one start of the server at a time: the newest."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fadamgc.errors import CheckpointError
from fadamgc.files import has_bundle, hold, private_folder, read_bundle, write_atomic, write_bundle

NAME = "federation"
START = "start.json"  # which start of the server may write
BUSY = 60.0  # seconds to wait for another process that writes


class Store:
    """The folder of a server's checkpoint.

    A server may be thought dead and go on all the same, as when a SuperLink dies and its ServerApp does not.
    So the newest start takes over, and no earlier one writes again.

    Attributes:
        folder: where it is.
        attempt: number of this start, from 1; no two starts have the same.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.attempt = 0

    def take_over(self) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Be the newest start; what the last one has left, if there was one."""
        with self._alone():
            found = read_bundle(self.folder, NAME) if has_bundle(self.folder, NAME) else None
            before = 0 if found is None else int(found[0]["attempt"])
            self.attempt = max(before, self._newest()) + 1
            write_atomic(self.folder / START, json.dumps({"attempt": self.attempt}).encode(), private=True)
        return found

    def check(self) -> None:
        """Refuse to go on if there is a newer start."""
        newest = self._newest()
        if newest > self.attempt:
            raise CheckpointError(
                f"another server (start {newest}) has taken over {self.folder} from this one (start "
                f"{self.attempt}); this one ends, and changes nothing more there"
            )

    def write(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace the checkpoint."""
        with self._alone():
            self.check()
            write_bundle(self.folder, NAME, {"attempt": self.attempt, **content}, tensors, private=True)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        private_folder(self.folder)
        with hold(self.folder, BUSY) as held:
            if not held:
                raise CheckpointError(f"another process has been writing to {self.folder} for {BUSY:g} s")
            yield

    def _newest(self) -> int:
        try:
            return int(json.loads((self.folder / START).read_bytes())["attempt"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.folder / START} cannot be read: {error}") from None
