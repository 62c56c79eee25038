"""`tepal dashboard`: runs in a browser."""

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
    host: Annotated[str, typer.Option(help="name or address to listen on; on other than loopback a token is asked for")]
    = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="0 takes a free one")] = 8765,
    token_file: Annotated[
        Path | None, typer.Option(help="file with the token; without it TEPAL_DASHBOARD_TOKEN, or a new one")
    ] = None,
    certificate: Annotated[Path | None, typer.Option(help="PEM file, for https")] = None,
    key: Annotated[Path | None, typer.Option(help="of the certificate, PEM file")] = None,
) -> None:
    """Show runs in a browser, while they go on and afterwards. It only reads, and works offline."""
    from tepal.tools.dashboard.app import TOKEN, is_loopback, serve  # a web server is no part of the other commands
    from tepal.tools.dashboard.views import views

    with reported():
        if (certificate is None) != (key is None):
            raise ValueError("--certificate and --key belong together: give both, for https, or neither")
        views(folder)  # says what is wrong with the folder
        token = token_file.read_text(encoding="utf-8").strip() if token_file else os.environ.get(TOKEN)
        if token is not None and len(token) < _SHORTEST_TOKEN:
            raise ValueError(f"the token has {len(token)} characters; it must have {_SHORTEST_TOKEN} at least")
        new = ""  # a token of one's own is shown to nobody
        if token is None and not is_loopback(host):
            token = secrets.token_urlsafe(24)
            new = f"?token={token}"
        if certificate is None and not is_loopback(host):
            typer.echo("warning: without --certificate and --key what is shown travels as plain text", err=True)
        serve(
            folder, host, port, token=token, certificate=certificate, key=key,
            said=lambda address: typer.echo(address + new),
        )  # fmt: skip
