"""`tepal init`: write an app of one's own."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from tepal.tools.cli import commands, reported
from tepal.tools.init import write_app

app = commands("init")


@app.command("init")
def init_command(
    folder: Annotated[Path, typer.Argument(metavar="NAME", help="new folder; its name is that of the app")],
) -> None:
    """Write a Flower app that uses Tepal: model, training, ClientApp, ServerApp and run config, to be changed.

    It runs as it is, simulated or deployed.
    """
    folder = folder.expanduser()
    with reported():
        files = write_app(folder)
    for file in files:
        typer.echo(f"  {file}")
    typer.echo(
        f"Run it on this machine:\n  cd {shlex.quote(str(folder))}\n"
        "  tepal simulate . --clients 3\n  tepal loopback . --clients 3\n"
        "  FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION=1 flwr run . --stream"
    )
