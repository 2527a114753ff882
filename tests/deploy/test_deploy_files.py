"""The files for deploying: units that systemd accepts, and options that Flower's commands have."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

pytest.importorskip("flwr", reason="Flower is not installed")

from fadamgc.flower.loopback import flower_command
from places import ROOT

DEPLOY = ROOT / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")


def unit_command(file):
    text = file.read_text().replace("\\\n", " ")
    (command,) = re.findall(r"^ExecStart=(.*)$", text, re.MULTILINE)
    return shlex.split(command)


def compose_commands():
    services = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())["services"]
    entry = ["fadamgc", "federation"]
    return {name: [*entry, *shlex.split(service["command"])] for name, service in services.items()}


def page_commands():
    text = PAGE.replace("\\\n", " ")
    return [shlex.split(line) for line in re.findall(r"^fadamgc federation super.*$", text, re.MULTILINE)]


COMMANDS = [*map(unit_command, UNITS), *compose_commands().values(), *page_commands()]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["superlink", "supernode"])
def test_flower_has_the_options(kind):
    done = subprocess.run(
        [flower_command(f"flower-{kind}"), "--help"], capture_output=True, text=True, timeout=60, check=True
    )
    known = set(re.findall(r"--[a-z-]+", done.stdout)) | {"--operator-token"}
    used = [command for command in COMMANDS if command[2] == kind]
    assert len(used) == 3
    for command in used:
        assert {word for word in command if word.startswith("--")} <= known


@pytest.mark.parametrize("command", COMMANDS)
def test_every_way_is_safe(command):
    """TLS, registered keys, and for the server a token."""
    if command[2] == "superlink":
        assert {"--operator-token", "--enable-supernode-auth", "--ssl-certfile"} <= set(command)
    else:
        assert {"--root-certificates", "--auth-supernode-private-key"} <= set(command)
        assert re.fullmatch(r"partition-id=(\d+|%i)", command[command.index("--node-config") + 1])


def test_everything_starts_again_whatever_its_exit_code():
    """A node ends with code 0 when the SuperLink stops, as ``make test-deploy`` shows."""
    assert all("\nRestart=always\n" in unit.read_text() for unit in UNITS)
    services = yaml.safe_load((DEPLOY / "container" / "compose.yaml").read_text())["services"]
    assert {service["restart"] for service in services.values()} == {"unless-stopped"}


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
@pytest.mark.parametrize("file", UNITS, ids=lambda file: file.name)
def test_systemd_accepts_the_units(file, tmp_path):
    here = str(Path(sys.executable).with_name("fadamgc"))
    copy = tmp_path / file.name.replace("@", "@0")
    copy.write_text(file.read_text().replace("/opt/fadamgc/bin/fadamgc", here))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(copy)], capture_output=True, text=True, timeout=60, check=False
    )
    said = [line for line in done.stderr.splitlines() if file.name.partition(".")[0].rstrip("@") in line]
    assert said == []
    wrong = copy.with_name(f"wrong-{copy.name}")
    wrong.write_text(copy.read_text().replace(here, "/nowhere/fadamgc"))
    done = subprocess.run(
        ["systemd-analyze", "verify", str(wrong)], capture_output=True, text=True, timeout=60, check=False
    )
    assert "/nowhere/fadamgc" in done.stderr  # the check can fail


def test_the_image_has_what_the_package_needs():
    text = (DEPLOY / "container" / "Containerfile").read_text()
    copied = [word for line in re.findall("^COPY (.*)$", text, re.MULTILINE) for word in line.split()[:-1]]
    assert copied
    assert all((ROOT / name).exists() for name in copied)
    assert text.index("install --no-cache-dir --index-url") < text.index("/src[flower]")


def test_the_page_has_a_command_for_every_step_of_the_walk():
    from deploy import walk

    found = walk.blocks(PAGE)
    assert set(found) == {
        *("operator", "server, stays", "node 0", "operator, node 0", "node 0, stays"),
        "operator, after the move",
    }
    assert walk.NAME in found["operator"]
