"""The keys of the run config and the strategies as pages of the documentation."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from typing import get_args

from pydantic.fields import FieldInfo

from tepal.server_app.config.run_config import SECTIONS
from tepal.strategies import STRATEGIES


def reference() -> str:
    """Return docs/run-config.md, a table of all keys. `docs/run_config.py` writes it."""
    lines = ["# The run config", "", "Set keys with `--run-config 'key=value …'` or in a TOML file. Text needs quotes."]
    seen: set[str | None] = set()
    for title, section in SECTIONS.values():
        fields = [field for field in section.model_fields.values() if field.alias not in seen]
        seen |= {field.alias for field in fields}
        lines += ["", f"## {title}", *_table(fields)]
    return "\n".join(lines) + "\n"


_STRATEGIES = """# Strategies

Each strategy is a value of the key `strategy`, and a class of `tepal.strategies`. What is transferred is given for one
client in one round; P is the size of the model in bytes. With every strategy, parts in a client's cache are not sent
again; the models that are scored after the last round are sent to clients that do not have them. `tepal strategies`
prints this table.

| strategy | what it does | transferred | paper |
|---|---|---|---|"""


def strategies() -> str:
    """Return docs/strategies.md, all strategies with their keys. `docs/run_config.py` writes it."""
    lines = [_STRATEGIES]
    lines += [f"| [`{name}`](#{name}) | {one.does} | {one.travels} | {one.paper} |" for name, one in STRATEGIES.items()]
    for name, one in STRATEGIES.items():
        lines += ["", f"## {name}", "", f"`{one.strategy.__name__}`: {one.does}. {one.paper}."]
        if fields := one.options.model_fields.values():
            lines += _table(fields)
    return "\n".join(lines) + "\n"


def _table(fields: Iterable[FieldInfo]) -> Iterator[str]:
    """Yield the lines of a table in Markdown, after an empty line."""
    yield from ("", "| key | default | description |", "|---|---|---|")
    for field in fields:
        description = about(field).replace("|", "\\|")
        yield f"| `{field.alias}` | `{json.dumps(field.default)}` | {description} |"


def about(field: FieldInfo) -> str:
    """Return a key's description, with its allowed values if they can be listed."""
    allowed = get_args(field.annotation)
    return (f"one of {', '.join(map(str, allowed))}: " if allowed else "") + (field.description or "")
