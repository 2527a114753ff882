"""Machine code of graphs that work in place: compiled once, kept on disk, run many times in one call.

AOTInductor writes C++ for a graph. The C++ is compiled here together with ``loop.cpp``, which runs all steps
of a block in one call, without Python and its lock. Code that was compiled before is loaded from the user's
cache folder, without importing the compiler, if nobody else can write its file and folder. If a graph cannot
be compiled, Python runs it.

This is the only file that knows torch's compiler, ``torch._inductor``, whose name is private. See
docs/adr/0004-a-local-step-is-one-graph.md.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import json
import logging
import operator
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule

from fadamgc.cache import cache_folder, code_folder, read_private, remove_old
from fadamgc.errors import first_line
from fadamgc.files import write_atomic
from fadamgc.stages import stage

log = logging.getLogger("fadamgc")

KEPT = 64  # compiled graphs that a process keeps in memory
FILES = 500  # compiled graphs that are kept on disk
TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch's variable
DIGEST = hashlib.sha256().digest_size
LOOP = Path(__file__).with_name("loop.cpp")
OPTIONS = {
    "cpp.threads": 1,
    "cpp.vec_isa_ok": True,  # otherwise torch compiles a program to test this
    "compile_threads": 1,
    "size_asserts": False,
    "aot_inductor.package": True,
    "aot_inductor.package_cpp_only": True,  # only write the source
    "aot_inductor.dynamic_linkage": False,  # a class without the C interface, which takes longer to compile
    "aot_inductor.model_name_for_generated_files": "step",  # loop.cpp includes step.wrapper.cpp
    "aot_inductor.precompile_headers": False,  # takes longer than it saves
    "aot_inductor.enable_line_tables": False,
}
# Types by their numbers in torch's C interface.
INTEGERS = {torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.bool: 11}
DTYPES = INTEGERS | {torch.float16: 5, torch.float32: 6, torch.float64: 7, torch.bfloat16: 15}

Tensors: TypeAlias = Sequence[Tensor]


class NativeCode:
    """Machine code of a step that writes its results into some of its arguments, for arguments of one layout.

    The loop over steps is part of the library and runs without Python's lock.
    """

    constants: Tensors = ()  # passed before the arguments of each call

    def __init__(self, library: bytes, arguments: Tensors) -> None:
        self._repeat = _loaded(library).fadamgc_repeat
        self._layouts = [(a.dtype, a.shape, a.stride()) for a in arguments]
        n, dims = len(arguments), [d for a in arguments for d in (*a.shape, *a.stride())]
        self._ndim = (ctypes.c_int64 * n)(*(a.ndim for a in arguments))
        self._dims = (ctypes.c_int64 * len(dims))(*dims)
        self._dtypes = (ctypes.c_int32 * n)(*(DTYPES[a.dtype] for a in arguments))

    def __call__(self, *tensors: Tensor) -> None:
        """Run one step."""
        self.repeat(tensors, ())

    def repeat(
        self, fixed: Tensors, state: Tensors, series: Tensors = (), parts: int = 1, threads: int = 1
    ) -> None:
        """Run one step for each entry of the series, (steps, lanes, ...); one step without series.

        ``state`` has one row per lane. The lanes are cut into equal ``parts``, which ``threads`` share.
        ``fixed`` are the arguments that are the same in each part and step.
        """
        lanes, fixed = len(state[0]) // parts if state else 0, [*self.constants, *fixed]
        # The arguments of the first part and step, and the bytes from there to the next step and part.
        first = [*fixed, *(t[:lanes] for t in state), *(t[0, :lanes] for t in series)]
        same = [0] * len(fixed)
        step = [*same, *(0 for _ in state), *(t.stride(0) * t.element_size() for t in series)]
        part = [
            *same,
            *(lanes * t.stride(0) * t.element_size() for t in state),
            *(lanes * t.stride(1) * t.element_size() for t in series),
        ]
        layouts = [(t.dtype, t.shape, t.stride()) for t in first]
        if layouts != self._layouts:
            raise ValueError(f"code for tensors {self._layouts} cannot run on {layouts}")
        n = len(first)
        message = ctypes.create_string_buffer(1000)
        failed = self._repeat(
            ctypes.c_int64(n),
            (ctypes.c_void_p * n)(*(t.data_ptr() for t in first)),
            self._ndim,
            self._dims,
            self._dtypes,
            (ctypes.c_int64 * n)(*step),
            (ctypes.c_int64 * n)(*part),
            *map(ctypes.c_int64, (len(series[0]) if series else 1, parts, min(threads, parts))),
            message,
            ctypes.c_int64(len(message)),
        )
        if failed:
            raise RuntimeError(message.value.decode(errors="replace"))


def _loaded(library: bytes) -> ctypes.CDLL:
    """Load a library from its content, so that the content that was checked is the one that is loaded."""
    descriptor, path = tempfile.mkstemp(".so", ".loading-", code_folder())
    try:
        with open(descriptor, "wb") as file:
            file.write(library)
        return ctypes.CDLL(path)
    finally:
        with suppress(OSError):  # Windows does not remove a loaded library; ``_keep`` does so later
            os.unlink(path)


@cache
def compiler() -> str | None:
    """Return the C++ compiler that torch would use, or None."""
    named = os.environ.get("CXX")
    return next((c for c in (named, "g++", "clang++") if c and shutil.which(c)), None)


_codes: dict[str, NativeCode | None] = {}  # None if a graph could not be compiled


def compiled(graph: Callable[..., Any], arguments: Tensors, kept_only: bool = False) -> NativeCode | None:
    """Compile a graph for arguments like these; return None if that fails, which costs only speed.

    The code of a graph serves all runs of the process, and is kept on disk for later processes. With
    ``kept_only``, return None if it is not there yet.
    """
    if not isinstance(graph, GraphModule) or compiler() is None:
        return None
    names = list(dict.fromkeys(n.target for n in graph.graph.nodes if n.op == "get_attr"))
    constants = [operator.attrgetter(name)(graph) for name in names]
    if not all(isinstance(constant, Tensor) for constant in constants):
        log.info("a graph that contains another one is not compiled")
        return None
    pure, arguments = _with_inputs(graph, names), [*constants, *arguments]
    key = _key(pure, arguments)
    if key not in _codes:
        while len(_codes) >= KEPT:
            del _codes[next(iter(_codes))]
        try:
            code = _kept(key, arguments)
            if code is None and kept_only:
                return None
            _codes[key] = code
            if code is None:
                with stage("compiling (once: the code is kept for later runs)"):
                    _codes[key] = _compile(pure, arguments, key)
        except Exception as error:  # the compiler may change between versions of torch
            log.warning("a graph is not compiled, which costs speed: %s", first_line(error))
            _codes[key] = None
    code = copy.copy(_codes[key])
    if code is not None:
        code.constants = constants
    return code


def _with_inputs(graph: GraphModule, names: Sequence[str]) -> GraphModule:
    """Return the graph with some of the tensors that it contains as its first arguments."""
    pure = GraphModule(graph, copy.deepcopy(graph.graph)) if names else graph
    front = next(iter(pure.graph.nodes))
    for name in names:
        with pure.graph.inserting_before(front):
            argument = pure.graph.placeholder(name.replace(".", "_"))
        for node in pure.graph.find_nodes(op="get_attr", target=name):
            node.replace_all_uses_with(argument)
            pure.graph.erase_node(node)
    pure.recompile()
    return pure


def _key(graph: GraphModule, arguments: Tensors) -> str:
    """Return a name for the code, such that equal names mean equal code."""
    layouts = [(tuple(a.shape), a.stride(), str(a.dtype), str(a.device)) for a in arguments]
    versions = (torch.__version__, platform.python_version(), compiler())
    parts = (graph.code, layouts, sorted(OPTIONS.items()), LOOP.read_text(), versions, _cpu())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


@cache
def _cpu() -> str:
    """Return the features of the machine's processor."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() + platform.machine()


def _compile(graph: GraphModule, arguments: Tensors, key: str) -> NativeCode:
    log.info("compiling a graph of %d operations", len(graph.graph.nodes))
    with tempfile.TemporaryDirectory(prefix="fadamgc-build-") as folder:
        library = _build(_source(graph, arguments, folder), Path(folder))
    code = NativeCode(library, arguments)
    _check(code, graph, arguments)
    _keep(key, library)
    return code


def _source(graph: GraphModule, arguments: Tensors, folder: str) -> list[str]:
    """Let AOTInductor write the C++ source of a graph; return the files."""
    for node in graph.graph.nodes:
        node.meta.clear()  # the compiler derives shapes itself, and stumbles over the recorder's
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's warnings about torch
        import torch._inductor

        compile_in_private()
        options = OPTIONS | {"aot_inductor.output_path": folder}
        files = torch._inductor.aot_compile(graph, tuple(a.clone() for a in arguments), options=options)
    if not isinstance(files, list):
        raise TypeError("AOTInductor does not say which files it has written")
    return [file for file in files if isinstance(file, str)]


def _build(files: list[str], folder: Path) -> bytes:
    """Compile the source of a step together with the loop; return the library."""
    # The file says how torch would compile and link the source.
    flags = json.loads(next(Path(file) for file in files if file.endswith("_linker_flags.json")).read_text())
    command = [
        *shlex.split(flags["compiler"]),
        str(LOOP),
        *(file for file in files if file.endswith(".o")),
        *(f"-D{name.strip()}" for name in flags["definitions"]),
        *(f"-I{path}" for path in (".", *flags["include_dirs"])),  # ".": libraries contain the name
        *(f"-{flag}" for flag in (*flags["cflags"], *flags["ldflags"])),
        *shlex.split(" ".join(flags["passthrough_args"])),
        "-w",
        *(f"-L{path}" for path in flags["libraries_dirs"]),
        *(f"-l{name}" for name in flags["libraries"]),
        "-o",
        "library.so",
    ]
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, errors="replace")
    if result.returncode:
        reason = next((line for line in result.stderr.splitlines() if "error" in line), "no message")
        raise RuntimeError(f"{flags['compiler']} failed: {reason}")
    return (folder / "library.so").read_bytes()


def _check(code: NativeCode, graph: GraphModule, arguments: Tensors) -> None:
    """Refuse code whose first step does not change the arguments as the recorded graph does.

    The results may differ by rounding, which is magnified by rules that divide by small numbers.
    """
    ours, theirs = ([a.clone() for a in arguments] for _ in range(2))
    code(*ours)
    with torch.no_grad():
        graph(*theirs)
    for before, a, b in zip(arguments, ours, theirs, strict=True):
        rounding = 8 * torch.finfo(a.dtype).eps if a.is_floating_point() else 0.0
        before, a, b = (t.double().nan_to_num(0.0, 0.0, 0.0) for t in (before, a, b))
        if (a - b).norm() > 0.5 * (b - before).norm() + rounding * before.norm():
            raise ValueError("the compiled step gives other results than the recorded step")


def compile_in_private() -> None:
    """Let torch compile in the code folder, unless the user has named another one.

    torch compiles small programs to learn what the processor can do, and loads them. Its default folder is
    ``torchinductor_USER`` in the shared temporary folder, even if another user made it.
    """
    default = os.path.join(tempfile.gettempdir(), "torchinductor_")  # torch sets the variable to this itself
    if os.environ.get(TORCH_FOLDER, default).startswith(default):
        folder = code_folder() / "torch"
        folder.mkdir(mode=0o700, exist_ok=True)
        os.environ[TORCH_FOLDER] = str(folder)


# Code on disk: a library, followed by a digest of its key and content.


def _keep(key: str, library: bytes) -> None:
    try:
        path = code_folder() / f"{key}.so"
        write_atomic(path, library + _digest(key, library), private=True)
        for old in sorted(path.parent.glob("*.so"), key=os.path.getmtime)[:-FILES]:
            old.unlink(missing_ok=True)
        remove_old(path.parent.glob(".*"))  # of processes that were killed
    except OSError as error:
        log.info("compiled code is not kept: %s", error)


def _kept(key: str, arguments: Tensors) -> NativeCode | None:
    for folder in dict.fromkeys((cache_folder() / "code", code_folder())):
        path = folder / f"{key}.so"
        try:
            data = read_private(path)
            library = data[:-DIGEST]
            if _digest(key, library) != data[-DIGEST:]:
                raise ValueError(f"{path} is damaged, or of another version")
            return NativeCode(library, arguments)
        except FileNotFoundError:
            continue
        except PermissionError as error:
            log.warning("compiled code is not used: %s", error)
        except Exception as error:  # then it is compiled again
            log.info("stored code is not used: %s", error)
    return None


def _digest(key: str, library: bytes) -> bytes:
    return hashlib.sha256(key.encode() + library).digest()
