"""Run configs and node configs: read and written as Flower does it, as a flat mapping."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tomli_w

Value = bool | int | float | str

LONGEST, _MOST_DOTS = 100_000, 200
"""Characters of a TOML text from others, and dots outside of quotes in one of its lines: a long key a.b.c… would take
much memory."""

_QUOTED = re.compile(r"\"(?:\\.|[^\"\\])*\"|'[^']*'")

_PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)")  # the expression of `flwr run --run-config`


def parse_untrusted(content: bytes, longest: int = LONGEST) -> dict[str, Any]:
    """Read a TOML file that somebody else has written. Raises ValueError, whatever is wrong with it."""
    if len(content) > longest:
        raise ValueError(f"it has {len(content)} bytes, at most {longest} are allowed")
    text = content.decode()
    if any(_QUOTED.sub("", line).count(".") > _MOST_DOTS for line in text.splitlines()):
        raise ValueError(f"it has a line with more than {_MOST_DOTS} dots")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("its values are nested too deeply") from None


def separated(text: str) -> tuple[str, ...]:
    """Split a value of the run config at its commas."""
    return tuple(name.strip() for name in text.split(",")) if text.strip() else ()


def parts_of(text: str) -> list[str]:
    """Split a value at its commas, without empty parts."""
    return [part for part in separated(text) if part]


def parse_run_config(arguments: Mapping[str, Value] | Iterable[str]) -> dict[str, Value]:
    """Read run configuration as `flwr run --run-config` takes it: `'lr=0.1 name="x"'` or the path of a TOML file.

    A mapping with flat keys is copied. Unlike there, pairs and files mix, and two arguments may set keys of one table
    (`a.x=1`, then `a.y=2`; Flower keeps only the last). Raises `ValueError` for text that cannot be read.
    """
    if isinstance(arguments, Mapping):
        return dict(arguments)
    config: dict[str, Value] = {}
    for argument in arguments:
        if argument.endswith(".toml"):
            try:
                config |= flat(tomllib.loads(Path(argument).expanduser().read_text(encoding="utf-8")))
            except (OSError, ValueError) as error:
                raise ValueError(f"run configuration {argument} cannot be read: {error}") from error
            continue
        pairs = _PAIR.findall(argument)
        if not pairs or _PAIR.sub("", argument).strip():
            raise ValueError(f"run configuration {argument!r} is not of the form 'key=1 other=\"text\"'")
        for key, value in pairs:
            try:
                config |= flat(tomllib.loads(f"{key} = {value}"))
            except tomllib.TOMLDecodeError as error:
                raise ValueError(
                    f"run configuration {key}={value}: {value} is not a TOML value; text needs quotes: {key}='...'"
                ) from error
    return config


def to_toml(config: Mapping[str, Value]) -> str:
    """Return flat keys and values as TOML from which Flower reads the same values with the same types.

    Raises `ValueError` for a value of a type that Flower does not take.
    """
    for key, value in config.items():
        if not isinstance(value, bool | int | float | str):
            raise ValueError(f"run configuration {key} is {value!r}, expected a bool, int, float or str")
    return tomli_w.dumps(config)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Return the values of nested tables under keys joined with dots, as Flower does."""
    values: dict[str, Value] = {}
    for key, value in table.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values
