"""The credentials of a deployment: a certificate authority, the server's certificate, a key for each site.

`make` writes them into one folder, which only its owner can read:

    deployment.toml            where the sites find the server
    ca/                        ca.key, ca.crt: signs the server's certificate; keep it off the server
    server/                    all that the server's machine needs:
        ca.crt server.crt server.key
        nodes/NAME.pub         the public keys of authorised sites
        revoked/NAME-TIME.pub  revoked keys
    sites/NAME.tar.gz          all that one site needs: NAME/ca.crt, NAME/node.key, NAME/site.toml

Sites verify the server with the authority's certificate (TLS). The server authenticates a site by its key, which is
registered under the site's name (`tepal.tools.deploy.fleet`): anyone who has a site's archive can connect as that site.
New files are written to a hidden folder and then renamed: a call that fails leaves the folder as it was.
"""

from tepal.host.site import ProvisionError, SiteCredentials, parse_node_config, read_site
from tepal.tools.deploy.provision.certificates import SOON, hosts_of
from tepal.tools.deploy.provision.folder import (
    Provisioned,
    ServerFolder,
    closed,
    find_server,
    load_public_key,
    overview,
)
from tepal.tools.deploy.provision.operations import add, make, renew_server, renew_site, revoke
from tepal.tools.deploy.provision.site_files import site_folder

__all__ = [
    "SOON",
    "ProvisionError",
    "Provisioned",
    "ServerFolder",
    "SiteCredentials",
    "add",
    "closed",
    "find_server",
    "hosts_of",
    "load_public_key",
    "make",
    "overview",
    "parse_node_config",
    "read_site",
    "renew_server",
    "renew_site",
    "revoke",
    "site_folder",
]
