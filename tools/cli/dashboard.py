"""`tepal dashboard`: show runs in a browser."""

from __future__ import annotations

import os
import secrets
from pathlib import Path
from typing import Annotated

import typer

from tepal.tools.cli import commands, reported

app = commands("dashboard")
_SHORTEST_TOKEN = 12  # characters


@app.command("dashboard")
def dashboard_command(
    folder: Annotated[Path, typer.Argument(help="folder of run directories, or of a comparison")] = Path("runs"),
    host: Annotated[str, typer.Option(help="name or address to listen on; except on loopback, a token is required")]
    = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 for a free one")] = 8765,
    token_file: Annotated[
        Path | None, typer.Option(help="file with the token; by default $TEPAL_DASHBOARD_TOKEN, or a new token")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file, for https")] = None,
    key: Annotated[Path | None, typer.Option(help="PEM file with the certificate's private key")] = None,
) -> None:
    """Show runs in a browser, during and after training. It only reads files, and needs no internet access."""
    from tepal.host.addresses import is_loopback
    from tepal.tools.dashboard.app import TOKEN, serve  # the other commands do not need a web server
    from tepal.tools.dashboard.views import views

    with reported():
        if (certificate is None) != (key is None):
            raise ValueError("--certificate and --key belong together: give both, for https, or neither")
        views(folder)  # raises an error for an invalid folder
        token = token_file.read_text(encoding="utf-8").strip() if token_file else os.environ.get(TOKEN)
        if token is not None and len(token) < _SHORTEST_TOKEN:
            raise ValueError(f"the token has {len(token)} characters, expected at least {_SHORTEST_TOKEN}")
        new = ""  # a given token is not printed
        if token is None and not is_loopback(host):
            token = secrets.token_urlsafe(24)
            new = f"?token={token}"
        if certificate is None and not is_loopback(host):
            typer.echo("warning: without --certificate and --key the connection is not encrypted", err=True)
        serve(
            folder, host, port, token=token, certificate=certificate, key=key,
            said=lambda address: typer.echo(address + new),
        )  # fmt: skip
