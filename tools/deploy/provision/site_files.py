"""The archive or folder of a site, with certificate, private key and site.toml: made and read back."""

from __future__ import annotations

import datetime
import io
import tarfile
import tempfile
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath

from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from tepal.host.site import SITE_FILES, ProvisionError, read_site_toml
from tepal.host.toml import LONGEST, Value, to_toml
from tepal.tools.deploy.provision.certificates import new_key, public_line
from tepal.tools.deploy.provision.change import Change, Tree, write_tree
from tepal.tools.deploy.provision.folder import Provisioned

CONTAINER_USER = 49999
"""User and group of the container images, which own an archive that root unpacks."""


def add_site(change: Change, made: Provisioned, name: str, ca: bytes, toml: str, unpacked: bool) -> None:
    """Make a key for a site; add its public part, and the archive or folder, to a change."""
    key = new_key()
    change.add(made.server.nodes / f"{name}.pub", public_line(key, name))
    where, content = pack_site(name, ca, key, toml, unpacked)
    change.add(made.folder / "sites" / where, content)


def pack_site(
    name: str, ca: bytes, key: ec.EllipticCurvePrivateKey, toml: str, unpacked: bool
) -> tuple[str, bytes | Tree]:
    """Return the archive or folder of a site, as (name below sites/, content)."""
    private = key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption())
    files: Tree = {"ca.crt": ca, "node.key": private, "site.toml": toml.encode()}
    return (name, files) if unpacked else (f"{name}.tar.gz", _archive(name, files))


def _archive(folder: str, files: Tree) -> bytes:
    """Return a .tar.gz of a folder with files that only the container's user can read."""
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


@contextmanager
def site_folder(path: Path) -> Iterator[Path]:
    """Yield a site's folder for `read_site`: `path`, or the files of the archive `path`, which go with the block.

    Raises ProvisionError for a file that is no archive of a site.
    """
    if not path.is_file():
        yield path
        return
    try:
        with tarfile.open(path) as tar:
            found = {PurePosixPath(member.name).name: member for member in tar if member.isreg()}
            files: Tree = {name: _content(tar, member) for name, member in found.items() if name in SITE_FILES}
    except (OSError, EOFError, ValueError, tarfile.TarError, zlib.error) as error:
        raise ProvisionError(
            f"{path} cannot be read as a site's archive, NAME.tar.gz ({error}). Restore it, or ask the server's "
            "administrator for a new one"
        ) from None
    with tempfile.TemporaryDirectory(prefix="tepal-site-") as folder:  # for its owner alone
        write_tree(Path(folder) / "site", files)
        yield Path(folder) / "site"


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    file = tar.extractfile(member) if member.isreg() and member.size <= LONGEST else None
    if file is None:
        raise ValueError("not a small file")
    return file.read()


def site_toml(name: str, superlink: Value, node_config: Mapping[str, Value]) -> str:
    """Return the content of site.toml. Raises ProvisionError for a node config that `read_site` would refuse."""
    try:
        text = to_toml({"name": name, "superlink": superlink}) + "\n[node-config]\n" + to_toml(node_config)
    except ValueError as error:
        raise ProvisionError(str(error).replace("run configuration", "node config")) from error
    read_site_toml(text.encode(), "node config")
    return text


def node_config_of(archive: Path, unpacked: Path, name: str) -> dict[str, Value]:
    """Return the node config of a site that was made before."""
    try:
        if unpacked.is_dir():
            content = (unpacked / "site.toml").read_bytes()
        else:
            with tarfile.open(archive) as tar:
                content = _content(tar, tar.getmember(f"{name}/site.toml"))
    except (OSError, EOFError, KeyError, ValueError, tarfile.TarError, zlib.error):
        raise ProvisionError(
            f"the node config of site {name} can be read neither from {archive} nor from {unpacked}. "
            "Give it with --node-config 'key=value …'; --node-config '' for none"
        ) from None
    return read_site_toml(content, f"site.toml of {name}")[2]
