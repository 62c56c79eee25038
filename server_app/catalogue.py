"""The strategies that a run config can name, for people: `tepal strategies` and the page docs/strategies.md."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tepal.server_app.config import about, escaped
from tepal.strategies import STRATEGIES


@dataclass(frozen=True)
class Option:
    """One key of the run config that belongs to a strategy."""

    key: str
    default: object
    about: str


def options_of(name: str) -> list[Option]:
    """The keys of a strategy's own, in their order; none for a strategy without options."""
    fields = STRATEGIES[name].options.model_fields.values()
    return [Option(str(field.alias), field.default, about(field)) for field in fields]


def table(names: Sequence[str] = ()) -> RenderableType:
    """All strategies for a terminal, a line each; or what there is to know of some."""
    if not names:
        lines = Table(box=None, pad_edge=False)
        for heading in ("strategy", "what it does", "travels, a client and round", "paper"):
            lines.add_column(heading)
        for name, listed in STRATEGIES.items():
            lines.add_row(name, listed.does, listed.travels, listed.paper)
        return lines
    parts: list[RenderableType] = []
    for name in names:
        listed = STRATEGIES[name]
        parts += [Text(f"{name}: {listed.does}", style="bold"), Text(f"{listed.paper}\n{listed.travels}")]
        options = Table(box=None, pad_edge=False, show_header=False)
        for option in options_of(name):
            options.add_row(f"  {option.key}", json.dumps(option.default), option.about)
        parts += [options, Text()]
    return Group(*parts)


def reference() -> str:
    """docs/strategies.md: `docs/run_config.py` writes it."""
    lines = [
        "# Strategies",
        "",
        "Each is a value of the key `strategy`, and a class of `tepal.strategies`. What travels is for one client and "
        "round: P are",
        "the bytes of the model. A part that a client still holds does not travel again, under any of them; the models "
        "that are",
        "scored after the last round go down once more where clients do not hold them. `tepal strategies` prints this.",
        "",
        "| strategy | what it does | travels | paper |",
        "|---|---|---|---|",
        *(
            f"| [`{name}`](#{name}) | {listed.does} | {listed.travels} | {listed.paper} |"
            for name, listed in STRATEGIES.items()
        ),
    ]
    for name, listed in STRATEGIES.items():
        lines += ["", f"## {name}", "", f"`{listed.strategy.__name__}`: {listed.does}. {listed.paper}."]
        if options := options_of(name):
            lines += ["", "| key | default | what it is |", "|---|---|---|"]
            lines += [f"| `{o.key}` | `{json.dumps(o.default)}` | {escaped(o.about)} |" for o in options]
    return "\n".join(lines) + "\n"

