"""The server's objects: `tepal server` with its state on a claim, and a Service for the sites."""

from __future__ import annotations

from tepal.host.site import ProvisionError
from tepal.tools.deploy.kubernetes.credentials import digest
from tepal.tools.deploy.kubernetes.options import Options, ServerOptions
from tepal.tools.deploy.kubernetes.pod import (
    Manifest,
    alive_and_ready,
    as_pairs,
    claim,
    config_map,
    container,
    deployment,
    environment_from,
    named,
    resources,
    secret,
    settings_digest,
)
from tepal.tools.deploy.provision import ServerFolder

NAME = "tepal-server"
FLEET = 9092
"""The port of the Fleet API in the image."""

_LABELS = {"app.kubernetes.io/name": NAME}
_CREDENTIALS, _STATE = "/app/credentials", "/app/state"  # TEPAL_CREDENTIALS and TEPAL_STATE of the image
_FILES = ("ca.crt", "server.crt", "server.key")
_NODE_PORTS = range(30000, 32768)


def server_manifests(
    server: ServerFolder, port: int, own: ServerOptions, options: Options
) -> tuple[list[Manifest], list[Manifest]]:
    """Return the server's (Secrets, other objects). `port`: to which sites connect. Raises ProvisionError."""
    files = {name: (server.folder / name).read_bytes() for name in _FILES}
    settings = {"TEPAL_ATTEMPTS": "5"}
    if own.run_config:
        settings["TEPAL_RUN_CONFIG"] = as_pairs(own.run_config, "--run-config")
    # Public keys are in ConfigMaps: a change reaches the running server, which reads both folders every few seconds.
    nodes = {path.name: path.read_text() for path in server.node_keys().values()}
    revoked = {path.name: path.read_text() for _, path in server.revoked_keys()}
    # The template has no digest of the keys of nodes: a revoked site must not stop the server.
    annotations = {"tepal-settings": settings_digest(settings), "tepal-certificate": digest(files["server.crt"])}
    return [secret(NAME, _LABELS, files, options)], [
        config_map(f"{NAME}-settings", _LABELS, settings, options),
        config_map(f"{NAME}-nodes", _LABELS, nodes, options),
        config_map(f"{NAME}-revoked", _LABELS, revoked, options),
        claim(f"{NAME}-state", _LABELS, own.storage, options),
        _service(port, own, options),
        deployment(NAME, _LABELS, annotations, _pod(own, options), options),
    ]


def _pod(own: ServerOptions, options: Options) -> Manifest:
    mounts: list[Manifest] = [
        {"name": "state", "mountPath": _STATE},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "nodes", "mountPath": f"{_CREDENTIALS}/nodes", "readOnly": True},
        {"name": "revoked", "mountPath": f"{_CREDENTIALS}/revoked", "readOnly": True},
        # One by one: a Secret in this folder could not have the other two folders in it.
        *(
            {"name": "credentials", "mountPath": f"{_CREDENTIALS}/{file}", "subPath": file, "readOnly": True}
            for file in _FILES
        ),
    ]
    status = ["tepal", "server", "status"]
    return {
        "containers": [
            container(
                "server",
                options.image(own.image),
                resources(own.cpus, own.memory),
                mounts,
                envFrom=environment_from(f"{NAME}-settings"),
                ports=[{"name": "fleet", "containerPort": FLEET}],
                # The SuperLink's health is at its control port, on loopback, which kubelet's own probes cannot reach.
                **alive_and_ready([*status, "--alive"], {"exec": {"command": status}}),
            )
        ],
        "volumes": [
            {"name": "state", "persistentVolumeClaim": {"claimName": f"{NAME}-state"}},
            {"name": "tmp", "emptyDir": {"sizeLimit": "1Gi"}},
            {"name": "credentials", "secret": {"secretName": NAME, "defaultMode": 0o440}},
            {"name": "nodes", "configMap": {"name": f"{NAME}-nodes"}},
            {"name": "revoked", "configMap": {"name": f"{NAME}-revoked"}},
        ],
    }


def _service(port: int, own: ServerOptions, options: Options) -> Manifest:
    to_fleet: Manifest = {"name": "fleet", "port": port, "targetPort": "fleet", "protocol": "TCP"}
    if own.service == "NodePort":
        if port not in _NODE_PORTS:
            raise ProvisionError(
                f"sites connect to port {port}, and a NodePort is from {_NODE_PORTS[0]} to {_NODE_PORTS[-1]}: make the "
                "credentials with such a --port, or use --service LoadBalancer, or ClusterIP behind a proxy of yours"
            )
        to_fleet["nodePort"] = port
    made = named("Service", NAME, _LABELS, options)
    made["spec"] = {"type": own.service, "selector": dict(_LABELS), "ports": [to_fleet]}
    return made
