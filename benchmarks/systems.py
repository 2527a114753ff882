"""The systems that are measured, and how their workers are started, asked and stopped."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from environments import FOLDER, HERE, ROOT, python_of, say
from workloads import Workload

START_TIMEOUT = 900.0  # seconds; a cold compiler or Ray on a loaded machine
TURN_TIMEOUT = 1800.0
STOP_TIMEOUT = 15.0
DISTURBED = 0.3  # cores used by other processes; above this limit, a turn is repeated
TRIES = 4  # of a turn that other processes disturb
PAUSE = 5.0  # seconds before the next try
TICKS = os.sysconf("SC_CLK_TCK")

# Loopback only, and a process namespace that ends with its first process: nothing that Ray or torchrun
# starts can be reached from outside or survives the worker.
ISOLATED = ("unshare", "-rn", "--pid", "--fork", "--kill-child", "--mount-proc")
LOOPBACK = ("sh", "-c", 'ip link set lo up && exec "$@"', "sh")


OURS = ("workers.ours", "workers.gradients")  # these use the huge pages that importing fadamgc turns on


@dataclass(frozen=True)
class System:
    """One way to run a round.

    Attributes:
        name: short, unique.
        label: for tables.
        environment: "own", "pfl" or "flower".
        module: the worker.
        arguments: of the worker, in addition to workload and optimizer.
        optimizers: the local optimizers with which it is measured.
        images_only: skip the system if the inputs are not images.
        processes: if above 1, started by torchrun.
        isolated: runs in its own namespaces.
    """

    name: str
    label: str
    module: str
    environment: str = "own"
    arguments: tuple[str, ...] = ()
    optimizers: tuple[str, ...] = ("sgd", "adam")
    images_only: bool = False
    processes: int = 1
    isolated: bool = False

    def runs(self, workload: Workload, optimizer: str) -> bool:
        """Return whether the system is measured on a workload with an optimizer."""
        if workload.texts and self.environment != "own":
            return False  # the other environments do not contain transformers
        return optimizer in self.optimizers and not (self.images_only and len(workload.shape) != 3)

    def command(self, workload: str, optimizer: str, *more: str) -> list[str]:
        """Return the command that starts a worker."""
        torchrun = ("torch.distributed.run", "--standalone", "--nproc-per-node", str(self.processes), "-m")
        # The workloads import this package, which turns huge pages on; elsewhere torch's default is measured.
        return [
            *(() if self.module in OURS else ("env", "THP_MEM_ALLOC_ENABLE=0")),
            *((*ISOLATED, *LOOPBACK) if self.isolated else ()),
            str(python_of(self.environment)),
            "-m",
            *(torchrun if self.processes > 1 else ()),
            self.module,
            f"--workload={workload}",
            f"--optimizer={optimizer}",
            *self.arguments,
            *more,
        ]


def _ours(algorithm: str, label: str, *optimizers: str) -> System:
    return System(
        f"ours_{algorithm}",
        label,
        "workers.ours",
        arguments=(f"--algorithm={algorithm}",),
        optimizers=optimizers,
    )


SYSTEMS = (
    System("bare", "bare loop, 2 threads", "workers.bare"),
    System(
        "bare_channels_last",
        "bare loop, channels_last",
        "workers.bare",
        arguments=("--channels-last",),
        images_only=True,
    ),
    System(
        "gradients",
        "gradients alone, 2 threads x 1",
        "workers.gradients",
        optimizers=("adam",),
        images_only=True,
    ),
    # FedAvg is also measured next to the Adam methods, so that FAdamGC can be compared with it.
    _ours("fedavg", "fadamgc, FedAvg", "sgd", "adam"),
    _ours("local_adam", "fadamgc, LocalAdam", "adam"),
    _ours("fadamgc", "fadamgc, FAdamGC", "adam"),
    System(
        "ours_fadamgc_ray",
        "fadamgc, FAdamGC, 2 Ray actors",
        "workers.ours",
        arguments=("--algorithm=fadamgc", "--executor=ray"),
        optimizers=("adam",),
        isolated=True,
    ),
    System("pfl", "pfl", "workers.pfl_worker", "pfl"),
    System("pfl_fused", "pfl, fused optimizer", "workers.pfl_worker", "pfl", ("--fused",)),
    System(
        "pfl_2_processes",
        "pfl, fused, 2 processes x 1 thread",
        "workers.pfl_worker",
        "pfl",
        ("--fused",),
        processes=2,
        isolated=True,
    ),
    System("flower", "Flower (Ray), 2 actors x 1 thread", "workers.flower_worker", "flower", isolated=True),
)


def environment_variables() -> dict[str, str]:
    """Return the environment variables of every worker."""
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(HERE), str(ROOT / "src")]),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(FOLDER / "flwr_home"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "TOKENIZERS_PARALLELISM": "false",
    }


class WorkerError(RuntimeError):
    """A worker did not start, or stopped unexpectedly; the message is the last line of its log."""


@dataclass
class Turn:
    """The result of one ``go``."""

    seconds: list[float]
    cpu: float
    """CPU seconds of the worker and its children, per second of the turn."""
    others: float
    """CPU seconds of everything else on the machine, per second of the turn."""
    counts: bool = False
    """Whether the turn counts in the table, or was repeated."""
    moved: dict[str, int] = field(default_factory=dict)
    """Bytes that Ray has moved, by direction."""

    def as_json(self) -> dict[str, Any]:
        """Return the fields, without those that are empty."""
        return {name: value for name, value in asdict(self).items() if value != {}}


@dataclass
class Worker:
    """A running worker, for a ``with`` statement: at its end, the worker and all its processes are stopped.

    Args:
        command: the command that starts it.
        variables: environment variables, in addition to the usual ones.
    """

    command: list[str]
    variables: dict[str, str] = field(default_factory=dict)
    process: subprocess.Popen[bytes] = field(init=False)
    ready: dict[str, Any] = field(init=False, default_factory=dict)
    peak: dict[int, int] = field(init=False, default_factory=dict)
    idle_cpu: float = field(init=False, default=0.0)
    idle_seconds: float = field(init=False, default=0.0)

    def __enter__(self) -> Self:
        self.log = tempfile.TemporaryFile()  # closed in __exit__
        self.process = subprocess.Popen(
            self.command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.log,
            cwd=ROOT,
            env={**environment_variables(), **self.variables},
            start_new_session=True,
        )
        try:
            self.ready = self._answer(START_TIMEOUT)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        self._rest()
        return self

    def go(self, rounds: int) -> Turn:
        """Let the worker run some rounds, and wait for them."""
        self.idle_cpu += self.cpu() - self._cpu_before
        self.idle_seconds += time.monotonic() - self._since
        cpu, busy, began = self.cpu(), busy_seconds(), time.monotonic()
        assert self.process.stdin is not None
        try:
            self.process.stdin.write(f"go {rounds}\n".encode())
            self.process.stdin.flush()
        except BrokenPipeError:
            raise WorkerError(self.last_words()) from None
        answer = self._answer(TURN_TIMEOUT)
        lasted = time.monotonic() - began
        cpu, busy = self.cpu() - cpu, busy_seconds() - busy
        self._rest()
        moved = answer.get("moved", {})
        return Turn(answer["seconds"], cpu / lasted, max(0.0, busy - cpu) / lasted, moved=moved)

    def _rest(self) -> None:
        for pid, memory in peaks(self.process.pid).items():
            self.peak[pid] = max(memory, self.peak.get(pid, 0))
        self._cpu_before, self._since = self.cpu(), time.monotonic()

    def cpu(self) -> float:
        """Return the CPU seconds of the worker and its children."""
        return sum(cpu_seconds(pid) for pid in tree(self.process.pid))

    def _answer(self, timeout: float) -> dict[str, Any]:
        assert self.process.stdout is not None
        readable, _, _ = select.select([self.process.stdout], [], [], timeout)
        if not readable:
            raise WorkerError(f"no answer within {timeout:.0f} s")
        line = self.process.stdout.readline()
        if not line:
            raise WorkerError(self.last_words())
        answer: dict[str, Any] = json.loads(line)
        return answer

    def last_words(self) -> str:
        """Return the last line of the worker's log that is not empty."""
        self.log.seek(0)
        lines = [line.strip() for line in self.log.read().decode(errors="replace").splitlines()]
        return next((line for line in reversed(lines) if line), "no message")[:300]

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            if kind is None and self.process.poll() is None:
                self.process.stdin.write(b"quit\n")
                self.process.stdin.close()
                self.process.wait(STOP_TIMEOUT)
        except (BrokenPipeError, subprocess.TimeoutExpired):
            pass
        finally:
            end_group(self.process)
            self.process.stdout.close()
            self.log.close()


def take_turn(worker: Worker, rounds: int) -> list[Turn]:
    """Run one turn, again if it was disturbed; only the last try counts.

    A loop on two threads is many times slower when another process uses one of the cores, which would flatter
    every other system. So a turn is repeated if other processes were busy. The rule looks at the CPU time of
    other processes, never at the time of the turn, and is the same for all systems. The last try counts in
    any case, and the table says how many turns were disturbed.
    """
    tries: list[Turn] = []
    for number in range(TRIES):
        tries.append(worker.go(rounds))
        if tries[-1].others <= DISTURBED:
            break
        say(f"  disturbed: other processes used {tries[-1].others:.2f} cores")
        if number < TRIES - 1:
            time.sleep(PAUSE)
    tries[-1].counts = True
    return tries


def end_group(process: subprocess.Popen[Any]) -> None:
    """Stop a process that leads a process group, and the rest of the group."""
    for sign, patience in ((signal.SIGTERM, 3.0), (signal.SIGKILL, 10.0)):
        try:
            os.killpg(process.pid, sign)
            process.wait(patience)
        except ProcessLookupError:
            break
        except subprocess.TimeoutExpired:
            continue
    process.wait()


def tree(pid: int) -> Iterator[int]:
    """Yield a process and its descendants."""
    yield pid
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = {int(c) for thread in threads for c in (thread / "children").read_text().split()}
    except (FileNotFoundError, ProcessLookupError):
        return
    for child in children:
        yield from tree(child)


def peaks(pid: int) -> dict[int, int]:
    """Return the peak resident memory in bytes (VmHWM) of each process of a tree."""
    found = {}
    for one in tree(pid):
        try:
            found[one] = status(one)["VmHWM"]
        except (FileNotFoundError, ProcessLookupError, KeyError):
            continue
    return found


def status(pid: int | str = "self") -> dict[str, int]:
    """Return the memory lines of /proc/PID/status, in bytes."""
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    pairs = (line.split(":", 1) for line in lines if line.endswith(" kB"))
    return {name: int(value.split()[0]) * 1024 for name, value in pairs}


def cpu_seconds(pid: int) -> float:
    """Return the CPU seconds of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return 0.0
    return sum(map(int, fields[11:15])) / TICKS


def busy_seconds() -> float:
    """Return the CPU seconds that all cores have worked since the machine was started."""
    user, nice, system, _idle, _wait, *rest = map(
        int, Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    )
    return (user + nice + system + sum(rest[:2])) / TICKS


def run_probe(arguments: list[str], variables: dict[str, str] | None = None, timeout: float = 7200) -> Any:
    """Run a measurement in a new process and return its result."""
    process = subprocess.Popen(
        [sys.executable, "-m", "workers.probe", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        cwd=ROOT,
        env={**environment_variables(), **(variables or {})},
        start_new_session=True,
        text=True,
    )
    try:
        output, errors = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        raise WorkerError(f"not finished within {timeout:.0f} s") from None
    finally:
        end_group(process)
    if process.returncode:
        raise WorkerError((errors.strip().splitlines() or ["no message"])[-1][:300])
    return json.loads(output.strip().splitlines()[-1])
