"""Certificates and keys of a deployment for tests: its own authority, a server's certificate, SuperNodes' keys."""

from __future__ import annotations

import datetime
import ipaddress
from dataclasses import dataclass
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import NameOID

DAY = datetime.timedelta(days=1)
Validity = tuple[datetime.timedelta, datetime.timedelta]
"""From when to when a certificate holds, counted from now."""

_SIGNS_CERTIFICATES = x509.KeyUsage(
    key_cert_sign=True, crl_sign=True, digital_signature=False, content_commitment=False, key_encipherment=False,
    data_encipherment=False, key_agreement=False, encipher_only=False, decipher_only=False,
)  # fmt: skip


@dataclass(frozen=True)
class Authority:
    """A certificate authority. Made by `authority`; `certificate` is the PEM file that others trust."""

    certificate: Path
    _issuer: x509.Name
    _key: ec.EllipticCurvePrivateKey

    def server(
        self, folder: Path, name: str = "server", *, validity: Validity = (-DAY, DAY)
    ) -> tuple[Path, Path]:
        """Write a certificate for 127.0.0.1 and localhost with its key; return (`name`.pem, `name`.key).

        A `validity` of (-2 * DAY, -DAY) makes one that expired yesterday.
        """
        key = ec.generate_private_key(ec.SECP384R1())
        hosts = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        builder = _builder(_name("SuperLink"), self._issuer, key.public_key(), self._key.public_key(), validity)
        builder = builder.add_extension(x509.SubjectAlternativeName(hosts), critical=False)
        certificate, private = folder / f"{name}.pem", folder / f"{name}.key"
        certificate.write_bytes(builder.sign(self._key, hashes.SHA256()).public_bytes(Encoding.PEM))
        private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
        return certificate, private


def authority(folder: Path, name: str = "ca") -> Authority:
    """Make an authority of that name; its certificate is `name`.pem in `folder`, its key is nowhere but in memory."""
    folder.mkdir(parents=True, exist_ok=True)
    key, subject = ec.generate_private_key(ec.SECP384R1()), _name(f"Tepal tests: {name}")
    builder = _builder(subject, subject, key.public_key(), key.public_key(), (-365 * DAY, 365 * DAY))
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_SIGNS_CERTIFICATES, critical=True)
    (folder / f"{name}.pem").write_bytes(builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM))
    return Authority(folder / f"{name}.pem", subject, key)


def node_key(folder: Path, name: str) -> Path:
    """Write a SuperNode's key as `ssh-keygen -t ecdsa -b 384` does, `name` and `name`.pub; return the private one."""
    folder.mkdir(parents=True, exist_ok=True)
    key = ec.generate_private_key(ec.SECP384R1())
    private, public = folder / name, folder / f"{name}.pub"
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()))
    private.chmod(0o600)
    public.write_bytes(key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return private


def _name(common: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, common)])


def _builder(
    subject: x509.Name,
    issuer: x509.Name,
    key: ec.EllipticCurvePublicKey,
    issuer_key: ec.EllipticCurvePublicKey,
    validity: Validity,
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now + validity[0])
        .not_valid_after(now + validity[1])
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key), critical=False)
    )
