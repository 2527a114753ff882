"""Small data sets in the layout of the real ones."""

from __future__ import annotations

import io

import numpy as np
import pyarrow as pa
from PIL import Image
from pyarrow import parquet

from tiny import sentences


def encoded(pixels, kind="PNG", mode="RGB"):
    buffer = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(buffer, kind)
    return buffer.getvalue()


def images(count, side, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, side, side, 3), dtype=np.uint8)


def write_rows(path, **columns):
    path.parent.mkdir(parents=True, exist_ok=True)
    parquet.write_table(pa.table(columns), path)
    return path


def write_images(path, pixels, labels, image="img", label="label", **options):
    rows = [{"bytes": encoded(p, **options), "path": None} for p in pixels]
    return write_rows(path, **{image: rows, label: pa.array(labels, pa.int64())})


def cifar10(root, train=60, test=20):
    """A CIFAR-10 of a few images, whose labels can be told from their colour."""
    for split, count in (("train", train), ("test", test)):
        labels = np.arange(count) % 10
        pixels = images(count, 32, seed=count) // 4 + (20 * labels).astype(np.uint8)[:, None, None, None]
        write_images(root / "cifar10" / f"{split}-00000-of-00001.parquet", pixels, labels)
    return root


def har(root, people=30, each=12):
    """A HAR of a few windows."""
    random = np.random.default_rng(0)
    n = people * each
    y = np.arange(n) % 6
    x = (random.normal(size=(n, 9, 128)) + y[:, None, None]).astype(np.float16)
    (root / "uci_har").mkdir(parents=True, exist_ok=True)
    subject = np.repeat(np.arange(people), each).astype(np.uint8)
    is_test = np.arange(n) % 4 == 3
    np.savez(root / "uci_har" / "har.npz", x=x, y=y.astype(np.uint8), subject=subject, is_test=is_test)
    return root


def texts(root, name="glue/sst2", train=60, test=20):
    """A set of a few texts, in the layout of the known one."""
    from fadamgc.data.sources import source

    known = source(name)
    for split, count in zip(known.splits, (train, test), strict=True):
        columns = {c: sentences(count, seed=i)[0] for i, c in enumerate(known.inputs)}
        labels = [y % known.classes for y in sentences(count, classes=known.classes)[1]]
        write_rows(root / name / f"{split}-00000-of-00001.parquet", **columns, **{known.label: labels})
    return root
