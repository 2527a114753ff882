"""Codecs: how the vectors of a message are written in fewer bytes.

A codec turns a vector of n numbers into ``size(n)`` bytes (``encode``) and back (``decode``). Simulations,
federations and records use and count the same bytes.

    name        bytes for n numbers            what is lost
    float32     4 n                            nothing of a float32 run
    bfloat16    2 n                            rounded to 8 bits of precision
    int8        n + 4 per block of 256         rounded at random to 255 levels of the block's range
    int4        n / 2 + 4 per block of 64      the same with 15 levels
    topk:0.01   8 per number that is sent      all but the largest hundredth; it is sent later
    means:64    4 per block of 64              each number becomes the mean of its block

A number after the name is the length of a block (``int8:1024``), or the share that is sent (``topk:0.05``).
Random rounding is right on average: the mean over many roundings of a number is that number.

>>> kinds: list[Codec] = [Float32(), BFloat16(), Int8(), Int4(), TopK(), Means()]
>>> {codec.name: codec.size(1000) for codec in kinds}
{'float32': 4000, 'bfloat16': 2000, 'int8': 1016, 'int4': 564, 'topk': 80, 'means': 64}
"""

from __future__ import annotations

import math
import sys
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from fadamgc.errors import InputError, nearest, not_accepted, shown
from fadamgc.toml import flat

__all__ = ["BFloat16", "Codec", "Float32", "Int4", "Int8", "Means", "TopK", "make_codec"]


@dataclass(frozen=True)
class Codec(ABC):
    """How one vector is written as bytes. Encoded vectors are tensors of type uint8."""

    name: ClassVar[str]
    keeps_rest: ClassVar[bool] = False
    """Whether a client adds what was not sent to the next vector that it sends (error feedback)."""

    @classmethod
    def of(cls, argument: str) -> Self:
        """Make the codec from the text after the colon in its name; "" is the default."""
        if argument:
            raise ValueError("it has no number")
        return cls()

    def __str__(self) -> str:
        return self.name

    @abstractmethod
    def size(self, n: int) -> int:
        """Return the bytes of n numbers."""

    @abstractmethod
    def encode(self, vector: Tensor, generator: torch.Generator) -> Tensor:
        """Write a vector of float32 numbers as bytes; random choices come from the generator."""

    @abstractmethod
    def decode(self, data: Tensor, n: int) -> Tensor:
        """Read n float32 numbers from ``size(n)`` bytes."""

    def check(self, data: Tensor, n: int) -> None:
        """Refuse data that are not the bytes of n numbers, before ``decode`` reads them."""
        if data.dtype != torch.uint8 or data.shape != (self.size(n),):
            raise InputError(
                f"{n} numbers as {self} are {self.size(n)} bytes; got {tuple(data.shape)} of {data.dtype}"
            )


class Float32(Codec):
    """Four bytes per number."""

    name = "float32"

    def size(self, n: int) -> int:
        return 4 * n

    def encode(self, vector: Tensor, generator: torch.Generator) -> Tensor:
        return _bytes(vector)

    def decode(self, data: Tensor, n: int) -> Tensor:
        return _numbers(data, torch.float32)


class BFloat16(Codec):
    """Two bytes per number: the first half of a float32, rounded to the nearest."""

    name = "bfloat16"

    def size(self, n: int) -> int:
        return 2 * n

    def encode(self, vector: Tensor, generator: torch.Generator) -> Tensor:
        return _bytes(vector.to(torch.bfloat16))

    def decode(self, data: Tensor, n: int) -> Tensor:
        return _numbers(data, torch.bfloat16).float()


@dataclass(frozen=True)
class Blocks(Codec):
    """A codec for one block of numbers after the other; abstract."""

    block: int = 256

    @classmethod
    def of(cls, argument: str) -> Self:
        """Make the codec from the length of a block."""
        if not argument:
            return cls()
        if not argument.isdecimal() or not 1 <= int(argument) <= 1 << 20:
            raise ValueError(f"the length of a block is a whole number from 1 to {1 << 20}")
        return cls(int(argument))

    def __str__(self) -> str:
        return self.name if self.block == type(self)().block else f"{self.name}:{self.block}"

    def blocks(self, n: int) -> int:
        """Return the number of blocks, of which the last may be shorter."""
        return -(-n // self.block)

    def padded(self, vector: Tensor) -> Tensor:
        """Return the vector as rows of blocks; zeros fill the last one."""
        missing = self.blocks(len(vector)) * self.block - len(vector)
        return torch.nn.functional.pad(vector, (0, missing)).view(-1, self.block)


@dataclass(frozen=True)
class Int8(Blocks):
    """One byte per number: a whole number times the largest absolute value of its block / 127.

    Numbers are rounded up or down at random, so that they are right on average; 0 stays 0.
    """

    name = "int8"
    levels: ClassVar[int] = 127  # of each sign

    def size(self, n: int) -> int:
        return 4 * self.blocks(n) + n

    def encode(self, vector: Tensor, generator: torch.Generator) -> Tensor:
        rows = self.padded(vector)
        scale = rows.abs().amax(dim=1, keepdim=True) / self.levels
        noise = torch.rand(rows.shape, generator=generator).to(vector.device)
        safe = torch.where(scale > 0, scale, torch.ones_like(scale))
        whole = (rows / safe + noise).floor_().clamp_(-self.levels, self.levels)
        return torch.cat([_bytes(scale.view(-1)), self.pack(whole.view(-1)[: len(vector)].to(torch.int8))])

    def decode(self, data: Tensor, n: int) -> Tensor:
        scale = _numbers(data[: 4 * self.blocks(n)], torch.float32)
        whole = self.unpack(data[4 * self.blocks(n) :], n)
        return (self.padded(whole.float()) * scale[:, None]).view(-1)[:n]

    def pack(self, whole: Tensor) -> Tensor:
        """Write whole numbers as bytes."""
        return _bytes(whole)

    def unpack(self, data: Tensor, n: int) -> Tensor:
        """Read n whole numbers."""
        return _numbers(data, torch.int8)


@dataclass(frozen=True)
class Int4(Int8):
    """Half a byte per number, as ``int8`` with 7 levels of each sign."""

    name = "int4"
    levels: ClassVar[int] = 7
    block: int = 64

    def size(self, n: int) -> int:
        return 4 * self.blocks(n) + -(-n // 2)

    def pack(self, whole: Tensor) -> Tensor:
        halves = torch.nn.functional.pad(whole + 8, (0, len(whole) % 2)).to(torch.uint8)
        return halves[::2] * 16 + halves[1::2]

    def unpack(self, data: Tensor, n: int) -> Tensor:
        return torch.stack([data >> 4, data & 15], dim=1).view(-1)[:n].to(torch.int8) - 8


@dataclass(frozen=True)
class Means(Blocks):
    """The mean of each block: for vectors whose neighbours are alike, such as second moments."""

    name = "means"
    block: int = 64

    def size(self, n: int) -> int:
        return 4 * self.blocks(n)

    def encode(self, vector: Tensor, generator: torch.Generator) -> Tensor:
        sums = self.padded(vector).sum(dim=1)
        return _bytes(sums / self._lengths(len(vector)).to(sums))

    def decode(self, data: Tensor, n: int) -> Tensor:
        means = _numbers(data, torch.float32)
        return means.repeat_interleave(self._lengths(n).to(means.device), output_size=n)

    def _lengths(self, n: int) -> Tensor:
        lengths = torch.full((self.blocks(n),), self.block)
        lengths[-1] = n - self.block * (self.blocks(n) - 1)
        return lengths


@dataclass(frozen=True)
class TopK(Codec):
    """The share of the numbers with the largest absolute values, with their positions.

    A client adds the rest to the next vector that it sends, so nothing is lost in the long run. It does not
    if the vector is the change of a kept state (such as dy): there, the next change makes up for the rest.
    """

    name = "topk"
    keeps_rest = True
    share: float = 0.01

    @classmethod
    def of(cls, argument: str) -> Self:
        """Make the codec from the share of numbers that are sent."""
        if not argument:
            return cls()
        share = float(argument)
        if not 0 < share <= 1:
            raise ValueError("the share of numbers that are sent is above 0 and at most 1")
        return cls(share)

    def __str__(self) -> str:
        return f"{self.name}:{self.share:g}"

    def count(self, n: int) -> int:
        """Return how many of n numbers are sent."""
        return max(1, min(n, math.ceil(self.share * n)))

    def size(self, n: int) -> int:
        return 8 * self.count(n)

    def encode(self, vector: Tensor, generator: torch.Generator) -> Tensor:
        positions = torch.topk(vector.abs(), self.count(len(vector)), sorted=False).indices.sort().values
        return torch.cat([_bytes(positions.to(torch.int32)), _bytes(vector[positions])])

    def decode(self, data: Tensor, n: int) -> Tensor:
        k = self.count(n)
        positions = _numbers(data[: 4 * k], torch.int32).long()
        if int(positions[0]) < 0 or int(positions[-1]) >= n or bool((positions.diff() <= 0).any()):
            raise InputError(f"the positions of the numbers do not ascend from 0 to at most {n - 1}")
        numbers = torch.zeros(n, device=data.device)
        numbers[positions] = _numbers(data[4 * k :], torch.float32)
        return numbers


CODECS: dict[str, type[Codec]] = {c.name: c for c in (Float32, BFloat16, Int8, Int4, TopK, Means)}


CodecTable = tuple[tuple[str, str], ...]
"""Pairs of a field of a message and the name of its codec."""


def make_codec(name: object, field: str = "") -> Codec:
    """Return a codec by its name, such as "int8" or "topk:0.01"; errors name the ``field`` that has it.

    >>> make_codec("int8").size(1000)
    1016
    """
    owner = f"codec for {field}" if field else "codec"
    first, _, argument = name.partition(":") if isinstance(name, str) else ("", "", "")
    if first not in CODECS:
        raise not_accepted(owner, name, "one of " + ", ".join(CODECS))
    try:
        return CODECS[first].of(argument)
    except ValueError as error:
        raise InputError(f"{owner}={shown(name)} is not accepted; {error}") from None


def codec_table(value: object) -> CodecTable:
    """Return the codecs of a run as sorted pairs: from a dict, a list of pairs, or a text.

    >>> codec_table({"y": "int8", "dx": "topk"})
    (('dx', 'topk:0.01'), ('y', 'int8'))
    >>> codec_table("y=int8, dx=topk")
    (('dx', 'topk:0.01'), ('y', 'int8'))
    """
    pairs = list(flat(value)) if isinstance(value, Mapping) else _pairs(value)
    table: dict[str, str] = {}
    for field, codec in pairs:
        if field in table:
            raise InputError(f"codec for {field} is given twice, as {table[field]!r} and {codec!r}")
        table[field] = str(make_codec(codec, field))
    return tuple(sorted(table.items()))


def _pairs(value: Any) -> list[tuple[str, Any]]:
    try:
        if isinstance(value, str):
            value = [part.split("=") for part in value.split(",") if part.strip()]
            return [(field.strip(), codec.strip()) for field, codec in value]
        return [(str(field), codec) for field, codec in value]
    except (TypeError, ValueError):
        accepted = "a dict of fields and codecs such as {'y': 'int8', 'dy': 'int8'}, or 'y=int8,dy=int8'"
        raise not_accepted("codec", value, accepted) from None


def codecs_of(table: CodecTable, fields: tuple[str, ...]) -> dict[str, Codec]:
    """Return the codecs of the fields of a message; the last part of the name of a nested field is enough."""
    return {
        field: make_codec(codec)
        for key, codec in table
        for field in fields
        if field == key or field.endswith(f".{key}")
    }


def check_table(table: CodecTable, fields: tuple[str, ...], owner: str) -> None:
    """Refuse a codec for a field that no message has, or two codecs for one field."""
    seen: dict[str, str] = {}
    for key, _ in table:
        matching = [field for field in fields if field == key or field.endswith(f".{key}")]
        if not matching:
            hint = nearest(key, fields)
            raise InputError(
                f"codec for {key!r}: no message of {owner} has this field{hint}; it has {', '.join(fields)}"
            )
        for field in matching:
            if field in seen:
                raise InputError(f"codec for {seen[field]!r} and {key!r}: both are {field}; give one of them")
            seen[field] = key


def _bytes(numbers: Tensor) -> Tensor:
    """Return the little-endian bytes of numbers."""
    return _swapped(numbers.contiguous().view(torch.uint8), numbers.dtype)


def _numbers(data: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the numbers that have these little-endian bytes."""
    return _swapped(data, dtype).clone(memory_format=torch.contiguous_format).view(dtype)  # aligned


def _swapped(data: Tensor, dtype: torch.dtype) -> Tensor:
    if sys.byteorder == "little":
        return data
    return data.view(-1, dtype.itemsize).flip(1).reshape(-1)
