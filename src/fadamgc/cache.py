"""The cache: arrays and compiled code, which can be computed again.

The file of an array ends with a digest of its name and content. If the digest does not match, the array is
computed again. Compiled code is stored only where nobody except the user and root can write.
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
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from fadamgc.files import DAY, user_folder, write_atomic

ROOM = 8 << 30  # bytes; limit for all arrays in one folder
DIGEST = hashlib.sha256().digest_size
LONGEST_HEADER = 1 << 12  # bytes; numpy's header of an array without named fields is shorter
PROCESS_CODE = "FADAMGC_PROCESS_CODE"  # variable that passes a temporary code folder to worker processes

log = logging.getLogger("fadamgc")
# Mapped files whose digest this process has checked: device, inode, size and time of the last change.
_verified: dict[Path, tuple[int, int, int, int]] = {}


def cache_folder() -> Path:
    """Return the cache folder: $FADAMGC_CACHE, else ``fadamgc`` in the user's cache folder."""
    folder = os.environ.get("FADAMGC_CACHE")
    return Path(folder).expanduser() if folder else user_folder("cache")


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, which only the user can enter; existing ones do not change."""
    for missing in reversed([part for part in (folder, *folder.parents) if not part.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


# Arrays.


def cached(name: str, make: Callable[[], npt.NDArray[Any]], mapped: bool = False) -> npt.NDArray[Any]:
    """Read an array from the cache; compute and store it if its file is missing, damaged or has no digest.

    ``name`` must change when ``make`` would return another array. A ``mapped`` array stays on disk and is
    read-only; only the parts that are used are read. Its digest is checked when a process first opens the
    file, and again after the file has changed.
    """
    path = cache_folder() / f"{name}.npy"
    try:
        return _read(path, name, mapped)
    except FileNotFoundError:
        pass
    except Exception as error:  # numpy raises many kinds of errors for a damaged file
        log.info("%s is computed again: %s", path, error)
    array = make()
    try:
        make_private(cache_folder())
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, lambda file: _write(file, name, array))
        _make_room(path)
        if mapped:
            array = _read(path, name, mapped)  # mapped from the file, instead of the copy in memory
    except (OSError, ValueError) as error:
        log.info("%s is not stored: %s", path, error)
    return array


def _digest(name: str, *content: Any) -> bytes:
    """Return the digest of a file's content; the name is included, so that another array does not match."""
    sha = hashlib.sha256(f"{name}\0".encode())
    for part in content:
        sha.update(part)
    return sha.digest()


def _write(file: BinaryIO, name: str, array: npt.NDArray[Any]) -> None:
    """Write an array in numpy's format, followed by the digest."""
    array = np.asarray(array, order="C")
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, np.lib.format.header_data_from_array_1_0(array))
    content: tuple[Any, ...] = header.getvalue(), array.reshape(-1).view(np.uint8)
    for part in (*content, _digest(name, *content)):
        file.write(part)


def _read(path: Path, name: str, mapped: bool) -> npt.NDArray[Any]:
    """Read an array that ``_write`` has written; raise ValueError if the file has changed."""
    with open(path, "rb") as file:
        status = os.fstat(file.fileno())
        identity = (status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns)
        if status.st_size <= DIGEST:
            raise ValueError("it is too short")
        content = np.memmap(file, np.uint8, "c") if mapped else np.fromfile(file, np.uint8)
        if not mapped or _verified.get(path) != identity:
            if _digest(name, content[:-DIGEST]) != content[-DIGEST:].tobytes():
                raise ValueError("it has no digest, or one that does not match its content")
            if mapped:
                _verified[path] = identity
        with suppress(OSError):  # _make_room removes the least recently used arrays
            os.utime(path, ns=(time.time_ns(), status.st_mtime_ns))
    header = io.BytesIO(content[:LONGEST_HEADER].tobytes())
    np.lib.format.read_magic(header)
    shape, columns_first, dtype = np.lib.format.read_array_header_1_0(header)
    array: npt.NDArray[Any] = content[header.tell() : -DIGEST].view(dtype)
    return array.reshape(shape, order="F" if columns_first else "C")


def _make_room(newest: Path) -> None:
    """Remove the least recently used arrays from the newest array's folder until all fit into ``ROOM``."""
    others = [(file.stat(), file) for file in newest.parent.glob("*.npy") if file != newest]
    room = ROOM - newest.stat().st_size
    for status, file in sorted(others, key=lambda pair: -max(pair[0].st_atime, pair[0].st_mtime)):
        room -= status.st_size
        if room < 0:
            file.unlink(missing_ok=True)  # a process that has it open can still read it
    remove_old(newest.parent.glob(".*.tmp"))  # temporary files of killed processes


def remove_old(files: Iterable[Path]) -> None:
    """Remove the files that were last written more than a day ago."""
    for file in files:
        with suppress(OSError):
            if time.time() - file.stat().st_mtime > DAY:
                file.unlink()


# Compiled code.


def check_private(path: Path) -> Path:
    """Refuse a path that other users own, can write or could replace; return it without symbolic links.

    As ``sshd`` demands, the path and all folders above it must belong to the user or to root, and nobody else
    may write to them. A folder above may be writable if it is sticky, such as /tmp: there, others cannot
    rename the user's files. The PermissionError names the unsafe part and the remedy.
    """
    path = Path(os.path.realpath(path))
    for part in (path, *path.parents):
        check_owner(part, os.lstat(part), sticky=part != path)
    return path


def check_owner(path: Path, status: os.stat_result, sticky: bool = False) -> None:
    """Refuse a file or folder that other users own or can write; ``sticky`` accepts a sticky folder."""
    if not hasattr(os, "geteuid"):  # Windows has other permissions
        return
    user = os.geteuid()
    if status.st_uid not in (user, 0):
        raise PermissionError(f"{path} belongs to user {status.st_uid}, not to user {user}")
    if status.st_mode & 0o022 and not (sticky and status.st_mode & stat.S_ISVTX):
        mode = stat.S_IMODE(status.st_mode)
        raise PermissionError(f"{path} can be written by others (mode {mode:o}); chmod go-w {path}")


def read_private(path: Path) -> bytes:
    """Read a file; raise PermissionError if anybody except the user and root could have written it."""
    path = Path(os.path.realpath(path.parent)) / path.name
    flags = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)  # no links, no waiting for a pipe
    with open(os.open(path, os.O_RDONLY | flags), "rb") as file:
        check_private(path.parent)
        check_owner(path, os.fstat(file.fileno()))  # checks the open file: the path may name another by now
        return file.read()


def code_folder() -> Path:
    """Return a folder for compiled code that only the user can write to.

    This is ``code`` in the cache folder. If other users could write there, or the user cannot, it is a
    temporary folder for this process and its workers, which is removed when the process ends.
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
    """Return the temporary code folder of this process, or of the process that started it."""
    inherited = os.environ.get(PROCESS_CODE)
    with suppress(OSError):
        if inherited and stat.S_ISDIR((status := os.lstat(inherited)).st_mode):
            check_owner(Path(inherited), status)
            return Path(inherited)
    folder = Path(tempfile.mkdtemp(prefix="fadamgc-code-"))
    os.environ[PROCESS_CODE] = str(folder)
    atexit.register(_remove, folder, os.getpid())
    log.warning("compiled code is stored for this process only: %s", reason)
    return folder


def _remove(folder: Path, process: int) -> None:
    if os.getpid() == process:  # not in a forked process
        shutil.rmtree(folder, ignore_errors=True)
