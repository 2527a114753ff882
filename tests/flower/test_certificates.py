"""Certificates of a local federation. The real SuperLink is in tests/e2e."""

from __future__ import annotations

import json
import shutil
import ssl
import subprocess
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address

import pytest

from private_files import check_private

HOST = "127.0.0.1"
NOW = datetime(2030, 1, 1, tzinfo=UTC)


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
