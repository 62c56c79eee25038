"""The command line: `tepal …`. Flower's own commands (`flwr run`, `flower-superlink`, …) stay as they are.

The module of a command is imported when the command is called: `tepal --help` and `tepal node status` answer at once.
"""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import click
import typer
from typer.core import TyperGroup

from tepal.tools.cli import commands

COMMANDS = {
    "provision": ("provision", "Make and change the credentials of a deployment."),
    "server": ("server", "Run a deployment's server, which resumes runs after a failure."),
    "node": ("node", "Run a client: Flower's SuperNode with a process that stays warm."),
    "init": ("init", "Write a Flower app of your own that uses Tepal."),
    "simulate": ("simulate", "Run the app with simulated clients on this machine."),
    "loopback": ("simulate", "Run the app on a deployment on this machine: TLS and real processes."),
    "compare": ("compare", "Run several strategies in turn and compare accuracy and bytes."),
    "strategies": ("strategies", "List the strategies, or the options of some."),
    "reproduce": ("reproduce", "Run a named experiment of a paper."),
    "report": ("report", "Write the report of a run or comparison again, or its figures as files."),
    "runs": ("runs", "List runs and comparisons."),
    "show": ("runs", "Show one run or comparison in full."),
    "dashboard": ("dashboard", "Show runs in a browser, during and after training."),
    "doctor": ("doctor", "Check this installation and its machine."),
    "predict": ("predict", "Predict with a saved model or ensemble."),
    "export": ("export", "Export a run's model for transformers or as an ONNX file."),
}
"""The module of this folder and the line in `tepal --help`, by command."""


class _Commands(Mapping[str, click.Command]):
    """Commands by name; a command's module is imported when the command is looked up."""

    def __getitem__(self, name: str) -> click.Command:
        module = COMMANDS[name][0]
        found = typer.main.get_command(import_module(f"{__package__}.{module}").app)
        return found.commands.get(name, found) if isinstance(found, click.Group) else found  # a module may have two

    def __iter__(self) -> Iterator[str]:
        return iter(COMMANDS)

    def __len__(self) -> int:
        return len(COMMANDS)


class _Group(TyperGroup):
    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.commands: Any = _Commands()

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in COMMANDS.items()])


atexit.register(gc.freeze)  # so that nobody looks for garbage at the end: with PyTorch imported, half a second

main = commands("tepal", cls=_Group, no_args_is_help=True)


@main.callback()
def tepal() -> None:
    """Federated learning that transfers only the parts of a model that a round needs."""


if __name__ == "__main__":
    main()
