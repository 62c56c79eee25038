"""The values of varied keys: of `tepal compare --vary KEY=VALUE,VALUE`, and of the table `[vary]` in a variants file.

On the command line values are TOML with commas between. A text needs quotes only if TOML could read it as something
else, or if it has a comma, a space, a quote or a bracket: `wire-dtype=float32,int8`, `pretrained='"a.pt","b.pt"'`.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tepal.host.text import visible
from tepal.host.toml import Value
from tepal.server_app.config import ConfigError, defaults
from tepal.server_app.config.checks import unknown
from tepal.tools.paths import absolute_paths

Grid = Mapping[str, tuple[Value, ...]]
"""Key of the run config → the values that it has in turn."""

_EXAMPLE = "learning-rate=0.001,0.01"
_BARE = re.compile(r"[A-Za-z_./~][^\s\"'\[\]{},=#]*")
_PAIRS = {"[": "]", "{": "}"}
_NOT_VARIED = {
    "strategy": "name the strategies with --strategies, or in a variants file",
    "seed": "name the seeds with --seeds",
    "runs": "name the folder with -c 'runs=\"FOLDER\"'",
    "resume": "a comparison is resumed with `tepal compare --resume FOLDER`",
}


def read_vary(options: Iterable[str]) -> dict[str, tuple[Value, ...]]:
    """Read the values of `--vary`; relative paths are looked for in the current folder.

    Args:
        options: Texts KEY=VALUE,VALUE, one for each key.

    Raises:
        ConfigError: with all problems: a form that cannot be read, unknown or repeated keys, single or repeated values.
    """
    grid: dict[str, tuple[Value, ...]] = {}
    problems: list[str] = []
    for option in options:
        key, equals, text = (part.strip() for part in option.partition("="))
        if not equals or not key:
            problems.append(f"--vary {_shown(option)}: expected KEY=VALUE,VALUE, such as {_EXAMPLE}")
        elif key in grid:
            problems.append(f"--vary {_shown(option)}: {key} is varied twice: name all its values in one --vary")
        else:
            wrong: list[str] = []
            values = tuple(_read_values(text, wrong))
            wrong = wrong or [*_value_problems(values)]
            problems += [f"--vary {key}: {problem}" for problem in wrong]
            grid[key] = values if wrong else _absolute(key, values, Path())
    problems += [f"--vary: {problem}" for problem in _key_problems(grid)]
    if problems:
        raise ConfigError("\n".join(problems))
    return grid


def read_vary_table(table: Any, folder: Path, problems: list[str]) -> dict[str, tuple[Value, ...]]:
    """Read the table `[vary]` of a variants file, with lists as values.

    Args:
        table: The table as TOML has it, nested or with dotted keys.
        folder: Where relative paths are looked for after the current folder.
        problems: What is wrong is added to it.
    """
    if not isinstance(table, Mapping):
        problems.append(f"vary={table!r} is not a table: write [vary] above the keys")
        return {}
    grid: dict[str, tuple[Value, ...]] = {}
    for key, values in _flat(table):
        if not isinstance(values, list):
            problems.append(f"[vary]: {key}={values!r}: expected a list of values, such as [0.001, 0.01]")
            continue
        wrong = [*_value_problems(values)]
        problems += [f"[vary]: {key}={values!r}: {problem}" for problem in wrong]
        grid[key] = tuple(values) if wrong else _absolute(key, values, Path(), folder)
    problems += [f"[vary]: {problem}" for problem in _key_problems(grid)]
    return grid


def split_values(text: str) -> list[str]:
    """Split a text at the commas that are outside of quotes and brackets.

    Raises ValueError for a quote or a bracket that is not closed, and for a comment.
    """
    parts, part, quote, closing = [], "", "", []  # type: tuple[list[str], str, str, list[str]]
    characters = iter(text)
    for character in characters:
        if character == "," and not quote and not closing:
            parts.append(part.strip())
            part = ""
            continue
        part += character
        if quote:
            if character == "\\" and quote == '"':
                part += next(characters, "")
            elif character == quote:
                quote = ""
        elif character in "\"'":
            quote = character
        elif character == "#":
            raise ValueError("# begins a comment: a text with it needs quotes, also from the shell")
        elif character in _PAIRS:
            closing.append(_PAIRS[character])
        elif closing and character == closing[-1]:
            closing.pop()
    if quote:
        raise ValueError(f"the quote {quote} is not closed")
    if closing:
        raise ValueError(f"a bracket is not closed: {closing[-1]} is missing")
    return [*parts, part.strip()]


def _read_values(text: str, problems: list[str]) -> Iterator[Value]:
    try:
        parts = split_values(text)
    except ValueError as error:
        problems.append(f"{_shown(text)}: {error}")
        return
    for part in parts:
        try:
            yield value_of(part)
        except ValueError as error:
            problems.append(str(error))


def value_of(text: str) -> Value:
    """The value of a text: as TOML reads it, else the text itself if it is a word. Raises ValueError for others."""
    if not text:
        raise ValueError("there is an empty value: expected one before and after each comma; an empty text is '\"\"'")
    if text in ("True", "False"):
        raise ValueError(f'{text} is not a TOML value: write {text.lower()}, or "{text}" for the text')
    value: Any = text
    try:
        if "\n" in text or "\r" in text:
            raise ValueError("a value has one line")
        read = tomllib.loads(f"value = {text}")
        value = read["value"]
    except (ValueError, RecursionError):
        if not _BARE.fullmatch(text):
            raise ValueError(f"{_shown(text)} is not a TOML value; {_quotes(text)}") from None
    if not isinstance(value, bool | int | float | str):
        raise ValueError(
            f"{_shown(text)} is no value of a run config key: expected a number, a text, true or false; {_quotes(text)}"
        )
    return value


def same(first: Value, second: Value) -> bool:
    """Whether two values are one: 1 and 1.0 are, 1 and true are not."""
    return first == second and isinstance(first, bool) == isinstance(second, bool)


def _value_problems(values: Sequence[Any]) -> Iterator[str]:
    wrong = [value for value in values if not isinstance(value, bool | int | float | str)]
    if wrong:
        yield f"{_shown(wrong[0])}: expected numbers, texts, true or false"
    elif len(values) < 2:
        count = "1 value" if values else "no values"
        yield f"{count}, expected at least two; a fixed value is set in the run config"
    else:
        for place, value in enumerate(values):
            if any(same(value, earlier) for earlier in values[:place]):
                yield f"{_shown(value)} is named twice: name each value once"


def _key_problems(keys: Iterable[str]) -> Iterator[str]:
    keys, known = list(keys), defaults()
    yield from (f"{key} cannot be varied: {_NOT_VARIED[key]}" for key in keys if key in _NOT_VARIED)
    yield from unknown(key for key in keys if key not in known)


def _absolute(key: str, values: Sequence[Value], *folders: Path) -> tuple[Value, ...]:
    return tuple(absolute_paths({key: value}, *folders)[key] for value in values)


def _flat(table: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _shown(value: Any) -> str:
    return visible(repr(value), 60)


def _quotes(text: str) -> str:
    """What to write for a text that is not a word."""
    plain = visible(text.strip("\"'"), 60)
    return f"such a text needs quotes, and others for the shell: '\"{plain}\"'"
