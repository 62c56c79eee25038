"""The keys of the run config as text for people: two pages of the documentation, and what a key is."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import get_args

from pydantic.fields import FieldInfo

from tepal.server_app.config.run_config import SECTIONS
from tepal.strategies import STRATEGIES


def reference() -> str:
    """All keys as a page of the documentation, docs/run-config.md: `docs/run_config.py` writes it."""
    lines = ["# The run config", "", "Set keys with `--run-config 'key=value …'` or in a TOML file. Text needs quotes."]
    seen: set[str | None] = set()
    for title, section in SECTIONS.values():
        fields = [field for field in section.model_fields.values() if field.alias not in seen]
        seen |= {field.alias for field in fields}
        lines += ["", f"## {title}", *_table(fields)]
    return "\n".join(lines) + "\n"


_STRATEGIES = """# Strategies

Each is a value of the key `strategy`, and a class of `tepal.strategies`. What travels is for one client and round; P is
the size of the model in bytes. A part that a client still holds does not travel again, under any of them; the models
that are scored after the last round go down once more where clients do not hold them. `tepal strategies` prints this.

| strategy | what it does | travels | paper |
|---|---|---|---|"""


def strategies() -> str:
    """All strategies as a page of the documentation, docs/strategies.md: `docs/run_config.py` writes it."""
    lines = [_STRATEGIES]
    lines += [f"| [`{name}`](#{name}) | {one.does} | {one.travels} | {one.paper} |" for name, one in STRATEGIES.items()]
    for name, one in STRATEGIES.items():
        lines += ["", f"## {name}", "", f"`{one.strategy.__name__}`: {one.does}. {one.paper}."]
        if fields := one.options.model_fields.values():
            lines += _table(fields)
    return "\n".join(lines) + "\n"


def _table(fields: Iterable[FieldInfo]) -> Iterator[str]:
    """Lines of a table in Markdown, with an empty one before it."""
    yield from ("", "| key | default | what it is |", "|---|---|---|")
    for field in fields:
        yield f"| `{field.alias}` | `{json.dumps(field.default)}` | {_escaped(about(field))} |"


def about(field: FieldInfo) -> str:
    """What a key is, and which values are allowed where they can be listed."""
    allowed = get_args(field.annotation)
    return (f"one of {', '.join(map(str, allowed))}: " if allowed else "") + (field.description or "")


def _escaped(text: str) -> str:
    """For a cell of a table in Markdown."""
    return text.replace("|", "\\|")
