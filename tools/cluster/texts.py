"""Texts that name paths of one machine, in which they are replaced by those of another."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from html import escape

Written = Callable[[str], str]
"""How a path is written in a text."""


def in_toml(path: str) -> str:
    """A path in a string of TOML, or of JSON in UTF-8."""
    return json.dumps(path, ensure_ascii=False)[1:-1]


def in_json(path: str) -> str:
    """A path in a string of JSON in ASCII."""
    return json.dumps(path)[1:-1]


def in_html(path: str) -> str:
    """A path in a page."""
    return escape(path)


def replaced(content: bytes, paths: Mapping[str, str], written: Written = str) -> bytes:
    """Return a text with other paths: those of the mapping's keys become its values.

    Of two paths, one of which begins with the other, the whole longer one is replaced; what was put in is left alone.
    """
    others = {written(path).encode(): written(other).encode() for path, other in paths.items()}
    if not others:
        return content
    longest_first = sorted(others, key=len, reverse=True)
    pattern = b"|".join(map(re.escape, longest_first))
    return re.sub(pattern, lambda found: others[found.group()], content)
