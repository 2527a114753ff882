"""A federation on this machine: one SuperLink and some SuperNodes on loopback, in the background.

Everything is in one folder that only its owner can enter: logs, certificates and keys, the nodes' states,
Flower's own files, and ``federation.json``, which lists the processes. Only the holder of the operator's
token, which is in the folder, can use the SuperLink's Control API; see ``launch.py``.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fadamgc.errors import FadamgcError, InputError, whole
from fadamgc.files import make_folder, private_folder, write_atomic
from fadamgc.flower import access
from fadamgc.flower.experiment_runs import SERVERS_VARIABLE, app_with_keys, make_room, parse_config, read_app

STATE_FILE = "federation.json"
TOKEN_FILE = "operator.token"
FEDERATION_NAME = "local"  # in Flower's config
HOST = "127.0.0.1"
REGISTRATION_SECONDS = 15.0  # after this time a running node is assumed to be registered
BIND_CLIENTS = {"FADAMGC_BIND_CLIENTS": "on"}  # see config.py


@dataclass(frozen=True)
class Process:
    """A process that was started; its start time tells it from a later process with the same number."""

    name: str
    pid: int
    began: str  # start time, as the system writes it
    port: int
    log: str
    since: int = 0  # size of the log when the process started

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return _start_time(self.pid) == self.began

    def signal(self, number: int) -> None:
        """Send a signal to the process and its group; SIGKILL also if only others of the group still run."""
        if number == signal.SIGKILL or self.alive:
            _kill_group(self.pid, number)


@dataclass(frozen=True)
class FederationState:
    """The content of federation.json."""

    secure: bool
    processes: list[Process] = field(default_factory=list)

    @property
    def alive(self) -> list[Process]:
        """The processes that still run."""
        return [process for process in self.processes if process.alive]


class LoopbackFederation:
    """A federation on loopback, and its folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().resolve()
        self._children: list[subprocess.Popen[bytes]] = []  # processes that this object has started

    @property
    def environment(self) -> dict[str, str]:
        """The environment of Flower's commands: its files in the folder, no telemetry, this Python first."""
        variables = {"FLWR_HOME": str(self.folder / "flwr"), "PATH": access.search_path()}
        return os.environ | access.FLOWER_OFFLINE | variables

    @property
    def keys(self) -> Path:
        """The folder of certificates, keys and the operator's token."""
        return self.folder / "keys"

    def read(self) -> FederationState:
        """Read which processes were started; none if there is no file."""
        file = self.folder / STATE_FILE
        try:
            content = json.loads(file.read_bytes())
            return FederationState(content["secure"], [Process(**p) for p in content["processes"]])
        except FileNotFoundError:
            return FederationState(secure=False)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(f"{file} was not written by `fadamgc federation`: {error}") from None

    def up(self, nodes: int, secure: bool = False, wait: float = 90.0) -> FederationState:
        """Start a SuperLink and nodes, and wait until they are connected."""
        whole("nodes", nodes, 1)
        if self.read().alive:
            raise InputError(f"{self.folder} has a running federation; stop it: `fadamgc federation down`")
        for name in ("flower-superlink", "flower-supernode", "flower-superexec", "flwr"):
            flower_command(name)
        make_folder(self.folder, private=True)  # an existing folder keeps its permissions
        for name in ("flwr", "keys", "logs", "states"):
            private_folder(self.folder / name)
        link, *ports = free_ports(nodes + 1)
        if secure:
            from fadamgc.flower.certificates import ensure_certificates, ensure_node_keys

            ensure_certificates(self.keys, HOST)
            ensure_node_keys(self.keys, [f"node-{i}" for i in range(nodes)])
        write_atomic(self.folder / "flwr" / "config.toml", self._config(link, secure).encode(), private=True)
        token = access.make_token(self.keys / TOKEN_FILE)  # a new token at every start
        (self.folder / "flwr" / "credentials.yaml").unlink(missing_ok=True)  # tokens of earlier starts
        access.log_in(self.folder / "flwr", f"{HOST}:{link}", token)
        state = FederationState(secure)
        try:
            state = self._start(state, "superlink", link, self._link_command(link, secure))
            _wait_until_listening(state.processes[0], wait)
            access.check_refusals(HOST, link, self.keys / "ca.crt" if secure else None)
            for i, port in enumerate(ports):
                if secure:
                    key = self.keys / f"node-{i}.pub"
                    self.flwr("supernode", "register", str(key), FEDERATION_NAME, timeout=wait)
                command = self._node_command(i, nodes, link, port, secure)
                state = self._start(state, f"node {i}", port, command)
            for process in state.processes[1:]:
                _wait_until_registered(process, wait)
                access.check_refusals(HOST, process.port, None, [access.ACQUIRE_TASK])
        except BaseException:
            self.down()
            raise
        return state

    def warning(self) -> str | None:
        """Return a warning if the certificates of a running federation end soon."""
        from fadamgc.flower.certificates import warning

        return warning(self.keys) if self.read().secure else None

    def down(self, wait: float = 10.0) -> int:
        """Stop all processes; return how many were running."""
        running = self.read().alive
        for process in reversed(running):
            process.signal(signal.SIGTERM)
        until = time.monotonic() + wait
        while any(process.alive for process in running) and time.monotonic() < until:
            time.sleep(0.1)
        for process in running:
            process.signal(signal.SIGKILL)  # the whole group, so that no child of the process stays
        for child in self._children:  # including a child that is not in the file yet
            _kill_group(child.pid, signal.SIGKILL)
            child.wait(wait)
        self._children = []
        until = time.monotonic() + wait
        while (pids := self.leftover_processes()) and time.monotonic() < until:
            for pid in pids:  # children that have left their group
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.1)
        (self.folder / STATE_FILE).unlink(missing_ok=True)
        return len(running)

    def leftover_processes(self) -> list[int]:
        """Return the processes of Flower that use this folder; [] if the system has no /proc."""
        variable = f"FLWR_HOME={self.folder / 'flwr'}".encode()
        pids = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                command = (process / "cmdline").read_bytes()
                uses_folder = variable in (process / "environ").read_bytes().split(b"\0")
                if uses_folder and (b"flower" in command or b"flwr" in command):
                    pids.append(int(process.name))
        return [pid for pid in pids if pid != os.getpid()]

    def flwr(self, *words: str, timeout: float | None = None, show: bool = False) -> str:
        """Run Flower's own command; return its output unless it is shown."""
        done = subprocess.run(
            [flower_command("flwr"), *words],
            env=self.environment,
            timeout=timeout,
            text=True,
            stdout=None if show else subprocess.PIPE,
            stderr=None if show else subprocess.STDOUT,
            check=False,
        )
        if done.returncode:
            raise FadamgcError(f"`flwr {' '.join(words)}` failed:\n{(done.stdout or '').strip()[-2000:]}")
        return done.stdout or ""

    def run(self, app: str | Path, config: str = "", say: Callable[[str], object] = lambda _: None) -> None:
        """Run a Flower app on the federation, and show its output until it ends.

        ``config`` may have all keys of docs/flower.md. A complete experiment starts again; an interrupted
        one, or one with more rounds, resumes.
        """
        values = parse_config(config)
        _, listed = read_app(Path(app))
        folder = app_with_keys(Path(app), values, self.folder / "apps")
        if (aside := make_room(self.folder, listed | values)) is not None:
            say(f"the experiment is complete, so it starts again; its states are now in {aside}")
        words = ["run", str(folder), FEDERATION_NAME, "--stream"]
        self.flwr(*words, *(["--run-config", config] if config else []), show=True)
        # `flwr run --stream` succeeds even if the run fails, so look at the run's status.
        runs = json.loads(self.flwr("ls", FEDERATION_NAME, "--format", "json", timeout=60.0)).get("runs", [])
        last = max(runs, key=lambda run: str(run["pending-at"]), default=None)
        if last and last["status"] != "finished:completed":
            raise FadamgcError(f"the run ended as {last['status']}: {last.get('status-details') or '?'}")

    def _config(self, port: int, secure: bool) -> str:
        root = f'root-certificates = "{self.keys / "ca.crt"}"' if secure else "insecure = true"
        return (
            f'[superlink]\ndefault = "{FEDERATION_NAME}"\n\n'
            f'[superlink.{FEDERATION_NAME}]\naddress = "{HOST}:{port}"\n{root}\n'
        )

    def _link_command(self, port: int, secure: bool) -> list[str]:
        keys = self.keys
        words = [*access.launch_command("superlink"), "--operator-token", str(keys / TOKEN_FILE)]
        words += ["--host", HOST, "--port", str(port)]
        if not secure:
            return [*words, "--insecure"]
        words += ["--ssl-ca-certfile", str(keys / "ca.crt"), "--ssl-certfile", str(keys / "server.crt")]
        return [*words, "--ssl-keyfile", str(keys / "server.key"), "--enable-supernode-auth"]

    def _node_command(self, i: int, nodes: int, link: int, port: int, secure: bool) -> list[str]:
        states = self.folder / "states" / f"node-{i}"
        config = f'partition-id={i} num-partitions={nodes} state-folder="{states}"'
        words = [*access.launch_command("supernode"), "--superlink", f"{HOST}:{link}"]
        words += ["--host", HOST, "--port", str(port), "--node-config", config]
        if not secure:
            return [*words, "--insecure"]
        words += ["--root-certificates", str(self.keys / "ca.crt")]
        return [*words, "--auth-supernode-private-key", str(self.keys / f"node-{i}")]

    def _start(self, state: FederationState, name: str, port: int, command: Sequence[str]) -> FederationState:
        """Start a process and add it to the file; return the new content of the file."""
        log = self.folder / "logs" / f"{name.replace(' ', '-')}.log"
        servers = {SERVERS_VARIABLE: str(self.folder / "servers")}
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            since = file.tell()
            child = subprocess.Popen(
                command,
                env=(BIND_CLIENTS if state.secure else {}) | servers | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=self.folder,
            )
        self._children.append(child)
        process = Process(name, child.pid, _start_time(child.pid) or "", port, str(log), since)
        state = FederationState(state.secure, [*state.processes, process])
        write_atomic(self.folder / STATE_FILE, json.dumps(asdict(state), indent=1).encode(), private=True)
        return state


def free_ports(count: int) -> list[int]:
    """Return ports of loopback that no process listens on."""
    with ExitStack() as stack:
        servers = [stack.enter_context(socket.create_server((HOST, 0))) for _ in range(count)]
        return [server.getsockname()[1] for server in servers]


def flower_command(name: str) -> str:
    """Return the path of one of Flower's commands."""
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise FadamgcError(f"{name} is not installed; install Flower with: pip install 'fadamgc[flower]'")
    return str(path)


def _start_time(pid: int) -> str | None:
    """Return the start time of a process, or None if it does not run."""
    with suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)  # remove a child that has ended from the system's list
    if Path("/proc/self").exists():
        try:
            after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            return None
        return None if after_name[0] == "Z" else after_name[19]
    try:  # without /proc, the number alone has to identify the process
        os.kill(pid, 0)
    except OSError:
        return None
    return "unknown"


def _kill_group(pid: int, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, number)


def _wait_until_listening(process: Process, wait: float) -> None:
    def listening() -> bool:
        with suppress(OSError), socket.create_connection((HOST, process.port), timeout=1):
            return True
        return False

    _wait(process, listening, wait, "did not start")


def _wait_until_registered(process: Process, wait: float) -> None:
    """Wait until a node logs the number that the SuperLink has given it."""
    _wait_until_listening(process, wait)
    assumed = time.monotonic() + REGISTRATION_SECONDS

    def registered() -> bool:
        log = Path(process.log).read_bytes()[process.since :]
        return b"SuperNode ID" in log or time.monotonic() > assumed

    _wait(process, registered, wait, "was not accepted by the SuperLink")


def _wait(process: Process, condition: Callable[[], bool], wait: float, failure: str) -> None:
    until = time.monotonic() + wait
    while process.alive and time.monotonic() < until:
        if condition():
            return
        time.sleep(0.1)
    lines = Path(process.log).read_text(errors="replace").strip().splitlines()
    last = "\n".join(lines[-10:])
    raise FadamgcError(f"the {process.name} {failure}; {process.log} ends with:\n{last}")
