"""What the server's and the sites' objects have in common: names, labels, and a Deployment of one hardened pod."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tepal.host.site import ProvisionError
from tepal.host.toml import Value, parse_run_config
from tepal.tools.deploy.kubernetes.credentials import digest
from tepal.tools.deploy.kubernetes.options import Options
from tepal.tools.deploy.provision.site_files import CONTAINER_USER

Manifest = dict[str, Any]
"""An object of Kubernetes, as its YAML or JSON has it."""

_LONGEST = 40  # characters of a site's part in the names of its objects, which have at most 63
_MOST = 2**18 - 2**10  # bytes of an object, of which `kubectl apply` keeps a copy in an annotation of at most 2**18
STOPPING = 60
"""Seconds to stop in, as `stop_grace_period` of the compose files: a node needs at most 55 with its default --grace."""


def label_of(site: str) -> str:
    """Return a site's name as a DNS label: as it is, or made of its letters and digits and a digest of the name."""
    plain = re.sub("[^a-z0-9]+", "-", site.lower()).strip("-")
    if plain == site and len(plain) <= _LONGEST:
        return plain
    return f"{plain[: _LONGEST - 9].strip('-') or 'x'}-{hashlib.sha256(site.encode()).hexdigest()[:8]}"


def named(kind: str, name: str, labels: Mapping[str, str], options: Options, version: str = "v1") -> Manifest:
    """Return the beginning of an object: its kind, name, labels and namespace."""
    metadata: Manifest = {"name": name, "labels": {**labels, "app.kubernetes.io/part-of": "tepal"}}
    if options.namespace:
        metadata["namespace"] = options.namespace
    return {"apiVersion": version, "kind": kind, "metadata": metadata}


def namespace(options: Options, host_paths: bool) -> Manifest:
    """Return the Namespace, in which only pods of the strictest profile may run, unless one mounts a host's folder."""
    metadata: Manifest = {"name": options.namespace}
    if not host_paths:
        metadata["labels"] = {"pod-security.kubernetes.io/enforce": "restricted"}
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}


def secret(name: str, labels: Mapping[str, str], files: Mapping[str, bytes], options: Options) -> Manifest:
    data = {key: base64.b64encode(content).decode() for key, content in files.items()}
    return _small({**named("Secret", name, labels, options), "type": "Opaque", "data": data})


def config_map(name: str, labels: Mapping[str, str], values: Mapping[str, str], options: Options) -> Manifest:
    return _small({**named("ConfigMap", name, labels, options), "data": dict(values)})


def claim(name: str, labels: Mapping[str, str], size: str, options: Options) -> Manifest:
    spec: Manifest = {"accessModes": ["ReadWriteOnce"], "resources": {"requests": {"storage": size}}}
    if options.storage_class:
        spec["storageClassName"] = options.storage_class
    return {**named("PersistentVolumeClaim", name, labels, options), "spec": spec}


def container(name: str, image: str, resources: Manifest, mounts: Sequence[Manifest], **more: Any) -> Manifest:
    """Return a container without any privilege, on a root that cannot be written."""
    return {
        "name": name,
        "image": image,
        **more,
        "resources": resources,
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": list(mounts),
    }


def deployment(
    name: str, labels: Mapping[str, str], annotations: Mapping[str, str], pod: Manifest, options: Options
) -> Manifest:
    """Return a Deployment of one pod, of which there are never two: they would have one key, or one state folder.

    A StatefulSet would add nothing: the one pod's volume is a claim by name, and nobody calls the pod by its own name.
    With `Recreate` a Deployment replaces a pod that never became ready; a StatefulSet waits for a person.
    """
    spec: Manifest = {
        # A Service called tepal would otherwise set TEPAL_PORT, an option of `tepal server`.
        "enableServiceLinks": False,
        "automountServiceAccountToken": False,
        # The pause process reaps what Flower starts and does not wait for, as `init: true` of the compose files does.
        "shareProcessNamespace": True,
        "terminationGracePeriodSeconds": STOPPING,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": CONTAINER_USER,
            "runAsGroup": CONTAINER_USER,
            "fsGroup": CONTAINER_USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **pod,
    }
    if options.pull_secret:
        spec["imagePullSecrets"] = [{"name": options.pull_secret}]
    template: Manifest = {"metadata": {"labels": dict(labels), "annotations": dict(annotations)}, "spec": spec}
    made = named("Deployment", name, labels, options, "apps/v1")
    made["spec"] = {
        "replicas": 1,
        "revisionHistoryLimit": 3,
        "strategy": {"type": "Recreate"},
        "selector": {"matchLabels": dict(labels)},
        "template": template,
    }
    return made


def alive_and_ready(alive: Sequence[str], ready: Manifest) -> Manifest:
    """Return the probes. `alive`: a command that fails only when a new process would help."""
    return {
        "livenessProbe": {
            "exec": {"command": list(alive)},
            "initialDelaySeconds": 60,
            "periodSeconds": 60,
            "timeoutSeconds": 20,
            "failureThreshold": 3,
        },
        "readinessProbe": {**ready, "periodSeconds": 15, "timeoutSeconds": 20, "failureThreshold": 3},
    }


def resources(cpus: str, memory: str, gpus: int = 0) -> Manifest:
    """Return requests and limits, which are equal: threads follow the limit, and memory cannot be taken back."""
    both: Manifest = {"cpu": cpus, "memory": memory}
    if gpus:
        both["nvidia.com/gpu"] = str(gpus)
    return {"requests": both, "limits": dict(both)}


def settings_digest(settings: Mapping[str, str]) -> str:
    """Return a digest for the pod template, so that new settings start a new pod."""
    return digest(json.dumps(settings, sort_keys=True).encode())


def as_pairs(config: Mapping[str, Value], option: str) -> str:
    """Return a config as `key=value …` on one line, as an environment variable has it. Raises ProvisionError."""
    text = " ".join(f"{key}={_literal(value)}" for key, value in config.items())
    try:
        same = not config or parse_run_config([text]) == dict(config)
    except ValueError:
        same = False
    if not same or "\n" in text or text.endswith(".toml"):
        raise ProvisionError(f"{option}: {text!r} cannot be written on one line of an environment variable")
    return text


def _literal(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if not isinstance(value, str):
        return repr(value)
    return f"'{value}'" if '"' in value or "\\" in value else f'"{value}"'


def _small(made: Manifest) -> Manifest:
    if (size := len(json.dumps(made))) > _MOST:
        raise ProvisionError(
            f"{made['kind']} {made['metadata']['name']} has {size} bytes, and kubectl apply takes at most {_MOST}: "
            "use fewer sites or shorter settings"
        )
    return made
