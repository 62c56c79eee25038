"""Pods of manifests without a cluster: each on a root of its own that cannot be written, with volumes as of kubelet.

Files of Secrets and ConfigMaps are links into a folder that is replaced as a whole; those of Secrets belong to root and
can be read by the pod's group (`fsGroup`). The processes have the pod's user and group, and no privileges. The network
is the machine's: addresses in the settings are replaced by free ones.
"""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tepal.host.processes import Process, started
from tests.packages import ROOT

Manifest = dict[str, Any]

# $1: an empty folder for the root; $2: lines "source target ro|rw" of volumes; $3: user; then the command. The
# machine's other folders are there.
_IN_A_POD = """
set -e
root=$1 volumes=$2 user=$3
shift 3
mount --make-rprivate /
mount -t tmpfs -o mode=755 tmpfs "$root"
for path in /*; do
    case $path in /app|/data|/tmp|/run) continue;; esac
    if [ -L "$path" ]; then cp -P "$path" "$root$path"
    elif [ -d "$path" ]; then mkdir "$root$path"; mount --rbind "$path" "$root$path"; fi
done
while read -r source target mode; do
    if [ -d "$source" ]; then mkdir -p "$root$target"
    elif [ ! -e "$root$target" ]; then mkdir -p "$(dirname "$root$target")"; touch "$root$target"; fi
    mount --bind "$source" "$root$target"
    [ "$mode" = rw ] || mount -o remount,bind,ro "$root$target"
done < "$volumes"
mkdir -p "$root/app"
mount -o remount,ro "$root"
exec chroot "$root" setpriv --reuid "$user" --regid "$user" --clear-groups --no-new-privs --bounding-set=-all \
    sh -c 'cd /app && exec "$@"' sh "$@"
"""


def why_no_pods() -> str:
    """Why this machine cannot run them; "" if it can."""
    if os.geteuid() != 0:
        return "needs root, to mount volumes and become the pod's user"
    missing = [name for name in ("unshare", "chroot", "setpriv", "nsenter", "install") if shutil.which(name) is None]
    if missing:
        return f"there is no {', '.join(missing)}"
    if subprocess.run(["unshare", "--mount", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True).returncode:
        return "may not mount"
    as_user = ["setpriv", "--reuid", "49999", "--regid", "49999", "--clear-groups"]
    reads = [*as_user, sys.executable, "-c", f"import torch; open({str(ROOT / 'pyproject.toml')!r})"]
    if subprocess.run(reads, capture_output=True).returncode:
        return "the pod's user cannot read this checkout and its Python"
    return ""


def image_environment(part: str) -> dict[str, str]:
    """Return ENV of a Dockerfile and HOME, with this Python and checkout in place of the image's."""
    text = (ROOT / f"docker/{part}.Dockerfile").read_text().replace("\\\n", " ")
    lines = re.findall(r"^ENV (.*)$", text, flags=re.MULTILINE)
    environment = dict(pair.split("=", 1) for line in lines for pair in line.split())
    programs = f"{Path(sys.executable).parent}:/usr/sbin:/sbin:{os.defpath}"
    return environment | {"PATH": programs, "PYTHONPATH": str(ROOT), "TEPAL_APP": str(ROOT), "HOME": "/app"}


class Cluster:
    """A folder with the volumes of the objects that were applied to it."""

    def __init__(self, folder: Path, data: Mapping[str, Path]) -> None:
        self.folder = folder
        self.folder.mkdir()
        self._claims = dict(data)
        self.objects: dict[tuple[str, str], Manifest] = {}

    def apply(self, objects: Sequence[Manifest]) -> None:
        """Take objects; ConfigMaps and Secrets that are mounted change, as kubelet changes them after a while."""
        for one in objects:
            key = one["kind"], one["metadata"]["name"]
            self.objects[key] = one
            if key[0] in ("ConfigMap", "Secret"):
                self._lay(self._path(*key), self._content(one), secret=key[0] == "Secret")

    def pod(self, deployment: str) -> Pod:
        return Pod(self, self.objects["Deployment", deployment])

    def settings(self, container: Manifest) -> dict[str, str]:
        """Return the environment from a container's ConfigMaps."""
        names = [source["configMapRef"]["name"] for source in container.get("envFrom", [])]
        return {key: value for name in names for key, value in self.objects["ConfigMap", name]["data"].items()}

    def volume(self, pod: str, volume: Manifest, user: int) -> Path:
        """Return the folder of a volume; claims are the same for all pods."""
        if "secret" in volume:
            return self._path("Secret", volume["secret"]["secretName"])
        if "configMap" in volume:
            return self._path("ConfigMap", volume["configMap"]["name"])
        if claim := volume.get("persistentVolumeClaim"):
            if claim["claimName"] in self._claims:
                return self._claims[claim["claimName"]]
            assert ("PersistentVolumeClaim", claim["claimName"]) in self.objects
            return self._writable(self._path("Claim", claim["claimName"]), user, lost=True)
        assert "emptyDir" in volume
        return self._writable(self._path("emptyDir", f"{pod}-{volume['name']}"), user)

    def _path(self, kind: str, name: str) -> Path:
        return self.folder / f"{kind}-{name}"

    def _writable(self, path: Path, user: int, lost: bool = False) -> Path:
        """Make a folder of root's that the pod's group can write; a disk has a folder of its own in it."""
        if not path.exists():
            path.mkdir()
            if lost:
                (path / "lost+found").mkdir(mode=0o700)
            os.chown(path, 0, user)
            path.chmod(0o2775)
        return path

    @staticmethod
    def _content(one: Manifest) -> dict[str, bytes]:
        plain = one["kind"] == "ConfigMap"
        return {key: value.encode() if plain else base64.b64decode(value) for key, value in one["data"].items()}

    def _lay(self, folder: Path, files: Mapping[str, bytes], *, secret: bool) -> None:
        folder.mkdir(exist_ok=True)
        folder.chmod(0o755)
        new = folder / f"..{len(list(folder.iterdir()))}_{os.urandom(4).hex()}"
        new.mkdir(mode=0o755)
        for name, content in files.items():
            (new / name).write_bytes(content)
            os.chown(new / name, 0, 49999)
            (new / name).chmod(0o440 if secret else 0o644)
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(f"..data/{name}")
        old = (folder / "..data").resolve() if (folder / "..data").exists() else None
        (folder / "..data_tmp").symlink_to(new.name)
        (folder / "..data_tmp").rename(folder / "..data")
        for link in folder.iterdir():
            if link.is_symlink() and not link.name.startswith("..") and link.name not in files:
                link.unlink()
        if old is not None:
            shutil.rmtree(old)


class Pod:
    """The one pod of a Deployment. Made by `Cluster.pod`."""

    def __init__(self, cluster: Cluster, deployment: Manifest) -> None:
        self.cluster, self.name = cluster, deployment["metadata"]["name"]
        self.spec = deployment["spec"]["template"]["spec"]
        (self.container,) = self.spec["containers"]
        self.user = self.spec["securityContext"]["runAsUser"]
        self.log = cluster.folder / f"{self.name}.log"
        self.environment: dict[str, str] = {}

    @contextlib.contextmanager
    def running(self, part: str, command: Sequence[str], **changes: str) -> Iterator[Process]:
        """Run the init containers, then the container with the command of its image; `changes` in its environment."""
        for container in self.spec.get("initContainers", []):
            self.environment = image_environment(part)
            with started(self._command(container, container["command"]), log=self.log, env=self.environment) as process:
                assert process.wait(60) == 0, process.tail()
        self.environment = image_environment(part) | self.cluster.settings(self.container) | changes
        grace = float(self.spec["terminationGracePeriodSeconds"])
        with started(
            self._command(self.container, command), log=self.log, env=self.environment, grace=grace
        ) as process:
            yield process

    def exec(self, process: Process, command: Sequence[str]) -> tuple[int, str]:
        """Run a command as a probe or `kubectl exec` does; return its status and what it prints."""
        inside = ["nsenter", f"--target={process.pid}", "--mount", "--root", "--wd"]
        inside += ["setpriv", "--reuid", str(self.user), "--regid", str(self.user), "--clear-groups", *command]
        done = subprocess.run(inside, env=self.environment, capture_output=True, text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr

    def _command(self, container: Manifest, command: Sequence[str]) -> list[str]:
        assert container["securityContext"]["readOnlyRootFilesystem"]
        volumes = {one["name"]: self.cluster.volume(self.name, one, self.user) for one in self.spec["volumes"]}
        users = self.cluster.folder / "passwd"
        users.write_text(f"root:x:0:0::/root:/bin/sh\napp:x:{self.user}:{self.user}::/app:/usr/sbin/nologin\n")
        lines = [f"{users} /etc/passwd ro"]
        for mount in container["volumeMounts"]:
            source = volumes[mount["name"]] / mount.get("subPath", "")
            lines.append(f"{source.resolve()} {mount['mountPath']} {'ro' if mount.get('readOnly') else 'rw'}")
        # Last, because a checkout or its Python may be below one of the pod's own folders.
        hidden = ("/app/", "/data/", "/run/", "/tmp/")
        lines += [f"{path} {path} ro" for path in {str(ROOT), sys.prefix} if path.startswith(hidden)]
        table = self.cluster.folder / f"{self.name}-{container['name']}.volumes"
        table.write_text("\n".join(lines) + "\n")
        root = self.cluster.folder / f"{self.name}-{container['name']}.root"
        root.mkdir(exist_ok=True)
        script = ["sh", "-c", _IN_A_POD, "sh", str(root), str(table), str(self.user)]
        return ["unshare", "--mount", *script, *command]


def image_command(part: str) -> list[str]:
    """Return CMD of a Dockerfile."""
    text = (ROOT / f"docker/{part}.Dockerfile").read_text()
    return list(json.loads(re.findall(r"^CMD (\[.*\])$", text, flags=re.MULTILINE)[-1]))
