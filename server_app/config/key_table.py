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

Each is a value of the key `strategy`, and a class of `tepal.strategies`. Transfers are for one client and round;
P is the size of the model in bytes. A part in a client's cache is not sent again, with any strategy; after the last
round the models that are scored are sent to the clients that do not have them. `tepal strategies` prints this table.

| strategy | what it does | transfers | paper |
|---|---|---|---|"""


def strategies() -> str:
    """Return docs/strategies.md, all strategies with their keys. `docs/run_config.py` writes it."""
    lines = [_STRATEGIES]
    for name, one in STRATEGIES.items():
        lines.append(f"| [`{name}`](#{name}) | {one.does} | {one.transfers} | {one.paper} |")
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
    allowed = [str(value) or '""' for value in get_args(field.annotation)]
    return (f"one of {', '.join(allowed)}: " if allowed else "") + (field.description or "")
