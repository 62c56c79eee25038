"""The credentials for the manifests: of the whole folder that `make` wrote, or of one site's archive."""

from __future__ import annotations

import hashlib
import tarfile
import tempfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_ssh_private_key

from tepal.host.site import SITE_FILES, ProvisionError, read_site, some
from tepal.host.toml import LONGEST, Value
from tepal.tools.deploy.provision import Provisioned, ServerFolder, load_public_key
from tepal.tools.deploy.provision.change import Tree, write_tree
from tepal.tools.deploy.provision.folder import SETTINGS, made_in


@dataclass(frozen=True)
class SiteSecret:
    """The files of a site's archive, checked, and what they say. Its repr has no key."""

    name: str
    node_config: dict[str, Value]
    key_digest: str
    """Of the public key: changes with the key, and says nothing about it."""
    files: dict[str, bytes]

    def __repr__(self) -> str:
        return f"SiteSecret({self.name!r})"


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
                f"there is no authorised site {some(unknown)}; there is: {some(list(self.sites))}. Add one: "
                "tepal provision add FOLDER --site NAME"
            )

    def read(self, name: str) -> SiteSecret:
        """Read and check a site's files. Raises ProvisionError."""
        with _unpacked(self.sites[name]) as folder:
            site = read_site(folder)
            files = {each: (folder / each).read_bytes() for each in SITE_FILES}
        public = load_ssh_private_key(files["node.key"], None).public_key()
        assert isinstance(public, ec.EllipticCurvePublicKey)  # `read_site` has checked it
        if site.name != name:
            raise ProvisionError(f"{self.sites[name]} is of site {site.name}, expected {name}")
        if self.server is not None and load_public_key(self.server.nodes / f"{name}.pub") != public:
            raise ProvisionError(
                f"{self.sites[name]} has another key than {self.server.nodes / f'{name}.pub'}, and the server would "
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
    if path.is_file() or (path / "site.toml").is_file():
        with _unpacked(path) as folder:
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


@contextmanager
def _unpacked(path: Path) -> Iterator[Path]:
    """Yield a site's folder: the one that is given, or an archive's files in a folder that goes with the block."""
    if path.is_dir():
        yield path
        return
    try:
        with tarfile.open(path) as tar:
            found = {PurePosixPath(member.name).name: member for member in tar if member.isreg()}
            files: Tree = {name: _content(tar, member) for name, member in found.items() if name in SITE_FILES}
    except FileNotFoundError:
        raise ProvisionError(
            f"{path} does not exist: restore it, or make a new key with tepal provision renew"
        ) from None
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error):
        raise ProvisionError(
            f"{path} is not the archive of a site, which `tepal provision` makes: NAME.tar.gz"
        ) from None
    with tempfile.TemporaryDirectory(prefix="tepal-site-") as folder:  # for its owner alone
        write_tree(Path(folder) / "site", files)
        yield Path(folder) / "site"


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member) if member.size <= LONGEST else None
    if file is None:
        raise ValueError("not a small file")
    return file.read()
