"""Start Flower's SuperLink or a SuperNode so that strangers cannot control it.

    python -P launch.py superlink --operator-token FILE [options of flower-superlink]
    python -P launch.py supernode [options of flower-supernode]

Flower serves three APIs on the SuperLink's one port, and authenticates the callers of only one of them:

- Fleet, for the nodes. With ``--enable-supernode-auth``, requests are signed with a registered key.
- Control, for ``flwr run`` and ``flwr supernode register``: its callers can run code on the server and on
  every node. Flower can authenticate accounts here, but needs a plugin and includes none. ``OperatorPlugin``
  is such a plugin: it accepts requests that contain the operator's token.
- Runtime, for the apps that the SuperLink or a SuperNode starts. The first caller who asks for a task gets
  it, with a token to act as that app. Flower's SuperExec, which fetches the tasks, can be required to know a
  secret, but only if it is started separately. So this script starts it, with a secret that is only in
  memory. An app's token is on its command line, where other users of the machine can read it, and would let
  them start runs (``start-automation``). So the SuperLink serves only the requests that a ServerApp needs.

This file is a script that imports nothing that needs torch, because a SuperLink does not. Of the functions of
Flower that it calls, ``_parse_superlink_lifespan_config`` is private (the same in 1.41 and 1.42). ``fadamgc
federation up`` checks that the SuperLink does refuse strangers.
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
    from starlette.types import ASGIApp, Receive, Scope, Send

MIN_TOKEN_LENGTH = 32
LOOPBACK_HOSTS = ("127.0.0.1", "::1", "localhost")
RUNTIME_API = "/v1/runtime/"
POLL_VARIABLE = "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"
POLL_SECONDS = "0.25"  # between two questions of the SuperExec whether there is a task; Flower's default is 1
SERVED = {  # requests of SuperExec and ServerApp to the Runtime API
    *("acquire-task", "send-task-heartbeat", "pull-task-input", "push-task-output", "push-logs"),
    *("get-nodes", "push-messages", "pull-messages"),
    *("push-object", "pull-object", "confirm-message-received"),
}

Metadata = Sequence[tuple[str, str | bytes]]


class OperatorPlugin(NoOpControlAuthnPlugin):
    """Account authentication for a single account, whose requests carry a token."""

    def __init__(self, token: str) -> None:
        super().__init__()
        self._token = token.encode()

    def validate_tokens_in_metadata(self, metadata: Metadata) -> tuple[bool, AccountInfo | None]:
        """Accept the operator's token, compared in constant time."""
        for key, value in metadata:
            received = value.encode(errors="surrogateescape") if isinstance(value, str) else value
            if key == ACCESS_TOKEN_KEY and hmac.compare_digest(received, self._token):
                return super().validate_tokens_in_metadata(metadata)
        return False, None

    def refresh_tokens(self, metadata: Metadata) -> tuple[Metadata | None, AccountInfo | None]:  # noqa: ARG002
        """Refuse: the token does not change while the SuperLink runs."""
        return None, None


class OnlyTraining:
    """Middleware that refuses Runtime requests that training does not need, such as those for new runs."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse a request, or pass it on."""
        path = str(scope.get("path", ""))
        if path.startswith(RUNTIME_API) and path.removeprefix(RUNTIME_API) not in SERVED:
            from starlette.responses import PlainTextResponse

            await PlainTextResponse("not served here", 403)(scope, receive, send)
        else:
            await self.app(scope, receive, send)


def read_token(path: Path) -> str:
    """Read an operator's token; raise a ValueError if it is missing or too short, or others can read it."""
    file = path.expanduser()
    try:
        token = file.read_text().strip()
        mode = file.stat().st_mode
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--operator-token {path} cannot be read: {error}") from None
    if mode & 0o077:
        raise ValueError(f"--operator-token {path} can be read by other users; run: chmod 600 {path}")
    if len(token) < MIN_TOKEN_LENGTH or not token.isascii() or not token.isprintable() or " " in token:
        raise ValueError(
            f"--operator-token {path} is not accepted; a token must have at least {MIN_TOKEN_LENGTH} ASCII "
            "characters and no spaces"
        )
    return token


def superlink(arguments: Sequence[str]) -> None:
    """Run a SuperLink until it ends."""
    parser = argparse.ArgumentParser("superlink", allow_abbrev=False, add_help=False)
    parser.add_argument("--operator-token", type=Path, required=True)
    options, flower_options = parser.parse_known_args(arguments)
    try:
        operator = OperatorPlugin(read_token(options.operator_token))
    except ValueError as error:
        sys.exit(str(error))
    try:
        from flwr.superlink.cli.flower_superlink import SuperLinkLifespan, _parse_superlink_lifespan_config
    except ImportError as error:
        sys.exit(f"this version of Flower cannot be started with an operator's token: {error}")
    import uvicorn
    from flwr.supercore.address import resolve_bind_address
    from flwr.supercore.http_logging import get_uvicorn_log_config
    from flwr.supercore.logger import console_handler
    from flwr.superlink.main import create_app

    sys.argv = ["flower-superlink", *flower_options]  # Flower reads its options from here
    secret = secrets.token_bytes(32)
    config = replace(
        _parse_superlink_lifespan_config(),
        authn_plugin=operator,
        superexec_auth_secret=secret,
        isolation="process",  # this script starts the SuperExec
    )
    if config.certificates is None and config.host not in LOOPBACK_HOSTS:
        sys.exit(f"--host {config.host} needs certificates: without TLS, others can read the token")
    app = create_app(config, SuperLinkLifespan)
    app.add_middleware(OnlyTraining)
    host = f"[{config.host}]" if ":" in config.host else config.host
    address = resolve_bind_address(f"{host}:{config.port}")
    start_superexec(address, secret, config.ssl_ca_certfile, install=config.runtime_dependency_install)
    uvicorn.run(
        app,
        host=config.host,
        port=config.port,
        log_config=get_uvicorn_log_config(console_handler.level),
        ssl_keyfile=config.ssl_keyfile,
        ssl_certfile=config.ssl_certfile,
        workers=1,
    )


def supernode(arguments: Sequence[str]) -> None:
    """Start a SuperExec and the server of ``preloaded.py``, and replace this process by a SuperNode."""
    parser = argparse.ArgumentParser("supernode", allow_abbrev=False, add_help=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", default="9094")
    parser.add_argument("--ssl-ca-certfile")
    parser.add_argument("--allow-runtime-dependency-installation", action="store_true")
    options, _ = parser.parse_known_args(arguments)
    from flwr.supercore.address import resolve_bind_address

    from fadamgc.flower import preloaded

    secret = secrets.token_bytes(32)
    address = resolve_bind_address(f"{options.host}:{options.port}")
    install = options.allow_runtime_dependency_installation
    folder = None if install else preloaded.start()  # an app may install other versions of modules
    start_superexec(address, secret, options.ssl_ca_certfile, install, folder)
    source = secret_source(secret)
    os.set_inheritable(source, True)
    words = ["--isolation", "process", "--superexec-auth-secret-file", f"/dev/fd/{source}"]
    os.execvp("flower-supernode", ["flower-supernode", *arguments, *words])


def start_superexec(
    address: str, secret: bytes, root: str | None, install: bool, commands: str | None = None
) -> None:
    """Start Flower's SuperExec, which fetches tasks and starts apps; it ends with this process.

    ``commands`` is a folder with commands that it uses instead of Flower's.
    """
    environment = {POLL_VARIABLE: POLL_SECONDS} | os.environ
    if commands is not None:
        environment["PATH"] = f"{commands}{os.pathsep}{environment['PATH']}"
    source = secret_source(secret)
    words = ["flower-superexec", "--runtime-api-address", address, "--parent-pid", str(os.getpid())]
    words += ["--superexec-auth-secret-file", f"/dev/fd/{source}"]
    words += ["--insecure"] if root is None else ["--root-certificates", root]
    words += ["--allow-runtime-dependency-installation"] if install else []
    subprocess.Popen(words, pass_fds=[source], env=environment)
    os.close(source)


def secret_source(secret: bytes) -> int:
    """Return the descriptor of a pipe from which the secret can be read once."""
    source, sink = os.pipe()
    os.write(sink, secret)
    os.close(sink)
    return source


if __name__ == "__main__":
    kind, *rest = sys.argv[1:]
    {"superlink": superlink, "supernode": supernode}[kind](rest)
