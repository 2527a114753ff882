"""The clients' states, in memory or in a file; a client that has never taken part costs nothing."""

from __future__ import annotations

import logging
import mmap
import os
import shutil
import tempfile
import weakref
import zlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, overload

import torch
from torch import Tensor

from fadamgc.errors import CheckpointError, InputError
from fadamgc.machine import memory

FILE = "states.bin"
PAGE = mmap.ALLOCATIONGRANULARITY

log = logging.getLogger("fadamgc")


class ClientStates(Sequence[Any]):
    """The states of all n clients, in memory."""

    def __init__(self, n: int, initial: Any, states: Mapping[int, Any] | None = None) -> None:
        self.n, self.initial = n, initial
        self._states: dict[int, Any] = dict(states or {})

    def __len__(self) -> int:
        return self.n

    @overload
    def __getitem__(self, i: int) -> Any: ...
    @overload
    def __getitem__(self, i: slice) -> list[Any]: ...
    def __getitem__(self, i: int | slice) -> Any:
        if isinstance(i, slice):
            return [self[j] for j in range(*i.indices(self.n))]
        if not -self.n <= i < self.n:
            raise IndexError(f"client {i} of {self.n}")
        kept = self._states.get(i % self.n)
        return self.initial if kept is None else self._read(kept)

    @property
    def participants(self) -> tuple[int, ...]:
        """The clients that have a state of their own."""
        return tuple(sorted(self._states))

    # A round's new states are staged one by one, and take the place of the old ones all at once.

    def stage(self, state: Any) -> Any:
        """Keep a state for an ``update`` to come."""
        return state

    def update(self, staged: Mapping[int, Any]) -> None:
        """Replace the states of some clients by staged ones."""
        self._states.update(staged)

    def drop(self, staged: Iterable[Any]) -> None:
        """Forget what was staged."""

    def _read(self, kept: Any) -> Any:
        return kept


class FileStates(ClientStates):
    """The states of all n clients, in one file of equal slots.

    A slot is mapped into memory while its state is in use, and never written while anything refers to
    it: a new state goes to a free slot. So a round that fails leaves the old states as they were, and a
    checkpoint has only to remember which slot is whose.

    Args:
        n: clients.
        initial: the state of a client that has never taken part.
        folder: where the file is; None is a folder of its own, removed with this object.
        checked: keep a checksum of every slot, for a checkpoint.
        slots: what ``table`` gave, to go on with the file that is there.
    """

    def __init__(
        self,
        n: int,
        initial: Any,
        folder: Path | None = None,
        checked: bool = False,
        slots: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        super().__init__(n, initial)
        self.checked = checked
        self.folder = Path(tempfile.mkdtemp(prefix="fadamgc-states-")) if folder is None else folder
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self.folder / FILE, os.O_RDWR | os.O_CREAT, 0o644)
        except OSError as error:
            raise InputError(f"states={str(self.folder)!r} cannot be written: {error.strerror}") from None
        weakref.finalize(self, _close, self._file, self.folder if folder is None else None)
        self._slot = -(-_size(initial) // PAGE) * PAGE
        self._crc: dict[int, int] = {}
        self._states.update({int(i): slot for i, (slot, _) in (slots or {}).items()})
        self._crc.update({pair[0]: pair[1] for pair in (slots or {}).values()})
        self._end = max(self._states.values(), default=-1) + 1
        self._free = sorted(set(range(self._end)) - set(self._states.values()), reverse=True)
        self._saved: set[int] = set(self._states.values())  # of the last checkpoint: not to be written
        self._released: set[int] = set()  # free, but for the last checkpoint
        if slots is not None:
            self._check()

    def stage(self, state: Any) -> int:
        """Write a state into a free slot."""
        slot = self._free.pop() if self._free else self._end
        self._end = max(self._end, slot + 1)
        place, crc = slot * self._slot, 0
        for tensor in state:
            data = _bytes(tensor)
            crc = zlib.crc32(data, crc) if self.checked else 0
            try:
                while data:
                    written = os.pwrite(self._file, data, place)
                    place, data = place + written, data[written:]
            except OSError as error:
                self._free.append(slot)
                raise CheckpointError(
                    f"a client's state cannot be written to {self.folder / FILE}: {error.strerror}"
                ) from None
        self._crc[slot] = crc
        return slot

    def update(self, staged: Mapping[int, int]) -> None:
        """Replace the states of some clients by staged ones."""
        old = [self._states[i] for i in staged if i in self._states]
        super().update(staged)
        self.drop(old)

    def drop(self, staged: Iterable[int]) -> None:
        """Free slots, those of the last checkpoint as soon as there is another."""
        for slot in staged:
            if slot in self._saved:
                self._released.add(slot)
            else:
                self._free.append(slot)

    def expect(self, clients: Iterable[int]) -> None:
        """Have the system read these states while something else is being computed."""
        if hasattr(os, "posix_fadvise"):
            for slot in {self._states[i] for i in clients if i in self._states}:
                os.posix_fadvise(self._file, slot * self._slot, self._slot, os.POSIX_FADV_WILLNEED)

    def table(self) -> dict[str, list[int]]:
        """Which slot is whose, with its checksum; what is written by now is on the disk."""
        os.fsync(self._file)
        return {str(i): [slot, self._crc[slot]] for i, slot in self._states.items()}

    def saved(self) -> None:
        """The ``table`` is in a checkpoint: its slots are to stay, others may go."""
        self._saved = set(self._states.values())
        self._free.extend(self._released - self._saved)
        self._released.clear()

    def _read(self, kept: int) -> Any:
        if not self._slot:  # an algorithm whose clients keep nothing
            return self.initial
        mapped = mmap.mmap(self._file, _size(self.initial), access=mmap.ACCESS_COPY, offset=kept * self._slot)
        fields, at = [], 0
        for like in self.initial:
            count = like.numel()
            tensor = torch.frombuffer(mapped, dtype=like.dtype, count=count, offset=at) if count else like
            fields.append(tensor.view(like.shape).to(like.device))
            at += count * like.element_size()
        return type(self.initial)(*fields)

    def _check(self) -> None:
        enough = os.fstat(self._file).st_size
        for i, slot in self._states.items():
            ends = slot * self._slot + _size(self.initial)
            crc = 0
            if ends <= enough:
                for tensor in self._read(slot):
                    crc = zlib.crc32(_bytes(tensor), crc)
            if ends > enough or crc != self._crc[slot]:
                raise CheckpointError(
                    f"{self.folder / FILE} is damaged: the state of client {i} is not the one that was "
                    "saved; start again in another folder"
                )


def _bytes(tensor: Tensor) -> memoryview:
    array: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def _size(state: Any) -> int:
    return sum(int(t.numel()) * int(t.element_size()) for t in state)


def _close(file: int, folder: Path | None) -> None:
    os.close(file)
    if folder is not None:
        shutil.rmtree(folder, ignore_errors=True)


def too_large(initial: Any, clients: int) -> bool:
    """Whether the states of so many clients would take more than half of the memory."""
    there = memory()
    return there is not None and clients * _size(initial) > there / 2
