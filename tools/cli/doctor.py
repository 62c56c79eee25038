"""`tepal doctor`: check an installation."""

from __future__ import annotations

import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from tepal.tools.cli import AsJson, commands, reported

app = commands("doctor")


@app.command("doctor")
def doctor_command(
    credentials: Annotated[
        Path | None, typer.Option(help="a folder of `tepal provision`, or a copy of its server/, to check")
    ] = None,
    site: Annotated[Path | None, typer.Option(help="a site's archive or folder to check")] = None,
    superlink: Annotated[
        str, typer.Option(help="HOST:PORT of a server's control port, to compare the clocks of both machines")
    ] = "",
    root_certificates: Annotated[
        Path | None, typer.Option(help="certificates to trust there", show_default="those of --credentials or --site")
    ] = None,
    runs: Annotated[
        Path | None,
        typer.Option(
            help="folder of run directories",
            show_default="$TEPAL_STATE/runs; without $TEPAL_STATE: runs, or none where $TEPAL_SITE is set",
        ),
    ] = None,
    cache: Annotated[
        Path | None,
        typer.Option(
            help="folder of clients' caches",
            show_default="$TEPAL_CACHE, or the user's; none where $TEPAL_CREDENTIALS is set",
        ),
    ] = None,
    port: Annotated[
        list[int] | None,
        typer.Option(min=1, max=65535, help="a port that must be free; may be repeated", show_default="a server's"),
    ] = None,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="a Ray cluster (HOST:PORT or auto) whose machines are checked for the versions installed here; none: "
            "no cluster",
            show_default="$RAY_ADDRESS",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Check this installation and its machine. The exit status is 1 if there is a problem."""
    from tepal.exchange.cache import default_root
    from tepal.tools.cluster.connection import address_of
    from tepal.tools.dashboard.printed import console
    from tepal.tools.deploy.doctor import PROBLEM, examine, findings_table

    with reported():
        address = address_of(ray)
    # As the images set it: a server's machine has no cache, and a site's has no runs.
    if runs is None and (state := os.environ.get("TEPAL_STATE")):
        runs = Path(state) / "runs"
    elif runs is None and not os.environ.get("TEPAL_SITE"):
        runs = Path("runs")
    if cache is None and not os.environ.get("TEPAL_CREDENTIALS"):
        cache = default_root()
    with Console(stderr=True).status("checking …"):
        findings = list(
            examine(
                runs=runs, cache=cache, ports=port or (), credentials=credentials, site=site, superlink=superlink,
                root_certificates=root_certificates,
            )
        )  # fmt: skip
        if address:
            from tepal.tools.deploy.doctor_cluster import check_cluster

            findings += check_cluster(address)
    if as_json:
        typer.echo(json.dumps([asdict(each) for each in findings], indent=2))
    else:
        console().print(findings_table(findings))
    if any(each.state == PROBLEM for each in findings):
        raise typer.Exit(1)
