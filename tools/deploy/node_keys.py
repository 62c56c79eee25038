"""The keys and certificates of a server: keep nodes' keys registered, check certificates."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cryptography.x509 import Certificate

    from tepal.tools.deploy.fleet import Fleet, KeyResult
    from tepal.tools.deploy.provision import ServerFolder

log = logging.getLogger("tepal.server")

_GONE = 60.0  # seconds without its file after which a key is unregistered


class ServerError(RuntimeError):
    """The server cannot run. The message says what is wrong, where, and what to do."""


def vanished(
    seen: Collection[bytes], present: Collection[bytes], missing: Mapping[bytes, float], now: float
) -> tuple[set[bytes], dict[bytes, float]]:
    """Return the keys to unregister, and the other missing keys, each with the time since when it is missing.

    A key is unregistered only after a minute: it can never be registered again with the same SuperLink, and while a
    folder is copied or synchronised its files may be missing for some seconds. A key in revoked/ does not wait.

    Args:
        seen: The keys that were in the folder before.
        present: The keys that are in the folder now.
        missing: The keys that were missing in the check before, each with the time since when.
        now: The present time, in seconds.
    """
    since = {key: missing.get(key, now) for key in set(seen) - set(present)}
    gone = {key for key, begun in since.items() if now - begun >= _GONE}
    return gone, {key: begun for key, begun in since.items() if key not in gone}


class Keys:
    """Keeps the public keys in a folder registered with one SuperLink."""

    def __init__(self, server: ServerFolder, fleet: Fleet) -> None:
        self.server = server
        self.names: list[str] = []
        """Names of the authorised nodes."""
        self._fleet = fleet
        self._present: dict[str, bytes] = {}  # the last valid key of each name
        self._revoked: dict[str, bytes] = {}  # the last valid key of each revoked file
        self._seen: set[bytes] = set()
        self._missing: dict[bytes, float] = {}  # with the time since when
        self._stamp: object = None
        self._unanswered = False  # the last update ended before all results were there
        self._logged: set[tuple[str, str]] = set()

    def update(self) -> None:
        """Register new keys, and unregister missing and revoked ones. Each problem is logged once.

        All files are read again until there is no problem. A name with a revoked file that was never readable is not
        authorised: that file may have the key in nodes/.

        Raises FleetError when the SuperLink does not answer.
        """
        from tepal.tools.deploy.fleet import KeyResult, Unreachable, align, read_key
        from tepal.tools.deploy.provision import ProvisionError

        try:
            revoked = self.server.revoked_keys()
            stamp = [*map(_stamp, (*self.server.nodes.iterdir(), *(path for _, path in revoked)))]
        except OSError as error:
            # An unmounted disk must not revoke all keys.
            where = error.filename or self.server.nodes
            problem = f"{where} cannot be read ({error.strerror}): the registered nodes stay as they are"
            self._log(KeyResult("keys", "", problem))
            return
        if stamp == self._stamp and not self._missing:
            return
        present = {}
        for name, path in self.server.node_keys().items():
            try:
                present[name] = read_key(path)
            except (ProvisionError, OSError):  # `align` reports it
                if name in self._present:
                    present[name] = self._present[name]
        doubtful = set()
        for name, path in revoked:
            try:
                self._revoked[path.name] = read_key(path)
            except (ProvisionError, OSError):  # `align` reports it
                if path.name not in self._revoked:
                    doubtful.add(name)
        try:
            results = align(self._fleet, self.server)
        except Unreachable:
            self._unanswered = True
            raise
        for each in results:
            self._log(each)
        self._unanswered = False
        if doubtful:
            # Where the SuperLink knows a further key of the name, as after a renewal, that one is the revoked key.
            others = {*self._revoked.values(), *present.values()}
            doubtful -= {node.name for node in self._fleet.node_keys() if node.public_key not in others}
            present = {name: key for name, key in present.items() if name not in doubtful}
        unregister, missing = vanished(self._seen, present.values(), self._missing, time.monotonic())
        for node in self._fleet.node_keys() if unregister else ():
            if node.public_key in unregister and node.status != "unregistered":
                self._fleet.unregister(node.node_id)
                why = f"its key was removed from {self.server.nodes}, or replaced"
                if node.name in doubtful:
                    why = f"a key of it in {self.server.revoked} cannot be read, and this one may be the revoked one"
                self._log(KeyResult(node.name, f"unregistered: {why}"))
        # Only now: what could not be unregistered is missing still, and the next update tries it again.
        self._missing = missing
        self._present, self._seen = present, {*present.values(), *missing}
        self._stamp = None if any(each.problem for each in results) else stamp
        last = {each.site: each for each in results}  # of the key in nodes/: the results of revoked ones come before
        self.names = sorted(name for name in present if name in last and not last[name].problem)

    def _log(self, result: KeyResult) -> None:
        if result.problem:
            if (result.site, result.problem) not in self._logged:
                log.error("Node %s: %s", result.site, result.problem)
            self._logged.add((result.site, result.problem))
        elif not result.done.startswith("was registered"):
            log.info("Node %s: %s.", result.site, result.done)
        elif self._unanswered and result.site not in self._present:
            log.info("Node %s: registered.", result.site)  # by the update that was not answered


def _stamp(path: Path) -> tuple[str, int, int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return path.name, 0, 0, 0
    return path.name, status.st_mtime_ns, status.st_ctime_ns, status.st_size


def check_credentials(server: ServerFolder, host: str, now: datetime) -> list[str]:
    """Return warnings about certificates that expire soon. Raises ServerError for credentials that cannot be used.

    Raises OSError for a disk that fails. A server.crt of another authority may have intermediate certificates after its
    own.

    `host`: the name or address by which this machine reaches its own control port.
    """
    from tepal.host.site import read_certificate
    from tepal.tools.deploy.provision import SOON, ProvisionError, closed, hosts_of

    try:
        for path in (server.root_certificates, server.certificate, server.key, server.nodes):
            if not path.exists():
                raise ServerError(
                    f"{server.folder} has no {path.name}: expected ca.crt, server.crt, server.key and nodes/NAME.pub, "
                    "as `tepal provision make` writes them"
                )
        server.node_keys()
        server.revoked_keys()
    except PermissionError as error:
        raise ServerError(str(closed(Path(error.filename or server.folder)))) from error
    warnings = []
    renew = "`tepal provision renew FOLDER --server` makes a new one"
    anew = "A new deployment is needed, with new archives for all sites: `tepal provision make`"  # renewal keeps ca.crt
    for path, remedy in ((server.root_certificates, anew), (server.certificate, renew)):
        try:
            certificate = read_certificate(path)
        except PermissionError as error:
            raise ServerError(str(closed(path))) from error
        except (OSError, ProvisionError) as error:
            raise ServerError(f"the certificate cannot be read: {error}") from error
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if end <= now:
            raise ServerError(f"{path} expired on {end:%Y-%m-%d %H:%M} UTC: no node can connect. {remedy}")
        if begin > now:
            raise ServerError(
                f"{path} is valid from {begin:%Y-%m-%d %H:%M} UTC on, and this machine's time is "
                f"{now:%Y-%m-%d %H:%M} UTC. Set the clock"
            )
        if end - now < timedelta(days=SOON):
            warnings.append(
                f"{path} expires in {(end - now).days} days, on {end:%Y-%m-%d %H:%M} UTC. After that no node can "
                f"connect. {remedy}; then restart this server"
            )
    _check_key(server, certificate)
    _check_issuer(server)
    covered = hosts_of(certificate)
    if host.strip("[]") not in covered:
        raise ServerError(
            f"{server.certificate} is valid for {', '.join(covered) or 'no name'}, and not for {host}, where this "
            f"server reaches its own control port. {renew}, with --host for each name"
        )
    return warnings


def _check_key(server: ServerFolder, certificate: Certificate) -> None:
    """Raise ServerError unless server.key is the private key of this certificate."""
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    from tepal.tools.deploy.provision import closed

    try:
        key = load_pem_private_key(server.key.read_bytes(), None)
        belongs = key.public_key() == certificate.public_key()
    except PermissionError as error:
        raise ServerError(str(closed(server.key))) from error
    except TypeError:
        raise ServerError(
            f"{server.key} is encrypted, which the server cannot open: store it without a password"
        ) from None
    except (OSError, ValueError, UnsupportedAlgorithm):
        raise ServerError(f"{server.key} is not a private key in PEM: copy it again") from None
    if not belongs:
        raise ServerError(
            f"{server.key} does not belong to {server.certificate}: copy both from the same provisioning"
        )


def _check_issuer(server: ServerFolder) -> None:
    """Raise ServerError unless ca.crt has issued server.crt, or one of the certificates there through which it was."""
    from cryptography.x509 import InvalidVersion, load_pem_x509_certificates

    found = []
    for path in (server.certificate, server.root_certificates):
        try:
            found.append(load_pem_x509_certificates(path.read_bytes()))
        except (ValueError, InvalidVersion):
            raise ServerError(f"{path} has a certificate that cannot be read: copy it again") from None
    chain, trusted = found[0], {*found[1]}
    while more := {each for each in chain if each not in trusted and any(_issued(each, by) for by in trusted)}:
        trusted |= more
    if chain[0] not in trusted:
        raise ServerError(
            f"{server.certificate} was not issued by {server.root_certificates}, which the nodes trust: copy both from "
            "the same provisioning; intermediate certificates belong into server.crt, after the server's own"
        )


def _issued(certificate: Certificate, by: Certificate) -> bool:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm

    try:
        certificate.verify_directly_issued_by(by)
    except InvalidSignature:
        return False
    except (TypeError, ValueError, UnsupportedAlgorithm):  # of another issuer, or signed in an unknown way
        return certificate.issuer == by.subject
    return True
