"""Start Flower's SuperLink or a SuperNode with its doors shut.

    python -P launch.py superlink --operator-token FILE [options of flower-superlink]
    python -P launch.py supernode [options of flower-supernode]

Flower serves three APIs on the SuperLink's one port, and only one of them asks who is there:

- Fleet, for the nodes. With ``--enable-supernode-auth``, requests are signed with a registered key.
- Control, for ``flwr run`` and ``flwr supernode register``: whoever may use it can run code on the server and on
  every node. Flower can authenticate accounts there, but comes without a plugin that does. ``Operator`` is one:
  it accepts requests that carry the token in the operator's file.
- Runtime, for the apps that the SuperLink starts (a SuperNode has one too): whoever asks first gets the next task,
  with the token to act as that app. Flower can demand a shared secret of its SuperExec, which fetches the tasks,
  but only if the SuperExec is started apart. So it is started here, with a secret that is in memory only.

This file is a script that imports nothing of fadamgc, because torch has no place in a SuperLink. Of Flower's
functions that it calls, ``_parse_superlink_lifespan_config`` and ``_run_superlink_http_api`` are private
(the same in 1.41 and 1.42). ``fadamgc federation up`` asks a SuperLink that it has started whether its doors are
shut indeed.
"""

from __future__ import annotations

import argparse
import hmac
import os
import secrets
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from flwr.common.constant import ACCESS_TOKEN_KEY
from flwr.superlink.auth_plugin import NoOpControlAuthnPlugin

if TYPE_CHECKING:
    from flwr.supercore.auth.typing import AccountInfo

SHORTEST = 32  # characters of an operator's token

Metadata = Sequence[tuple[str, str | bytes]]


class Operator(NoOpControlAuthnPlugin):
    """Account authentication for a single account, whose requests carry a token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    def validate_tokens_in_metadata(self, metadata: Metadata) -> tuple[bool, AccountInfo | None]:
        """Accept the operator's token; compared in a time that does not depend on where it differs."""
        for key, value in metadata:
            received = value.encode(errors="surrogateescape") if isinstance(value, str) else value
            if key == ACCESS_TOKEN_KEY and hmac.compare_digest(received, self._token):
                return super().validate_tokens_in_metadata(metadata)
        return False, None

    def refresh_tokens(self, metadata: Metadata) -> tuple[Metadata | None, AccountInfo | None]:  # noqa: ARG002
        """Refuse: the token does not change while the SuperLink runs."""
        return None, None


def read_token(path: Path) -> str:
    """Read an operator's token, and end if there is none or it can be guessed."""
    try:
        token = path.expanduser().read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        sys.exit(f"--operator-token {path} cannot be read: {error}")
    if len(token) < SHORTEST or not token.isascii() or not token.isprintable() or " " in token:
        sys.exit(f"--operator-token {path}: a token is at least {SHORTEST} characters, ASCII without spaces")
    return token


def superlink(arguments: Sequence[str]) -> None:
    """Run a SuperLink until it ends."""
    parser = argparse.ArgumentParser("superlink", allow_abbrev=False, add_help=False)
    parser.add_argument("--operator-token", type=Path, required=True)
    own, others = parser.parse_known_args(arguments)
    operator = Operator(read_token(own.operator_token))
    try:
        from flwr.superlink.cli.flower_superlink import (
            _parse_superlink_lifespan_config,
            _run_superlink_http_api,
        )
    except ImportError as error:
        sys.exit(f"this version of Flower cannot be started with an operator's token: {error}")
    from flwr.supercore.address import resolve_bind_address

    sys.argv = ["flower-superlink", *others]  # Flower reads them there
    config = _parse_superlink_lifespan_config()
    secret = secrets.token_bytes(32)
    config = replace(
        config, authn_plugin=operator, isolation="process", superexec_auth_secret=secret
    )  # "process": the SuperExec is not started by the SuperLink
    host = f"[{config.host}]" if ":" in config.host else config.host
    start_superexec(
        resolve_bind_address(f"{host}:{config.port}"),
        secret,
        config.ssl_ca_certfile,
        install=config.runtime_dependency_install,
    )
    _run_superlink_http_api(lifespan_config=config)


def supernode(arguments: Sequence[str]) -> None:
    """Become a SuperNode."""
    parser = argparse.ArgumentParser("supernode", allow_abbrev=False, add_help=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="9094")
    parser.add_argument("--ssl-ca-certfile")
    parser.add_argument("--allow-runtime-dependency-installation", action="store_true")
    known, _ = parser.parse_known_args(arguments)
    from flwr.supercore.address import resolve_bind_address

    secret = secrets.token_bytes(32)
    start_superexec(
        resolve_bind_address(f"{known.host}:{known.port}"),
        secret,
        known.ssl_ca_certfile,
        install=known.allow_runtime_dependency_installation,
    )
    source = secret_source(secret)
    os.set_inheritable(source, True)
    words = ["--isolation", "process", "--superexec-auth-secret-file", f"/dev/fd/{source}"]
    os.execvp("flower-supernode", ["flower-supernode", *arguments, *words])


def start_superexec(address: str, secret: bytes, root: str | None, install: bool) -> None:
    """Start Flower's SuperExec, which fetches tasks and starts apps; it ends with this process."""
    source = secret_source(secret)
    words = ["flower-superexec", "--runtime-api-address", address, "--parent-pid", str(os.getpid())]
    words += ["--superexec-auth-secret-file", f"/dev/fd/{source}"]
    words += ["--insecure"] if root is None else ["--root-certificates", root]
    words += ["--allow-runtime-dependency-installation"] if install else []
    subprocess.Popen(words, pass_fds=[source])
    os.close(source)


def secret_source(secret: bytes) -> int:
    """A file descriptor from which the secret can be read once."""
    source, sink = os.pipe()
    os.write(sink, secret)
    os.close(sink)
    return source


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    {"superlink": superlink, "supernode": supernode}[kind](rest)
