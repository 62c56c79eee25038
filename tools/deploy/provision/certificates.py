"""Keys and X.509 certificates of a deployment: the authority's, the server's, and the keys of the sites."""

from __future__ import annotations

import datetime
import ipaddress
import secrets
from collections.abc import Sequence

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

SOON = 30
"""A certificate that expires within so many days should be renewed."""

_SKEW = datetime.timedelta(hours=1)  # the clocks of sites may be behind
_ALWAYS = ("localhost", "127.0.0.1")  # the server's own machine: health checks, the Control API


def new_key() -> ec.EllipticCurvePrivateKey:
    """Return a new private key on the curve P-384."""
    return ec.generate_private_key(ec.SECP384R1())


def authority(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    """Return the self-signed certificate of a new authority."""
    # Each deployment's authority has its own name, which appears in errors.
    name = _subject(f"Tepal CA {secrets.token_hex(4)}")
    builder = _builder(name, name, key.public_key(), key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(certificates=True), critical=True)
    return builder.sign(key, hashes.SHA384())


def server_certificate(
    ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, hosts: Sequence[str], days: int
) -> tuple[bytes, bytes]:
    """Return (certificate, key) in PEM, for the hosts and for this machine."""
    key = new_key()
    names: list[x509.GeneralName] = []
    for host in dict.fromkeys([*hosts, *_ALWAYS]):
        try:
            names.append(x509.IPAddress(ipaddress.ip_address(host)))
        except ValueError:
            names.append(x509.DNSName(host))
    builder = _builder(_subject("Tepal SuperLink"), ca.subject, key.public_key(), ca_key.public_key(), days)
    builder = builder.add_extension(x509.SubjectAlternativeName(names), critical=False)
    builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
    builder = builder.add_extension(_key_usage(certificates=False), critical=True)
    builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return pem(builder.sign(ca_key, hashes.SHA384())), pem(key)


def _subject(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])


def _builder(
    subject: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePublicKey, signer: ec.EllipticCurvePublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC).replace(microsecond=0)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - _SKEW)
        .not_valid_after(now + datetime.timedelta(days=days))
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signer), critical=False)
    )


def _key_usage(*, certificates: bool) -> x509.KeyUsage:
    return x509.KeyUsage(
        key_cert_sign=certificates, crl_sign=certificates, digital_signature=not certificates,
        content_commitment=False, key_encipherment=False, data_encipherment=False, key_agreement=False,
        encipher_only=False, decipher_only=False,
    )  # fmt: skip


def pem(thing: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    """Return a certificate or a private key in PEM."""
    if isinstance(thing, x509.Certificate):
        return thing.public_bytes(Encoding.PEM)
    return thing.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def public_line(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    """Return the public key as a line in OpenSSH format, with the name as comment."""
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {name}\n".encode()


def hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    """Return the names and addresses for which a certificate is valid."""
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return ()
    return tuple(str(name.value) for name in names)
