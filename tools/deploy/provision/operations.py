"""Operations on a deployment's credentials: make them, add sites, renew keys and certificates, revoke keys."""

from __future__ import annotations

import contextlib
import datetime
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from shlex import quote

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from tepal.host.site import NAME, ProvisionError, days_left, host_names, read_certificate, some
from tepal.host.toml import Value, to_toml
from tepal.tools.deploy.provision.certificates import (
    authority,
    hosts_of,
    new_key,
    pem,
    public_line,
    server_certificate,
)
from tepal.tools.deploy.provision.change import Tree, changing
from tepal.tools.deploy.provision.folder import SETTINGS, TIME, Provisioned, ServerFolder, made_in
from tepal.tools.deploy.provision.site_files import add_site, node_config_of, pack_site, site_toml

_RESERVED = "server"  # the server itself in reports, as in strategies/rounds/report.py


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
        folder: The folder, whose parent exists.
        hosts: Names and addresses of the server; sites connect to the first. localhost and 127.0.0.1 are always added
            to the certificate.
        sites: Names: letters, digits, '-', '_', '.', up to 64; not "server", in any case.
        port: Port of the server's Fleet API.
        days: Validity of the server's certificate.
        ca_days: Validity of the authority's certificate.
        node_config: For all sites.
        unpacked: Write a folder for each site and no archive.

    Raises ProvisionError or, for the disk, OSError; then nothing is written.
    """
    names, addresses = _site_names(sites), host_names(hosts)
    if not addresses:
        raise ProvisionError("no host is given: name the address to which sites connect with --host")
    if not 1 <= port <= 65535:
        raise ProvisionError(f"port is {port}, expected 1 to 65535")
    if not 1 <= days <= ca_days <= 36500:
        raise ProvisionError(
            f"the server's certificate would be valid for {days} days and the authority's for {ca_days}: expected 1 to "
            "36500, and for the server's no more than for the authority's"
        )
    folder = folder.absolute()
    if folder.is_dir():
        there = sorted(path.name for path in folder.iterdir())
        if SETTINGS in there or {"ca", "server", "sites"} <= set(there):
            raise ProvisionError(
                f"{folder} already has the credentials of a deployment, and they are not replaced. "
                "Use `tepal provision add` for more sites, `tepal provision renew` for new keys and certificates"
            )
        if there:
            raise ProvisionError(f"{folder} is not empty ({some(there)}): name a folder that is new or empty")
    elif os.path.lexists(folder):
        raise ProvisionError(f"{folder} is not a folder: name one that is new or empty")
    elif not folder.parent.is_dir():
        raise ProvisionError(f"the folder {folder.parent} does not exist: create it first")

    settings = _settings(addresses[0], port)
    toml = {name: site_toml(name, settings["superlink"], node_config or {}) for name in names}
    ca_key = new_key()
    ca = authority(ca_key, ca_days)
    certificate, key = server_certificate(ca, ca_key, addresses, days)
    nodes = {name: new_key() for name in names}

    new = not folder.is_dir()
    if new:
        folder.mkdir(mode=0o700)
    try:
        folder.chmod(0o700)
        with changing(folder) as change:
            change.add(folder / "ca", {"ca.key": pem(ca_key), "ca.crt": pem(ca)})
            server: Tree = {"ca.crt": pem(ca), "server.crt": certificate, "server.key": key, "revoked": {}}
            server["nodes"] = {f"{name}.pub": public_line(node, name) for name, node in nodes.items()}
            change.add(folder / "server", server)
            packed = [pack_site(name, pem(ca), node, toml[name], unpacked) for name, node in nodes.items()]
            change.add(folder / "sites", dict(packed))
            change.add(folder / SETTINGS, to_toml(settings).encode())
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
    made, superlink = made_in(folder)
    names = _site_names(sites)
    known = {name.casefold(): name for name in made.server.node_keys()}
    revoked = {name.casefold(): name for name, _ in made.server.revoked_keys()}
    for name in names:
        if name.casefold() in known:
            raise ProvisionError(
                f"site {known[name.casefold()]} exists already in {made.server.nodes}, and its key is not replaced. "
                f"For a new key: tepal provision renew {quote(str(folder))} --site {known[name.casefold()]}"
            )
        if name.casefold() in revoked:
            was = revoked[name.casefold()]
            raise ProvisionError(
                f"the key of site {was} was revoked. To authorise it again with a new key: "
                f"tepal provision renew {quote(str(folder))} --site {was}"
            )
    ca = made.server.root_certificates.read_bytes()
    toml = {name: site_toml(name, superlink, node_config or {}) for name in names}
    with changing(made.folder) as change:
        for name in names:
            add_site(change, made, name, ca, toml[name], unpacked)
    return made


def renew_server(folder: Path, *, hosts: Sequence[str] = (), days: int = 365) -> Provisioned:
    """Make a new certificate and key for the server, for `hosts` or else for those of the present one.

    The present pair is renamed to server.crt.old and server.key.old. With `hosts`, sites that are made later connect to
    the first of them. Raises ProvisionError, and nothing is changed then.
    """
    made, superlink = made_in(folder)
    key_file = made.folder / "ca" / "ca.key"
    if not key_file.is_file():
        raise ProvisionError(f"{key_file}, which signs the server's certificate, does not exist: restore it")
    ca = read_certificate(made.ca_certificate)
    try:
        ca_key = load_pem_private_key(key_file.read_bytes(), None)
    except (ValueError, TypeError, NotImplementedError, UnsupportedAlgorithm):
        raise ProvisionError(f"{key_file} is not a private key in PEM format without a password") from None
    if not isinstance(ca_key, ec.EllipticCurvePrivateKey) or ca_key.public_key() != ca.public_key():
        raise ProvisionError(f"{key_file} is not the key of {made.ca_certificate}")
    left = days_left(ca)
    if not 1 <= days <= left:
        remedy = f"Use --days {left} or less" if left > 0 else "Make a new deployment: tepal provision make"
        raise ProvisionError(
            f"the server's certificate cannot be valid for {days} days: the authority's, {made.ca_certificate}, is "
            f"valid for {left}. {remedy}"
        )
    addresses = host_names(hosts) or list(hosts_of(read_certificate(made.server.certificate)))
    certificate, key = server_certificate(ca, ca_key, addresses, days)
    with changing(made.folder) as change:
        for path, content in ((made.server.certificate, certificate), (made.server.key, key)):
            change.replace(path, content, old=path.with_name(f"{path.name}.old"))
        if hosts:
            settings = _settings(addresses[0], int(superlink.rpartition(":")[2]))
            change.replace(made.folder / SETTINGS, to_toml(settings).encode())
    return made


def renew_site(folder: Path, name: str, *, node_config: Mapping[str, Value] | None = None) -> Provisioned:
    """Make a new key for a site, under the same name. Its present key, unless it is revoked already, is revoked.

    The site's present archive or folder is renamed to NAME-TIME.tar.gz.old or NAME-TIME.old. The new one has the same
    form, and the same node config unless one is given. Raises ProvisionError, and nothing is changed then.
    """
    made, superlink = made_in(folder)
    _site_names([name])
    present = made.server.node_keys().get(name)
    if present is None and name not in {revoked for revoked, _ in made.server.revoked_keys()}:
        raise ProvisionError(
            f"{made.folder} has no site {name}. It has: {some(list(made.server.node_keys()))}. For a new site: "
            f"tepal provision add {quote(str(folder))} --site {name}"
        )
    archive, unpacked = made.archive(name), made.unpacked(name)
    if node_config is None:
        node_config = node_config_of(archive, unpacked, name)
    toml, now = site_toml(name, superlink, node_config), datetime.datetime.now(datetime.UTC).strftime(TIME)
    ca, as_folder = made.server.root_certificates.read_bytes(), unpacked.is_dir()
    with changing(made.folder) as change:
        if present is not None:
            made.server.revoked.mkdir(mode=0o700, exist_ok=True)  # a copy by git has no empty folder
            change.move(present, made.server.revoked / f"{name}-{now}.pub")
        if archive.exists():
            change.move(archive, archive.with_name(f"{name}-{now}.tar.gz.old"))
        if as_folder:
            change.move(unpacked, unpacked.with_name(f"{name}-{now}.old"))
        add_site(change, made, name, ca, toml, as_folder)
    return made


def revoke(server: ServerFolder, name: str) -> Path | None:
    """Move the key of a site to the revoked ones; return its new path, None if it was revoked before.

    `fleet.align` unregisters it at a running SuperLink. Raises ProvisionError if there is no such site.
    """
    _check_name(name)
    path = server.node_keys().get(name)
    if path is None:
        if name in {revoked for revoked, _ in server.revoked_keys()}:
            return None
        raise ProvisionError(f"{server.nodes} has no site {name}. It has: {some(list(server.node_keys()))}")
    target = server.revoked / f"{name}-{datetime.datetime.now(datetime.UTC).strftime(TIME)}.pub"
    with changing(server.folder) as change:
        server.revoked.mkdir(mode=0o700, exist_ok=True)  # a copy by git has no empty folder
        change.move(path, target)
    return target


def _check_name(name: str) -> None:
    if not NAME.fullmatch(name):
        raise ProvisionError(
            f"site name is {name!r}, expected 1 to 64 letters, digits, '-', '_' and '.', not beginning with '.' or '-'"
        )


def _site_names(names: Sequence[str]) -> list[str]:
    if not names:
        raise ProvisionError("no site is given: name each with --site")
    seen: dict[str, str] = {}
    for name in names:
        _check_name(name)
        if name.casefold() == _RESERVED:
            raise ProvisionError(
                f"site name is {name!r}, which is what reports call the server, and every reply of the site would be "
                "refused: give it another name"
            )
        if name.casefold() in seen:
            other = seen[name.casefold()]
            raise ProvisionError(
                f"site {name} is given twice"
                if other == name
                else f"sites {other} and {name} differ only in case, which some file systems ignore: rename one"
            )
        seen[name.casefold()] = name
    return list(names)


def _settings(host: str, port: int) -> dict[str, Value]:
    return {"superlink": f"[{host}]:{port}" if ":" in host else f"{host}:{port}"}
