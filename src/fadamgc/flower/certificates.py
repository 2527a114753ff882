"""Certificates of a SuperLink and keys of its nodes, for a federation on one machine.

The authority signs only the SuperLink's certificate: its key is then discarded. So renewal makes a new
authority, and everybody who connects needs the new ``ca.crt``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fadamgc.files import private_folder, write_atomic

AUTHORITY = "fadamgc local federation"
VALIDITY = timedelta(days=365)
RENEWAL = timedelta(days=30)  # before the end: `up` renews certificates, other commands warn
CLOCK_SKEW = timedelta(days=1)  # clocks that are behind by this much accept a new certificate

AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "server.crt", "server.key"
KEY_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def ensure_certificates(folder: Path, address: str, now: datetime | None = None) -> bool:
    """Make certificates unless the folder has some that stay valid for a while; return whether it did.

    Args:
        folder: for ``ca.crt``, ``server.crt`` and ``server.key``.
        address: IP address of the SuperLink; the certificate is for localhost, too.
        now: the current time; None reads the clock.
    """
    now = now or datetime.now(UTC)
    private_folder(folder)
    if acceptable(folder, address, now + RENEWAL):
        return False
    authority_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    authority = _authority(authority_key, now)
    server = _server(server_key, authority, authority_key, address, now)
    (folder / CERTIFICATE_FILE).unlink(missing_ok=True)  # so that a mixture of old and new is never used
    write_atomic(folder / KEY_FILE, _private(server_key, serialization.PrivateFormat.PKCS8), private=True)
    write_atomic(folder / AUTHORITY_FILE, authority.public_bytes(serialization.Encoding.PEM), private=True)
    write_atomic(folder / CERTIFICATE_FILE, server.public_bytes(serialization.Encoding.PEM), private=True)
    return True


def acceptable(folder: Path, address: str, when: datetime) -> bool:
    """Return whether a client that trusts ``ca.crt`` accepts the server at that time, and its key exists."""
    try:
        authority, server = (
            x509.load_pem_x509_certificate((folder / name).read_bytes())
            for name in (AUTHORITY_FILE, CERTIFICATE_FILE)
        )
        verifier = (
            verification.PolicyBuilder()
            .store(verification.Store([authority]))
            .time(when.astimezone(UTC).replace(tzinfo=None))
            .build_server_verifier(x509.IPAddress(ip_address(address)))
        )
        verifier.verify(server, [])
        key = serialization.load_pem_private_key((folder / KEY_FILE).read_bytes(), None)
        return key.public_key() == server.public_key()
    except (OSError, ValueError, TypeError, verification.VerificationError):
        return False


def end_of(folder: Path) -> datetime | None:
    """Return when the first of the certificates ends, or None if they cannot be read."""
    try:
        return min(
            x509.load_pem_x509_certificate((folder / name).read_bytes()).not_valid_after_utc
            for name in (AUTHORITY_FILE, CERTIFICATE_FILE)
        )
    except (OSError, ValueError):
        return None


def warning(folder: Path, now: datetime | None = None) -> str | None:
    """Return a warning if the certificates end soon or have ended."""
    now = now or datetime.now(UTC)
    end = end_of(folder)
    if end is None or end - now >= RENEWAL:
        return None
    verb = "ended" if end <= now else "end"
    return (
        f"the certificates in {folder} {verb} on {end:%Y-%m-%d}, and nothing can connect after that; "
        "`fadamgc federation down` and `up --secure` make new ones (states and node keys stay)"
    )


def ensure_node_keys(folder: Path, names: Sequence[str]) -> None:
    """Make a key pair per node, ``NAME`` and ``NAME.pub``; an existing pair, and so the node, stays."""
    private_folder(folder)
    for name in names:
        if (folder / f"{name}.pub").exists():
            continue
        key = ec.generate_private_key(ec.SECP384R1())
        write_atomic(folder / name, _private(key, serialization.PrivateFormat.OpenSSH), private=True)
        public = key.public_key().public_bytes(
            serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
        )
        write_atomic(folder / f"{name}.pub", public, private=True)


def _private(key: ec.EllipticCurvePrivateKey, form: serialization.PrivateFormat) -> bytes:
    return key.private_bytes(serialization.Encoding.PEM, form, serialization.NoEncryption())


def _authority(key: ec.EllipticCurvePrivateKey, now: datetime) -> x509.Certificate:
    public = key.public_key()
    return (
        _builder(AUTHORITY, AUTHORITY, public, now)
        .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        .add_extension(_key_usage("key_cert_sign"), critical=True)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(public), critical=False)
        .sign(key, hashes.SHA384())
    )


def _server(
    key: ec.EllipticCurvePrivateKey,
    authority: x509.Certificate,
    authority_key: ec.EllipticCurvePrivateKey,
    address: str,
    now: datetime,
) -> x509.Certificate:
    names = [x509.DNSName("localhost"), x509.IPAddress(ip_address(address))]
    identifier = authority.extensions.get_extension_for_class(x509.SubjectKeyIdentifier).value
    return (
        _builder("localhost", AUTHORITY, key.public_key(), now)
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .add_extension(_key_usage("digital_signature"), critical=True)
        .add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(
            x509.AuthorityKeyIdentifier.from_issuer_subject_key_identifier(identifier), critical=False
        )
        .sign(authority_key, hashes.SHA384())
    )


def _builder(
    subject: str, issuer: str, key: ec.EllipticCurvePublicKey, now: datetime
) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
        .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - CLOCK_SKEW)
        .not_valid_after(now + VALIDITY)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
    )


def _key_usage(allowed: str) -> x509.KeyUsage:
    return x509.KeyUsage(**{use: use == allowed for use in KEY_USES})
