"""Where a server keeps its checkpoint, for one start of the server at a time: the newest."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from fadamgc.bundle import has_bundle, read_bundle, write_bundle
from fadamgc.errors import CheckpointError
from fadamgc.files import lock, private_folder, write_atomic

NAME = "federation"
START = "start.json"  # which start of the server may write
KEPT = re.compile(r"round-(\d+)-start-(\d+)\.(federation.*)")  # the files of an older checkpoint
READING = ".round-"  # how the name of a temporary folder begins, from which a checkpoint is read
BUSY = 60.0  # seconds to wait for another process that writes


class Store:
    """The folder of a server's checkpoint.

    A server may be thought dead and go on all the same, as when a SuperLink dies and its ServerApp does not.
    So the newest start takes over, and no earlier one writes again.

    The checkpoints of the last rounds are kept under other names, as links to the same files.

    Args:
        folder: where it is.
        keep: how many checkpoints are kept, the newest included.

    Attributes:
        folder: where it is.
        attempt: number of this start, from 1; no two starts have the same.
    """

    def __init__(self, folder: str | Path, keep: int = 1) -> None:
        self.folder, self.keep = Path(folder), keep
        self.attempt = 0

    def take_over(self, needed: bool = True) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
        """Be the newest start; the checkpoint of the last one, if there was one.

        Args:
            needed: refuse a checkpoint that is damaged; otherwise it is as if there was none.
        """
        with self._alone():
            for left in self.folder.glob(f"{READING}*"):  # by a process that was killed
                shutil.rmtree(left, ignore_errors=True)
            found = None
            try:
                found = read_bundle(self.folder, NAME) if has_bundle(self.folder, NAME) else None
            except CheckpointError:
                if needed:
                    raise
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
            self._keep(int(content["round"]))

    def rounds(self) -> list[int]:
        """The rounds whose checkpoints are kept."""
        return sorted({t for _, t in self._kept()})

    def read(self, t: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Read the checkpoint of an earlier round."""
        kept = self._kept()
        found = max((key for key in kept if key[1] == t), default=None)
        if found is None:
            rounds = ", ".join(map(str, self.rounds())) or "none"
            raise CheckpointError(
                f"restore-round={t} is not accepted; {self.folder} has the checkpoints of rounds: {rounds}"
            )
        with (
            self._alone(),
            tempfile.TemporaryDirectory(dir=self.folder, prefix=READING) as place,
        ):
            for name, path in kept[found].items():
                _link(path, Path(place) / name)
            return read_bundle(Path(place), NAME)

    def _kept(self) -> dict[tuple[int, int], dict[str, Path]]:
        """The files of the complete checkpoints that are kept, by start and round, with their first names."""
        found: dict[tuple[int, int], dict[str, Path]] = {}
        for path in self.folder.glob("round-*"):
            if match := KEPT.fullmatch(path.name):
                found.setdefault((int(match[2]), int(match[1])), {})[match[3]] = path
        return {key: files for key, files in found.items() if f"{NAME}.json" in files}

    def _keep(self, t: int) -> None:
        """Keep the newest checkpoint under a name with its round, and remove those that are too old."""
        prefix = f"round-{t:06d}-start-{self.attempt:04d}."
        kept = self._kept()
        chosen: dict[int, tuple[int, int]] = {t: (self.attempt, t)}
        for key in sorted(kept, reverse=True):  # the newest first; of two starts, the later has the round
            if len(chosen) < self.keep:
                chosen.setdefault(key[1], key)
        names = {path for key in chosen.values() for path in kept.get(key, {}).values()}
        for path in self.folder.glob("round-*"):
            if KEPT.fullmatch(path.name) and (path not in names or path.name.startswith(prefix)):
                path.unlink(missing_ok=True)
        if self.keep > 1:
            for path in sorted(self.folder.glob(f"{NAME}*"), key=lambda path: path.suffix == ".json"):
                _link(path, self.folder / f"{prefix}{path.name}")  # the JSON file last: then it is complete

    @contextmanager
    def _alone(self) -> Iterator[None]:
        private_folder(self.folder)
        with lock(self.folder, BUSY):
            yield

    def _newest(self) -> int:
        try:
            return int(json.loads((self.folder / START).read_bytes())["attempt"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.folder / START} cannot be read: {error}") from None


def _link(path: Path, other: Path) -> None:
    """Give a file that is never written to again a second name; a copy where that is not possible."""
    try:
        os.link(path, other)
    except OSError:
        shutil.copy2(path, other)
