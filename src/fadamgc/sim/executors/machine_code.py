"""Machine code of graphs that work in place: compiled once, kept on disk, run many times in one call.

torch's compiler writes a C++ function for a graph. It is called here without Python in between: a short
loop in C++ goes through all steps of a block while other threads go on with theirs. Code that was compiled
before is loaded from the user's cache folder, without the compiler being imported. Only code from files and
folders that nobody else can write is loaded.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.fx import GraphModule

from fadamgc.cache import cache_folder, code_folder, read_private, remove_old
from fadamgc.files import write_atomic

log = logging.getLogger("fadamgc")

KEPT = 64  # codes that a process keeps
FILES = 500  # and that are kept on disk
TORCH_FOLDER = "TORCHINDUCTOR_CACHE_DIR"  # torch's variable
TORCH_ROOM = 1 << 30  # bytes of torch's folder above which its old files are removed
DIGEST = hashlib.sha256().digest_size
OPTIONS = {
    "cpp.threads": 1,
    "cpp.vec_isa_ok": True,  # or a program would be compiled only to find that out
    "compile_threads": 1,
    "cpp_cache_precompile_headers": False,  # takes longer than it saves
    "cpp_wrapper": True,
    "size_asserts": False,
}

# torch's function takes tensors, whose handles it consumes, and gives Python's lock back while it works. Here
# it is called without the lock, by the loop that is added to its text.
RELEASE = "py::gil_scoped_release_simple release;"
TAKES = "steal_from_raw_handles_to_raii_handles(input_handles, {})"
LOOP = r"""
#include <cstring>
#include <thread>

namespace at {
void set_num_threads(int);
}

namespace {
struct Arguments {
  int64_t n;              // tensors
  char** data;            // where they begin
  const int64_t* ndim;    // their dimensions,
  const int64_t* dims;    // sizes and strides, one tensor after the other,
  const int32_t* dtype;   // and types
  const int64_t* step;    // bytes from one step to the next; 0 if it is the same
  const int64_t* part;    // bytes from one part to the next
  int64_t steps;
};

void check(AOTITorchError code) {
  if (code) throw std::runtime_error("a tensor cannot be made");
}

struct NoGrad {  // as long as it lives, whatever ends it
  const bool before = aoti_torch_grad_mode_is_enabled();
  NoGrad() { aoti_torch_grad_mode_set_enabled(false); }
  ~NoGrad() { aoti_torch_grad_mode_set_enabled(before); }
};

void run_part(const Arguments& a, int64_t part) {
  const NoGrad no_grad;
  std::vector<RAIIAtenTensorHandle> fixed(a.n);
  std::vector<AtenTensorHandle> now(a.n);
  for (int64_t k = 0; k < a.steps; ++k) {
    const int64_t* size = a.dims;
    for (int64_t i = 0; i < a.n; size += 2 * a.ndim[i++]) {
      if (a.step[i] == 0 && k > 0) {
        check(aoti_torch_new_tensor_handle(fixed[i].get(), &now[i]));
        continue;
      }
      char* data = a.data[i] + part * a.part[i] + k * a.step[i];
      check(aoti_torch_create_tensor_from_blob(
          data, a.ndim[i], size, size + a.ndim[i], 0, a.dtype[i], aoti_torch_device_type_cpu(), 0, &now[i]));
      if (a.step[i] == 0) {
        fixed[i] = RAIIAtenTensorHandle(now[i]);
        check(aoti_torch_new_tensor_handle(fixed[i].get(), &now[i]));
      }
    }
    inductor_entry_impl(now.data(), nullptr);
  }
}
}  // namespace

extern "C" int32_t fadamgc_repeat(int64_t n, char** data, const int64_t* ndim, const int64_t* dims,
                                  const int32_t* dtype, const int64_t* step, const int64_t* part,
                                  int64_t steps, int64_t parts, int64_t threads, char* message,
                                  int64_t room) {
  const Arguments arguments{n, data, ndim, dims, dtype, step, part, steps};
  std::vector<std::string> errors(threads);
  auto run = [&](int64_t i) {
    try {
      for (int64_t part = i; part < parts; part += threads) run_part(arguments, part);
    } catch (const std::exception& error) {
      errors[i] = std::string("failed: ") + error.what();
    } catch (...) {
      errors[i] = "failed";
    }
  };
  std::vector<std::thread> others;
  for (int64_t i = 1; i < threads; ++i)
    others.emplace_back([&run, i] {
      at::set_num_threads(1);  // of this thread, whose own would otherwise be as many as there are cores
      run(i);
    });
  run(0);
  for (auto& other : others) other.join();
  for (const auto& error : errors)
    if (!error.empty()) {
      std::strncpy(message, error.c_str(), room - 1);
      return 1;
    }
  return 0;
}
"""
DTYPES = {  # by the numbers that they have in torch's C interface
    torch.uint8: 0,
    torch.int8: 1,
    torch.int16: 2,
    torch.int32: 3,
    torch.int64: 4,
    torch.float16: 5,
    torch.float32: 6,
    torch.float64: 7,
    torch.bool: 11,
    torch.bfloat16: 15,
}


class Code:
    """A function of tensors that writes its results into some of them."""

    machine = False  # whether it is machine code

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def __call__(self, *tensors: Tensor) -> None:
        """One step."""
        self.function(*tensors)

    def repeat(
        self,
        fixed: Sequence[Tensor],
        state: Sequence[Tensor],
        series: Sequence[Tensor] = (),
        parts: int = 1,
        threads: int = 1,  # noqa: ARG002
    ) -> None:
        """A step for each entry of the series, along their first dimension; one step if there are none.

        Args:
            fixed: arguments that are the same in each part and step.
            state: arguments that have a row for each lane, and so may be cut into parts.
            series: arguments of each step, (steps, lanes, ...).
            parts: into how many equal parts the lanes are cut.
            threads: among how many threads the parts are dealt out, where that is possible.
        """
        lanes = len(state[0]) // parts
        for first in range(0, lanes * parts, lanes):
            own = [t[first : first + lanes] for t in state]
            for k in range(len(series[0]) if series else 1):
                self(*fixed, *own, *(t[k, first : first + lanes] for t in series))


class PythonCode(Code):
    """Machine code that is called from Python."""

    machine = True


class NativeCode(Code):
    """Machine code that is called from a loop in C++, without Python's lock."""

    machine = True

    def __init__(self, library: bytes, arguments: Sequence[Tensor]) -> None:
        self._repeat = _loaded(library).fadamgc_repeat
        self._layouts = [(a.dtype, a.shape, a.stride()) for a in arguments]
        n, dims = len(arguments), [d for a in arguments for d in (*a.shape, *a.stride())]
        self._ndim = (ctypes.c_int64 * n)(*(a.ndim for a in arguments))
        self._dims = (ctypes.c_int64 * len(dims))(*dims)
        self._dtypes = (ctypes.c_int32 * n)(*(DTYPES[a.dtype] for a in arguments))

    def __call__(self, *tensors: Tensor) -> None:
        """One step."""
        self._run(tensors, [0] * len(tensors), [0] * len(tensors))

    def repeat(
        self,
        fixed: Sequence[Tensor],
        state: Sequence[Tensor],
        series: Sequence[Tensor] = (),
        parts: int = 1,
        threads: int = 1,
    ) -> None:
        """A step for each entry of the series; one step if there are none."""
        lanes, same = len(state[0]) // parts, [0] * len(fixed)
        step = [*same, *(0 for _ in state), *(t.stride(0) * t.element_size() for t in series)]
        part = [
            *same,
            *(lanes * t.stride(0) * t.element_size() for t in state),
            *(lanes * t.stride(1) * t.element_size() for t in series),
        ]
        first = [*fixed, *(t[:lanes] for t in state), *(t[0, :lanes] for t in series)]
        self._run(first, step, part, len(series[0]) if series else 1, parts, min(threads, parts))

    def _run(
        self,
        first: Sequence[Tensor],
        step: list[int],
        part: list[int],
        steps: int = 1,
        parts: int = 1,
        threads: int = 1,
    ) -> None:
        given = [(t.dtype, t.shape, t.stride()) for t in first]
        if given != self._layouts:
            raise ValueError(f"code for tensors {self._layouts} cannot run on {given}")
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
            ctypes.c_int64(steps),
            ctypes.c_int64(parts),
            ctypes.c_int64(threads),
            message,
            ctypes.c_int64(len(message)),
        )
        if failed:
            raise RuntimeError(message.value.decode(errors="replace"))


def _loaded(library: bytes) -> ctypes.CDLL:
    """Load a library of which the content is given, so that it is the content that was checked."""
    descriptor, path = tempfile.mkstemp(".so", ".loading-", code_folder())
    try:
        with open(descriptor, "wb") as file:
            file.write(library)
        return ctypes.CDLL(path)
    finally:
        with suppress(OSError):  # Windows does not remove what is loaded; ``_keep`` does so later
            os.unlink(path)


@cache
def compiler() -> str | None:
    """The C++ compiler that torch would use, or None."""
    given = os.environ.get("CXX")
    return next((c for c in (given, "g++", "clang++") if c and shutil.which(c)), None)


_codes: dict[Any, Code] = {}


def compiled(graph: Callable[..., Any], arguments: Sequence[Tensor]) -> Code:
    """The graph as machine code for arguments like these, or the graph where that cannot be had.

    The code of a graph serves all runs of the process, and is kept on disk for later ones. It computes with
    one thread.
    """
    if not isinstance(graph, GraphModule) or compiler() is None:
        return Code(graph)
    if any(node.op == "get_attr" for node in graph.graph.nodes):  # constants of its own
        return _compile(graph, arguments, None)
    key = _key(graph, arguments)
    if key not in _codes:
        while len(_codes) >= KEPT:
            del _codes[next(iter(_codes))]
        _codes[key] = _kept(key, arguments) or _compile(graph, arguments, key)
    return _codes[key]


def _key(graph: GraphModule, arguments: Sequence[Tensor]) -> str:
    """A name for the code, such that equal names mean equal code."""
    layouts = [(tuple(a.shape), a.stride(), str(a.dtype), str(a.device)) for a in arguments]
    versions = (torch.__version__, platform.python_version(), compiler())
    parts = (graph.code, layouts, sorted(OPTIONS.items()), LOOP, versions, _cpu())
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:40]


@cache
def _cpu() -> str:
    """What the machine's processor can do."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        return platform.processor() + platform.machine()


def _compile(graph: GraphModule, arguments: Sequence[Tensor], key: str | None) -> Code:
    for node in graph.graph.nodes:
        node.meta.clear()  # the compiler finds shapes itself, and stumbles over the recorder's
    try:
        log.info("compiling a graph of %d operations", len(graph.graph.nodes))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, to torch
            import torch._inductor

            _compile_in_private()
            with _text_changed():
                function = torch._inductor.compile(graph, [a.clone() for a in arguments], options=OPTIONS)
    except Exception as error:
        log.warning("a graph is not compiled, which costs speed: %s", str(error).strip().splitlines()[0])
        return Code(graph)
    code = PythonCode(function)
    if key is None:
        return code
    try:
        return _native(code, arguments, key)
    except Exception as error:  # another version of torch may do it differently
        log.info("compiled code is called from Python: %s", error)
        return code


_torch_folder: str | None = None  # that this process has chosen


def _compile_in_private() -> None:
    """Let torch compile in the code folder, unless the user has named another one.

    torch's own choice is ``torchinductor_USER`` in the shared temporary folder, even if somebody else made
    it; and torch loads what it finds there.
    """
    global _torch_folder
    named = os.environ.get(TORCH_FOLDER)
    default = os.path.join(tempfile.gettempdir(), "torchinductor_")  # torch sets the variable to this itself
    if named is None or named == _torch_folder or named.startswith(default):
        folder = code_folder() / "torch"
        folder.mkdir(mode=0o700, exist_ok=True)
        files, size = [], 0
        for path in folder.rglob("*"):
            with suppress(OSError):  # another process removes its temporary files
                if path.is_file():
                    size += path.stat().st_size
                    files.append(path)
        if size > TORCH_ROOM:
            remove_old(files)  # torch makes missing files again
        os.environ[TORCH_FOLDER] = _torch_folder = str(folder)


@contextmanager
def _text_changed() -> Iterator[None]:
    """The compiler's text for a graph gets the loop, and does not give back a lock that it does not have."""
    from torch._inductor.codecache import CppWrapperCodeCache

    original = CppWrapperCodeCache.load_pybinding

    def load(argtypes: Any, main_code: str, *rest: Any, **named: Any) -> Any:
        if main_code.count(RELEASE) == 1:
            main_code = main_code.replace(RELEASE, "") + LOOP
        return original(argtypes, main_code, *rest, **named)

    with patch.object(CppWrapperCodeCache, "load_pybinding", load):
        yield


def _native(code: Code, arguments: Sequence[Tensor], key: str) -> Code:
    """The code that was just compiled, to be called without Python, if it is seen to do the same."""
    from torch._inductor.codecache import PyCodeCache

    entry = next(m.inductor_entry for m in reversed(PyCodeCache.modules) if hasattr(m, "inductor_entry"))
    library = Path(entry.__self__.__file__)
    text = library.with_suffix(".cpp").read_text()
    if TAKES.format(len(arguments)) not in text or LOOP not in text:
        raise ValueError("the function has other arguments")
    data = library.read_bytes()
    native = NativeCode(data, arguments)
    ours, theirs = ([a.clone() for a in arguments] for _ in range(2))
    native(*ours)
    code(*theirs)
    if not all(_same(a, b) for a, b in zip(ours, theirs, strict=True)):
        raise ValueError("it does something else when called directly")
    _keep(key, data)
    return native


def _same(a: Tensor, b: Tensor) -> bool:
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


# Code on disk: a library, followed by a digest of its key and content.


def _keep(key: str, library: bytes) -> None:
    try:
        path = code_folder() / f"{key}.so"
        write_atomic(path, library + _digest(key, library))
        path.chmod(0o600)
        for old in sorted(path.parent.glob("*.so"), key=os.path.getmtime)[:-FILES]:
            old.unlink(missing_ok=True)
        remove_old(path.parent.glob(".*"))  # of processes that were killed
    except OSError as error:
        log.info("compiled code is not kept: %s", error)


def _kept(key: str, arguments: Sequence[Tensor]) -> Code | None:
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
            log.info("compiled code of another time is not used: %s", error)
    return None


def _digest(key: str, library: bytes) -> bytes:
    return hashlib.sha256(key.encode() + library).digest()
