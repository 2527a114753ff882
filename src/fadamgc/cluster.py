"""The connection to a Ray cluster, and the pickled values that are sent to its processes.

Rounds run on actors (``sim/executors/ray_actors.py``), sweeps as tasks (``experiments/run/ray_tasks.py`` and
``sim/many.py``). Ray is imported when it is used.
"""

from __future__ import annotations

import io
import logging
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fadamgc.errors import FadamgcError, InputError, first_line
from fadamgc.loading import import_again, imports

log = logging.getLogger("fadamgc")

PREFIX = "FADAMGC_"  # environment variables with this prefix are copied to the processes of a cluster
LAST_WORDS = (
    "error: this process has ended, most likely because the Ray cluster that it was connected to is gone; "
    "checkpoints and finished runs are saved: resume, with or without Ray\n"
)
SMALL = 1 << 14  # bytes; smaller arrays are stored inside ``Parcel.text``


class ClusterError(FadamgcError):
    """A Ray cluster that cannot be reached, or that has no room for the work."""


def ray_module() -> Any:
    """Import Ray, which is an optional dependency."""
    try:
        import ray
    except ImportError as error:
        raise InputError("this needs Ray: pip install 'fadamgc[ray]'") from error
    return ray


def connect(address: str | None = None) -> Callable[[], None]:
    """Connect this process to a Ray cluster if it is not connected; return a function that undoes this.

    Args:
        address: address of the head node, ``host:port``. None and "auto" are the cluster that
            RAY_ADDRESS names or that runs on this machine; if there is none, a new one is started here.
    """
    ray = ray_module()
    if ray.is_initialized():
        return _last_words()
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address not in (None, "auto"):
            ray.init(address, **quiet)
        else:
            try:
                ray.init("auto", **quiet)
            except ConnectionError:  # no cluster is running
                ray.init("local", include_dashboard=False, _node_ip_address="127.0.0.1", **quiet)
    except Exception as error:
        raise ClusterError(
            f"the Ray cluster at {address or 'auto'!r} cannot be reached: {first_line(error)}; start one "
            "with 'ray start --head', or name another address"
        ) from error
    log.info("ray: %s", ", ".join(f"{n:g} {name}" for name, n in sorted(room().items())))
    silence = _last_words()

    def disconnect() -> None:
        silence()
        ray.shutdown()

    return disconnect


def _last_words() -> Callable[[], None]:
    """Start a watcher that prints an error if Ray ends this process; return a function that stops it.

    If the Ray processes of this machine die, Ray ends every process that is connected to them at once,
    without an exception or a message.
    """
    script = f"import sys; sys.stdin.read() or sys.stderr.write({LAST_WORDS!r})"
    process = subprocess.Popen([sys.executable, "-S", "-E", "-c", script], stdin=subprocess.PIPE)
    assert process.stdin is not None
    pipe = process.stdin

    def silence() -> None:
        with suppress(OSError):  # the process was killed
            pipe.write(b"no")
            pipe.close()
        process.wait()

    return silence


def room() -> dict[str, float]:
    """Return the number of CPUs and GPUs of the cluster."""
    resources = ray_module().cluster_resources()
    return {name: float(resources[name]) for name in ("CPU", "GPU") if resources.get(name)}


def places(cpus: float, gpus: float) -> int:
    """Return how many processes with these resources fit into the cluster at once."""
    available, needed = room(), {"CPU": cpus, "GPU": gpus}
    count = min((int(available.get(name, 0) / n) for name, n in needed.items() if n), default=1)
    if count < 1:
        has = ", ".join(f"{n:g} {name}" for name, n in sorted(available.items())) or "nothing"
        raise ClusterError(
            f"a process needs cpus={cpus:g} and gpus={gpus:g}, and the Ray cluster has {has}; ask for less, "
            "or add nodes"
        )
    return count


class Surroundings(NamedTuple):
    """The environment and the modules of this process that a process of the cluster needs as well."""

    variables: Mapping[str, str]
    imported: tuple[list[str], list[str]]

    @classmethod
    def here(cls) -> Surroundings:
        """Return the environment variables and the imports of this process."""
        return cls({k: v for k, v in os.environ.items() if k.startswith(PREFIX)}, imports())

    def take_over(self, threads: int) -> None:
        """Set the variables, the imports and the number of threads in this process, which Ray has started."""
        os.environ.update(self.variables)
        import_again(*self.imported)
        torch.set_num_threads(threads)


class Parcel(NamedTuple):
    """A pickled value. Ray copies the arrays once per node, and all processes there read the same memory."""

    text: bytes
    arrays: list[NDArray[np.uint8]]

    @property
    def size(self) -> int:
        """The number of bytes of the pickled value."""
        return len(self.text) + sum(array.nbytes for array in self.arrays)


def pack(value: object, shared: Iterable[Tensor] = ()) -> Parcel:
    """Pickle a value, with functions and classes of scripts, for another process.

    Tensors among ``shared`` become read-only views of the memory that processes of a node share; all other
    tensors are copied.
    """
    ray_module()
    from ray.cloudpickle import CloudPickler

    read_only = {id(tensor) for tensor in shared}

    class Pickler(CloudPickler):  # type: ignore[misc]
        def reducer_override(self, obj: Any) -> Any:
            if type(obj) is not Tensor or not _is_plain(obj):
                return super().reducer_override(obj)
            flat = obj.detach().contiguous().reshape(-1)
            data: Any = flat.view(torch.uint8).numpy() if obj.numel() else b""
            return _tensor, (pickle.PickleBuffer(data), obj.dtype, tuple(obj.shape), id(obj) in read_only)

    file, arrays = io.BytesIO(), list[NDArray[np.uint8]]()

    def is_part_of_text(buffer: pickle.PickleBuffer) -> bool:
        data = np.frombuffer(buffer.raw(), np.uint8)
        if data.size < SMALL:
            return True
        arrays.append(data)
        return False

    Pickler(file, protocol=5, buffer_callback=is_part_of_text).dump(value)
    return Parcel(file.getvalue(), arrays)


def unpack(packed: Parcel) -> Any:
    """Return the value that was packed, in this process."""
    return pickle.loads(packed.text, buffers=packed.arrays)


def _is_plain(tensor: Tensor) -> bool:
    return (
        tensor.device.type == "cpu"
        and tensor.layout is torch.strided
        and not tensor.requires_grad
        and not tensor.is_quantized
        and not tensor.is_conj()
        and not tensor.is_neg()
    )


def _tensor(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...], shared: bool) -> Tensor:
    """Make a tensor of packed bytes."""
    data = np.frombuffer(buffer, np.uint8)
    if shared and data.size:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of read-only memory; nothing writes to it
            return torch.from_numpy(data).view(dtype).view(shape)
    tensor = torch.empty(shape, dtype=dtype)
    if data.size:
        tensor.view(-1).view(torch.uint8).numpy()[:] = data
    return tensor
