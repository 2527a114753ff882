"""Checkpoints: a run in a folder, written after its rounds, that can be resumed.

In the folder:

    checkpoint.json      settings, and which parts of the other files count, with digests; replaced last
    checkpoint.jsonl     one line per round, and per change of the clients' slots; only grows
    checkpoint-*         server, buffers and the initial client state
    states/states.bin    the clients' states, in slots; see ``file_states.py``
    .lock                locked from opening to the end of the run

So a checkpoint writes only what has changed since the one before, however long the run is and however many
clients have taken part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.bundle import Journal, has_bundle, read_bundle, remove_other_tensors, write_bundle
from fadamgc.errors import CheckpointError, CheckpointInUseError, OtherRunError, UnwritableError, shown, whole
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.run import (
    NAME as RUN,
)
from fadamgc.federation.run import (
    Record,
    Run,
    assembled,
    client_count,
    described,
    find_algorithm,
    read_run,
    server_tensors,
    sound,
    unpack,
    unpack_server,
)
from fadamgc.federation.settings import Settings
from fadamgc.files import LOCK, as_json, lock, make_folder, remove_leftovers, unwritable
from fadamgc.sim.file_states import FileStates, Slots
from fadamgc.task import Task

NAME = "checkpoint"
STATES = "states"  # folder of the clients' states
FORMAT = 2  # format 1 had the whole history in the JSON file, and clients' states among the tensors


def load_run(path: str | Path, task: Task | None = None) -> Run:
    """Read back a run that ``Run.save`` wrote, or the last checkpoint in a checkpoint folder.

    Args:
        path: the folder.
        task: the task of the run, for ``run.model``.
    """
    folder = Path(path)
    if has_bundle(folder, RUN) or not has_bundle(folder, NAME):
        return read_run(folder, task)
    checkpoint = Checkpoint(folder, writing=False)
    try:
        return dataclasses.replace(checkpoint.read(), task=task)
    finally:
        checkpoint.close()


class Checkpoint:
    """The checkpoint folder of one run, locked until ``close``.

    Args:
        folder: the folder.
        writing: whether anything will be written; a folder that is only read may be read-only.
    """

    def __init__(self, folder: Path, writing: bool = True) -> None:
        folder = folder.absolute()  # the working directory may change
        self.folder, self.writing = folder, writing
        self.slots: Slots | None = None
        self._lock: ExitStack | None = None
        self._journal = Journal(folder / f"{NAME}.jsonl")
        self._rounds = 0  # of the history that are in the journal
        self._table: dict[int, int] = {}  # which slot is whose, in the last checkpoint
        if writing:
            make_folder(folder, private=True)
        try:
            self._lock = lock(folder)
        except UnwritableError:
            if writing:
                raise
            return  # nobody can write there, so no lock is needed
        self._locked = _identity(folder / LOCK)

    def _check_lock(self) -> None:
        """Refuse to write once the lock file was removed: another run may have locked a new one."""
        if _identity(self.folder / LOCK) != self._locked:
            raise CheckpointInUseError(
                f"{self.folder / LOCK} was removed while a run was writing to the folder, and another run "
                "may be using it; this run ends, and its last checkpoint stays as it is"
            )

    def close(self) -> None:
        """Unlock the folder. States that are in it can be read until another run writes there."""
        if self.slots is not None:
            self.slots.close()
        if self._lock is not None:
            self._lock.close()

    def resume(
        self, resume: bool, identity: Mapping[str, Any], algorithm: AnyAlgorithm, settings: Settings
    ) -> Run | None:
        """Return the run in the folder, if it is the one to resume; None if the folder has none."""
        if not has_bundle(self.folder, NAME):
            return None
        if not resume:
            raise CheckpointError(
                f"{self.folder} already has a checkpoint; pass resume=True to resume from it, or give "
                "another folder"
            )
        saved = self.read(algorithm, identity["algorithm"], identity)
        remove_leftovers(self.folder, NAME)
        remove_other_tensors(self.folder, NAME, self._tensors)
        done = len(saved.history)
        if done > settings.rounds:
            raise CheckpointError(
                f"{self.folder} is at round {done}, beyond rounds={settings.rounds}; "
                "ask for at least as many rounds, or give another folder"
            )
        if done and done < settings.rounds and done % settings.eval_every:
            # It was evaluated because it was the last round; a run without a stop has no evaluation there.
            last = saved.history[-1]
            saved.history[-1] = dataclasses.replace(
                last, test_loss=None, test_accuracy=None, test_metric=None
            )
            self._rounds = min(self._rounds, done - 1)
        return saved

    def read(
        self,
        algorithm: AnyAlgorithm | None = None,
        expected: str | None = None,
        identity: Mapping[str, Any] | None = None,
    ) -> Run:
        """Read the checkpoint; one of another identity is refused before its states are read."""
        body, tensors = read_bundle(self.folder, NAME, (1, FORMAT))
        self._tensors = body["tensors"]
        if identity is not None:
            with sound(self.folder, NAME):
                self._compare(body["settings"], {"algorithm": identity["algorithm"]}, 0)
        algorithm = find_algorithm(self.folder, body, algorithm, expected)
        with sound(self.folder, NAME):
            old = body["format"] == 1
            history = [Record.from_json(line) for line in body["history"]] if old else self._replay(body)
            if identity is not None:
                self._compare(body["settings"], identity, len(history))
            server, initial, buffers = unpack_server(algorithm, tensors)
            n = client_count(body)
            clients: ClientStates
            if not old:
                clients = self._from_slots(n, initial, self._table_of(body))
            elif body.get("slots") is None:
                states = {i: unpack(f"client.{i}", initial, tensors) for i in map(int, body["participants"])}
                clients = ClientStates(n, initial, states)
            else:
                table = {int(i): (slot, crc) for i, (slot, crc) in body["slots"].items()}
                clients = self._from_slots(n, initial, table)
                clients.changed = set(table)  # the journal does not have them
            run = assembled(body, algorithm, server, clients, buffers, history)
            # Rounds may have had other prices before the run was resumed.
            return dataclasses.replace(run, history=[record.priced(run.cost) for record in history])

    def new_slots(self, initial: Any) -> Slots:
        """Make a new file for clients' states like the initial one."""
        self.slots, self._table = Slots(initial, self.folder / STATES), {}
        self.slots.before_write = self._check_lock
        return self.slots

    def write(self, run: Run) -> None:
        """Replace the checkpoint."""
        self._check_lock()
        clients = run.clients
        slots = self.new_slots(clients.initial) if self.slots is None else self.slots
        try:
            changed = {
                i: clients.slot(i) if isinstance(clients, FileStates) else slots.put(clients[i])
                for i in sorted(clients.changed)
            }
            lines: list[dict[str, Any]] = [{"record": r.to_json()} for r in run.history[self._rounds :]]
            if changed:
                lines.append({"slots": {str(i): [slot, slots.crc[slot]] for i, slot in changed.items()}})
            slots.sync()
            self._journal.append(lines)
        except OSError as error:
            raise unwritable(self.folder, error) from error
        self._check_lock()
        content = described(run) | {"journal": self._journal.mark()}
        write_bundle(self.folder, NAME, content, server_tensors(run), format=FORMAT, private=True)
        if not isinstance(clients, FileStates):
            slots.free(self._table[i] for i in changed if i in self._table)
        slots.named(changed.values())
        self._table.update(changed)
        self._rounds = len(run.history)
        clients.changed.clear()

    def _replay(self, body: Mapping[str, Any]) -> list[Record]:
        """Return the history in the journal, and note the clients' slots for ``_table_of``."""
        history: list[Record] = []
        self._entries: dict[int, tuple[int, int]] = {}
        for line in self._journal.read(body["journal"], self.folder / f"{NAME}.json"):
            if "record" in line:
                record = Record.from_json(line["record"])
                del history[record.round - 1 :]  # a round that is there again replaces the earlier line
                history.append(record)
                if len(history) != record.round:
                    raise ValueError(f"round {record.round} follows round {len(history) - 1}")
            else:
                for i, (slot, crc) in line["slots"].items():
                    self._entries[int(i)] = whole("slot", slot, 0), whole("checksum", crc, 0)
        self._rounds = len(history)
        return history

    def _table_of(self, body: Mapping[str, Any]) -> dict[int, tuple[int, int]]:
        for i in self._entries:
            whole("client", i, 0, client_count(body) - 1)
        return self._entries

    def _from_slots(self, n: int, initial: Any, entries: Mapping[int, tuple[int, int]]) -> FileStates:
        self._table = {i: slot for i, (slot, _) in entries.items()}
        used = dict(entries.values())
        if len(used) != len(entries):
            raise ValueError("two clients have the same slot")
        self.slots = Slots(initial, self.folder / STATES, used, self.writing)
        self.slots.before_write = self._check_lock
        self.slots.check(self._table)
        return FileStates(n, initial, self.slots, self._table)

    def _compare(self, settings: Mapping[str, Any], identity: Mapping[str, Any], done: int) -> None:
        for key, here in identity.items():
            saved, here = _without_none(settings.get(key)), _without_none(as_json(here))
            if key == "schedule" and saved and here:  # it may be longer now
                saved, here = saved[:done], here[:done]
            if saved != here:
                raise OtherRunError(_difference(self.folder, key, saved, here))


def _identity(path: Path) -> tuple[int, int] | None:
    """Return which file a path leads to; None if there is none."""
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _without_none(value: Any) -> Any:
    """Return a table without the keys whose value is None."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _difference(folder: Path, key: str, there: Any, here: Any) -> str:
    if isinstance(here, dict):
        there = there if isinstance(there, dict) else {}
        part = next(k for k in {**here, **there} if there.get(k) != here.get(k))
        key, there, here = f"{key}.{part}", there.get(part), here.get(part)
    if key in ("fingerprint.data", "fingerprint.model"):
        part = key.removeprefix("fingerprint.")
        return f"{folder} is a checkpoint of another task: its {part} differs; give another folder"
    key = key.removeprefix("fingerprint.")
    if key == "schedule":
        return f"{folder} is a checkpoint of another run: its schedule differs in a round that is done"
    return f"{folder} is a checkpoint of another run: {key}={shown(there)} there, {key}={shown(here)} here"
