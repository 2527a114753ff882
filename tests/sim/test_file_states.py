"""Where clients' states are between rounds."""

from __future__ import annotations

import gc
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import fadamgc
from fadamgc.federation.client_states import ClientStates
from fadamgc.federation.cost import state_bytes
from fadamgc.sim import file_states as states
from fadamgc.sim.file_states import FileStates, Slots
from places import TESTS
from problems import REPRESENTATIVES, class_task, settings_for

SHORT = {"rounds": 6, "local_steps": 3, "batch_size": 8, "seed": 2}


def simulate(algo, **options):
    task = class_task()
    return fadamgc.simulate(algo, task, **SHORT | settings_for(algo, task.n) | options)


def assert_same(a, b):
    assert a.history == b.history
    assert torch.equal(a.x, b.x)
    assert a.clients.participants == b.clients.participants
    for left, right in zip(a.clients, b.clients, strict=True):
        assert all(torch.equal(p, q) for p, q in zip(left, right, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("algo", REPRESENTATIVES.values(), ids=REPRESENTATIVES)
def test_files_change_no_bit(algo, tmp_path):
    whole = simulate(algo, states="memory")
    files = simulate(algo, states="files")
    assert isinstance(files.clients, FileStates)
    assert_same(files, whole)
    simulate(algo, states="files", rounds=3, checkpoint=tmp_path / "c")
    assert_same(simulate(algo, states="files", checkpoint=tmp_path / "c", resume=True), whole)


@pytest.mark.slow
def test_a_checkpoint_of_one_kind_is_resumed_with_the_other(tmp_path):
    algo = fadamgc.FAdamGC(init="gradient")
    whole = simulate(algo)
    for first, second in (("memory", "files"), ("files", "memory")):
        folder = tmp_path / first
        simulate(algo, states=first, rounds=3, checkpoint=folder)
        assert_same(simulate(algo, states=second, checkpoint=folder, resume=True), whole)


def test_states_that_were_never_changed_take_no_space(tmp_path):
    run = simulate(fadamgc.FAdamGC(), states="files", rounds=1, checkpoint=tmp_path / "c")
    assert len(run.clients.participants) == 3
    slot = states.PAGE
    assert (tmp_path / "c" / "states" / "states.bin").stat().st_size <= 3 * slot


@pytest.mark.slow
def test_a_temporary_file_of_states_has_no_name(tmp_path, monkeypatch):
    """So nothing is left behind, also by a process that is killed."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    seen = []
    run = simulate(
        fadamgc.FAdamGC(), states="files", callbacks=[lambda end: seen.extend(tmp_path.rglob("*"))]
    )
    assert not seen
    opened = run.clients.slots._file
    os.fstat(opened)
    del run
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(opened)


def test_a_round_that_fails_leaves_the_states_as_they_were():
    initial = (torch.zeros(4), torch.zeros(1))
    kept = FileStates(3, _State(*initial), Slots(_State(*initial)))
    kept.update({1: kept.stage(_State(torch.ones(4), torch.tensor([5.0])))})
    staged = kept.stage(_State(torch.full((4,), 9.0), torch.zeros(1)))
    kept.discard([staged])
    assert kept[1].a.tolist() == [1, 1, 1, 1]
    assert kept[1].b.tolist() == [5]
    assert kept[0].a.tolist() == [0, 0, 0, 0]
    assert kept.stage(_State(torch.zeros(4), torch.zeros(1))) == staged  # its slot is used again


def test_slots_of_the_last_checkpoint_are_not_written():
    initial = _State(torch.zeros(2), torch.zeros(1))
    kept = FileStates(1, initial, Slots(initial))

    def put(value: float) -> int:
        slot = kept.stage(_State(torch.full((2,), value), torch.zeros(1)))
        kept.update({0: slot})
        return slot

    first = put(1)
    kept.slots.named([first])
    others = {put(value) for value in range(2, 8)}
    assert first not in others
    kept.slots.named([kept.slot(0)])
    assert first in {put(8), put(9)}


def test_what_was_read_stays_as_it_was_read():
    initial = _State(torch.zeros(2), torch.zeros(1))
    kept = FileStates(1, initial, Slots(initial))
    kept.update({0: kept.stage(_State(torch.ones(2), torch.zeros(1)))})
    read = kept[0]
    read.a.add_(1)  # and nothing of that reaches the file
    assert kept[0].a.tolist() == [1, 1]


@pytest.mark.parametrize("damage", ["shorter", "other"])
def test_a_damaged_file_is_refused(tmp_path, damage):
    simulate(fadamgc.FAdamGC(), states="files", rounds=2, checkpoint=tmp_path / "c")
    file = tmp_path / "c" / "states" / "states.bin"
    data = bytearray(file.read_bytes())
    data = data[:-100] if damage == "shorter" else data[:8] + bytes([data[8] ^ 1]) + data[9:]
    file.write_bytes(data)
    with pytest.raises(fadamgc.CheckpointError, match="states.bin is damaged: "):
        simulate(fadamgc.FAdamGC(), states="files", checkpoint=tmp_path / "c", resume=True)


@pytest.mark.slow
def test_auto_goes_to_files_where_memory_would_not_do(monkeypatch):
    clients = simulate(fadamgc.FAdamGC()).clients
    assert type(clients) is ClientStates
    half = 5 * state_bytes(clients.initial)
    monkeypatch.setattr("fadamgc.sim.engine.memory", lambda _: 2 * half)
    assert type(simulate(fadamgc.FAdamGC()).clients) is FileStates
    assert type(simulate(fadamgc.FAdamGC(), rounds=1).clients) is ClientStates


def test_bad_input():
    with pytest.raises(fadamgc.InputError, match="states='disk' is not accepted; it must be"):
        simulate(fadamgc.FAdamGC(), states="disk")


@pytest.mark.slow
def test_a_full_disk_loses_nothing(tmp_path):
    """The file may grow to one state: the second is refused, and the checkpoint stays what it was."""
    code = f"""
import resource, signal, sys
sys.path[:0] = [{str(TESTS)!r}, {str(Path(__file__).parent)!r}]
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
import fadamgc
from test_file_states import simulate
simulate(fadamgc.FAdamGC(), states="files", rounds=2, checkpoint={str(tmp_path / "c")!r})
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    simulate(fadamgc.FAdamGC(), states="files", checkpoint={str(tmp_path / "c")!r}, resume=True)
except fadamgc.CheckpointError as error:
    print(error)
"""
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "a client's state cannot be written to" in said
    whole = simulate(fadamgc.FAdamGC())
    assert_same(simulate(fadamgc.FAdamGC(), checkpoint=tmp_path / "c", resume=True), whole)


@pytest.mark.slow
def test_memory_grows_with_who_took_part_and_not_with_n():
    n, sampled = 20_000, 40
    data = [(torch.zeros(1, 5), torch.zeros(1, dtype=torch.long))] * n
    task = fadamgc.Task(torch.nn.Linear(5, 500), torch.nn.functional.cross_entropy, data)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run = fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=2, sampled=sampled, local_steps=1, batch_size=1)
    assert 40 <= len(run.clients.participants) <= 80
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    everyone = n * 3 * 3000 * 4
    assert grown < everyone / 2


class _State(tuple):
    _fields = ("a", "b")

    def __new__(cls, a, b):
        return super().__new__(cls, (a, b))

    a = property(lambda self: self[0])
    b = property(lambda self: self[1])
