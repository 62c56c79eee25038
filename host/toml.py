"""Flat settings, to and from TOML: run configs and node configs, as Flower reads and writes them."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Value = bool | int | float | str

_PAIR = re.compile(r"(\S+?)=('[^']*'|\"[^\"]*\"|\S+)")  # as `flwr run --run-config` splits its argument


def parse_run_config(arguments: Iterable[str]) -> dict[str, Value]:
    """Read run configuration as `flwr run --run-config` takes it: `'lr=0.1 name="x"'` or the path of a TOML file.

    Unlike there, pairs and files mix, and two arguments may set keys of one table (`a.x=1`, then `a.y=2`; Flower keeps
    only the last). Raises `ValueError` for what cannot be read.
    """
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
    """Write flat keys and values as TOML, so that Flower reads back the same values with the same types."""
    lines = []
    for key, value in config.items():
        if isinstance(value, bool):
            text = "true" if value else "false"
        elif isinstance(value, int | float):
            text = repr(value)
        elif isinstance(value, str):
            text = json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
        else:
            raise ValueError(f"run configuration {key} is {value!r}, expected a bool, int, float or str")
        lines.append(f"{key} = {text}\n")
    return "".join(lines)


def flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """Join nested keys with dots, as Flower does with run configuration."""
    values: dict[str, Value] = {}
    for key, value in table.items():
        values |= flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {f"{prefix}{key}": value}
    return values
