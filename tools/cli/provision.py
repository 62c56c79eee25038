"""`tepal provision`: the credentials of a deployment on the command line."""

from __future__ import annotations

import contextlib
import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from tepal.tools.cli import commands, reported

# Imports stand inside functions: cryptography and Flower take a second, and the help needs neither.
if TYPE_CHECKING:
    from tepal.tools.deploy.fleet import KeyResult
    from tepal.tools.deploy.provision import Provisioned, ServerFolder

_CONTROL = "127.0.0.1:8000"  # as in fleet.py

_Folder = Annotated[Path, typer.Argument(help="the folder of all credentials, as `make` wrote it")]
_ServerFolder = Annotated[Path, typer.Argument(help="the folder of all credentials, or a copy of its server/")]
_NodeConfig = Annotated[
    list[str] | None,
    typer.Option(help="'key=value …' for the site's ClientApp, as in `flower-supernode`; may be repeated"),
]
_Unpacked = Annotated[bool, typer.Option("--unpacked", help="write a folder for each site, and no archive")]

app = commands(
    "provision",
    help="Make, renew and revoke the credentials of a deployment: certificates, and a key for each site.",
    no_args_is_help=True,
)


@app.command("make")
def make_command(
    folder: Annotated[Path, typer.Argument(help="folder to make; new or empty")],
    host: Annotated[
        list[str], typer.Option(help="name or address of the server; sites connect to the first. May be repeated")
    ],
    site: Annotated[list[str], typer.Option(help="name of a site; may be repeated")],
    port: Annotated[int, typer.Option(min=1, max=65535, help="the server's port for sites")] = 9092,
    days: Annotated[int, typer.Option(min=1, help="validity of the server's certificate in days")] = 365,
    ca_days: Annotated[int, typer.Option(min=1, help="validity of the authority's certificate in days")] = 3650,
    node_config: _NodeConfig = None,
    unpacked: _Unpacked = False,
) -> None:
    """Make all credentials: an authority, the server's certificate, and for each site a key in an archive of its own.

    Copy FOLDER/server to the server's machine and each archive in FOLDER/sites to its site only; FOLDER/ca stays where
    it is. Existing files are not replaced.
    """
    from tepal.tools.deploy.provision import make, parse_node_config

    with reported():
        made = make(
            folder,
            hosts=host,
            sites=site,
            port=port,
            days=days,
            ca_days=ca_days,
            node_config=parse_node_config(node_config),
            unpacked=unpacked,
        )
        typer.echo(
            f"{made.folder / 'ca'}: the authority. Anyone who has ca.key can impersonate the server: keep it off the "
            f"machines of the deployment\n{made.server.folder}: copy all of it to the server's machine"
        )
        _print_sites(made, site)


@app.command("add")
def add_command(
    folder: _Folder,
    site: Annotated[list[str], typer.Option(help="name of a further site; may be repeated")],
    node_config: _NodeConfig = None,
    unpacked: _Unpacked = False,
) -> None:
    """Make keys and archives for further sites."""
    from tepal.tools.deploy.provision import add, parse_node_config

    with reported():
        made = add(folder, sites=site, node_config=parse_node_config(node_config), unpacked=unpacked)
        _print_sites(made, site)
        typer.echo(_register_hint(folder))


@app.command("renew")
def renew_command(
    folder: _Folder,
    server: Annotated[bool, typer.Option("--server", help="a new certificate and key for the server")] = False,
    site: Annotated[list[str] | None, typer.Option(help="a new key for this site; may be repeated")] = None,
    host: Annotated[
        list[str] | None,
        typer.Option(help="with --server: all names and addresses, in place of the present ones; may be repeated"),
    ] = None,
    days: Annotated[
        int | None, typer.Option(min=1, help="with --server: validity in days", show_default="365")
    ] = None,
    node_config: Annotated[list[str] | None, typer.Option(help="with --site: a new node config; '' for none")] = None,
) -> None:
    """Make a new server certificate of the same authority, or a new key for a site, whose present key is revoked.

    The server's present pair is renamed to *.old. Sites trust the new certificate without a change on their side.
    """
    from tepal.tools.deploy.provision import parse_node_config, renew_server, renew_site

    with reported():
        if not server and not site:
            raise ValueError("neither --server nor --site is given: name what to renew")
        if host and not server:
            raise ValueError("--host is for the server's certificate: give --server, too")
        if days is not None and not server:
            raise ValueError("--days is for the server's certificate: give --server, too")
        given = parse_node_config(node_config)
        if given is not None and not site:
            raise ValueError("--node-config is for a site: give --site, too")
        if server:
            before = _names(folder) if host else set()
            made = renew_server(folder, hosts=host or [], days=days or 365)
            typer.echo(
                f"{made.server.certificate}, {made.server.key}: new; the old pair is in *.old\n"
                "Copy both to the server's machine, where they belong to the user that runs the server (in containers: "
                "chown 49999:49999), and restart the SuperLink: it reads them when it starts"
            )
            if host:
                typer.echo("Existing sites use the address in their site.toml: check that it still leads to the server")
            if lost := sorted(before - _names(folder)):
                _print_warning(
                    f"the certificate is no longer for {', '.join(lost)}: sites whose site.toml names one of them "
                    "cannot connect after the restart. To keep a name, give --host for it, too"
                )
        for name in site or []:
            _print_sites(renew_site(folder, name, node_config=given), [name])
        if site:
            typer.echo(_register_hint(folder))


@app.command("register")
def register_command(
    folder: _ServerFolder,
    superlink: Annotated[str, typer.Option(help="HOST:PORT of the SuperLink's Control API")] = _CONTROL,
    name: Annotated[str | None, typer.Option(help="only this site")] = None,
) -> None:
    """Register the folder's sites at a running SuperLink, and unregister revoked keys.

    May be repeated at any time. A SuperLink that was restarted has no keys.
    """
    from tepal.tools.deploy.fleet import FleetError, align, open_fleet
    from tepal.tools.deploy.provision import ProvisionError, find_server

    with reported(FleetError):
        server = find_server(folder)
        if name is not None and name not in server.node_keys() and name not in dict(server.revoked_keys()):
            raise ProvisionError(f"{server.nodes} has no site {name}")
        with open_fleet(superlink, server.root_certificates) as fleet:
            results = align(fleet, server, name)
        _print_results(results)
        if not results:
            typer.echo(f"{server.nodes} has no keys to register")


@app.command("kubernetes")
def kubernetes_command(
    folder: Annotated[Path, typer.Argument(help="the folder of all credentials, or one site's archive or folder")],
    output: Annotated[Path, typer.Option(help="folder for the manifests; files in it are replaced")],
    server: Annotated[bool, typer.Option("--server", help="write only the server, and the sites of --site")] = False,
    site: Annotated[list[str] | None, typer.Option(help="write only this site; may be repeated")] = None,
    separate_secrets: Annotated[
        bool,
        typer.Option("--separate-secrets", help="write Secrets to secrets/, so that the other files can be committed"),
    ] = False,
    namespace: Annotated[str, typer.Option(help="namespace of all objects; by default that of kubectl")] = "",
    create_namespace: Annotated[
        bool, typer.Option("--create-namespace", help="also write a manifest of the namespace")
    ] = False,
    registry: Annotated[str, typer.Option(help="registry of the images, such as registry.example.org/team")] = "",
    tag: Annotated[str, typer.Option(help="tag of the images", show_default="this version of Tepal")] = "",
    pull_secret: Annotated[str, typer.Option(help="name of the Secret with which the cluster fetches the images")] = "",
    storage_class: Annotated[str, typer.Option(help="storage class of the claims; by default the cluster's")] = "",
    server_image: Annotated[str, typer.Option(help="the server's image, below --registry")] = "tepal-server",
    service: Annotated[
        str, typer.Option(help="type of the Service: LoadBalancer, NodePort or ClusterIP")
    ] = "LoadBalancer",
    server_storage: Annotated[str, typer.Option(help="size of the server's claim for runs and state")] = "20Gi",
    server_memory: Annotated[str, typer.Option(help="the server's memory, request and limit")] = "4Gi",
    server_cpus: Annotated[str, typer.Option(help="the server's CPUs, request and limit")] = "2",
    run_config: Annotated[
        list[str] | None, typer.Option("--run-config", "-c", help="a run that the server starts, as in `tepal server`")
    ] = None,
    data_claim: Annotated[
        str, typer.Option(help="PersistentVolumeClaim with a site's examples, mounted at /data")
    ] = "",
    data_host_path: Annotated[
        str, typer.Option(help="folder of the machine with a site's examples, in place of --data-claim")
    ] = "",
    no_data: Annotated[
        bool, typer.Option("--no-data", help="mount no examples: a site takes its part of the run's data set")
    ] = False,
    site_image: Annotated[
        str,
        typer.Option(help="a site's image, below --registry", show_default="tepal-client; with GPUs tepal-client-cuda"),
    ] = "",
    site_storage: Annotated[str, typer.Option(help="size of a site's claim for cache and personal state")] = "10Gi",
    site_memory: Annotated[
        str, typer.Option(help="a site's memory, request and limit", show_default="2Gi; with GPUs 8Gi")
    ] = "",
    site_cpus: Annotated[str, typer.Option(help="a site's CPUs, request and limit")] = "1",
    gpus: Annotated[int, typer.Option(min=0, help="number of a site's NVIDIA GPUs")] = 0,
    runtime_class: Annotated[str, typer.Option(help="runtime class of a site's pod, where GPUs need one")] = "",
    node_selector: Annotated[
        list[str] | None, typer.Option(help="key=value, a label of the machines for a site; may be repeated")
    ] = None,
    node_config: _NodeConfig = None,
) -> None:
    """Write manifests for Kubernetes: OUTPUT/server.yaml, and OUTPUT/sites/NAME.yaml for each site.

    The options are for all that is written: call it once for the server and once for each site, where they differ.
    """
    from tepal import __version__
    from tepal.host.toml import parse_run_config
    from tepal.tools.deploy import kubernetes
    from tepal.tools.deploy.provision import parse_node_config

    with reported():
        options = kubernetes.Options(
            namespace=namespace,
            registry=registry,
            tag=tag or __version__,
            pull_secret=pull_secret,
            storage_class=storage_class,
        )
        written, warnings = kubernetes.render(
            folder,
            output,
            options,
            kubernetes.ServerOptions(
                image=server_image,
                service=service,
                storage=server_storage,
                memory=server_memory,
                cpus=server_cpus,
                run_config=parse_run_config(run_config or []),
            ),
            kubernetes.SiteOptions(
                data_claim=data_claim,
                data_host_path=data_host_path,
                no_data=no_data,
                image=site_image,
                storage=site_storage,
                memory=site_memory,
                cpus=site_cpus,
                gpus=gpus,
                runtime_class=runtime_class,
                node_selector=kubernetes.parse_node_selector(node_selector),
                node_config=parse_node_config(node_config) or {},
            ),
            server=server,
            sites=site or [],
            separate=separate_secrets,
            create_namespace=create_namespace,
        )
    for one in written:
        warning = "has a Secret: keep it out of git. " if one.secret else ""
        typer.echo(f"{one.path}: {warning}kubectl apply -f {shlex.quote(str(one.path))}")
    for warning in warnings:
        _print_warning(warning)


@app.command("revoke")
def revoke_command(
    folder: _ServerFolder,
    name: Annotated[str, typer.Argument(help="the site whose key is revoked")],
    superlink: Annotated[
        str | None, typer.Option(help=f"HOST:PORT of the SuperLink's Control API; by default {_CONTROL}, if it answers")
    ] = None,
) -> None:
    """Revoke a site's key in the folder, and unregister it at the SuperLink if that is running.

    A SuperLink never accepts a revoked key again: `renew --site NAME` makes a new one for the site.
    """
    from tepal.tools.deploy.fleet import FleetError
    from tepal.tools.deploy.provision import find_server, revoke

    with reported(FleetError):
        server = find_server(folder)
        moved = revoke(server, name)
        typer.echo(f"{name}: its key {f'is revoked in the folder: {moved}' if moved else 'was revoked before'}")
        _unregister(server, name, superlink, folder)


@app.command("list")
def list_command(folder: _ServerFolder) -> None:
    """Show all sites with the fingerprints of their keys, and the validity of the certificates."""
    from tepal.tools.deploy.provision import SOON, overview

    with reported():
        found = overview(folder)
        table = Table("site", "key", "state")
        for site in found.sites:
            state = f"[red]revoked[/] {site.revoked:%Y-%m-%d %H:%M} UTC" if site.revoked else "[green]authorised[/]"
            table.add_row(escape(site.name), site.fingerprint, state)
        # A truncated fingerprint is useless, so the table does not depend on the terminal's width.
        Console(width=max(Console().width, 160)).print(table, soft_wrap=True)
        typer.echo(f"the server's certificate is for {', '.join(found.hosts)}")
        for what, days, remedy in (
            ("the server's certificate", found.server_days, "tepal provision renew FOLDER --server"),
            ("the authority's certificate", found.ca_days, "a new deployment, with new archives for all sites"),
        ):
            more = f"{days} more {'day' if days == 1 else 'days'}"
            typer.echo(f"{what} has expired" if days < 0 else f"{what} is valid for {more}")
            if days < SOON:
                _print_warning(f"{what} {'has expired' if days < 0 else f'expires in {days} days'}. Needed: {remedy}")


def _names(folder: Path) -> set[str]:
    """Return the names and addresses of the server's certificate, none if it cannot be read."""
    from tepal.host.site import ProvisionError, read_certificate
    from tepal.tools.deploy.provision import Provisioned, hosts_of

    with contextlib.suppress(ProvisionError, OSError):
        return set(hosts_of(read_certificate(Provisioned(folder).server.certificate)))
    return set()


def _unregister(server: ServerFolder, name: str, superlink: str | None, folder: Path) -> None:
    """Unregister a revoked key at the SuperLink, and print the result."""
    from tepal.tools.deploy.fleet import FleetError, align, open_fleet

    address = superlink or _CONTROL
    try:
        with open_fleet(address, server.root_certificates) as fleet:
            results = align(fleet, server, name)
            known = [key for key in fleet.node_keys() if key.name == name]
    except FleetError as error:
        _print_warning(
            f"THE KEY IS NOT UNREGISTERED: {error}. A running SuperLink still accepts it. A server that reads this "
            "folder unregisters it within seconds or at its start. Or run, on the SuperLink's machine: "
            f"tepal provision register {shlex.quote(str(folder))}"
        )
        if superlink is not None:  # an address that was given must answer
            raise typer.Exit(1) from error
        return
    _print_results(results)
    if not results:
        state = "had its key unregistered before" if known else "does not know its key"
        typer.echo(f"{name}: the SuperLink at {address} {state}, and refuses it")


def _register_hint(folder: Path) -> str:
    return (
        "A server that reads this folder, or its copy of server/, registers the change within seconds or at its start. "
        f"Or run, on the SuperLink's machine: tepal provision register {shlex.quote(str(folder))}"
    )


def _print_sites(made: Provisioned, names: list[str]) -> None:
    for name in names:
        path = made.unpacked(name)
        how = f"Then: tepal node --site {shlex.quote(str(path))}"
        if made.archive(name).exists():
            path, how = made.archive(name), f"There: tar -xzf {name}.tar.gz; then tepal node --site {name}"
        typer.echo(f"{path}: for {name} only, because anyone who has it can connect as {name}. {how}")


def _print_results(results: list[KeyResult]) -> None:
    """Print the result for each key; end the command with status 1 if there was a problem."""
    for one in results:
        if one.problem:
            _print_warning(f"{one.site}: {one.problem}")
        else:
            typer.echo(f"{one.site}: {one.done}")
    if any(one.problem for one in results):
        raise typer.Exit(1)


def _print_warning(line: str) -> None:
    typer.secho(line, fg="yellow", err=True)
