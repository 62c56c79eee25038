"""The folder of a deployment's credentials: the places of its files, their state, and how to read them."""

from __future__ import annotations

import base64
import datetime
import hashlib
import os
import re
from dataclasses import dataclass
from pathlib import Path
from shlex import quote

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_ssh_public_key

from tepal.host.site import ProvisionError, days_left, is_address, read_certificate, some
from tepal.host.toml import parse_untrusted
from tepal.tools.deploy.provision.certificates import hosts_of

SETTINGS = "deployment.toml"
"""The file with the server's address."""

TIME = "%Y%m%dT%H%M%S.%fZ"
"""Format of the time in the names of revoked keys and replaced archives."""

_REVOKED = re.compile(r"(.+)-(\d{8}T\d{6}\.\d{6}Z)\.pub")


@dataclass(frozen=True)
class ServerFolder:
    """The credentials of the server: a folder `server` that `make` wrote, or a copy of it."""

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
        """Folder of the authorised public keys, NAME.pub."""
        return self.folder / "nodes"

    @property
    def revoked(self) -> Path:
        """Folder of the revoked public keys, NAME-TIME.pub."""
        return self.folder / "revoked"

    def node_keys(self) -> dict[str, Path]:
        """Return the files of the authorised keys, by site, in the order of the names."""
        return {path.stem: path for path in _public_keys(self.nodes) if not path.name.startswith(".")}

    def revoked_keys(self) -> list[tuple[str, Path]]:
        """Return (site, file) of each revoked key, the oldest of a site first."""
        found = ((_REVOKED.fullmatch(path.name), path) for path in _public_keys(self.revoked))
        return [(match[1], path) for match, path in found if match]


def _public_keys(folder: Path) -> list[Path]:
    """Return the files *.pub of a folder, none if it does not exist. Unlike `glob`, raises OSError if it is closed."""
    return sorted(path for path in folder.iterdir() if path.suffix == ".pub") if folder.exists() else []


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
        """Return the path of a site's archive, if it was made without `unpacked`."""
        return self.folder / "sites" / f"{name}.tar.gz"

    def unpacked(self, name: str) -> Path:
        """Return the path of a site's folder, if it was made with `unpacked`; `read_site` reads it."""
        return self.folder / "sites" / name


@dataclass(frozen=True)
class SiteKey:
    """A key of a site: its fingerprint as `ssh-keygen -l` shows it, and when it was revoked, None if not."""

    name: str
    fingerprint: str
    revoked: datetime.datetime | None = None


@dataclass(frozen=True)
class Overview:
    """The result of `overview`. Days are whole days until a certificate expires, negative afterwards."""

    sites: tuple[SiteKey, ...]
    hosts: tuple[str, ...]
    server_days: int
    ca_days: int


def find_server(folder: Path) -> ServerFolder:
    """Return the server's part of a folder that `make` wrote, or the folder itself if it is a copy of that part.

    Raises ProvisionError if it is neither.
    """
    _check_open(folder)
    for candidate in (folder / "server", folder):
        if (candidate / "nodes").is_dir() and (candidate / "ca.crt").is_file():
            return ServerFolder(candidate.absolute())
    raise ProvisionError(
        f"{folder} has no credentials: expected a folder that `tepal provision make` wrote, or a copy of its server/, "
        "which has ca.crt and nodes/"
    )


def closed(path: Path) -> ProvisionError:
    """Return the error for a file or folder that this user may not read: it says who may, and what to do."""
    uid = os.geteuid()
    try:
        owner = f" and belongs to uid {path.stat().st_uid}"
    except OSError:
        owner = ""
    return ProvisionError(
        f"{path} cannot be read by this user (uid {uid}){owner}. Run the command with sudo; if this user runs the "
        f"server: chown -R {uid} {quote(str(path))}"
    )


def _check_open(folder: Path) -> None:
    """Raise ProvisionError if this user may not list a folder of credentials, or one in it. It may lack any of them."""
    for each in (folder, folder / "server", folder / "server" / "nodes", folder / "server" / "revoked"):
        try:
            os.scandir(each).close()
        except PermissionError:
            raise closed(each) from None
        except OSError:
            continue


def made_in(folder: Path) -> tuple[Provisioned, str]:
    """Return the folder and the server's address for sites. Raises ProvisionError if `make` did not write it."""
    made = Provisioned(folder.absolute())
    _check_open(made.folder)
    needed = [made.folder / SETTINGS, made.server.nodes, made.server.root_certificates, made.folder / "sites"]
    missing = [str(path.relative_to(made.folder)) for path in needed if not path.exists()]
    if missing:
        raise ProvisionError(
            f"{folder} is not a folder that `tepal provision make` wrote: it has no {some(missing)}. Make one first: "
            f"tepal provision make {quote(str(folder))} --host … --site …"
        )
    settings = made.folder / SETTINGS
    try:
        superlink = parse_untrusted(settings.read_bytes()).get("superlink")
    except ValueError as error:
        raise ProvisionError(f"{settings} is not valid TOML: {error}") from error
    if not isinstance(superlink, str) or not is_address(superlink):
        raise ProvisionError(f'{settings}: superlink is {superlink!r}, expected the server as "HOST:PORT"')
    return made, superlink


def overview(folder: Path) -> Overview:
    """Read the state of all sites and certificates in a folder as `find_server` takes it."""
    server = find_server(folder)
    states = [SiteKey(name, fingerprint(path)) for name, path in server.node_keys().items()]
    for name, path in server.revoked_keys():
        when = datetime.datetime.strptime(path.stem.removeprefix(f"{name}-"), TIME).replace(tzinfo=datetime.UTC)
        states.append(SiteKey(name, fingerprint(path), when))
    certificate = read_certificate(server.certificate)
    return Overview(
        sites=tuple(sorted(states, key=lambda state: state.name)),  # stable: the valid key, then the revoked ones
        hosts=hosts_of(certificate),
        server_days=days_left(certificate),
        ca_days=days_left(read_certificate(server.root_certificates)),
    )


def fingerprint(public_key: Path) -> str:
    """Return the fingerprint of an OpenSSH public key file as `ssh-keygen -l` shows it: SHA256:…"""
    load_public_key(public_key)
    blob = base64.b64decode(public_key.read_bytes().split()[1])
    return "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")


def load_public_key(path: Path) -> ec.EllipticCurvePublicKey:
    """Read a public key in OpenSSH format. Raises ProvisionError unless it is an ECDSA key, as SuperLinks need."""
    try:
        key = load_ssh_public_key(path.read_bytes())
    except PermissionError:
        raise closed(path) from None
    except (IndexError, ValueError, NotImplementedError, UnsupportedAlgorithm):
        raise ProvisionError(
            f"{path} is not a public key in OpenSSH format: expected one line, ecdsa-sha2-nistp384 …"
        ) from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise ProvisionError(f"{path} is not an ECDSA key: expected ECDSA, as `tepal provision` makes it")
    return key
