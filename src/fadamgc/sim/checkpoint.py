"""Checkpoints: a run in a folder, written after its rounds, that can be resumed.

In the folder:

    checkpoint.json      settings, and which parts of the other files are valid, with digests; replaced last
    checkpoint.jsonl     one line per round, and per change of the clients' slots; only grows
    checkpoint-*         server, buffers and the initial client state
    states/states.bin    the clients' states, in slots; see ``file_states.py``
    .lock                locked from opening to the end of the run

So a checkpoint writes only what has changed since the last one, however long the run is and however many
clients have taken part.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from fadamgc.algorithm import AnyAlgorithm
from fadamgc.bundle import Journal, has_bundle, read_bundle, remove_other_tensors, write_bundle
from fadamgc.errors import CheckpointError, CheckpointInUseError, OtherRunError, UnwritableError, shown, whole
from fadamgc.federation import run as runs
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.record import Record
from fadamgc.federation.run import Run, sound
from fadamgc.federation.settings import Settings
from fadamgc.files import LOCK, as_json, lock, make_folder, remove_leftovers, unwritable
from fadamgc.sim.file_states import FileStates, Slots
from fadamgc.task import Task

NAME = "checkpoint"
STATES = "states"  # folder of the clients' states
# Format 1 had the whole history in the JSON file, and clients' states among the tensors; format 2 had no
# compressed lines in the journal.
FORMAT = 3


def load_run(path: str | Path, task: Task | None = None) -> Run:
    """Read back a run that ``Run.save`` wrote, or the last checkpoint in a checkpoint folder.

    Args:
        path: the folder.
        task: the task of the run, for ``run.model``.

    Example:
        >>> import fadamgc, tempfile, torch
        >>> data = [(torch.randn(8, 3), torch.randn(8, 1)) for _ in range(4)]
        >>> task = fadamgc.Task(torch.nn.Linear(3, 1), torch.nn.functional.mse_loss, data)
        >>> run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=2)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     run.save(folder)
        ...     loaded = fadamgc.load_run(folder, task)
        >>> torch.equal(loaded.x, run.x)
        True
    """
    folder = Path(path)
    if has_bundle(folder, runs.NAME) or not has_bundle(folder, NAME):
        return runs.read_run(folder, task)
    with closing(Checkpoint(folder, writing=False)) as checkpoint:
        return dataclasses.replace(checkpoint.read(), task=task)


class Checkpoint:
    """The checkpoint folder of one run, locked until ``close``; without ``writing`` it may be read-only."""

    def __init__(self, folder: Path, writing: bool = True) -> None:
        folder = folder.absolute()  # the working directory may change
        self.folder, self.writing = folder, writing
        self.slots: Slots | None = None
        self._lock: ExitStack | None = None
        self._journal = Journal(folder / f"{NAME}.jsonl")
        self._rounds = 0  # rounds of the history that are in the journal
        self._table: dict[int, int] = {}  # the slot of each client whose state is in memory
        if writing:
            make_folder(folder, private=True)
        try:
            self._lock = lock(folder)
        except UnwritableError:
            if writing:
                raise
            return  # nobody can write to the folder, so no lock is needed
        self._locked = _identity(folder / LOCK)

    def _check_lock(self) -> None:
        """Refuse to write once the lock file was removed: another run may have locked a new one."""
        if _identity(self.folder / LOCK) != self._locked:
            raise CheckpointInUseError(
                f"{self.folder / LOCK} was removed while a run was writing to the folder, and another run "
                "may be using it; this run ends, and its last checkpoint stays as it is"
            )

    def close(self) -> None:
        """Unlock the folder. The states in its file can be read until another run writes to it."""
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
        saved = self.read(algorithm, identity)
        remove_leftovers(self.folder, NAME)
        remove_other_tensors(self.folder, NAME, self._tensors)
        done = len(saved.history)
        if done > settings.rounds:
            raise CheckpointError(
                f"{self.folder} is at round {done}, beyond rounds={settings.rounds}; "
                "ask for at least as many rounds, or give another folder"
            )
        if done and done < settings.rounds and done % settings.eval_every:
            # This round was evaluated only because it was the last one; a longer run would not evaluate it.
            none: dict[str, Any] = dict.fromkeys(("test_loss", "test_accuracy", "test_metric"))
            none["metrics"] = {}
            saved.history[-1] = dataclasses.replace(saved.history[-1], **none)
            self._rounds = min(self._rounds, done - 1)
        return saved

    def read(self, algorithm: AnyAlgorithm | None = None, identity: Mapping[str, Any] | None = None) -> Run:
        """Read the checkpoint; with an algorithm and an identity, refuse a checkpoint of another run."""
        body, tensors = read_bundle(self.folder, NAME, (1, 2, FORMAT))
        self._tensors = body["tensors"]
        if identity is None:
            algorithm = runs.find_algorithm(self.folder, body)
        with sound(self.folder, NAME):
            description = runs.description_of(body)
            if old := body["format"] == 1:
                history, slots = [Record.from_json(line) for line in body["history"]], body.get("slots")
            else:
                history, slots = self._replay(body["journal"])
            if identity is not None:
                self._compare(body["settings"], identity, len(history))
            server, initial, buffers = runs.unpack_server(algorithm, body["settings"], tensors)
            if slots is None:
                clients = runs.unpack_clients(body, initial, tensors)
            else:
                clients = self._from_slots(body["n"], initial, slots)
                if old:
                    clients.changed = set(clients.participants)  # format 1 has no slots in a journal
            # Rounds may have had other prices before the run was resumed.
            history = [record.priced(description["cost"]) for record in history]
            best = runs.best_of(body, tensors)
            return Run(algorithm, server, clients, buffers, history, best=best, **description)

    def open_slots(self, initial: Any, used: dict[int, int] | None = None) -> Slots:
        """Open the file of the clients' states, with the slots ``used``; None makes a new file."""
        self.slots = Slots(initial, self.folder / STATES, used, self.writing)
        self.slots.before_write = self._check_lock
        return self.slots

    def write(self, run: Run) -> None:
        """Replace the checkpoint."""
        self._check_lock()
        clients = run.clients
        slots = self.open_slots(clients.initial) if self.slots is None else self.slots
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
        content = runs.described(run) | {"journal": self._journal.mark()}
        write_bundle(self.folder, NAME, content, runs.server_tensors(run), format=FORMAT, private=True)
        if not isinstance(clients, FileStates):
            slots.free(self._table[i] for i in changed if i in self._table)
            self._table.update(changed)
        slots.named(changed.values())
        self._rounds = len(run.history)
        clients.changed.clear()

    def _replay(self, mark: Any) -> tuple[list[Record], dict[str, Any]]:
        """Return the history in the journal, and each client's slot with its checksum."""
        history: list[Record] = []
        slots: dict[str, Any] = {}
        for line in self._journal.read(mark, self.folder / f"{NAME}.json"):
            if "record" in line:
                record = Record.from_json(line["record"])
                del history[record.round - 1 :]  # a later line of the same round replaces the earlier one
                history.append(record)
                if len(history) != record.round:
                    raise ValueError(f"round {record.round} follows round {len(history) - 1}")
            else:
                slots.update(line["slots"])
        self._rounds = len(history)
        return history, slots

    def _from_slots(self, n: int, initial: Any, slots: Mapping[str, Any]) -> ClientStates:
        """Open the file of states; ``slots`` has the slot and the checksum of each client."""
        used: dict[int, int] = {}
        for i, (slot, crc) in slots.items():
            self._table[whole("client", int(i), 0, n - 1)] = whole("slot", slot, 0)
            used[slot] = whole("checksum", crc, 0)
        if len(used) != len(slots):
            raise ValueError("two clients have the same slot")
        opened = self.open_slots(initial, used)
        opened.check(self._table)
        return FileStates(n, initial, opened, self._table)

    def _compare(self, settings: Mapping[str, Any], identity: Mapping[str, Any], done: int) -> None:
        for key, here in identity.items():
            saved, here = _without_none(settings.get(key)), _without_none(as_json(here))
            if key == "schedule" and saved and here:  # the schedule may be longer now
                saved, here = saved[:done], here[:done]
            if saved != here:
                raise OtherRunError(_difference(self.folder, key, saved, here))


def _identity(path: Path) -> tuple[int, int] | None:
    """Return the device and number of the file at a path; None if there is none."""
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def _without_none(value: Any) -> Any:
    """Return a table without the keys whose value is None."""
    return {k: v for k, v in value.items() if v is not None} if isinstance(value, dict) else value


def _difference(folder: Path, key: str, saved: Any, here: Any) -> str:
    """Return the message for a setting that has another value in the checkpoint."""
    while isinstance(here, dict):
        saved = saved if isinstance(saved, dict) else {}
        part = next(k for k in {**here, **saved} if saved.get(k) != here.get(k))
        key, saved, here = f"{key}.{part}", saved.get(part), here.get(part)
    name = key.removeprefix("fingerprint.")
    if key in ("fingerprint.data", "fingerprint.model"):
        return f"{folder} is a checkpoint of another task: its {name} differs; give another folder"
    if key == "schedule":
        return f"{folder} is a checkpoint of another run: its schedule differs in a round that is done"
    return f"{folder} is a checkpoint of another run: {name}={shown(saved)} there, {name}={shown(here)} here"
