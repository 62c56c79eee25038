"""The credentials for the manifests: of the whole folder that `make` wrote, or of one site's archive."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from tepal.host.site import SITE_FILES, ProvisionError, read_site, some
from tepal.host.toml import Value
from tepal.tools.deploy.provision import Provisioned, ServerFolder, load_public_key, site_folder
from tepal.tools.deploy.provision.folder import SETTINGS, made_in


@dataclass(frozen=True)
class SiteSecret:
    """The files of a site's archive, checked, and what they say."""

    name: str
    node_config: dict[str, Value]
    key_digest: str
    """Of the public key: changes with the key, and says nothing about it."""
    files: dict[str, bytes] = field(repr=False)


@dataclass(frozen=True)
class Credentials:
    """Where the credentials are. Made by `find_credentials`; `server` is None for the archive of one site."""

    server: ServerFolder | None
    port: int
    """The server's port for sites."""
    sites: dict[str, Path]
    """The archive or folder of each site, by name."""

    def check(self, names: list[str]) -> None:
        """Raise ProvisionError for a name of which there is no site."""
        if unknown := [name for name in names if name not in self.sites]:
            raise ProvisionError(
                f"there is no authorised site {some(unknown)}; the authorised sites are: {some(list(self.sites))}. "
                "Add one: tepal provision add FOLDER --site NAME"
            )

    def read(self, name: str) -> SiteSecret:
        """Read and check a site's files. Raises ProvisionError."""
        path = self.sites[name]
        if not path.exists():
            raise ProvisionError(
                f"{path} does not exist. Restore it, or make a new key: tepal provision renew FOLDER --site {name}"
            )
        with site_folder(path) as folder:
            site = read_site(folder)
            files = {each: (folder / each).read_bytes() for each in SITE_FILES}
        public = load_ssh_private_key(files["node.key"], None).public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)  # `read_site` has checked it
        if site.name != name:
            raise ProvisionError(f"{path} is the archive of site {site.name}, expected that of {name}")
        if self.server is not None and load_public_key(self.server.nodes / f"{name}.pub") != public:
            raise ProvisionError(
                f"{path} has another key than {self.server.nodes / f'{name}.pub'}, and the server would "
                f"refuse it. Make a new one: tepal provision renew FOLDER --site {name}"
            )
        key = public.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
        return SiteSecret(name, site.node_config, digest(key), files)


def digest(content: bytes) -> str:
    """Return a short digest, with which a pod template changes when the content does."""
    return hashlib.sha256(content).hexdigest()[:16]


def find_credentials(path: Path) -> Credentials:
    """Find the credentials in a folder that `make` wrote, or in the archive or folder of one site.

    Raises ProvisionError if it is neither.
    """
    if not path.exists():
        raise ProvisionError(
            f"{path} does not exist: name the folder that `tepal provision make` wrote, or a site's archive"
        )
    if path.is_file() or (path / "site.toml").is_file():
        with site_folder(path) as folder:
            site = read_site(folder)
        return Credentials(None, int(site.superlink.rpartition(":")[2]), {site.name: path})
    if not (path / SETTINGS).exists() and (path / "nodes").is_dir():
        raise ProvisionError(
            f"{path} is a copy of the server's part alone, which does not say to which port sites connect: name the "
            "folder that `tepal provision make` wrote"
        )
    made, superlink = made_in(path)
    names = list(made.server.node_keys())
    return Credentials(made.server, int(superlink.rpartition(":")[2]), {name: _of_site(made, name) for name in names})


def _of_site(made: Provisioned, name: str) -> Path:
    return made.unpacked(name) if made.unpacked(name).is_dir() else made.archive(name)
