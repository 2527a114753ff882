"""Access to a SuperLink: starting it, the operator's token, and a check that strangers are refused."""

from __future__ import annotations

import http.client
import os
import secrets
import ssl
import sys
from collections.abc import Sequence
from pathlib import Path

from fadamgc.errors import FadamgcError
from fadamgc.files import write_atomic

LAUNCH_SCRIPT = Path(__file__).with_name("launch.py")
ACQUIRE_TASK = "/v1/runtime/acquire-task"
PROTECTED_PATHS = (  # requests with which a stranger could run code, or act as an app
    *("/v1/control/start-run", "/v1/control/register-node"),
    *(ACQUIRE_TASK, "/v1/runtime/start-automation"),
)
FLOWER_OFFLINE = {  # environment in which Flower connects to nothing but the SuperLink
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def launch_command(kind: str) -> list[str]:
    """Return the command that starts a "superlink" or a "supernode"; Flower's options have to be added."""
    return [sys.executable, "-P", str(LAUNCH_SCRIPT), kind]


def search_path() -> str:
    """Return $PATH with the commands of this Python first."""
    return f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"


def make_token(path: Path) -> str:
    """Write a new operator's token to a file that only its owner can read, and return the token."""
    token = secrets.token_urlsafe(32)
    write_atomic(path, token.encode(), private=True)
    return token


def log_in(home: Path, address: str, token: str) -> None:
    """Let Flower's command ``flwr`` send the operator's token to a SuperLink.

    ``home`` is $FLWR_HOME, and ``address`` is written as in Flower's ``config.toml``.
    """
    from flwr.cli.constant import ACCESS_TOKEN_STORE_KEY, AUTHN_TYPE_STORE_KEY, REFRESH_TOKEN_STORE_KEY
    from flwr.common.constant import AuthnType
    from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

    store = FileCredentialStore(home / "credentials.yaml")
    store.set(AUTHN_TYPE_STORE_KEY % address, AuthnType.OIDC.encode())
    store.set(ACCESS_TOKEN_STORE_KEY % address, token.encode())
    store.set(REFRESH_TOKEN_STORE_KEY % address, b"none")  # required by Flower, never used


def check_refusals(host: str, port: int, root: Path | None, paths: Sequence[str] = PROTECTED_PATHS) -> None:
    """Send requests without a token to a SuperLink or a node, and fail unless it refuses them.

    ``root`` is the authority's certificate, or None without TLS.
    """
    connection = http.client.HTTPConnection(host, port, timeout=30)
    if root is not None:
        tls = ssl.create_default_context(cafile=str(root))
        connection = http.client.HTTPSConnection(host, port, timeout=30, context=tls)
    for path in paths:
        try:
            connection.request("POST", path, b"", {"Content-Type": "application/protobuf"})
            status = connection.getresponse().status
        except (OSError, http.client.HTTPException) as error:
            raise FadamgcError(f"{host}:{port} does not answer: {error}") from error
        finally:
            connection.close()
        if status not in (401, 403):
            raise FadamgcError(
                f"{host}:{port} answers {path} with {status} to a request without a token; it must refuse "
                "the request (401 or 403). Install a supported version of Flower: pip install "
                "'fadamgc[flower]'"
            )
