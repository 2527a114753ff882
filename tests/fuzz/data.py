"""Data files: Parquet, CSV, npz, and arrays in the cache."""

from __future__ import annotations

import io
import json
import os
import random
import shutil
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from .harness import Target, Wrong

COLUMNS = ("text", "other", "label", "img", "sentence", "idx", "fine_label")


def prepare(shared: Path) -> None:
    import sets
    import tiny

    sets.cifar10(shared / "data", train=20, test=10)
    sets.har(shared / "data", each=4)
    sets.texts(shared / "data", "glue/sst2", train=20, test=10)
    sets.texts(shared / "data", "20_newsgroups", train=40, test=20)
    tiny.csv(shared / "texts.csv", 20)
    lines = (shared / "texts.csv").read_text().splitlines()[1:]
    objects = [dict(zip(("text", "other", "label"), line.split(","), strict=True)) for line in lines]
    (shared / "texts.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in objects))
    sets.write_rows(
        shared / "texts.parquet", text=["good film", "bad plot"] * 5, other=["a"] * 10, label=[0, 1] * 5
    )


def damage_bytes(r: random.Random, content: bytes) -> bytes:
    """One change of a file's bytes."""
    if not content:
        return b"x"
    at, many = r.randrange(len(content)), r.choice((1, 4, 64, 1000))
    match r.randrange(9):
        case 0:
            return content[:at]
        case 1:
            return content[at:]
        case 2:
            return content[:at] + bytes(many) + content[at + many :]
        case 3:
            return content[:at] + r.randbytes(many) + content[at + many :]
        case 4:
            other = r.randrange(len(content))
            part, there = content[at : at + many], content[other : other + many]
            return content.replace(part, there, 1)
        case 5:
            return content + r.randbytes(many)
        case 6:
            end = len(content) - r.randrange(
                min(200, len(content))
            )  # where Parquet and zip have their tables
            return content[: end - 1] + r.randbytes(1) + content[end:]
        case 7:
            return content[:at] + bytes([content[at] ^ (1 << r.randrange(8))]) + content[at + 1 :]
    return r.choice(
        (b"", b"PAR1", b"PAR1" * 100, b"PK\x03\x04", b"\x93NUMPY", b"[" * 10_000, r.randbytes(500))
    )


def odd_array(r: random.Random, n: int) -> Any:
    """A column for pyarrow."""
    return r.choice(
        (
            lambda: [r.choice((0, 1, -1, 5, 2**62, None)) for _ in range(n)],
            lambda: [r.choice((0.0, 1.0, float("nan"), None)) for _ in range(n)],
            lambda: [r.choice(("a", "", "0", "1", " ", None, "x" * 40_000, "\x00", "é")) for _ in range(n)],
            lambda: [r.choice((b"", b"\xff\xfe", b"abc", None)) for _ in range(n)],
            lambda: [r.choice(([], [1], [1, 2], None)) for _ in range(n)],
            lambda: [
                r.choice(({"bytes": b"x", "path": None}, {"bytes": None, "path": "p"}, None))
                for _ in range(n)
            ],
            lambda: [r.choice((True, False, None)) for _ in range(n)],
            lambda: [None] * n,
            lambda: [0, 1] * (n // 2) + [0] * (n % 2),
        )
    )()


def odd_parquet(r: random.Random, path: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    n = r.choice((0, 1, 3, 10))
    names = r.sample(COLUMNS, r.choice((1, 3, 5, 7)))
    table = pa.table([pa.array(odd_array(r, n)) for _ in names], names=names)
    if r.random() < 0.2 and n:
        table = table.append_column(names[0], table.column(0))
    if r.random() < 0.2 and n:
        kind = r.choice(
            (pa.int8(), pa.uint64(), pa.float32(), pa.large_string(), pa.binary(), pa.timestamp("s"))
        )
        table = table.append_column("label2", pa.nulls(n, kind))
    parquet.write_table(table, path, compression=r.choice(("snappy", "none", "gzip", "zstd")))


def odd_images(r: random.Random, path: Path) -> None:
    import sets

    side, mode, kind = (
        r.choice((1, 31, 32, 64)),
        r.choice(("RGB", "L", "P", "CMYK")),
        r.choice(("PNG", "JPEG")),
    )
    kind = "JPEG" if mode == "CMYK" else "PNG" if mode == "P" else kind
    n = r.choice((0, 1, 6))
    labels = [r.choice((0, 1, 9, 10, -1)) for _ in range(n)]
    rows = [{"bytes": sets.encoded(p, kind, mode), "path": None} for p in sets.images(n, side)]
    for row in rows:
        if r.random() < 0.3:
            row["bytes"] = damage_bytes(r, row["bytes"])
    if n:
        sets.write_rows(path, img=rows, label=labels)


def odd_csv(r: random.Random, path: Path) -> None:
    lines = path.read_text().split("\n")
    for _ in range(r.choice((1, 2, 5))):
        i = r.randrange(len(lines))
        lines[i] = r.choice(
            (
                *(
                    "",
                    ",",
                    ",,,,",
                    '"',
                    '"a\nb",x,1',
                    "a,b",
                    "a,b,c",
                    "a,b,1.5",
                    "a,b,-1",
                    "a,b,99999999999999999999",
                ),
                *("a,b,NaN", "a,b,", "text,text,label", "\x00", "é,ü,1", "a" * 40_000 + ",b,0", "text,label"),
            )
        )
    path.write_bytes("\n".join(lines).encode(r.choice(("utf-8", "utf-16", "latin-1")), "replace"))


def odd_npz(r: random.Random, path: Path) -> None:
    with np.load(path) as file:
        arrays: dict[str, Any] = dict(file)
    name = r.choice(sorted(arrays))
    array = arrays[name]
    match r.randrange(8):
        case 0:
            del arrays[name]
        case 1:
            arrays[name] = array.astype(r.choice(("U5", "S5", "f4", "c8", "M8[s]", "i1", "?")))
        case 2:
            arrays[name] = array[: r.randrange(len(array))]
        case 3:
            arrays[name] = array.reshape(-1)[0]
        case 4:
            arrays[name] = np.full(array.shape, r.choice((np.nan, np.inf, -1, 2**62, 7)))
        case 5:
            arrays[name] = array.reshape(len(array), -1)
        case 6:
            arrays[name] = np.array([object()] * 3, dtype=object)
        case 7:
            arrays[name] = np.zeros(array.shape, dtype=[("a", "i4"), ("b", "f4")])
    buffer = io.BytesIO()
    np.savez(buffer, **arrays)
    content = buffer.getvalue()
    if r.random() < 0.3:  # an unknown compression, in all headers
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            for info in archive.infolist():
                at = info.header_offset + 8
                content = content[:at] + bytes([r.choice((1, 6, 12, 99)), 0]) + content[at + 2 :]
        at = content.find(b"PK\x01\x02")
        content = content[: at + 10] + bytes([r.choice((1, 6, 12, 14, 99)), 0]) + content[at + 12 :]
    path.write_bytes(content)


def case(r: random.Random, shared: Path, folder: Path) -> str:
    from fadamgc.data import har, images, own_texts, texts
    from fadamgc.data.check import check
    from fadamgc.data.sources import source

    os.environ["FADAMGC_CACHE"] = str(folder / "cache")
    name = r.choice(("cifar10", "uci_har", "glue/sst2", "20_newsgroups", "csv", "parquet", "jsonl"))
    if name in ("csv", "parquet", "jsonl"):
        path = folder / f"texts.{name}"
        shutil.copy(shared / f"texts.{name}", path)
    else:
        shutil.copytree(shared / "data" / name, folder / "data" / name)
        path = r.choice(sorted((folder / "data" / name).iterdir()))
    made = {"csv": odd_csv, "jsonl": odd_csv, "uci_har": odd_npz, "cifar10": odd_images}.get(
        name, odd_parquet
    )
    if r.random() < 0.5:
        made(r, path)
    elif r.random() < 0.1:
        path.rename(path.with_name(r.choice(("train-00000-of-00002.parquet", "train-1-of-x.parquet", "x"))))
    else:
        path.write_bytes(damage_bytes(r, path.read_bytes()))
    if name in ("csv", "parquet", "jsonl"):
        columns = r.choice((["text"], ["text", "other"], ["nothing"], [], ["text"] * 2))
        names = ("label", "text", "nothing")
        client = r.choice((None, *names))
        own_texts.read(path if path.exists() else folder, columns, r.choice(names), client)
        return "accepted"
    root = folder / "data"
    split = r.choice(("train", "test"))
    os.environ["FADAMGC_DATA"] = str(root)
    if r.random() < 0.3:
        check(source(name))
    elif name == "uci_har":
        har.load()
    elif name == "cifar10":
        images.load(name, split)
    else:
        texts.load(name, split)
    return "accepted"


def prepare_cache(shared: Path) -> None:
    from fadamgc.data import digits

    os.environ["FADAMGC_CACHE"] = str(shared / "cache")
    for validation in (0.0, 0.25):
        digits.load(validation)


def cache_case(r: random.Random, shared: Path, folder: Path) -> str:
    """Damaged arrays in the cache are made again, not used."""
    from fadamgc.data import digits

    validation = r.choice((0.0, 0.25))
    os.environ["FADAMGC_CACHE"] = str(shared / "cache")
    right = digits.load(validation)
    os.environ["FADAMGC_CACHE"] = str(folder / "cache")
    shutil.copytree(shared / "cache", folder / "cache")
    for path in sorted(p for p in (folder / "cache").rglob("*") if p.is_file()):
        path.write_bytes(damage_bytes(r, path.read_bytes()))
    found = digits.load(validation)
    if any(a.shape != b.shape or not bool((a == b).all()) for a, b in zip(right, found, strict=True)):
        raise Wrong("a damaged cache was read as other digits")
    return "accepted"


TARGET = Target("data", prepare, case)
CACHE = Target("cache", prepare_cache, cache_case)
