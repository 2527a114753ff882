"""Who gets in: modes of files, certificates, the operator's token. The real SuperLink is in tests/e2e."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import ssl
import stat
import subprocess
import threading
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address

import pytest
import torch

import fadamgc
from fadamgc.algorithm import example
from fadamgc.errors import CheckpointError, FadamgcError
from fadamgc.flower.client_store import ClientStore
from fadamgc.flower.protocol import Stamp, StoredState
from fadamgc.flower.server_store import ServerStore

HOST = "127.0.0.1"
NOW = datetime(2030, 1, 1, tzinfo=UTC)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


@pytest.fixture
def everybody_may():
    before = os.umask(0)
    yield
    os.umask(before)


def check_private(folder):
    assert mode(folder) == 0o700
    for path in folder.rglob("*"):
        if path.name != ".lock":  # empty
            assert mode(path) == (0o700 if path.is_dir() else 0o600), path


def kept():
    state = example(fadamgc.FAdamGC(), torch.arange(3.0)).client
    return StoredState(generation=1, seen=Stamp(1, 1), committed=Stamp(1, 1), committed_state=state)


@pytest.mark.usefixtures("everybody_may")
def test_a_clients_states_are_for_its_owner_alone(tmp_path):
    keeper = ClientStore(tmp_path / "states", "exp", 0)
    with keeper.locked():
        keeper.save(kept())
    check_private(tmp_path / "states" / "exp")
    assert torch.equal(keeper.load(kept().committed_state).committed_state.y, kept().committed_state.y)


@pytest.mark.usefixtures("everybody_may")
def test_a_servers_checkpoint_is_for_its_owner_alone(tmp_path):
    store = ServerStore(tmp_path / "server")
    store.take_over()
    store.write({"round": 1}, {"x": torch.ones(2)})
    check_private(tmp_path / "server")


def test_folders_of_an_earlier_version_are_tightened_when_opened(tmp_path):
    keeper, store = ClientStore(tmp_path / "states", "exp", 0), ServerStore(tmp_path / "server")
    for folder in (keeper.folder.parent, keeper.folder, store.folder):
        folder.mkdir(parents=True, exist_ok=True)
        folder.chmod(0o755)
    with keeper.locked():
        pass
    store.take_over()
    assert [mode(f) for f in (keeper.folder.parent, keeper.folder, store.folder)] == [0o700] * 3


@pytest.mark.usefixtures("everybody_may")
def test_a_private_file_is_never_readable_by_others(tmp_path):
    from fadamgc.files import write_atomic

    path, modes = tmp_path / "key", []
    path.write_bytes(b"old")
    assert mode(path) == 0o666
    write_atomic(path, lambda file: modes.append(mode(file.fileno())), private=True)
    assert [*modes, mode(path)] == [0o600, 0o600]
    write_atomic(path, b"new")
    assert mode(path) == 0o666  # as before, where nobody asks for it


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="needs a second user")
def test_somebody_elses_folder_is_left_alone(tmp_path):
    from fadamgc.files import private_folder

    (tmp_path / "theirs").mkdir()
    os.chown(tmp_path / "theirs", 65534, 65534)
    (tmp_path / "theirs").chmod(0o755)
    private_folder(tmp_path / "theirs")
    assert mode(tmp_path / "theirs") == 0o755


def test_a_folder_that_cannot_be_made_private_is_an_error(tmp_path):
    from fadamgc.files import private_folder

    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file.* cannot be (made private|written)"):
        private_folder(tmp_path / "file" / "folder")


# Certificates


def certificates(folder, now=None):
    from fadamgc.flower.certificates import ensure_certificates

    return ensure_certificates(folder, HOST, now)


def test_certificates_say_what_they_are_for(tmp_path):
    from cryptography import x509

    assert certificates(tmp_path)
    authority, server = (
        x509.load_pem_x509_certificate((tmp_path / name).read_bytes()) for name in ("ca.crt", "server.crt")
    )

    def extension(certificate, kind):
        found = certificate.extensions.get_extension_for_class(kind)
        return found.value, found.critical

    assert extension(authority, x509.BasicConstraints) == (x509.BasicConstraints(True, 0), True)
    assert extension(server, x509.BasicConstraints) == (x509.BasicConstraints(False, None), True)
    usage, critical = extension(authority, x509.KeyUsage)
    assert critical
    assert usage.key_cert_sign
    assert not usage.digital_signature
    usage, critical = extension(server, x509.KeyUsage)
    assert critical
    assert usage.digital_signature
    assert not usage.key_cert_sign
    assert list(extension(server, x509.ExtendedKeyUsage)[0]) == [x509.ExtendedKeyUsageOID.SERVER_AUTH]
    identifier = extension(authority, x509.SubjectKeyIdentifier)[0].digest
    assert extension(server, x509.AuthorityKeyIdentifier)[0].key_identifier == identifier
    assert extension(server, x509.SubjectKeyIdentifier)[0].digest != identifier
    names = extension(server, x509.SubjectAlternativeName)[0]
    assert names.get_values_for_type(x509.IPAddress) == [ip_address(HOST)]
    check_private(tmp_path)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is not installed")
def test_openssl_accepts_the_chain_strictly(tmp_path):
    certificates(tmp_path)
    words = ["openssl", "verify", "-x509_strict", "-purpose", "sslserver", "-verify_ip", HOST]
    done = subprocess.run(
        [*words, "-CAfile", tmp_path / "ca.crt", tmp_path / "server.crt"], capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_python_accepts_the_chain_strictly(tmp_path):
    certificates(tmp_path)
    client = ssl.create_default_context(cafile=str(tmp_path / "ca.crt"))
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(tmp_path / "server.crt", tmp_path / "server.key")
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        client.wrap_bio(to_client, to_server, server_hostname=HOST),
        server.wrap_bio(to_server, to_client, server_side=True),
    ]
    while ends:
        for end in list(ends):
            try:
                end.do_handshake()
                ends.remove(end)
            except ssl.SSLWantReadError:
                pass


def test_certificates_stay_until_they_are_close_to_their_end(tmp_path):
    from fadamgc.flower.certificates import acceptable, end_of, ensure_node_keys

    assert certificates(tmp_path, NOW)
    ensure_node_keys(tmp_path, ["node-0"])
    first = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert not certificates(tmp_path, NOW + timedelta(days=330))
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == first

    later = NOW + timedelta(days=340)
    assert certificates(tmp_path, later)
    ensure_node_keys(tmp_path, ["node-0", "node-1"])
    second = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    for name in ("ca.crt", "server.crt", "server.key"):
        assert first[name] != second[name]
    for name in ("node-0", "node-0.pub"):
        assert first[name] == second[name]  # a node stays who it is
    assert end_of(tmp_path) == later + timedelta(days=365)
    assert acceptable(tmp_path, HOST, later + timedelta(days=364))
    assert not acceptable(tmp_path, HOST, later + timedelta(days=366))
    assert certificates(tmp_path, NOW + timedelta(days=3650))  # ended long ago


@pytest.mark.parametrize("name", ["ca.crt", "server.crt", "server.key"])
@pytest.mark.parametrize("damage", ["missing", "empty"])
def test_damaged_certificates_are_made_again(tmp_path, name, damage):
    from fadamgc.flower.certificates import acceptable

    certificates(tmp_path)
    (tmp_path / name).unlink()
    if damage == "empty":
        (tmp_path / name).touch()
    assert certificates(tmp_path)
    assert acceptable(tmp_path, HOST, datetime.now(UTC))
    assert not certificates(tmp_path)


def test_certificates_of_an_earlier_version_are_made_again(tmp_path):
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    keys = [ec.generate_private_key(ec.SECP384R1()) for _ in range(2)]
    for name, key, ca in (("ca.crt", keys[0], True), ("server.crt", keys[1], False)):
        builder = (
            x509.CertificateBuilder(
                issuer_name=x509.Name.from_rfc4514_string("CN=a"),
                subject_name=x509.Name.from_rfc4514_string("CN=a" if ca else "CN=b"),
                public_key=key.public_key(),
                serial_number=x509.random_serial_number(),
                not_valid_before=datetime.now(UTC) - timedelta(days=1),
                not_valid_after=datetime.now(UTC) + timedelta(days=365),
            )
            .add_extension(x509.BasicConstraints(ca, None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address(HOST))]), critical=False)
        )
        signed = builder.sign(keys[0], hashes.SHA256())
        (tmp_path / name).write_bytes(signed.public_bytes(serialization.Encoding.PEM))
    (tmp_path / "server.key").write_bytes(b"a key")
    assert certificates(tmp_path)


def test_a_warning_comes_before_certificates_end(tmp_path):
    from fadamgc.flower.certificates import warning

    assert warning(tmp_path) is None  # there are none
    certificates(tmp_path, NOW)
    assert warning(tmp_path, NOW + timedelta(days=334)) is None
    assert "end on 2031-01-01" in warning(tmp_path, NOW + timedelta(days=336))
    assert "ended on 2031-01-01" in warning(tmp_path, NOW + timedelta(days=366))
    assert "up --secure" in warning(tmp_path, NOW + timedelta(days=366))


@pytest.mark.parametrize(("age", "warned"), [(1, False), (350, True)])
def test_status_warns_of_certificates_that_end(tmp_path, age, warned):
    from typer.testing import CliRunner

    from fadamgc.cli.main import app

    certificates(tmp_path / "keys", datetime.now(UTC) - timedelta(days=age))
    process = {"name": "superlink", "pid": 0, "began": "never", "port": 1, "log": "a.log"}
    (tmp_path / "federation.json").write_text(json.dumps({"secure": True, "processes": [process]}))
    shown = CliRunner().invoke(app, ["federation", "status", "--folder", str(tmp_path)])
    assert shown.exit_code == 0
    assert ("warning: the certificates" in shown.output) == warned


# The operator's token


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
def test_a_door_that_is_not_shut_is_noticed(status, shut):
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
