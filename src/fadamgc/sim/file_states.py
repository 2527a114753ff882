"""The clients' states in equal slots of one file, which a checkpoint can refer to."""

from __future__ import annotations

import mmap
import os
import tempfile
import weakref
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from fadamgc.bundle import tensor_bytes
from fadamgc.errors import CheckpointError, UnwritableError
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.cost import state_bytes
from fadamgc.files import private_folder, sync_folder
from fadamgc.tree import leaves, map_leaves, rebuild

FILE = "states.bin"
PAGE = mmap.ALLOCATIONGRANULARITY


class Slots:
    """Equal slots for states in one file.

    A slot is mapped into memory while its state is in use. A new state goes to a free slot, and a slot that
    the last checkpoint names is not free, even if its client has a newer state. So a round that fails leaves
    the old states as they were, and a checkpoint only has to store the slot of each client.

    All states have the types and shapes of ``like``. ``used`` are the slots in use, with their checksums, to
    resume with the file in the folder; None starts a new file. Without a folder, the file has no name and is
    removed with this object. Without ``writing`` it is opened for reading only.
    """

    def __init__(
        self, like: Any, folder: Path | None = None, used: dict[int, int] | None = None, writing: bool = True
    ) -> None:
        self.like, self.folder = like, folder
        self.path = Path(tempfile.gettempdir() if folder is None else folder) / FILE  # for messages
        self.crc: dict[int, int] = dict(used or {})
        self._size = state_bytes(like)
        self._slot = -(-self._size // PAGE) * PAGE
        self._file = _open(folder, new=used is None, writing=writing)
        weakref.finalize(self, os.close, self._file)
        self._end = max(self.crc, default=-1) + 1
        if self.crc and (self._end - 1) * self._slot + self._size > os.fstat(self._file).st_size:
            raise CheckpointError(f"{self.path} is damaged: it is too short for the states that were saved")
        self._free = sorted(set(range(self._end)) - self.crc.keys(), reverse=True) if self._slot else []
        self._named: set[int] = set(self.crc)  # slots that the last checkpoint names
        self._released: set[int] = set()  # slots that become free with the next checkpoint
        self._closed = not writing
        self.before_write: Callable[[], None] = lambda: None  # raises an error to refuse a write

    def put(self, state: Any) -> int:
        """Write a state into a free slot, and return the slot."""
        self.before_write()
        slot = self._free.pop() if self._free else self._end
        self._end = max(self._end, slot + 1)
        place, crc = slot * self._slot, 0
        try:
            for tensor in leaves(state):
                data = tensor_bytes(tensor)
                crc = zlib.crc32(data, crc) if self.folder is not None else 0
                while data:
                    written = os.pwrite(self._file, data, place)
                    place, data = place + written, data[written:]
        except OSError as error:
            self._free.append(slot)
            reason = error.strerror or error
            raise UnwritableError(f"a client's state cannot be written to {self.path}: {reason}") from None
        self.crc[slot] = crc
        return slot

    def get(self, slot: int) -> Any:
        """Return the state in a slot. Changing its tensors does not change the file (copy on write)."""
        if not self._size:  # an algorithm whose clients keep nothing
            return self.like
        state = self._mapped(slot)
        if self._closed:
            # Another run may write to the file from now on: copy the state, then compare its checksum.
            state = map_leaves(torch.clone, state)
            if _checksum(state) != self.crc[slot]:
                raise CheckpointError(
                    f"{self.path} no longer has the states of this run: a later run has replaced them, or "
                    "the file is damaged. Save a run with run.save before it is extended in its checkpoint "
                    "folder, or read the later run with fadamgc.load_run"
                )
        return state

    def free(self, slots: Iterable[int]) -> None:
        """Free slots; slots that the last checkpoint names become free with the next checkpoint."""
        for slot in slots:
            if slot in self._named:
                self._released.add(slot)
            else:
                self._free.append(slot)

    def expect(self, slots: Iterable[int]) -> None:
        """Ask the operating system to read these slots in the background."""
        if hasattr(os, "posix_fadvise"):
            for slot in slots:
                os.posix_fadvise(self._file, slot * self._slot, self._slot, os.POSIX_FADV_WILLNEED)

    def sync(self) -> None:
        """Write everything that was put into slots to the disk."""
        os.fsync(self._file)
        if self.folder is not None:
            sync_folder(self.folder)

    def named(self, slots: Iterable[int]) -> None:
        """Record that a checkpoint names these slots, and the slots named before that were not freed."""
        self._named.update(slots)
        self._named -= self._released
        self._free.extend(self._released)
        self._released.clear()

    def close(self) -> None:
        """Stop writing. States can be read until another run replaces them in the file."""
        self._closed = True

    def check(self, slots: Mapping[int, int]) -> None:
        """Refuse a file in which a client's state is not the one that was saved."""
        for client, slot in slots.items():
            if _checksum(self._mapped(slot) if self._size else ()) != self.crc[slot]:
                raise CheckpointError(
                    f"{self.path} is damaged: the state of client {client} is not the one that was "
                    "saved; start again in another folder"
                )

    def _mapped(self, slot: int) -> Any:
        try:
            mapped = mmap.mmap(self._file, self._size, access=mmap.ACCESS_COPY, offset=slot * self._slot)
        except (ValueError, OSError) as error:
            raise CheckpointError(f"{self.path} is damaged: it has been cut ({error})") from None
        fields, at = [], 0
        for like in leaves(self.like):
            count = like.numel()
            tensor = torch.frombuffer(mapped, dtype=like.dtype, count=count, offset=at) if count else like
            fields.append(tensor.view(like.shape).to(like.device))
            at += like.nbytes
        return rebuild(self.like, fields)


def _open(folder: Path | None, new: bool, writing: bool) -> int:
    """Open the file of slots; a new file replaces an old one, which its readers can still read."""
    try:
        if folder is None:
            with tempfile.TemporaryFile(prefix="fadamgc-states-") as file:
                return os.dup(file.fileno())
        path = folder / FILE
        if not writing:
            return os.open(path, os.O_RDONLY)
        private_folder(folder)
        if new:
            path.unlink(missing_ok=True)
        opened = os.open(path, os.O_RDWR | (os.O_CREAT | os.O_EXCL if new else 0), 0o600)
        if hasattr(os, "fchmod"):
            os.fchmod(opened, 0o600)
        return opened
    except FileNotFoundError:
        raise CheckpointError(f"{folder}/{FILE}, the clients' states, does not exist") from None
    except OSError as error:
        place, reason = folder or tempfile.gettempdir(), error.strerror or error
        raise CheckpointError(f"the clients' states in {place} cannot be opened: {reason}") from None


class FileStates(ClientStates):
    """The states of all n clients, in slots of a file; ``table`` has the slots of states to resume with."""

    def __init__(self, n: int, initial: Any, slots: Slots, table: Mapping[int, int] | None = None) -> None:
        super().__init__(n, initial, table)
        self.slots = slots
        self.changed.clear()

    def stage(self, state: Any) -> int:
        """Write a state into a free slot, and return the slot."""
        return self.slots.put(state)

    def update(self, staged: Mapping[int, int]) -> None:
        """Replace the states of some clients by staged ones."""
        old = [self._states[i] for i in staged if i in self._states]
        super().update(staged)
        self.slots.free(old)

    def discard(self, staged: Iterable[int]) -> None:
        """Forget staged states."""
        self.slots.free(staged)

    def expect(self, clients: Iterable[int]) -> None:
        """Ask the operating system to read the states of these clients in the background."""
        self.slots.expect({self._states[i] for i in clients if i in self._states})

    def slot(self, client: int) -> int:
        """Return the slot of a client that has taken part."""
        return int(self._states[client])

    def __reduce__(self) -> Any:
        # The file belongs to this process; another process gets a copy of the states.
        states = {i: map_leaves(torch.clone, self[i]) for i in self.participants}
        return ClientStates, (self.n, self.initial, states)

    def _read(self, stored: int) -> Any:
        return self.slots.get(stored)


def _checksum(state: Any) -> int:
    crc = 0
    for tensor in leaves(state):
        crc = zlib.crc32(tensor_bytes(tensor), crc)
    return crc
