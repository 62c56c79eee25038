"""Damaged and hostile inputs: mutations of valid bytes and of valid JSON values."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from random import Random
from typing import Any

from hypothesis import strategies as st

_DIGITS, _DEEP, _TWICE = "@digits@", "@deep@", "@twice@"
_LITERALS = {f'"{_DIGITS}"': "1" * 5000, f'"{_DEEP}"': "[" * 100_000 + "]" * 100_000, f'"{_TWICE}"': '{"a":1,"a":"b"}'}
"""What `json.dumps` cannot write."""

HOSTILE = (
    *(None, True, False, 0, -1, 1, 0.5, -0.0, 2**31, 2**48, 2**63, 2**64, -(2**63), 10**400, 1e308, float("nan")),
    *(float("inf"), "", "a", "\ud800", "\0", "all", "x" * 10_000, "../../etc/passwd", "float32", "object", "é"),
    *([], [[]], [None], [0] * 1000, [-1, 2], [2**40, 2**40], ["a", "a"], {}, {"": {}}, {"a": None}, {"\ud800": 1}),
    *(_DIGITS, _DEEP, _TWICE),
)


def text_of(value: Any) -> bytes:
    """JSON text in which the markers in `HOSTILE` are replaced by what they stand for."""
    text = json.dumps(value)
    for marker, literal in _LITERALS.items():
        text = text.replace(marker, literal)
    return text.encode()


def changed_json(value: Any, at_random: Random) -> Any:
    """A copy with up to three values replaced, removed, repeated, exchanged or wrapped."""
    value = copy.deepcopy(value)
    for _ in range(at_random.choice((1, 1, 1, 2, 3))):
        places: list[tuple[Any, Any]] = []
        _collect(value, places)
        if not places:
            return at_random.choice(HOSTILE)
        inside, key = at_random.choice(places)
        match at_random.randrange(6):
            case 0:
                del inside[key]
            case 1 if isinstance(inside, list):
                inside.insert(at_random.randrange(len(inside) + 1), copy.deepcopy(inside[key]))
            case 2:
                other, place = at_random.choice(places)
                inside[key] = copy.deepcopy(other[place])
            case 3:
                inside[key] = [inside[key]] if at_random.random() < 0.5 else {"a": inside[key]}
            case _:
                inside[key] = copy.deepcopy(at_random.choice(HOSTILE))
    return value


def _collect(value: Any, places: list[tuple[Any, Any]]) -> None:
    if isinstance(value, dict | list):
        for key in value if isinstance(value, dict) else range(len(value)):
            places.append((value, key))
            _collect(value[key], places)


def changed_bytes(data: bytes, at_random: Random) -> bytes:
    """A copy with up to three changes: bits flipped, a piece cut, repeated, overwritten or moved."""
    found = bytearray(data)
    for _ in range(at_random.choice((1, 1, 1, 2, 3))):
        first, second = sorted(at_random.randrange(len(found) + 1) for _ in range(2))
        match at_random.randrange(6):
            case 0 if found:
                found[at_random.randrange(len(found))] ^= 1 << at_random.randrange(8)
            case 1:
                del found[first:second]
            case 2:
                del found[first:]
            case 3:
                found[first:first] = found[first:second]
            case 4:
                found[first : first + 8] = at_random.choice((b"\xff" * 8, b"\0" * 8, at_random.randbytes(8)))
            case _:
                found[first:second] = at_random.randbytes(min(second - first, 64))
    return bytes(found)


def inputs(*makers: Callable[[Random], bytes]) -> st.SearchStrategy[bytes]:
    """Random bytes, and what the makers make of a source of random numbers."""
    made = st.tuples(st.sampled_from(makers), st.integers(0, 2**64 - 1)).map(lambda drawn: drawn[0](Random(drawn[1])))
    return st.one_of(made, made, made, st.binary(max_size=400))


def of_bytes(data: bytes) -> Callable[[Random], bytes]:
    return lambda at_random: changed_bytes(data, at_random)


def of_json(value: Any, write: Callable[[bytes], bytes] = bytes) -> Callable[[Random], bytes]:
    """`write`: from the text of the changed value to the bytes that are read."""
    return lambda at_random: write(text_of(changed_json(value, at_random)))
