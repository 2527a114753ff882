"""docs/deploy.md, step by step, on hosts with a network each: ``make test-deploy``.

The commands are those of the page: blocks below a comment such as ``<!-- on: operator -->``. Each host is a
network namespace with a link to the others, and has a home folder of its own. Everything runs in a
namespace of processes that ends with this script.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from fadamgc.algorithm import example
from fadamgc.bundle import has_bundle, read_bundle
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.protocol import NEVER, Stamp
from fadamgc.methods.fadamgc import FAdamGC

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "deploy.md"
APP = ROOT / "examples" / "flower-digits"
NAME = "fed.example.org"
HOSTS = {"server": "10.77.0.1", "operator": "10.77.0.2", "node-0": "10.77.0.3", "node-1": "10.77.0.4"}
HOSTS |= {"new-server": "10.77.0.5", "stranger": "10.77.0.6"}
ISOLATED = (
    "unshare",
    "--map-root-user",
    "--net",
    "--mount",
    "--pid",
    "--fork",
    "--mount-proc",
    "--kill-child",
)
INSIDE = "FADAMGC_WALK"  # set in the namespace
LIMIT = 300.0  # seconds for anything to happen


def blocks(page: str) -> dict[str, str]:
    """Return the commands of a page by what the comment above them says.

    >>> blocks("<!-- on: node 0 -->\\n```bash\\nls\\n```")
    {'node 0': 'ls\\n'}
    """
    found: dict[str, str] = {}
    for place, text in re.findall(r"<!-- on: (.*?) -->\n```bash\n(.*?)```", page, re.DOTALL):
        found[place] = found.get(place, "") + text
    return found


class Host:
    """A network namespace with an address and a home folder."""

    def __init__(self, name: str, address: str, folder: Path) -> None:
        self.name, self.address = name, address
        self.home = folder / name
        self.home.mkdir()
        self.services: list[subprocess.Popen[bytes]] = []
        system("ip", "netns", "add", name)
        system("ip", "link", "add", f"to-{name}"[:15], "type", "veth", "peer", "name", "eth0", "netns", name)
        system("ip", "link", "set", f"to-{name}"[:15], "master", "switch", "up")
        for words in (f"addr add {address}/24 dev eth0", "link set eth0 up", "link set lo up"):
            system("ip", "-n", name, *words.split())

    def _here(self, script: str) -> dict[str, Any]:
        """Return how a process of this host is started: its command, its folder and its environment."""
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("FADAMGC_", "FLWR_"))}
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        variables |= {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
        command = ["nsenter", f"--net=/run/netns/{self.name}", "bash", "-euc", script]
        environment = variables | {"HOME": str(self.home), "PATH": path}
        return {"args": command, "cwd": self.home, "env": environment}

    def run(self, script: str) -> str:
        """Run commands; return what they print."""
        done = subprocess.run(
            **self._here(script), capture_output=True, text=True, timeout=LIMIT, check=False
        )
        if done.returncode:
            sys.exit(f"{self.name}: {script}\n{done.stdout}{done.stderr}\nended with {done.returncode}")
        return str(done.stdout + done.stderr)

    def start(self, script: str) -> subprocess.Popen[bytes]:
        """Start commands that stay; what they print is in a log."""
        with open(self.home / f"service-{len(self.services)}.log", "wb") as log:
            process = subprocess.Popen(**self._here(script), stdout=log, stderr=log, start_new_session=True)
        self.services.append(process)
        return process

    def stop(self) -> None:
        """Stop what stays, as a service manager does."""
        for process in self.services:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
        for process in self.services:
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait(10)

    def connect(self, up: bool) -> None:
        """Put the cable in, or pull it out."""
        system("ip", "link", "set", f"to-{self.name}"[:15], "up" if up else "down")

    def logs(self) -> str:
        """Return what the services have printed."""
        return "".join(log.read_text(errors="replace") for log in sorted(self.home.glob("service-*.log")))

    def listening(self) -> set[str]:
        """Return the addresses and ports of this host that others can reach."""
        lines = self.run("cat /proc/net/tcp /proc/net/tcp6").splitlines()
        ends = [line.split()[1] for line in lines if ":" in line and line.split()[3] == "0A"]
        return {f"{end.split(':')[0]}:{int(end.split(':')[1], 16)}" for end in ends if end[:8] != "0100007F"}


def system(*command: str) -> None:
    """Run a command of this machine."""
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)}: {done.stderr}")


def wait_for(condition: Callable[[], object], what: str, limit: float = LIMIT) -> None:
    """Wait until something is true."""
    until = time.monotonic() + limit
    while not condition():
        if time.monotonic() > until:
            sys.exit(f"{what} did not happen within {limit:g} s")
        time.sleep(0.3)


def others() -> list[str]:
    """Return the command lines of the other processes in this namespace that have not ended."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if command := (folder / "cmdline").read_bytes():
                found.append(command.replace(b"\0", b" ").decode(errors="replace")[:200])
    return [command for command in found if __file__ not in command]


def say(text: str) -> None:
    """Print a line at once."""
    print(text, flush=True)


class Walk:
    """The steps of the page."""

    def __init__(self, folder: Path) -> None:
        self.commands = blocks(PAGE.read_text(encoding="utf-8"))
        self.names = folder / "hosts"
        self.point_name_to("server")
        system("mount", "--bind", str(self.names), "/etc/hosts")
        system("ip", "link", "add", "switch", "type", "bridge")
        system("ip", "link", "set", "switch", "up")
        self.hosts = {name: Host(name, address, folder) for name, address in HOSTS.items()}
        self.operator, self.nodes = self.hosts["operator"], [self.hosts["node-0"], self.hosts["node-1"]]
        self.server = self.hosts["server"]

    def point_name_to(self, host: str) -> None:
        """Let the server's name lead to a host."""
        self.names.write_text(f"127.0.0.1 localhost\n{HOSTS[host]} {NAME}\n")

    def block(self, place: str, node: int = 0) -> str:
        """Return the commands of a step, for a node with this number."""
        return re.sub(r"(node-|partition-id=)0", rf"\g<1>{node}", self.commands[place])

    def copy(self, names: str, source: Host, *targets: Host) -> None:
        """Copy files or folders between homes."""
        for name in names.split():
            for target in targets:
                place = target.home / name
                place.parent.mkdir(parents=True, exist_ok=True)
                if (source.home / name).is_dir():
                    shutil.copytree(source.home / name, place)
                else:
                    shutil.copy(source.home / name, place)

    def start_server(self) -> None:
        """Start the SuperLink and wait for it."""
        self.server.start(self.block("server, stays"))
        wait_for(lambda: any(end.endswith(":8000") for end in self.server.listening()), "port 8000")
        assert {end.rpartition(":")[2] for end in self.server.listening()} == {"8000"}, "another port is open"

    def register(self) -> None:
        """Register the keys of the nodes."""
        for i in range(len(self.nodes)):
            self.operator.run(self.block("operator, node 0", i))

    def online(self) -> int:
        """Return how many nodes are connected."""
        listed = self.operator.run("flwr supernode list fed --format json")
        nodes = json.loads(listed[listed.index("{") :])["nodes"]
        return sum("online" in str(node.get("status", "")).lower() for node in nodes)

    @property
    def state(self) -> Path:
        """The server's folder of the experiment."""
        return self.server.home / ".local/state/fadamgc/servers/flower-digits"

    def history(self) -> list[dict[str, object]]:
        """Return the records of the server's checkpoint."""
        if not has_bundle(self.state, "federation"):
            return []
        return list(read_bundle(self.state, "federation")[0]["history"])

    def missing(self, t: int) -> object:
        """Return who did not answer in a round."""
        return self.history()[t - 1]["dropped"]

    def check_in_step(self) -> None:
        """y is the mean of the y_i that the server has counted."""
        content, tensors = read_bundle(self.state, "federation")
        kind, found = example(FAdamGC(), torch.zeros(1)).client, []
        for i, node in enumerate(self.nodes):
            kept = ClientStore(node.home / ".local/state/fadamgc", "flower-digits", i).load(kind)
            counted = Stamp(*content["counted"][str(i)]) if str(i) in content["counted"] else NEVER
            state = kept.pending_state if kept.pending == counted else kept.committed_state
            found.append(torch.zeros_like(tensors["server.y"]) if state is None else state.y)
        torch.testing.assert_close(tensors["server.y"], torch.stack(found).mean(0), rtol=1e-4, atol=1e-7)

    def make_app(self) -> None:
        """Make the operator's app: two clients, and rounds that do not wait long for a missing node."""
        app = self.operator.home / "APP"
        shutil.copytree(APP, app)
        text = (app / "pyproject.toml").read_text()
        for old, new in {
            "clients = 3": "clients = 2",
            "min-clients = 2 ": "min-clients = 1 ",
            "round-timeout = 120.0": "round-timeout = 20.0",
        }.items():
            assert old in text
            text = text.replace(old, new, 1)
        (app / "pyproject.toml").write_text(text)

    def steps(self) -> None:
        """Take all steps."""
        operator, nodes = self.operator, self.nodes
        certificates, settings, run, *_ = self._operator_blocks()
        say("2. certificates")
        operator.run(certificates)
        self.copy("ca.crt server.crt server.key", operator, self.server)
        self.copy("ca.crt", operator, *nodes, self.hosts["stranger"])
        say("3. the SuperLink")
        self.start_server()
        say("4. the operator")
        assert (self.server.home / "operator.token").stat().st_mode & 0o777 == 0o600
        self.copy("operator.token", self.server, operator)
        operator.run(settings)
        assert json.loads(operator.run("flwr ls fed --format json"))["runs"] == []
        say("5. keys")
        for i, node in enumerate(nodes):
            node.run(self.block("node 0", i))
            self.copy(f"node-{i}.pub", node, operator)
        self.register()
        say("6. nodes; one whose key is not registered is refused")
        for i, node in enumerate(nodes):
            node.start(self.block("node 0, stays", i))
        stranger = self.hosts["stranger"]
        stranger.run(self.block("node 0"))
        process = stranger.start(self.block("node 0, stays"))
        wait_for(lambda: process.poll() is not None, "the end of a node without a registered key")
        assert process.returncode != 0
        wait_for(lambda: self.online() == 2, "the connection of both nodes")
        assert not any(node.listening() for node in nodes), "a node has an open port"
        say("7. a run")
        self.make_app()
        operator.run(run)
        assert [record["round"] for record in self.history()] == [1, 2, 3]
        assert all(record["dropped"] == [] for record in self.history())
        self.check_in_step()

        say("   a node is cut off during a run, and is back")
        longer = run.replace("rounds=3", "rounds=30")
        going = operator.start(longer)
        wait_for(lambda: len(self.history()) >= 4, "round 4")
        nodes[1].connect(False)
        wait_for(lambda: any(r["dropped"] == [1] for r in self.history()[3:]), "a round without the node")
        cut = len(self.history())
        nodes[1].connect(True)
        wait_for(lambda: any(r["dropped"] == [] for r in self.history()[cut + 1 :]), "a round with it again")
        operator.run(
            "flwr stop --format json $(flwr ls fed --format json | "
            'python3 -c \'import json,sys; print(json.load(sys.stdin)["runs"][0]["run-id"])\') fed'
        )
        wait_for(lambda: going.poll() is not None, "the end of the run")
        rounds = len(self.history())

        say("the server moves")
        for node in nodes:
            assert all(service.poll() is None for service in node.services), node.logs()
        self.server.stop()
        new = self.hosts["new-server"]
        self.copy(
            "operator.token ca.crt server.crt server.key .local/state/fadamgc/servers", self.server, new
        )
        self.server = new
        self.point_name_to("new-server")
        self.start_server()
        self.register()
        self._wait_for_nodes()
        self._resume(rounds + 2)
        say("a node moves")
        nodes[1].stop()
        self.copy("node-1 .local/state/fadamgc", nodes[1], stranger)
        nodes[1] = stranger
        wait_for(lambda: self.online() == 1, "the end of the old node")
        stranger.start(self.block("node 0, stays", 1))
        self._wait_for_nodes()
        self._resume(rounds + 3)
        self.server.run(f"fadamgc report {self.state}")
        assert (self.state / "report.html").stat().st_size > 10_000
        assert (
            f'fadamgc_round{{experiment="flower-digits"}} {rounds + 3}.0'
            in (self.state / "metrics.prom").read_text()
        )

    def _resume(self, rounds: int) -> None:
        """Run up to a round; check that no round was lost and nobody was missing from the last one."""
        command = self.block("operator, after the move")
        self.operator.run(command.replace("rounds=5", f"rounds={rounds}"))
        assert [record["round"] for record in self.history()] == [*range(1, rounds + 1)]
        assert self.missing(rounds) == []
        self.check_in_step()

    def _wait_for_nodes(self) -> None:
        """Wait for the nodes at the new server; restart one that has ended, as a service manager does."""
        until = time.monotonic() + 180
        while self.online() < 2:
            if time.monotonic() > until:
                sys.exit("the nodes did not connect again\n" + "".join(n.logs()[-3000:] for n in self.nodes))
            for i, node in enumerate(self.nodes):
                if node.services[-1].poll() is not None:
                    code = node.services[-1].returncode
                    say(f"   node {i} has ended with code {code}; it starts again, as in deploy/systemd")
                    node.start(self.block("node 0, stays", i))
            time.sleep(5)

    def _operator_blocks(self) -> list[str]:
        """Return the operator's blocks: certificates, config.toml, run."""
        page = PAGE.read_text(encoding="utf-8")
        return re.findall(r"<!-- on: operator -->\n```bash\n(.*?)```", page, re.DOTALL)


def main() -> None:
    """Walk, in namespaces of our own."""
    if os.environ.get(INSIDE) != "1":
        if subprocess.run([*ISOLATED, "true"], capture_output=True, check=False).returncode:
            sys.exit("this machine allows no namespaces (unshare), so the walk is not possible")
        os.execvpe(ISOLATED[0], [*ISOLATED, sys.executable, __file__], os.environ | {INSIDE: "1"})
    system("mount", "-t", "tmpfs", "tmpfs", "/run")
    Path("/run/netns").mkdir()
    with tempfile.TemporaryDirectory(prefix="walk-") as folder:
        walk, began = Walk(Path(folder)), time.monotonic()
        try:
            walk.steps()
        except BaseException:
            for host in walk.hosts.values():
                if text := host.logs():
                    print(f"--- {host.name}\n{text[-4000:]}", file=sys.stderr)
            raise
        finally:
            for host in walk.hosts.values():
                host.stop()
        wait_for(lambda: not others(), "the end of all processes", 30)
    say(f"all steps of docs/deploy.md work; {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
