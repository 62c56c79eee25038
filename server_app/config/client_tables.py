"""Settings of single clients of a simulation: tables `[client.3]`, checked and written as one key of the run config."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import pairwise
from typing import Any

from pydantic import ValidationError

from tepal.server_app.config.checks import explain
from tepal.server_app.config.run_config import Value, defaults
from tepal.training.node_settings import CLIENT_SETTINGS, NODE_KEYS, NodeSettings, numbers_in

PREFIX = "client."
"""Of keys in the tables."""

_OF_THE_SIMULATION = ("partition-id", "num-partitions", "name", "cache-path")  # other keys of a node config


@dataclass(frozen=True)
class _Setting:
    """One value; it applies to the clients `first` to `last`, and `place` is its key as it was given."""

    first: int
    last: int
    key: str
    value: Value
    place: str


def fold(values: Mapping[str, Any], clients: int | None = None) -> tuple[dict[str, Any], list[str]]:
    """Replace the keys `client.<number>.<key>` of a run config by the key `client-settings`.

    Flower refuses keys that the app's pyproject.toml does not have. Equal settings become equal texts, however they
    were given.

    Args:
        values: of the run config.
        clients: how many a simulation has; None: not known.

    Returns:
        The run config, and a message for each problem with the settings. If there is one, they are left out.
    """
    problems: list[str] = []
    settings: list[_Setting] = []
    for place, number, key, value in _given(values, problems):
        try:
            first, last = numbers_in(number)
        except ValueError as error:
            problems.append(f"{place}: {error}")
            continue
        if clients is not None and last >= clients:
            problems.append(f"{place}: there are {clients} clients, numbered from 0 to {clients - 1}")
        checked, problem = _checked(place, key, value)
        problems += [problem] if problem else []
        if not problem:
            settings.append(_Setting(first, last, key, checked, place))
    problems += _conflicts(settings)
    rest = {key: value for key, value in values.items() if not key.startswith(PREFIX)}
    if settings or CLIENT_SETTINGS in values:
        rest[CLIENT_SETTINGS] = "" if problems or not settings else _as_text(settings)
    return rest, list(dict.fromkeys(problems))


def _given(values: Mapping[str, Any], problems: list[str]) -> Iterator[tuple[str, str, str, Any]]:
    """Yield each setting: its key as it was given, the client's number or range, the key and the value."""
    tables: Any = {}
    if text := values.get(CLIENT_SETTINGS, ""):
        try:
            tables = json.loads(text)
        except (TypeError, ValueError, RecursionError):
            tables = None
        if not isinstance(tables, dict) or not all(isinstance(table, dict) for table in tables.values()):
            problems.append(
                f"{CLIENT_SETTINGS}={text!r}: expected JSON with an object for each client, such as "
                '{"3": {"learning-rate": 0.002}}'
            )
            tables = {}
    for number, table in tables.items():
        for key, value in table.items():
            yield f"{PREFIX}{number}.{key}", number, key, value
    for place, value in values.items():
        if place.startswith(PREFIX):
            number, dot, key = place.removeprefix(PREFIX).partition(".")
            if dot:
                yield place, number, key, value
            else:
                problems.append(f"{place}={value!r}: expected a key after the client, such as {place}.learning-rate")


def _checked(place: str, key: str, value: Any) -> tuple[Value, str]:
    """Return a value as its key's type, and what is wrong with it, or ""."""
    if key in NODE_KEYS:
        try:
            found: dict[str, Value] = NodeSettings.model_validate({key: value}).model_dump(
                by_alias=True, exclude_unset=True
            )
            return found[key], ""
        except ValidationError as error:
            return "", place.removesuffix(key) + explain(NodeSettings, dict(error.errors()[0]))
    if key in _OF_THE_SIMULATION:
        reason = "the simulation sets it for every client: leave it out"
    elif key in defaults():
        reason = f"it is the same for all clients: set {key} without {PREFIX}…; a client may have {_ALLOWED}"
    else:
        near = get_close_matches(key, NODE_KEYS, n=1)
        reason = f"there is no such setting of a client{f': did you mean {near[0]!r}?' if near else ''}"
        reason += f"{'' if near else ':'} allowed are {_ALLOWED}"
    return "", f"{place}={value!r}: {reason}"


_ALLOWED = ", ".join(NODE_KEYS)


def _conflicts(settings: list[_Setting]) -> Iterator[str]:
    """Yield a message for each pair of ranges that give a client two values of one key."""
    ordered = sorted(settings, key=lambda one: (one.key, one.first, one.last))
    reaching: list[_Setting] = []  # those before it that may overlap
    for one in ordered:
        reaching = [other for other in reaching if other.key == one.key and other.last >= one.first]
        for other in reaching:
            if other.value != one.value:
                yield (
                    f"{other.place}={other.value!r} and {one.place}={one.value!r}: client {one.first} would have two "
                    "values: give each client one"
                )
        reaching.append(one)


def _as_text(settings: list[_Setting]) -> str:
    """Return the settings as JSON: ranges of consecutive clients with equal settings, in order."""
    ends = sorted({one.first for one in settings} | {one.last + 1 for one in settings})
    found: list[tuple[int, int, dict[str, Value]]] = []
    for first, following in pairwise(ends):
        own = {one.key: one.value for one in settings if one.first <= first <= one.last}
        own = dict(sorted(own.items()))
        if own and found and found[-1][1] + 1 == first and found[-1][2] == own:
            found[-1] = (found[-1][0], following - 1, own)
        elif own:
            found.append((first, following - 1, own))
    return json.dumps({str(a) if a == b else f"{a}-{b}": own for a, b, own in found})
