"""`tepal provision kubernetes`: which objects go to which file."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from tepal.host.site import ProvisionError
from tepal.tools.deploy.kubernetes.credentials import find_credentials
from tepal.tools.deploy.kubernetes.files import Written, write
from tepal.tools.deploy.kubernetes.options import Options, ServerOptions, SiteOptions
from tepal.tools.deploy.kubernetes.pod import Manifest, label_of, namespace
from tepal.tools.deploy.kubernetes.server import server_manifests
from tepal.tools.deploy.kubernetes.site import site_manifests
from tepal.tools.deploy.node_keys import ServerError, check_credentials
from tepal.tools.deploy.provision import ServerFolder

Part = tuple[Sequence[Manifest], Sequence[Manifest]]
"""(Secrets, other objects)"""


def render(
    folder: Path,
    output: Path,
    options: Options,
    server_options: ServerOptions,
    site_options: SiteOptions,
    *,
    server: bool = False,
    sites: Sequence[str] = (),
    separate: bool = False,
    create_namespace: bool = False,
) -> tuple[list[Written], list[str]]:
    """Write the manifests of a deployment, and return the files and warnings.

    Args:
        folder: what `tepal provision make` wrote, or the archive or folder of one site.
        output: folder of the files: server.yaml, sites/NAME.yaml, namespace.yaml.
        options, server_options, site_options: of all objects, the server's, and those of every site that is written.
        server: write the server's, of all that there is only this and `sites`.
        sites: names of the sites to write. Without `server` and `sites`: all that the folder has.
        separate: write Secrets to secrets/ below `output`.
        create_namespace: write the Namespace, too.

    Raises ProvisionError; then nothing is written.
    """
    found = find_credentials(folder)
    everything = not server and not sites
    parts: dict[str, Part] = {}
    warnings: list[str] = []
    if create_namespace:
        if not options.namespace:
            raise ProvisionError("--create-namespace is given without --namespace: name it")
        parts["namespace.yaml"] = [], [namespace(options, bool(site_options.data_host_path))]
    if server or (everything and found.server is not None):
        if found.server is None:
            raise ProvisionError(f"{folder} is a site's, without the server's credentials: name the folder of all")
        warnings = _expiry(found.server)
        parts["server.yaml"] = server_manifests(found.server, found.port, server_options, options)
    chosen = list(found.sites) if everything else list(dict.fromkeys(sites))
    found.check(chosen)
    by_label: dict[str, str] = {}
    for name in chosen:
        other = by_label.setdefault(label_of(name), name)
        if other != name:
            raise ProvisionError(f"the objects of the sites {other} and {name} would have one name: rename one of them")
        parts[f"sites/{name}.yaml"] = site_manifests(found.read(name), site_options, options)
    if not parts:
        raise ProvisionError(f"{folder} has no authorised site: add one with tepal provision add, or give --server")
    return write(output, parts, separate=separate), warnings


def _expiry(server: ServerFolder) -> list[str]:
    try:
        return check_credentials(server, "127.0.0.1", datetime.now(UTC))
    except ServerError as error:
        raise ProvisionError(str(error)) from error
