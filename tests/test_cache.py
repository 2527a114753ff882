"""The cache: damaged arrays are computed again, and compiled code is stored where nobody else can write."""

from __future__ import annotations

import atexit
import logging
import os
import shutil
import stat

import numpy as np
import pytest
import torch

import sets
from fadamgc.data import digits, images

needs_root = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can give files to another user"
)
NOBODY = 65534


@pytest.fixture(autouse=True)
def cache_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FADAMGC_DATA", str(tmp_path / "data"))
    monkeypatch.delenv("FADAMGC_PROCESS_CODE", raising=False)
    return tmp_path / "cache"


# Arrays


def damaged(data, rng):
    """The content of a file with a piece flipped, cut off, set to zero, repeated, moved or added."""
    changed = bytearray(data)
    at, length = int(rng.integers(len(data))), int(rng.integers(1, 200))
    piece = slice(at, at + length)
    match rng.integers(7):
        case 0:
            changed[at] ^= 1 << int(rng.integers(8))
        case 1:
            del changed[at:]
        case 2:
            del changed[piece]
        case 3:
            changed[piece] = bytes(len(changed[piece]))
        case 4:
            changed[piece] = reversed(changed[piece])
        case 5:
            changed += rng.bytes(length)
        case 6:
            other = int(rng.integers(len(data)))
            changed[at], changed[other] = changed[other], changed[at]
    return bytes(changed)


@pytest.mark.slow
def test_digits_from_a_damaged_cache_are_the_digits(cache_folder):
    whole = digits.load()
    (file,) = (cache_folder / "digits").iterdir()
    data, rng = file.read_bytes(), np.random.default_rng(0)
    for _ in range(60):
        file.write_bytes(damaged(data, rng))
        assert all(map(torch.equal, digits.load(), whole))
        assert file.read_bytes() == data


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["x", "y"])
def test_images_from_a_damaged_cache_are_the_images(cache_folder, tmp_path, kind):
    sets.cifar10(tmp_path / "data")
    whole = [np.array(part) for part in images.load("cifar10", "train")]
    (file,) = (cache_folder / "images").glob(f"*.{kind}.npy")
    data, rng = file.read_bytes(), np.random.default_rng(1)
    for i in range(40):
        file.write_bytes(damaged(data, rng))
        os.utime(file, (i, i))  # two writes may be too close in time to tell
        assert all(map(np.array_equal, images.load("cifar10", "train"), whole))
        assert file.read_bytes() == data


@pytest.mark.slow
def test_the_file_of_another_array_is_not_read(cache_folder):
    whole, tuning = digits.load(), digits.load(0.25)
    files = sorted((cache_folder / "digits").iterdir())
    content = [file.read_bytes() for file in files]
    for file, other in zip(files, reversed(content), strict=True):
        file.write_bytes(other)
    assert all(map(torch.equal, digits.load(), whole))
    assert all(map(torch.equal, digits.load(0.25), tuning))
    assert [file.read_bytes() for file in files] == content


def test_an_array_without_a_digest_is_computed_again(cache_folder):
    whole = digits.load()
    (file,) = (cache_folder / "digits").iterdir()
    np.save(file, np.zeros((1797, 66), np.uint8))  # as earlier versions wrote it
    assert all(map(torch.equal, digits.load(), whole))


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(
    "array",
    [
        np.arange(12.0).reshape(3, 4),
        np.arange(12).reshape(3, 4).T,
        np.zeros((0, 5), np.float32),
        np.array(7),
        np.array([True, False]),
    ],
)
def test_a_cached_array_is_read_unchanged(array, mapped):
    from fadamgc.cache import cached

    for make in (lambda: array, lambda: pytest.fail("computed again")):
        found = cached("some/array", make, mapped)
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert np.array_equal(found, array)


def test_temporary_files_of_killed_processes_are_removed(cache_folder):
    digits.load()
    killed, running = (cache_folder / "digits" / f".a.npy.{i}.tmp" for i in (1, 2))
    for file in (killed, running):
        file.touch()
    os.utime(killed, (1000, 1000))
    digits.load(0.25)
    assert not killed.exists()
    assert running.exists()


# Folders for compiled code


def test_only_the_user_can_enter_the_code_folder_whatever_the_umask(cache_folder):
    from fadamgc.cache import code_folder

    before = os.umask(0)
    try:
        digits.load()  # whichever comes first makes the cache folder
        assert code_folder() == cache_folder / "code"
    finally:
        os.umask(before)
    assert stat.S_IMODE(cache_folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((cache_folder / "code").stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "spoil",
    [
        lambda cache: (cache / "code").chmod(0o777),
        lambda cache: (cache / "code").chmod(0o1777),
        lambda cache: (cache / "code").chmod(0o770),
        lambda cache: cache.chmod(0o777),
        pytest.param(lambda cache: os.chown(cache / "code", NOBODY, NOBODY), marks=needs_root),
        pytest.param(lambda cache: os.chown(cache, NOBODY, NOBODY), marks=needs_root),
        lambda cache: (shutil.rmtree(cache), cache.touch()),
    ],
)
def test_a_code_folder_that_others_can_write_is_replaced_by_a_temporary_one(
    cache_folder, tmp_path, monkeypatch, caplog, spoil
):
    from fadamgc.cache import code_folder

    monkeypatch.setenv("FADAMGC_PROCESS_CODE", "")
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    at_exit = []
    monkeypatch.setattr(atexit, "register", lambda *call: at_exit.append(call))
    (cache_folder / "code").mkdir(parents=True, mode=0o700)
    spoil(cache_folder)
    with caplog.at_level(logging.WARNING, "fadamgc"):
        folder = code_folder()
        assert code_folder() == folder  # as in a worker, which finds it in its environment
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert len(caplog.messages) == 1
    assert str(cache_folder) in caplog.text
    ((remove, *arguments),) = at_exit
    remove(*arguments)
    assert not folder.exists()


def test_a_sticky_folder_above_is_accepted(cache_folder):
    from fadamgc.cache import code_folder

    cache_folder.mkdir()
    cache_folder.chmod(0o1777)
    assert code_folder() == cache_folder / "code"


@needs_root
def test_the_temporary_folder_of_another_user_is_not_used(cache_folder, tmp_path, monkeypatch):
    from fadamgc.cache import code_folder

    other_folder = tmp_path / "other_folder"
    other_folder.mkdir()
    os.chown(other_folder, NOBODY, NOBODY)
    cache_folder.touch()
    monkeypatch.setenv("FADAMGC_PROCESS_CODE", str(other_folder))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert code_folder() != other_folder
