"""What can be chosen for the manifests, checked when it is given."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from tepal import __version__
from tepal.host.site import ProvisionError
from tepal.host.toml import Value

SERVICES = ("ClusterIP", "LoadBalancer", "NodePort")
"""Types of the server's Service."""

DATA = (
    "expected one of --data-claim NAME (a PersistentVolumeClaim that exists), --data-host-path FOLDER (of the machine) "
    "and --no-data (its part of the run's data set)"
)
"""The end of an error."""

_LABEL = r"[a-z0-9](?:[a-z0-9-]{0,61}[a-z0-9])?"
_NAMESPACE = re.compile(_LABEL)
_OBJECT = re.compile(rf"{_LABEL}(?:\.{_LABEL})*")
_BYTES = re.compile(r"([0-9]+(?:\.[0-9]+)?)(?:Ki|Mi|Gi|Ti|k|M|G|T)")  # a number alone is bytes
_CPUS = re.compile(r"([0-9]+(?:\.[0-9]{1,3})?|[0-9]+m)")
_PATH = r"[a-z0-9]+(?:[._-]+[a-z0-9]+)*"
_REGISTRY = re.compile(rf"[A-Za-z0-9](?:[A-Za-z0-9.-]*[A-Za-z0-9])?(?::[0-9]{{1,5}})?(?:/{_PATH})*")
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,127}")
_IMAGE = re.compile(rf"{_PATH}(?:/{_PATH})*(?::{_TAG.pattern})?(?:@sha256:[0-9a-f]{{64}})?")
_SELECTOR = re.compile(
    rf"(?:{_OBJECT.pattern}/)?[A-Za-z0-9](?:[A-Za-z0-9_.-]{{0,61}}[A-Za-z0-9])?"
    r"=(?:[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?)?"
)


@dataclass(frozen=True, kw_only=True)
class Options:
    """What is the same for the server and the sites.

    Args:
        namespace: of all objects; "" for the namespace that kubectl is told.
        registry: before the images' names, such as "registry.example.org/team"; "" for none.
        tag: of the images.
        pull_secret: name of a Secret with which the cluster fetches the images; "" for none.
        storage_class: of the claims; "" for the cluster's default.

    Raises ProvisionError for a value that Kubernetes would not take, as the other two classes do.
    """

    namespace: str = ""
    registry: str = ""
    tag: str = __version__
    pull_secret: str = ""
    storage_class: str = ""

    def __post_init__(self) -> None:
        if self.namespace:
            _matches(_NAMESPACE, self.namespace, "--namespace", "1 to 63 lower-case letters, digits and '-'")
        for option, value in (("--pull-secret", self.pull_secret), ("--storage-class", self.storage_class)):
            _check_object(option, value)
        if self.registry:
            wanted = "HOST[:PORT][/PATH] without https://, such as registry.example.org/team"
            _matches(_REGISTRY, self.registry, "--registry", wanted)
        _matches(_TAG, self.tag, "--tag", "letters, digits, '.', '_' and '-', such as 0.1.0")

    def image(self, name: str) -> str:
        """Return the complete reference of an image. One that names its own tag or digest keeps it."""
        tagged = ":" in name or "@" in name
        return (f"{self.registry}/" if self.registry else "") + (name if tagged else f"{name}:{self.tag}")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """What can be chosen for the server.

    Args:
        image: its name, below the registry.
        service: type of the Service; one of `SERVICES`.
        storage: size of the claim for runs and state.
        memory, cpus: request and limit.
        run_config: of a run that the server starts once; empty for none.
    """

    image: str = "tepal-server"
    service: str = "LoadBalancer"
    storage: str = "20Gi"
    memory: str = "4Gi"
    cpus: str = "2"
    run_config: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        _check_image("--server-image", self.image)
        _check_bytes("--server-storage", self.storage)
        _check_bytes("--server-memory", self.memory)
        _check_cpus("--server-cpus", self.cpus)
        if self.service not in SERVICES:
            raise ProvisionError(f"--service is {self.service!r}, expected {', '.join(SERVICES)}")


@dataclass(frozen=True, kw_only=True)
class SiteOptions:
    """What can be chosen for a site.

    Args:
        data_claim: name of the PersistentVolumeClaim with the site's examples, which is mounted read-only at /data.
        data_host_path: folder of the machine with the site's examples, mounted in the same way.
        no_data: the site has no examples of its own, and takes its part of a run's data set. One of these is needed.
        image: its name, below the registry; "" for tepal-client, with GPUs tepal-client-cuda.
        storage: size of the claim for the cache and the personal state.
        memory: request and limit; "" for 2Gi, with GPUs 8Gi.
        cpus: request and limit.
        gpus: number of NVIDIA's GPUs.
        runtime_class: of the pod, where GPUs need one; "" for none.
        node_selector: labels of the machines on which the pod may run.
        node_config: further node config of the ClientApp.
    """

    data_claim: str = ""
    data_host_path: str = ""
    no_data: bool = False
    image: str = ""
    storage: str = "10Gi"
    memory: str = ""
    cpus: str = "1"
    gpus: int = 0
    runtime_class: str = ""
    node_selector: Mapping[str, str] = field(default_factory=dict)
    node_config: Mapping[str, Value] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if [bool(self.data_claim), bool(self.data_host_path), self.no_data].count(True) > 1:
            raise ProvisionError(f"more than one place of the site's examples is given: {DATA}")
        path = PurePosixPath(self.data_host_path)
        if self.data_host_path and (
            not path.is_absolute() or ".." in path.parts or not self.data_host_path.isprintable()
        ):
            raise ProvisionError(f"--data-host-path is {self.data_host_path!r}, expected an absolute path without '..'")
        _check_object("--data-claim", self.data_claim)
        _check_object("--runtime-class", self.runtime_class)
        if self.image:
            _check_image("--site-image", self.image)
        _check_bytes("--site-storage", self.storage)
        if self.memory:
            _check_bytes("--site-memory", self.memory)
        _check_cpus("--site-cpus", self.cpus)
        if self.gpus < 0:
            raise ProvisionError(f"--gpus is {self.gpus}, expected 0 or more")


def parse_node_selector(given: list[str] | None) -> dict[str, str]:
    """Return the labels of `--node-selector key=value`. Raises ProvisionError."""
    for one in given or []:
        _matches(_SELECTOR, one, "--node-selector", "key=value, such as kubernetes.io/hostname=gpu-1")
    return dict(one.split("=", 1) for one in given or [])


def _matches(pattern: re.Pattern[str], value: str, option: str, wanted: str) -> None:
    if not pattern.fullmatch(value):
        raise ProvisionError(f"{option} is {value!r}, expected {wanted}")


def _check_object(option: str, value: str) -> None:
    if value and (len(value) > 253 or not _OBJECT.fullmatch(value)):
        raise ProvisionError(
            f"{option} is {value!r}, expected the name of an object: lower-case letters, digits, '-', '.'"
        )


def _check_image(option: str, value: str) -> None:
    _matches(_IMAGE, value, option, "the name of an image below --registry, such as tepal-client or tepal-client:0.1.0")


def _check_bytes(option: str, value: str) -> None:
    found = _BYTES.fullmatch(value)
    if not found or not float(found[1]):
        raise ProvisionError(f"{option} is {value!r}, expected a size with its unit such as 512Mi, 2Gi or 20Gi")


def _check_cpus(option: str, value: str) -> None:
    if not _CPUS.fullmatch(value) or not float(value.rstrip("m")):
        raise ProvisionError(f"{option} is {value!r}, expected a number of CPUs such as 2, 0.5 or 500m")
