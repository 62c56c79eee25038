"""The keys of the run config as text for people: the page docs/run-config.md, and what a key is."""

from __future__ import annotations

import json
from typing import get_args

from pydantic.fields import FieldInfo

from tepal.server_app.config.run_config import SECTIONS


def reference() -> str:
    """All keys as a page of the documentation, docs/run-config.md: `docs/run_config.py` writes it."""
    lines = ["# The run config", "", "Set keys with `--run-config 'key=value …'` or in a TOML file. Text needs quotes."]
    seen: set[str] = set()
    for title, section in SECTIONS.values():
        lines += ["", f"## {title}", "", "| key | default | what it is |", "|---|---|---|"]
        for field in section.model_fields.values():
            if str(field.alias) in seen:
                continue
            seen.add(str(field.alias))
            lines.append(f"| `{field.alias}` | `{json.dumps(field.default)}` | {escaped(about(field))} |")
    return "\n".join(lines) + "\n"


def about(field: FieldInfo) -> str:
    """What a key is, and which values are allowed where they can be listed."""
    allowed = get_args(field.annotation)
    return (f"one of {', '.join(map(str, allowed))}: " if allowed else "") + (field.description or "")


def escaped(text: str) -> str:
    """For a cell of a Markdown table."""
    return text.replace("|", "\\|")
