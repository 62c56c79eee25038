"""Columns of tables: heading, unit, and how a value is written for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Any, TypeVar

from tepal.host.text import visible

UNKNOWN = "unknown"

T = TypeVar("T")


@dataclass(frozen=True)
class Column:
    """A column of a table.

    Args:
        heading: What it contains, without the unit.
        key: Its name in CSV and JSON, and the key of its values in the records that the rows are made from.
        unit: Shown in parentheses after the heading.
        text: Writes a value for people; None and "" are not passed to it.
        left: Whether it is aligned to the left, as text is.
    """

    heading: str
    key: str = ""
    unit: str = ""
    text: Callable[[Any], str] = str
    left: bool = False

    @property
    def title(self) -> str:
        """The heading with its unit."""
        return f"{self.heading} ({self.unit})" if self.unit else self.heading


def column(
    heading: str = "",
    unit: str = "",
    text: Callable[[Any], str] = str,
    *,
    left: bool = False,
    optional: bool = False,
    **default: Any,
) -> Any:
    """Declare a dataclass field as a column: its default is None unless `default` says otherwise.

    Args:
        heading, unit, text, left: As of `Column`.
        optional: Whether it is left out of a line, and not written as null, where it has no value.
        default: `default` or `default_factory` of `dataclasses.field`.
    """
    metadata = {"column": Column(heading, unit=unit, text=text, left=left), "optional": optional}
    return field(**(default or {"default": None}), metadata=metadata)


def columns_of(record: type) -> dict[str, Column]:
    """Return the columns that a dataclass declares by `column`, in their order; keys are the fields' names."""
    declared = ((each.name, each.metadata["column"]) for each in fields(record) if "column" in each.metadata)
    return {name: replace(column, key=name) for name, column in declared}


def from_values(record: type[T], values: Mapping[str, Any]) -> T:
    """Make a dataclass from an object of a JSON file, also of one that another version wrote.

    A field that is missing, null, NaN, infinite or larger than 1e300 has its default, and so has a list that contains
    such a number; a value that no field is declared for is ignored.
    Raises ValueError for a value of another type than its field's.
    """
    if not isinstance(values, Mapping):
        raise ValueError(f"{_quoted(values)} is not an object")
    kinds = _kinds(record)  # type: ignore[arg-type]  # a class is hashable
    read = {name: _read(name, value, kinds[name]) for name, value in values.items() if name in kinds}
    return record(**{name: value for name, value in read.items() if value is not None})


@cache
def _kinds(record: type) -> dict[str, str]:
    """Field → what it contains: number, text, true or false, incidents, numbers, or an object."""
    kinds = {}
    for each in fields(record):
        declared = str(each.type).removesuffix(" | None")
        kinds[each.name] = _KINDS[declared.partition("[")[0] if declared.startswith("dict") else declared]
    return kinds


_KINDS = {
    "int": "a number", "float": "a number", "str": "text", "bool": "true or false", "dict": "an object",
    "Sequence[float]": "a list of numbers", "Sequence[Incident]": "a list of incidents",
}  # fmt: skip
_QUOTED = 60  # characters of a wrong value in an error


def _read(name: str, value: Any, kind: str) -> Any:
    """The value of a field, None for none. Raises ValueError for one of another type."""
    match kind:
        case _ if value is None:
            return None
        case "a number" if is_number(value):
            return value if abs(value) <= _LARGEST else None
        case "text" if isinstance(value, str):
            return value
        case "true or false" if isinstance(value, bool):
            return value
        case "an object" if isinstance(value, Mapping):
            return value
        case "a list of numbers" if isinstance(value, list | tuple) and all(map(_is_number_or_null, value)):
            return value if all(each is not None and abs(each) <= _LARGEST for each in value) else None
        case "a list of incidents" if isinstance(value, list | tuple) and all(map(_is_incident, value)):
            return value
    raise ValueError(f"its {name} is {_quoted(value)}, expected {kind}")


def _quoted(value: Any) -> str:
    return visible(repr(value), _QUOTED) if isinstance(value, str | int | float) else type(value).__name__


def is_number(value: Any) -> bool:
    """Whether a value of a JSON file is a number (an integer of at most 1e300, whose sums are floats, too)."""
    if isinstance(value, int):
        return not isinstance(value, bool) and abs(value) <= _LARGEST
    return isinstance(value, float)


def _is_number_or_null(value: Any) -> bool:
    """Whether a value is a number, or null, as NaN and infinity are written."""
    return value is None or is_number(value)


_LARGEST = 10**300  # so that sums of many are floats, too


def _is_incident(value: Any) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(value.get(key), str | None) for key in ("client", "reason")
    )


def count_text(values: list[Any]) -> str:
    """The length of a list, such as that of the clients that were lost."""
    return str(len(values))


def bytes_text(n: float | None) -> str:
    """Bytes in decimal units with three figures: 999 B, 1.00 kB, 41.2 MB, 1.05 GB; None is unknown."""
    if n is None:
        return UNKNOWN
    if abs(n) < 999.5:
        return f"{n:.0f} B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        n /= 1000
        # Rounded first: 999,999 bytes are 1.00 MB, not 1000 kB.
        for decimals in (2, 1, 0):
            text = f"{n:.{decimals}f}"
            if abs(float(text)) < 10 ** (3 - decimals):
                return f"{text} {unit}"
    return f"{n:,.0f} PB" if abs(n) < _LONG else f"{n:.3g} PB"


_LONG = 1e6  # numbers from here on are written with an exponent, so that none is hundreds of digits long


def seconds_text(seconds: float | None) -> str:
    """A duration: 1.7 s below a minute, then 2:05 min, then 1:02:05 h; None is unknown."""
    if seconds is None:
        return UNKNOWN
    if abs(seconds) >= _LONG**2:
        return f"{seconds:.3g} s"
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h" if hours else f"{minutes}:{rest:02} min"


def step_text(seconds: float | None) -> str:
    """The duration of a local step, three figures below a second: 12.3 ms, 1.7 s; None is unknown."""
    return f"{1000 * seconds:.3g} ms" if seconds is not None and seconds < 0.9995 else seconds_text(seconds)


def score_text(value: float | None) -> str:
    """An accuracy, an error or a loss with four decimals; None is unknown."""
    if value is None:
        return UNKNOWN
    return f"{value:.4f}" if abs(value) < _LONG else f"{value:.4g}"
