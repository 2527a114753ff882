"""Files that are either there in full or not at all.

A *bundle* is a folder with tensors (safetensors) and everything else (JSON). The JSON file is the last
to be written and names the tensor file with its digest, so a process killed at any moment leaves the
bundle that was there before, or the new one.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import secrets
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from fadamgc.errors import CheckpointError

FORMAT = 1


def write_atomic(path: Path, data: bytes | Callable[[BinaryIO], object]) -> None:
    """Write a file so that a reader sees the old content or the new, whatever happens meanwhile.

    Args:
        path: where.
        data: the content, or what writes it.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with open(temporary, "wb") as file:
            if callable(data):
                data(file)
            else:
                file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def config_file() -> Path:
    """The user's settings, if there are any."""
    return Path(os.environ.get("XDG_CONFIG_HOME") or "~/.config").expanduser() / "fadamgc" / "config.toml"


def make_folder(folder: Path) -> None:
    """Make a folder and see that it can be written to, before work is done for it."""
    probe = folder / f".{os.getpid()}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise CheckpointError(f"{folder} cannot be written: {error.strerror}") from error


def write_bundle(folder: Path, name: str, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
    """Write ``name.json`` and its tensors into a folder, replacing what was there."""
    make_folder(folder)
    file, digest = None, None
    if tensors:
        data = save({key: value.detach().cpu().contiguous().clone() for key, value in tensors.items()})
        digest = hashlib.sha256(data).hexdigest()
        file = f"{name}-{digest[:16]}.safetensors"
        write_atomic(folder / file, data)
    body = {"format": FORMAT, "tensors": file, "tensors_sha256": digest, **content}
    write_atomic(folder / f"{name}.json", _lines({"sha256": _digest(body), **body}).encode())
    for other in folder.glob(f"{name}-*.safetensors"):
        if other.name != file:
            other.unlink(missing_ok=True)
    for leftover in folder.glob(f".{name}*.tmp"):  # of a process that was killed
        leftover.unlink(missing_ok=True)


def has_bundle(folder: Path, name: str) -> bool:
    """Whether a bundle was ever completed there."""
    return _bundle(folder, name).exists()


def _bundle(folder: Path, name: str) -> Path:
    """Its file; one that was packed for keeping is read where it is the only one."""
    plain, packed = folder / f"{name}.json", folder / f"{name}.json.gz"
    return packed if packed.exists() and not plain.exists() else plain


def read_bundle(folder: Path, name: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a bundle back, refusing anything that is not byte for byte what was written."""
    path = _bundle(folder, name)
    try:
        data = path.read_bytes()
        body = json.loads(gzip.decompress(data) if path.suffix == ".gz" else data)
    except (FileNotFoundError, NotADirectoryError):
        others = sorted(other.name for other in folder.glob("*.json"))
        hint = f"; the folder holds {', '.join(others)}" if others else ""
        raise CheckpointError(f"{path} does not exist{hint}") from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(
            f"{path} cannot be read ({error}); it is truncated or not of this kind"
        ) from error
    if not isinstance(body, dict) or "sha256" not in body or "format" not in body:
        raise CheckpointError(f"{path} is not a file of fadamgc: it has no digest and format")
    if body["format"] != FORMAT:
        raise CheckpointError(f"{path} has format {body['format']!r}; this version reads format {FORMAT}")
    if _digest({key: value for key, value in body.items() if key != "sha256"}) != body["sha256"]:
        raise CheckpointError(
            f"{path} was altered after it was written: its content does not match its sha256"
        )
    if body["tensors"] is None:
        return body, {}
    tensor_path = folder / body["tensors"]
    try:
        data = tensor_path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{tensor_path}, named by {path}, cannot be read: {error.strerror}") from error
    if hashlib.sha256(data).hexdigest() != body["tensors_sha256"]:
        raise CheckpointError(
            f"{tensor_path} was truncated or altered after it was written: its {len(data)} bytes do not "
            f"match the sha256 in {path}"
        )
    try:
        return body, load(data)
    except SafetensorError as error:
        raise CheckpointError(f"{tensor_path} is not a safetensors file: {error}") from error


@contextmanager
def hold(folder: Path, seconds: float = 0.0) -> Iterator[bool]:
    """Hold a folder, so that no other process does; whether it was to be had within so many seconds.

    A process that is killed lets go. Where there are no such locks (Windows), everybody has it.
    """
    try:
        import fcntl
    except ImportError:
        yield True
        return
    make_folder(folder)
    until = time.monotonic() + seconds
    with open(folder / ".lock", "w") as lock:
        while True:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() < until:
                    time.sleep(0.05)
                    continue
                yield False
            else:
                yield True
            return


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
