"""The credentials of a site: the files of its unpacked archive, read and checked."""

from __future__ import annotations

import contextlib
import datetime
import ipaddress
import os
import re
import stat
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_private_key

from tepal.host.toml import Value, flat, parse_run_config, parse_untrusted

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
"""A site's name."""

_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_PATHS = ("data-path", "model-path", "cache-path")  # keys of a node config
SITE_FILES = ("ca.crt", "node.key", "site.toml")
_UNPACK = "unpack the site's archive as its owner: tar -xzf NAME.tar.gz"


class ProvisionError(ValueError):
    """Credentials cannot be made, changed or read. The message says what is wrong, where, and what to do."""


@dataclass(frozen=True)
class SiteCredentials:
    """The credentials and settings of a site. Made by `read_site`."""

    name: str
    superlink: str
    """HOST:PORT of the server."""
    root_certificates: Path
    key: Path
    node_config: dict[str, Value] = field(default_factory=dict)


def read_site(folder: Path) -> SiteCredentials:
    """Read and check the folder of a site: an unpacked archive of `tepal provision`.

    Raises ProvisionError with what is wrong and what to do.
    """
    folder = folder.absolute()
    certificates, key, settings = (folder / name for name in SITE_FILES)
    try:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            certificates.stat()  # refused in a closed folder, which later versions of Python take for an empty one
        if folder.is_file():
            raise ProvisionError(f"{folder} is a file, expected a folder: {_UNPACK}")
        if not folder.is_dir():
            raise ProvisionError(f"the folder {folder} does not exist: {_UNPACK}")
        for name in SITE_FILES:
            if not (folder / name).is_file():
                expected = ", ".join(SITE_FILES)
                raise ProvisionError(f"{folder} has no file {name}, and a site needs {expected}: {_UNPACK}")
        name, superlink, node_config = read_site_toml(settings.read_bytes(), str(settings))
        if days_left(read_certificate(certificates)) < 0:
            raise ProvisionError(
                f"the authority's certificate {certificates} has expired. Ask the server's administrator for an "
                "archive of a new deployment"
            )
        _check_node_key(key)
    except PermissionError as error:
        raise ProvisionError(
            f"{error.filename} cannot be read by this user (uid {os.geteuid()}). The folder must belong to it: "
            f"chown -R {os.geteuid()} {folder}"
        ) from error
    return SiteCredentials(name, superlink, certificates, key, node_config)


def _check_node_key(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ProvisionError(f"the private key {path} can be read by others (mode {mode:04o}). Use: chmod 600 {path}")
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (IndexError, ValueError, TypeError, NotImplementedError, UnsupportedAlgorithm):  # TypeError: has a password
        raise ProvisionError(
            f"{path} is not a private key in OpenSSH format without a password: unpack the site's archive again, or "
            "ask the server's administrator for a new one"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ProvisionError(f"{path} is not an ECDSA key: expected ECDSA P-384, as `tepal provision` makes it")


# Certificates ---------------------------------------------------------------------------------------------------------


def read_certificate(path: Path) -> x509.Certificate:
    """Read a certificate in PEM. Raises ProvisionError."""
    try:
        certificate = x509.load_pem_x509_certificate(path.read_bytes())
        days_left(certificate)  # its dates are read on demand
        return certificate
    except FileNotFoundError:
        raise ProvisionError(f"the certificate {path} does not exist") from None
    except (ValueError, TypeError, UnsupportedAlgorithm, x509.InvalidVersion):
        raise ProvisionError(f"{path} is not a certificate in PEM format") from None


def days_left(certificate: x509.Certificate) -> int:
    """Return the whole days until the certificate expires, negative afterwards."""
    return (certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days


# site.toml ------------------------------------------------------------------------------------------------------------


def parse_node_config(arguments: Iterable[str] | None) -> dict[str, Value] | None:
    """Return the values of `--node-config`, read as Flower does; None if it was not given. Raises ProvisionError."""
    if arguments is None:
        return None
    try:
        return parse_run_config(argument for argument in arguments if argument.strip())
    except ValueError as error:
        raise ProvisionError(f"--node-config: {str(error).replace('run configuration', 'node config')}") from error


def with_absolute_paths(node_config: Mapping[str, Value]) -> dict[str, Value]:
    """Return a node config for this machine in which relative paths are absolute: a ClientApp has another folder."""
    given = {key: node_config[key] for key in _PATHS if node_config.get(key)}
    return {**node_config, **{key: str(Path(str(value)).expanduser().absolute()) for key, value in given.items()}}


def read_site_toml(content: bytes, where: str) -> tuple[str, str, dict[str, Value]]:
    """Return name, superlink and node config. Raises ProvisionError, which begins with `where`."""
    try:
        table: dict[str, Any] = parse_untrusted(content)
    except ValueError as error:
        raise ProvisionError(f"{where} is not valid TOML: {error}") from error
    unknown = sorted(table.keys() - {"name", "superlink", "node-config"})
    if unknown:
        raise ProvisionError(
            f"{where}: unknown key {some(unknown)}. Allowed are name, superlink and the table [node-config], which has "
            "the settings for the ClientApp"
        )
    name, superlink, given = table.get("name"), table.get("superlink"), table.get("node-config", {})
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise ProvisionError(f"{where}: name is {name!r}, expected the site's name as text")
    if not isinstance(superlink, str) or not is_address(superlink):
        raise ProvisionError(f'{where}: superlink is {superlink!r}, expected the server as "HOST:PORT"')
    if not isinstance(given, dict):
        raise ProvisionError(f"{where}: node-config is {given!r}, expected a table")
    node_config = flat(given)
    for key, value in node_config.items():
        if not isinstance(value, bool | int | float | str):
            raise ProvisionError(f"{where}: {key} = {value!r} in [node-config], expected a bool, int, float or text")
    if node_config.get("name", name) != name:
        raise ProvisionError(
            f"{where}: name in [node-config] is {node_config['name']!r}, expected the site's name, {name!r}"
        )
    return name, superlink, node_config


# Names ----------------------------------------------------------------------------------------------------------------


def host_names(hosts: Sequence[str]) -> list[str]:
    """Return the hosts as in a certificate, each once. Raises ProvisionError for an invalid name or address."""
    found: dict[str, None] = {}
    for host in hosts:
        try:
            address = ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
        except ValueError:
            found[_dns_name(host)] = None
            continue
        if address.is_unspecified or "%" in str(address):
            raise ProvisionError(f"host is {host}, to which sites cannot connect: give the address that they use")
        found[str(address)] = None
    return list(found)


def _dns_name(host: str) -> str:
    labels = host.split(".")
    if not host.isascii():
        raise ProvisionError(f"host is {host!r}, expected the name in its ASCII form, {_encoded(host)}")
    if "/" in host or host.count(":") == 1:
        raise ProvisionError(f"host is {host!r}, expected a name or address alone, without https:// and port (--port)")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or labels[-1].isdigit():
        raise ProvisionError(
            f"host is {host!r}, expected a name or address such as fl.example.org, 192.0.2.7 or 2001:db8::7"
        )
    return host.lower()


def _encoded(host: str) -> str:
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return "xn--…"


def is_address(text: str) -> bool:
    """Return whether the text is HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        return False
    try:
        return len(host_names([host])) == 1 and (":" not in host or host.startswith("["))
    except ProvisionError:
        return False


def some(names: Sequence[str], at_most: int = 8) -> str:
    """Return the first names and the number of the others, for a message."""
    if not names:
        return "none"
    return ", ".join(names[:at_most]) + (f" and {len(names) - at_most} more" if len(names) > at_most else "")
