"""Files that are complete or absent, the user's folders, and locks on folders."""

from __future__ import annotations

import glob
import hashlib
import os
import platform
import re
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

from filelock import FileLock, Timeout

from fadamgc.errors import CheckpointError, CheckpointInUseError, UnwritableError, cut, shown

LOCK = ".lock"
DAY = 24 * 3600  # seconds after which a temporary file of another machine counts as a leftover
XDG = {"cache": "~/.cache", "config": "~/.config", "state": "~/.local/state"}  # defaults

_being_written: set[str] = set()  # names of this process's temporary files


def write_atomic(path: Path, data: bytes | Callable[[BinaryIO], object], private: bool = False) -> None:
    """Write a file so that readers see either the old or the new content, even after a crash.

    ``data`` is the content or a function that writes it. With ``private``, only the user can ever read it.
    """
    with replacing(path.parent, path.name, private) as (file, finish):
        if callable(data):
            data(file)
        else:
            file.write(data)
        finish(path)
    remove_leftovers(path.parent, path.name)


@contextmanager
def replacing(folder: Path, name: str, private: bool) -> Iterator[tuple[BinaryIO, Callable[[Path], None]]]:
    """Open a temporary file; yield it, and a function that closes the complete file and renames it."""
    temporary = folder / f".{name}.{os.getpid()}-{this_machine()}-{secrets.token_hex(4)}.tmp"
    _being_written.add(temporary.name)
    try:
        mode = 0o600 if private else 0o666
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:

            def finish(path: Path) -> None:
                file.flush()
                os.fsync(file.fileno())
                file.close()  # Windows does not rename an open file
                os.replace(temporary, path)
                sync_folder(folder)

            yield file, finish
    finally:
        temporary.unlink(missing_ok=True)
        _being_written.discard(temporary.name)


def sync_folder(folder: Path) -> None:
    """Write the folder's list of files to the disk; do nothing where a folder cannot be opened (Windows)."""
    try:
        descriptor = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove temporary files of ``name`` that killed processes left; those of running processes stay.

    Temporary files of another machine or container stay for a day: its processes cannot be seen from here.
    """
    for path in folder.glob(f".{glob.escape(name)}*.tmp"):
        owner = re.fullmatch(r".*\.(\d+)-([0-9a-f]{8})-[0-9a-f]{8}\.tmp", path.name)
        with suppress(OSError):
            if owner and owner[2] == this_machine():
                abandoned = path.name not in _being_written and not _alive(int(owner[1]))
            else:
                abandoned = time.time() - path.stat().st_mtime > DAY
            if abandoned:
                path.unlink(missing_ok=True)


@cache
def this_machine() -> str:
    """Return a short name for this machine or container, in which process numbers are unique."""
    try:
        namespace = os.readlink("/proc/self/ns/pid")
    except OSError:
        namespace = ""
    return hashlib.sha256(f"{platform.node()} {namespace}".encode()).hexdigest()[:8]


def _alive(pid: int) -> bool:
    """Whether another process has this number (for this process, see ``_being_written``)."""
    if pid == os.getpid():
        return False
    try:
        if os.name != "nt":  # on Windows, os.kill would end the process
            os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        pass  # a process of another user, or unknown
    return True


def user_folder(kind: Literal["cache", "config", "state"]) -> Path:
    """Return this package's folder in a folder of the user, such as $XDG_CACHE_HOME/fadamgc."""
    return Path(os.environ.get(f"XDG_{kind.upper()}_HOME") or XDG[kind]).expanduser() / "fadamgc"


def make_folder(folder: Path, private: bool = False) -> None:
    """Make a folder, or check that an existing one can be written to, before work is done for it.

    With ``private``, only the user can enter a new folder; an existing one keeps its permissions.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # it has no name, so nothing is left behind
            pass
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise unwritable(folder, error) from error


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter (0700); tighten an existing one that the user owns."""
    make_folder(folder, private=True)
    try:
        status = folder.stat()
        is_owner = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
        if is_owner and stat.S_IMODE(status.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made private: {error.strerror or error}") from error


def unwritable(path: Path, error: OSError | ValueError) -> UnwritableError:
    """Return the error for a folder or a file that cannot be written, such as on a full disk."""
    name = shown(str(path)) if isinstance(error, ValueError) else cut(str(path))
    return UnwritableError(f"{name} cannot be written: {getattr(error, 'strerror', None) or error}")


def lock(folder: Path, seconds: float = 0.0) -> ExitStack:
    """Lock an existing folder until the end of a ``with`` block, or until ``close``.

    Wait up to ``seconds`` if another run has the lock. A process that is killed releases its locks. Two runs
    in one process exclude each other as well.
    """
    stack = ExitStack()
    try:
        stack.enter_context(FileLock(folder / LOCK, timeout=seconds, thread_local=False))
    except Timeout:
        waited = f" (waited {seconds:g} s)" if seconds else ""
        raise CheckpointInUseError(
            f"{folder} is in use by another run, in this process or another{waited}; wait for it, or give "
            "another folder"
        ) from None
    except OSError as error:
        raise unwritable(folder, error) from error
    return stack


def as_json(value: Any) -> Any:
    """Return a value as it would be read back from JSON: tuples become lists, at every depth."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, (tuple, list)) else value
