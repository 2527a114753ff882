"""Files that could be made again: arrays, and compiled code.

The file of an array ends with a digest of its name and content. Where that does not match, the array is made
again. Compiled code is stored only where nobody but the user (and root) can write.
"""

from __future__ import annotations

import atexit
import hashlib
import io
import logging
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt

from fadamgc.files import user_folder, write_atomic

ROOM = 8 << 30  # bytes that arrays of one kind may take
DIGEST = hashlib.sha256().digest_size
LONGEST_HEADER = 1 << 12  # bytes of numpy's header of an array without named fields, and more
OLD = 24 * 3600  # seconds after which a temporary file is no longer being written
# The variable with which a process tells its workers where its temporary folder of compiled code is.
PROCESS_CODE = "FADAMGC_PROCESS_CODE"

Identity: TypeAlias = tuple[int, int, int, int]

log = logging.getLogger("fadamgc")
_verified: dict[Path, Identity] = {}  # mapped files whose digest this process has checked


def cache_folder() -> Path:
    """Where the cache is: $FADAMGC_CACHE, else ``fadamgc`` in the user's cache folder."""
    folder = os.environ.get("FADAMGC_CACHE")
    return Path(folder).expanduser() if folder else user_folder("cache")


def make_private(folder: Path) -> None:
    """Make a folder, and the missing ones above it, for the user alone; existing ones stay as they are."""
    for missing in reversed([part for part in (folder, *folder.parents) if not part.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


# Arrays.


def cached(name: str, make: Callable[[], npt.NDArray[Any]], mapped: bool = False) -> npt.NDArray[Any]:
    """Read an array from the cache; make and store it if its file is missing, damaged or without a digest.

    The digest of a mapped array is checked when a process first opens it, and again after its file was
    replaced or written to. Afterwards only the parts that are used are read.

    Args:
        name: of the file in the cache; it must change when ``make`` would return another array.
        make: makes the array.
        mapped: leave the array on disk, read-only, and read the parts that are used.
    """
    place = cache_folder() / f"{name}.npy"
    try:
        return _read(place, name, mapped)
    except FileNotFoundError:
        pass
    except Exception as error:  # numpy has many ways to say that a file is damaged
        log.info("%s is made again: %s", place, error)
    array = make()
    try:
        make_private(cache_folder())
        place.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(place, lambda file: _write(file, name, array))
        _make_room(place)
        if mapped:
            array = _read(place, name, mapped)  # so that it need not stay in memory
    except (OSError, ValueError) as error:
        log.info("%s is not kept: %s", place, error)
    return array


class _Digesting(io.RawIOBase):
    """A file that computes the digest of what is written to it."""

    def __init__(self, file: BinaryIO, name: str) -> None:
        self.file, self.digest = file, _digest_of(name)

    def write(self, data: Any) -> int:
        self.digest.update(data)
        return self.file.write(data)


def _digest_of(name: str) -> Any:
    """A digest that begins with the name, so that the file of another array does not match."""
    return hashlib.sha256(f"{name}\0".encode())


def _write(file: BinaryIO, name: str, array: npt.NDArray[Any]) -> None:
    """Write an array in numpy's format, followed by the digest."""
    content = _Digesting(file, name)
    np.lib.format.write_array(content, array, allow_pickle=False)
    file.write(content.digest.digest())


def _read(place: Path, name: str, mapped: bool) -> npt.NDArray[Any]:
    """Read an array that ``_write`` has written; ValueError if the file is not byte for byte the same."""
    with open(place, "rb") as file:
        facts = os.fstat(file.fileno())
        identity = (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns)
        if facts.st_size <= DIGEST:
            raise ValueError("it is too short")
        content = np.memmap(file, np.uint8, "r") if mapped else np.fromfile(file, np.uint8)
        if not mapped or _verified.get(place) != identity:
            digest = _digest_of(name)
            digest.update(content[:-DIGEST])
            if digest.digest() != content[-DIGEST:].tobytes():
                raise ValueError("it has no digest, or another content than its digest says")
            if mapped:
                _verified[place] = identity
        with suppress(OSError):  # arrays that were not used for the longest time are removed first
            os.utime(place, ns=(time.time_ns(), facts.st_mtime_ns))
    header = io.BytesIO(content[:LONGEST_HEADER].tobytes())
    version = np.lib.format.read_magic(header)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, columns_first, dtype = read(header)
    array: npt.NDArray[Any] = content[header.tell() : -DIGEST].view(dtype)
    return array.reshape(shape, order="F" if columns_first else "C")


def _make_room(newest: Path) -> None:
    """Remove arrays that were not used for long from the folder of the newest, if they take too much room."""
    found = [(file.stat(), file) for file in newest.parent.glob("*.npy") if file != newest]
    left = ROOM - newest.stat().st_size
    for facts, file in sorted(found, key=lambda pair: -max(pair[0].st_atime, pair[0].st_mtime)):
        left -= facts.st_size
        if left < 0:
            file.unlink(missing_ok=True)  # a process that has it open keeps it
    remove_old(newest.parent.glob(".*.tmp"))  # of processes that were killed


def remove_old(files: Iterable[Path]) -> None:
    """Remove the files that were last written more than a day ago."""
    for file in files:
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > OLD:
                file.unlink()


# Compiled code.


def check_private(path: Path) -> Path:
    """Refuse a file or folder that others own, can write, or could replace by one of theirs.

    As ``sshd`` does: the path and all folders above it belong to the user or to root, and nobody else can
    write to them. A folder above may be writable if it is sticky, as the temporary folder is, since others
    cannot rename there what is not theirs.

    Returns:
        The path without symbolic links; it is this one that was checked.

    Raises:
        PermissionError: which part of the path is not safe, and what to do.
    """
    path = Path(os.path.realpath(path))
    for part in (path, *path.parents):
        check_owner(part, os.lstat(part), sticky=part != path)
    return path


def check_owner(path: Path, facts: os.stat_result, sticky: bool = False) -> None:
    """Refuse a file or folder that others own or can write.

    Args:
        path: its name, for the message.
        facts: of the file or folder.
        sticky: accept a sticky folder that others can write to.
    """
    if not hasattr(os, "geteuid"):  # Windows has other rights
        return
    user = os.geteuid()
    if facts.st_uid not in (user, 0):
        raise PermissionError(f"{path} belongs to user {facts.st_uid}, not to user {user}")
    if facts.st_mode & 0o022 and not (sticky and facts.st_mode & stat.S_ISVTX):
        mode = stat.S_IMODE(facts.st_mode)
        raise PermissionError(f"{path} can be written by others (mode {mode:o}); chmod go-w {path}")


def read_private(path: Path) -> bytes:
    """Read a file that nobody but the user (or root) could have written; PermissionError otherwise."""
    path = Path(os.path.realpath(path.parent)) / path.name
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # no links, no waiting for a pipe
    with open(os.open(path, os.O_RDONLY | flags), "rb") as file:
        check_private(path.parent)
        check_owner(path, os.fstat(file.fileno()))  # of the file that is read, not of one put there since
        return file.read()


def code_folder() -> Path:
    """Return a folder for compiled code that nobody else can write to.

    It is ``code`` in the cache folder. Where others could write there, or the user cannot, it is a temporary
    folder of this process and of the workers that the process starts, and is removed at its end.
    """
    folder = cache_folder() / "code"
    try:
        make_private(folder)
        folder = check_private(folder)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} cannot be written")
        if stat.S_IMODE(folder.stat().st_mode) & 0o077:
            folder.chmod(0o700)
        return folder
    except OSError as error:
        return _process_code(error)


def _process_code(reason: OSError) -> Path:
    """The temporary code folder of this process, or of the one that has started it."""
    given = os.environ.get(PROCESS_CODE)
    with suppress(OSError):
        if given and stat.S_ISDIR((facts := os.lstat(given)).st_mode):
            check_owner(Path(given), facts)
            return Path(given)
    folder = Path(tempfile.mkdtemp(prefix="fadamgc-code-"))
    os.environ[PROCESS_CODE] = str(folder)
    atexit.register(_remove, folder, os.getpid())
    log.warning("compiled code is kept for this process only: %s", reason)
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # and not one that was forked from it
        shutil.rmtree(folder, ignore_errors=True)
