"""Columns of tables: heading, unit, and how a value is written for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

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

    A field that is missing or null has its default; a value that no field is declared for is ignored.
    """
    declared = record.__dataclass_fields__  # type: ignore[attr-defined]
    return record(**{name: value for name, value in values.items() if value is not None and name in declared})


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
    return f"{n:,.0f} PB"


def seconds_text(seconds: float | None) -> str:
    """A duration: 1.7 s below a minute, then 2:05 min, then 1:02:05 h; None is unknown."""
    if seconds is None:
        return UNKNOWN
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
    return UNKNOWN if value is None else f"{value:.4f}"
