"""The keys and certificates of a server: nodes' keys kept registered, certificates checked."""

from __future__ import annotations

import logging
from collections.abc import Collection
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:

    from tepal.tools.deploy.fleet import Fleet, Told
    from tepal.tools.deploy.provision import ServerFolder

log = logging.getLogger("tepal.server")


class ServerError(RuntimeError):
    """The server cannot run so. The text says what is wrong, where, and what to do."""


def vanished(seen: Collection[bytes], present: Collection[bytes], missing: Collection[bytes]) -> tuple[set, set]:
    """Which keys are to be unregistered, and which are missing for the first time.

    A key that is gone counts only when it was gone at the look before, too: a revoked key can never be registered again
    with the same SuperLink, and a file that is being replaced may be away for a moment.

    Args:
        seen: The keys that were in the folder before.
        present: Those that are there now.
        missing: What the look before found to be missing.
    """
    gone = set(seen) - set(present)
    return gone & set(missing), gone - set(missing)


class Keys:
    """The public keys in a folder, kept registered with one SuperLink."""

    def __init__(self, server: ServerFolder, fleet: Fleet) -> None:
        self.server = server
        self.names: list[str] = []
        """Of the nodes that may come in."""
        self._fleet = fleet
        self._present: dict[str, bytes] = {}  # the last good key of each name
        self._seen: set[bytes] = set()
        self._missing: set[bytes] = set()
        self._stamp: object = None
        self._said: set[tuple[str, str]] = set()

    def look(self) -> None:
        """Register the keys that are new and unregister those that are gone or revoked. A problem is said once.

        Raises FleetError where the SuperLink does not answer.
        """
        from tepal.tools.deploy.fleet import Told, align
        from tepal.tools.deploy.provision import ProvisionError, load_public_key

        try:
            stamp = [*map(_stamp, (*self.server.nodes.iterdir(), self.server.revoked))]
        except OSError as error:
            # Nobody is revoked because a disk is away.
            problem = f"{self.server.nodes} cannot be read ({error.strerror}): the nodes stay as they are"
            self._say(Told("keys", "", problem))
            return
        if stamp == self._stamp and not self._missing:
            return
        present = {}
        for name, path in self.server.node_keys().items():
            try:
                present[name] = _pem(load_public_key(path))
            except (ProvisionError, OSError):  # `align` tells it
                if name in self._present:
                    present[name] = self._present[name]
        told = align(self._fleet, self.server)
        unregister, self._missing = vanished(self._seen, present.values(), self._missing)
        for node in self._fleet.nodes() if unregister else ():
            if node.public_key in unregister and node.status != "unregistered":
                self._fleet.unregister(node.node_id)
                told.append(Told(node.name, f"unregistered: its key is gone from {self.server.nodes}, or was replaced"))
        for each in told:
            self._say(each)
        self._present, self._seen, self._stamp = present, {*present.values(), *self._missing}, stamp
        wrong = {each.site for each in told if each.problem}
        self.names = sorted(name for name in present if name not in wrong)

    def _say(self, told: Told) -> None:
        if told.problem:
            if (told.site, told.problem) not in self._said:
                log.error("Node %s: %s", told.site, told.problem)
            self._said.add((told.site, told.problem))
        elif not told.done.startswith("was registered"):
            log.info("Node %s: %s.", told.site, told.done)


def _stamp(path: Path) -> tuple[str, int, int]:
    try:
        status = path.stat()
    except FileNotFoundError:
        return path.name, 0, 0
    return path.name, status.st_mtime_ns, status.st_size


def _pem(key: Any) -> bytes:
    from flwr.supercore.primitives.asymmetric import public_key_to_bytes

    return public_key_to_bytes(key)  # as the SuperLink keeps and compares it


def check_credentials(server: ServerFolder, host: str, now: datetime) -> list[str]:
    """Warnings about certificates that expire soon. Raises ServerError for credentials that cannot be used.

    `host`: the name or address by which this machine reaches its own control port.
    """
    from cryptography import x509

    from tepal.tools.deploy.provision import SOON

    for path in (server.root_certificates, server.certificate, server.key, server.nodes):
        if not path.exists():
            raise ServerError(
                f"{server.folder} has no {path.name}: expected are ca.crt, server.crt, server.key and nodes/NAME.pub, "
                "as `tepal provision make` writes them"
            )
    warnings = []
    renew = "tepal provision renew` makes a new one"
    for path in (server.root_certificates, server.certificate):
        try:
            certificate = x509.load_pem_x509_certificate(path.read_bytes())
        except (OSError, ValueError) as error:
            raise ServerError(f"{path} cannot be read as a certificate: {error}") from error
        begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
        if end <= now:
            raise ServerError(f"{path} expired on {end:%Y-%m-%d %H:%M} UTC: no node would trust this server. `{renew}")
        if begin > now:
            raise ServerError(
                f"{path} holds from {begin:%Y-%m-%d %H:%M} UTC on, and it is {now:%Y-%m-%d %H:%M} UTC here: set the "
                f"clock. `{renew}"
            )
        if end - now < timedelta(days=SOON):
            warnings.append(
                f"{path} expires in {(end - now).days} days, on {end:%Y-%m-%d %H:%M} UTC. From then on no node can "
                f"connect. `{renew}; then restart this server."
            )
    try:
        names = certificate.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        names = x509.SubjectAlternativeName([])
    covered = [*names.get_values_for_type(x509.DNSName), *map(str, names.get_values_for_type(x509.IPAddress))]
    if host.strip("[]") not in covered:
        raise ServerError(
            f"{server.certificate} holds for {', '.join(covered) or 'nothing'}, and not for {host}, where this server "
            f"reaches its own control port. `{renew}"
        )
    return warnings
