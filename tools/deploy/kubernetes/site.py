"""A site's objects: `tepal node` with its cache on a claim. It opens one connection and accepts none: no Service."""

from __future__ import annotations

from tepal.host.site import ProvisionError
from tepal.tools.deploy.kubernetes.credentials import SiteSecret
from tepal.tools.deploy.kubernetes.options import DATA, Options, SiteOptions
from tepal.tools.deploy.kubernetes.pod import (
    Manifest,
    alive_and_ready,
    as_pairs,
    claim,
    config_map,
    container,
    deployment,
    label_of,
    resources,
    secret,
    settings_digest,
)

HEALTH = 9096
"""The port of grpc.health.v1, without TLS, for kubelet."""

_CREDENTIALS = "/run/credentials"
_SITE, _STATE, _CACHE, _DATA = "/app/site", "/app/state", "/app/cache", "/data"  # as in the image
_MEMORY, _MEMORY_WITH_GPU = "2Gi", "8Gi"


def site_manifests(site: SiteSecret, own: SiteOptions, options: Options) -> tuple[list[Manifest], list[Manifest]]:
    """Return a site's (Secrets, other objects). Raises ProvisionError."""
    if not (own.data_claim or own.data_host_path or own.no_data):
        raise ProvisionError(f"the place of the examples of site {site.name} is not given: {DATA}")
    label = label_of(site.name)
    name = f"tepal-site-{label}"
    labels = {"app.kubernetes.io/name": "tepal-site", "app.kubernetes.io/instance": label}
    settings = {
        "TEPAL_NODE_CONFIG": as_pairs(_node_config(site, own), "--node-config"),
        "TEPAL_NODE_HEALTH": f"0.0.0.0:{HEALTH}",
        "TEPAL_NODE_MEMORY_LIMIT": "0",
        "TEPAL_NODE_SPARE": "true",
    }
    if own.gpus:
        settings["NVIDIA_DRIVER_CAPABILITIES"] = "compute,utility"
    annotations = {
        "tepal-site": site.name, "tepal-settings": settings_digest(settings), "tepal-key": site.key_digest,
    }  # fmt: skip
    return [secret(name, labels, site.files, options)], [
        config_map(f"{name}-settings", labels, settings, options),
        claim(f"{name}-cache", labels, own.storage, options),
        deployment(name, labels, annotations, _pod(name, own, options, [*site.files]), options),
    ]


def _node_config(site: SiteSecret, own: SiteOptions) -> dict[str, bool | int | float | str]:
    """Return what the pod adds to the node config in site.toml."""
    placed = {"data-path", "partition-id"} & {*site.node_config, *own.node_config}
    where = {} if own.no_data or placed else {"data-path": f"{_DATA}/site.npz"}
    return {**where, **own.node_config}


def _pod(name: str, own: SiteOptions, options: Options, files: list[str]) -> Manifest:
    image = options.image(own.image or ("tepal-client-cuda" if own.gpus else "tepal-client"))
    memory = own.memory or (_MEMORY_WITH_GPU if own.gpus else _MEMORY)
    mounts: list[Manifest] = [
        {"name": "site", "mountPath": _SITE, "readOnly": True},
        {"name": "cache", "mountPath": _CACHE},
        {"name": "state", "mountPath": _STATE},
        {"name": "tmp", "mountPath": "/tmp"},
    ]
    volumes: list[Manifest] = [
        {"name": "credentials", "secret": {"secretName": name, "defaultMode": 0o440}},
        {"name": "site", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
        {"name": "cache", "persistentVolumeClaim": {"claimName": f"{name}-cache"}},
        # Files of the running node, with its socket: not on a disk of the network.
        {"name": "state", "emptyDir": {"sizeLimit": "1Gi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
    ]
    if not own.no_data:
        mounts.append({"name": "data", "mountPath": _DATA, "readOnly": True})
        host_path = {"hostPath": {"path": own.data_host_path, "type": "Directory"}}
        in_claim = {"persistentVolumeClaim": {"claimName": own.data_claim, "readOnly": True}}
        volumes.append({"name": "data", **(in_claim if own.data_claim else host_path)})
    # A Secret's files belong to root and are read through the pod's group, and a node refuses a key that a group can
    # read: its own copy, in memory, is for its user alone.
    copy = container(
        "credentials",
        image,
        resources(own.cpus, memory),
        [
            {"name": "credentials", "mountPath": _CREDENTIALS, "readOnly": True},
            {"name": "site", "mountPath": _SITE},
        ],
        command=["install", "-m", "0600", "-t", _SITE, *(f"{_CREDENTIALS}/{file}" for file in files)],
    )
    node = container(
        "node",
        image,
        resources(own.cpus, memory, own.gpus),
        mounts,
        envFrom=[{"configMapRef": {"name": f"{name}-settings"}}],
        ports=[{"name": "health", "containerPort": HEALTH}],
        # Ready: connected, and able to answer. A server that is down must not restart the node: that is no liveness.
        **alive_and_ready(["tepal", "node", "status", "--alive"], {"grpc": {"port": HEALTH}}),
    )
    pod: Manifest = {"initContainers": [copy], "containers": [node], "volumes": volumes}
    if own.gpus:
        pod["tolerations"] = [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}]
    if own.runtime_class:
        pod["runtimeClassName"] = own.runtime_class
    if own.node_selector:
        pod["nodeSelector"] = dict(own.node_selector)
    return pod
