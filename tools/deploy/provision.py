"""The credentials of a deployment: a certificate authority, the server's certificate, a key for each site.

`make` writes them into one folder, which only its owner can read:

    deployment.toml            where the sites find the server
    ca/                        ca.key, ca.crt: signs the server's certificate; keep it off the server
    server/                    all that the server's machine needs:
        ca.crt server.crt server.key
        nodes/NAME.pub         the public keys that may come in
        revoked/NAME-TIME.pub  those that may not any more
    sites/NAME.tar.gz          all that one site needs: NAME/ca.crt, NAME/node.key, NAME/site.toml

Sites trust the server by the authority's certificate (TLS). The server knows a site by its key, which is registered
under the site's name (`tepal.tools.deploy.fleet`). Who has a site's archive is that site. A change of the folder is
prepared beside and then renamed into place: a call that fails leaves the folder as it was.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import fcntl
import hashlib
import io
import ipaddress
import os
import re
import secrets
import shutil
import stat
import tarfile
import tempfile
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography import x509
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from tepal.host.toml import Value, flat, parse_run_config, to_toml

CONTAINER_USER = 49999
"""User and group of the container images: an archive that root unpacks belongs to them."""

SOON = 30
"""Days before its end from which on a certificate is to be renewed."""

_CURVE = ec.SECP384R1
_SKEW = datetime.timedelta(hours=1)  # clocks of sites may be behind
_ALWAYS = ("localhost", "127.0.0.1")  # the server's own machine: health checks, the Control API
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,63}")
_LABEL = re.compile(r"[A-Za-z0-9_]([A-Za-z0-9_-]{0,61}[A-Za-z0-9_])?")
_REVOKED = re.compile(r"(.+)-(\d{8}T\d{6}\.\d{6}Z)\.pub")
_TIME = "%Y%m%dT%H%M%S.%fZ"
_SETTINGS = "deployment.toml"
_SITE_FILES = ("ca.crt", "node.key", "site.toml")
_UNPACK = "unpack the site's archive as its owner: tar -xzf NAME.tar.gz"


class ProvisionError(ValueError):
    """Credentials cannot be made, changed or read. The message says what is wrong, where, and what to do."""


# What there is --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ServerFolder:
    """What the server's machine has: a folder `server` that `make` wrote, or a copy of it."""

    folder: Path

    @property
    def root_certificates(self) -> Path:
        """PEM file of the authority, for `--ssl-ca-certfile`."""
        return self.folder / "ca.crt"

    @property
    def certificate(self) -> Path:
        return self.folder / "server.crt"

    @property
    def key(self) -> Path:
        return self.folder / "server.key"

    @property
    def nodes(self) -> Path:
        """Folder of the public keys that may come in, NAME.pub."""
        return self.folder / "nodes"

    @property
    def revoked(self) -> Path:
        """Folder of the public keys that may not come in any more, NAME-TIME.pub."""
        return self.folder / "revoked"

    def node_keys(self) -> dict[str, Path]:
        """Return the files of the keys that may come in, by site, in the order of the names."""
        return {path.stem: path for path in sorted(self.nodes.glob("*.pub")) if not path.name.startswith(".")}

    def revoked_keys(self) -> list[tuple[str, Path]]:
        """Return (site, file) of each revoked key, the oldest of a site first."""
        found = ((_REVOKED.fullmatch(path.name), path) for path in sorted(self.revoked.glob("*.pub")))
        return [(match[1], path) for match, path in found if match]


@dataclass(frozen=True)
class Provisioned:
    """A folder that `make` wrote."""

    folder: Path

    @property
    def ca_certificate(self) -> Path:
        return self.folder / "ca" / "ca.crt"

    @property
    def server(self) -> ServerFolder:
        return ServerFolder(self.folder / "server")

    def archive(self, name: str) -> Path:
        """Where the archive of a site is, unless it is unpacked."""
        return self.folder / "sites" / f"{name}.tar.gz"

    def unpacked(self, name: str) -> Path:
        """Where the folder of a site is that was made with `unpacked`; `read_site` reads it."""
        return self.folder / "sites" / name


@dataclass(frozen=True)
class Site:
    """What a site has. Read by `read_site`."""

    name: str
    superlink: str
    """HOST:PORT of the server."""
    root_certificates: Path
    key: Path
    node_config: dict[str, Value] = field(default_factory=dict)


@dataclass(frozen=True)
class SiteState:
    """A key of a site: `fingerprint` as `ssh-keygen -l` shows it, `revoked` is when it was, None for one that holds."""

    name: str
    fingerprint: str
    revoked: datetime.datetime | None = None


@dataclass(frozen=True)
class Overview:
    """What `overview` found. Days are whole days from now until the end, negative after it."""

    sites: tuple[SiteState, ...]
    hosts: tuple[str, ...]
    server_days: int
    ca_days: int


# Making and changing --------------------------------------------------------------------------------------------------


def make(
    folder: Path,
    *,
    hosts: Sequence[str],
    sites: Sequence[str],
    port: int = 9092,
    days: int = 365,
    ca_days: int = 3650,
    node_config: Mapping[str, Value] | None = None,
    unpacked: bool = False,
) -> Provisioned:
    """Make all credentials of a deployment in `folder`, which does not exist yet or is empty.

    Args:
        folder: Where; the folder above it exists.
        hosts: Names and addresses of the server, as sites call it; sites get the first. localhost and 127.0.0.1 are
            always added to the certificate.
        sites: Names: letters, digits, '-', '_', '.', up to 64.
        port: Of the server's Fleet API.
        days: How long the server's certificate holds.
        ca_days: How long the authority's certificate holds.
        node_config: For all sites.
        unpacked: Write a folder for each site and no archive.

    Raises ProvisionError, and nothing is written then; OSError where the disk refuses.
    """
    names, addresses = _site_names(sites), _host_names(hosts)
    if not addresses:
        raise ProvisionError("no host: how do sites reach the server? Give its name or address with --host")
    if not 1 <= port <= 65535:
        raise ProvisionError(f"port {port}: expected 1 to 65535")
    if not 1 <= days <= ca_days <= 36500:
        raise ProvisionError(
            f"the server's certificate is to hold {days} days and the authority's {ca_days}: expected at least 1, at "
            "most 36500, and for the server's no more than for the authority's"
        )
    folder = folder.absolute()
    if folder.is_dir():
        there = sorted(path.name for path in folder.iterdir())
        if _SETTINGS in there or {"ca", "server", "sites"} <= set(there):
            raise ProvisionError(
                f"{folder} has the credentials of a deployment already, and they are not replaced. "
                "Use `tepal provision add` for more sites, `tepal provision renew` for new keys and certificates"
            )
        if there:
            raise ProvisionError(f"{folder} is not empty ({_some(there)}): name a folder that is new or empty")
    elif os.path.lexists(folder):
        raise ProvisionError(f"{folder} is no folder: name one that is new or empty")
    elif not folder.parent.is_dir():
        raise ProvisionError(f"there is no folder {folder.parent}, in which {folder.name} could be made")

    settings = _settings(addresses[0], port)
    toml = {name: _site_toml(name, settings["superlink"], node_config or {}) for name in names}
    ca_key = ec.generate_private_key(_CURVE())
    ca = _authority(ca_key, ca_days)
    certificate, key = _server_certificate(ca, ca_key, addresses, days)
    nodes = {name: ec.generate_private_key(_CURVE()) for name in names}

    new = not folder.is_dir()
    if new:
        folder.mkdir(mode=0o700)
    try:
        folder.chmod(0o700)
        with _change(folder) as change:
            change.add(folder / "ca", {"ca.key": _pem(ca_key), "ca.crt": _pem(ca)})
            server: _Tree = {"ca.crt": _pem(ca), "server.crt": certificate, "server.key": key, "revoked": {}}
            server["nodes"] = {f"{name}.pub": _public(node, name) for name, node in nodes.items()}
            change.add(folder / "server", server)
            packed = [_packed(name, _pem(ca), node, toml[name], unpacked) for name, node in nodes.items()]
            change.add(folder / "sites", dict(packed))
            change.add(folder / _SETTINGS, to_toml(settings).encode())
    except BaseException:
        if new:
            with contextlib.suppress(OSError):
                folder.rmdir()
        raise
    return Provisioned(folder)


def add(
    folder: Path, *, sites: Sequence[str], node_config: Mapping[str, Value] | None = None, unpacked: bool = False
) -> Provisioned:
    """Make keys and archives for further sites. Raises ProvisionError, and nothing is written then."""
    made, superlink = _made(folder)
    names = _site_names(sites)
    known = {name.casefold(): name for name in made.server.node_keys()}
    revoked = {name.casefold(): name for name, _ in made.server.revoked_keys()}
    for name in names:
        if name.casefold() in known:
            raise ProvisionError(
                f"site {known[name.casefold()]} is there already, in {made.server.nodes}, and its key is not replaced. "
                f"For a new key: tepal provision renew {folder} --site {known[name.casefold()]}"
            )
        if name.casefold() in revoked:
            was = revoked[name.casefold()]
            raise ProvisionError(
                f"there was a site {was}, whose key was revoked. To let it in again with a new key: "
                f"tepal provision renew {folder} --site {was}"
            )
    ca = made.server.root_certificates.read_bytes()
    toml = {name: _site_toml(name, superlink, node_config or {}) for name in names}
    with _change(made.folder) as change:
        for name in names:
            _add_site(change, made, name, ca, toml[name], unpacked)
    return made


def renew_server(folder: Path, *, hosts: Sequence[str] = (), days: int = 365) -> Provisioned:
    """Make a new certificate and key for the server, for `hosts` or else for those of the present one.

    The present pair stays beside as server.crt.old and server.key.old. With `hosts`, sites that are made later call
    the first of them. Raises ProvisionError, and nothing is changed then.
    """
    made, superlink = _made(folder)
    key_file = made.folder / "ca" / "ca.key"
    if not key_file.is_file():
        raise ProvisionError(f"there is no {key_file}, which signs the server's certificate: bring it back")
    ca = _certificate(made.ca_certificate)
    try:
        ca_key = load_pem_private_key(key_file.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        raise ProvisionError(f"{key_file} is no private key in PEM that could be read") from None
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey) or ca_key.public_key() != ca.public_key():
        raise ProvisionError(f"{key_file} is not the key of {made.ca_certificate}")
    left = _days_left(ca)
    if not 1 <= days <= left:
        raise ProvisionError(
            f"the server's certificate cannot hold {days} days: the authority's, {made.ca_certificate}, holds {left} "
            f"more. {f'Use --days {left} or less' if left > 0 else 'Make a new deployment: tepal provision make'}"
        )
    addresses = _host_names(hosts) or list(_hosts_of(_certificate(made.server.certificate)))
    certificate, key = _server_certificate(ca, ca_key, addresses, days)
    with _change(made.folder) as change:
        for path, content in ((made.server.certificate, certificate), (made.server.key, key)):
            change.replace(path, content, old=path.with_name(f"{path.name}.old"))
        if hosts:
            settings = _settings(addresses[0], int(superlink.rpartition(":")[2]))
            change.replace(made.folder / _SETTINGS, to_toml(settings).encode())
    return made


def renew_site(folder: Path, name: str, *, node_config: Mapping[str, Value] | None = None) -> Provisioned:
    """Make a new key for a site, under the same name. Its present key, if it still holds, is revoked.

    The site's present archive, or folder, stays beside as NAME-TIME.tar.gz.old; the new one has the same form, and the
    same node config unless one is given. Raises ProvisionError, and nothing is changed then.
    """
    made, superlink = _made(folder)
    _site_names([name])
    present = made.server.node_keys().get(name)
    if present is None and name not in {revoked for revoked, _ in made.server.revoked_keys()}:
        raise ProvisionError(
            f"there is no site {name} in {made.folder}; there are {_some(list(made.server.node_keys()))}. For a new "
            f"site: tepal provision add {folder} --site {name}"
        )
    archive, unpacked = made.archive(name), made.unpacked(name)
    if node_config is None:
        node_config = _node_config_of(archive, unpacked, name)
    toml, now = _site_toml(name, superlink, node_config), datetime.datetime.now(datetime.UTC).strftime(_TIME)
    ca, as_folder = made.server.root_certificates.read_bytes(), unpacked.is_dir()
    with _change(made.folder) as change:
        if present is not None:
            change.move(present, made.server.revoked / f"{name}-{now}.pub")
        if archive.exists():
            change.move(archive, archive.with_name(f"{name}-{now}.tar.gz.old"))
        if as_folder:
            change.move(unpacked, unpacked.with_name(f"{name}-{now}.old"))
        _add_site(change, made, name, ca, toml, as_folder)
    return made


def revoke(server: ServerFolder, name: str) -> Path | None:
    """Move the key of a site to the revoked ones; return where it is now, None if it was revoked before.

    A running SuperLink learns of it by `fleet.align`. Raises ProvisionError if there is no such site.
    """
    _site_names([name])
    path = server.node_keys().get(name)
    if path is None:
        if name in {revoked for revoked, _ in server.revoked_keys()}:
            return None
        raise ProvisionError(f"there is no site {name} in {server.nodes}; there are {_some(list(server.node_keys()))}")
    target = server.revoked / f"{name}-{datetime.datetime.now(datetime.UTC).strftime(_TIME)}.pub"
    with _change(server.folder) as change:
        change.move(path, target)
    return target


# Reading --------------------------------------------------------------------------------------------------------------


def find_server(folder: Path) -> ServerFolder:
    """Return the server's part of a folder that `make` wrote, or the folder itself if it is a copy of that part.

    Raises ProvisionError if it is neither.
    """
    for candidate in (folder / "server", folder):
        if (candidate / "nodes").is_dir() and (candidate / "ca.crt").is_file():
            return ServerFolder(candidate.absolute())
    raise ProvisionError(
        f"{folder} has no credentials: expected a folder that `tepal provision make` wrote, or a copy of its server/, "
        "with ca.crt and nodes/ in it"
    )


def overview(folder: Path) -> Overview:
    """Read the state of all sites and certificates in a folder as `find_server` takes it."""
    server = find_server(folder)
    states = [SiteState(name, fingerprint(path)) for name, path in server.node_keys().items()]
    for name, path in server.revoked_keys():
        match = _REVOKED.fullmatch(path.name)
        assert match is not None  # else it were not among them
        when = datetime.datetime.strptime(match[2], _TIME).replace(tzinfo=datetime.UTC)
        states.append(SiteState(name, fingerprint(path), when))
    certificate = _certificate(server.certificate)
    return Overview(
        sites=tuple(sorted(states, key=lambda state: state.name)),  # stable: a key that holds, then the revoked ones
        hosts=_hosts_of(certificate),
        server_days=_days_left(certificate),
        ca_days=_days_left(_certificate(server.root_certificates)),
    )


def fingerprint(public_key: Path) -> str:
    """Return the fingerprint of an OpenSSH public key file as `ssh-keygen -l` shows it: SHA256:…"""
    load_public_key(public_key)
    blob = base64.b64decode(public_key.read_bytes().split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def load_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Read a public key in OpenSSH's form. Raises ProvisionError unless it is one that a SuperLink takes."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm):
        raise ProvisionError(
            f"{path} is no public key in OpenSSH's form: expected one line, ecdsa-sha2-nistp384 …"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ProvisionError(f"{path} is a key of another kind: expected ECDSA, as `tepal provision` makes it")
    return key


def read_site(folder: Path) -> Site:
    """Read and check the folder of a site: an unpacked archive of `tepal provision`.

    Raises ProvisionError with what is wrong and what to do.
    """
    folder = folder.absolute()
    if folder.is_file():
        raise ProvisionError(f"{folder} is a file, expected a folder: {_UNPACK}")
    if not folder.is_dir():
        raise ProvisionError(f"there is no folder {folder}: {_UNPACK}")
    for name in _SITE_FILES:
        if not (folder / name).is_file():
            raise ProvisionError(f"{folder} has no file {name}, and a site needs {', '.join(_SITE_FILES)}: {_UNPACK}")
    certificates, key, settings = (folder / name for name in _SITE_FILES)
    try:
        text = settings.read_text(encoding="utf-8")
        name, superlink, node_config = _read_site_toml(text, str(settings))
        _check_authority(certificates)
        _check_node_key(key)
    except PermissionError as error:
        raise ProvisionError(
            f"{error.filename} cannot be read by this user (uid {os.geteuid()}). The folder must belong to it: "
            f"chown -R {os.geteuid()} {folder}"
        ) from error
    return Site(name, superlink, certificates, key, node_config)


def _check_authority(path: Path) -> None:
    if _days_left(_certificate(path)) < 0:
        raise ProvisionError(
            f"the authority's certificate {path} has expired. Whoever runs the server makes a new deployment, and "
            "sends a new archive"
        )


def _check_node_key(path: Path) -> None:
    mode = stat.S_IMODE(path.stat().st_mode)
    if mode & 0o077:
        raise ProvisionError(f"the private key {path} can be read by others (mode {mode:04o}). Use: chmod 600 {path}")
    try:
        key = load_ssh_private_key(path.read_bytes(), None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # TypeError: it needs a password
        raise ProvisionError(
            f"{path} is no private key in OpenSSH's form without a password: unpack the site's archive again, or ask "
            "whoever runs the server for a new one"
        ) from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise ProvisionError(f"{path} is a key of another kind: expected ECDSA P-384, as `tepal provision` makes it")


# site.toml and deployment.toml ----------------------------------------------------------------------------------------


def parse_node_config(arguments: Iterable[str] | None) -> dict[str, Value] | None:
    """Read `--node-config`, as Flower does; None if it was not given. Raises ProvisionError."""
    if arguments is None:
        return None
    try:
        return parse_run_config(argument for argument in arguments if argument.strip())
    except ValueError as error:
        raise ProvisionError(f"--node-config: {str(error).replace('run configuration', 'node config')}") from error


def _settings(host: str, port: int) -> dict[str, Value]:
    return {"superlink": f"[{host}]:{port}" if ":" in host else f"{host}:{port}"}


def _site_toml(name: str, superlink: Value, node_config: Mapping[str, Value]) -> str:
    try:
        text = to_toml({"name": name, "superlink": superlink}) + "\n[node-config]\n" + to_toml(node_config)
        if _read_site_toml(text, "node config")[2] == node_config:
            return text
    except ProvisionError:
        raise
    except ValueError as error:
        raise ProvisionError(str(error).replace("run configuration", "node config")) from error
    raise ProvisionError(
        f"node config {dict(node_config)} cannot be kept as it is: expected keys of letters, digits, '-', '_', '.', "
        "and values that are bool, int, float or str"
    )


def _read_site_toml(text: str, where: str) -> tuple[str, str, dict[str, Value]]:
    """Return name, superlink and node config. Raises ProvisionError, which begins with `where`."""
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ProvisionError(f"{where} is not valid TOML: {error}") from error
    unknown = sorted(table.keys() - {"name", "superlink", "node-config"})
    if unknown:
        raise ProvisionError(
            f"{where}: unknown key {_some(unknown)}. There are name, superlink and the table [node-config], in which "
            "stands what the ClientApp shall know"
        )
    name, superlink, given = table.get("name"), table.get("superlink"), table.get("node-config", {})
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ProvisionError(f"{where}: name is {name!r}, expected the site's name as text")
    if not isinstance(superlink, str) or not _is_address(superlink):
        raise ProvisionError(f'{where}: superlink is {superlink!r}, expected the server as "HOST:PORT"')
    if not isinstance(given, dict):
        raise ProvisionError(f"{where}: node-config is {given!r}, expected a table")
    node_config = flat(given)
    for key, value in node_config.items():
        if not isinstance(value, bool | int | float | str):
            raise ProvisionError(f"{where}: {key} = {value!r} in [node-config], expected a bool, int, float or text")
    if node_config.get("name", name) != name:
        raise ProvisionError(f"{where}: [node-config] has another name, {node_config['name']!r}; the site is {name}")
    return name, superlink, node_config


def _node_config_of(archive: Path, unpacked: Path, name: str) -> dict[str, Value]:
    """Return the node config that a site was made with."""
    try:
        if unpacked.is_dir():
            text = (unpacked / "site.toml").read_text(encoding="utf-8")
        else:
            with tarfile.open(archive) as tar:
                member = tar.extractfile(f"{name}/site.toml")
                assert member is not None  # a file
                text = member.read().decode()
    except (OSError, KeyError, tarfile.TarError, UnicodeDecodeError):
        raise ProvisionError(
            f"the node config of site {name} is not known: neither {archive} nor {unpacked} is there to read it from. "
            "Give it with --node-config 'key=value …'; --node-config '' for none"
        ) from None
    return _read_site_toml(text, f"site.toml of {name}")[2]


def _made(folder: Path) -> tuple[Provisioned, str]:
    """Return the folder and the server's address for sites. Raises ProvisionError if `make` did not write it."""
    made = Provisioned(folder.absolute())
    needed = [made.folder / _SETTINGS, made.server.nodes, made.server.root_certificates, made.folder / "sites"]
    missing = [str(path.relative_to(made.folder)) for path in needed if not path.exists()]
    if missing:
        raise ProvisionError(
            f"{folder} is not a folder that `tepal provision make` wrote: it has no {_some(missing)}. Make one first: "
            f"tepal provision make {folder} --host … --site …"
        )
    settings = made.folder / _SETTINGS
    try:
        superlink = tomllib.loads(settings.read_text(encoding="utf-8")).get("superlink")
    except tomllib.TOMLDecodeError as error:
        raise ProvisionError(f"{settings} is not valid TOML: {error}") from error
    if not isinstance(superlink, str) or not _is_address(superlink):
        raise ProvisionError(f'{settings}: superlink is {superlink!r}, expected the server as "HOST:PORT"')
    return made, superlink


# Names ----------------------------------------------------------------------------------------------------------------


def _site_names(names: Sequence[str]) -> list[str]:
    if not names:
        raise ProvisionError("no site: name each with --site")
    seen: dict[str, str] = {}
    for name in names:
        if not _NAME.fullmatch(name):
            raise ProvisionError(
                f"site name {name!r}: expected letters, digits, '-', '_' and '.', 1 to 64 of them, not beginning with "
                "'.' or '-'"
            )
        if name.casefold() in seen:
            other = seen[name.casefold()]
            raise ProvisionError(
                f"site {name} is named twice"
                if other == name
                else f"sites {other} and {name} differ only in case, which some disks do not tell apart: rename one"
            )
        seen[name.casefold()] = name
    return list(names)


def _host_names(hosts: Sequence[str]) -> list[str]:
    """Return the hosts as they stand in a certificate. Raises ProvisionError for what is no name and no address."""
    found: dict[str, None] = {}
    for host in hosts:
        try:
            address = ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host)
        except ValueError:
            found[_dns_name(host)] = None
            continue
        if address.is_unspecified or "%" in str(address):
            raise ProvisionError(f"host {host}: nobody can call this address. Give the one that sites use")
        found[str(address)] = None
    return list(found)


def _dns_name(host: str) -> str:
    labels = host.split(".")
    if not host.isascii():
        raise ProvisionError(f"host {host!r}: write it as DNS knows it: {_encoded(host)}")
    if "/" in host or host.count(":") == 1:
        raise ProvisionError(f"host {host!r}: expected a name or address alone, without https:// and port (--port)")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels) or labels[-1].isdigit():
        raise ProvisionError(
            f"host {host!r} is no name or address: expected for instance fl.example.org, 192.0.2.7 or 2001:db8::7"
        )
    return host.lower()


def _encoded(host: str) -> str:
    try:
        return host.encode("idna").decode()
    except UnicodeError:
        return "xn--…"


def _is_address(text: str) -> bool:
    """Whether it is HOST:PORT."""
    host, _, port = text.rpartition(":")
    if not re.fullmatch("[0-9]{1,5}", port) or not 1 <= int(port) <= 65535:
        return False
    try:
        return len(_host_names([host])) == 1 and (":" not in host or host.startswith("["))
    except ProvisionError:
        return False


def _some(names: Sequence[str], at_most: int = 8) -> str:
    if not names:
        return "none"
    return ", ".join(names[:at_most]) + (f" and {len(names) - at_most} more" if len(names) > at_most else "")


# Keys and certificates ------------------------------------------------------------------------------------------------


def _authority(key: ec.EllipticCurvePrivateKey, days: int) -> x509.Certificate:
    # Authorities of two deployments have different names: an error that shows one says which it is.
    name = _subject(f"Tepal CA {secrets.token_hex(4)}")
    builder = _builder(name, name, key.public_key(), key.public_key(), days)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(_key_usage(certificates=True), critical=True)
    return builder.sign(key, hashes.SHA384())


def _server_certificate(
    ca: x509.Certificate, ca_key: ec.EllipticCurvePrivateKey, hosts: Sequence[str], days: int
) -> tuple[bytes, bytes]:
    """Return (certificate, key) in PEM, for the hosts and always for this machine."""
    key = ec.generate_private_key(_CURVE())
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
    return _pem(builder.sign(ca_key, hashes.SHA384())), _pem(key)


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


def _pem(thing: x509.Certificate | ec.EllipticCurvePrivateKey) -> bytes:
    if isinstance(thing, x509.Certificate):
        return thing.public_bytes(Encoding.PEM)
    return thing.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def _public(key: ec.EllipticCurvePrivateKey, name: str) -> bytes:
    return key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH) + f" {name}\n".encode()


def _certificate(path: Path) -> x509.Certificate:
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except FileNotFoundError:
        raise ProvisionError(f"there is no certificate {path}") from None
    except ValueError:
        raise ProvisionError(f"{path} is no certificate in PEM that could be read") from None


def _hosts_of(certificate: x509.Certificate) -> tuple[str, ...]:
    names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return tuple(str(name.value) for name in names)


def _days_left(certificate: x509.Certificate) -> int:
    return (certificate.not_valid_after_utc - datetime.datetime.now(datetime.UTC)).days


def _packed(
    name: str, ca: bytes, key: ec.EllipticCurvePrivateKey, toml: str, unpacked: bool
) -> tuple[str, bytes | _Tree]:
    """Return what a site gets, (file or folder name below sites/, content)."""
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    files: _Tree = {"ca.crt": ca, "node.key": private, "site.toml": toml.encode()}
    return (name, files) if unpacked else (f"{name}.tar.gz", _archive(name, files))


def _add_site(change: _Change, made: Provisioned, name: str, ca: bytes, toml: str, unpacked: bool) -> None:
    key = ec.generate_private_key(_CURVE())
    change.add(made.server.nodes / f"{name}.pub", _public(key, name))
    where, content = _packed(name, ca, key, toml, unpacked)
    change.add(made.folder / "sites" / where, content)


def _archive(folder: str, files: _Tree) -> bytes:
    """Return a .tar.gz of a folder with files, all for the container's user and nobody else."""
    buffer, now = io.BytesIO(), int(datetime.datetime.now(datetime.UTC).timestamp())
    with tarfile.open(fileobj=buffer, mode="w:gz", format=tarfile.PAX_FORMAT) as tar:
        for name, content in (("", b""), *files.items()):
            assert isinstance(content, bytes)
            member = tarfile.TarInfo(f"{folder}/{name}" if name else folder)
            member.type = tarfile.REGTYPE if name else tarfile.DIRTYPE
            member.mode = 0o600 if name else 0o700
            member.uid = member.gid = CONTAINER_USER
            member.mtime, member.size = now, len(content)
            tar.addfile(member, io.BytesIO(content))
    return buffer.getvalue()


# Changing a folder as a whole -----------------------------------------------------------------------------------------

_Tree = dict[str, "bytes | _Tree"]
"""Files by name; a folder is a tree."""


class _Change:
    """What one call changes in a folder. New files are written to a hidden folder in it; `commit` only renames."""

    def __init__(self, staging: Path) -> None:
        self._staging = staging
        self._renames: list[tuple[Path, Path]] = []

    def add(self, target: Path, content: bytes | _Tree) -> None:
        """Have a file or a folder appear that is not there yet."""
        new = self._beside()
        _write(new, content)
        self.move(new, target)

    def move(self, source: Path, target: Path) -> None:
        self._renames.append((source, target))

    def replace(self, target: Path, content: bytes, old: Path | None = None) -> None:
        """Have a file appear in the place of another, which goes to `old`, in the place of what is there."""
        if os.path.lexists(target):
            if old is not None and os.path.lexists(old):
                self.move(old, self._beside())
            self.move(target, old or self._beside())
        self.add(target, content)

    def commit(self) -> None:
        done: list[tuple[Path, Path]] = []
        try:
            for source, target in self._renames:
                if os.path.lexists(target):
                    raise ProvisionError(f"{target} is there already, and is not replaced: move it away")
                os.rename(source, target)
                done.append((source, target))
        except BaseException:
            for source, target in reversed(done):
                os.rename(target, source)
            raise

    def _beside(self) -> Path:
        return self._staging / secrets.token_hex(8)


@contextlib.contextmanager
def _change(folder: Path) -> Iterator[_Change]:
    """Change a folder at the end of the block, wholly or, after an exception, not at all; one at a time."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ProvisionError(f"another `tepal provision` is at work in {folder}: try again after it") from None
        staging = Path(tempfile.mkdtemp(prefix=".provision-", dir=folder))
        try:
            change = _Change(staging)
            yield change
            change.commit()
        finally:
            shutil.rmtree(staging, ignore_errors=True)
    finally:
        os.close(lock)


def _write(path: Path, content: bytes | _Tree) -> None:
    """Write a file (0600) or a folder (0700) that nobody else can read at any moment, whatever the umask."""
    if isinstance(content, dict):
        path.mkdir(mode=0o700)
        path.chmod(0o700)
        for name, inner in content.items():
            _write(path / name, inner)
        return
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        os.fchmod(descriptor, 0o600)  # a umask may have taken more away
        file.write(content)
