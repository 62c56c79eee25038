"""The command line `tepal …`: a module for each command, imported when the command is called (`main.py`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Annotated, Any

import typer

# Typer's help imports rich and its Markdown, half of all modules, for the default of an option, also where it is plain.
typer.core.HAS_RICH = False



Ray = Annotated[
    str | None,
    typer.Option(
        "--ray",
        metavar="ADDRESS",
        help="compute on the machines of this Ray cluster, HOST:PORT or auto (docs/clusters.md); none: on this machine",
        show_default="$RAY_ADDRESS",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON")]


def commands(name: str, **settings: Any) -> typer.Typer:
    """Return a Typer app with plain help, and exceptions as Python shows them. click suggests similar commands."""
    return typer.Typer(
        name=name,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
        suggest_commands=False,
        **settings,
    )


@contextlib.contextmanager
def reported(*kinds: type[Exception]) -> Iterator[None]:
    """Report an OSError, a ValueError or an exception of these kinds as `error: …`, and end with status 1."""
    errors: tuple[type[Exception], ...] = (OSError, ValueError, *kinds)
    try:
        yield
    except errors as error:
        from tepal.host.text import visible_lines  # help and status do not need it

        # Messages have names and texts from files that others may have written.
        typer.echo(f"{typer.style('error:', fg='red', bold=True)} {visible_lines(error)}", err=True)
        raise typer.Exit(1) from error
