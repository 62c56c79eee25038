"""Manifests for Kubernetes, from a folder of `tepal provision make`: of the server, and of each site.

The images, ports, volumes and health checks are those of docker/: one pod for each, which is replaced and never doubled
(`Recreate`), with its credentials from a Secret and its settings from a ConfigMap. `server.py` and `site.py` have what
differs, `pod.py` what is common, `files.py` the YAML.
"""

from tepal.tools.deploy.kubernetes.files import Written
from tepal.tools.deploy.kubernetes.options import Options, ServerOptions, SiteOptions, parse_node_selector
from tepal.tools.deploy.kubernetes.render import render

__all__ = ["Options", "ServerOptions", "SiteOptions", "Written", "parse_node_selector", "render"]
