"""Bundles and journals: the files of a run.

A *bundle* is one JSON file and, for tensors, one safetensors file. The JSON file is written last and names
the tensor file with its digest, so a process that is killed at any moment leaves either the previous bundle
or the new one. A *journal* is a file of JSON lines that only grows; long
lines are compressed. A bundle stores how many bytes of its
journal are valid, and the digest of these bytes; readers ignore later lines.
"""

from __future__ import annotations

import base64
import glob
import gzip
import hashlib
import io
import json
import os
import re
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fadamgc.errors import CheckpointError, shown
from fadamgc.files import make_folder, remove_leftovers, replacing, unwritable, write_atomic

FORMAT = 1
# Limits on decompression, in bytes and as a ratio; JSON files of real runs compress at most 100 times.
LARGEST_RECORD, LARGEST_RATIO, SMALL_RECORD = 1 << 30, 300, 1 << 20
LONG_LINE, COMPRESSED = 1 << 12, b"zlib "  # bytes from which a line of a journal is compressed; its mark
SAFETENSORS_NAMES = {
    **{torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"},
    **{torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"},
    **{torch.bool: "BOOL", torch.complex64: "C64"},
}


class LazyTensor(NamedTuple):
    """A tensor that is computed when it is written, so that only one at a time is in memory."""

    like: Tensor  # a tensor of the same type and shape; its values are not used
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

    Only the user can read the tensor file, because clients' states reveal something about their data. With
    ``private``, this holds for the JSON file as well.
    """
    make_folder(folder, private)
    file, digest = None, None
    try:
        if tensors:
            with replacing(folder, name, private=True) as (stream, finish):
                digest = _write_tensors(stream, tensors)
                file = f"{name}-{digest[:16]}.safetensors"
                finish(folder / file)
        body = {"format": format, "tensors": file, "tensors_sha256": digest, **content}
        text = _json_lines({"sha256": _digest(body), **body})
        write_atomic(folder / f"{name}.json", text.encode(), private)
    except OSError as error:
        raise unwritable(folder, error) from error
    remove_other_tensors(folder, name, file)
    remove_leftovers(folder, name)


def remove_other_tensors(folder: Path, name: str, file: str | None) -> None:
    """Remove the tensor files of earlier bundles called ``name``; keep ``file``, the current bundle's."""
    for other in folder.glob(f"{glob.escape(name)}-*.safetensors"):
        if other.name != file:
            with suppress(OSError):
                other.unlink(missing_ok=True)


def _write_tensors(file: BinaryIO, tensors: Mapping[str, Tensor | LazyTensor]) -> str:
    """Write tensors in the safetensors format, one at a time; return the digest of the file.

    The writer of safetensors needs all tensors at once and returns no digest.
    """
    likes = {key: t.like if isinstance(t, LazyTensor) else t for key, t in tensors.items()}
    order = sorted(likes, key=lambda key: -likes[key].element_size())  # so that every tensor is aligned
    header: dict[str, Any] = {}
    end = 0
    for key in order:
        like = likes[key]
        if like.dtype not in SAFETENSORS_NAMES:
            raise CheckpointError(f"{key} of type {like.dtype} cannot be saved; use a type such as float32")
        begin, end = end, end + like.numel() * like.element_size()
        dtype = SAFETENSORS_NAMES[like.dtype]
        header[key] = {"dtype": dtype, "shape": list(like.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sha = hashlib.sha256()

    def write(data: bytes | memoryview) -> None:
        sha.update(data)
        file.write(data)

    write(len(text).to_bytes(8, "little") + text)
    for key in order:
        value = tensors[key]
        write(tensor_bytes(value.read() if isinstance(value, LazyTensor) else value))
    return sha.hexdigest()


def tensor_bytes(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's numbers; a contiguous tensor on the CPU is not copied."""
    array: Any = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy()
    return memoryview(array)


def has_bundle(folder: Path, name: str) -> bool:
    """Whether the folder has a complete bundle of this name."""
    return os.path.exists(_json_file(folder, name))


def _json_file(folder: Path, name: str) -> Path:
    """Return the path of a bundle's JSON file, or of the compressed JSON file if only that file exists."""
    plain, compressed = folder / f"{name}.json", folder / f"{name}.json.gz"
    return compressed if os.path.exists(compressed) and not os.path.exists(plain) else plain


def read_bundle(
    folder: Path, name: str, formats: tuple[int, ...] = (FORMAT,)
) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Read a bundle; refuse one whose content has changed since it was written."""
    path = _json_file(folder, name)
    try:
        data = path.read_bytes()
        body = json.loads(_decompress(path, data) if path.suffix == ".gz" else data)
        content = body if isinstance(body, dict) else {}
        digest = _digest({key: value for key, value in content.items() if key != "sha256"})
    except (FileNotFoundError, NotADirectoryError):
        others = sorted(other.name for other in folder.glob("*.json"))
        hint = f"; the folder has {', '.join(others)}" if others else ""
        raise CheckpointError(f"{path} does not exist{hint}") from None
    except RecursionError:
        raise CheckpointError(f"{path} cannot be read (nested too deeply); it is damaged") from None
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); it may be truncated") from error
    if not isinstance(body, dict) or not {"sha256", "format", "tensors"} <= body.keys():
        raise CheckpointError(f"{path} is not a file of fadamgc: it has no digest and format")
    if body["format"] not in formats:
        found, readable = shown(body["format"]), " and ".join(map(str, formats))
        raise CheckpointError(f"{path} has format {found}; this version reads format {readable}")
    if digest != body["sha256"]:
        raise CheckpointError(f"{path} was altered after it was written: its content and sha256 differ")
    file = body["tensors"]
    if file is None:
        return body, {}
    if not isinstance(file, str) or not re.fullmatch(r"[\w-]+\.safetensors", file, re.ASCII):
        raise CheckpointError(f"{path} names no tensor file in its folder: {shown(file)}")
    return body, _read_tensors(folder / file, path, body.get("tensors_sha256"))


def _decompress(path: Path, data: bytes) -> bytes:
    """Decompress a JSON file; refuse one that unpacks to far more than any run writes."""
    limit = min(LARGEST_RECORD, max(SMALL_RECORD, LARGEST_RATIO * len(data)))
    with gzip.open(io.BytesIO(data)) as file:
        content = file.read(limit + 1)
    if len(content) > limit:
        raise CheckpointError(f"{path} is not a record: its {len(data)} bytes unpack to more than {limit}")
    return content


def _read_tensors(path: Path, named_by: Path, digest: Any) -> dict[str, Tensor]:
    try:
        with open(path, "rb") as file:
            found, size = hashlib.file_digest(file, "sha256").hexdigest(), file.tell()
    except OSError as error:
        raise _unreadable(path, named_by, error) from error
    if found != digest:
        raise _altered(path, named_by, f"its {size} bytes")
    try:
        with safe_open(path, framework="pt") as tensors:
            # Copies, because another process may write to the file later.
            return {key: tensors.get_tensor(key).clone() for key in tensors.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, RuntimeError) as error:
        raise CheckpointError(f"{path} is not a safetensors file: {error}") from error


def _unreadable(path: Path, named_by: Path, error: OSError) -> CheckpointError:
    return CheckpointError(f"{path}, named by {named_by}, cannot be read: {error.strerror}")


def _altered(path: Path, named_by: Path, part: str) -> CheckpointError:
    start = f"{path} was truncated or altered after it was written"
    return CheckpointError(f"{start}: {part} do not match the sha256 in {named_by}")


def _json_lines(body: Mapping[str, Any]) -> str:
    """Return JSON with one line per key, and one per item of a list of objects: easy to compare."""
    lines = []
    for key, value in body.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        else:
            text = json.dumps(value)
        lines.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _digest(body: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Journal:
    """A file of JSON lines, with the digest of all valid lines; the time to add a line is constant."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self._sha = path, 0, hashlib.sha256()

    def mark(self) -> dict[str, Any]:
        """Return the number of valid bytes and their digest, to be stored in the bundle."""
        return {"bytes": self.size, "sha256": self._sha.hexdigest()}

    def append(self, items: Iterable[Mapping[str, Any]]) -> None:
        """Add lines after the valid ones; remove later lines, which a killed process wrote."""
        data = b"".join(_line(item) + b"\n" for item in items)
        no_link = getattr(os, "O_NOFOLLOW", 0)  # a link could lead out of the folder
        with open(os.open(self.path, os.O_RDWR | os.O_CREAT | no_link, 0o600), "r+b") as file:
            file.truncate(self.size)
            file.seek(self.size)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        self.size += len(data)
        self._sha.update(data)

    def read(self, mark: Any, named_by: Path) -> Iterator[Any]:
        """Read the lines that a ``mark`` declares valid; ``append`` continues after them."""
        try:
            size, digest = int(mark["bytes"]), mark["sha256"]
            data = b""
            if size:
                with open(self.path, "rb") as file:
                    data = file.read(min(size, os.fstat(file.fileno()).st_size))
        except (KeyError, TypeError, ValueError, OverflowError):
            raise CheckpointError(f"{named_by} does not say how long {self.path.name} is") from None
        except OSError as error:
            raise _unreadable(self.path, named_by, error) from error
        sha = hashlib.sha256(data)
        if len(data) != size or sha.hexdigest() != digest:
            raise _altered(self.path, named_by, f"its first {size} bytes")
        self.size, self._sha = size, sha
        for line in data.splitlines():
            try:
                yield json.loads(_unpacked(line) if line.startswith(COMPRESSED) else line)
            except (ValueError, RecursionError, zlib.error) as error:
                raise CheckpointError(f"{self.path} has a line that is not JSON: {error}") from None


def _line(item: Mapping[str, Any]) -> bytes:
    text = json.dumps(item).encode()
    return text if len(text) < LONG_LINE else COMPRESSED + base64.b64encode(zlib.compress(text))


def _unpacked(line: bytes) -> bytes:
    data = base64.b64decode(line.removeprefix(COMPRESSED), validate=True)
    return zlib.decompressobj().decompress(data, LARGEST_RATIO * len(data))
