"""Files that are complete or absent.

A *bundle* is a folder with tensors (safetensors) and everything else (JSON). The JSON file is written last
and names the tensor file with its digest, so a process that is killed at any moment leaves the previous
bundle or the new one. A *journal* is a file of JSON lines that only grows; a bundle names how much of it
counts, with a digest, so a line that was written but never named does not count.
"""

from __future__ import annotations

import glob
import gzip
import hashlib
import io
import json
import os
import platform
import re
import secrets
import stat
import tempfile
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from filelock import BaseFileLock, FileLock, Timeout
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fadamgc.errors import CheckpointError, CheckpointInUseError, UnwritableError, cut, shown

FORMAT = 1
LOCK = ".lock"
OLD = 24 * 3600  # seconds after which a temporary file of another machine is a leftover
CHUNK = 1 << 22  # bytes that are read at a time
MOST_UNPACKED = 1 << 30  # bytes of a packed record; records of real runs pack at most 100 times smaller
MOST_RATIO, SMALL = 300, 1 << 20


def write_atomic(path: Path, data: bytes | Callable[[BinaryIO], object], private: bool = False) -> None:
    """Write a file so that a reader sees the old content or the new, whatever happens meanwhile.

    Args:
        path: the file.
        data: the content, or a function that writes it.
        private: at no moment can anybody but the user read the file.
    """
    with _replacing(path.parent, path.name, private) as (file, finish):
        if callable(data):
            data(file)
        else:
            file.write(data)
        finish(path)
    remove_leftovers(path.parent, path.name)


_being_written: set[str] = set()  # names of temporary files of this process


@contextmanager
def _replacing(folder: Path, name: str, private: bool) -> Iterator[tuple[BinaryIO, Callable[[Path], None]]]:
    """Open a temporary file; yield it with a function that closes the complete file and gives it its name."""
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
        opened = os.open(folder, os.O_RDONLY)
    except PermissionError:
        return
    try:
        os.fsync(opened)
    finally:
        os.close(opened)


def remove_leftovers(folder: Path, name: str) -> None:
    """Remove temporary files of a name that killed processes have left; those of living processes stay.

    Whether a process of another machine or container lives is not known: its files stay for a day.
    """
    for path in folder.glob(f".{glob.escape(name)}*.tmp"):
        found = re.fullmatch(r".*\.(\d+)-([0-9a-f]{8})-[0-9a-f]{8}\.tmp", path.name)
        with suppress(OSError):
            if found and found[2] == this_machine():
                left = path.name not in _being_written and not _alive(int(found[1]))
            else:
                left = time.time() - path.stat().st_mtime > OLD
            if left:
                path.unlink(missing_ok=True)


@cache
def this_machine() -> str:
    """A short name for this machine, or this container: process numbers mean something only in it."""
    try:
        numbers = os.readlink("/proc/self/ns/pid")
    except OSError:
        numbers = ""
    return hashlib.sha256(f"{platform.node()} {numbers}".encode()).hexdigest()[:8]


def _alive(pid: int) -> bool:
    """Whether another process has this number. This process knows its own temporary files."""
    if pid == os.getpid():
        return False
    if os.name == "nt":
        return True  # unknown: on Windows, os.kill would end the process
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except OSError:
        return True  # a process of another user, or unknown
    return True


def config_file() -> Path:
    """The user's settings, if there are any."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "fadamgc" / "config.toml"


def make_folder(folder: Path, private: bool = False) -> None:
    """Make a folder and see that it can be written to, before work is done for it.

    Args:
        folder: the folder; one that exists keeps its permissions.
        private: only the user can enter a folder that is made here.
    """
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        folder.mkdir(mode=0o700 if private else 0o777, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):  # no name, so nothing is left behind
            pass
    except (OSError, ValueError) as error:  # ValueError: a name that no file can have
        raise unwritable(folder, error) from error


def private_folder(folder: Path) -> None:
    """Make a folder that only its owner can enter (0700); tighten an existing one that the user owns."""
    make_folder(folder, private=True)
    try:
        status = folder.stat()
        own = not hasattr(os, "geteuid") or status.st_uid == os.geteuid()
        if own and stat.S_IMODE(status.st_mode) != 0o700:
            folder.chmod(0o700)
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be made private: {error.strerror or error}") from error


def unwritable(path: Path, error: OSError | ValueError) -> UnwritableError:
    """The error for a folder or a file that cannot be written, such as on a full disk."""
    if isinstance(error, ValueError):
        return UnwritableError(f"{shown(str(path))} cannot be written: {error}")
    return UnwritableError(f"{cut(str(path))} cannot be written: {error.strerror or error}")


# Bundles.


class LazyTensor(NamedTuple):
    """A tensor that is read when it is written, so that not all of them are in memory at the same time."""

    like: Tensor  # of the same type and shape; its numbers are not looked at
    read: Callable[[], Tensor]


def write_bundle(
    folder: Path,
    name: str,
    content: Mapping[str, Any],
    tensors: Mapping[str, Tensor | LazyTensor],
    *,
    format: int = FORMAT,
    private: bool = False,
) -> None:
    """Write ``name.json`` and its tensors into a folder, replacing an earlier bundle of that name.

    Tensors are written to the file one after the other; no copy of all of them is made. Only the user can
    read the tensor file, because clients' states reveal something about their data; with ``private`` the same
    is true of the JSON file.
    """
    make_folder(folder, private)
    file, digest = None, None
    try:
        if tensors:
            with _replacing(folder, name, private=True) as (stream, finish):
                digest = _write_tensors(stream, tensors)
                file = f"{name}-{digest[:16]}.safetensors"
                finish(folder / file)
        body = {"format": format, "tensors": file, "tensors_sha256": digest, **content}
        text = _lines({"sha256": _digest(body), **body})
        write_atomic(folder / f"{name}.json", text.encode(), private)
    except OSError as error:
        raise unwritable(folder, error) from error
    remove_other_tensors(folder, name, file)
    remove_leftovers(folder, name)


def remove_other_tensors(folder: Path, name: str, file: str | None) -> None:
    """Remove the tensor files of earlier bundles of a name."""
    for other in folder.glob(f"{glob.escape(name)}-*.safetensors"):
        if other.name != file:
            with suppress(OSError):
                other.unlink(missing_ok=True)


_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.complex64: "C64",
}


def _write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor | LazyTensor]) -> str:
    """Write tensors in the format of safetensors, one at a time; return the digest of the file.

    The library's own writer wants all tensors at once and gives no digest.
    """
    likes = {key: t.like if isinstance(t, LazyTensor) else t for key, t in tensors.items()}
    order = sorted(likes, key=lambda key: -likes[key].element_size())  # so that every tensor is aligned
    header: dict[str, Any] = {}
    end = 0
    for key in order:
        like = likes[key]
        if like.dtype not in _NAMES:
            raise CheckpointError(f"{key} of type {like.dtype} cannot be saved; use a type such as float32")
        begin, end = end, end + like.numel() * like.element_size()
        header[key] = {"dtype": _NAMES[like.dtype], "shape": list(like.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sha = hashlib.sha256()
    for part in _parts(len(text).to_bytes(8, "little") + text, order, tensors):
        sha.update(part)
        file.write(part)
    return sha.hexdigest()


def _parts(
    first: bytes, order: Iterable[str], tensors: Mapping[str, Tensor | LazyTensor]
) -> Iterator[bytes | memoryview]:
    yield first
    for key in order:
        value = tensors[key]
        yield tensor_bytes(value.read() if isinstance(value, LazyTensor) else value)


def tensor_bytes(tensor: Tensor) -> memoryview:
    """The numbers of a tensor as bytes; a contiguous tensor on the CPU is not copied."""
    array: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def has_bundle(folder: Path, name: str) -> bool:
    """Whether a bundle was ever completed there."""
    return os.path.exists(_bundle(folder, name))


def _bundle(folder: Path, name: str) -> Path:
    """Its file; one that was packed for keeping is read where it is the only one."""
    plain, packed = folder / f"{name}.json", folder / f"{name}.json.gz"
    return packed if os.path.exists(packed) and not os.path.exists(plain) else plain


def read_bundle(
    folder: Path, name: str, formats: tuple[int, ...] = (FORMAT,)
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a bundle back, refusing anything that is not byte for byte what was written."""
    path = _bundle(folder, name)
    try:
        data = path.read_bytes()
        body = json.loads(_unpacked(path, data) if path.suffix == ".gz" else data)
        content = body if isinstance(body, dict) else {}
        digest = _digest({key: value for key, value in content.items() if key != "sha256"})
    except (FileNotFoundError, NotADirectoryError):
        others = sorted(other.name for other in folder.glob("*.json"))
        hint = f"; the folder holds {', '.join(others)}" if others else ""
        raise CheckpointError(f"{path} does not exist{hint}") from None
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read (nested too deeply); it is damaged") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); it is truncated or not of this kind"
        ) from error
    if not isinstance(body, dict) or not {"sha256", "format", "tensors"} <= body.keys():
        raise CheckpointError(f"{path} is not a file of fadamgc: it has no digest and format")
    if body["format"] not in formats:
        known = " and ".join(map(str, formats))
        raise CheckpointError(f"{path} has format {shown(body['format'])}; this version reads format {known}")
    if digest != body["sha256"]:
        raise CheckpointError(
            f"{path} was altered after it was written: its content does not match its sha256"
        )
    if body["tensors"] is None:
        return body, {}
    file = body["tensors"]
    if not isinstance(file, str) or not re.fullmatch(r"[\w-]+\.safetensors", file, re.ASCII):
        raise CheckpointError(f"{path} names no tensor file in its folder: {shown(file)}")
    return body, _read_tensors(folder / file, path, body.get("tensors_sha256"))


def _unpacked(path: Path, data: bytes) -> bytes:
    """Unpack the data of a file, unless they are far larger unpacked than those of any record."""
    most = min(MOST_UNPACKED, max(SMALL, MOST_RATIO * len(data)))
    with gzip.open(io.BytesIO(data)) as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise CheckpointError(
            f"{path} unpacks from {len(data)} bytes to more than {most}, so it is not a record"
        )
    return content


def _read_tensors(path: Path, named_by: Path, digest: Any) -> dict[str, Tensor]:
    sha, size = hashlib.sha256(), 0
    try:
        with open(path, "rb") as file:
            while chunk := file.read(CHUNK):
                sha.update(chunk)
                size += len(chunk)
    except OSError as error:
        raise CheckpointError(f"{path}, named by {named_by}, cannot be read: {error.strerror}") from error
    if sha.hexdigest() != digest:
        raise CheckpointError(
            f"{path} was truncated or altered after it was written: its {size} bytes do not "
            f"match the sha256 in {named_by}"
        )
    try:
        with safe_open(path, framework="pt") as file:
            # Copies: what is read must not change if somebody writes to the file later.
            return {key: file.get_tensor(key).clone() for key in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


# Journals.


class Journal:
    """A file of JSON lines that only grows, with the digest of all lines so far.

    Adding a line costs what that line costs, however long the file is.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size, self._sha = path, 0, hashlib.sha256()

    def mark(self) -> dict[str, Any]:
        """How much of the file counts, for the bundle that names it."""
        return {"bytes": self.size, "sha256": self._sha.hexdigest()}

    def append(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Add lines after the lines that count; remove what a killed process wrote after them."""
        data = b"".join(json.dumps(item).encode() + b"\n" for item in items)
        follow = getattr(os, "O_NOFOLLOW", 0)  # a link would lead out of the folder
        with open(os.open(self.path, os.O_RDWR | os.O_CREAT | follow, 0o600), "r+b") as file:
            file.truncate(self.size)
            file.seek(self.size)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.size += len(data)
        self._sha.update(data)

    def read(self, mark: Any, named_by: Path) -> Iterator[Any]:
        """Read the lines that a mark counts; the next line is added after them."""
        try:
            size, digest = int(mark["bytes"]), mark["sha256"]
            data = b""
            if size:
                with open(self.path, "rb") as file:
                    data = file.read(min(size, os.fstat(file.fileno()).st_size))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise CheckpointError(f"{named_by} does not say how long {self.path.name} is") from None
        except OSError as error:
            raise CheckpointError(
                f"{self.path}, named by {named_by}, cannot be read: {error.strerror}"
            ) from error
        sha = hashlib.sha256(data)
        if len(data) != size or sha.hexdigest() != digest:
            raise CheckpointError(
                f"{self.path} was truncated or altered after it was written: its first {size} bytes do not "
                f"match the sha256 in {named_by}"
            )
        self.size, self._sha = size, sha
        for line in data.splitlines():
            try:
                yield json.loads(line)
            except (ValueError, RecursionError) as error:
                raise CheckpointError(f"{self.path} has a line that is not JSON: {error}") from None


# Locks.


def lock(folder: Path, seconds: float = 0.0) -> BaseFileLock | None:
    """Lock a folder until ``release``; return None if it stays locked by another run for all those seconds.

    A process that is killed releases its locks. Two runs in one process exclude each other as well.
    """
    folder_lock = FileLock(folder / LOCK, timeout=seconds, thread_local=False)
    try:
        folder_lock.acquire()
    except Timeout:
        return None
    except OSError as error:
        raise unwritable(folder, error) from error
    return folder_lock


@contextmanager
def hold(folder: Path, seconds: float = 0.0, private: bool = False) -> Iterator[bool]:
    """Lock a folder while the block runs; yield whether the lock was obtained within the seconds."""
    make_folder(folder, private)
    folder_lock = lock(folder, seconds)
    try:
        yield folder_lock is not None
    finally:
        if folder_lock is not None:
            folder_lock.release()


def in_use(folder: Path) -> CheckpointInUseError:
    """The error for a run that needs a folder which another run uses."""
    return CheckpointInUseError(
        f"{folder} is in use by another run, in this process or another; wait for it, or give another folder"
    )


def as_json(value: Any) -> Any:
    """A value as JSON would give it back: tuples as lists, all the way down."""
    if isinstance(value, dict):
        return {key: as_json(item) for key, item in value.items()}
    return [as_json(item) for item in value] if isinstance(value, (tuple, list)) else value


def _lines(body: Mapping[str, Any]) -> str:
    """JSON with a line for each key, and for each item of a list of objects: easy to read and to compare."""
    parts = []
    for key, value in body.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(json.dumps(item) for item in value) + "\n]"
        else:
            text = json.dumps(value)
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
