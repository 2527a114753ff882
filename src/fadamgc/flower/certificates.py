"""Certificates of a SuperLink and keys of its nodes, for a federation on one machine.

The authority signs only the SuperLink's certificate, and the authority's key is then discarded. So renewal
makes a new authority, and everybody who connects needs the new ``ca.crt``.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PrivateFormat, PublicFormat
from cryptography.x509 import verification
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from fadamgc.files import private_folder, write_atomic

AUTHORITY = "fadamgc local federation"
VALIDITY = timedelta(days=365)
RENEWAL = timedelta(days=30)  # this long before the end, `up` renews certificates and other commands warn
CLOCK_SKEW = timedelta(days=1)  # machines whose clocks are behind by this much accept a new certificate

AUTHORITY_FILE, CERTIFICATE_FILE, KEY_FILE = "ca.crt", "server.crt", "server.key"
KEY_USES = (
    *("digital_signature", "content_commitment", "key_encipherment", "data_encipherment", "key_agreement"),
    *("key_cert_sign", "crl_sign", "encipher_only", "decipher_only"),
)


def ensure_certificates(folder: Path, address: str, now: datetime | None = None) -> bool:
    """Make ``ca.crt``, ``server.crt`` and ``server.key`` for an IP address and localhost.

    Certificates that stay valid for more than ``RENEWAL`` are kept. Return whether new ones were made.
    """
    now = now or datetime.now(UTC)
    private_folder(folder)
    if acceptable(folder, address, now + RENEWAL):
        return False
    authority_key, server_key = (ec.generate_private_key(ec.SECP384R1()) for _ in range(2))
    names = x509.SubjectAlternativeName([x509.DNSName("localhost"), x509.IPAddress(ip_address(address))])
    files = {
        KEY_FILE: _private(server_key, PrivateFormat.PKCS8),
        AUTHORITY_FILE: _certificate(
            *(AUTHORITY, authority_key, authority_key, now, "key_cert_sign"),
            (x509.BasicConstraints(ca=True, path_length=0), True),
        ),
        CERTIFICATE_FILE: _certificate(
            *("localhost", server_key, authority_key, now, "digital_signature"),
            (x509.BasicConstraints(ca=False, path_length=None), True),
            (x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), False),
            (names, False),
        ),
    }
    (folder / CERTIFICATE_FILE).unlink(missing_ok=True)  # so that a mixture of old and new is never used
    for name, content in files.items():
        write_atomic(folder / name, content, private=True)
    return True


def acceptable(folder: Path, address: str, when: datetime) -> bool:
    """Return whether clients that trust ``ca.crt`` accept ``server.crt`` at a time, and the key fits."""
    try:
        authority, server = _read(folder)
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
    """Return when the certificates end, or None if they cannot be read."""
    try:
        return min(certificate.not_valid_after_utc for certificate in _read(folder))
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
    """Make one key pair per node, ``NAME`` and ``NAME.pub``; an existing pair is kept."""
    private_folder(folder)
    for name in names:
        if (folder / f"{name}.pub").exists():
            continue
        key = ec.generate_private_key(ec.SECP384R1())
        write_atomic(folder / name, _private(key, PrivateFormat.OpenSSH), private=True)
        public = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
        write_atomic(folder / f"{name}.pub", public, private=True)


def _read(folder: Path) -> list[x509.Certificate]:
    files = folder / AUTHORITY_FILE, folder / CERTIFICATE_FILE
    return [x509.load_pem_x509_certificate(file.read_bytes()) for file in files]


def _private(key: ec.EllipticCurvePrivateKey, form: PrivateFormat) -> bytes:
    return key.private_bytes(Encoding.PEM, form, serialization.NoEncryption())


def _certificate(
    subject: str,
    key: ec.EllipticCurvePrivateKey,
    signer: ec.EllipticCurvePrivateKey,
    now: datetime,
    key_use: str,
    *extensions: tuple[x509.ExtensionType, bool],
) -> bytes:
    """Return the certificate of a key with one allowed use; True marks a critical extension."""
    builder = x509.CertificateBuilder(
        issuer_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, AUTHORITY)]),
        subject_name=x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]),
        public_key=key.public_key(),
        serial_number=x509.random_serial_number(),
        not_valid_before=now - CLOCK_SKEW,
        not_valid_after=now + VALIDITY,
    )
    for extension, critical in (
        (x509.SubjectKeyIdentifier.from_public_key(key.public_key()), False),
        (x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()), False),
        (x509.KeyUsage(**{use: use == key_use for use in KEY_USES}), True),
        *extensions,
    ):
        builder = builder.add_extension(extension, critical)
    return builder.sign(signer, hashes.SHA384()).public_bytes(Encoding.PEM)
