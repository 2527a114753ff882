"""The fast ways to run: what comes out must not depend on how it was computed."""

from __future__ import annotations

import getpass
import logging
import os
import re
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import fadamgc
from compiling import needs_compiler
from fadamgc.federation.functions import TaskFunctions
from fadamgc.federation.traits import same_model
from fadamgc.models import cnn, resnet8
from fadamgc.runtime import single_threads
from fadamgc.sim.executors import ThreadsExecutor, VectorizedExecutor, auto, threads, vectorized
from fadamgc.sim.executors import fused as fuse
from fadamgc.sim.executors import inplace as rules
from fadamgc.sim.executors import machine_code as native
from fadamgc.sim.executors.machine_code import compiled
from fadamgc.sim.executors.trace import liftable, pointwise, record
from fadamgc.sim.executors.trainer import Trainer
from fadamgc.sim.resources import Resources
from fadamgc.sim.simulate import start_from
from fadamgc.tree import leaves
from places import TESTS
from problems import EVEN, REPRESENTATIVES, class_task, mlp, settings_for

FEW = {"rounds": 2, "sampled": 4, "tracked": 2, "local_steps": 3, "batch_size": 8}


def simulate(algo, task, **options):
    return fadamgc.simulate(algo, task, **FEW | options)


def pictures(clients: int = 3, samples: int = 6, side: int = 8) -> list[tuple[torch.Tensor, torch.Tensor]]:
    random = torch.Generator().manual_seed(1)
    return [
        (
            torch.randn(samples, 3, side, side, generator=random),
            torch.randint(10, (samples,), generator=random),
        )
        for _ in range(clients)
    ]


# Numbers of an algorithm as inputs of its graph


def test_a_number_that_a_rule_looks_at_stays_a_constant():
    assert liftable(fadamgc.FAdamGC()) == ("eta_l", "eta_g", "beta1", "beta2")
    assert liftable(fadamgc.FedAvg()) == ("eta_l", "eta_g")


def test_pointwise_graphs_are_told_from_others():
    x = [torch.randn(4), torch.randn(4)]
    assert pointwise(record(lambda a, b: [a * 2 + b.sqrt()], x))
    assert not pointwise(record(lambda a, b: [a / b.norm()], x))
    assert not pointwise(record(lambda a, b: [a + b.flip(0)], x))


def test_two_arguments_that_are_one_tensor_are_recorded_as_two():
    x = torch.ones(3)
    graph = record(lambda a, b: [a + 10 * b], [x, x])
    assert graph(torch.zeros(3), torch.ones(3))[0].tolist() == [10, 10, 10]


def test_recordings_of_several_threads_do_not_disturb_each_other():
    call, lookup = nn.Module.__call__, nn.Module.__getattr__

    def work(size):
        def function(a):
            return [mlp_of_size(a) * 2]

        mlp_of_size = nn.Linear(size, size)
        graphs = [record(function, [torch.ones(size)]) for _ in range(10)]
        x = torch.randn(size)
        return all(torch.equal(graph(x)[0], function(x)[0]) for graph in graphs)

    with ThreadPoolExecutor(3) as pool:
        assert all(pool.map(work, (2, 3, 4)))
    assert nn.Module.__call__ is call
    assert nn.Module.__getattr__ is lookup


# Vectorized


@needs_compiler
def test_compiled_blocks_of_any_size_give_the_same_bits():
    task = class_task(sizes=(9, 20, 8, 16, 40))
    runs = [
        simulate(
            fadamgc.FAdamGC(),
            task,
            sampled=5,
            tracked=3,
            executor=partial(VectorizedExecutor, block=block, compile=True),
        )
        for block in (1, None)
    ]
    assert runs[0].settings["compiled"]
    for run in runs[1:]:
        assert torch.equal(run.x, runs[0].x)
        assert run.history == runs[0].history


class Interpreted:
    """Takes the place of machine code: runs the recorded graph part by part."""

    def __init__(self, graph, *_):
        self.graph = graph

    def repeat(self, fixed, state, series, parts, threads):
        clients = len(state[0]) // parts
        for first in range(0, len(state[0]), clients):
            rows = slice(first, first + clients)
            for k in range(len(series[0])):
                self.graph(*fixed, *(t[rows] for t in state), *(t[k, rows] for t in series))


def check_convolutions(name, monkeypatch):
    """Compare compiled blocks of convolutions with the loop, and with blocks of other sizes."""
    algo = REPRESENTATIVES[name]
    torch.manual_seed(0)
    convolution = nn.Conv2d(3, 2, 3, stride=2, padding=1)
    module = nn.Sequential(convolution, nn.ReLU(), nn.Flatten(), nn.Linear(32, 10)).double()
    task = fadamgc.Task(module, F.cross_entropy, pictures(), pictures()[0])
    options = settings_for(algo, task.n) | {"batch_size": 4, "seed": 1}
    loop = simulate(algo, task, executor="loop", **options)
    runs = []
    for workers, block in ((1, None), (2, None), (2, 1), (1, 1)):
        monkeypatch.setattr(torch, "get_num_threads", lambda workers=workers: workers)
        make = partial(VectorizedExecutor, block=block, compile=True)
        runs.append(simulate(algo, task, executor=make, **options))
    assert all(run.settings["compiled"] for run in runs)
    assert torch.allclose(runs[0].x, loop.x, rtol=1e-9, atol=1e-12)
    for run in runs[1:]:
        assert torch.equal(run.x, runs[0].x)
        assert run.history == runs[0].history


@pytest.mark.slow
@pytest.mark.parametrize("name", REPRESENTATIVES)
def test_convolutions_in_parts_of_one_client_are_the_loop(name, monkeypatch):
    parts = []
    monkeypatch.setattr(vectorized, "compiled", Interpreted)
    monkeypatch.setattr(vectorized, "compiler", lambda: "a compiler")
    repeat = Interpreted.repeat
    monkeypatch.setattr(Interpreted, "repeat", lambda *a: parts.append(len(a[2][0]) // a[4]) or repeat(*a))
    check_convolutions(name, monkeypatch)
    assert set(parts) == {1}


@needs_compiler
def test_compiled_convolutions_are_the_loop(tmp_path, monkeypatch):
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path))
    check_convolutions("fadamgc", monkeypatch)


@needs_compiler
def test_nothing_is_compiled_again_from_round_to_round_or_run_to_run(tmp_path, monkeypatch):
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path))
    compiled = []
    original = native._compile
    monkeypatch.setattr(native, "_compile", lambda *a: compiled.append(1) or original(*a))
    monkeypatch.setattr(native, "_codes", {})
    task = class_task(EVEN)
    make = partial(VectorizedExecutor, compile=True)
    simulate(fadamgc.FedAvg(), task, executor=make)
    assert len(compiled) == 1
    simulate(fadamgc.FedAvg(eta_l=0.3, eta_g=0.5), task, executor=make)
    assert len(compiled) == 1


@needs_compiler
@pytest.mark.parametrize("executor", ["vectorized", "threads"])
def test_a_long_run_is_compiled_and_a_resumed_one_does_as_before(tmp_path, monkeypatch, executor):
    task = class_task(EVEN)
    monkeypatch.setattr("fadamgc.sim.executors.vectorized.LONG_RUN", 9)
    monkeypatch.setattr(threads, "LARGE_MODEL", 1)
    monkeypatch.setattr(threads, "LONG_RUN", 36)
    whole = simulate(fadamgc.FedAvg(), task, rounds=4, executor=executor)
    assert whole.settings["compiled"]
    short = simulate(fadamgc.FedAvg(), task, rounds=2, executor=executor, checkpoint=tmp_path / "c")
    assert not short.settings["compiled"]
    longer = simulate(fadamgc.FedAvg(), task, rounds=4, checkpoint=tmp_path / "c", resume=True)
    assert not longer.settings["compiled"]


# Steps that torch.compile fuses, as on a GPU; here for the CPU, and up to the point where kernels are written


@pytest.mark.slow
def test_fused_steps_are_the_recorded_steps(monkeypatch):
    task = class_task(sizes=(9, 20, 8, 16, 40))
    algo = fadamgc.FAdamGC(eta_l=fadamgc.schedules.cosine(0.01, rounds=2))
    plain = simulate(algo, task, executor=partial(VectorizedExecutor, compile=False))
    made = []
    monkeypatch.setattr(fuse, "DEVICES", {"cpu": "torch"})
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    monkeypatch.setattr(vectorized, "fused", lambda *a: made.append(fuse.fused(*a)) or made[-1])
    run = simulate(algo, task, executor=partial(VectorizedExecutor, compile=True))
    assert (run.settings["compiled"], len(made)) == (True, 1)
    assert made[0] is not None
    assert torch.equal(run.x, plain.x)


@pytest.mark.parametrize("devices", [{"cpu": "torch"}, {"cpu": "no_such_package"}])
def test_steps_that_cannot_be_fused_run_as_they_are(monkeypatch, caplog, devices):
    def fails(*_, **__):
        raise RuntimeError("no room\nmore of it")

    monkeypatch.setattr(fuse, "DEVICES", devices)
    monkeypatch.setattr(torch, "compile", fails)
    monkeypatch.setattr(vectorized, "compiler", lambda: None)
    run = simulate(fadamgc.FAdamGC(), class_task(), executor=partial(VectorizedExecutor, compile=True))
    plain = simulate(fadamgc.FAdamGC(), class_task(), executor=partial(VectorizedExecutor, compile=False))
    assert torch.equal(run.x, plain.x)
    assert run.settings["compiled"] is False
    assert ("not compiled, which costs speed: no room" in caplog.text) == ("torch" in devices.values())


def test_without_a_compiler_it_runs_all_the_same(monkeypatch):
    monkeypatch.setattr("fadamgc.sim.executors.vectorized.compiler", lambda: None)
    run = simulate(fadamgc.FAdamGC(), class_task(), executor=partial(VectorizedExecutor, compile=True))
    assert run.settings["compiled"] is False


@needs_compiler
def test_a_graph_that_cannot_be_compiled_is_run_as_it_is(tmp_path, monkeypatch, caplog):
    def fails(*_, **__):
        raise RuntimeError("no room\nmore of it")

    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path))
    monkeypatch.setattr("torch._inductor.aot_compile", fails)
    monkeypatch.setattr(native, "_codes", {})
    task = class_task()
    with caplog.at_level(logging.WARNING, "fadamgc"):
        run = simulate(fadamgc.FAdamGC(), task, executor=partial(VectorizedExecutor, compile=True))
    assert "not compiled, which costs speed: no room" in caplog.text
    assert run.settings["compiled"] is False
    assert torch.equal(run.x, simulate(fadamgc.FAdamGC(), task, executor="vectorized").x)


# Machine code


def step_with_series():
    """A step in place on two lanes, and its arguments: a constant, a state, an entry of a series."""

    def step(rate, state, entry):
        state.copy_(state + rate * (entry - state).mean(dim=1, keepdim=True))
        return []

    return step, [torch.tensor(0.5), torch.arange(6.0).reshape(2, 3), torch.ones(2, 3)]


@pytest.fixture(scope="module")
def compiled_step(tmp_path_factory):
    """Code of that step, and the folder that it is kept in."""
    folder = tmp_path_factory.mktemp("code")
    step, arguments = step_with_series()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("FADAMGC_CACHE", str(folder))
        patch.setattr(native, "_codes", {})
        return compiled(record(step, arguments), arguments), folder


@needs_compiler
@pytest.mark.parametrize("again", [False, True])
def test_machine_code_does_what_the_graph_does_whatever_the_parts(compiled_step, monkeypatch, again):
    step, arguments = step_with_series()
    code, folder = compiled_step
    if again:  # as a later process would: from the folder alone
        monkeypatch.setenv("FADAMGC_CACHE", str(folder))
        monkeypatch.setattr(native, "_codes", {})
        monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
        code = compiled(record(step, arguments), arguments)
    assert isinstance(code, native.NativeCode)
    rate, state, series = torch.tensor(0.5), torch.randn(8, 3), torch.randn(5, 8, 3)
    slow, quick = state.clone(), state.clone()
    for first in range(0, 8, 2):
        for entry in series:
            step(rate, slow[first : first + 2], entry[first : first + 2])
    code.repeat([rate], [quick], [series], parts=4)
    assert torch.allclose(slow, quick)
    assert not torch.allclose(slow, state)
    alone = state[2:4].clone()
    for entry in series:
        code(rate, alone, entry[2:4])
    assert torch.equal(alone, quick[2:4])


@needs_compiler
def test_machine_code_refuses_tensors_of_another_layout(compiled_step):
    _, arguments = step_with_series()
    code, _ = compiled_step
    with pytest.raises(ValueError, match="cannot run on"):
        code(arguments[0], torch.zeros(3, 2).T, arguments[2])
    with pytest.raises(ValueError, match="cannot run on"):
        code(arguments[0], torch.zeros(2, 3, dtype=torch.float64), arguments[2])


@needs_compiler
def test_an_error_in_machine_code_is_an_error_in_python(tmp_path, monkeypatch):
    def step(state, at):
        state.copy_(state[at])
        return []

    arguments = [torch.zeros(2, 3), torch.tensor([0, 1])]
    code = compiled(record(step, arguments), arguments)
    assert isinstance(code, native.NativeCode)
    with pytest.raises(RuntimeError, match="failed"):
        code(torch.zeros(2, 3), torch.tensor([0, 7]))
    assert torch.is_grad_enabled()
    code(*arguments)
    assert torch.is_grad_enabled()


@needs_compiler
def test_python_runs_while_machine_code_runs(compiled_step):
    code, _ = compiled_step
    arguments = [torch.tensor(0.5)], [torch.zeros(2, 3)], [torch.zeros(300_000, 2, 3)]
    began = time.perf_counter()
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(code.repeat, *arguments)
        times = []
        while not future.done():
            times.append(time.perf_counter() - began)
            time.sleep(0.001)
    middle = (time.perf_counter() - began) / 2
    assert any(middle / 2 < t < middle * 3 / 2 for t in times)


@needs_compiler
def test_code_on_disk_is_used_without_the_compiler(compiled_step):
    program = """
import sys, torch
from fadamgc.sim.executors.machine_code import compiled
from test_executors import record, step_with_series
step, arguments = step_with_series()
code = compiled(record(step, arguments), arguments)
assert code is not None
assert "torch._inductor.compile_fx" not in sys.modules
"""
    paths = [str(Path(fadamgc.__file__).parents[1]), str(TESTS), str(Path(__file__).parent)]
    environment = {**os.environ, "FADAMGC_CACHE": str(compiled_step[1]), "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run([sys.executable, "-c", program], env=environment, check=True)


@needs_compiler
def test_tensors_in_a_graph_are_arguments_of_its_code(tmp_path, monkeypatch):
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_codes", {})

    def step_with(weight):
        def step(state):
            state.copy_(state * weight + 1)
            return []

        return step

    codes = []
    for weight in (torch.tensor([1.0, 2, 3]), torch.tensor([4.0, 5, 6])):
        arguments = [torch.ones(2, 3)]
        graph = record(step_with(weight), arguments)
        assert any(node.op == "get_attr" for node in graph.graph.nodes)
        codes.append(compiled(graph, arguments))
        assert codes[-1] is not None
    assert len(native._codes) == 1
    for code, expected in zip(codes, ([2.0, 3, 4], [5.0, 6, 7]), strict=True):
        state = torch.ones(4, 3)
        code.repeat([], [state], parts=2)
        assert state.tolist() == [expected] * 4


@pytest.fixture
def without_gcc(compiled_step, monkeypatch):
    """The source is written as always; the library is one that was built before."""
    (kept,) = (compiled_step[1] / "code").glob("*.so")
    built = []
    library = kept.read_bytes()[: -native.DIGEST]
    monkeypatch.setattr(native, "_build", lambda *files: built.append(files) or library)
    return built


@needs_compiler
@pytest.mark.parametrize("damage", [lambda data: data[:1000], lambda data: b"x" + data[1:], lambda _: b""])
def test_damaged_code_on_disk_is_compiled_again(compiled_step, tmp_path, monkeypatch, without_gcc, damage):
    (kept,) = (compiled_step[1] / "code").glob("*.so")
    file = tmp_path / "code" / kept.name
    file.parent.mkdir()
    file.write_bytes(damage(kept.read_bytes()))
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_codes", {})
    step, arguments = step_with_series()
    code = compiled(record(step, arguments), arguments)
    assert code is not None
    assert len(without_gcc) == 1
    assert file.read_bytes() == kept.read_bytes()


@pytest.fixture
def planted_code(compiled_step, tmp_path, monkeypatch):
    """A copy of the folder with the step's code, as a later process would find it, and the file in it."""
    shutil.copytree(compiled_step[1], tmp_path / "cache")
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FADAMGC_PROCESS_CODE", "")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(native, "_codes", {})
    (file,) = (tmp_path / "cache" / "code").glob("*.so")
    return file


OTHERS = pytest.mark.skipif(
    not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root gives files away"
)


@needs_compiler
@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.chmod(0o666),
        lambda file: file.parent.chmod(0o777),
        lambda file: file.parent.parent.chmod(0o777),
        pytest.param(lambda file: os.chown(file, 65534, 65534), marks=OTHERS),
        pytest.param(lambda file: os.chown(file.parent, 65534, 65534), marks=OTHERS),
        lambda file: file.symlink_to(file.rename(file.parent.parent / "library.so")),
    ],
)
def test_code_that_others_own_or_can_write_is_not_loaded(planted_code, monkeypatch, caplog, spoil):
    step, arguments = step_with_series()
    monkeypatch.setattr(native, "_compile", lambda *_: None)
    assert compiled(record(step, arguments), arguments) is not None
    spoil(planted_code)
    monkeypatch.setattr(native, "_codes", {})
    with caplog.at_level(logging.INFO, "fadamgc"):
        assert compiled(record(step, arguments), arguments) is None
    assert str(planted_code.parent.parent) in caplog.text


@needs_compiler
def test_code_is_loaded_from_a_folder_that_cannot_be_written(planted_code, monkeypatch):
    step, arguments = step_with_series()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert compiled(record(step, arguments), arguments) is not None


@needs_compiler
def test_the_code_of_another_graph_is_not_loaded(planted_code, monkeypatch):
    step, _ = step_with_series()
    monkeypatch.setattr(native, "_compile", lambda *_: None)
    other = [torch.tensor(0.5), torch.zeros(2, 4), torch.ones(2, 4)]
    key = native._key(record(step, other), other)
    planted_code.rename(planted_code.with_stem(key))
    assert compiled(record(step, other), other) is None


@needs_compiler
def test_the_library_that_was_checked_is_the_one_that_is_loaded(planted_code, monkeypatch):
    step, arguments = step_with_series()
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("compiled again"))
    original = native.ctypes.CDLL

    def load(path):
        planted_code.write_bytes(b"planted after the check")
        return original(path)

    monkeypatch.setattr(native.ctypes, "CDLL", load)
    code = compiled(record(step, arguments), arguments)
    code(*arguments)
    assert torch.allclose(arguments[1], torch.tensor([[0.0, 1, 2], [1.5, 2.5, 3.5]]))


@needs_compiler
@pytest.mark.usefixtures("without_gcc")
def test_torch_does_not_compile_in_a_folder_that_others_made(tmp_path, monkeypatch):
    shared = tmp_path / "shared"
    shared.mkdir()
    shared.chmod(0o1777)
    theirs = shared / f"torchinductor_{getpass.getuser()}"
    theirs.mkdir()
    theirs.chmod(0o777)
    if hasattr(os, "geteuid") and os.geteuid() == 0:
        os.chown(theirs, 65534, 65534)
    monkeypatch.setattr(tempfile, "tempdir", str(shared))
    monkeypatch.delenv("TORCHINDUCTOR_CACHE_DIR", raising=False)
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "_codes", {})
    original, modes = native._build, []

    def build(files, folder):
        places = (folder, os.environ[native.TORCH_FOLDER])
        modes.extend(stat.S_IMODE(os.stat(place).st_mode) for place in places)
        return original(files, folder)

    monkeypatch.setattr(native, "_build", build)

    step, arguments = step_with_series()
    assert compiled(record(step, arguments), arguments) is not None
    assert not list(theirs.iterdir())
    assert modes == [0o700, 0o700]
    assert os.environ[native.TORCH_FOLDER] == str(tmp_path / "cache" / "code" / "torch")


@needs_compiler
def test_torch_compiles_where_the_user_says(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "mine"))
    native.compile_in_private()
    assert os.environ["TORCHINDUCTOR_CACHE_DIR"] == str(tmp_path / "mine")


@needs_compiler
@pytest.mark.usefixtures("without_gcc")
def test_code_is_compiled_also_where_it_cannot_be_kept(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path / "file"))
    monkeypatch.setattr(native, "_codes", {})
    step, arguments = step_with_series()
    assert compiled(record(step, arguments), arguments) is not None


def other_class(source):
    source.write_text(source.read_text().replace("AOTInductorModelstep", "AnotherName"))


def writes_nothing(source):
    text = source.read_text()
    first = text.index("inputs.clear();")
    assert text.count("inputs.clear();") == 1
    source.write_text(text[:first] + "return; " + text[first:])


@needs_compiler
@pytest.mark.parametrize(
    ("change", "message"),
    [(other_class, "failed: .*error"), (writes_nothing, "gives other results than the recorded step")],
)
def test_source_of_a_compiler_that_works_differently_is_not_used(
    tmp_path, monkeypatch, caplog, change, message
):
    original = native._build

    def build(files, folder):
        change(next(Path(file) for file in files if file.endswith(".cpp")))
        return original(files, folder)

    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_codes", {})
    monkeypatch.setattr(native, "_build", build)
    step, arguments = step_with_series()
    with caplog.at_level(logging.WARNING, "fadamgc"):
        code = compiled(record(step, arguments), arguments)
    assert code is None
    monkeypatch.setattr(native, "_compile", lambda *_: pytest.fail("tried again"))
    assert compiled(record(*step_with_series()), arguments) is None
    assert re.search(f"not compiled, which costs speed: .*{message}", caplog.text)
    assert not list((tmp_path / "code").glob("*.so"))


@needs_compiler
def test_threads_inside_a_block_change_no_bit(monkeypatch):
    task = class_task(sizes=(9, 20, 8, 16, 40))
    before, runs, used = torch.get_num_threads(), [], []
    repeat = native.NativeCode.repeat

    def watched(self, fixed, state, series=(), parts=1, threads=1):
        if series:
            used.append((torch.get_num_threads(), parts, threads))
        repeat(self, fixed, state, series, parts, threads)

    monkeypatch.setattr(native.NativeCode, "repeat", watched)
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            make = partial(VectorizedExecutor, compile=True)
            runs.append(simulate(fadamgc.FAdamGC(), task, sampled=5, tracked=3, executor=make))
            assert torch.get_num_threads() == count
            # The threads share the clients, and torch uses no others in each of them.
            assert set(used) == {(1, count, count)}
            used.clear()
    finally:
        torch.set_num_threads(before)
    for run in runs[1:]:
        assert torch.equal(run.x, runs[0].x)
        assert run.history == runs[0].history


# Threads


class Noise(nn.Module):
    """Random numbers by functions that take a generator under another name only."""

    def forward(self, x):
        shift = torch.randint(0, 3, (len(x), 1)) + torch.randint(2, (len(x), 1))
        return x + torch.rand(x.shape) + torch.randn(len(x), 1) + shift


@pytest.mark.parametrize(
    "model", [mlp(), mlp(0, nn.Dropout(0.5)), mlp(0, nn.BatchNorm1d(8)), mlp(0, Noise())]
)
def test_the_number_of_threads_changes_no_bit(model):
    task = class_task(sizes=(8, 20, 9, 16, 40), model=model)
    runs = [
        simulate(fadamgc.FAdamGC(), task, executor=partial(ThreadsExecutor, workers=workers))
        for workers in (1, 2, 5)
    ]
    for run in runs[1:]:
        assert torch.equal(run.x, runs[0].x)
        assert run.history == runs[0].history


def test_threads_leave_the_number_of_threads_as_it_was():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        simulate(fadamgc.FedAvg(), class_task(), executor=partial(ThreadsExecutor, workers=3))
        assert torch.get_num_threads() == 2
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(torch.get_num_threads).result() == 2
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
@pytest.mark.parametrize("norm", ["group", "batch"])
@pytest.mark.parametrize("width", [4, 16])
def test_pictures_with_channels_last_agree_with_the_loop(norm, width):
    task = fadamgc.Task(resnet8(norm=norm, width=width, seed=0), F.cross_entropy, pictures())
    assert Trainer(TaskFunctions(task)).channels_last == (width == 16)
    options = {"sampled": 3, "tracked": 2, "batch_size": 6, "local_steps": 1, "rounds": 1}
    algo = fadamgc.FedAvg(eta_l=0.01)
    one, two = (simulate(algo, task, executor=e, **options) for e in ("loop", "threads"))
    moved = (one.x - TaskFunctions(task).x0).norm()
    assert (two.x - one.x).norm() < 1e-3 * moved
    options |= {"dtype": torch.float64, "local_steps": 2}
    one, two = (simulate(fadamgc.FAdamGC(), task, executor=e, **options) for e in ("loop", "threads"))
    torch.testing.assert_close(two.x, one.x, rtol=1e-8, atol=1e-10)


SHARED = fadamgc.compose(fadamgc.local.Adam(amsgrad=True, v="share"), "pre+direction")


@pytest.mark.parametrize("algo", [*REPRESENTATIVES.values(), SHARED, fadamgc.FedNova()], ids=repr)
def test_rules_in_pieces_are_the_rules(algo, monkeypatch):
    task = class_task()
    options = {"executor": "threads", **settings_for(algo, task.n, 4, 2)}
    whole = simulate(algo, task, **options)
    monkeypatch.setattr(rules, "PIECE", 7)
    monkeypatch.setattr(rules, "WIDE_PIECE", 11)
    cut = simulate(algo, task, **options)
    assert torch.equal(cut.x, whole.x)
    for one, other in zip(cut.clients, whole.clients, strict=True):
        assert all(map(torch.equal, leaves(one), leaves(other)))


@needs_compiler
@pytest.mark.parametrize("name", ["fadamgc", "fa_nt_local"])
def test_compiled_rules_in_pieces_are_the_rules(name, monkeypatch):
    algo, task = fadamgc.make_algorithm(name), class_task()
    options = {"sampled": None, "tracked": None, "dtype": torch.float64}
    plain = simulate(algo, task, executor=partial(ThreadsExecutor, compile=True), **options)
    assert plain.settings["compiled"]
    reference = simulate(algo, task, executor="loop", **options)
    torch.testing.assert_close(plain.x, reference.x, rtol=1e-12, atol=1e-13)
    for one, other in zip(plain.clients, reference.clients, strict=True):
        torch.testing.assert_close(list(one), list(other), rtol=1e-11, atol=1e-12)
    monkeypatch.setattr(rules, "PIECE", 16)  # of which the model has several, and a rest
    ran = []
    original = native.NativeCode.repeat
    monkeypatch.setattr(
        native.NativeCode, "repeat", lambda *a, **kw: ran.append(kw.get("parts", 1)) or original(*a, **kw)
    )
    fast = simulate(algo, task, executor=partial(ThreadsExecutor, compile=True), **options)
    assert set(ran) == {len(plain.x) // 16, 1}
    assert torch.equal(fast.x, plain.x)
    for one, other in zip(fast.clients, plain.clients, strict=True):
        assert all(map(torch.equal, one, other))


class Count(NamedTuple):
    k: torch.Tensor


class Counting(fadamgc.FedAvg):
    """Steps that become shorter: the client counts them."""

    def begin(self, down, client, g=None):
        return Count(torch.zeros((), dtype=down.x.dtype))

    def step(self, down, client, local, x, g):
        return x - self.eta_l * (g / (1 + local.k)), Count(local.k + 1)


def test_what_is_not_a_vector_changes_once_a_step(monkeypatch):
    monkeypatch.setattr(rules, "PIECE", 7)
    monkeypatch.setattr(rules, "WIDE_PIECE", 11)
    one, other = (
        simulate(Counting(), class_task(), executor=e, dtype=torch.float64) for e in ("loop", "threads")
    )
    torch.testing.assert_close(other.x, one.x, rtol=1e-12, atol=1e-13)


def test_memory_of_a_job_is_used_again_unless_a_result_is_in_it():
    workspace, x = rules.Workspace(), torch.zeros(5)
    one, two = (workspace.vector(x, torch.float32) for _ in range(2))
    assert one.data_ptr() != two.data_ptr()
    workspace.take_back(except_for=[two, torch.zeros(5)])
    three, four = (workspace.vector(x, torch.float32) for _ in range(2))
    assert three.data_ptr() == one.data_ptr()
    assert four.data_ptr() not in (one.data_ptr(), two.data_ptr())
    workspace.take_back(except_for=())
    assert workspace.vector(x, torch.float64).dtype == torch.float64
    assert len(workspace.vector(torch.zeros(7), torch.float32)) == 7


class Normalised(fadamgc.FedAvg):
    """Local steps of length one: not a rule for each number on its own."""

    def step(self, down, client, local, x, g):
        return x - self.eta_l * g / g.norm(), local


def test_rules_that_look_at_whole_vectors_are_not_cut(monkeypatch):
    monkeypatch.setattr(rules, "PIECE", 7)
    monkeypatch.setattr(rules, "WIDE_PIECE", 11)
    one, *others = (
        simulate(Normalised(), class_task(), executor=e, dtype=torch.float64)
        for e in ("loop", "threads", "vectorized")
    )
    for other in others:
        torch.testing.assert_close(other.x, one.x, rtol=1e-12, atol=1e-13)


def test_jobs_with_most_work_come_first():
    arguments = {"algorithm": fadamgc.FedAvg(), "task": class_task(sizes=(2, 3, 40, 4, 5))}
    engine = start_from(arguments | {"rounds": 1, "local_epochs": 1, "batch_size": 1}, Resources())
    assert [job.client for job in threads.largest_first(engine.begin())] == [2, 4, 3, 1, 0]


def test_threads_share_one_queue(monkeypatch):
    """Two threads: while one has the largest job, the other does all other jobs."""
    task = class_task(sizes=(2, 3, 40, 4, 5))
    order, small_ones_done = [], threading.Event()
    original = Trainer.train

    def one(self, job, *rest):
        if job.client == 2:
            assert small_ones_done.wait(60)
        result = original(self, job, *rest)
        order.append(job.client)
        if len(order) == 4:
            small_ones_done.set()
        return result

    monkeypatch.setattr(Trainer, "train", one)
    fadamgc.simulate(
        fadamgc.FedAvg(),
        task,
        rounds=1,
        local_epochs=1,
        batch_size=1,
        executor=partial(ThreadsExecutor, workers=2),
    )
    assert order == [4, 3, 1, 0, 2]


def test_an_error_in_a_thread_names_the_client_and_stops_the_others():
    class Picky(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = mlp()

        def forward(self, x):
            if len(x) == 3:
                raise ValueError("three")
            return self.inner(x)

    with pytest.raises(fadamgc.FadamgcError, match="failed for client 0 in round 1, at local step 1.*three"):
        simulate(fadamgc.FedAvg(), class_task(model=Picky()), sampled=6, executor="threads")


# The choice


made = auto._made


def chosen(monkeypatch, seconds, task, **options):
    monkeypatch.setattr(auto, "LONG_RUN", 0)
    monkeypatch.setattr(auto, "_step_seconds", lambda executor, *_: seconds[executor.name])
    return simulate(fadamgc.FedAvg(), task, **options).settings["executor"]


@pytest.mark.usefixtures("two_threads")
def test_auto_takes_another_executor_only_if_it_is_clearly_faster(monkeypatch, caplog):
    task = class_task()
    near = {"vectorized": 1.1, "loop": 1.0, "threads": 1.5}
    assert chosen(monkeypatch, near, task) == "vectorized"
    with caplog.at_level(logging.INFO, "fadamgc"):
        assert chosen(monkeypatch, near | {"threads": 0.5}, task) == "threads"
    assert "executor auto: threads (a step of one client: vectorized 1.1e+03 ms" in caplog.text


def test_auto_times_what_can_run(monkeypatch, caplog):
    monkeypatch.setattr(auto, "LONG_RUN", 0)
    task = fadamgc.Task(cnn(side=8, widths=(2, 3), seed=0), F.cross_entropy, pictures())
    options = {"rounds": 1, "sampled": 3, "tracked": 3, "batch_size": 4}
    with caplog.at_level(logging.INFO, "fadamgc"):
        run = simulate(fadamgc.FAdamGC(), task, **options)
    assert run.settings["executor"] in ("threads", "loop")
    assert "loop" in caplog.text
    assert "threads" in caplog.text
    assert "vectorized" not in caplog.text


@pytest.mark.parametrize(("expected_saving", "runs"), [(0.9, 1), (1.1, 1), (0.4, 2), (0.6, 2)])
def test_auto_compiles_if_that_is_expected_to_save_more_than_it_costs(monkeypatch, expected_saving, runs):
    tried = []
    monkeypatch.setattr(auto, "_try_compiled", lambda *_: tried.append(True))
    client_steps, step = 2 * 4 * 3, 1e-3
    monkeypatch.setattr(auto, "COMPILING", client_steps * step / 2 / expected_saving)
    seconds = {"vectorized": step, "loop": 2 * step, "threads": 2 * step}
    monkeypatch.setattr(auto, "LONG_RUN", 0)
    monkeypatch.setattr(auto, "_step_seconds", lambda executor, *_: seconds[executor.name])
    many = [{"algorithm": fadamgc.FedAvg(), "seed": seed} for seed in range(runs)]
    fadamgc.simulate_many(many, task=class_task(), progress=False, **FEW)
    assert tried == [True] * (expected_saving * runs > 1)


def test_auto_times_code_that_is_kept_and_compiles_none(monkeypatch):
    asked = []
    monkeypatch.setattr(auto, "LONG_RUN", 0)
    monkeypatch.setattr(vectorized, "compiler", lambda: "a compiler")
    monkeypatch.setattr(vectorized, "compiled", lambda _, __, kept_only: asked.append(kept_only))
    run = simulate(fadamgc.FedAvg(), class_task(EVEN), executor="auto")
    assert asked == [True]
    assert not run.settings["compiled"]


def test_code_that_is_not_kept_is_not_compiled(tmp_path, monkeypatch):
    monkeypatch.setenv("FADAMGC_CACHE", str(tmp_path))
    monkeypatch.setattr(native, "_codes", {})
    monkeypatch.setattr(native, "_compile", lambda *_: "code")
    step, arguments = step_with_series()
    graph = record(step, arguments)
    if native.compiler() is None:
        pytest.skip("no C++ compiler")
    assert compiled(graph, arguments, kept_only=True) is None
    assert native._codes == {}


def test_auto_compiles_small_convolutions_and_a_resumed_run_does_as_before(tmp_path, monkeypatch):
    monkeypatch.setattr(auto, "LONG_RUN", 0)
    monkeypatch.setattr(auto, "COMPILING", 1e-6)
    monkeypatch.setattr(vectorized, "compiled", Interpreted)
    monkeypatch.setattr(vectorized, "compiler", lambda: "a compiler")
    seconds = {"threads": 2e-3, "loop": 2e-3, "vectorized": 1e-3}
    monkeypatch.setattr(auto, "_step_seconds", lambda executor, *_: seconds[executor.name])
    module = nn.Sequential(nn.Conv2d(3, 2, 3, stride=2), nn.Flatten(), nn.Linear(18, 10))
    task = fadamgc.Task(module, F.cross_entropy, pictures())
    options = {"sampled": 3, "tracked": 3, "batch_size": 4, "local_steps": 1, "checkpoint": tmp_path / "c"}
    run = simulate(fadamgc.FedAvg(), task, rounds=1, **options)
    assert (run.settings["executor"], run.settings["compiled"]) == ("vectorized", True)
    monkeypatch.setattr(auto, "choose_executor", lambda *_, **__: pytest.fail("chosen again"))
    longer = simulate(fadamgc.FedAvg(), task, rounds=2, resume=True, **options)
    assert (longer.settings["executor"], longer.settings["compiled"]) == ("vectorized", True)


@pytest.mark.parametrize("step", [0.1, 1e-3])
def test_auto_does_not_compile_convolutions_that_take_long(step, monkeypatch):
    monkeypatch.setattr(auto, "LONG_RUN", 0)
    monkeypatch.setattr(auto, "COMPILING", 1e-6)
    tried = []
    monkeypatch.setattr(auto, "_made", lambda make, *a: tried.append(make.name) or made(make, *a))
    monkeypatch.setattr(auto, "_step_seconds", lambda *_: step)
    task = fadamgc.Task(cnn(side=8, widths=(2, 3), seed=0), F.cross_entropy, pictures())
    workload = start_from(
        {"algorithm": fadamgc.FedAvg(), "task": task, **FEW, "sampled": 3}, Resources()
    ).workload
    tried.clear()
    auto.choose_executor(workload)
    assert tried == ["threads", "loop"] + ["vectorized"] * (step < auto.SHORT_OPERATIONS)


def test_auto_by_rule_in_short_runs():
    assert simulate(fadamgc.FedAvg(), class_task()).settings["executor"] == "vectorized"
    task = fadamgc.Task(cnn(side=8, widths=(2, 3), seed=0), F.cross_entropy, pictures())
    run = simulate(fadamgc.FedAvg(), task, rounds=1, sampled=3, tracked=3, batch_size=4)
    assert run.settings["executor"] == "threads"
    dropout = class_task(model=mlp(0, nn.Dropout(0.5)))
    assert simulate(fadamgc.FedAvg(), dropout).settings["executor"] == "loop"


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (partial(ThreadsExecutor, workers=0), "workers=0 is not accepted; it must be a whole number >= 1"),
        (partial(VectorizedExecutor, block=0), "block=0 is not accepted"),
    ],
)
def test_wrong_settings_of_an_executor_are_refused(make, said):
    with pytest.raises(fadamgc.InputError, match=said):
        simulate(fadamgc.FedAvg(), class_task(), executor=make)


# What tells tasks apart


class Scaled(nn.Module):
    """A module whose description does not say all."""

    def __init__(self, factor: float) -> None:
        super().__init__()
        self.inner, self.factor = mlp(), [factor]

    def forward(self, x):
        return self.inner(x) * self.factor[0]


def test_tasks_are_alike_only_if_model_and_loss_are():
    def alike(task, other):
        return same_model(TaskFunctions(task), TaskFunctions(other), *task.pairs[1])

    assert alike(class_task(seed=0), class_task(seed=1))
    assert not alike(class_task(seed=0), class_task(model=nn.Linear(5, 3)))
    twice, thrice = (class_task(model=Scaled(factor)) for factor in (2, 3))
    assert not alike(twice, thrice)
    assert alike(twice, class_task(model=Scaled(2), seed=4))


def test_threads_compute_with_one_thread_each():
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        pool = single_threads(2)
        assert [pool.submit(torch.get_num_threads).result() for _ in range(4)] == [1] * 4
        assert torch.get_num_threads() == 2
        pool.shutdown()
    finally:
        torch.set_num_threads(before)


@pytest.mark.slow
def test_a_run_in_threads_imports_neither_the_compiler_nor_pandas():
    script = """
import sys
import torch, fadamgc
import fadamgc.tasks.build, fadamgc.experiments.tune
data = [(torch.ones(8, 3), torch.arange(8) % 2)] * 4
task = fadamgc.Task(torch.nn.Linear(3, 2), torch.nn.functional.cross_entropy, data, data[0])
fadamgc.simulate(fadamgc.FAdamGC(), task, rounds=2, batch_size=4, executor="threads", progress=False)
loaded = {"torch._dynamo", "pandas", "pyarrow", "matplotlib"} & set(sys.modules)
assert not loaded, loaded
"""
    environment = os.environ | {"PYTHONPATH": str(Path(fadamgc.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120, env=environment)
