"""The server's checkpoint, which only the newest start of the server may write."""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import Tensor

from fadamgc.bundle import has_bundle, read_bundle, write_bundle
from fadamgc.errors import CheckpointError, shown
from fadamgc.files import lock, private_folder, write_atomic

BUNDLE = "federation"
START_FILE = "start.json"  # the number of the newest start
OLDER_FILE = re.compile(rf"round-(\d+)-start-(\d+)\.({BUNDLE}.*)")  # a file of an older checkpoint
TEMPORARY_PREFIX = ".round-"  # of the temporary folder from which an older checkpoint is read
LOCK_SECONDS = 60.0  # how long to wait for another process that writes

Checkpoint = tuple[dict[str, Any], dict[str, Tensor]]


class ServerStore:
    """The folder with a server's checkpoint, and with those of the last ``keep`` rounds under other names.

    A server may still run when a new one is started: a SuperLink may die without its ServerApp. So the newest
    start takes over, and no earlier start writes again.
    """

    def __init__(self, folder: str | Path, keep: int = 1) -> None:
        self.folder, self.keep = Path(folder), keep
        self.attempt = 0  # number of this start, from 1; no two starts have the same number

    def take_over(self, needed: bool = True) -> Checkpoint | None:
        """Claim the folder for this start, so that no earlier start can write; return the last checkpoint.

        A damaged checkpoint is an error if it is ``needed``, and treated as absent if not.
        """
        with self._locked():
            for leftover in self.folder.glob(f"{TEMPORARY_PREFIX}*"):  # of a process that was killed
                shutil.rmtree(leftover, ignore_errors=True)
            checkpoint = None
            try:
                checkpoint = read_bundle(self.folder, BUNDLE) if has_bundle(self.folder, BUNDLE) else None
            except CheckpointError:
                if needed:
                    raise
            previous = 0 if checkpoint is None else int(checkpoint[0]["attempt"])
            self.attempt = max(previous, self._newest_start()) + 1
            start = json.dumps({"attempt": self.attempt}).encode()
            write_atomic(self.folder / START_FILE, start, private=True)
        return checkpoint

    def check(self) -> None:
        """Raise an error if a newer start has taken over."""
        newest = self._newest_start()
        if newest > self.attempt:
            raise CheckpointError(
                f"another server (start {newest}) has taken over {self.folder} from this one (start "
                f"{self.attempt}); this one ends and writes nothing more to the folder"
            )

    def check_identity(self, here: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
        """Raise an error if a checkpoint belongs to another experiment than the one that runs here."""
        for key in {**here, **saved}:
            if here.get(key) != saved.get(key):
                raise CheckpointError(
                    f"{self.folder} is the checkpoint of another experiment: "
                    f"{key}={shown(saved.get(key))} there, {shown(here.get(key))} here; give another "
                    "experiment, or the settings that it had"
                )

    def write(self, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Replace the checkpoint."""
        with self._locked():
            self.check()
            write_bundle(self.folder, BUNDLE, {"attempt": self.attempt, **content}, tensors, private=True)
            self._keep_newest(int(content["round"]))

    def rounds(self) -> list[int]:
        """Return the rounds whose checkpoints are stored."""
        return sorted({t for _, t in self._checkpoints()})

    def read(self, t: int) -> Checkpoint:
        """Read the checkpoint of round t."""
        checkpoints = self._checkpoints()
        newest = max((key for key in checkpoints if key[1] == t), default=None)
        if newest is None:
            rounds = ", ".join(map(str, self.rounds())) or "none"
            raise CheckpointError(
                f"restore-round={t} is not accepted; {self.folder} has the checkpoints of rounds: {rounds}"
            )
        with (
            self._locked(),
            tempfile.TemporaryDirectory(dir=self.folder, prefix=TEMPORARY_PREFIX) as temporary,
        ):
            for name, path in checkpoints[newest].items():
                _link(path, Path(temporary) / name)
            return read_bundle(Path(temporary), BUNDLE)

    def _checkpoints(self) -> dict[tuple[int, int], dict[str, Path]]:
        """Return the files of the complete checkpoints by (start, round), with their original names."""
        checkpoints: dict[tuple[int, int], dict[str, Path]] = {}
        for path in self.folder.glob("round-*"):
            if match := OLDER_FILE.fullmatch(path.name):
                checkpoints.setdefault((int(match[2]), int(match[1])), {})[match[3]] = path
        return {key: files for key, files in checkpoints.items() if f"{BUNDLE}.json" in files}

    def _keep_newest(self, t: int) -> None:
        """Store the newest checkpoint under a name with its round, and remove those that are too old."""
        prefix = f"round-{t:06d}-start-{self.attempt:04d}."
        checkpoints = self._checkpoints()
        by_round: dict[int, tuple[int, int]] = {t: (self.attempt, t)}
        for key in sorted(checkpoints, reverse=True):  # of two starts with the same round, the later counts
            if len(by_round) < self.keep:
                by_round.setdefault(key[1], key)
        to_keep = {path for key in by_round.values() for path in checkpoints.get(key, {}).values()}
        for path in self.folder.glob("round-*"):
            if OLDER_FILE.fullmatch(path.name) and (path not in to_keep or path.name.startswith(prefix)):
                path.unlink(missing_ok=True)
        if self.keep > 1:
            # The JSON file comes last: a checkpoint with it is complete.
            for path in sorted(self.folder.glob(f"{BUNDLE}*"), key=lambda path: path.suffix == ".json"):
                _link(path, self.folder / f"{prefix}{path.name}")

    def _locked(self) -> ExitStack:
        private_folder(self.folder)
        return lock(self.folder, LOCK_SECONDS)

    def _newest_start(self) -> int:
        try:
            return int(json.loads((self.folder / START_FILE).read_bytes())["attempt"])
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(f"{self.folder / START_FILE} cannot be read: {error}") from None


def _link(path: Path, other: Path) -> None:
    """Give a second name to a file that is never changed; copy the file where links are not possible."""
    try:
        os.link(path, other)
    except OSError:
        shutil.copy2(path, other)
