"""A federation on this machine: one SuperLink and some SuperNodes on loopback, started and stopped.

Everything is in one folder: logs, certificates and keys, the nodes' states, Flower's own files, and
``federation.json``, which says what runs. Only its owner can enter the folder.

The SuperLink's Control API is for the holder of the operator's token, which is in the folder; ``launch.py``
says what that closes.
"""

from __future__ import annotations

import http.client
import json
import os
import secrets
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path

from fadamgc.errors import FadamgcError, InputError, whole
from fadamgc.files import make_folder, private_folder, write_atomic

FILE = "federation.json"
TOKEN = "operator.token"
LAUNCH = Path(__file__).with_name("launch.py")
ACQUIRE = "/v1/runtime/acquire-task"
STRANGER = (  # what lets a stranger run code, or act as an app
    *("/v1/control/start-run", "/v1/control/register-node"),
    *(ACQUIRE, "/v1/runtime/start-automation"),
)
FEDERATION_NAME = "local"  # of the federation in Flower's config
HOST = "127.0.0.1"
RETRY = 5.0  # seconds
SILENT = 15.0  # seconds after which a node that lives is taken to be there, whatever it says
QUIET = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


BOUND = {"FADAMGC_BIND_CLIENTS": "on"}  # a client belongs to the node key that first spoke for it


@dataclass(frozen=True)
class Process:
    """A process that was started, such that another with the same number is not taken for it."""

    name: str
    pid: int
    began: str  # as the system has it
    port: int
    log: str
    since: int = 0  # where in the log its own lines begin

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return _began(self.pid) == self.began


@dataclass(frozen=True)
class State:
    """What federation.json says."""

    secure: bool
    processes: list[Process] = field(default_factory=list)

    @property
    def alive(self) -> list[Process]:
        """What runs."""
        return [process for process in self.processes if process.alive]


class LoopbackFederation:
    """A local federation in a folder."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().resolve()
        self._children: list[subprocess.Popen[bytes]] = []  # what this very process has started

    @property
    def environment(self) -> dict[str, str]:
        """For Flower's commands: its files in the folder, no telemetry, this Python first."""
        return os.environ | QUIET | {"FLWR_HOME": str(self.folder / "flwr"), "PATH": search_path()}

    @property
    def keys(self) -> Path:
        """The folder of certificates, keys and the operator's token."""
        return self.folder / "keys"

    def read(self) -> State:
        """What was started; nothing if there is no file."""
        try:
            plain = json.loads((self.folder / FILE).read_bytes())
            return State(plain["secure"], [Process(**process) for process in plain["processes"]])
        except FileNotFoundError:
            return State(secure=False)
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.folder / FILE} is not what `fadamgc federation` wrote: {error}"
            ) from None

    def up(self, nodes: int, secure: bool = False, wait: float = 90.0) -> State:
        """Start a SuperLink and nodes; they are there when this returns."""
        whole("nodes", nodes, 1)
        if self.read().alive:
            raise InputError(
                f"a federation is running in {self.folder}; stop it with `fadamgc federation down`"
            )
        for name in ("flower-superlink", "flower-supernode", "flower-superexec", "flwr"):
            _command(name)
        make_folder(self.folder, private=True)  # one that exists may be the user's for other things, too
        for name in ("flwr", "keys", "logs", "states"):
            private_folder(self.folder / name)
        link, *ports = free_ports(nodes + 1)
        if secure:
            from fadamgc.flower.certificates import ensure_certificates, ensure_node_keys

            ensure_certificates(self.keys, HOST)
            ensure_node_keys(self.keys, [f"node-{i}" for i in range(nodes)])
        write_atomic(self.folder / "flwr" / "config.toml", self._config(link, secure).encode(), private=True)
        token = make_token(self.keys / TOKEN)  # another one at every start
        (self.folder / "flwr" / "credentials.yaml").unlink(missing_ok=True)  # of earlier starts
        log_in(self.folder / "flwr", f"{HOST}:{link}", token)
        state = State(secure)
        try:
            state = self._start(state, "superlink", link, self._link_command(link, secure))
            _listening(state.processes[0], wait)
            check_refusals(HOST, link, self.keys / "ca.crt" if secure else None)
            for i, port in enumerate(ports):
                if secure:
                    self.flwr(
                        "supernode",
                        "register",
                        str(self.keys / f"node-{i}.pub"),
                        FEDERATION_NAME,
                        timeout=wait,
                    )
                state = self._start(
                    state, f"node {i}", port, self._node_command(i, nodes, link, port, secure)
                )
            for process in state.processes[1:]:
                _registered(process, wait)
                check_refusals(HOST, process.port, None, [ACQUIRE])
        except BaseException:
            self.down()
            raise
        return state

    def warning(self) -> str | None:
        """What to say about the certificates of a federation that runs, if they end soon."""
        if not self.read().secure:
            return None
        from fadamgc.flower.certificates import warning

        return warning(self.keys)

    def down(self, wait: float = 10.0) -> int:
        """Stop everything; how many processes ran."""
        running = self.read().alive
        for process in reversed(running):
            _signal(process, signal.SIGTERM)
        until = time.monotonic() + wait
        while any(process.alive for process in running) and time.monotonic() < until:
            time.sleep(0.1)
        for process in running:
            _signal(process, signal.SIGKILL)  # of the whole group, so that nothing it started stays
        for child in self._children:  # also one that did not get into the file
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait(wait)
        self._children = []
        for pid in self._left():  # what they have started in sessions of their own
            with suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        (self.folder / FILE).unlink(missing_ok=True)
        return len(running)

    def _left(self) -> list[int]:
        """Processes of Flower's that have this folder as their home, as far as the system tells."""
        mark = f"FLWR_HOME={self.folder / 'flwr'}".encode()
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                its = (process / "environ").read_bytes().split(b"\0")
                line = (process / "cmdline").read_bytes()
                if mark in its and (b"flower" in line or b"flwr" in line):
                    found.append(int(process.name))
        return [pid for pid in found if pid != os.getpid()]

    def start_again(self, name: str, wait: float = 180.0) -> Process:
        """Start a node again that has died; its state is in its files.

        A SuperLink takes a node with a key back only when it has missed the dead one for a minute or so, and
        such a node ends at once when it is too early: it is tried until then.
        """
        state = self.read()
        old = next((process for process in state.processes if process.name == name), None)
        if old is None or old.alive:
            raise InputError(f"{name!r} cannot be started again: it {'runs' if old else 'is not known'}")
        nodes = len(state.processes) - 1
        i = int(name.removeprefix("node "))
        link = state.processes[0].port
        others = State(state.secure, [process for process in state.processes if process.name != name])
        until = time.monotonic() + wait
        while True:
            (port,) = free_ports(1)
            command = self._node_command(i, nodes, link, port, state.secure)
            process = self._start(others, name, port, command).processes[-1]
            try:
                _registered(process, until - time.monotonic())
            except FadamgcError:
                _signal(process, signal.SIGKILL)  # what it has started does not end by itself
                if time.monotonic() + RETRY > until:
                    raise
                time.sleep(RETRY)
            else:
                return process

    def flwr(self, *words: str, timeout: float | None = None, show: bool = False) -> str:
        """Run Flower's own command."""
        done = subprocess.run(
            [_command("flwr"), *words],
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

    def run(self, app: str | Path, config: str = "") -> None:
        """Run a Flower app here, and show what it says until it ends."""
        if not (Path(app) / "pyproject.toml").is_file():
            raise InputError(f"app={str(app)!r} is no Flower app: it has no pyproject.toml")
        words = ["run", str(app), FEDERATION_NAME, "--stream", *(["--run-config", config] if config else [])]
        self.flwr(*words, show=True)
        runs = json.loads(self.flwr("ls", FEDERATION_NAME, "--format", "json", timeout=60.0)).get("runs", [])
        if runs:  # what was streamed ends well, whatever the run does
            last = max(runs, key=lambda run: str(run["pending-at"]))
            if last["status"] != "finished:completed":
                raise FadamgcError(f"the run ended as {last['status']}: {last.get('status-details') or '?'}")

    def _config(self, port: int, secure: bool) -> str:
        lines = [f"[superlink.{FEDERATION_NAME}]", f'address = "{HOST}:{port}"']
        root = self.keys / "ca.crt"
        lines.append(f'root-certificates = "{root}"' if secure else "insecure = true")
        return "\n".join(["[superlink]", f'default = "{FEDERATION_NAME}"', "", *lines]) + "\n"

    def _link_command(self, port: int, secure: bool) -> list[str]:
        words = [*launch("superlink"), "--operator-token", str(self.keys / TOKEN)]
        words += ["--host", HOST, "--port", str(port)]
        if not secure:
            return [*words, "--insecure"]
        return [
            *words,
            *("--ssl-ca-certfile", str(self.keys / "ca.crt")),
            *("--ssl-certfile", str(self.keys / "server.crt")),
            *("--ssl-keyfile", str(self.keys / "server.key")),
            "--enable-supernode-auth",
        ]

    def _node_command(self, i: int, nodes: int, link: int, port: int, secure: bool) -> list[str]:
        where = self.folder / "states" / f"node-{i}"
        config = f'partition-id={i} num-partitions={nodes} state-folder="{where}"'
        words = [*launch("supernode"), "--superlink", f"{HOST}:{link}"]
        words += ["--host", HOST, "--port", str(port), "--node-config", config]
        if not secure:
            return [*words, "--insecure"]
        return [
            *words,
            *("--root-certificates", str(self.keys / "ca.crt")),
            *("--auth-supernode-private-key", str(self.keys / f"node-{i}")),
        ]

    def _start(self, state: State, name: str, port: int, command: Sequence[str]) -> State:
        log = self.folder / "logs" / f"{name.replace(' ', '-')}.log"
        with open(log, "ab", opener=lambda path, flags: os.open(path, flags, 0o600)) as file:
            since = file.tell()
            started = subprocess.Popen(
                command,
                env=(BOUND if state.secure else {}) | self.environment,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                cwd=self.folder,
            )
        self._children.append(started)
        process = Process(name, started.pid, _began(started.pid) or "", port, str(log), since)
        state = State(state.secure, [*state.processes, process])
        write_atomic(self.folder / FILE, json.dumps(asdict(state), indent=1).encode(), private=True)
        return state


def make_token(path: Path) -> str:
    """Write an operator's token to a file that only its owner can read."""
    token = secrets.token_urlsafe(32)
    write_atomic(path, token.encode(), private=True)
    return token


def log_in(home: Path, address: str, token: str) -> None:
    """Let Flower's command send the operator's token to a SuperLink.

    Args:
        home: Flower's folder, $FLWR_HOME.
        address: of the SuperLink, written as in Flower's ``config.toml``.
        token: the operator's.
    """
    from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
    from flwr.common.constant import AuthnType
    from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

    store = FileCredentialStore(home / "credentials.yaml")
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    store.set(ACCESS_TOKEN_STORE_KEY % address, token.encode())
    store.set(REFRESH_TOKEN_STORE_KEY % address, b"none")  # wanted by Flower, and of no use to anybody


def check_refusals(host: str, port: int, root: Path | None, paths: Sequence[str] = STRANGER) -> None:
    """Ask a SuperLink or a node for what a stranger would ask, and fail unless it refuses.

    Args:
        host: where it listens.
        port: where it listens.
        root: the authority's certificate, or None without TLS.
        paths: what is asked for.
    """
    for path in paths:
        connection = (
            http.client.HTTPConnection(host, port, timeout=30)
            if root is None
            else http.client.HTTPSConnection(
                host, port, timeout=30, context=ssl.create_default_context(cafile=str(root))
            )
        )
        try:
            connection.request("POST", path, b"", {"Content-Type": "application/protobuf"})
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise FadamgcError(f"{host}:{port} does not answer: {error}") from error
        finally:
            connection.close()
        if status not in (401, 403):
            raise FadamgcError(
                f"{host}:{port} answers {path} with {status} to a request without a token, where only a "
                "refusal (401, 403) keeps strangers out. Install a version of Flower that is supported: "
                "pip install 'fadamgc[flower]'"
            )


def search_path() -> str:
    """$PATH with the commands of this Python first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def launch(kind: str) -> list[str]:
    """The command that starts a "superlink" or a "supernode", to which Flower's options are added."""
    return [sys.executable, "-P", str(LAUNCH), kind]


def free_ports(count: int) -> list[int]:
    """Ports of loopback that nobody listens on."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for one in sockets:
            one.bind((HOST, 0))
        return [one.getsockname()[1] for one in sockets]
    finally:
        for one in sockets:
            one.close()


def _command(name: str) -> str:
    path = Path(sys.executable).parent / name
    if not path.exists():
        raise FadamgcError(f"{name} is not there; install Flower with: pip install 'fadamgc[flower]'")
    return str(path)


def _began(pid: int) -> str | None:
    """When the process with that number began, or None if there is none."""
    try:
        with suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)  # a child that has ended is gone, not merely quiet
        after_name = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return None if after_name[0] == "Z" else after_name[19]
    except FileNotFoundError:
        if Path("/proc/self").exists():
            return None
    try:  # no /proc: the number alone has to do
        os.kill(pid, 0)
    except OSError:
        return None
    return "unknown"


def _signal(process: Process, number: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        if number == signal.SIGKILL or process.alive:
            os.killpg(process.pid, number)


def _listening(process: Process, wait: float) -> None:
    until = time.monotonic() + wait
    while time.monotonic() < until and process.alive:
        with suppress(OSError), socket.create_connection((HOST, process.port), timeout=1):
            return
        time.sleep(0.1)
    raise FadamgcError(f"the {process.name} did not start; {_tail(process)}")


def _registered(process: Process, wait: float) -> None:
    """A node is there when it says which number the SuperLink has given it."""
    until = time.monotonic() + wait
    _listening(process, wait)
    heard = time.monotonic() + SILENT
    while process.alive:
        if b"SuperNode ID" in Path(process.log).read_bytes()[process.since :] or time.monotonic() > heard:
            return
        if time.monotonic() > until:
            break
        time.sleep(0.1)
    raise FadamgcError(f"the {process.name} was not taken in by the SuperLink; {_tail(process)}")


def _tail(process: Process) -> str:
    with suppress(OSError):
        lines = Path(process.log).read_text(errors="replace").strip().splitlines()
        return f"{process.log} ends with:\n" + "\n".join(lines[-10:])
    return f"see {process.log}"
