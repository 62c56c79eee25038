"""The command line `tepal …`: a module for each command, imported when the command is called (`main.py`)."""

from __future__ import annotations

from typing import Any

import typer


def commands(name: str, **settings: Any) -> typer.Typer:
    """A Typer app as all modules of this folder use it: plain help, and exceptions as Python shows them."""
    return typer.Typer(
        name=name, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None, **settings
    )
