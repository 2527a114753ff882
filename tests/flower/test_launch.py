"""The operator's token, and a SuperLink that serves nobody else. The real one is in tests/e2e."""

from __future__ import annotations

import asyncio
import subprocess
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from fadamgc.errors import FadamgcError
from private_files import mode

HOST = "127.0.0.1"


@pytest.fixture
def launch():
    pytest.importorskip("flwr", reason="Flower is not installed")
    from fadamgc.flower import launch

    return launch


TOKEN = "t" * 40


@pytest.mark.parametrize(
    "metadata",
    [
        [],
        [("flwr-oidc-access-token", "")],
        [("flwr-oidc-access-token", TOKEN[:-1])],
        [("flwr-oidc-access-token", TOKEN + "t")],
        [("flwr-oidc-access-token", "\udcff\u00e9")],
        [("something", TOKEN)],
    ],
)
def test_only_the_operators_token_is_accepted(launch, metadata):
    from flwr.common.constant import ACCESS_TOKEN_KEY

    operator = launch.OperatorPlugin(TOKEN)
    keyed = [(ACCESS_TOKEN_KEY if "oidc" in key else key, value) for key, value in metadata]
    assert operator.validate_tokens_in_metadata(keyed) == (False, None)
    assert operator.refresh_tokens([(ACCESS_TOKEN_KEY, TOKEN)]) == (None, None)
    for value in (TOKEN, TOKEN.encode()):
        accepted, account = operator.validate_tokens_in_metadata([*keyed, (ACCESS_TOKEN_KEY, value)])
        assert accepted
        assert account is not None


@pytest.mark.parametrize(
    ("content", "permissions", "message"),
    [
        (None, None, "cannot be read"),
        ("short", 0o600, "at least 32"),
        ("with spaces " * 5, 0o600, "no spaces"),
        ("é" * 40, 0o600, "ASCII"),
        (TOKEN, 0o644, "chmod 600"),
        (TOKEN, 0o640, "chmod 600"),
    ],
)
def test_tokens_that_others_know_are_refused(launch, tmp_path, content, permissions, message):
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
        path.chmod(permissions)
    with pytest.raises(ValueError, match=message):
        launch.read_token(path)


def test_a_token_that_is_made_is_accepted(launch, tmp_path):
    from fadamgc.flower.access import make_token

    token = make_token(tmp_path / "token")
    assert launch.read_token(tmp_path / "token") == token
    assert make_token(tmp_path / "token") != token


def test_the_runtime_api_serves_what_training_needs(launch):
    """An app's token can be seen in the list of processes: it must not be enough to start a run."""
    from flwr.supercore.routers.runtime.router import router

    paths = {route.path for route in router.routes}
    assert {launch.RUNTIME_API + name for name in launch.SERVED} <= paths
    passed, answers = [], []

    async def flower(scope, receive, send):
        passed.append(scope["path"])

    async def send(message):
        answers.append(message)

    for path in (*sorted(paths), "/v1/runtime/responses", "/v1/runtime/", "/v1/fleet/get-run"):
        asyncio.run(launch.OnlyTraining(flower)({"type": "http", "path": path}, None, send))
    assert set(passed) == {launch.RUNTIME_API + name for name in launch.SERVED} | {"/v1/fleet/get-run"}
    assert "/v1/runtime/start-automation" in paths
    assert {answer["status"] for answer in answers if "status" in answer} == {403}


@pytest.mark.parametrize(
    ("status", "shut"), [(401, True), (403, True), (200, False), (404, False), (500, False)]
)
def test_an_api_that_serves_strangers_is_noticed(status, shut):
    from fadamgc.flower.access import check_refusals

    class Door(BaseHTTPRequestHandler):
        def do_POST(self):
            self.send_response(status)
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *words):
            pass

    with HTTPServer((HOST, 0), Door) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            if shut:
                check_refusals(HOST, server.server_port, None)
            else:
                with pytest.raises(FadamgcError, match=f"start-run with {status} .* without a token"):
                    check_refusals(HOST, server.server_port, None)
        finally:
            server.shutdown()
            thread.join()


def test_flowers_command_finds_the_operators_token(launch, tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from fadamgc.cli.main import app
    from fadamgc.flower.access import make_token

    token = make_token(tmp_path / "token")
    monkeypatch.setenv("FLWR_HOME", str(tmp_path / "flwr"))
    words = ["federation", "login", "example.org:8000", "--operator-token", str(tmp_path / "token")]
    assert CliRunner().invoke(app, words).exit_code == 0
    assert mode(tmp_path / "flwr" / "credentials.yaml") == 0o600

    from flwr.cli.auth_plugin import get_cli_plugin_class
    from flwr.cli.constant import AUTHN_TYPE_STORE_KEY
    from flwr.common.constant import ACCESS_TOKEN_KEY
    from flwr.supercore.credential_store.file_credential_store import FileCredentialStore

    store = FileCredentialStore(tmp_path / "flwr" / "credentials.yaml")
    kind = get_cli_plugin_class(store.get(AUTHN_TYPE_STORE_KEY % "example.org:8000").decode())
    plugin = kind("example.org:8000")
    plugin.store = store
    plugin.load_tokens()
    assert dict(plugin.write_tokens_to_metadata([]))[ACCESS_TOKEN_KEY] == token

    (tmp_path / "token").chmod(0o644)
    refused = CliRunner().invoke(app, words)
    assert refused.exit_code != 0


@pytest.mark.slow
def test_a_superlink_without_tls_stays_on_loopback(launch, tmp_path):
    from fadamgc.flower.access import launch_command, make_token
    from fadamgc.flower.loopback import LoopbackFederation

    make_token(tmp_path / "token")
    words = ["--operator-token", tmp_path / "token", "--insecure", "--host", "0.0.0.0", "--port", "1"]
    done = subprocess.run(
        [*launch_command("superlink"), *words],
        env=LoopbackFederation(tmp_path).environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    assert "--host 0.0.0.0 needs certificates" in done.stderr
